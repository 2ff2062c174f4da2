"""What depth does to activations and gradients at the start of training.

Every placement with every norm that goes with it: the mean square of the residual stream behind the
last block, and how much larger the loss's gradient is behind the first block than behind the last,
at 16, 64 and 256 blocks.  Linear maps start with variance 1 / inputs, the embedding with 1; what is
varied is the gain of the maps that write to the residual stream.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.studies.study import Options, Study, command, each
from models.attention import AttentionConfig, SequenceContext
from models.blocks import BLOCKS
from models.config import InitConfig, ModelConfig
from models.declarations import initial_value
from models.feedforward import FEEDFORWARDS
from models.initialize import initialize_, standard_deviation
from models.norms import NORMS, BHyT, RMSNorm
from parallel.apply import BuildOptions, ParallelModel, build_parallel_model, update_state
from parallel.mesh import ParallelConfig, build_mesh

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (16, 64, 256)
OTHERS = (16, 64)  # of pairs without a reference
WIDTH, HEADS, INNER, VOCABULARY = 128, 4, 352, 256
SEQUENCES, LENGTH = 4, 64
DTYPE = torch.float64  # some pairs shrink activations below what float32 can hold

QUESTION = (
    "What do depth, the placement of norms and the kind of norm do at the start of training? "
    "Ratio: norm of the loss's gradient behind the first block over that behind the last. Square: "
    "mean square of the residual stream behind the last block. Cosine: mean over pairs of tokens "
    "there. Each at that many blocks. Gain: factor on the initial weights that write to the "
    "residual stream; own: what the placement asks for. In parentheses: what an independent "
    "implementation of the same formulas gave."
)

GAINS: dict[str, Callable[[int], float | None]] = {
    "own": lambda layers: None,  # as the placement asks
    "1": lambda layers: 1.0,
    "L^-1/4": lambda layers: layers**-0.25,
    "L^-1/2": lambda layers: layers**-0.5,
    "(2L)^-1/2": lambda layers: (2 * layers) ** -0.5,
}


@dataclass(frozen=True)
class Scheme:
    """One line of the table.  norm: a name of the registry, or one of ``VARIANTS``.  ratio, square:
    what an independent implementation of the same formulas gave, by depth."""

    block: str
    norm: str
    gain: str
    ratio: Mapping[int, float] = field(default_factory=dict)
    square: Mapping[int, float] = field(default_factory=dict)
    cosine: float | None = None  # at depth 64
    feedforward: str = "swiglu"

    @property
    def key(self) -> str:
        return f"{self.place} {self.norm} {self.gain}"

    @property
    def place(self) -> str:
        return self.block + ("" if self.feedforward == "swiglu" else f" {self.feedforward}")

    @property
    def depths(self) -> tuple[int, ...]:
        return DEPTHS if self.ratio or self.square else OTHERS


VARIANTS: dict[str, Any] = {
    "bhyt (2, 1)": BHyT.Config(attention_lambda=2.0, sequence_length=LENGTH),
    "bhyt": BHyT.Config(sequence_length=LENGTH),
    "rms gain 0.1": RMSNorm.Config(gain=0.1),
}
REFERENCES = (
    Scheme("span", "rms", "1", {16: 9.0, 64: 8.1e3, 256: 6.5e14}, cosine=0.014),
    Scheme("span", "rms", "L^-1/4", {16: 1.94, 64: 4.26, 256: 20.6}),
    Scheme("span", "rms", "L^-1/2", {16: 1.18, 64: 1.20, 256: 1.20}),
    Scheme("span", "rms", "(2L)^-1/2", {16: 1.08, 64: 1.09, 256: 1.09}),
    Scheme("post", "rms", "1", {16: 4.8, 64: 6.8e3, 256: 2.6e13}, cosine=1.0),
    Scheme("post", "rms", "(2L)^-1/2", {16: 1.12, 64: 1.12, 256: 1.13}),
    Scheme("pre", "rms", "1", {256: 27}, {256: 262}, cosine=0.67),
    Scheme("peri", "rms", "1", {256: 39}, {256: 498}, cosine=0.56),
    Scheme("lns", "rms", "1", {256: 1.4}, {256: 3.4}),
    Scheme("pre", "dyt", "1", {256: 241}, {256: 199}),
    Scheme("pre", "bhyt (2, 1)", "1", {256: 2.6}, {256: 6.2}),
    Scheme("pre", "bhyt", "1", {256: 1.25}, {256: 1.56}),
    Scheme("keel", "rms", "1", {16: 0.99, 64: 0.99, 256: 0.99}),
    Scheme("deepnorm", "rms", "own", {16: 0.99, 64: 0.99, 256: 0.99}),
    Scheme("hybrid", "rms", "1", cosine=0.94),
    Scheme("reordered", "rms", "1", {64: 6e7}),
)


# adaln starts as the identity, at every depth.
PLACEMENTS = [name for name in BLOCKS.names() if name != "adaln"]


def model_config(scheme: Scheme, layers: int) -> ModelConfig:
    norm = VARIANTS.get(scheme.norm) or NORMS.config_class(scheme.norm)()
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden=WIDTH,
        layers=layers,
        attention=AttentionConfig(HEADS, HEADS, WIDTH // HEADS),
        feedforward=FEEDFORWARDS.config_class(scheme.feedforward)(INNER),
        block=BLOCKS.config_class(scheme.block)(),
        norm=norm,
        init=InitConfig(
            std=1.0, rule="fan_in", embedding_std=1.0, output_gain=GAINS[scheme.gain](layers)
        ),
    )


def schemes() -> list[Scheme]:
    """The ones with references, and every other legal pair, bare and as the placement asks."""
    found = [*REFERENCES, *(Scheme(b, "rms", "1", feedforward="gelu") for b in ("span", "post"))]
    known = {scheme.key for scheme in found}
    for block in PLACEMENTS:
        for norm in dict.fromkeys([*NORMS.names(), *VARIANTS]):
            for gain in ("1", "own"):
                scheme = Scheme(block, norm, gain)
                if model_config(scheme, 2).problems() or scheme.key in known:
                    continue
                if gain == "1" and block == "deepnorm":
                    continue  # its gains are what makes it itself
                if gain == "own" and not BLOCKS.component(block).shrink(2):  # type: ignore[attr-defined]
                    continue  # that is gain 1
                if norm in ("bhyt (2, 1)", "rms gain 0.1") and (block, gain) != ("pre", "1"):
                    continue  # they stand beside bhyt
                found.append(scheme)
    return found


@dataclass(frozen=True)
class Job:
    scheme: Scheme
    layers: int
    seed: int

    def __str__(self) -> str:
        return f"{self.scheme.key}, {self.layers} blocks, seed {self.seed}"


@dataclass(frozen=True)
class Point:
    """square: mean square of x_L.  ratio: ‖∂loss/∂x_1‖ / ‖∂loss/∂x_L‖, x_l the output of block l.
    cosine: mean over pairs of tokens of a sequence, at x_L."""

    square: float
    ratio: float
    cosine: float


@torch.no_grad()
def initialize(model: ParallelModel, seed: int) -> None:
    """Initial weights by the project's rules, but from torch's generator: which numbers they are
    does not matter here, and most of the study would be spent on making them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.part.named_parameters():
        declared = initial_value(model.part, name)
        if declared is None and parameter.dim() > 1:
            std = standard_deviation(model.config, name, parameter.shape)
            parameter.normal_(std=std, generator=generator)
        else:
            shape = parameter.shape
            initialize_(parameter, model.config, seed, name, [0] * len(shape), shape, declared)
    update_state(model, 0)


def measure(job: Job) -> Point:
    parallel = ParallelConfig()
    mesh = build_mesh(parallel, torch.device("cpu"))
    config = model_config(job.scheme, job.layers)
    model = build_parallel_model(
        config, parallel, mesh, BuildOptions(dtype=DTYPE, initialize=False)
    )
    initialize(model, job.seed)
    part = model.part.requires_grad_(False)  # only the stream's gradient is wanted
    assert part.head is not None
    ends: dict[str, Tensor] = {}

    def first(module: Any, inputs: Any, output: Tensor) -> Tensor:
        ends["first"] = output.requires_grad_()
        return output

    def last(module: Any, inputs: Any, output: Tensor) -> None:
        ends["last"] = output

    blocks = list(part.blocks.values())
    blocks[0].register_forward_hook(first)
    blocks[-1].register_forward_hook(last)
    generator = torch.Generator().manual_seed(job.seed)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    hidden = part(tokens[:, :-1], SequenceContext(torch.arange(LENGTH)))
    loss = F.cross_entropy(part.head.logits(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [ends["first"], ends["last"]])
    at_first, at_last = (gradient.double().norm().item() for gradient in gradients)
    x = ends["last"].detach().double()
    unit = x / x.norm(dim=-1, keepdim=True)
    together = unit.sum(1).square().sum(-1)  # LENGTH + the sum over pairs
    cosine = ((together - LENGTH) / (LENGTH * (LENGTH - 1))).mean().item()
    return Point(x.square().mean().item(), at_first / at_last, cosine)


# ---------------------------------------------------------------------- table and checks


def logarithmic_mean(values: Sequence[float]) -> float:
    """Geometric; 0 when one of them is."""
    return statistics.geometric_mean(values) if min(values) > 0 else 0.0


def mean_points(points: Sequence[Point]) -> Point:
    """Over seeds; geometric of what spreads over orders of magnitude."""
    return Point(
        logarithmic_mean([point.square for point in points]),
        logarithmic_mean([point.ratio for point in points]),
        statistics.fmean(point.cosine for point in points),
    )


def short(value: float) -> str:
    """Three digits, two of what is very large or small."""
    if value == 0 or 1e-3 < value < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def beside(measured: float, reference: float | None) -> str:
    return short(measured) + ("" if reference is None else f" ({short(reference)})")


Points = Mapping[tuple[str, int], Point]  # by scheme and depth


def rows(found: Sequence[Scheme], points: Points, depths: Sequence[int]) -> list[list[str]]:
    lines = []
    for scheme in found:
        line = [scheme.place, scheme.norm, scheme.gain]
        here = {depth: points.get((scheme.key, depth)) for depth in depths}
        for name in ("ratio", "square"):
            reference = getattr(scheme, name)
            line += [
                "" if point is None else beside(getattr(point, name), reference.get(depth))
                for depth, point in here.items()
            ]
        middle = here[depths[1]]
        cosine = "" if scheme.cosine is None else f" ({scheme.cosine})"
        line.append("" if middle is None else f"{middle.cosine:.2f}{cosine}")
        lines.append(line)
    return lines


def checks(study: Study, points: Points) -> None:
    def ratios(key: str) -> list[float]:
        return [points[key, depth].ratio for depth in DEPTHS]

    def listed(values: Sequence[float]) -> str:
        return ", ".join(map(short, values))

    found = ratios("span rms L^-1/2")
    study.check(
        "span, gain L^-1/2: gradient ratio within 0.8 to 1.5 at every depth, all within 10 %",
        listed(found),
        all(0.8 <= r <= 1.5 for r in found) and max(found) <= 1.1 * min(found),
    )
    found = ratios("span rms L^-1/4")
    study.check("span, gain L^-1/4: it grows", listed(found), 1 < found[0] < found[1] < found[2])
    for block in ("span", "post"):
        ratio = points[f"{block} rms 1", 64].ratio
        study.check(f"{block}, gain 1: above 1,000 at 64 blocks", short(ratio), ratio > 1e3)
    found = [points[f"{block} gelu rms 1", 64].ratio for block in ("span", "post")]
    claim = "with GELU for SwiGLU neither span nor post explodes: below 10 at 64 blocks, gain 1"
    study.check(claim, listed(found), max(found) < 10)
    found = ratios("keel rms 1") + ratios("deepnorm rms own")
    within = all(0.98 <= r <= 1.0 for r in found)
    study.check("keel and deepnorm: 0.98 to 1.00 at every depth", listed(found), within)
    found = [points["pre rms 1", depth].square / depth for depth in DEPTHS]
    near = all(0.7 <= value <= 1.3 for value in found)
    study.check("pre, gain 1: mean square of x_L is L, within 30 %", listed(found), near)
    found = [points[f"pre {norm} 1", 256].square for norm in ("bhyt (2, 1)", "bhyt")]
    study.check("bhyt: mean square below 8 at 256 blocks", listed(found), max(found) < 8)
    post, span = (points[f"{block} rms 1", 64].cosine for block in ("post", "span"))
    text = f"{post:.4f}, {span:.4f}"
    study.check("cosine of tokens, 64 blocks, gain 1: post > 0.99, span < 0.05", text,
                post > 0.99 and span < 0.05)  # fmt: skip
    for scheme in REFERENCES:
        for depth, reference in scheme.ratio.items():
            where = f"{scheme.block} {scheme.norm}, gain {scheme.gain}, {depth} blocks"
            ratio = points[scheme.key, depth].ratio
            if reference < 1.5:
                study.check(f"{where}: ratio 0.8 to 1.5", short(ratio), 0.8 <= ratio <= 1.5)
            elif reference > 10:
                off = abs(math.log10(ratio) / math.log10(reference) - 1)
                text = f"{short(ratio)}, {100 * off:.1f} % off"
                claim = f"{where}: log10 of the ratio within 15 % of {short(reference)}'s"
                study.check(claim, text, off <= 0.15)
    study.check(
        "every figure of every pair is finite",
        f"{len(points)} figures",
        all(math.isfinite(p.ratio) and math.isfinite(p.square) for p in points.values()),
    )


def extreme(found: Sequence[Scheme], points: Points) -> str:
    """Which pairs start with gradients far out, at gain 1 or as they ask."""
    groups: dict[str, list[str]] = {"explode": [], "vanish": []}
    for scheme in found:
        ratio = points[scheme.key, 64].ratio if (scheme.key, 64) in points else 1.0
        if not 1e-3 <= ratio <= 1e3:
            name = f"{scheme.block} {scheme.norm} at gain {scheme.gain}"
            groups["explode" if ratio > 1 else "vanish"].append(f"{name} {short(ratio)}")
    text = "; ".join(f"{word}: {', '.join(names)}" for word, names in groups.items())
    return f"Gradients at 64 blocks beyond 1,000 times either way. {text}."


QUICK_DEPTHS = (2, 4)
QUICK = ("span rms L^-1/2", "pre bhyt 1", "post layer 1")


def study(options: Options) -> Study:
    found = schemes()
    if options.quick:
        found = [replace(s, ratio={}, square={}) for s in found if s.key in QUICK]
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    of = {scheme.key: depths if options.quick else scheme.depths for scheme in found}
    seeds = list(range(options.seeds))
    jobs = [Job(s, depth, seed) for s in found for depth in of[s.key] for seed in seeds]
    jobs.sort(key=lambda job: -job.layers)
    each_point: dict[tuple[str, int], list[Point]] = {}
    for job, point in zip(jobs, each(measure, jobs, options.processes), strict=True):
        each_point.setdefault((job.scheme.key, job.layers), []).append(point)
    points = {key: mean_points(some) for key, some in each_point.items()}
    result = Study(
        "depth",
        QUESTION,
        ["block", "norm", "gain", *(f"ratio {depth}" for depth in depths),
         *(f"square {depth}" for depth in depths), f"cosine {depths[1]}"],
        {
            "model": f"width {WIDTH}, {HEADS} heads, SwiGLU of {INNER}, RoPE, {VOCABULARY} tokens",
            "batch": f"{SEQUENCES} x {LENGTH} random tokens, cross-entropy of random labels",
            "initial weights": "normal, variance 1 / inputs; embedding 1; gains of norms 1",
            "bhyt": "kappa 10, lambda (1, 1) or (2, 1), T of the batch; dyt, derf: alpha 0.5",
        },
        seeds,
    )  # fmt: skip
    result.rows = rows(found, points, depths)
    result.data = {
        f"{key}, {depth} blocks": [[p.square, p.ratio, p.cosine] for p in some]
        for (key, depth), some in each_point.items()
    }
    if not options.quick:
        checks(result, points)
        result.notes.append(extreme(found, points))
    return result


# ---------------------------------------------------------------------- picture

COLOURS = {
    "pre": "#1f77b4", "post": "#d62728", "span": "#2ca02c", "peri": "#9467bd", "lns": "#17becf",
    "keel": "#8c564b", "deepnorm": "#e377c2", "reordered": "#ff7f0e", "hybrid": "#7f7f7f",
}  # fmt: skip
STYLES = {"1": "-", "own": "-", "L^-1/4": "--", "L^-1/2": "-.", "(2L)^-1/2": ":"}
MARKERS = {"rms": "o", "dyt": "s", "bhyt": "v", "bhyt (2, 1)": "^"}


def draw(result: Mapping[str, Any]) -> "Figure":
    """Curves of the schemes with references above, all pairs at the deepest common depth below."""
    from matplotlib.figure import Figure

    values: dict[str, dict[int, Point]] = {}
    for name, some in result["data"].items():
        key, depth = name.removesuffix(" blocks").rsplit(", ", 1)
        values.setdefault(key, {})[int(depth)] = mean_points([Point(*point) for point in some])
    figure = Figure(figsize=(15, 11), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, name in zip(axes[0], ("ratio", "square"), strict=True):
        for scheme in REFERENCES:
            points = values.get(scheme.key, {})
            axis.loglog(
                list(points), [getattr(point, name) for point in points.values()],
                color=COLOURS[scheme.block], linestyle=STYLES[scheme.gain],
                marker=MARKERS[scheme.norm], markersize=4, label=scheme.key,
            )  # fmt: skip
        axis.set_xticks(DEPTHS, map(str, DEPTHS))
        axis.tick_params(axis="x", which="minor", labelbottom=False)
        axis.set_xlabel("blocks")
        axis.grid(alpha=0.3)
    axes[0][0].set_title("gradient norm behind the first block / behind the last")
    axes[0][1].set_title("mean square of the residual stream behind the last block")
    axes[0][0].legend(fontsize=7, ncols=2)
    for axis, gain in zip(axes[1], ("1", "own"), strict=True):
        _grid(axis, values, gain)
    return figure


def _grid(axis: Any, values: Mapping[str, Mapping[int, Point]], gain: str) -> None:
    blocks, norms = PLACEMENTS, NORMS.names()
    shown = [[math.nan] * len(norms) for _ in blocks]
    for i, block in enumerate(blocks):
        for j, norm in enumerate(norms):
            points = values.get(f"{block} {norm} {gain}")
            if points is None and gain == "own":
                points = values.get(f"{block} {norm} 1")
            if points is not None:
                ratio = points[min(64, max(points))].ratio
                level = math.log10(ratio) if ratio > 0 else -math.inf
                shown[i][j] = max(level, -1e3)
                axis.text(j, i, f"{level:.2f}", ha="center", va="center", fontsize=8)
    axis.imshow(shown, cmap="coolwarm", vmin=-8, vmax=8, aspect="auto")
    axis.set_xticks(range(len(norms)), norms)
    axis.set_yticks(range(len(blocks)), blocks)
    text = "gain 1" if gain == "1" else "as each placement starts"
    axis.set_title(f"log10 of the gradient ratio at 64 blocks, {text}")


def main(argv: list[str] | None = None) -> int:
    return command("depth", study, draw, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
