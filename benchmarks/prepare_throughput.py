"""Tokenisation speed per core against `datasets.map` and against the tokenizer alone.

All sides use one core, the same byte-level BPE and the same JSONL file: the bundled novels cut into
documents of a few paragraphs.  Rates are megabytes (10^6) of UTF-8 text per second.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.measure import (
    MissingPeer,
    Options,
    Report,
    at_least,
    command,
    import_peer,
    interleaved,
    ratios,
    spread,
)
from data_tools import corpus, dataset
from data_tools.indexed import token_dtype
from data_tools.request import Request
from data_tools.tokenize import ShardSettings, cut_shards, encode_corpus, tokenizer_threads
from data_tools.tokenizers import TextTokenizer, train_tokenizer

BATCH = 1000  # texts per call: the default of datasets.map


def documents(quick: bool) -> list[str]:
    """The bundled novels in pieces of about 2,000 characters, as web documents are."""
    files, read = corpus.find_files(["austen"])
    texts = []
    for path in files[: 1 if quick else None]:
        whole = "\n".join(text for text, _ in corpus.read_documents(path, read))
        paragraphs = re.split(r"\n\s*\n", whole)
        piece: list[str] = []
        for paragraph in paragraphs:
            piece.append(paragraph)
            if sum(map(len, piece)) > 2000:
                texts.append("\n\n".join(piece))
                piece = []
    return texts[:200] if quick else texts


class Sides:
    """Every way to tokenise the file, each into fresh folders."""

    def __init__(self, folder: Path, texts: list[str], tokenizer: TextTokenizer) -> None:
        self.folder, self.texts, self.tokenizer = folder, texts, tokenizer
        self.file = folder / "corpus.jsonl"
        with open(self.file, "w") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        tokenizer.save(folder / "tokenizer")
        self.files, self.read = corpus.find_files([str(self.file)])
        self.numbers = itertools.count()
        # What the tokenizer gets at once when it works alone: as much as prepare gives it.
        self.batches = list(cut_shards(iter(texts), 1 << 20))

    def fresh(self) -> Path:
        return self.folder / f"out{next(self.numbers)}"

    def bound(self) -> None:
        for batch in self.batches:
            self.tokenizer.backend.encode_batch_fast(batch, add_special_tokens=False)

    def encode(self) -> None:
        """The tokenisation part of prepare: read, encode, hash, write shards, flush to disk."""
        shards = self.fresh()
        shards.mkdir()
        settings = ShardSettings(str(self.folder / "tokenizer"), str(shards), True, 0)
        encode_corpus(self.files, self.read, settings, 1, lambda done: None)
        shutil.rmtree(shards)

    def prepare(self) -> None:
        """All of prepare: also shuffling, both splits, manifests with hashes, reference costs."""
        out = self.fresh()
        request = Request(tuple(self.files), self.read, self.tokenizer)
        dataset.prepare(request, out, workers=1, say=lambda line: None)
        shutil.rmtree(out)

    def peer(self, datasets: Any) -> Callable[[], None]:
        """load_dataset and a batched map in this process, into an Arrow file; nothing cached."""
        datasets.disable_progress_bars()
        datasets.disable_caching()
        backend, eos = self.tokenizer.backend, self.tokenizer.eos_id

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            found = backend.encode_batch_fast(batch["text"], add_special_tokens=False)
            return {"ids": [[*encoding.ids, eos] for encoding in found]}

        dtype = token_dtype(self.tokenizer.vocab_size).name
        features = datasets.Features({"ids": datasets.Sequence(datasets.Value(dtype))})

        def run() -> None:
            cache = self.fresh()
            loaded = datasets.load_dataset(
                "json", data_files=str(self.file), split="train", cache_dir=str(cache)
            )
            loaded.map(
                encode,
                batched=True,
                batch_size=BATCH,
                remove_columns=["text"],
                features=features,
                load_from_cache_file=False,
                cache_file_name=str(cache / "mapped.arrow"),
            )
            shutil.rmtree(cache)

        return run


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    texts = documents(options.quick)
    size = sum(len(text.encode()) for text in texts)
    vocabulary = 300 if options.quick else 4096
    report = Report(
        "prepare_throughput",
        "How fast is text tokenised, per core? The bound is the tokenizer's own batch call on "
        "texts already in memory, its ids thrown away.",
        ["side", "MB/s", "of the bound"],
        {
            "corpus": f"{len(texts):,} JSONL documents, {size / 1e6:.1f} MB, page cache warm",
            "tokenizer": f"byte-level BPE of {vocabulary}, one thread",
            "datasets": f"load_dataset(json), then map(batched, batch_size={BATCH}) to uint16 ids "
            "in an Arrow file, no cache, one process, encode_batch_fast",
        },
    )
    with tempfile.TemporaryDirectory() as folder, tokenizer_threads(False):
        tokenizer = train_tokenizer(texts, vocabulary)
        sides = Sides(Path(folder), texts, tokenizer)
        variants: dict[str, Callable[[], None]] = {
            "tokenizer alone": sides.bound,
            "prepare: tokenisation": sides.encode,
            "prepare: everything": sides.prepare,
        }
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            datasets = import_peer("datasets", "datasets", options.peers)
            variants["datasets: load and map"] = sides.peer(datasets)
        except MissingPeer as missing:
            report.notes.append(str(missing))
        seconds = interleaved(variants, options.repeats)
    for name, values in seconds.items():
        share = ratios(seconds["tokenizer alone"], values)
        report.rows.append([name, spread([size / 1e6 / s for s in values]), spread(share)])
    report.samples = seconds
    share = ratios(seconds["tokenizer alone"], seconds["prepare: tokenisation"])
    report.targets.append(at_least("tokenisation at least 0.9 of the bound", share, 0.9))
    peer = seconds.get("datasets: load and map")
    if peer is not None:
        faster = ratios(peer, seconds["prepare: tokenisation"])
        report.targets.append(at_least("tokenisation at least as fast as datasets", faster, 1.0))
    return report


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
