"""Which placements of norms learn at a high constant learning rate, without warm-up.

A deep and narrow model of bytes, trained for a minute on novels.  A placement that fails does not
diverge: it falls back to the frequencies of single bytes and stays there, so it is told by its loss
against their entropy.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.study import Options, Study, command, each
from data_tools.corpus import find_files
from models.attention import AttentionConfig, SequenceContext
from models.blocks import BLOCKS
from models.config import InitConfig, ModelConfig
from models.feedforward import SwiGLU
from models.losses import CrossEntropy
from models.norms import BHyT, RMSNorm
from parallel.apply import BuildOptions, build_parallel_model, update_state
from parallel.gradients import clip_gradients, gradient_norm, zero_gradients
from parallel.mesh import ParallelConfig, build_mesh
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS, WIDTH, HEADS, INNER = 24, 64, 4, 176
SEQUENCES, LENGTH = 8, 32
LAST = 20  # steps whose mean loss is judged
MARGIN = 0.2  # nats below the entropy of single bytes, from which on a model has learned more
HIGH, HIGHER = 3e-3, 1e-2
STEPS = {HIGH: 200, HIGHER: 80}
OPTIMIZER = OptimizerConfig(beta1=0.9, beta2=0.95, weight_decay=0.0)
CLIP = 1.0


@dataclass(frozen=True)
class Scheme:
    """gain: of the initial weights that write to the residual stream; None: the placement's own."""

    name: str
    block: str
    norm: Any = RMSNorm.Config()
    gain: float | None = None


EQUAL, SMALLER = LAYERS**-0.5, (2 * LAYERS) ** -0.5
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("post L^-1/2", "post", gain=EQUAL),
        Scheme("span L^-1/2", "span", gain=EQUAL),
        Scheme("post (2L)^-1/2", "post", gain=SMALLER),
        Scheme("span (2L)^-1/2", "span", gain=SMALLER),
        Scheme("deepnorm", "deepnorm"),
        Scheme("pre", "pre"),
        Scheme("keel", "keel"),
        Scheme("bhyt (2, 1)", "pre", BHyT.Config(attention_lambda=2.0, sequence_length=LENGTH)),
        Scheme("bhyt (1, 1)", "pre", BHyT.Config(sequence_length=LENGTH)),
        Scheme("rms gain 0.1", "pre", RMSNorm.Config(gain=0.1)),
    )
}
RUNS = {
    HIGH: [name for name in SCHEMES if SCHEMES[name].block in ("post", "span") or name == "pre"],
    HIGHER: [name for name in SCHEMES if SCHEMES[name].gain != SMALLER],
}


def model_config(scheme: Scheme, layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=256,
        hidden=WIDTH,
        layers=layers,
        attention=AttentionConfig(HEADS, HEADS, WIDTH // HEADS),
        feedforward=SwiGLU.Config(INNER),
        block=BLOCKS.config_class(scheme.block)(),
        norm=scheme.norm,
        init=InitConfig(std=1.0, rule="fan_in", embedding_std=1.0, output_gain=scheme.gain),
    )


@functools.cache
def text() -> Tensor:
    """The bundled novels, one byte after the other: uint8 [N]."""
    files, _ = find_files(["austen"])
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def byte_entropy() -> float:
    """Nats per byte of a model that knows how frequent each byte is and nothing else."""
    counts = np.bincount(text().numpy(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Job:
    scheme: str
    lr: float
    seed: int
    layers: int
    steps: int

    def __str__(self) -> str:
        return f"{self.scheme}, lr {self.lr:g}, seed {self.seed}"


def train(job: Job) -> list[float]:
    """The loss of every step, in nats per byte.  Runs of one seed see the same batches."""
    parallel = ParallelConfig()
    mesh = build_mesh(parallel, torch.device("cpu"))
    config = model_config(SCHEMES[job.scheme], job.layers)
    model = build_parallel_model(config, parallel, mesh, BuildOptions(seed=job.seed))
    assert model.part.head is not None
    optimizer = ShardedOptimizer(model, OPTIMIZER, "torch")
    terms = [CrossEntropy(float(SEQUENCES * LENGTH))]
    generator = torch.Generator().manual_seed(job.seed)
    window = torch.arange(LENGTH + 1)
    losses = []
    for step in range(1, job.steps + 1):
        starts = torch.randint(len(text()) - LENGTH, (SEQUENCES, 1), generator=generator)
        tokens = text()[starts + window].long()
        context = SequenceContext(window[:-1])
        hidden = model.part(tokens[:, :-1], context)
        loss, _ = model.part.head(hidden, {"labels": tokens[:, 1:]}, terms)
        loss.backward()
        clip_gradients(model, gradient_norm(model), CLIP)
        optimizer.step(job.lr)
        zero_gradients(model)
        update_state(model, step)
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------- table and checks


def judged(losses: Sequence[float], last: int) -> float:
    return statistics.fmean(losses[-last:])


Finals = Mapping[tuple[str, float], Sequence[float]]  # by scheme and rate, one value per seed


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def verdict(values: Sequence[float], limit: float) -> str:
    stuck = sum(value > limit for value in values)
    if stuck in (0, len(values)):
        return "stuck" if stuck else "learns"
    return f"{stuck} of {len(values)} stuck"


def rows(finals: Finals, limit: float) -> list[list[str]]:
    return [
        [f"{lr:g}", name, f"{statistics.fmean(values):.3f}", listed(values), verdict(values, limit)]
        for (name, lr), values in finals.items()
    ]


def checks(study: Study, finals: Finals, limit: float) -> None:
    for gain in ("L^-1/2", "(2L)^-1/2"):
        post, span = finals[f"post {gain}", HIGH], finals[f"span {gain}", HIGH]
        study.check(
            f"{HIGH:g}, output gain {gain}: span < {limit:.2f} < post with every seed",
            f"span {listed(span)}; post {listed(post)}",
            max(span) < limit < min(post),
        )
    for name in ("post L^-1/2", "span L^-1/2", "deepnorm"):
        values = finals[name, HIGHER]
        claim = f"{HIGHER:g}: {name} is stuck, above {limit:.2f} with every seed"
        study.check(claim, listed(values), min(values) > limit)
    for name in ("pre", "keel", "bhyt (2, 1)"):
        values = finals[name, HIGHER]
        claim = f"{HIGHER:g}: {name} goes on, below {limit:.2f} with every seed"
        study.check(claim, listed(values), max(values) < limit)


def turned_note(losses: Mapping[tuple[str, float], Sequence[Sequence[float]]]) -> str:
    """Where the judged steps end: a run that has learned may be on its way back."""
    found = []
    for (name, lr), curves in losses.items():
        for seed, curve in enumerate(curves):
            best = min(smooth(curve, LAST)[LAST - 1 :])
            if judged(curve, LAST) > best + MARGIN:
                found.append(f"{name}, {lr:g}, seed {seed}: from {best:.2f}")
    return (
        f"Runs that end more than {MARGIN} above their best {LAST} steps: "
        + ("; ".join(found) or "none")
        + "."
    )


def control_note(finals: Finals, lr: float) -> str:
    """BHyT beside the same model with its gain and without its tanh, batch for batch."""
    ours, control = finals["bhyt (1, 1)", lr], finals["rms gain 0.1", lr]
    gaps = [a - b for a, b in zip(ours, control, strict=True)]
    gap = statistics.fmean(gaps)
    signs = {value > 0 for value in gaps}
    word = "better" if gap < 0 else "worse"
    sure = f"with every seed {word}" if len(signs) == 1 else "with seeds on both sides of 0"
    return (
        f"BHyT (1, 1) beside the control that its paper lacks, RMSNorm with gain lambda / kappa = "
        f"0.1, at {lr:g}: {gap:+.3f} nats on average ({', '.join(f'{g:+.3f}' for g in gaps)}), "
        f"{sure}."
    )


def study(options: Options) -> Study:
    limit = byte_entropy() - MARGIN
    seeds, layers = list(range(options.seeds)), 2 if options.quick else LAYERS
    steps = dict.fromkeys(STEPS, 3) if options.quick else STEPS
    jobs = [
        Job(name, lr, seed, layers, steps[lr])
        for lr, names in RUNS.items()
        for name in names
        for seed in seeds
    ]
    losses: dict[tuple[str, float], list[list[float]]] = {}
    for job, found in zip(jobs, each(train, jobs, options.processes), strict=True):
        losses.setdefault((job.scheme, job.lr), []).append([round(x, 4) for x in found])
    finals = {key: [judged(curve, LAST) for curve in some] for key, some in losses.items()}
    result = Study(
        "stability",
        "Which placements of norms learn at a high constant learning rate, without warm-up? Loss: "
        f"nats per byte, mean over the last {LAST} of {STEPS[HIGH]} steps at {HIGH:g} and of "
        f"{STEPS[HIGHER]} at {HIGHER:g}. Stuck: above {limit:.2f}, which is {MARGIN} below the "
        f"entropy of single bytes, {byte_entropy():.2f}: nothing but their frequencies is known.",
        ["lr", "scheme", "loss", "by seed", "verdict"],
        {
            "model": f"{layers} blocks, width {WIDTH}, {HEADS} heads, SwiGLU of {INNER}, bytes",
            "text": f"bundled novels (austen), {len(text()):,} bytes, random windows",
            "batch": f"{SEQUENCES} x {LENGTH} bytes",
            "optimizer": f"AdamW 0.9/0.95, no decay, clip {CLIP:g}, constant rate, no warm-up",
            "initial weights": "normal, variance 1 / inputs; embedding 1; outputs as named, or as "
            "the placement asks ((2L)^-1/2 for pre and bhyt)",
        },
        seeds,
    )
    result.rows = rows(finals, limit)
    result.data = {
        "byte entropy": byte_entropy(), "limit": limit,
        "losses": {f"{name}, {lr:g}": some for (name, lr), some in losses.items()},
    }  # fmt: skip
    if not options.quick:
        checks(result, finals, limit)
        result.notes += [turned_note(losses), control_note(finals, HIGHER)]
    return result


# ---------------------------------------------------------------------- picture


def smooth(curve: Sequence[float], span: int = 8) -> list[float]:
    """Mean over the last ``span`` steps."""
    return [statistics.fmean(curve[max(0, i - span + 1) : i + 1]) for i in range(len(curve))]


def draw(result: Mapping[str, Any]) -> "Figure":
    """A panel per learning rate: mean over seeds, the seeds' range as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5.5), layout="constrained")
    panels = figure.subplots(1, len(RUNS), sharey=True)
    for axis, (lr, names) in zip(panels, RUNS.items(), strict=True):
        for name in names:
            curves = [smooth(curve) for curve in result["data"]["losses"][f"{name}, {lr:g}"]]
            steps = range(1, len(curves[0]) + 1)
            middle = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(steps, middle, label=name, color=f"C{list(SCHEMES).index(name)}")
            low, high = ([f(v) for v in zip(*curves, strict=True)] for f in (min, max))
            axis.fill_between(steps, low, high, alpha=0.15, color=f"C{list(SCHEMES).index(name)}")
        axis.axhline(result["data"]["byte entropy"], color="black", linewidth=0.8)
        axis.axhline(result["data"]["limit"], color="black", linewidth=0.8, linestyle=":")
        axis.set_title(f"constant learning rate {lr:g}, no warm-up")
        axis.set_xlabel("step")
        axis.legend(fontsize=8)
    panels[0].set_ylabel("nats per byte, mean of 8 steps")
    panels[0].set_ylim(2.0, 4.5)
    return figure


def main(argv: list[str] | None = None) -> int:
    return command("stability", study, draw, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
