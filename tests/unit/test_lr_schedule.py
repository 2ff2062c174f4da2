"""Learning-rate schedules against their closed forms."""

import math

import pytest

from pretrain.schedule import ScheduleConfig, learning_rate_factor

KINDS = ("cosine", "wsd", "linear", "constant")


def curve(config: ScheduleConfig, total: int) -> list[float]:
    return [learning_rate_factor(config, step, total) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_is_linear_and_ends_at_the_peak(kind: str) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=4, min_ratio=0.0)
    assert curve(config, 40)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup_the_first_update_is_at_the_peak(kind: str) -> None:
    assert learning_rate_factor(ScheduleConfig(kind=kind, warmup_steps=0), 0, 7) == 1.0


def test_cosine_and_linear_closed_forms() -> None:
    warmup, total, floor = 10, 110, 0.1
    cosine = curve(ScheduleConfig("cosine", warmup, floor), total)
    linear = curve(ScheduleConfig("linear", warmup, floor), total)
    for step in range(warmup, total):
        p = (step - warmup) / 100
        assert cosine[step] == pytest.approx(0.55 + 0.45 * math.cos(math.pi * p), abs=1e-14)
        assert linear[step] == pytest.approx(1 - 0.9 * p, abs=1e-14)
    assert cosine[60] == pytest.approx(0.55, abs=1e-14)  # half-way: the mean of peak and floor


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("linear", lambda p: 1 - p),
        ("sqrt", lambda p: 1 - math.sqrt(p)),
        ("cosine", lambda p: 0.5 + 0.5 * math.cos(math.pi * p)),
    ],
)
def test_wsd_holds_the_peak_then_decays(shape: str, form) -> None:
    config = ScheduleConfig("wsd", 5, 0.0, decay_fraction=0.25, decay_shape=shape)
    factors = curve(config, 100)
    assert factors[5:76] == [1.0] * 71
    for step in range(75, 100):
        assert factors[step] == pytest.approx(form((step - 75) / 25), abs=1e-14)


@pytest.mark.parametrize("kind", ("cosine", "wsd", "linear"))
def test_the_floor_is_reached_one_past_the_last_update(kind: str) -> None:
    config = ScheduleConfig(kind, 3, 0.0)
    factors = curve(config, 50)
    assert min(factors) > 0, "an update would be spent at a learning rate of zero"
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert learning_rate_factor(config, 50, 50) == pytest.approx(0.0, abs=1e-15)
    assert learning_rate_factor(config, 80, 50) == pytest.approx(0.0, abs=1e-15)


def test_constant_stays_at_the_peak() -> None:
    assert set(curve(ScheduleConfig("constant", 2), 30)[2:]) == {1.0}


@pytest.mark.parametrize(
    ("config", "total", "field", "words"),
    [
        (ScheduleConfig(warmup_steps=-1), None, "warmup_steps", ["-1", "0 or more"]),
        (ScheduleConfig(min_ratio=1.5), 100, "min_ratio", ["1.5"]),
        (ScheduleConfig(decay_fraction=0.0), 100, "decay_fraction", ["0.0"]),
        (ScheduleConfig(warmup_steps=100), 100, "warmup_steps", ["100 steps", "0 to 99"]),
        (ScheduleConfig("wsd", 60, decay_fraction=0.5), 100, "warmup_steps", ["60", "0 to 50"]),
        (ScheduleConfig(warmup_steps=0), 0, "", ["0 steps"]),
    ],
)
def test_problems_name_field_value_and_allowed(config, total, field, words) -> None:
    ((where, problem),) = config.problems(total)
    assert where == field
    assert all(word in problem for word in words), problem


def test_all_problems_are_reported_together() -> None:
    assert len(ScheduleConfig("wsd", -1, -0.5, 2.0).problems(100)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_legal_schedule_has_no_problems(kind: str) -> None:
    assert ScheduleConfig(kind, 99 if kind == "cosine" else 80).problems(100) == []
    assert ScheduleConfig(kind).problems() == []
