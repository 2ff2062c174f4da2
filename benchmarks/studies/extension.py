"""What the recipes for longer contexts do to a model that was trained on short ones.

A small transformer learns to recall: half of the tokens give a key and its value, half ask for the
value of a key.  It is trained at 64 tokens and then used at 256, as it is or after a few more steps
under each of the positions of recipes/extend-*.yaml.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.studies.study import Options, Study, command, each
from models.attention import AttentionConfig, SequenceContext
from models.config import InitConfig, ModelConfig
from models.feedforward import SwiGLU
from models.losses import IGNORE, CrossEntropy
from models.positions import NTK, PI, AdaRoPE, RoPE, YaRN
from parallel.apply import BuildOptions, ParallelModel, build_parallel_model
from parallel.gradients import clip_gradients, gradient_norm, zero_gradients
from parallel.mesh import ParallelConfig, build_mesh
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS, VALUES = 32, 8
SHORT, LONG = 64, 256
BUCKET = 64  # positions, and distances of needles, that are averaged together
TOKENS = 2048  # per step
STEPS, RATE = 600, 3e-3  # at the short length, with a linear decay in the second half
MORE, MORE_RATE = 60, 1e-3  # at the long one
NEEDLES = 128  # sequences per distance

QUESTION = (
    "A model that recalls values of keys over 64 tokens is used at 256, as it is or after 60 steps "
    "there. What do the positions of recipes/extend-*.yaml do for it, and what is left at 64? Loss "
    f"in nats per answer by position (a guess: {torch.tensor(VALUES).log():.2f}); needles: share "
    "of answers about a key that was given once, so many tokens before the end."
)


@dataclass(frozen=True)
class Arm:
    """Positions at the long length, and the steps taken there (0: none)."""

    name: str
    position: Any
    steps: int = MORE
    lr: float = MORE_RATE
    trainable: Any = "all"


FACTOR = LONG / SHORT
YARN = YaRN.Config(factor=FACTOR, original_length=SHORT)
FIXED = {
    "RoPE": RoPE.Config(),
    "PI": PI.Config(factor=FACTOR),
    "NTK": NTK.Config(factor=FACTOR),
    "ABF, base 100000": RoPE.Config(base=100_000.0),
    "YaRN": YARN,
}
FROZEN = AdaRoPE.Config(RoPE.Config(), reference_length=SHORT)
ARMS = [
    *(Arm(f"{name}, as it is", position, steps=0) for name, position in FIXED.items()),
    *(Arm(f"{name}, trained", position) for name, position in FIXED.items()),
    Arm("AdaRoPE from YaRN, trained", AdaRoPE.Config(YARN, reference_length=SHORT)),
    Arm("AdaRoPE, positions alone", FROZEN, lr=1e-2, trainable="positions"),
]


@dataclass(frozen=True)
class Job:
    seed: int
    steps: int
    more: int
    needles: int

    def __str__(self) -> str:
        return f"seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """losses: by bucket of positions at the long length.  short: loss at the short length.
    needles: accuracy by distance from the end, nearest first."""

    losses: list[float]
    short: float
    needles: list[float]


def recalls(generator: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and labels [count, length]: a key with its value, or a question whose answer was given
    before."""
    key = torch.randint(KEYS, (count, length), generator=generator)
    value = torch.randint(VALUES, (count, KEYS), generator=generator).gather(1, key)
    asks = torch.rand(count, length, generator=generator) < 0.5
    ids = torch.where(asks, KEYS * VALUES + key, key * VALUES + value)
    same = (key[:, :, None] == key[:, None, :]) & ~asks[:, None, :]
    known = same.tril(-1).any(-1)
    return ids, torch.where(asks & known, value, IGNORE)


def needle(generator: torch.Generator, count: int, distance: int) -> tuple[Tensor, Tensor]:
    """Ids [count, LONG] whose last token asks for key 0, given once, ``distance`` tokens before;
    its values [count]."""
    key = torch.randint(1, KEYS, (count, LONG), generator=generator)
    value = torch.randint(VALUES, (count, KEYS), generator=generator)
    asks = torch.rand(count, LONG, generator=generator) < 0.5
    ids = torch.where(asks, KEYS * VALUES + key, key * VALUES + value.gather(1, key))
    ids[:, LONG - 1 - distance] = value[:, 0]
    ids[:, -1] = KEYS * VALUES
    return ids, value[:, 0]


def make_model(position: Any, seed: int) -> ParallelModel:
    config = ModelConfig(
        vocab_size=KEYS * VALUES + KEYS,
        hidden=64,
        layers=2,
        attention=AttentionConfig(4, 4, 16),
        feedforward=SwiGLU.Config(128),
        position=position,
        init=InitConfig(std=1.0, rule="fan_in", embedding_std=1.0),
    )
    mesh = build_mesh(ParallelConfig(), torch.device("cpu"))
    return build_parallel_model(config, ParallelConfig(), mesh, BuildOptions(seed=seed))


def train(model: ParallelModel, arm: Arm, length: int, seed: int, decays: bool) -> None:
    config = OptimizerConfig(beta2=0.98, weight_decay=0.0, trainable=arm.trainable)
    optimizer = ShardedOptimizer(model, config, "torch")
    generator = torch.Generator().manual_seed(seed)
    assert model.part.head is not None
    for step in range(1, arm.steps + 1):
        ids, labels = recalls(generator, TOKENS // length, length)
        terms = [CrossEntropy(float((labels != IGNORE).sum()))]
        hidden = model.part(ids, SequenceContext(torch.arange(length)))
        loss, _ = model.part.head(hidden, {"labels": labels}, terms)
        loss.backward()
        clip_gradients(model, gradient_norm(model), 1.0)
        decay = min(1.0, 2 - 2 * step / arm.steps) if decays else 1.0
        optimizer.step(arm.lr * decay * min(1.0, step / 20))
        zero_gradients(model)


def extended(base: ParallelModel, arm: Arm, seed: int) -> ParallelModel:
    """The same weights under the arm's positions, which start at their table."""
    model = make_model(arm.position, seed)
    there = dict(base.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in there:
                parameter.copy_(there[name])
    train(model, arm, LONG, 1000 + seed, decays=False)
    return model


@torch.no_grad()
def judge(model: ParallelModel, count: int) -> Outcome:
    generator = torch.Generator().manual_seed(7)
    parts = []
    for length in (LONG, SHORT):
        ids, labels = recalls(generator, count, length)
        logits = model.part.logits(ids)
        losses = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORE)
        for begin in range(0, length, BUCKET):
            span = slice(begin, begin + BUCKET)
            parts.append(losses[:, span].sum().item() / (labels[:, span] != IGNORE).sum().item())
    found = []
    for bucket in range(LONG // BUCKET):
        distance = min(bucket * BUCKET + BUCKET // 2, LONG - 1)
        ids, value = needle(generator, count, distance)
        answers = model.part.logits(ids)[:, -1].argmax(-1)
        found.append((answers == value).double().mean().item())
    return Outcome(parts[:-1], parts[-1], found)


def measure(job: Job) -> dict[str, Outcome]:
    """Every arm from one model."""
    base = make_model(RoPE.Config(), job.seed)
    train(base, Arm("", RoPE.Config(), job.steps, RATE), SHORT, job.seed, decays=True)
    found = {}
    for arm in ARMS:
        steps = min(arm.steps, job.more)
        short = Arm(arm.name, arm.position, steps, arm.lr, arm.trainable)
        found[arm.name] = judge(extended(base, short, job.seed), job.needles)
    return found


# ----------------------------------------------------------------------------------- the study


def mean(values: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*values, strict=True)]


def checks(result: Study) -> None:
    plain, same = result.data["RoPE, as it is"], result.data["RoPE, trained"]
    result.check(
        "as it is, RoPE fails beyond the trained length (first positions < 0.1, last > 0.5)",
        f"{plain['losses'][0]:.3f} and {plain['losses'][-1]:.3f}",
        plain["losses"][0] < 0.1 and plain["losses"][-1] > 0.5,
    )
    free = [f"{name}, as it is" for name in ("NTK", "YaRN")]
    best = min(result.data[name]["losses"][-1] for name in free)
    result.check(
        "NTK or YaRN helps without training (last positions below RoPE's)",
        ", ".join(f"{name} {result.data[name]['losses'][-1]:.3f}" for name in free),
        best < plain["losses"][-1],
    )
    trained = [name for name in result.data if name.endswith(", trained")]
    last = {name: result.data[name]["losses"][-1] for name in trained}
    result.check(
        "60 steps at 256 tokens bring everything that trains wholly below RoPE as it is",
        ", ".join(f"{name.removesuffix(', trained')} {value:.3f}" for name, value in last.items()),
        max(last.values()) < plain["losses"][-1],
    )
    alone = result.data["AdaRoPE, positions alone"]
    result.notes.append(
        "With the weights frozen, learned frequencies and temperatures take the last positions "
        f"from {plain['losses'][-1]:.3f} to {alone['losses'][-1]:.3f}, and the loss at 64 from "
        f"{plain['short']:.3f} to {alone['short']:.3f}."
    )
    result.notes.append(
        "What training alone does, with RoPE unchanged, is the control of every trained row: "
        f"{same['losses'][-1]:.3f} at the last positions."
    )


def study(options: Options) -> Study:
    seeds = list(range(options.seeds))
    quick = options.quick
    jobs = [Job(s, *((2, 1, 4) if quick else (STEPS, MORE, NEEDLES))) for s in seeds]
    outcomes = each(measure, jobs, options.processes)
    buckets = [f"{a}-{a + BUCKET - 1}" for a in range(0, LONG, BUCKET)]
    result = Study(
        "extension",
        QUESTION,
        ["positions", *buckets, f"at {SHORT}", "needles"],
        {
            "model": "2 blocks, width 64, 4 heads of 16, SwiGLU of 128, RoPE of base 10,000",
            "task": f"{KEYS} keys, {VALUES} values, half of the tokens ask",
            "training": f"AdamW, batches of {TOKENS} tokens, {STEPS} steps at {RATE:g} and {SHORT} "
            f"tokens; then {MORE} steps at {MORE_RATE:g} (positions alone: 0.01) and {LONG} tokens",
            "needles": "32, 96, 160, 224 tokens before the end",
        },
        seeds,
    )
    for arm in ARMS:
        found = [outcome[arm.name] for outcome in outcomes]
        losses, needles = mean([o.losses for o in found]), mean([o.needles for o in found])
        short = statistics.fmean(o.short for o in found)
        result.data[arm.name] = {"losses": losses, "short": short, "needles": needles}
        cells = [f"{loss:.3f}" for loss in (*losses, short)]
        result.rows.append([arm.name, *cells, " ".join(f"{x:.2f}" for x in needles)])
    if not quick:
        checks(result)
    return result


def draw(result: Mapping[str, Any]) -> "Figure":
    """Loss by position and needles by distance: dotted without training, drawn out with it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = [begin + BUCKET // 2 for begin in range(0, LONG, BUCKET)]
    colours = dict(zip((*FIXED, "AdaRoPE from YaRN", "AdaRoPE"), (f"C{i}" for i in range(7))))
    for name, found in result["data"].items():
        what, _, how = name.rpartition(", ")
        style = {"as it is": ":", "trained": "-"}.get(how, "--")
        for axis, key in ((left, "losses"), (right, "needles")):
            axis.plot(places, found[key], style, color=colours[what], marker=".", label=name)
    left.set_yscale("log")
    left.set_xlabel("position (tokens)")
    left.set_ylabel("loss (nats per answer)")
    right.set_xlabel("distance of the needle (tokens)")
    right.set_ylabel("right answers (share)")
    for axis in (left, right):
        axis.axvline(SHORT, color="grey", linewidth=0.8)
        axis.grid(alpha=0.3)
    right.legend(fontsize=7)
    return figure


def main(argv: list[str] | None = None) -> int:
    return command("extension", study, draw, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
