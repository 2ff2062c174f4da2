"""Start-up and speed of the sampler on a billion windows, against what a model consumes.

The data is synthetic and sparse: the index is complete and real, the token file has the right
length but occupies no disk, so reads find zeros without touching one.  What is measured is all the
work of the sampler (permutation, blend, document boundaries, batches as tensors), not a disk.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import random
import tempfile

import numpy as np
import torch

from benchmarks.measure import Options, Report, at_least, at_most, command, interleaved, spread
from benchmarks.training_throughput import SHAPES, TOY, ours
from data_tools.blend import Blend, WindowSampler
from data_tools.indexed import HEADER, MAGIC, VERSION, IndexedReader
from pretrain.data import Batches
from pretrain.objectives.causal import Causal

LENGTH = 256
UINT16 = 8  # Megatron's type code
READS = 64  # batches per repeat


def write_sparse(prefix: Path, windows: int, documents: int) -> None:
    """An index of ``documents`` equal documents over ``windows`` windows, and an empty token file
    of that length."""
    tokens = windows * LENGTH + 1
    length = tokens // documents
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, UINT16, documents, documents + 1))
        lengths = np.full(documents, length, np.int32)
        lengths[-1] += tokens - length * documents
        file.write(lengths.data)
        file.write((np.arange(documents, dtype=np.int64) * (2 * length)).data)
        file.write(np.arange(documents + 1, dtype=np.int64).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)


def build(prefixes: list[Path]) -> Blend:
    """What a start of a run does: open the files and set up the blend."""
    samplers = [WindowSampler(IndexedReader(prefix), LENGTH, seed=1) for prefix in prefixes]
    return Blend(samplers, [0.9, 0.1], seed=1, names=[str(prefix) for prefix in prefixes])


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(options.threads)
    shape = TOY if options.quick else SHAPES["3m"]
    windows = [900_000, 100_000] if options.quick else [900_000_000, 100_000_000]
    documents = [2000, 200] if options.quick else [arguments.documents, arguments.documents // 9]
    report = Report(
        "loader",
        "How long until the first batch can be read, and how many windows per second then, against "
        "what a 3M-parameter model trains on? One process, one loading thread.",
        ["what", "figure"],
        {
            "index": f"{sum(windows):,} windows of {LENGTH} tokens in two sources, 9 to 1; "
            f"{sum(documents):,} documents, uint16; sparse token files, index in the page cache",
            "reads": f"{READS} batches of {shape.batch} windows at random places of the blend, as "
            "tensors with labels",
            "model": f"3M parameters, {shape.batch} x {shape.length} tokens, eager, AdamW step"
            if not options.quick
            else "toy",
        },
    )
    objective = Causal(Causal.Config())
    generator = random.Random(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefixes = [Path(folder) / f"source{i}" for i in range(2)]
        for prefix, count, number in zip(prefixes, windows, documents):
            write_sparse(prefix, count, number)
        blend = build(prefixes)
        batches = Batches(blend, objective, shape.batch, 0, 1, torch.device("cpu"))
        tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.length + 1))
        train = ours(shape.config(), tokens, compiled=False)

        def start() -> None:
            build(prefixes).sample(generator.randrange(blend.num_samples))

        def read() -> None:
            for _ in range(READS):
                first = generator.randrange(blend.num_samples - shape.batch)
                batches.read(first, shape.batch)

        seconds = interleaved({"start": start, "read": read, "train": train.step}, options.repeats)
    samples = [READS * shape.batch / s for s in seconds["read"]]
    consumed = [shape.tokens / s for s in seconds["train"]]
    multiple = [LENGTH * a / b for a, b in zip(samples, consumed)]
    report.samples = seconds
    report.rows = [
        ["windows in the index", f"{sum(windows):,}"],
        ["samples in one epoch of the blend", f"{blend.num_samples:,}"],
        ["start-up and first sample", spread([1000 * s for s in seconds["start"]], 1, "ms")],
        ["loader", spread(samples, 0, "samples/s")],
        ["loader", spread([LENGTH * s for s in samples], 0, "tokens/s")],
        ["model", spread(consumed, 0, "tokens/s")],
        ["loader / model", spread(multiple, 0)],
    ]
    report.targets = [
        at_most("start-up below 1 s", seconds["start"], 1.0, 3),
        at_least("at least 50 times the model's consumption", multiple, 50, 0),
    ]
    report.notes.append(
        "Start-up reads the index once to check that documents and sequences coincide, so it grows "
        "with the number of documents, not with the number of windows."
    )
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--documents", type=int, default=16_000_000, metavar="N", help="of the larger source (16M)"
    )
    parser.add_argument("--folder", metavar="DIR", help="where the sparse files go (temporary)")


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
