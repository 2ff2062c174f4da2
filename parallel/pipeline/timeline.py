"""Timelines of simulated or measured runs: terminal text, SVG, Chrome trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from parallel.pipeline.actions import COMPUTE, Action

FILL = {"F": "-", "B": "=", "I": "=", "W": "~", "H": "#", "HW": "~"}
COLOUR = {
    "F": "#7aa6d9",
    "B": "#8fc98f",
    "I": "#8fc98f",
    "W": "#cfe3b4",
    "H": "#e3a869",
    "HW": "#f0d3a8",
}

IDLE = "#eeeeee"
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs only",
    "W": "weight gradients",
    "H": "head, both ways",
    "HW": "head, weight gradients",
}
PREFIX = {
    -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one rank, from ``start`` to ``end`` (seconds, or the cost table's unit)."""

    rank: int
    action: Action
    start: float
    end: float


def _compute_by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    rows: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.start, e.end)):
        if event.action.kind in COMPUTE:
            rows.setdefault(event.rank, []).append(event)
    return rows


def ascii_timeline(events: Sequence[Event], width: int = 100) -> str:
    """One row per rank: micro-batch numbers, ``-`` forward, ``=`` backward, ``.`` idle."""
    rows = _compute_by_rank(events)
    if not rows:
        return "(nothing to draw)"
    begin = min(event.start for row in rows.values() for event in row)
    length = max(event.end for row in rows.values() for event in row) - begin
    scale = width / length if length > 0 else 0.0
    lines = []
    for rank, row in rows.items():
        cells = ["."] * width
        for event in row:
            first, end = (round((t - begin) * scale) for t in (event.start, event.end))
            label = str(event.action.microbatch)
            fill = FILL[event.action.kind]
            text = label if len(label) <= end - first else ""
            cells[first:end] = text + fill * (end - first - len(text))
        lines.append(f"rank {rank:>3} |{''.join(cells)}|")
    kinds = {event.action.kind.value for row in rows.values() for event in row}
    legend = "  ".join(f"{FILL[kind]} {kind}" for kind in FILL if kind in kinds)
    return "\n".join([*lines, f"{legend}  . idle  (numbers are micro-batches; {length:g} in all)"])


def svg_timeline(
    events: Sequence[Event], width: int = 1000, title: str = "", unit: str = ""
) -> str:
    """A standalone SVG drawing: one row per rank, one labelled box per compute action, a legend,
    and an axis in ``unit`` (of the events' times: "s", "FLOP", or unknown)."""
    rows = _compute_by_rank(events)
    begin = min((e.start for row in rows.values() for e in row), default=0.0)
    length = max((e.end for row in rows.values() for e in row), default=0.0) - begin
    scale = (width - 70) / length if length > 0 else 0.0
    height = 30 * len(rows) + 92
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="60" y="18" font-size="13">{escape(title)}</text>',
    ]
    for line, (rank, row) in enumerate(rows.items()):
        y = 30 + 30 * line
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(f'<rect x="60" y="{y}" width="{width - 70}" height="26" fill="{IDLE}"/>')
        parts += [_svg_box(event, 60 + (event.start - begin) * scale, y, scale) for event in row]
    parts += _svg_axis(30 * len(rows) + 34, width, length, scale, unit)
    kinds = {event.action.kind.value for row in rows.values() for event in row}
    parts += _svg_legend(height - 14, [kind for kind in COLOUR if kind in kinds])
    return "\n".join([*parts, "</svg>"])


def _svg_axis(y: int, width: int, length: float, scale: float, unit: str) -> Iterator[str]:
    """Ticks at round times, with a metric prefix where the unit is known."""
    if not length > 0:
        return
    power = min(max(3 * math.floor(math.log10(length) / 3), -9), 15) if unit else 0
    rough = length / 8
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * size for size in (1, 2, 5, 10) if magnitude * size >= rough)
    yield f'<path d="M60 {y}H{width - 10}" stroke="#777777"/>'
    for number in range(math.floor(length / step) + 1):
        x = 60 + number * step * scale
        text = f"{number * step / 10.0**power:.6g}"
        yield f'<path d="M{x:.2f} {y}v4" stroke="#777777"/>'
        yield f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle">{text}</text>'
    name = f"time, {PREFIX[power]}{unit}" if unit else "time"
    name += f" ({length / 10.0**power:.4g} in all)"
    yield f'<text x="{width - 10}" y="{y + 32}" text-anchor="end">{escape(name)}</text>'


def _svg_legend(y: int, kinds: Sequence[str]) -> Iterator[str]:
    x = 60
    entries = [(COLOUR[kind], MEANING[kind]) for kind in kinds]
    for colour, text in [*entries, (IDLE, "idle"), ("none", "numbers: micro-batches")]:
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{y}">{text}</text>'
        x += 36 + 6 * len(text)


def _svg_box(event: Event, x: float, y: int, scale: float) -> str:
    action = event.action
    size = (event.end - event.start) * scale
    label = str(action.microbatch)
    text = ""
    if size >= 7 * len(label):
        text = f'<text x="{x + size / 2:.2f}" y="{y + 17}" text-anchor="middle">{label}</text>'
    tip = escape(f"{action}: {event.start:g} to {event.end:g}")
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{y}" width="{size:.2f}" height="26" '
        f'fill="{COLOUR[action.kind]}" stroke="white" stroke-width="0.5"/>{text}</g>'
    )


def chrome_trace(events: Iterable[Event], seconds: float = 1.0) -> dict[str, Any]:
    """A ``chrome://tracing`` (Perfetto) document; ``seconds`` is the length of one time unit."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "name": str(event.action),
                "cat": event.action.kind.value,
                "ph": "X",
                "ts": event.start * seconds * 1e6,
                "dur": (event.end - event.start) * seconds * 1e6,
                "pid": 0,
                "tid": event.rank,
            }
            for event in events
        ],
    }
