"""What routers activate, and what that is worth.

Three questions.  Is an uneven split of SoftMoE's budget found again, in one process and across two
pipeline ranks?  How many experts are active at a given sum of gates, as the spread of the logits
changes?  And what do LapSum, top-k and ReMoE reach on the bundled novels at about the same number
of active experts?
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.studies import planted, routed_text
from benchmarks.studies.planted import PLANTED, Planted
from benchmarks.studies.routed_text import Learned, Text
from benchmarks.studies.study import Options, Study, command, each
from models.routers import LapSum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = (
    "Is a planted split of an expert budget found again, in one process and on two pipeline ranks? "
    "How many experts does LapSum activate as the spread of its logits grows? What are routers "
    "worth on real text at about the same number of active experts? Active experts: in training / "
    "at inference. k: LapSum's sum of gates by layer, which is not a number of experts."
)
COLUMNS = ["question", "case", "active experts", "k", "found"]

STEPS, KEPT = 400, 10  # of the planted split; every so many are kept for the picture
SPREADS = (0.05, 0.5, 1.0, 4.0)
ACTIVITY = {
    (1.0, 4.0): (1.00, 2.38, 3.77, 2.74),
    (1.5, 2.0): (1.00, 2.23, 2.95, 2.79),
    (2.0, 2.0): (1.00, 2.39, 3.78, 3.42),
}
"""By (k, alpha): what an independent implementation of the same rule activates of 32 experts."""


def numbers(values: list[float], digits: int = 2) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def split(result: Study, options: Options) -> None:
    """The planted split, on one process and on two pipeline ranks."""
    steps, pool = (3, 1) if options.quick else (STEPS, 8)
    for seed in result.seeds:
        found = {}
        for pp in (1, 2):
            job = Planted(seed, steps, pool, pp)
            (found[pp],) = each(planted.run, [job], 1, lambda j: f"planted split: {j}")
            paths = [path for path, _ in found[pp]]
            path, losses = found[pp][0]
            error = max(abs(k - wanted) for k, wanted in zip(path[-1], PLANTED, strict=True))
            where = "one process" if pp == 1 else "two pipeline ranks"
            result.rows.append(
                ["planted split", f"{where}, seed {seed}", "", numbers(path[-1], 4),
                 f"off by {error:.1e} at most; divergence {losses[0]:.1e} to {losses[-1]:.1e}"]
            )  # fmt: skip
            result.data[f"split, pp {pp}, seed {seed}"] = path[::KEPT]
            result.check(
                f"k is found to three decimals ({where}, seed {seed})", f"{error:.1e}", error < 5e-4
            )
            if pp == 2:
                same = all(other == path for other in paths)
                result.check("both ranks have the same k, bit for bit", str(same), same)
                pairs = zip(found[1][0][0], path, strict=True)
                apart = max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True))
                result.check("two ranks go the way of one", f"{apart:.1e} apart", apart < 1e-9)


def spread(result: Study, options: Options) -> None:
    """Active experts of Gaussian logits."""
    tokens, experts = (500 if options.quick else 20000), 32
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for (k, alpha), expected in ACTIVITY.items():
        router = LapSum(LapSum.Config(k=k, expansion=alpha), experts, experts)
        torch.nn.init.eye_(router.weight)
        for width, wanted in zip(SPREADS, expected, strict=True):
            with torch.no_grad():
                routing = router(logits * width)
            active = float(routing.map.sum(-1).double().mean())
            mass = float(routing.figures["kept_mass"])
            worst = max(worst, abs(active - wanted))
            result.rows.append(
                ["activity", f"k {k}, alpha {alpha:g}, spread {width}", f"{active:.2f}", f"{k}",
                 f"kept mass {mass:.2f}; reference: {wanted:.2f} active"]
            )  # fmt: skip
            result.data.setdefault(f"activity, k {k}, alpha {alpha:g}", []).append([width, active])
    result.check("active experts are those of the reference", f"{worst:.3f} off", worst < 0.05)


def text(result: Study, options: Options) -> None:
    """Every router of ``ROUTERS`` on the novels."""
    steps, sequences, validation = (3, 2, 2) if options.quick else (240, 16, 128)
    with tempfile.TemporaryDirectory() as folder:
        data = routed_text.make_data(Path(folder), options.quick)
        routers = list(routed_text.ROUTERS)[3::2] if options.quick else routed_text.ROUTERS
        jobs = [
            Text(router, seed, steps, sequences, validation, data)
            for seed in result.seeds
            for router in routers
        ]
        found = each(
            routed_text.train, jobs, options.processes, lambda job: f"{job.router}, seed {job.seed}"
        )
    by_router: dict[str, list[Learned]] = {}
    for job, learned in zip(jobs, found, strict=True):
        by_router.setdefault(job.router, []).append(learned)
        result.data[f"text, {job.router}, seed {job.seed}"] = asdict(learned)
    for name, runs in by_router.items():
        loss = [run.loss for run in runs]
        bits = statistics.mean(run.bits for run in runs)
        active = [statistics.mean(run.training for run in runs),
                  statistics.mean(run.inference for run in runs)]  # fmt: skip
        seeds = "; ".join(numbers(run.budget) for run in runs if run.budget)
        result.rows.append(
            ["text", name, " / ".join(f"{value:.2f}" for value in active), seeds,
             f"{statistics.mean(loss):.3f} nats per token ({min(loss):.3f} to {max(loss):.3f}), "
             f"{bits:.3f} bits per byte"]
        )  # fmt: skip
    if not options.quick:
        compare(result, by_router)


def interpolated(by_router: Mapping[str, list[Learned]], seed: int, active: float) -> float:
    """The loss of top-k at a number of active experts between one and three."""
    losses = [by_router[f"top-{k}"][seed].loss for k in (1, 2, 3)]
    lower = min(max(int(active), 1), 2)
    part = active - lower
    return losses[lower - 1] * (1 - part) + losses[lower] * part


def compare(result: Study, by_router: Mapping[str, list[Learned]]) -> None:
    """Against top-k with as many active experts at inference."""
    for name, runs in by_router.items():
        if name.startswith("top-"):
            continue
        active = [run.inference for run in runs]
        result.check(
            f"{name} is compared where top-k was measured", f"{numbers(active)} active experts",
            all(1 <= value <= 3 for value in active),
        )  # fmt: skip
        gains = [
            run.loss - interpolated(by_router, seed, run.inference) for seed, run in enumerate(runs)
        ]
        beyond = [run.loss - by_router["top-2"][seed].loss for seed, run in enumerate(runs)]
        result.notes.append(
            f"{name}, nats per token by seed: {signed(gains)} against top-k interpolated to as "
            f"many active experts at inference, {signed(beyond)} against top-2"
        )
    result.notes.append(
        "interpolation is linear while loss falls ever more slowly with active experts: between "
        "top-1 and top-2 it overstates the loss of top-k"
    )


def signed(values: list[float]) -> str:
    return " ".join(f"{value:+.3f}" for value in values)


def study(options: Options) -> Study:
    router = ", ".join(f"{name} = {text}" for name, text in routed_text.ROUTERS.items())
    result = Study(
        "expert",
        QUESTION,
        COLUMNS,
        {
            "planted split": f"4 layers of {planted.EXPERTS} frozen random experts, K = 8, k = "
            f"{numbers(list(PLANTED), 1)}, threshold 1, alpha 1.5, float64, Adam {planted.RATE} on "
            f"eta alone, {STEPS} steps",
            "activity": "32 experts, Gaussian logits, threshold 1.8, scale 1",
            "text": "4 layers of width 64, 8 experts of width 64, 1024-token BPE, batches of 16 x "
            f"128 tokens, 240 steps, AdamW 3e-3, balancing weight 0.01; {router}",
        },
        list(range(options.seeds)),
    )
    spread(result, options)
    split(result, options)
    text(result, options)
    return result


# ---------------------------------------------------------------------- picture


def draw(result: Mapping[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, values in result["data"].items():
        part, _, rest = name.partition(", ")
        if part == "split" and rest.endswith("seed 0"):
            style = "-" if rest.startswith("pp 1") else ":"
            for layer, k in enumerate(zip(*values, strict=True)):
                steps = range(0, KEPT * len(k), KEPT)
                left.plot(steps, k, style, color=f"C{layer}", linewidth=1.5 if style == "-" else 3)
        elif part == "activity":
            middle.semilogx(*zip(*values, strict=True), marker="o", label=rest)
    for layer, planted_k in enumerate(PLANTED):
        left.axhline(planted_k, color=f"C{layer}", linewidth=0.5)
    left.set_title("planted split: k by layer (dotted: two pipeline ranks)")
    left.set_xlabel("step")
    middle.set_title("active of 32 experts")
    middle.set_xlabel("standard deviation of the logits")
    middle.legend(fontsize=8)
    for index, router in enumerate(routed_text.ROUTERS):
        runs = [v for n, v in result["data"].items() if n.startswith(f"text, {router}, seed")]
        right.plot(
            [run["inference"] for run in runs], [run["loss"] for run in runs], "o", label=router,
            color=f"C{index}",
        )  # fmt: skip
    right.set_title("novels: validation loss, nats per token")
    right.set_xlabel("mean active experts at inference")
    right.legend(fontsize=8)
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> int:
    return command("expert", study, draw, __doc__, argv, seeds=2)


if __name__ == "__main__":
    raise SystemExit(main())
