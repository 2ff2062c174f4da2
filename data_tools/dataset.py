"""Make a train and a validation dataset from a corpus: one shuffle, one atomic publication.

Everything is written into `OUT.partial` and renamed to OUT at the end, so that OUT is complete or
not there. After an interruption the same request goes on from the finished shards; its result is
the same bytes for any number of workers and interruptions. Memory: a few shards of text, and
about 80 bytes per document while the documents are shuffled.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from data_tools import corpus, tokenizers
from data_tools.blend import permute
from data_tools.indexed import IndexedWriter, token_dtype
from data_tools.manifest import Manifest, with_suffix, write_array, write_atomic
from data_tools.request import SPLITS, Job, PrepareError, Request, differences, status
from data_tools.tokenize import (
    ShardSettings,
    encode_corpus,
    gather,
    read_texts,
    split_hash,
    tokenizer_threads,
)
from data_tools.tokenizers import TextTokenizer

# Called with the characters to expect (None: unknown); gives a function that is called with the
# characters just done.
Progress = Callable[[int | None], contextlib.AbstractContextManager[Callable[[int], None]]]
_WRITE_TOKENS = 1 << 22
_REFERENCE_BYTES = {"train": 64 << 20, "validation": 16 << 20}


def prepare(
    request: Request,
    out: Path,
    *,
    workers: int,
    force: bool = False,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Make the datasets OUT/train and OUT/validation; returns their manifests.

    An OUT made by the same request from the same files is left as it is; one whose files changed
    is made again.

    Args:
        workers: encoding processes; 1 works in this process.
        force: replace an OUT that another request made.
        say: called with each line of the report.

    Raises:
        PrepareError, CorpusError, TokenizerError, DatasetError: nothing was published and no
            work folder is left.
        KeyboardInterrupt: finished shards are kept.
    """
    state = status(request, out)
    if state == "foreign":
        raise PrepareError(f"{out} exists and was not made by prepare: choose another folder")
    if state == "other" and not force:
        raise PrepareError(
            f"{out} was made by another request ({differences(request, out)}): choose another "
            "folder, or replace it with --force"
        )
    if state == "current" and not force:
        say(f"{out} is up to date")
        return {split: Manifest.load(out / split) for split in SPLITS if _has(out, split)}
    if state == "changed":
        say(f"{out} is out of date (its sources changed or its files are damaged): making it again")
    if os.path.ismount(out):
        raise PrepareError(
            f"{out} is a mount point, which cannot be renamed: choose a folder in it"
        )
    work = with_suffix(out, ".partial")
    _check_work(work)
    with _locked(work, out):
        try:
            final = _make(request, work, workers, say, progress or _no_progress)
            _publish(final, out, work)
        except (OSError, ValueError, BrokenProcessPool) as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, BrokenProcessPool):
                raise PrepareError("a worker process was killed (out of memory?)") from None
            if isinstance(error, OSError):
                name = f"{error.filename}: " if error.filename else ""
                raise PrepareError(f"cannot write {out}: {name}{error.strerror or error}") from None
            raise
    return {split: Manifest.load(out / split) for split in SPLITS if _has(out, split)}


def _has(folder: Path, split: str) -> bool:
    return with_suffix(folder / split, ".manifest.json").exists()


@contextlib.contextmanager
def _no_progress(expected: int | None) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@contextlib.contextmanager
def _locked(work: Path, out: Path) -> Iterator[None]:
    """Hold the work folder for this process; the lock ends with it, however it ends."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise PrepareError(f"cannot write {work}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PrepareError(f"another process is preparing {out}") from None
        yield


def _make(
    request: Request, work: Path, workers: int, say: Callable[[str], None], progress: Progress
) -> Path:
    """Fill the work folder up to its `final` folder, which is then ready to be published."""
    job = _begin(request, work, say)
    tokenizer = _tokenizer(request, work, workers, _size(job))
    say(
        f"tokenizer: {tokenizer.name}, vocabulary {tokenizer.vocab_size:,}, "
        f"end of text {tokenizer.eos_id}"
    )
    tokens, records, empty = _encode(job, request, work, workers, progress, tokenizer.vocab_size)
    if empty:
        say(f"{empty:,} empty documents were left out")
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    threshold = _threshold(records, request.validation_fraction)
    texts = _reference_texts(request, threshold)
    short = [text for text in (*texts["validation"], *texts["train"]) if len(text) < 1 << 20]
    for warning in tokenizers.audit(tokenizer, short[:20]):
        say(f"note: {warning}")
    starts = np.cumsum(records["tokens"]) - records["tokens"]
    for split in SPLITS:
        order = _order(records, threshold, request.seed, split)
        if not len(order):
            continue
        files = _write_split(final / split, tokens, starts[order], records[order])
        manifest = _manifest(request, job, tokenizer, split, records[order], files, empty, texts)
        manifest.save(final / split)
        say(describe(split, manifest))
    tokenizer.save(final)
    write_atomic(final / "prepare.json", job.encode())
    return final


def _begin(request: Request, work: Path, say: Callable[[str], None]) -> Job:
    """Read the sources' hashes; keep what an interrupted run of the same job left, and no other."""
    job = Job(request.identity(), [corpus.fingerprint(path) for path in request.files])
    say(f"corpus: {len(request.files)} files, {_size(job):,} bytes")
    shards = work / "shards"
    before = Job.load(work / "job.json")
    if before is not None and before.same_contents(job):
        say(f"continuing an interrupted run: {len(list(shards.glob('*.npy')))} shards are finished")
    else:
        _clear(work)
        shards.mkdir()
        write_atomic(work / "job.json", job.encode())
    return job


def _size(job: Job) -> int:
    return sum(source.bytes for source in job.sources)


def _encode(
    job: Job, request: Request, work: Path, workers: int, progress: Progress, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """All tokens in corpus order, a record for each document, and how many were empty."""
    shards = work / "shards"
    settings = ShardSettings(str(work / "tokenizer"), str(shards), request.append_eos, request.seed)
    plain = all(path.suffix in (".txt", ".text", ".md") for path in request.files)
    with progress(_size(job) if plain else None) as advance:
        count, empty = encode_corpus(request.files, request.read, settings, workers, advance)
    if count == 0:
        raise PrepareError(f"the corpus holds no text ({empty:,} empty documents)")
    tokens, records = gather(shards, count, token_dtype(vocab_size))
    return tokens, records, empty


def _order(records: np.ndarray, threshold: int, seed: int, split: str) -> np.ndarray:
    """The documents of a split, shuffled."""
    in_validation = records["hash"] < np.uint64(threshold)
    chosen = in_validation if split == "validation" else ~in_validation
    documents = np.flatnonzero(chosen & (records["tokens"] > 0))
    if not len(documents):
        return documents
    return documents[permute(np.arange(len(documents)), len(documents), (seed, split))]


def _manifest(
    request: Request,
    job: Job,
    tokenizer: TextTokenizer,
    split: str,
    records: np.ndarray,
    files: dict[str, dict[str, Any]],
    empty: int,
    texts: dict[str, list[str]],
) -> Manifest:
    measured = split == "validation" and all(texts.values())
    return Manifest(
        documents=len(records),
        tokens=int(records["tokens"].sum()),
        text_bytes=int(records["bytes"].sum()),
        dtype=token_dtype(tokenizer.vocab_size).name,
        append_eos=request.append_eos,
        tokenizer=tokenizer.describe(),
        files=files,
        sources=[
            {"path": source.path, "bytes": source.bytes, "sha256": source.sha256}
            for source in job.sources
        ],
        split={
            "name": split,
            "fraction": request.validation_fraction,
            "seed": request.seed,
            "empty_documents": empty,
        },
        reference_bits_per_byte=(
            corpus.reference_bits_per_byte(texts["train"], texts["validation"])
            if measured
            else None
        ),
    )


def describe(split: str, manifest: Manifest) -> str:
    """One or two lines on a split, for people."""
    text = (
        f"{split}: {manifest.documents:,} documents, {manifest.tokens:,} tokens "
        f"({manifest.dtype}), {manifest.text_bytes:,} bytes of text, "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes per token"
    )
    costs = manifest.reference_bits_per_byte
    if costs:
        text += (
            f"\nreference costs of the validation text in bits per byte: order-2 byte model "
            f"{costs['order2']:.3f}, gzip -9 {costs['gzip']:.3f}, xz -9e {costs['xz']:.3f}"
        )
    return text


def _check_work(work: Path) -> None:
    """Refuse a work folder that is not one of ours, before anything is removed from it."""
    ours = {"lock", "job.json", "job.json.partial", "tokenizer", "shards", "final", "old"}
    if work.exists() and not {path.name for path in work.iterdir()} <= ours:
        raise PrepareError(f"{work} holds files that prepare did not make: move it away")


def _clear(work: Path) -> None:
    """Empty the work folder of everything but the lock."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _tokenizer(request: Request, work: Path, workers: int, size: int) -> TextTokenizer:
    """The request's tokenizer, saved in the work folder; trained unless that was done before."""
    folder = work / "tokenizer"
    if isinstance(request.tokenizer, TextTokenizer):
        request.tokenizer.save(folder)
        return request.tokenizer
    if not (folder / "tokenizer_config.json").exists():
        with tokenizer_threads(workers > 1):
            texts = _tokenizer_texts(request, size)
            tokenizers.train_tokenizer(texts, request.tokenizer).save(folder)
    tokenizer = tokenizers.load_tokenizer(folder)
    return dataclasses.replace(tokenizer, name=f"bpe-{tokenizer.vocab_size}")


def _tokenizer_texts(request: Request, size: int) -> Iterator[str]:
    """Training documents, an even sample of them where the corpus is large."""
    held_out = int(request.validation_fraction * 2**64)
    kept = int(min(1.0, request.tokenizer_bytes / max(size, 1)) * (2**64 - held_out))
    for text in read_texts(request.files, request.read):
        if held_out <= split_hash(text.encode(), request.seed) < held_out + kept:
            yield text


def _threshold(records: np.ndarray, fraction: float) -> int:
    """Documents whose hash is below it are for validation: never none, and never all."""
    threshold = int(fraction * 2**64)
    below = int((records["hash"] < np.uint64(threshold)).sum())
    if fraction == 0 or 0 < below < len(records):
        return threshold
    hashes = np.unique(records["hash"])
    if len(hashes) < 2:
        raise PrepareError(
            f"{len(records)} document(s) with one text cannot be split into train and validation: "
            "divide the text with --document-separator or --document-start, or set "
            "--validation-fraction 0"
        )
    return int(hashes[1] if below == 0 else hashes[-1])


def _reference_texts(request: Request, threshold: int) -> dict[str, list[str]]:
    """The first documents of each file, up to an equal share of the limit for each split."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in request.files:
        room = {split: limit // len(request.files) for split, limit in _REFERENCE_BYTES.items()}
        for text in read_texts([path], request.read):
            data = text.encode()
            split = "validation" if split_hash(data, request.seed) < threshold else "train"
            if text and room[split] > 0:
                room[split] -= len(data)
                texts[split].append(text)
            if max(room.values()) <= 0:
                break
    return texts


def _write_split(
    prefix: Path, tokens: np.ndarray, starts: np.ndarray, records: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Write documents in the given order; returns the manifest's file list."""
    lengths = records["tokens"]
    ends = np.cumsum(lengths)
    with IndexedWriter(prefix, tokens.dtype) as writer:
        first = 0
        while first < len(lengths):
            written = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, written + _WRITE_TOKENS, "right")), first + 1)
            parts = [
                tokens[start : start + length]
                for start, length in zip(starts[first:last].tolist(), lengths[first:last].tolist())
            ]
            writer.add_many(np.concatenate(parts), lengths[first:last])
            first = last
    sizes = write_array(with_suffix(prefix, ".bytes.npy"), records["bytes"])
    return {**writer.files, ".bytes.npy": sizes}


def _publish(final: Path, out: Path, work: Path) -> None:
    """Put the finished folder in the place of OUT, and remove the work folder."""
    old = work / "old"
    shutil.rmtree(old, ignore_errors=True)
    if out.is_dir() and any(out.iterdir()):
        os.replace(out, old)
    os.replace(final, out)
    shutil.rmtree(work)
