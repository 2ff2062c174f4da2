"""Turn text, JSONL or parquet files into tokenised train and validation datasets."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator

from data_tools import corpus, dataset, indexed, packing, tokenizers
from data_tools.request import PrepareError, Request, status
from launch._command import Parser, exit_code_of

EXAMPLES = """\
examples:
  python launch/prepare.py --corpus austen --train-tokenizer 4096 --out data/austen
  python launch/prepare.py --corpus web/*.jsonl.zst --tokenizer path/to/folder --out data/web
  python launch/prepare.py --corpus book.txt --document-start 'CHAPTER .*' --tokenizer bytes \\
      --out data/book --pack 1024

The same command continues an interrupted run, and does nothing when OUT is up to date.
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prepare.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("input").add_argument
    bundled = ", ".join(corpus.BUNDLED)
    add(
        "--corpus",
        nargs="+",
        required=True,
        metavar="NAME|PATH",
        help=f"a bundled corpus ({bundled}), or files and folders: "
        ".txt .md .jsonl (also .gz, .zst) .parquet",
    )
    add("--text-key", metavar="KEY", help="JSONL field or parquet column (text)")
    add("--document-separator", metavar="REGEX", help="lines that divide documents, dropped")
    add("--document-start", metavar="REGEX", help="lines that begin a document, kept")
    add("--max-document-bytes", type=int, metavar="N", help="longest document allowed (64 MiB)")
    add = parser.add_argument_group("tokenizer (one of the first two)").add_argument
    add("--tokenizer", metavar="PATH", help="a tokenizer.json or its folder, or: bytes")
    add("--train-tokenizer", type=int, metavar="VOCAB", help="train a byte-level BPE of this size")
    add("--eos-token", metavar="TOKEN", help="end-of-text token of --tokenizer, if it names none")
    add = parser.add_argument_group("output").add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    add(
        "--append-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-text token (default: yes)",
    )
    add(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of documents held out, chosen by a hash of their text (0.05)",
    )
    add("--seed", type=int, default=0, help="of the document order and the split (0)")
    add("--pack", type=int, metavar="SEQLEN", help="also index whole documents packed to SEQLEN")
    add = parser.add_argument_group("run").add_argument
    add("--workers", type=int, metavar="N", help="encoding processes (one per core)")
    add("--force", action="store_true", help="make it again, and replace another request's output")
    add(
        "--verify",
        action="store_true",
        help="read every byte of OUT and compare it with its hashes",
    )
    add("--dry-run", action="store_true", help="check everything, say what would be done, and stop")
    return parser


def build_request(options: argparse.Namespace) -> Request:
    """The request that the command line describes, all of it checked."""
    files, read = corpus.find_files(options.corpus)
    overrides = {
        "text_key": options.text_key,
        "separator": options.document_separator,
        "start": options.document_start,
        "max_document_bytes": options.max_document_bytes,
    }
    read = dataclasses.replace(read, **{k: v for k, v in overrides.items() if v is not None})
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        raise PrepareError("give one of --tokenizer PATH and --train-tokenizer VOCAB")
    tokenizer: tokenizers.TextTokenizer | int
    if options.tokenizer is None:
        tokenizer = options.train_tokenizer
    elif options.tokenizer == "bytes":
        tokenizer = tokenizers.byte_tokenizer()
    else:
        tokenizer = tokenizers.load_tokenizer(options.tokenizer, options.eos_token)
    return Request(
        files=tuple(files),
        read=read,
        tokenizer=tokenizer,
        append_eos=options.append_eos,
        validation_fraction=options.validation_fraction,
        seed=options.seed,
    )


@contextlib.contextmanager
def show_progress(expected: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; both on stderr."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=expected, unit="B", unit_scale=True, desc="encoding") as bar:
            yield lambda done: bar.update(done) and None
        return
    begin = last = time.monotonic()
    total = 0

    def advance(done: int) -> None:
        nonlocal last, total
        total += done
        now = time.monotonic()
        if now - last >= 10:
            last = now
            share = f" of {expected / 1e6:,.1f}" if expected else ""
            rate = total / 1e6 / (now - begin)
            print(f"encoded {total / 1e6:,.1f}{share} MB, {rate:.1f} MB/s", file=sys.stderr)

    yield advance


def explain(request: Request, options: argparse.Namespace, workers: int) -> None:
    """What --dry-run prints."""
    size = sum(path.stat().st_size for path in request.files)
    count = len(request.files)
    print(f"corpus: {count:,} file{'s' * (count != 1)}, {size:,} bytes")
    tokenizer = request.tokenizer
    if isinstance(tokenizer, int):
        vocabulary = tokenizer
        print(f"tokenizer: a byte-level BPE of {tokenizer:,} tokens would be trained")
    else:
        vocabulary = tokenizer.vocab_size
        print(f"tokenizer: {tokenizer.name}, vocabulary {vocabulary:,}, end {tokenizer.eos_id}")
    print(f"token type: {indexed.token_dtype(vocabulary)}")
    print(f"validation: {request.validation_fraction:.1%} of the documents")
    print(f"workers: {workers}")
    print(
        {
            "absent": f"{options.out} would be made",
            "current": f"{options.out} is up to date",
            "changed": f"{options.out} would be made again: its sources changed or it is damaged",
            "other": f"{options.out} was made by another request: --force would replace it",
            "foreign": f"{options.out} was not made by prepare: it would be refused",
        }[status(request, options.out)]
    )


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(argv: list[str] | None) -> None:
    options = parser().parse_args(argv)
    workers = options.workers if options.workers is not None else available_cores()
    if workers < 1:
        raise PrepareError(f"--workers {workers} must be at least 1")
    if options.pack is not None and options.pack < 1:
        raise PrepareError(f"--pack {options.pack} must be at least 1")
    request = build_request(options)
    if options.dry_run:
        explain(request, options, workers)
        return
    if not request.append_eos:
        print("note: without --append-eos nothing in the token stream marks where documents end")
    begin = time.monotonic()
    manifests = dataset.prepare(
        request, options.out, workers=workers, force=options.force, progress=show_progress
    )
    for split in manifests:
        prefix = options.out / split
        if options.pack is not None:
            done = packing.write_packing(prefix, options.pack)
            waste = done["padding"] / (done["samples"] * (options.pack + 1))
            print(f"{split}: packed into {done['samples']:,} samples, {waste:.1%} padding")
        if options.verify:
            indexed.verify(prefix)
            print(f"{split}: every byte is as its manifest says")
    print(f"{options.out}: ready in {time.monotonic() - begin:.1f} s")


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run(argv), "interrupted: the same command continues from here")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
