"""Memory and time of the chunked head against plain autograd, for cross-entropy and for the loss of
uniform-state diffusion.

Memory is taken in a fresh process for each side: the most resident memory ever held, less what was
held before the weight existed, after a small warm-up that loads the libraries.  Both sides hold the
weight and its gradient; the table also gives what is left without these two and the hidden rows and
their gradient.  Times are taken in one process, in turn.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import (
    Options,
    Report,
    Target,
    at_most,
    command,
    interleaved,
    peak_resident_bytes,
    ratios,
    resident_bytes,
    spread,
)
from models.losses import CrossEntropy, HeadOptions, chunked_head_loss
from models.uniform_state import UniformState

MIB = 2**20


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    vocabulary: int
    loss: str = "cross-entropy"

    @property
    def parameters_and_gradients(self) -> int:
        """Bytes of weight, hidden rows and the gradients of both: the same on both sides."""
        return 4 * 2 * (self.vocabulary + self.rows) * self.hidden


SHAPES = {
    "128k": Shape(4096, 512, 131_072),
    "128k uniform-state": Shape(2048, 512, 131_072, "uniform-state"),
}
ROUNDS = 3  # a step takes many seconds, and peaks hardly vary
TOYS = {"toy": Shape(256, 32, 4096), "toy uniform-state": Shape(256, 32, 4096, "uniform-state")}
LEVEL = 0.5  # α of uniform-state diffusion, of every row


def tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.rows, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator).mul_(0.02)
    labels = torch.randint(0, shape.vocabulary, (shape.rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    term = CrossEntropy(float(len(labels)))
    options = HeadOptions(weight.shape[0])
    return chunked_head_loss(hidden, weight, {"labels": labels}, [term], options)[0]


def plain_uniform(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ_j over the vocabulary as the equation has it, of s = 1 + κ p and q = 1 + κ onehot(x)."""
    classes, z = len(weight), noisy(labels, len(weight))
    kappa = classes * LEVEL / (1 - LEVEL)
    s = 1 + kappa * F.linear(hidden, weight).softmax(1)
    s_z = s.gather(1, z[:, None])
    q_z = torch.where(z == labels, 1 + kappa, 1.0)[:, None]
    # Σ_j q[j]/q[z] (u − 1 − log u) with q[j] = 1 for all j, and once more κ times as much for x
    ratio = s / s_z * q_z
    rows = (ratio - 1 - ratio.log()).sum(1)
    at_x = ratio.gather(1, labels[:, None])
    own = (1 + kappa) * (at_x / (1 + kappa) - 1 - (at_x / (1 + kappa)).log())
    rows = rows + (own - (at_x - 1 - at_x.log()))[:, 0]
    return (rows / q_z[:, 0]).mean() / (classes * LEVEL)


def noisy(labels: Tensor, classes: int) -> Tensor:
    """Every other token replaced."""
    odd = torch.arange(len(labels)) % 2 == 1
    return torch.where(odd, (labels + 1) % classes, labels)


def chunked_uniform(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    level = torch.full((len(labels),), LEVEL, dtype=torch.float64)
    fields = {
        "targets": labels, "noisy": noisy(labels, len(weight)), "odds": level / (1 - level),
        "rate": 1 / level,
    }  # fmt: skip
    term = UniformState(float(len(labels)))
    return chunked_head_loss(hidden, weight, fields, [term], HeadOptions(len(weight)))[0]


Side = Callable[[Tensor, Tensor, Tensor], Tensor]
SIDES: dict[str, dict[str, Side]] = {
    "cross-entropy": {"plain": plain, "chunked": chunked},
    "uniform-state": {"plain": plain_uniform, "chunked": chunked_uniform},
}


def check(shape: Shape) -> None:
    """Both sides compute the same loss and gradients (on a few rows)."""
    hidden, weight, labels = tensors(Shape(64, shape.hidden, min(shape.vocabulary, 4096)))
    found = []
    for side in SIDES[shape.loss].values():
        loss = side(hidden, weight, labels)
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for a, b in zip(*found):
        if (a - b).norm() > 1e-5 * a.norm():
            raise ValueError(f"the chunked head differs from plain {shape.loss}")


def peak_of(side: str, shape: Shape, threads: int) -> int:
    """Bytes that one forward and backward pass needs, tensors included; run in a new process."""
    torch.set_num_threads(threads)
    hidden, weight, labels = tensors(Shape(64, 64, 1024))
    run = SIDES[shape.loss][side]
    run(hidden, weight, labels).backward()
    before = resident_bytes()
    hidden, weight, labels = tensors(shape)
    run(hidden, weight, labels).backward()
    return peak_resident_bytes() - before


def memory(side: str, label: str, options: Options) -> int:
    call = [sys.executable, __file__, "--threads", str(options.threads)]
    call += ["--memory-of", side, "--shape", label]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the process for {side} failed: {done.stderr.strip()[-300:]}")
    return int(json.loads(done.stdout))


def times(shape: Shape, options: Options) -> dict[str, list[float]]:
    hidden, weight, labels = tensors(shape)

    def step(side: Side) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            side(hidden, weight, labels).backward()

        return run

    return interleaved(
        {name: step(side) for name, side in SIDES[shape.loss].items()}, min(ROUNDS, options.repeats)
    )


def compare(label: str, shape: Shape, options: Options, report: Report) -> None:
    check(shape)
    turns = range(min(ROUNDS, options.repeats))
    sides = SIDES[shape.loss]
    peaks: dict[str, list[float]] = {side: [] for side in sides}
    for _ in turns:
        for side in sides:
            peaks[side].append(memory(side, label, options) / MIB)
    shared = shape.parameters_and_gradients / MIB
    beyond = {side: [peak - shared for peak in values] for side, values in peaks.items()}
    seconds = times(shape, options)
    rows = HeadOptions(shape.vocabulary).rows_per_chunk(shape.vocabulary)
    for side in sides:
        report.rows.append(
            [
                label,
                side,
                spread(peaks[side], 0),
                spread(beyond[side], 0),
                spread(seconds[side]),
                spread(ratios(seconds[side], seconds["plain"])),
            ]
        )
        report.samples[f"{label} {side} seconds"] = seconds[side]
        report.samples[f"{label} {side} peak MiB"] = peaks[side]
    report.settings[label] = f"{shape}, {rows} rows per chunk"
    for what, values in (("whole peak", peaks), ("beyond weights and gradients", beyond)):
        share = ratios(values["chunked"], values["plain"])
        most = 1 / 6 if shape.loss == "cross-entropy" else 1 / 4
        met = max(share) <= most
        claim = f"{label}: memory at most 1/{1 / most:.0f} of plain, {what}"
        report.targets.append(Target(claim, spread(share, 3), met))
    report.targets.append(
        at_most(
            f"{label}: at most 1.05 times the time of plain",
            ratios(seconds["chunked"], seconds["plain"]),
            1.05,
        )
    )


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(options.threads)
    if arguments.memory_of:
        shape = {**TOYS, **SHAPES}[arguments.shape]
        print(peak_of(arguments.memory_of, shape, options.threads))
        raise SystemExit(0)
    report = Report(
        "head_memory",
        "What do the output projection and its loss cost, forward and backward, when the logits "
        "are formed a chunk at a time? The target on memory refers to the whole peak, weight and "
        "weight gradient included; the part beyond them is given too.",
        ["shape", "side", "peak MiB", "beyond weights and gradients MiB", "s", "time / plain"],
        {
            "plain": "F.cross_entropy(F.linear(hidden, weight), labels), or the sum over the "
            "vocabulary that defines the loss of uniform-state diffusion; autograd, fp32",
            "chunked": "models.losses.chunked_head_loss with default options, fp32",
        },
    )
    for label, shape in (TOYS if options.quick else SHAPES).items():
        compare(label, shape, options, report)
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory-of", choices=("plain", "chunked"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
