"""Logged figures: exact meters, the files they go to, resume, and their documentation."""

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.health import Decision, HealthLog
from pretrain.metrics import (
    LEGEND,
    METRICS,
    MetricLogger,
    MetricsConfig,
    follows_bound,
    format_step,
    unit_of,
)
from pretrain.run_folder import RunFolder, read_jsonl, read_metrics
from pretrain.throughput import Throughput, memory_report

ROOT = Path(__file__).resolve().parents[2]
QUIET = MetricsConfig(every=1, trackers=())


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def logger(folder: RunFolder, config: MetricsConfig = QUIET, **options) -> MetricLogger:
    defaults = {"is_main_rank": True, "total_steps": 100, "stream": io.StringIO()}
    return MetricLogger(folder, config, **{**defaults, **options})


def meter(clock: Clock, **options) -> Throughput:
    defaults = {
        "total_tokens": 100_000,
        "flops_per_token": 6e6,
        "non_embedding_parameters": 1000,
        "clock": clock,
    }
    return Throughput(**{**defaults, **options})


def test_throughput_figures_are_exact() -> None:
    clock = Clock()
    measured = meter(clock, devices=2, peak_tflops=0.1, tokens=1000, samples=10)
    for _ in range(4):
        with measured.waiting_for_data():
            clock.now += 0.5
        clock.now += 1.5
        measured.step(tokens=5000, samples=50)
    with measured.excluded():
        clock.now += 30.0
    figures = measured.report()
    assert figures == pytest.approx(
        {
            "throughput/tokens_per_second": 2500.0,
            "throughput/tokens_per_second_per_device": 1250.0,
            "throughput/tflops_per_device": 1250 * 6e6 / 1e12,
            "throughput/mfu_percent": 100 * 1250 * 6e6 / 1e12 / 0.1,
            "time/step_seconds": 2.0,
            "time/data_wait_percent": 25.0,
            "time/excluded_seconds": 30.0,
            "time/elapsed_seconds": 38.0,
            "time/eta_seconds": 79_000 / 2500,
            "data/tokens": 21_000,
            "data/samples": 210,
            "data/chinchilla_multiple": 21_000 / 20_000,
        },
        rel=1e-12,
    )


def test_each_report_begins_a_new_window() -> None:
    clock = Clock()
    measured = meter(clock)
    with measured.waiting_for_data():
        clock.now += 9.0
    measured.step(tokens=10, samples=1)
    measured.report()
    clock.now += 1.0
    measured.step(tokens=10, samples=1)
    second = measured.report()
    assert second["throughput/tokens_per_second"] == pytest.approx(10.0)
    assert second["time/data_wait_percent"] == 0.0
    assert second["time/elapsed_seconds"] == pytest.approx(10.0)
    assert "throughput/mfu_percent" not in second
    with pytest.raises(AssertionError):
        measured.report()


def test_eta_ends_at_zero() -> None:
    clock = Clock()
    measured = meter(clock, total_tokens=10)
    clock.now += 1.0
    measured.step(tokens=20, samples=1)
    assert measured.report()["time/eta_seconds"] == 0.0


def test_memory_sees_an_allocation() -> None:
    before = memory_report("cpu")
    block = bytearray(b"x") * (256 << 20)
    during = memory_report("cpu")
    assert during["memory/rss_gib"] - before["memory/rss_gib"] == pytest.approx(0.25, abs=0.03)
    del block
    after = memory_report("cpu")
    assert after["memory/rss_gib"] < during["memory/rss_gib"] - 0.2
    assert after["memory/rss_peak_gib"] >= during["memory/rss_gib"] - 0.01


def test_one_object_per_logged_step_flushed_at_once(folder) -> None:
    log = logger(folder)
    for step in (1, 2, 3):
        log.log_step(step, {"loss/train": 4.0 / step, "optim/lr": 1e-3})
        rows = read_metrics(folder.metrics)  # the logger is still open
        assert rows[-1]["step"] == step and len(rows) == step
    assert folder.metrics.read_text().count("\n") == 3
    log.close()


@pytest.mark.parametrize("start, expected", [(0, [1, 10, 20, 25]), (13, [14, 20, 25])])
def test_due_steps(folder, start, expected) -> None:
    config = MetricsConfig(every=10, trackers=())
    log = logger(folder, config, total_steps=25, resumed_from=start)
    assert [step for step in range(start + 1, 26) if log.due(step)] == expected
    log.close()


def test_ema_is_the_weighted_mean_of_the_regular_steps(folder) -> None:
    losses = [5.0, 4.0, math.nan, 3.0, 3.5, 2.0]
    config = MetricsConfig(every=1, ema_decay=0.8, trackers=())
    log = logger(folder, config)
    for step, loss in enumerate(losses, 1):
        log.log_step(step, {"loss/train": loss})
    log.close()
    rows = read_metrics(folder.metrics)
    for count, row in enumerate(rows, 1):
        seen = [loss for loss in losses[:count] if math.isfinite(loss)]
        weights = [0.8**age for age in reversed(range(len(seen)))]
        mean = sum(w * x for w, x in zip(weights, seen)) / sum(weights)
        assert row["loss/ema"] == pytest.approx(mean, rel=1e-14)


def test_ema_does_not_see_where_a_run_was_interrupted(folder, tmp_path) -> None:
    """Starts after any step, each with a row of its own; and a run that first ended at step 13."""
    config = MetricsConfig(every=5, ema_decay=0.7, trackers=())

    def attempt(run: RunFolder, first: int, last: int, total: int) -> None:
        log = logger(run, config, resumed_from=first, total_steps=total)
        for step in range(first + 1, last + 1):
            if log.due(step) or step == 9:  # a finding of the health policy
                log.log_step(step, {"loss/train": 3 + 7 / step})
        log.close()

    def averages(run: RunFolder) -> dict[int, float]:
        rows = read_metrics(run.metrics)
        return {row["step"]: row["loss/ema"] for row in rows if "loss/ema" in row}

    attempt(folder, 0, 32, 32)
    assert list(averages(folder)) == [1, 5, 10, 15, 20, 25, 30]
    other = RunFolder(tmp_path / "interrupted")
    other.create()
    for first, last, total in ((0, 13, 13), (13, 17, 32), (15, 26, 32), (20, 22, 32), (21, 32, 32)):
        attempt(other, first, last, total)
    assert {14, 16, 21, 22} & {row["step"] for row in read_metrics(other.metrics)} == {
        14,
        16,
        21,
        22,
    }
    assert averages(other) == averages(folder)


def test_the_console_compares_an_additional_step_with_the_average_so_far(folder) -> None:
    log = logger(folder, MetricsConfig(every=5, trackers=()))
    log.log_step(1, {"loss/train": 4.0})
    log.log_step(2, {"loss/train": 3.0})
    log.close()
    assert "loss  3.0000 (-1.0000)" in log.stream.getvalue().splitlines()[-1]


def test_resume_drops_the_abandoned_attempt_and_heals_the_file(folder) -> None:
    log = logger(folder)
    for step in range(1, 9):
        log.log_step(step, {"loss/train": 10.0 + step})
    log.close()
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "loss/tr')
    log = logger(folder, resumed_from=5)
    log.log_step(6, {"loss/train": 1.0})
    log.log_step(7, {"loss/train": 2.0})
    log.close()
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["loss/train"] for row in rows[-2:]] == [1.0, 2.0]
    raw = read_jsonl(folder.metrics)
    assert len(raw) == 10
    assert [row["resumed_from"] for row in raw if "resumed_from" in row] == [5]


def test_a_restart_from_nothing_replaces_everything(folder) -> None:
    for attempt in (1.0, 2.0):
        log = logger(folder)
        log.log_step(1, {"loss/train": attempt})
        if attempt == 1.0:
            log.log_step(2, {"loss/train": attempt})
        log.close()
    (row,) = read_metrics(folder.metrics)
    assert row["loss/train"] == row["loss/ema"] == 2.0


def test_an_evaluation_extends_the_row_of_its_step(folder) -> None:
    log = logger(folder)
    log.log_evaluation(0, {"eval/loss": 9.0})
    log.log_step(1, {"loss/train": 5.0})
    log.log_step(2, {"loss/train": 4.0})
    log.log_evaluation(2, {"eval/loss": 4.5, "eval/bits_per_byte": 2.1, "eval/sequences": 1208})
    log.log_step(3, {"loss/train": 3.0})
    log.close()
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert (rows[2]["loss/train"], rows[2]["eval/loss"]) == (4.0, 4.5)
    assert "eval/loss" not in rows[3]
    assert "eval  loss 4.5000  bits_per_byte 2.1000  sequences 1,208\n" in log.stream.getvalue()


def test_tensorboard_has_the_same_figures_and_purges_on_resume(folder) -> None:
    config = MetricsConfig(every=1)
    log = logger(folder, config)
    for step in range(1, 7):
        log.log_step(step, {"loss/train": float(step), "optim/lr": 0.5})
    log.log_evaluation(6, {"eval/loss": 1.5})
    log.close()
    log = logger(folder, config, resumed_from=3)
    log.log_step(4, {"loss/train": 40.0, "optim/lr": 0.5})
    log.close()
    events = EventAccumulator(str(folder.events)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/train", "loss/ema", "optim/lr", "eval/loss"}
    points = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert points == [(r["step"], r["loss/train"]) for r in read_metrics(folder.metrics)]


SERVICE = """
calls = []
def init(**options): calls.append(("init", options))
def log(values, step): calls.append(("log", step, values))
def finish(): calls.append(("finish",))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_figures_under_the_run_name(folder, tmp_path, monkeypatch, name) -> None:
    (tmp_path / f"{name}.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert name not in sys.modules
    config = MetricsConfig(every=1, trackers=(name,), project="norms")
    log = logger(folder, config, run_config={"seed": 3})
    log.log_step(1, {"loss/train": 2.0})
    log.close()
    init, row, end = sys.modules.pop(name).calls
    assert (init[1]["project"], init[1]["name"], init[1]["config"]) == ("norms", "run", {"seed": 3})
    assert init[1]["resume"] == "allow"
    assert ("id" in init[1]) == (name == "wandb")
    assert row == ("log", 1, {"loss/train": 2.0, "loss/ema": 2.0})
    assert end == ("finish",)


def test_a_tracker_that_is_not_installed_is_refused_before_work(
    folder, tmp_path, monkeypatch
) -> None:
    (tmp_path / "wandb").mkdir()  # what an offline wandb run leaves: a folder, not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = MetricsConfig(trackers=("wandb",))
    ((where, message),) = config.problems()
    assert where == "trackers" and "wandb" in message and "pip install wandb" in message
    with pytest.raises(ValueError, match="not installed"):
        logger(folder, config)
    assert not folder.metrics.exists()
    assert list(folder.logs.iterdir()) == []


def test_config_problems_are_reported_together() -> None:
    assert MetricsConfig().problems() == []
    bad = MetricsConfig(0, 1.0, -3.0, ("tensorboard", "tensorboard"))
    assert [where for where, _ in bad.problems()] == [
        "every",
        "ema_decay",
        "peak_tflops",
        "trackers",
    ]


def test_other_ranks_only_keep_messages(folder) -> None:
    log = logger(folder, is_main_rank=False, rank=3)
    log.log_step(1, {"loss/train": 1.0})
    log.log_evaluation(1, {"eval/loss": 1.0})
    log.announce("started")
    log.close()
    assert not folder.metrics.exists()
    assert log.stream.getvalue() == ""
    assert folder.rank_log(3).read_text().endswith(" started\n")


def full_row(loss: float = 4.25) -> dict[str, float]:
    return {
        "loss/train": loss,
        "loss/ema": 4.5,
        "optim/grad_norm": 1.234,
        "optim/lr": 3e-4,
        "throughput/tokens_per_second": 12_345.0,
        "throughput/tflops_per_device": 0.1234,
        "memory/rss_gib": 0.5,
        "time/data_wait_percent": 0.3,
        "data/tokens": 1_310_000,
        "data/chinchilla_multiple": 0.024,
        "time/eta_seconds": 3725.0,
    }


def test_console_line() -> None:
    assert format_step(10, 2000, full_row()) == (
        "  10/2000  loss  4.2500 (-0.2500)  grad   1.23  lr 3.00e-04  12.3k tok/s   0.123 TFLOP/s"
        "  mem  0.50 GiB  data  0.3%  1.31M tok (0.024x Chinchilla)  eta 1:02:05"
    )
    past = {**full_row(), "data/chinchilla_multiple": 123.456}
    assert " tok (123.46x Chinchilla)" in format_step(10, 2000, past)
    with_peak = {**full_row(), "throughput/mfu_percent": 41.26, "memory/cuda_peak_gib": 71.0}
    assert "  MFU 41.3%  mem 71.00 GiB  " in format_step(10, 2000, with_peak)
    assert format_step(10, 2000, full_row(), "skipped").endswith("  ! skipped")
    assert "  bound  4.2500" in format_step(10, 2000, {**full_row(), "loss_is_bound": True})


def test_console_lines_are_aligned_and_ascii() -> None:
    early = {**full_row(11.5), "loss/ema": 11.4, "throughput/tokens_per_second": 950.0}
    late = {**full_row(2.5), "loss/ema": 2.6, "data/tokens": 25_000}
    a, b = format_step(1, 2000, early), format_step(2000, 2000, late)
    for label in (" loss ", " grad ", " lr ", " tok/s", " TFLOP/s", " mem ", " data ", " tok ("):
        assert a.index(label) == b.index(label), label
    assert a.isascii()


@pytest.mark.parametrize(
    "number, text",
    [
        (0, "0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (9_994, "9.99k"),
        (9_996, "10.0k"),
        (99_960, "100k"),
        (999_700, "1.00M"),
        (1.5e12, "1.50T"),
    ],
)
def test_short_numbers(number, text) -> None:
    row = {"data/tokens": number, "data/chinchilla_multiple": 0.0}
    assert f" {text} tok (" in format_step(1, 1, row)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal(folder, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen, pipe = Terminal(), io.StringIO()
    for stream in (screen, pipe):
        log = logger(folder, stream=stream)
        log.log_step(1, full_row())
        log.log_step(2, full_row(), note="loss spike")
        log.announce("plain words")
        log.close()
    assert "\x1b[" not in pipe.getvalue()
    assert re.sub(r"\x1b\[\d+m", "", screen.getvalue()) == pipe.getvalue()
    legend, first, second, third = screen.getvalue().splitlines()
    assert legend == LEGEND
    assert "\x1b[1m" in first and "\x1b[33m" in second and "\x1b" not in third
    assert "\x1b[" not in folder.rank_log(0).read_text()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    log = logger(folder, stream=plain)
    log.log_step(1, full_row())
    log.close()
    assert "\x1b[" not in plain.getvalue()


def test_bounds_are_marked_in_every_row(folder) -> None:
    log = logger(folder, loss_is_bound=True)
    log.log_step(1, {"loss/train": 2.0})
    log.log_evaluation(1, {"eval/loss": 2.0})
    log.close()
    assert all(row["loss_is_bound"] is True for row in read_jsonl(folder.metrics))
    assert "eval (bounds)" in log.stream.getvalue()


def test_what_only_a_bound_is_known_of() -> None:
    assert {key for key in METRICS if follows_bound(key)} == {
        "loss/train", "loss/ema", "eval/loss", "eval/perplexity", "eval/bits_per_byte",
        "eval/<set>/loss", "eval/<set>/perplexity", "eval/<set>/bits_per_byte",
    }  # fmt: skip


def documented() -> dict[str, str]:
    """Key -> unit, from the table of definitions in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+/[^`]+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert all(unit.strip() and definition.strip() for _, unit, definition in rows)
    assert len({key for key, _, _ in rows}) == len(rows), "one definition per key"
    return {key: unit.strip() for key, unit, _ in rows}


def test_the_documentation_defines_exactly_the_keys_that_exist() -> None:
    assert documented() == METRICS


def test_every_key_that_a_run_emits_is_documented(folder) -> None:
    clock = Clock()
    measured = meter(clock, peak_tflops=1.0)
    clock.now += 1.0
    measured.step(tokens=1, samples=1)
    finding = HealthLog(folder).record(
        1, Decision("skip", "x"), loss=1.0, grad_norm=1.0, first_sample=0, last_sample=7
    )
    log = logger(folder, loss_is_bound=True)
    values = {"loss/train": 1.0, "loss/z_loss": 0.1, "optim/grad_norm": 1.0, "optim/lr": 1.0}
    log.log_step(1, {**values, **measured.report(), **memory_report("cpu"), **finding})
    log.log_evaluation(1, {"eval/loss": 1.0, "eval/novels/perplexity": 2.0})
    log.close()
    log = logger(folder)
    log.log_step(1, values)
    log.close()
    emitted = {key for row in read_jsonl(folder.metrics) for key in row}
    assert len(emitted) > 25
    patterns = [re.sub(r"<\w+>", r"[^/]+", key) for key in documented()]
    prose = (ROOT / "docs" / "metrics.md").read_text()
    for key in emitted:
        if "/" in key:
            assert any(re.fullmatch(pattern, key) for pattern in patterns), key
        else:
            assert f"| `{key}` |" in prose, key


def test_an_undefined_key_is_refused(folder) -> None:
    log = logger(folder)
    for key in ("loss", "speed/furlongs", "eval/a/b/loss", "loss/"):
        assert unit_of(key) is None
        with pytest.raises(AssertionError, match="no definition"):
            log.log_step(1, {key: 1.0})
    log.close()
    assert folder.metrics.read_text() == ""


def test_tensors_and_arrays_become_plain_numbers(folder) -> None:
    import numpy
    import torch

    log = logger(folder)
    log.log_step(1, {"loss/train": torch.tensor(1.5), "optim/lr": numpy.float32(0.25)})
    log.close()
    row = json.loads(folder.metrics.read_text())
    assert (row["loss/train"], row["optim/lr"]) == (1.5, 0.25)
