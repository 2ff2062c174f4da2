"""Tokenised datasets on disk: Megatron's `.bin`/`.idx` pair, memory mapped, with a manifest.

`PREFIX.bin` is the raw token stream. `PREFIX.idx`, little-endian: 9 bytes magic, version u64, type
code u8, sequence count u64, document count + 1 u64; then int32 token counts and int64 byte
offsets of the sequences, and int64 first sequence of each document, closed by the sequence count.
Beside them this project writes `PREFIX.manifest.json` (what the pair was made from, with hashes)
and `PREFIX.bytes.npy` (int64 UTF-8 bytes of each document's text, before tokenisation).
"""

import bisect
import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from data_tools.manifest import (
    DatasetError,
    HashingFile,
    Manifest,
    file_sha256,
    text_bytes,
    with_suffix,
)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest type for ids below `vocab_size`, by Megatron's rule: uint16 below 65,500."""
    if not 0 < vocab_size <= np.iinfo(np.int32).max:
        raise DatasetError(f"vocabulary size {vocab_size:,} does not fit 32-bit token ids")
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def map_tokens(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The tokens of a non-empty file, [tokens], memory mapped and read-only."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Reads come in random order: reading ahead would cost 100 times the read itself (cold).
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair that appears complete or not at all.

        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add(tokens)

    Leaving the block normally publishes the pair; leaving it by an exception removes every trace.
    One document is one sequence. Memory: 4 bytes per document.
    """

    def __init__(self, prefix: str | Path, dtype: Any) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        codes = [code for code, known in DTYPES.items() if self.dtype == known]
        if not codes or self.dtype.kind not in "iu":
            raise DatasetError(f"token type {self.dtype} is not one that .idx files know")
        self._code = codes[0]
        self._lengths: list[np.ndarray] = []
        self.tokens = 0
        self.files: dict[str, dict[str, Any]] = {}
        self._bin = HashingFile(with_suffix(self.prefix, ".bin"))

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, integer ids [length]."""
        self.add_many(tokens, np.array([len(tokens)]))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append several documents: their ids one after the other, and their lengths.

        Raises:
            DatasetError: an id that the token type cannot hold, or an empty document.
        """
        tokens, lengths = np.asarray(tokens), np.asarray(lengths)
        if len(lengths) == 0 or lengths.min() < 1:
            raise DatasetError(f"{self.prefix}: a document without tokens cannot be stored")
        if lengths.max() > np.iinfo(np.int32).max:
            raise DatasetError(
                f"{self.prefix}: a document has {lengths.max():,} tokens, over 2^31 - 1"
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or lengths.sum() != len(tokens):
            raise DatasetError(f"{self.prefix}: lengths do not add up to the integer ids [length]")
        limits = np.iinfo(self.dtype)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > limits.max:
            raise DatasetError(
                f"{self.prefix}: token id {low if low < 0 else high} is outside {self.dtype} "
                f"[0, {limits.max}]"
            )
        self._bin.write(tokens.astype(self.dtype, copy=False))
        self._lengths.append(lengths.astype(np.int32))
        self.tokens += len(tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._bin.discard()
        else:
            self._finish()

    def _finish(self) -> None:
        index = None
        try:
            if not self._lengths:
                raise DatasetError(f"{self.prefix}: no documents to write")
            lengths = np.concatenate(self._lengths)
            count = len(lengths)
            index = HashingFile(with_suffix(self.prefix, ".idx"))
            index.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
            index.write(lengths)
            ends = np.cumsum(lengths, dtype=np.int64)
            ends *= self.dtype.itemsize
            index.write(np.zeros(1, np.int64))
            index.write(ends[:-1])
            index.write(np.arange(count + 1, dtype=np.int64))
            # The data first: an index never points at tokens that are not there.
            self.files[".bin"] = self._bin.publish()
            self.files[".idx"] = index.publish()
        except BaseException:
            self._bin.discard()
            if index is not None:
                index.discard()
            raise


class IndexedReader:
    """Random access to the token stream of a `.bin`/`.idx` pair, ours or Megatron's.

    Both files are memory mapped and opening takes a few checks, whatever the size. Instances can
    be pickled (the files are mapped again) and shared by threads.

    Attributes:
        prefix: path without suffix.
        dtype: type of the stored ids, always as the header says.
        num_documents, num_tokens: totals.
        manifest: the manifest beside the pair, or None for a pair that other tools wrote.

    Raises:
        DatasetError: a missing, truncated, foreign or inconsistent file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DatasetError(f"{path}: no such file")
        index = np.memmap(idx_path, np.uint8, mode="r") if idx_path.stat().st_size else np.empty(0)
        sequences, entries = self._read_header(idx_path, index)
        bounds = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * entries]).tolist()
        if len(index) != bounds[-1]:
            kind = "truncated" if len(index) < bounds[-1] else "longer than its header says"
            raise DatasetError(f"{idx_path}: {kind}: {len(index):,} bytes, expected {bounds[-1]:,}")
        self._lengths = index[bounds[0] : bounds[1]].view(np.ndarray).view("<i4")
        self._offsets = index[bounds[1] : bounds[2]].view(np.ndarray).view("<i8")
        documents = index[bounds[2] : bounds[3]].view(np.ndarray).view("<i8")

        size = bin_path.stat().st_size
        expected = int(self._offsets[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if size != expected:
            kind = "truncated" if size < expected else "longer than its index"
            raise DatasetError(
                f"{bin_path}: {kind}: {size:,} bytes, {idx_path.name} says {expected:,}"
            )
        if size == 0:
            raise DatasetError(f"{bin_path}: holds no tokens")
        self.num_tokens = size // self.dtype.itemsize
        self._tokens = map_tokens(bin_path, self.dtype)
        self._starts = self._document_starts(idx_path, documents)
        self.num_documents = len(self._starts)
        self._check_manifest()

    def _check_manifest(self) -> None:
        """A pair that was replaced without its manifest is found by its size, at no cost."""
        self.manifest: Manifest | None = None
        if not with_suffix(self.prefix, ".manifest.json").exists():
            return
        self.manifest = Manifest.load(self.prefix)
        for suffix in (".bin", ".idx"):
            path, recorded = with_suffix(self.prefix, suffix), self.manifest.files[suffix]["bytes"]
            if path.stat().st_size != recorded:
                raise DatasetError(
                    f"{path}: {path.stat().st_size:,} bytes, but its manifest says {recorded:,}; "
                    "it was replaced or damaged: prepare it again"
                )

    def _read_header(self, path: Path, index: np.ndarray) -> tuple[int, int]:
        if len(index) < HEADER.size:
            raise DatasetError(
                f"{path}: truncated: {len(index)} bytes, the header alone has {HEADER.size}"
            )
        magic, version, code, sequences, entries = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise DatasetError(f"{path}: not a Megatron index (it begins with {magic!r})")
        if version != VERSION:
            raise DatasetError(f"{path}: index version {version}, expected {VERSION}")
        if code not in DTYPES or np.dtype(DTYPES[code]).kind not in "iu":
            raise DatasetError(f"{path}: type code {code} is not an integer token type")
        if sequences == 0 or entries < 2:
            raise DatasetError(f"{path}: holds no documents")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        return sequences, entries

    def _document_starts(self, path: Path, documents: np.ndarray) -> np.ndarray:
        """Byte offset of each document: the mapped sequence offsets where the two coincide."""
        sequences = len(self._lengths)
        if documents[0] != 0 or documents[-1] != sequences:
            raise DatasetError(
                f"{path}: documents cover sequences {documents[0]} to {documents[-1]}, "
                f"expected 0 to {sequences}"
            )
        plain = len(documents) == sequences + 1
        for begin in range(0, len(documents), 1 << 20):
            if not plain:
                break
            part = documents[begin : begin + (1 << 20)]
            plain = bool((part == np.arange(begin, begin + len(part))).all())
        if plain:
            return self._offsets
        ends = np.append(self._offsets, self.num_tokens * self.dtype.itemsize)
        return np.unique(ends[documents])[:-1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.prefix,))

    @property
    def document_offsets(self) -> np.ndarray:
        """First token of each document and the total, int64 [documents + 1]; a copy."""
        starts = self._starts // self.dtype.itemsize
        return np.append(starts, self.num_tokens).astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]; a copy."""
        return np.diff(self.document_offsets)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count of the stream, across documents: a read-only view.

        Raises:
            DatasetError: the range leaves the stream.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise DatasetError(
                f"{self.prefix}: tokens {start:,} to {start + count:,} are outside the stream of "
                f"{self.num_tokens:,}"
            )
        return self._tokens[start : start + count]

    def document_of(self, token: int) -> int:
        """Index of the document that holds a token of the stream; O(log documents)."""
        # bisect reads single items: numpy.searchsorted would first copy the whole array, because
        # the header's 34 bytes leave the mapped offsets unaligned.
        return bisect.bisect_right(self._starts, token * self.dtype.itemsize) - 1

    def document_spans(self, start: int, count: int) -> tuple[int, np.ndarray]:
        """Documents that tokens start .. start + count belong to.

        Returns the index of the first document and the number of tokens of each document inside
        the range, int64 [documents touched], which add up to `count`.
        """
        first, last = self.document_of(start), self.document_of(start + count - 1)
        begins = self._starts[first + 1 : last + 1] // self.dtype.itemsize
        return first, np.diff(begins, prepend=start, append=start + count)


def verify(prefix: str | Path) -> Manifest:
    """Read every byte of a dataset and compare it with its manifest.

    Raises:
        DatasetError: all differences in one message.
    """
    manifest = Manifest.load(prefix)
    problems = []
    for suffix, expected in manifest.files.items():
        path = with_suffix(prefix, suffix)
        if not path.is_file():
            problems.append(f"{path}: no such file")
            continue
        digest = file_sha256(path)
        if digest != expected["sha256"]:
            problems.append(f"{path}: contents differ from the manifest (sha256 {digest[:12]}...)")
    if not problems:
        reader = IndexedReader(prefix)
        offsets = reader.document_offsets
        if np.diff(offsets).min() < 1:
            problems.append(f"{prefix}.idx: document offsets do not increase")
        totals = (reader.num_documents, reader.num_tokens, int(text_bytes(prefix).sum()))
        if totals != (manifest.documents, manifest.tokens, manifest.text_bytes):
            problems.append(f"{prefix}: documents, tokens, bytes are {totals}, not the manifest's")
    if problems:
        raise DatasetError("; ".join(problems))
    return manifest
