"""Encode a corpus in parallel, shard by shard, with bounded memory and no work done twice.

A shard is a run of consecutive documents. Its ids go to `NUMBER.bin` and one RECORD per document
to `NUMBER.npy`, which is written last: a shard whose `.npy` exists is finished. `gather` joins
the shards into one file. All of it survives a kill at any moment.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from data_tools import corpus
from data_tools.corpus import ReadOptions
from data_tools.indexed import map_tokens, token_dtype
from data_tools.manifest import write_array
from data_tools.tokenizers import TextTokenizer, load_tokenizer

# Of one document: tokens stored, UTF-8 bytes of its text, and split_hash of its text.
RECORD = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])
_BATCH = 1 << 20  # characters given to the tokenizer at once: bounds its memory
_SHARD = 8 << 20  # characters in a shard at most (and one document more)


@dataclasses.dataclass(frozen=True)
class ShardSettings:
    """What a worker needs to know; tokenizer and shards are folders."""

    tokenizer: str
    shards: str
    append_eos: bool
    seed: int


def split_hash(text: bytes, seed: int) -> int:
    """A 64-bit hash of a document that decides its split: equal documents share one."""
    key = seed.to_bytes(16, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


def read_texts(files: Sequence[Path], read: ReadOptions) -> Iterator[str]:
    """All documents of the files in order, also the empty ones."""
    for path in files:
        for text, _ in corpus.read_documents(path, read):
            yield text


def cut_shards(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Group consecutive documents; a group closes when it holds `size` characters."""
    shard: list[str] = []
    characters = 0
    for text in texts:
        shard.append(text)
        characters += len(text)
        if characters >= size:
            yield shard
            shard, characters = [], 0
    if shard:
        yield shard


def shard_characters(files: Sequence[Path]) -> int:
    """A shard size that depends on the corpus alone, so that any number of workers can resume."""
    return min(max(sum(path.stat().st_size for path in files) // 64, 1 << 16), _SHARD)


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str) -> TextTokenizer:
    return load_tokenizer(folder)


def encode_shard(settings: ShardSettings, number: int, texts: list[str]) -> None:
    """Write one shard. An id that does not fit the token type is an error of numpy's."""
    tokenizer = _tokenizer(settings.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    end = [tokenizer.eos_id] if settings.append_eos else []
    eos = np.array(end, dtype)
    records = np.empty(len(texts), RECORD)
    path = Path(settings.shards) / f"{number}.bin"
    with open(path, "wb") as file:
        first = 0
        for batch in cut_shards(iter(texts), _BATCH):
            encoded = tokenizer.encode_batch(batch, dtype)
            for offset, (text, ids) in enumerate(zip(batch, encoded)):
                data = text.encode()
                count = len(ids) + len(eos)
                records[first + offset] = (count, len(data), split_hash(data, settings.seed))
            file.write(np.concatenate([part for ids in encoded for part in (ids, eos)]).data)
            first += len(batch)
        file.flush()
        os.fsync(file.fileno())
    write_array(path.with_suffix(".npy"), records)


def encode_corpus(
    files: Sequence[Path],
    read: ReadOptions,
    settings: ShardSettings,
    workers: int,
    advance: Callable[[int], None],
) -> tuple[int, int]:
    """Encode every shard that is not finished yet.

    At most workers + 2 shards are in memory. Documents without text are left out.

    Args:
        workers: encoding processes; with 1 the work is done in this process.
        advance: called with the characters of each shard when it is done.

    Returns:
        (number of shards, number of documents that were left out).
    """
    empty = 0

    def texts() -> Iterator[str]:
        nonlocal empty
        for text in read_texts(files, read):
            if text and not text.isspace():
                yield text
            else:
                empty += 1

    shards = 0
    pending: collections.deque[tuple[int, concurrent.futures.Future[None]]] = collections.deque()
    with _executor(workers) as executor:
        for number, shard in enumerate(cut_shards(texts(), shard_characters(files))):
            shards += 1
            characters = sum(map(len, shard))
            if (Path(settings.shards) / f"{number}.npy").exists():
                advance(characters)
                continue
            pending.append((characters, executor.submit(encode_shard, settings, number, shard)))
            while len(pending) > (workers + 1 if workers > 1 else 0):
                done, future = pending.popleft()
                future.result()
                advance(done)
        for done, future in pending:
            future.result()
            advance(done)
    return shards, empty


@contextlib.contextmanager
def tokenizer_threads(enabled: bool) -> Iterator[None]:
    """Let the tokenizer library use threads of its own, or not."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if enabled else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _InProcess(concurrent.futures.Executor):
    """Runs a task when it is submitted."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def _executor(workers: int) -> Iterator[concurrent.futures.Executor]:
    with tokenizer_threads(False):
        if workers == 1:
            yield _InProcess()
            return
        # Forking would copy this process's threads and locks; a fork server starts clean ones.
        context = multiprocessing.get_context("forkserver")
        executor = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker)
        try:
            yield executor
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """A worker leaves interrupts to its parent and never outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def gather(shards: Path, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Join finished shards into one token file, each shard's ids deleted once they are in it.

    Returns:
        (mapped tokens [tokens], records of all documents [documents] as RECORD).
    """
    parts = [np.load(shards / f"{number}.npy") for number in range(count)]
    joined = shards / "joined.bin"
    joined.touch()
    ends = np.cumsum([0] + [int(part["tokens"].sum()) for part in parts]) * dtype.itemsize
    # What an interrupted run appended completely stays.
    first = int(np.searchsorted(ends, joined.stat().st_size, side="right")) - 1
    with open(joined, "r+b") as target:
        target.truncate(int(ends[first]))
        target.seek(0, os.SEEK_END)
        for number in range(first, count):
            path = shards / f"{number}.bin"
            with open(path, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
            path.unlink()
    assert joined.stat().st_size == ends[-1]
    tokens = map_tokens(joined, dtype) if ends[-1] else np.empty(0, dtype)
    return tokens, np.concatenate(parts)
