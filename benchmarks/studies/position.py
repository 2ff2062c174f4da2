"""What attention heads need from positions, on retrieval toys that take seconds.

Sequences of random contents; every token asks one question, half of them for a content ("which
token has this one?"), half for a distance ("which token is 3, 11 or 20 back?").  Attention scores
answer alone: two heads, their scores added, and the encodings of models/positions.py.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.studies.study import Options, Study, command, each
from models.attention import SequenceContext
from models.declarations import initial_value
from models.positions import POSITIONS, AdaRoPE, NoPE, PartialRoPE, RoPE
from models.rotary import HeadShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS, DIM, LENGTH, TOKENS = 2, 8, 64, 512
DISTANCES = (3, 11, 20)
LONG = (64, 128, 256)  # lengths that the temperature arms are trained at
LENGTHS = (*LONG, 512, 1024)  # and tested at
EVALUATED = 16_384  # tokens per length

QUESTION = (
    "Do heads with different roles need different frequencies, does learning find them, and does a "
    "learned temperature carry attention to longer sequences? Two heads of 8 dimensions answer "
    "questions about contents and about distances. Accuracy / negative log-likelihood in nats on "
    "fresh sequences, mean over seeds; a uniform guess has ln(length), 4.16 at 64."
)


@dataclass(frozen=True)
class Arm:
    """What is trained.  silent: the first head's frequencies are fixed at 0.  rate: learning rate
    of frequencies.  content: dimensions of a content; 16 are more than one head can tell apart."""

    name: str
    position: Any
    silent: bool = False
    rate: float = 0.0
    content: int = 16
    lengths: tuple[int, ...] = (LENGTH,)
    tests: tuple[int, ...] = (LENGTH,)
    steps: int = 800
    lr: float = 2e-2
    decay: bool = True


def learned(
    granularity: Any = "kv_head", base: float = 10_000.0, temperature: Any = "none"
) -> AdaRoPE.Config:
    reference = 1 if temperature == "none" else LENGTH
    return AdaRoPE.Config(RoPE.Config(base), granularity, temperature, reference)


def temperature_arm(name: str, base: float, temperature: str) -> Arm:
    position = learned(base=base, temperature=temperature)
    return Arm(name, position, True, content=8, lengths=LONG, tests=LENGTHS, steps=400, lr=1e-2,
               decay=False)  # fmt: skip


ASSIGNED, UNIFORM = "assigned: one head without, one RoPE", "RoPE in both heads"
SHARED, PER_HEAD = "learned, shared", "learned per head"
ROLES = [
    Arm(UNIFORM, RoPE.Config()),
    Arm("partial RoPE, half", PartialRoPE.Config()),
    Arm("none", NoPE.Config()),
    Arm(ASSIGNED, learned(), silent=True),
    Arm(SHARED, learned("layer"), rate=5e-2),
    Arm(f"{SHARED}, slowly", learned("layer"), rate=1e-2),
    Arm(PER_HEAD, learned(), rate=5e-2),
    Arm(f"{PER_HEAD}, slowly", learned(), rate=1e-2),
    Arm("base 100, fixed", RoPE.Config(100.0)),
    Arm(f"base 100, {SHARED}", learned("layer", 100.0), rate=5e-2),
    Arm(f"base 100, {PER_HEAD}", learned(base=100.0), rate=5e-2),
]
PLAIN, GROWING = "assigned, base 100", "assigned, base 100, learned temperature"
PLAIN_SLOW, GROWING_SLOW = "assigned, base 10000", "assigned, base 10000, learned temperature"
TEMPERATURES = [
    temperature_arm(PLAIN, 100.0, "none"),
    temperature_arm(GROWING, 100.0, "query"),
    temperature_arm(PLAIN_SLOW, 10_000.0, "none"),
    temperature_arm(GROWING_SLOW, 10_000.0, "query"),
]


# ------------------------------------------------------------------------------------- the toy


@dataclass(frozen=True)
class Batch:
    """asks [B, L, content + 4]: the content asked for or zeros, and which question; has [B, L,
    content + 1].  target [B, L]: the token that answers, negative where there is none.  about
    [B, L]: True where the question is one for a content."""

    asks: Tensor
    has: Tensor
    target: Tensor
    about: Tensor


def make_batch(generator: torch.Generator, count: int, length: int, content: int) -> Batch:
    contents = torch.randn(count, length, content, generator=generator)
    contents = F.normalize(contents, dim=-1) * math.sqrt(content)
    kind = torch.randint(1, len(DISTANCES) + 1, (count, length), generator=generator)
    about = torch.rand(count, length, generator=generator) < 0.5
    kind = kind.masked_fill(about, 0)
    anywhere = torch.randint(length, (count, length), generator=generator)
    back = torch.arange(length) - torch.tensor((0, *DISTANCES))[kind]
    target = torch.where(about, anywhere, back)
    wanted = contents.gather(1, target.clamp(min=0)[..., None].expand_as(contents))
    asks = torch.cat([wanted * about[..., None], F.one_hot(kind, 4).float()], -1)
    return Batch(asks, F.pad(contents, (0, 1), value=1.0), target, about)


class Retrieval(nn.Module):
    """Scores [B, L, L] of every token for every question."""

    def __init__(self, arm: Arm, generator: torch.Generator) -> None:
        super().__init__()
        width = HEADS * DIM
        std = (arm.content + 4) ** -0.5
        self.q = nn.Parameter(torch.randn(width, arm.content + 4, generator=generator) * std)
        self.k = nn.Parameter(torch.randn(width, arm.content + 1, generator=generator) * std)
        self.position = POSITIONS.build(arm.position, HeadShape(DIM, HEADS, HEADS))
        for name, parameter in self.position.named_parameters():
            parameter.data.fill_(initial_value(self.position, name))
        if arm.silent:
            self.position.log_scale.data[0] = -math.inf

    def forward(self, asks: Tensor, has: Tensor) -> Tensor:
        q, k = ((x @ w.T).unflatten(-1, (HEADS, DIM)) for x, w in ((asks, self.q), (has, self.k)))
        context = SequenceContext(torch.arange(has.shape[1]), "bidirectional")
        q, k = self.position.rotate(q, k, context)
        return q.flatten(2) @ k.flatten(2).mT / math.sqrt(DIM)


@dataclass(frozen=True)
class Job:
    arm: Arm
    seed: int
    steps: int
    evaluated: int

    def __str__(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """By length: (accuracy, NLL) of questions for contents and of those for distances.  moved: the
    largest change of a learned log-frequency.  betas: of the two heads."""

    scores: dict[int, tuple[float, float, float, float]]
    moved: float | None
    betas: list[float]


def parameter_groups(arm: Arm, model: Retrieval) -> list[dict[str, Any]]:
    frequencies = [p for n, p in model.position.named_parameters() if n == "log_scale"]
    rest = [p for p in model.parameters() if all(p is not f for f in frequencies)]
    groups = [{"params": rest, "start": arm.lr}]
    return [*groups, {"params": frequencies, "start": arm.rate}] if arm.rate else groups


def train(job: Job) -> Outcome:
    arm = job.arm
    model = Retrieval(arm, torch.Generator().manual_seed(job.seed))
    generator = torch.Generator().manual_seed(1000 + job.seed)
    optimizer = torch.optim.Adam(parameter_groups(arm, model), lr=arm.lr)
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["start"] * (min(1, 2 - 2 * step / job.steps) if arm.decay else 1)
        length = arm.lengths[step % len(arm.lengths)]
        batch = make_batch(generator, TOKENS // length, length, arm.content)
        answered = batch.target >= 0
        loss = F.cross_entropy(model(batch.asks, batch.has)[answered], batch.target[answered])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learns = arm.rate > 0
    return Outcome(
        {length: test(model, arm, length, job.evaluated) for length in arm.tests},
        float(model.position.log_scale.detach().abs().max()) if learns else None,
        model.position.beta.tolist() if hasattr(model.position, "beta") else [],
    )


@torch.no_grad()
def test(model: Retrieval, arm: Arm, length: int, tokens: int) -> tuple[float, float, float, float]:
    generator = torch.Generator().manual_seed(7)
    parts = []
    for _ in range(max(tokens // max(length, TOKENS), 1)):
        batch = make_batch(generator, max(TOKENS // length, 1), length, arm.content)
        answered = batch.target >= 0
        scores, target = model(batch.asks, batch.has)[answered], batch.target[answered]
        loss = F.cross_entropy(scores, target, reduction="none")
        parts.append(torch.stack([batch.about[answered], scores.argmax(-1) == target, loss]))
    about, right, loss = torch.cat(parts, 1)
    found = [x[about == kind].mean().item() for kind in (1, 0) for x in (right, loss)]
    return found[0], found[1], found[2], found[3]


# ----------------------------------------------------------------------------------- the study


def mean_scores(outcomes: Sequence[Outcome], length: int) -> list[float]:
    return [statistics.mean(values) for values in zip(*(o.scores[length] for o in outcomes))]


def cell(accuracy: float, nll: float) -> str:
    return f"{accuracy:.2f} / {nll:.3f}"


def rows(arms: Sequence[Arm], found: Mapping[str, Sequence[Outcome]]) -> list[list[str]]:
    result = []
    for arm in arms:
        outcomes = found[arm.name]
        learns = ""
        if outcomes[0].moved is not None:
            learns = f"frequencies up to x e^±{max(o.moved or 0.0 for o in outcomes):.2f}"
        if outcomes[0].betas:
            betas = [statistics.mean(values) for values in zip(*(o.betas for o in outcomes))]
            learns = "beta " + ", ".join(f"{beta:.2f}" for beta in betas)
        for length in arm.tests if len(arm.tests) < 3 else (arm.tests[0], 256, arm.tests[-1]):
            scores = mean_scores(outcomes, length)
            result.append([arm.name, str(length), cell(*scores[:2]), cell(*scores[2:]), learns])
    return result


def checks(result: Study, found: Mapping[str, Sequence[Outcome]]) -> None:
    def nll(name: str, length: int = LENGTH) -> tuple[float, float]:
        scores = mean_scores(found[name], length)
        return scores[1], scores[3]

    assigned, uniform = nll(ASSIGNED), nll(UNIFORM)
    result.check(
        "a head without positions and one with them answer both kinds (NLL < 0.1 each)",
        f"{assigned[0]:.3f} and {assigned[1]:.3f}", max(assigned) < 0.1,
    )  # fmt: skip
    result.check(
        "the same rotation in both heads does not (NLL of contents > 0.5)",
        f"{uniform[0]:.3f}", uniform[0] > 0.5,
    )  # fmt: skip
    fixed, shared, own = (nll(f"base 100, {name}")[0] for name in ("fixed", SHARED, PER_HEAD))
    result.check(
        "learned frequencies beat fixed ones where the base is wrong (base 100, NLL of contents)",
        f"fixed {fixed:.2f}; shared {shared:.2f}; per head {own:.2f}", max(shared, own) < fixed,
    )  # fmt: skip
    betas = [beta for outcome in found[GROWING] for beta in outcome.betas]
    result.check("learned temperatures grow with length (every beta > 0)",
                 f"{min(betas):.2f} to {max(betas):.2f}", min(betas) > 0)  # fmt: skip
    before, after = nll(PLAIN, 1024), nll(GROWING, 1024)
    result.check(
        "and at least halve both NLLs at 1,024 tokens",
        f"contents {before[0]:.3f} -> {after[0]:.3f}, distances {before[1]:.3f} -> {after[1]:.3f}",
        all(b <= a / 2 for a, b in zip(before, after, strict=True)),
    )  # fmt: skip
    shared_nll, own_nll = nll(SHARED)[0], nll(PER_HEAD)[0]
    finds = "finds" if own_nll < 0.1 else "does not find"
    better = "not reproduced" if own_nll > 0.8 * shared_nll else "seen"
    wrong = "ahead" if own < 0.8 * shared else "not ahead"
    result.notes += [
        f"Learning per head {finds} the assignment: NLL of contents {own_nll:.3f} (shared "
        f"{shared_nll:.3f}, fixed {uniform[0]:.3f}, assigned {assigned[0]:.3f}). The published "
        f"advantage of a table per head over a shared one is {better} from RoPE's usual table on; "
        f"where the base is wrong, tables per head are {wrong}.",
        f"The price of a temperature at the shortest length: contents {nll(PLAIN)[0]:.3f} -> "
        f"{nll(GROWING)[0]:.3f} at 64.",
        "With a base of 10,000 slow pairs meet angles beyond 256 tokens that training never had: "
        f"contents at 1,024 go {nll(PLAIN_SLOW, 1024)[0]:.3f} -> "
        f"{nll(GROWING_SLOW, 1024)[0]:.3f}, distances {nll(PLAIN_SLOW, 1024)[1]:.3f} -> "
        f"{nll(GROWING_SLOW, 1024)[1]:.3f}.",
    ]


def study(options: Options) -> Study:
    arms = [*ROLES, *TEMPERATURES]
    seeds = list(range(options.seeds))
    jobs = [
        Job(arm, seed, 8 if options.quick else arm.steps, 1024 if options.quick else EVALUATED)
        for arm in arms
        for seed in seeds
    ]
    found: dict[str, list[Outcome]] = {}
    for job, outcome in zip(jobs, each(train, jobs, options.processes), strict=True):
        found.setdefault(job.arm.name, []).append(outcome)
    result = Study(
        "position",
        QUESTION,
        ["frequencies", "length", "contents", "distances", "learned"],
        {
            "toy": f"{HEADS} heads of {DIM}, contents of 16 (temperatures: 8) dimensions on a "
            f"sphere, {TOKENS} tokens a step, distances {DISTANCES}",
            "training": "Adam, 800 steps at 2e-2, linear decay in the second half; frequencies at "
            "5e-2, slowly: 1e-2; temperatures: 400 steps at 1e-2, lengths 64, 128 and 256 in turn, "
            "1 + beta ln(n / 64)",
        },
        seeds,
    )
    result.rows = rows(arms, found)
    result.data = {
        name: {str(length): mean_scores(outcomes, length) for length in outcomes[0].scores}
        for name, outcomes in found.items()
    }
    if not options.quick:
        checks(result, found)
    return result


def draw(result: Mapping[str, Any]) -> "Figure":
    """NLL of every table at 64 tokens; NLL against length with and without temperatures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    data = result["data"]
    names = [arm.name for arm in ROLES]
    for offset, index, label in ((0.2, 1, "contents"), (-0.2, 3, "distances")):
        places = [len(names) - i + offset for i in range(len(names))]
        left.barh(places, [data[name]["64"][index] for name in names], 0.4, label=label)
    left.set_yticks([len(names) - i for i in range(len(names))], names)
    left.set_xscale("log")
    left.set_xlabel("NLL at 64 tokens (nats)")
    left.legend()
    for arm, colour in zip(TEMPERATURES, ("#1f77b4", "#d62728", "#9ecae1", "#fcae91"), strict=True):
        for index, style, kind in ((1, "-", "contents"), (3, "--", "distances")):
            values = [data[arm.name][str(length)][index] for length in LENGTHS]
            right.loglog(LENGTHS, values, style, color=colour, label=f"{arm.name}: {kind}")
    right.axvline(LONG[-1], color="grey", linewidth=0.8)
    right.text(LONG[-1], right.get_ylim()[0], " trained up to here", fontsize=8, va="bottom")
    right.set_xticks(LENGTHS, map(str, LENGTHS), minor=False)
    right.set_xlabel("tokens")
    right.set_ylabel("NLL (nats)")
    right.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> int:
    return command("position", study, draw, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
