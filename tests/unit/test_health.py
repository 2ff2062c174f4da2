"""Health decisions: policies, the spike rule, agreement between ranks, exact resume."""

import json
import math
import random
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.health import Decision, HealthConfig, HealthLog, HealthMonitor, not_finite_since
from pretrain.run_folder import RunFolder, read_jsonl

NAN, INF = math.nan, math.inf
POLICIES = ("stop", "skip", "warn")


def settle(monitor: HealthMonitor, steps: int, seed: int = 0) -> list[float]:
    """Feed `steps` noisy but healthy losses."""
    noise = random.Random(seed)
    losses = [3 + noise.uniform(-0.1, 0.1) for _ in range(steps)]
    for step, loss in enumerate(losses, 1):
        assert monitor.check(step, loss, 1.0) == Decision("proceed")
    return losses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "loss, norm", [(NAN, 1.0), (INF, 1.0), (-INF, 1.0), (2.0, NAN), (2.0, INF)]
)
def test_non_finite_follows_its_policy(policy, loss, norm) -> None:
    decision = HealthMonitor(HealthConfig(nan=policy)).check(1, loss, norm)
    assert decision.action == policy
    assert decision.takes_step == (policy == "warn")
    assert "step 1: not finite" in decision.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_spike_is_called_exactly_above_the_threshold(policy) -> None:
    config = HealthConfig(spike=policy, spike_sigma=4.0, window=50)
    monitor = HealthMonitor(config)
    losses = settle(monitor, 80)[-50:]
    threshold = statistics.fmean(losses) + 4.0 * statistics.pstdev(losses)
    assert monitor.spike_threshold() == pytest.approx(threshold, rel=1e-12)
    state = monitor.state_dict()
    assert monitor.check(81, threshold - 1e-9, 1.0).action == "proceed"
    monitor.load_state_dict(state)
    decision = monitor.check(81, threshold + 1e-9, 1.0)
    assert decision.action == policy
    assert "loss spike" in decision.reason and "last 50 steps" in decision.reason


def test_no_spike_is_called_in_warmup_and_a_fall_is_none() -> None:
    monitor = HealthMonitor(HealthConfig(spike="stop", spike_warmup=20))
    settle(monitor, 19)
    assert monitor.check(20, 1e6, 1.0).action == "proceed"
    monitor = HealthMonitor(HealthConfig(spike="stop", spike_warmup=20))
    settle(monitor, 20)
    assert monitor.check(21, 0.0, 1.0).action == "proceed"
    assert monitor.check(22, 1e6, 1.0).action == "stop"


def test_skipped_losses_stay_out_of_the_window_and_warned_ones_enter() -> None:
    skipping = HealthMonitor(HealthConfig(spike="skip"))
    warning = HealthMonitor(HealthConfig(spike="warn", nan="warn"))
    for monitor in (skipping, warning):
        settle(monitor, 40)
    threshold = skipping.spike_threshold()
    assert skipping.check(41, 50.0, 1.0).action == "skip"
    assert skipping.spike_threshold() == threshold
    assert warning.check(41, 50.0, 1.0).action == "warn"
    assert list(warning.accepted)[-1] == 50.0
    # A new level of loss is warned about until the window knows it, not for ever.
    assert [warning.check(s, 50.0, 1.0).action for s in range(42, 90)].count("warn") == 1
    before = list(warning.accepted)
    assert warning.check(91, NAN, 1.0).action == "warn"
    assert list(warning.accepted) == before, "a NaN would poison the mean"


def test_consecutive_skips_end_in_a_stop_and_a_good_step_resets_them() -> None:
    monitor = HealthMonitor(HealthConfig(nan="skip", max_consecutive_skips=3))
    actions = [
        monitor.check(step, loss, 1.0).action
        for step, loss in enumerate([NAN, NAN, 2.0, NAN, NAN, NAN], 1)
    ]
    assert actions == ["skip", "skip", "proceed", "skip", "skip", "stop"]
    assert monitor.total_skips == 5


def test_default_limit_is_ten() -> None:
    monitor = HealthMonitor(HealthConfig(nan="skip"))
    assert [monitor.check(s, NAN, 1.0).action for s in range(1, 11)] == ["skip"] * 9 + ["stop"]


def test_listed_steps_are_skipped_without_counting_towards_the_limit() -> None:
    config = HealthConfig(skip_steps=(2, 3), max_consecutive_skips=1)
    monitor = HealthMonitor(config)
    assert [monitor.check(s, 2.0, 1.0).action for s in (1, 2, 3, 4)] == [
        "proceed",
        "skip",
        "skip",
        "proceed",
    ]
    assert list(monitor.accepted) == [2.0, 2.0]


def in_ranks(world: int, body: Callable[[int, Callable[[float], float]], list[str]]) -> list:
    """Run `body(rank, all_reduce_max)` in a thread per rank, with a real reduction between."""
    slots, barrier = [0.0] * world, threading.Barrier(world, timeout=20)
    results: list = [None] * world

    def run(rank: int) -> None:
        def all_reduce_max(value: float) -> float:
            slots[rank] = value
            barrier.wait()
            largest = max(slots)
            barrier.wait()
            return largest

        results[rank] = body(rank, all_reduce_max)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_one_rank_finds_all_ranks_do() -> None:
    def body(rank: int, all_reduce_max: Callable[[float], float]) -> list[str]:
        monitor = HealthMonitor(
            HealthConfig(nan="skip", spike="warn", spike_warmup=4), all_reduce_max
        )
        actions = []
        for step in range(1, 13):
            loss = 3 + 0.01 * (step % 3)
            if step == 6 and rank == 2:
                loss = NAN
            if step == 9 and rank == 1:
                loss = 9.0
            norm = INF if step == 11 and rank == 0 else 1.0
            decision = monitor.check(step, loss, norm)
            actions.append(decision.action)
            if step == 9 and rank == 0:
                assert "loss spike on another rank" in decision.reason
        return [*actions, str(monitor.consecutive_skips), str(monitor.total_skips)]

    results = in_ranks(3, body)
    assert results[0] == results[1] == results[2]
    assert results[0][5] == "skip"
    assert results[0][8] == "warn"
    assert results[0][10] == "skip"
    assert results[0].count("proceed") == 9


def test_without_the_reduction_ranks_would_part() -> None:
    """Negative control of the test above: a rank-local decision does differ."""
    config = HealthConfig(nan="skip")
    local = [HealthMonitor(config).check(1, loss, 1.0).action for loss in (2.0, NAN)]
    assert local == ["proceed", "skip"]


def test_a_resumed_monitor_decides_bit_for_bit_the_same() -> None:
    noise = random.Random(1)
    losses = [3 + noise.gauss(0, 0.1) + (2.0 if noise.random() < 0.05 else 0) for _ in range(400)]
    losses[333] = NAN
    config = HealthConfig(nan="skip", spike="skip", window=64, spike_sigma=3.0)
    whole = HealthMonitor(config)
    expected = [whole.check(step, loss, 1.0) for step, loss in enumerate(losses, 1)]
    assert len({decision.action for decision in expected}) == 2

    resumed = HealthMonitor(config)
    actual = []
    for step, loss in enumerate(losses, 1):
        if step % 37 == 0:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = HealthMonitor(config)
            resumed.load_state_dict(state)
        actual.append(resumed.check(step, loss, 1.0))
    assert actual == expected  # the reasons hold the thresholds
    assert resumed.state_dict() == whole.state_dict()


def test_health_log_names_the_batch(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.health.write_text('{"step": 3}\n{"st')  # killed in the middle of a line
    figures = HealthLog(folder).record(
        7, Decision("skip", "why"), loss=NAN, grad_norm=INF, first_sample=96, last_sample=111
    )
    assert figures == {
        "health/first_sample": 96,
        "health/last_sample": 111,
        "health/skipped": 1.0,
    }
    first, row = read_jsonl(folder.health)
    assert first == {"step": 3}
    assert (row["step"], row["action"], row["reason"]) == (7, "skip", "why")
    assert (row["first_sample"], row["last_sample"]) == (96, 111)
    assert math.isnan(row["loss"]) and row["grad_norm"] == INF


def test_problems_are_reported_together() -> None:
    assert HealthConfig().problems() == []
    bad = HealthConfig(
        spike_sigma=0.0, window=1, spike_warmup=0, max_consecutive_skips=0, skip_steps=(0,)
    )
    assert [where for where, _ in bad.problems()] == [
        "spike_sigma",
        "window",
        "spike_warmup",
        "max_consecutive_skips",
        "skip_steps",
    ]
    ((where, message),) = HealthConfig(window=8).problems()
    assert where == "spike_warmup" and "32" in message and "8" in message


def test_the_step_since_when_weights_are_not_finite(tmp_path: Path) -> None:
    """Findings that ended before the last step did not touch the weights of it."""
    folder = RunFolder(tmp_path)
    assert not_finite_since(folder, 9) == 9
    log = HealthLog(folder)
    for step, loss in ((2, NAN), (3, 7.0), (6, 2.0), (7, NAN), (8, NAN), (9, NAN)):
        norm = NAN if step == 6 else 1.0
        decision = Decision("warn", "found")
        log.record(step, decision, loss=loss, grad_norm=norm, first_sample=0, last_sample=1)
    assert not_finite_since(folder, 9) == 6
    assert not_finite_since(folder, 10) == 6
    assert not_finite_since(folder, 5) == 5
