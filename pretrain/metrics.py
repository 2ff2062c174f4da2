"""Every logged figure: its unit, and where it is written; `docs/metrics.md` defines each one.

`metrics.jsonl` always gets one object per logged step; plots, reports and comparisons read nothing
else. The console line, TensorBoard and the optional trackers show the same keys.
"""

import importlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from pretrain.run_folder import RunFolder, append_jsonl, heal_jsonl, read_metrics

Row = Mapping[str, float]

# Key -> unit. `<name>` stands for one path segment. The same table, with each definition, is in
# docs/metrics.md; a test keeps the two equal, and the logger refuses any other key.
METRICS = {
    "loss/train": "nats/token",
    "loss/ema": "nats/token",
    "loss/<term>": "nats/token",
    "loss/weighted": "nats/token",
    "loss/distillation": "nats/token",
    "loss/balance": "1",
    "loss/router_z": "1",
    "loss/router_entropy": "nats/token",
    "eval/loss": "nats/token",
    "eval/standard_error": "nats/token",
    "eval/perplexity": "1",
    "eval/bits_per_byte": "bits/byte",
    "eval/sequences": "sequences",
    "eval/experts_active": "experts/token",
    "eval/experts_load_cv": "1",
    "eval/<set>/loss": "nats/token",
    "eval/<set>/perplexity": "1",
    "eval/<set>/bits_per_byte": "bits/byte",
    "optim/lr": "1",
    "optim/grad_norm": "nats/token",
    "experts/active": "experts/token",
    "experts/load_cv": "1",
    "experts/kept_mass": "1",
    "experts/k": "1",
    "experts/cap_hits": "1",
    "experts/floor_hits": "1",
    "experts/budget_gap": "experts/token",
    "experts/<layer>/active": "experts/token",
    "experts/<layer>/load_cv": "1",
    "experts/<layer>/kept_mass": "1",
    "experts/<layer>/k": "1",
    "experts/<layer>/cap_hits": "1",
    "experts/<layer>/floor_hits": "1",
    "experts/<layer>/budget_gap": "experts/token",
    "throughput/tokens_per_second": "tokens/s",
    "throughput/tokens_per_second_per_device": "tokens/s",
    "throughput/tflops_per_device": "TFLOP/s",
    "throughput/mfu_percent": "%",
    "memory/rss_gib": "GiB",
    "memory/rss_peak_gib": "GiB",
    "memory/cuda_peak_gib": "GiB",
    "memory/cuda_reserved_gib": "GiB",
    "time/step_seconds": "s",
    "time/data_wait_percent": "%",
    "time/excluded_seconds": "s",
    "time/elapsed_seconds": "s",
    "time/eta_seconds": "s",
    "pipeline/bubble": "1",
    "pipeline/bubble_predicted": "1",
    "data/tokens": "tokens",
    "data/samples": "samples",
    "data/chinchilla_multiple": "1",
    "health/first_sample": "sample index",
    "health/last_sample": "sample index",
    "health/skipped": "0 or 1",
}


def unit_of(key: str) -> str | None:
    """The unit of a metric key, or None for a key that has no definition."""
    if key in METRICS:
        return METRICS[key]
    parts = key.split("/")
    for pattern, unit in METRICS.items():
        names = pattern.split("/")
        if len(names) == len(parts) and all(
            part and (name == part or name.startswith("<")) for name, part in zip(names, parts)
        ):
            return unit
    return None


def follows_bound(key: str) -> bool:
    """Whether a figure is only bounded from above where the objective only bounds the loss."""
    group, *_, name = key.split("/")
    if group == "eval":
        return name in ("loss", "perplexity", "bits_per_byte")
    return key in ("loss/train", "loss/ema")


@dataclass(frozen=True)
class MetricsConfig:
    """What is logged, how often, and where to besides the run folder."""

    every: int = field(
        default=10, metadata={"help": "steps between logged steps (the first and last always are)"}
    )
    ema_decay: float = field(
        default=0.9, metadata={"help": "decay of the smoothed training loss, per `every` steps"}
    )
    peak_tflops: float | None = field(
        default=None, metadata={"help": "peak of one device in TFLOP/s; without it there is no MFU"}
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = field(
        default=("tensorboard",), metadata={"help": "where figures go besides metrics.jsonl"}
    )
    project: str = field(default="midspan", metadata={"help": "project name for wandb and trackio"})

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.every < 1:
            found.append(("every", f"given {self.every}; expected 1 or more"))
        if not 0 <= self.ema_decay < 1:
            found.append(("ema_decay", f"given {self.ema_decay}; expected 0 to 1, not 1"))
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            found.append(("peak_tflops", f"given {self.peak_tflops}; expected above 0, or null"))
        if len(set(self.trackers)) < len(self.trackers):
            found.append(("trackers", f"given {', '.join(self.trackers)}; one is named twice"))
        for name in dict.fromkeys(self.trackers):
            if not _installed(name):
                found.append(
                    ("trackers", f"given {name}, which is not installed: pip install {name}")
                )
        if self.project != type(self)().project and not {"wandb", "trackio"} & {*self.trackers}:
            found.append(("project", "is set but no tracker is wandb or trackio: it is ignored"))
        return found


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    # A mere folder of that name, such as the one wandb leaves behind, has no origin.
    return spec is not None and spec.origin is not None


LEGEND = (
    "loss (minus its moving average), gradient norm, tok/s of all ranks, TFLOP/s of one device, "
    "memory of the main rank, share of time waiting for data; see docs/metrics.md"
)


class MetricLogger:
    """Writes figures and messages of a run; on ranks other than the main one only messages.

    `resumed_from` is the number of steps that were done before this start. Logged rows beyond it
    stem from an attempt whose later steps are redone, and no longer count. `loss_is_bound`: that
    the objective gives an upper bound of the negative log-likelihood; figures are labelled so.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: MetricsConfig,
        *,
        is_main_rank: bool,
        total_steps: int,
        rank: int = 0,
        resumed_from: int = 0,
        loss_is_bound: bool = False,
        run_config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        if problems := config.problems():
            raise ValueError("; ".join(f"{where}: {message}" for where, message in problems))
        self.folder, self.config, self.is_main_rank = folder, config, is_main_rank
        self.total_steps, self.resumed_from = total_steps, resumed_from
        self.flags: dict[str, Any] = {"loss_is_bound": True} if loss_is_bound else {}
        self.stream = stream or sys.stdout
        self.colour = self.stream.isatty() and "NO_COLOR" not in os.environ
        self.log_file = folder.rank_log(rank).open("a", buffering=1)
        self.trackers: list[_Tracker] = []
        self.last_row: dict[str, Any] = {}
        self.average = _Average(config.ema_decay)
        self.continues = False
        self.explained = False
        if is_main_rank:
            self._reopen(run_config or {})

    def _reopen(self, run_config: Mapping[str, Any]) -> None:
        heal_jsonl(self.folder.metrics)
        self.folder.metrics.touch()
        earlier = read_metrics(self.folder.metrics)
        self.continues = bool(earlier)
        for row in earlier:
            if self.regular(row["step"]) and row["step"] <= self.resumed_from:
                self.average.add(row.get("loss/train", math.nan))
        purge = self.resumed_from + 1 if earlier else None
        for name in self.config.trackers:
            if name == "tensorboard":
                self.trackers.append(_TensorBoard(self.folder.events, purge))
            else:
                self.trackers.append(_Service(name, self.config.project, self.folder, run_config))

    def due(self, step: int) -> bool:
        """Whether `step` (1 is the first) is logged: the first of this start, every n, the last."""
        first = step == self.resumed_from + 1
        return first or self.regular(step) or step == self.total_steps

    def regular(self, step: int) -> bool:
        """Whether every run logs `step`, however often it was interrupted and wherever it ends."""
        return step == 1 or step % self.config.every == 0

    def log_step(self, step: int, values: Row, *, note: str = "") -> None:
        """Log `step` as done, whether due or not. `note` ends the console line, as a warning."""
        if not self.is_main_rank:
            return
        row = _numbers(values)
        if "loss/train" in row and self.regular(step):
            self.average.add(row["loss/train"])
            row |= self.average.figure()
        self._write(step, row, row)
        if not self.explained:
            self._print(LEGEND)
            self.explained = True
        shown = {**self.flags, **self.average.figure(), **row}
        self._print(format_step(step, self.total_steps, shown, note), warning=bool(note))

    def log_evaluation(self, step: int, values: Row) -> None:
        """Log an evaluation after `step`; a row of that step, if there is one, is extended."""
        if not self.is_main_rank:
            return
        new = _numbers(values)
        same_step = self.last_row if self.last_row.get("step") == step else {}
        self._write(step, {**same_step, **new}, new)
        self._print(format_evaluation(step, self.total_steps, new, bound=bool(self.flags)))

    def announce(self, text: str, *, warning: bool = False) -> None:
        """A message: into this rank's log file, and on the console of the main rank."""
        if self.is_main_rank:
            self._print(text, warning=warning)
        else:
            self._keep(text)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
        self.log_file.close()

    def _write(self, step: int, row: Mapping[str, Any], new: Row) -> None:
        marker = {"resumed_from": self.resumed_from} if self.continues else {}
        self.continues = False
        self.last_row = {"step": step, "time": time.time(), **marker, **self.flags, **row}
        append_jsonl(self.folder.metrics, self.last_row)
        for tracker in self.trackers:
            tracker.log(step, new)

    def _print(self, text: str, *, warning: bool = False) -> None:
        self._keep(text)
        if self.colour:
            text = f"\x1b[33m{text}\x1b[0m" if warning else _highlight(text)
        print(text, file=self.stream, flush=True)

    def _keep(self, text: str) -> None:
        self.log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


class _Average:
    """Exponential moving average without the bias of its beginning: the weights of the first n
    values sum to 1 - decay^n, by which their weighted sum is divided. Non-finite values are left
    out."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.total = self.weight = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.total = self.decay * self.total + (1 - self.decay) * value
            self.weight = self.decay * self.weight + (1 - self.decay)

    def figure(self) -> dict[str, float]:
        """`loss/ema`, once there is one."""
        return {"loss/ema": self.total / self.weight} if self.weight else {}


def _numbers(values: Row) -> dict[str, float]:
    for key in values:
        assert unit_of(key) is not None, f"metric {key!r} has no definition in METRICS"
    return {key: value if isinstance(value, int) else float(value) for key, value in values.items()}


def format_step(step: int, total_steps: int, row: Row, note: str = "") -> str:
    """One console line, in columns of fixed width; figures that `row` lacks are left out."""
    width = len(str(total_steps))
    parts = [f"{step:>{width}}/{total_steps}"]

    def add(key: str, form: Callable[[float], str]) -> None:
        if key in row:
            parts.append(form(row[key]))

    delta = row.get("loss/train", 0.0) - row.get("loss/ema", 0.0)
    word = "bound" if row.get("loss_is_bound") else "loss"
    add("loss/train", lambda loss: f"{word} {loss:7.4f} ({delta:+.4f})")
    add("optim/grad_norm", lambda norm: f"grad {norm:6.3g}")
    add("optim/lr", lambda lr: f"lr {lr:.2e}")
    add("throughput/tokens_per_second", lambda rate: f"{_short(rate):>5} tok/s")
    add("throughput/tflops_per_device", lambda tflops: f"{tflops:6.3g} TFLOP/s")
    add("throughput/mfu_percent", lambda mfu: f"MFU {mfu:4.1f}%")
    memory = "memory/cuda_peak_gib" if "memory/cuda_peak_gib" in row else "memory/rss_gib"
    add(memory, lambda gib: f"mem {gib:5.2f} GiB")
    add("time/data_wait_percent", lambda share: f"data {share:4.1f}%")
    if "pipeline/bubble" in row:
        predicted = row["pipeline/bubble_predicted"]
        parts.append(f"bubble {row['pipeline/bubble']:.1%} (predicted {predicted:.1%})")
    multiple = row.get("data/chinchilla_multiple", math.nan)
    shown = f"{multiple:.2f}" if multiple >= 1 else f"{multiple:.2g}"
    add("data/tokens", lambda seen: f"{_short(seen):>5} tok ({shown}x Chinchilla)")
    add("time/eta_seconds", lambda eta: f"eta {_duration(eta)}")
    if note:
        parts.append(f"! {note}")
    return "  ".join(parts)


def format_evaluation(step: int, total_steps: int, row: Row, *, bound: bool = False) -> str:
    width = len(str(total_steps))
    figures = (
        f"{key.removeprefix('eval/')} {f'{value:,}' if isinstance(value, int) else f'{value:.4f}'}"
        for key, value in row.items()
    )
    return "  ".join(
        [f"{step:>{width}}/{total_steps}", "eval (bounds)" if bound else "eval", *figures]
    )


def _highlight(line: str) -> str:
    """The step count dim and the loss bold, on a terminal."""
    word = "  bound " if "  bound " in line else "  loss "
    head, mark, rest = line.partition(word)
    value, gap, rest = rest.partition(" (")
    return f"\x1b[2m{head}\x1b[0m{mark}\x1b[1m{value}\x1b[0m{gap}{rest}" if gap else line


def _short(number: float) -> str:
    """Three significant digits and a decimal prefix: 950, 1.23k, 45.6M."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            scaled = number / scale
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{prefix}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "n/a"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


class _TensorBoard:
    def __init__(self, events: Path, purge_step: int | None) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(log_dir=str(events), purge_step=purge_step, flush_secs=30)

    def log(self, step: int, values: Row) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class _Service:
    """wandb or trackio, which share these calls. The run keeps its name over restarts."""

    def __init__(
        self, name: str, project: str, folder: RunFolder, run_config: Mapping[str, Any]
    ) -> None:
        self.module = importlib.import_module(name)
        only_wandb = {"id": folder.name, "dir": str(folder.path)} if name == "wandb" else {}
        self.module.init(
            project=project, name=folder.name, config=dict(run_config), resume="allow", **only_wandb
        )

    def log(self, step: int, values: Row) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


_Tracker = _TensorBoard | _Service
