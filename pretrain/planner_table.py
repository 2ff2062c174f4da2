"""All pipeline planners on one configuration, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel.pipeline.comparison import Comparison, Entry, compare_planners
from parallel.pipeline.layout import write_layout

from .config import RunConfig
from .placement import plan_request

MOST_LISTED = 16  # ranks whose loads are printed one by one
NOTES = """\
adahc takes the fastest plan of all kinds; vocab (heads divided by vocabulary over the ranks) and
  half blocks (cut between attention and feed-forward) cannot be run
load: of the busiest rank, forward and backward of a micro-batch, over that of equal ranks
memory is an estimate: weights, gradients and AdamW state with every copy of the head, activations
  in proportion to linear maps, received hidden states; the section above measures the chosen one"""


@dataclass(frozen=True)
class PlannerTable:
    """tokens: of a step.  scale: seconds (or FLOPs of a rank) per unit of the cost table.
    unit: of times, ``s`` or ``FLOP``."""

    comparison: Comparison
    tokens: int
    scale: float
    unit: str


def planner_table(
    config: RunConfig, micro_batches: int, scale: float, unit: str, half_blocks: bool = False
) -> PlannerTable:
    """Compare the planners; heads are divided into as many chunks as planner ``adahc`` would."""
    parallel, training = config.parallel, config.training
    pipeline = parallel.pipeline
    split = pipeline.splits_weight_gradients
    fitted = replace(pipeline, planner="adahc", schedule="adahc_zb" if split else "adahc")
    request = plan_request(
        config.model, replace(parallel, pipeline=fitted), config.slots, micro_batches,
        config.sequences_at_once,
    )  # fmt: skip
    comparison = compare_planners(request, half_blocks)
    return PlannerTable(comparison, training.batch_tokens, scale, unit)


def planner_lines(table: PlannerTable) -> list[str]:
    """Aligned columns, then the loads of every rank, then notes."""
    comparison = table.comparison
    best = comparison.entry("adahc")
    rows = [("planner", "schedule", "load", "bubble", "memory", "hosts", "step", "tokens/s",
             "adahc is")]  # fmt: skip
    for entry in comparison.entries:
        step = entry.step * table.scale
        timed = table.unit == "s"
        rows.append((
            entry.planner + ("" if entry.runs else " *"),
            entry.schedule,
            f"{max(entry.loads) / comparison.bound:.3f}",
            f"{entry.simulation.bubble_fraction:.1%}",
            f"{max(entry.simulation.peak_bytes) / 2**30:.2f}",
            str(entry.hosts),
            f"{step:.4g}",
            f"{table.tokens / step:,.0f}" if timed else "-",
            f"×{entry.step / best.step:.3f}" if best else "-",
        ))  # fmt: skip
    lines = _aligned(rows)
    seconds = "seconds" if table.unit == "s" else "FLOPs of one rank"
    lines += [f"step in {seconds}, memory in GiB of the fullest rank; * cannot be run", ""]
    if comparison.request.num_ranks <= MOST_LISTED:
        lines.append("loads by rank, over that of equal ranks")
        width = max(len(entry.planner) for entry in comparison.entries)
        for entry in comparison.entries:
            loads = " ".join(f"{load / comparison.bound:.2f}" for load in entry.loads)
            lines.append(f"{entry.planner:<{width}}  {loads}")
        lines.append("")
    lines += [f"{name}: {reason}" for name, reason in comparison.refused.items()]
    return lines + NOTES.splitlines()


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def planner_json(table: PlannerTable) -> dict[str, Any]:
    """Plain data: seconds (or FLOPs of one rank), bytes, fractions."""
    comparison = table.comparison
    return {
        "unit": table.unit,
        "micro_batches": comparison.request.microbatches,
        "bound": comparison.bound * table.scale,
        "entries": {entry.planner: _entry(entry, table) for entry in comparison.entries},
        "refused": comparison.refused,
    }


def _entry(entry: Entry, table: PlannerTable) -> dict[str, Any]:
    comparison, simulation = table.comparison, entry.simulation
    best, step = comparison.entry("adahc"), entry.step * table.scale
    try:
        layout = write_layout(entry.placement)
    except ValueError:
        layout = None
    return {
        "schedule": entry.schedule,
        "runs": entry.runs,
        "step": step,
        "tokens_per_second": table.tokens / step if table.unit == "s" else None,
        "times_adahc": entry.step / best.step if best else None,
        "load": max(entry.loads) * table.scale,
        "load_over_bound": max(entry.loads) / comparison.bound,
        "loads": [load * table.scale for load in entry.loads],
        "bubble": simulation.bubble_fraction,
        "peak_bytes": list(simulation.peak_bytes),
        "in_flight": list(simulation.peak_in_flight),
        "hosts": entry.hosts,
        "layout": layout,
        "stages": [
            {"rank": rank, "units": [str(unit) for unit in units]}
            for rank, units in zip(entry.placement.ranks, entry.placement.stages, strict=True)
        ],
    }
