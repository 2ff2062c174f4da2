"""The picture and the page of a run, drawn from `metrics.jsonl` alone.

`write_report` makes `loss_curve.png` and `report.html`: one self-contained page with the curve as
inline SVG, the final figures, the configuration, the environment and a text sample. It can be
called while a run is going on, and again at any later time.
"""

import html
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.metrics import METRICS, follows_bound, unit_of
from pretrain.run_folder import RunFolder, read_metrics, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _PALE, _TRAIN, _EVAL, _REFERENCE, _FINDING = (
    ("#22303c", "#a9c9e8", "#1d5fa6", "#d4572a", "#5b6770", "#b3123b")
)  # fmt: skip
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#c4ccd3",
    "axes.grid": True,
    "grid.color": "#e9edf0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "xtick.color": _REFERENCE,
    "ytick.color": _REFERENCE,
    "svg.fonttype": "none",
    "svg.hashsalt": "midspan",
}
_MOST_POINTS = 2000
_GROUPS = ("loss", "eval", "throughput", "time", "memory", "data", "optim", "pipeline")
_Label = tuple[float, str, str]  # value, text, colour
_LINE_SPACING = 0.055  # of a label, as a share of the axes' height


def write_report(
    folder: RunFolder,
    *,
    bytes_per_token: float | None = None,
    references: Mapping[str, float] | None = None,
    coverage: str = "",
    sample: str = "",
    artefacts: Mapping[str, Path | str] | None = None,
    status: str | None = None,
) -> tuple[Path, Path]:
    """Write `loss_curve.png` and `report.html`; returns both paths.

    `bytes_per_token` is the mean over the training text; with it the curve is in bits per byte and
    `references` (label -> bits per byte, such as a compressor's) are drawn as lines. `coverage`
    says what the evaluations are of, as in "64 of 208 sequences". `artefacts`
    adds to the list of where things are (label -> path). `status` is what the run is about to be,
    where its folder does not say so yet. ValueError without any logged step.
    """
    references = dict(references or {})
    if references and bytes_per_token is None:
        raise ValueError("references are in bits per byte: bytes_per_token is needed with them")
    rows = read_metrics(folder.metrics)
    if not any("loss/train" in row for row in rows):
        raise ValueError(f"{folder.metrics}: no logged training step, so there is nothing to plot")

    import matplotlib as mpl  # here: importing it takes longer than reading a run

    with mpl.rc_context(_STYLE):
        figure = loss_figure(
            rows,
            title=folder.name,
            bytes_per_token=bytes_per_token,
            references=references,
            coverage=coverage,
        )
        temporary = folder.path / f".loss_curve.{os.getpid()}.tmp"
        try:
            figure.savefig(temporary, format="png", dpi=160)
            temporary.replace(folder.loss_curve)
        finally:
            temporary.unlink(missing_ok=True)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    picture = drawing.getvalue()
    status = status or folder.read_status() or "no status"
    picture = picture[picture.index("<svg") :]
    write_atomic(folder.report, _page(folder, rows, picture, references, sample, artefacts, status))
    return folder.loss_curve, folder.report


def loss_figure(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    bytes_per_token: float | None = None,
    references: Mapping[str, float] | None = None,
    coverage: str = "",
) -> "Figure":
    """Training loss (raw and smoothed), validation and references; the learning rate below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    has_lr = any("optim/lr" in row for row in rows)
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    if has_lr:
        loss_axes, lr_axes = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    else:
        loss_axes = lr_axes = figure.subplots()
    scale = 1.0 if bytes_per_token is None else 1 / (math.log(2) * bytes_per_token)
    end = max(max(row["step"] for row in rows), 1)
    labels = _draw_losses(loss_axes, rows, scale, coverage)
    labels += _draw_references(loss_axes, references or {}, rows[0]["step"], end)
    room = _draw_labels(loss_axes, labels, rows[0]["step"], end)
    bound = any(row.get("loss_is_bound") for row in rows)
    name = "loss (upper bound)" if bound else "loss"
    loss_axes.set_ylabel(f"{name}, {'nats/token' if bytes_per_token is None else 'bits/byte'}")
    if bytes_per_token is not None:
        other = loss_axes.secondary_yaxis(
            "right", functions=(lambda y: y / scale, lambda y: y * scale)
        )
        other.set_ylabel("nats/token")
    loss_axes.set_title(title, loc="left", fontweight="bold", fontsize=12, pad=26)
    loss_axes.legend(  # above the axes, where no curve can be
        loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3, ncols=4, frameon=False,
        handlelength=1.4, columnspacing=1.6, borderpad=0.2,
    )  # fmt: skip
    if has_lr:
        steps, rates = _series(rows, "optim/lr")
        lr_axes.fill_between(steps, rates, color=_PALE, alpha=0.45, linewidth=0)
        lr_axes.plot(steps, rates, color=_TRAIN, linewidth=1.2)
        lr_axes.set_ylim(bottom=0)
        lr_axes.set_ylabel("lr")
        lr_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lr_axes.set_xlabel("step")
    ticks = MaxNLocator(9, integer=True).tick_values(rows[0]["step"], end)
    lr_axes.set_xticks([tick for tick in ticks if rows[0]["step"] <= tick <= end])
    lr_axes.set_xlim(rows[0]["step"], end + room)
    return figure


def _draw_losses(
    axes: "Axes", rows: Sequence[Mapping[str, Any]], scale: float, coverage: str
) -> list[_Label]:
    labels: list[_Label] = []
    steps, losses = _series(rows, "loss/train", scale)
    alone = "o" if len(steps) == 1 else ""  # a line needs two points
    axes.plot(steps, losses, alone, color=_PALE, lw=1, label="training, each logged step")
    steps, smooth = _series(rows, "loss/ema", scale)
    if steps:
        alone = "o" if len(steps) == 1 else ""
        axes.plot(steps, smooth, alone, color=_TRAIN, lw=2, label="training, smoothed")
    steps, checks = _series(rows, "eval/loss", scale)
    # Bits per byte are measured on the validation text itself where the run has logged them.
    if scale != 1.0 and any("eval/bits_per_byte" in row for row in rows):
        steps, checks = _series(rows, "eval/bits_per_byte")
    if steps:
        name = f"validation ({coverage})" if coverage else "validation"
        (line,) = axes.plot(steps, checks, "o-", color=_EVAL, linewidth=1, label=name)
        line.set(markersize=5.5, markeredgecolor="white", zorder=4, clip_on=False)
        most = "at most " if rows[-1].get("loss_is_bound") else ""
        labels.append((checks[-1], f"validation: {most}{checks[-1]:.3f}", _EVAL))
    findings = [row for row in rows if "health/first_sample" in row]
    steps, losses = _series(findings, "loss/train", scale)
    if steps:
        axes.plot(steps, losses, "x", color=_FINDING, label="health finding", zorder=5)
    return labels


def _draw_references(
    axes: "Axes", references: Mapping[str, float], first: int, end: int
) -> list[_Label]:
    low, high = axes.get_ylim()
    for value in references.values():
        axes.plot([first, end], [value] * 2, color=_REFERENCE, lw=1, ls=(0, (5, 3)), zorder=1)
        low, high = min(low, value), max(high, value)
    margin = 0.04 * (high - low)
    axes.set_ylim(max(low - margin, 0), high + margin)
    return [(value, f"{name}: {value:.2f}", _REFERENCE) for name, value in references.items()]


def _draw_labels(axes: "Axes", labels: Sequence[_Label], first: int, end: int) -> float:
    """Write each label right of the last step, where no curve is, at its value or as near to it as
    the others let it; returns the width of that strip in steps."""
    if not labels:
        return 0.0
    room = (0.05 + 0.0125 * max(len(text) for _, text, _ in labels)) * max(end - first, 1)
    labels = sorted(labels)
    heights = spread([value for value, _, _ in labels], *axes.get_ylim())
    for (value, text, colour), height in zip(labels, heights):
        inside = end + 0.1 * room
        axes.plot([end, inside], [value, height], color=colour, lw=0.8, clip_on=False)
        weight = "bold" if colour == _EVAL else "normal"
        axes.text(
            end + 0.13 * room, height, text, color=colour, fontsize=9, weight=weight, va="center"
        )
    return room


def spread(values: Sequence[float], low: float, high: float) -> list[float]:
    """Heights for labels at ascending ``values``: the least squares displacement that keeps them
    a line apart (isotonic regression), moved into [low, high] where that has room for all."""
    gap = _LINE_SPACING * (high - low)
    blocks: list[tuple[float, int]] = []  # mean of value - place * gap, and how many
    for place, value in enumerate(values):
        mean, count = value - place * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        blocks.append((mean, count))
    heights = [mean for mean, count in blocks for _ in range(count)]
    floor, ceiling = low + gap / 2, high - gap / 2 - gap * (len(values) - 1)
    return [max(min(h, ceiling), floor) + place * gap for place, h in enumerate(heights)]


def _series(
    rows: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0
) -> tuple[list[int], list[float]]:
    """Steps and values of one key; a long series keeps the extremes of each stretch."""
    points = [
        (row["step"], scale * row[key]) for row in rows if key in row and math.isfinite(row[key])
    ]
    if len(points) > _MOST_POINTS:
        stride = math.ceil(2 * len(points) / _MOST_POINTS)
        stretches = [points[i : i + stride] for i in range(0, len(points), stride)]
        kept = {
            chosen(stretch, key=lambda point: point[1])
            for stretch in stretches
            for chosen in (min, max)
        }
        points = sorted(kept | {points[0], points[-1]})
    return [step for step, _ in points], [value for _, value in points]


_CSS = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;color:#22303c;background:#f5f7f9;margin:0}
main{max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.1rem;margin:0 0 .6rem}
section{background:#fff;border:1px solid #e1e6ea;border-radius:8px}
section{padding:1.1rem 1.3rem;margin:1rem 0}
svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%}td{padding:.22rem .5rem;border-top:1px solid #eef1f3}
tr:first-child td{border-top:0}td.n{text-align:right;font-variant-numeric:tabular-nums}
td.u,.status{color:#5b6770}pre,code{font:13px/1.45 ui-monospace,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}summary{cursor:pointer;font-weight:600}
details pre{margin-top:.7rem}
"""


def _page(
    folder: RunFolder,
    rows: Sequence[Mapping[str, Any]],
    picture: str,
    references: Mapping[str, float],
    sample: str,
    artefacts: Mapping[str, Path | str] | None,
    status: str,
) -> str:
    last = rows[-1]["step"]
    seen = next((row["data/tokens"] for row in reversed(rows) if "data/tokens" in row), None)
    tokens = "" if seen is None else f", {seen:,.0f} tokens"
    head = f"<h1>{_text(folder.name)}</h1><div class=status>{last:,} steps{tokens}"
    head += f"; {_text(status)}</div>"
    parts = [head, f"<section>{picture}</section>", _figures(rows, references)]
    if sample:
        parts.append(f"<section><h2>A sample</h2><pre>{_text(sample)}</pre></section>")
    parts.append(_places(folder, artefacts or {}))
    for title, path in (
        ("Configuration", folder.config),
        ("Environment", folder.environment),
        ("Fingerprints", folder.fingerprints),
        ("Command", folder.command),
    ):
        if path.exists():
            content = _text(path.read_text().rstrip())
            parts.append(
                f"<section><details><summary>{title}</summary><pre>{content}</pre></details></section>"
            )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(folder.name)}'
        f'</title><meta name="viewport" content="width=device-width"><style>{_CSS}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _figures(rows: Sequence[Mapping[str, Any]], references: Mapping[str, float]) -> str:
    """The last value of every figure, and the references beside them."""
    final: dict[str, tuple[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            group, slash, _ = key.partition("/")
            if slash and group in _GROUPS and key != "time/eta_seconds":
                final[key] = (row["step"], value)
    bound = bool(rows[-1].get("loss_is_bound"))
    cells = []
    for key, (step, value) in sorted(final.items(), key=lambda item: _order(item[0])):
        shown, unit = _readable(value, unit_of(key) or "")
        most = "at most " if bound and follows_bound(key) else ""
        cells.append((key, most + shown, unit, f"step {step:,}"))
    after = sum(key.startswith(("loss/", "eval/")) for key, *_ in cells)
    cells[after:after] = [
        (label, *_readable(value, "bits/byte"), "reference") for label, value in references.items()
    ]
    lines = "".join(
        f"<tr><td>{_text(key)}</td><td class=n>{value}</td><td class=u>{unit}</td>"
        f"<td class=u>{origin}</td></tr>"
        for key, value, unit, origin in cells
    )
    note = "<p class=status>Losses are upper bounds.</p>" if bound else ""
    return f"<section><h2>Final figures</h2>{note}<table>{lines}</table></section>"


def _order(key: str) -> tuple[int, int]:
    """Groups as in _GROUPS; within one, as defined."""
    keys = list(METRICS)
    return _GROUPS.index(key.partition("/")[0]), keys.index(key) if key in keys else len(keys)


def _readable(value: float, unit: str) -> tuple[str, str]:
    """A figure and its unit as a person wants them: no more digits than it has meaning."""
    if unit == "s" and value >= 60:
        return str(timedelta(seconds=round(value))), "h:min:s"
    if not math.isfinite(value):
        return str(value), unit
    digits = {"nats/token": 4, "bits/byte": 4, "GiB": 2, "%": 1, "tokens/s": 0}.get(unit)
    if digits is not None and (digits == 0 or abs(value) >= 10**-digits):
        return f"{value:,.{digits}f}", unit
    text = f"{value:,}" if float(value).is_integer() else f"{value:,.4g}"
    return text, "" if unit == "1" else unit


def _places(folder: RunFolder, artefacts: Mapping[str, Path | str]) -> str:
    places: dict[str, Path] = {
        "metrics": folder.metrics,
        "checkpoints": folder.checkpoints,
        "logs": folder.logs,
        "loss curve": folder.loss_curve,
        **{label: Path(path) for label, path in artefacts.items()},
    }
    lines = "".join(
        f'<tr><td>{_text(label)}</td><td><a href="{_text(os.path.relpath(path, folder.path))}">'
        f"<code>{_text(str(path))}</code></a></td></tr>"
        for label, path in places.items()
    )
    return f"<section><h2>Where things are</h2><table>{lines}</table></section>"


def _text(content: str) -> str:
    return html.escape(content, quote=True)
