"""What a run will cost, before it starts: parameters, memory, tokens, FLOPs, pipeline timeline.

Needs no process group, so that any number of ranks can be planned on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from models.flops import UnitSize, training_flops_per_token, unit_sizes
from models.transformer import module_name
from parallel.expert import expert_layers
from parallel.pipeline.actions import Schedule
from parallel.pipeline.cost import CostTable, Network
from parallel.pipeline.drawing import png_timeline
from parallel.pipeline.schedules import Conditions, make_schedule
from parallel.pipeline.simulate import Simulation, simulate
from parallel.pipeline.timeline import ascii_timeline, svg_timeline
from parallel.pipeline.units import HEAD, Placement, Unit
from parallel.stage import unit_name

from .config import RunConfig, check_run
from .memory import RankMemory, memory_per_rank
from .placement import plan_pipeline, rank_units
from .planner_table import PlannerTable, planner_json, planner_lines, planner_table
from .throughput import CHINCHILLA_TOKENS_PER_PARAMETER

ASSUMED_UTILISATION = 0.4
ASSUMPTIONS = """\
weights, gradients and AdamW state are exact; activations and workspace are measured on the modules
  themselves (eager mode, a fused attention kernel; torch.compile usually needs less)
a peak is the most at one instant, so it can be less than the sum of its row
not included: scratch memory inside kernels, communication libraries, the allocator's fragmentation,
  the framework's own memory (about 1 GiB on a GPU)
FLOPs count matrix products, 2 per multiply-add, backward as twice forward, whole attention scores;
  recomputation and padding are left out
the timeline takes time proportional to FLOPs and transfers as free, unless pipeline.costs names a
  file with times"""

EXPERT_ASSUMPTIONS = """\
experts are used equally; FLOPs and the Chinchilla multiple take the router's k as the number that a
  token uses, memory the most that it may use"""


@dataclass(frozen=True)
class Work:
    """Tokens and FLOPs of the run.  seconds: None where no speed is known."""

    steps: int
    tokens_per_step: int
    tokens: int
    chinchilla_multiple: float
    micro_batches: int
    forward_flops_per_token: float
    backward_flops_per_token: float
    flops: float
    flops_per_second: float | None
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run on ``world_size`` ranks.

    rank_parameters: whole logical parameters by pipeline rank; a tied matrix on two ranks counts on
    both.  simulation: of all micro-batches of a step, in seconds where a speed is known, else in
    FLOPs of one rank.
    """

    config: RunConfig
    world_size: int
    sizes: dict[str, UnitSize]
    placement: Placement
    schedule: Schedule
    memory: tuple[RankMemory, ...]
    rank_parameters: tuple[int, ...]
    work: Work
    costs: CostTable
    network: Network
    simulation: Simulation
    planners: PlannerTable | None = None

    @property
    def parameters(self) -> int:
        return sum(size.parameters for size in self.sizes.values())

    @property
    def unit(self) -> str:
        """Of the simulation's times."""
        known = self.config.parallel.pipeline.costs is not None
        return "s" if known or self.work.flops_per_second is not None else "FLOP"

    @property
    def largest(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.peak)

    def first_rank(self, pp_rank: int) -> int:
        """The global rank at this pipeline position and 0 on every other axis."""
        return pp_rank * (self.world_size // self.config.parallel.pp)


def make_plan(
    config: RunConfig, world_size: int, flops_per_second: float | None = None,
    compare: bool = False, half_blocks: bool = False,
) -> Plan:  # fmt: skip
    """Plan a run.  ``flops_per_second``: achieved by one rank; None for 40 % of
    ``metrics.peak_tflops``.  ``compare``: also what every pipeline planner makes of it, on demand
    with ``half_blocks``.  ``ConfigError`` or ``ValueError`` when the layout is illegal."""
    check_run(config, world_size, {})
    model, parallel, training = config.model, config.parallel, config.training
    pipeline, length = parallel.pipeline, config.slots
    data_ranks = parallel.replicas(world_size) * parallel.fsdp
    micro_batches = training.batch // (data_ranks * training.micro_batch)
    request, placement = plan_pipeline(
        model, parallel, length, micro_batches, config.sequences_at_once
    )  # fmt: skip
    assert request.costs is not None
    conditions = Conditions(request.costs, request.network, pipeline.max_in_flight)
    schedule = make_schedule(pipeline.schedule, placement, micro_batches, conditions)
    if flops_per_second is None and config.metrics.peak_tflops is not None:
        flops_per_second = ASSUMED_UTILISATION * config.metrics.peak_tflops * 1e12
    sizes = unit_sizes(model, length)
    # Times from a file are in seconds; FLOPs are those of all tensor ranks.
    scale = 1 / parallel.tp / (flops_per_second or 1.0)
    seconds = pipeline.costs is not None or flops_per_second is not None
    scale = 1.0 if pipeline.costs is not None else scale
    costs, network = request.costs.scaled(scale), request.network
    table = None
    if compare:
        unit = "s" if seconds else "FLOP"
        table = planner_table(
            config, micro_batches, scale, unit, half_blocks
        )  # fmt: skip
    return Plan(
        config=config,
        world_size=world_size,
        sizes=sizes,
        placement=placement,
        schedule=schedule,
        memory=tuple(memory_per_rank(config, world_size, placement, schedule)),
        rank_parameters=_rank_parameters(config, placement, sizes),
        work=_work(config, world_size, sizes, micro_batches, flops_per_second),
        costs=costs,
        network=network,
        simulation=simulate(schedule, costs, network.latency, network.bandwidth),
        planners=table,
    )


def _rank_parameters(
    config: RunConfig, placement: Placement, sizes: dict[str, UnitSize]
) -> tuple[int, ...]:
    model, found = config.model, []
    embeds = model.mtp.shares_embedding
    for rank in range(placement.num_ranks):
        names = {module_name(model, unit) for unit in rank_units(placement, rank)}
        if (model.tie_embeddings and "head" in names) or (
            embeds and any(name.startswith("mtp.") for name in names)
        ):
            names.add("embedding")
        found.append(sum(sizes[name].parameters for name in names))
    return tuple(found)


def _work(
    config: RunConfig, world_size: int, sizes: dict[str, UnitSize], micro_batches: int,
    flops_per_second: float | None,
) -> Work:  # fmt: skip
    training = config.training
    tokens = training.total_steps * training.batch_tokens
    seen = config.objective
    forward = training_flops_per_token(
        config.model, training.sequence_length, seen.views, seen.canvas, seen.judged
    ) / 3  # fmt: skip
    inner = sum(s.active for name, s in sizes.items() if name not in ("embedding", "head"))
    flops = 3 * forward * tokens
    speed = flops_per_second
    return Work(
        steps=training.total_steps,
        tokens_per_step=training.batch_tokens,
        tokens=tokens,
        chinchilla_multiple=tokens / (CHINCHILLA_TOKENS_PER_PARAMETER * inner),
        micro_batches=micro_batches,
        forward_flops_per_token=forward,
        backward_flops_per_token=2 * forward,
        flops=flops,
        flops_per_second=speed,
        seconds=None if speed is None else flops / (speed * world_size),
    )


def describe_plan(config: RunConfig, world_size: int, flops_per_second: float | None = None) -> str:
    """The plan as text."""
    return plan_text(make_plan(config, world_size, flops_per_second))


def plan_text(plan: Plan) -> str:
    """Sections of aligned lines, ending with a newline."""
    sections = [
        ("model", _model_lines(plan)),
        ("layout", _layout_lines(plan)),
        ("memory per rank", _memory_lines(plan)),
        ("work", _work_lines(plan)),
        ("pipeline", _pipeline_lines(plan)),
        *([("planners", planner_lines(plan.planners))] if plan.planners else []),
        ("assumptions", [*ASSUMPTIONS.splitlines(), *_expert_lines(plan)]),
    ]
    return "\n".join(
        "\n".join([title, *(f"  {line}".rstrip() for line in lines), ""])
        for title, lines in sections
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _grouped(names: Iterable[str], sizes: dict[str, UnitSize]) -> list[tuple[str, list[str]]]:
    """Runs of consecutive blocks of one size under one label."""
    groups = []
    for _, run in groupby(names, key=lambda n: sizes[n] if n.startswith("blocks.") else n):
        members = list(run)
        last = members[-1].removeprefix("blocks.")
        groups.append((members[0] + (f"-{last}" if len(members) > 1 else ""), members))
    return groups


def _model_lines(plan: Plan) -> list[str]:
    rows = [("unit", "count", "parameters each", "parameters", "share")]
    for label, members in _grouped(plan.sizes, plan.sizes):
        each = plan.sizes[members[0]].parameters
        share = each * len(members) / plan.parameters
        cells = (label, str(len(members)), f"{each:,}", f"{each * len(members):,}", f"{share:.1%}")
        rows.append(cells)
    rows.append(("total", "", "", f"{plan.parameters:,}", ""))
    model = plan.config.model
    lines = _table(rows)
    lines.append(
        f"vocabulary {model.vocab_size:,}, stored as {model.padded_vocab_size:,} rows"
        + ("; the head shares the embedding's weight" if model.tie_embeddings else "")
    )
    return lines


def _expert_lines(plan: Plan) -> list[str]:
    return EXPERT_ASSUMPTIONS.splitlines() if expert_layers(plan.config.model) else []


def _layout_lines(plan: Plan) -> list[str]:
    parallel, world = plan.config.parallel, plan.world_size
    degrees = {
        "ranks": world,
        "pipeline (pp)": parallel.pp,
        "replicas (dp)": parallel.replicas(world),
        "sharded data (fsdp)": parallel.fsdp,
        "experts (ep, of dp)": parallel.ep,
        "tensor (tp)": parallel.tp,
    }
    rows = [(name, str(value)) for name, value in degrees.items()]
    precision = plan.config.precision
    return [
        *_table(rows),
        f"sequence parallel {'on' if parallel.sp else 'off'}, recompute {parallel.recompute}, "
        f"weights {precision.weights}, compute {precision.compute}",
        f"micro-batches per step and data rank: {plan.work.micro_batches} of "
        f"{plan.config.training.micro_batch} × {plan.config.training.sequence_length} tokens",
    ]


_COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations", "workspace", "buffers",
            "reduction", "peak")  # fmt: skip


def _memory_lines(plan: Plan) -> list[str]:
    most = plan.largest.peak
    unit, size = next(u for u in _BYTE_UNITS if most >= u[1])
    columns = [c for c in _COLUMNS if any(getattr(m, c) for m in plan.memory)]
    rows = [("pp rank", "parameters", "in flight", *columns)]
    for memory in plan.memory:
        cells = [f"{getattr(memory, column) / size:.2f}" for column in columns]
        parameters = f"{plan.rank_parameters[memory.pp_rank]:,}"
        rows.append((str(memory.pp_rank), parameters, str(memory.in_flight), *cells))
    largest = plan.largest
    first = plan.first_rank(largest.pp_rank)
    last = plan.first_rank(largest.pp_rank + 1) - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return [
        *_table(rows),
        f"bytes in {unit}; parameters are whole ones, before fsdp, ep and tp divide them",
        f"largest: pipeline rank {largest.pp_rank} ({ranks}) with "
        f"{largest.peak / size:.2f} {unit} at its peak",
    ]


_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def _work_lines(plan: Plan) -> list[str]:
    work = plan.work
    rows = [
        ("steps", f"{work.steps:,}"),
        ("tokens per step", f"{work.tokens_per_step:,}"),
        ("tokens", f"{work.tokens:,}"),
        ("Chinchilla multiple", f"{work.chinchilla_multiple:.3g}"),
        ("FLOPs per token, forward", f"{work.forward_flops_per_token:,.0f}"),
        ("FLOPs per token, backward", f"{work.backward_flops_per_token:,.0f}"),
        ("FLOPs of the run", f"{work.flops:.4g}"),
    ]
    if work.seconds is None:
        rows.append(("time", "unknown: set metrics.peak_tflops"))
    else:
        assert work.flops_per_second is not None
        speed = f"{work.flops_per_second / 1e12:.4g} TFLOP/s per rank"
        rows.append(("time", f"{_duration(work.seconds)} at {speed}"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:,.1f} days"


def _pipeline_lines(plan: Plan) -> list[str]:
    parallel, simulation, placed = plan.config.parallel, plan.simulation, plan.placement.stages
    if parallel.pp == 1:
        return ["none (pp=1): forward and backward of one micro-batch after another"]
    rows = [("stage", "pp rank", "parameters", "share of time", "  units")]
    loads = [plan.costs.stage(plan.placement, stage).load for stage in range(len(placed))]
    for stage, units in enumerate(placed):
        parameters = sum(plan.sizes[name].parameters for name in {unit_name(u) for u in units})
        share = loads[stage] / sum(loads)
        rank = plan.placement.ranks[stage]
        rows.append(
            (str(stage), str(rank), f"{parameters:,}", f"{share:.1%}", _labels(plan, units))
        )
    width = max(len(row[-1]) for row in rows)
    rows = [(*row[:-1], row[-1].ljust(width)) for row in rows]
    shown = min(plan.work.micro_batches, max(8, 2 * parallel.pp))
    drawn = simulation
    lines = [*_table(rows), ""]
    if shown < plan.work.micro_batches:
        conditions = Conditions(plan.costs, plan.network, parallel.pipeline.max_in_flight)
        fewer = make_schedule(parallel.pipeline.schedule, plan.placement, shown, conditions)
        drawn = simulate(fewer, plan.costs, plan.network.latency, plan.network.bandwidth)
    unit = "seconds" if plan.unit == "s" else "FLOPs"
    lines += ascii_timeline(drawn.events, 90).splitlines()
    bubbles = [f"{share:.1%}" for share in simulation.bubble]
    note = f" (the timeline shows a step of {shown})" if shown < plan.work.micro_batches else ""
    lines += [
        f"time in {unit} of one rank; {parallel.pipeline.schedule}, planner "
        f"{parallel.pipeline.planner}, {plan.work.micro_batches} micro-batches{note}",
        f"bubble {simulation.bubble_fraction:.1%} of all rank time; by rank: {' '.join(bubbles)}",
    ]
    return lines


def _labels(plan: Plan, units: Sequence[Unit]) -> str:
    """The units of a stage; heads by depth where there are several, with their share of chunks."""
    names = [unit_name(unit) for unit in units if unit.kind != HEAD]
    labels = [label for label, _ in _grouped(names, plan.sizes)]
    heads = [unit for unit in plan.placement.units if unit.kind == HEAD]
    for depth in sorted({unit.index for unit in units if unit.kind == HEAD}):
        mine, every = (
            sum(u.kind == HEAD and u.index == depth for u in some) for some in (units, heads)
        )
        label = f"head {depth}" if any(unit.index for unit in heads) else "head"
        labels.append(label + (f" ({mine}/{every})" if mine < every else ""))
    return " ".join(labels)


def _json_name(unit: Unit, placement: Placement) -> str:
    heads = sum(other.kind == HEAD for other in placement.units)
    if unit.kind != HEAD or heads == 1:
        return unit_name(unit)
    return f"head.{unit.index}.{unit.chunk}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: bytes, parameters, FLOPs, seconds and fractions."""
    parallel = plan.config.parallel
    return {
        "world_size": plan.world_size,
        "parameters": {
            "total": plan.parameters,
            "by_unit": {name: size.parameters for name, size in plan.sizes.items()},
            "by_pipeline_rank": list(plan.rank_parameters),
        },
        "layout": {
            "pp": parallel.pp,
            "dp": parallel.replicas(plan.world_size),
            "fsdp": parallel.fsdp,
            "ep": parallel.ep,
            "tp": parallel.tp,
            "sp": parallel.sp,
            "recompute": parallel.recompute,
        },
        "memory": [asdict(memory) for memory in plan.memory],
        "largest_pp_rank": plan.largest.pp_rank,
        "work": asdict(plan.work),
        "pipeline": {
            "schedule": parallel.pipeline.schedule,
            "stages": [
                {"pp_rank": rank, "units": [_json_name(unit, plan.placement) for unit in units]}
                for rank, units in zip(plan.placement.ranks, plan.placement.stages, strict=True)
            ],
            "bubble_fraction": plan.simulation.bubble_fraction,
            "bubble_by_rank": list(plan.simulation.bubble),
        },
        "planners": None if plan.planners is None else planner_json(plan.planners),
    }


def _title(plan: Plan) -> str:
    parallel = plan.config.parallel
    return (
        f"{plan.config.name}: {parallel.pipeline.schedule}, pp={parallel.pp}, "
        f"{plan.work.micro_batches} micro-batches, bubble {plan.simulation.bubble_fraction:.1%}"
    )


def plan_svg(plan: Plan) -> str:
    """The pipeline timeline of a whole step as an SVG document."""
    return svg_timeline(plan.simulation.events, title=_title(plan), unit=plan.unit)


def plan_png(plan: Plan) -> bytes:
    """The same as a PNG picture."""
    return png_timeline(plan.simulation.events, title=_title(plan), unit=plan.unit)
