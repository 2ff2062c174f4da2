"""Read documents from text, JSONL and parquet files, streaming and in a fixed order."""

import dataclasses
import difflib
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow
import pyarrow.parquet

SUFFIXES = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"}
COMPRESSIONS = (".gz", ".zst")


class CorpusError(ValueError):
    """Input text that cannot be used; the message says which file and line."""


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How files become documents.

    A plain text file is one document unless one of the two regular expressions is set; each must
    match a whole line. A `separator` line divides two documents and is dropped. A `start` line
    begins a document and is kept; what stands before the first one belongs to the first document.
    """

    text_key: str = "text"  # JSONL field or parquet column
    separator: str | None = None
    start: str | None = None
    max_document_bytes: int = 64 << 20  # a document is held in memory whole

    def __post_init__(self) -> None:
        if self.separator is not None and self.start is not None:
            raise CorpusError("set a document separator or a document start, not both")
        for pattern in (self.separator, self.start):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise CorpusError(f"{pattern!r} is not a regular expression: {error}") from None


@dataclasses.dataclass(frozen=True)
class Source:
    """One input file and what it held when it was hashed."""

    path: str
    bytes: int
    modified_ns: int
    sha256: str


_CORPORA = Path(__file__).resolve().parent / "corpora"
BUNDLED = {"austen": (_CORPORA / "austen", ReadOptions(start=r"(?i:chapter) [IVXL\d]+"))}


def file_kind(path: Path) -> str | None:
    """`text`, `jsonl` or `parquet` by the file name, or None for any other file."""
    if path.suffix == ".parquet":
        return "parquet"
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    return SUFFIXES.get(path.suffix)


def find_files(inputs: Sequence[str]) -> tuple[list[Path], ReadOptions]:
    """The files that `inputs` name, and the read options that suit them.

    An input is a file, a folder (searched for known file types, in sorted order; README and
    LICENSE files are left out) or the name of a bundled corpus, which must then be the only one.
    """
    if len(inputs) == 1 and inputs[0] in BUNDLED:
        folder, options = BUNDLED[inputs[0]]
        return sorted(folder.glob("*.txt")), options
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*")) if p.is_file() and file_kind(p)]
            found = [p for p in found if p.stem.upper() not in ("README", "LICENSE")]
            if not found:
                raise CorpusError(f"no text, JSONL or parquet file in the folder {name}")
            files += found
        elif path.is_file():
            if file_kind(path) is None:
                known = ", ".join([*SUFFIXES, ".parquet"])
                raise CorpusError(
                    f"{name}: unknown file type; known: {known} (text and JSONL also .gz, .zst)"
                )
            files.append(path)
        else:
            close = difflib.get_close_matches(name, BUNDLED)
            hint = f"; did you mean the bundled corpus {close[0]!r}?" if close else ""
            bundled = ", ".join(BUNDLED)
            raise CorpusError(f"{name}: no such file, folder or bundled corpus ({bundled}){hint}")
    resolved = [path.resolve() for path in files]
    for path in files:
        if resolved.count(path.resolve()) > 1:
            raise CorpusError(f"{path} is named more than once")
    return files, ReadOptions()


def fingerprint(path: Path) -> Source:
    """Size, modification time and SHA-256 of a file."""
    stat = path.stat()
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Source(str(path.resolve()), stat.st_size, stat.st_mtime_ns, digest)


def read_documents(path: Path, options: ReadOptions) -> Iterator[tuple[str, str]]:
    """Yield (text, place) of each document of a file in order; `place` is `file:line`.

    Text is exactly what the file holds: no newline translation, no normalisation.

    Raises:
        CorpusError: unreadable content, with the file and line.
    """
    kind = file_kind(path)
    reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}[kind or "text"]
    for text, place in reader(path, options):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise CorpusError(
                f"{place}: the text holds a lone surrogate, which is not Unicode"
            ) from None
        if size > options.max_document_bytes:
            raise _too_long(place, options)
        yield text, place


def _too_long(place: str, options: ReadOptions) -> CorpusError:
    return CorpusError(
        f"{place}: a document is longer than {options.max_document_bytes:,} bytes; split it with "
        "--document-separator or --document-start, or raise --max-document-bytes"
    )


def _open(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed as its suffix says."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    if path.suffix == ".zst":
        # Arrow reports a truncated stream as an error; zstandard's reader just ends there.
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), 1 << 20)
    return open(path, "rb", buffering=1 << 20)


def _lines(path: Path, options: ReadOptions) -> Iterator[tuple[str, int]]:
    """Yield (line with its end, line number from 1), never holding more than the longest line."""
    number = 0
    limit = 2 * options.max_document_bytes + 1  # JSON escapes lengthen a line
    try:
        with _open(path) as file:
            while raw := file.readline(limit):
                number += 1
                if len(raw) == limit:
                    raise _too_long(f"{path}:{number}", options)
                yield raw.decode(), number
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be read: {error}") from None


def _read_text(path: Path, options: ReadOptions) -> Iterator[tuple[str, str]]:
    pattern = options.separator or options.start
    match = re.compile(pattern).fullmatch if pattern else None
    document: list[str] = []
    size, first_line, started = 0, 1, False
    for line, number in _lines(path, options):
        if match and match(line.rstrip("\r\n")):
            # The lines before the first start line stay with the document that it begins.
            if options.separator or started:
                yield "".join(document), f"{path}:{first_line}"
                document, size, first_line = [], 0, number
            started = True
            if options.separator:
                first_line += 1
                continue
        document.append(line)
        size += len(line)
        if size > options.max_document_bytes:
            raise _too_long(f"{path}:{first_line}", options)
    if document:
        yield "".join(document), f"{path}:{first_line}"


def _read_jsonl(path: Path, options: ReadOptions) -> Iterator[tuple[str, str]]:
    for line, number in _lines(path, options):
        if line.isspace():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{place}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: expected a JSON object, got {type(record).__name__}")
        yield _text_field(record, options, place), place


def _text_field(record: dict[str, Any], options: ReadOptions, place: str) -> str:
    key = options.text_key
    if key not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise CorpusError(f"{place}: no field {key!r}; fields: {fields} (--text-key)")
    text = record[key]
    if not isinstance(text, str):
        raise CorpusError(f"{place}: field {key!r} is {type(text).__name__}, not a string")
    return text


def _read_parquet(path: Path, options: ReadOptions) -> Iterator[tuple[str, str]]:
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if options.text_key not in names:
                columns = ", ".join(map(repr, names))
                raise CorpusError(
                    f"{path}: no column {options.text_key!r}; columns: {columns} (--text-key)"
                )
            for batch in file.iter_batches(batch_size=256, columns=[options.text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = f"{path}:{row}"
                    yield _text_field({options.text_key: text}, options, place), place
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: cannot be read as parquet: {error}") from None


def reference_bits_per_byte(
    train_texts: Iterable[str], validation_texts: Iterable[str]
) -> dict[str, float]:
    """What simple compressors pay for the validation text, in bits per UTF-8 byte.

    `order2`: a byte model with two bytes of context, counted on the training documents and then
    frozen. Orders are blended by Witten and Bell's rule: with n(c) the occurrences of context c,
    n(c,b) those followed by byte b and d(c) the number of distinct bytes seen after c,

        p_k(b | c) = (n(c,b) + d(c) p_{k-1}(b | shorter c)) / (n(c) + d(c)),

    down to p_0(b) = (n(b) + 1) / (n + 256); an unseen context passes to the shorter one. Contexts
    do not cross documents: the first byte of a document has order 0 and the second order 1.
    `gzip` (level 9) and `xz` (preset 9 extreme) compress the concatenated validation documents
    alone, knowing nothing of the training text.

    Raises:
        CorpusError: there is no training or no validation text.
    """
    counts = _OrderTwoCounts()
    for text in train_texts:
        counts.add(text.encode())
    validation = [text.encode() for text in validation_texts]
    joined = b"".join(validation)
    if not joined or not counts.total:
        raise CorpusError("reference costs need training and validation text")
    return {
        "order2": sum(map(counts.bits, validation)) / len(joined),
        "gzip": 8 * len(gzip.compress(joined, 9, mtime=0)) / len(joined),
        "xz": 8 * len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) / len(joined),
    }


class _OrderTwoCounts:
    """Byte counts of orders 0 to 2 (67 MB), and the cost in bits that they give a text."""

    def __init__(self) -> None:
        self.by_order = [np.zeros(256 ** (order + 1), np.uint32) for order in range(3)]

    @property
    def total(self) -> int:
        return int(self.by_order[0].sum(dtype=np.int64))

    @staticmethod
    def _symbols(text: bytes, order: int) -> np.ndarray:
        """Index of (context, byte) for each position that has `order` bytes of context."""
        data = np.frombuffer(text, np.uint8).astype(np.int64)
        index = data[order:]
        for back in range(1, order + 1):
            index = index + (data[order - back : len(data) - back] << 8 * back)
        return index

    def add(self, text: bytes) -> None:
        for order, counts in enumerate(self.by_order):
            np.add.at(counts, self._symbols(text, order), np.uint32(1))

    def bits(self, text: bytes) -> float:
        probability = (self.by_order[0] + 1.0) / (self.total + 256.0)
        per_byte = probability[self._symbols(text, 0)]
        for order in (1, 2):
            table = self.by_order[order].reshape(-1, 256)
            index = self._symbols(text, order)
            contexts, inverse = np.unique(index >> 8, return_inverse=True)
            rows = table[contexts]
            seen = rows.sum(1, dtype=np.float64)[inverse]
            distinct = np.count_nonzero(rows, axis=1).astype(np.float64)[inverse]
            blended = self.by_order[order][index] + distinct * per_byte[order:]
            mixed = blended / np.maximum(seen + distinct, 1.0)
            per_byte[order:] = np.where(seen > 0, mixed, per_byte[order:])
        return float(-np.log2(per_byte).sum())
