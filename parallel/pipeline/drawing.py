"""Timelines as PNG pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence

from parallel.pipeline.actions import COMPUTE
from parallel.pipeline.timeline import COLOUR, Event


def png_timeline(events: Sequence[Event], title: str = "", unit: str = "") -> bytes:
    """One row per rank, one box per compute action, as ``svg_timeline`` draws them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [event for event in events if event.action.kind in COMPUTE]
    ranks = 1 + max((event.rank for event in drawn), default=0)
    begin = min((event.start for event in drawn), default=0.0)
    figure = Figure(figsize=(12, 1.4 + 0.3 * ranks), layout="constrained")
    axes = figure.subplots()
    for rank in range(ranks):
        mine = [event for event in drawn if event.rank == rank]
        axes.broken_barh(
            [(event.start - begin, event.end - event.start) for event in mine],
            (rank - 0.4, 0.8),
            facecolors=[COLOUR[event.action.kind] for event in mine],
            edgecolor="white",
            linewidth=0.3,
        )
    kinds = {event.action.kind.value for event in drawn}
    axes.legend(
        handles=[Patch(color=COLOUR[kind], label=kind) for kind in COLOUR if kind in kinds],
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False,
    )  # fmt: skip
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel(f"time, {unit}" if unit else "time")
    axes.set_title(title, fontsize=10)
    axes.set_facecolor("#eeeeee")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
