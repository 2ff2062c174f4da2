"""Initial weights: a function of (seed, name, coordinates), exactly, whatever the shard."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models import initialize
from models.blocks import BLOCKS
from models.config import InitConfig, ModelConfig
from models.initialize import initialize_, normal_, standard_deviation, unpadded_shape
from tests.components import chosen

NAME = "blocks.3.attention.q_proj.weight"


def draw(
    shape: tuple[int, ...], seed: int = 0, name: str = NAME, dtype: torch.dtype = torch.float64
) -> Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    normal_(out, seed, name, [0] * len(shape), shape, 1.0)
    return out


SAMPLE = (1000, 400)
KEY = 5107791684022085456
GOLDEN = [
    "-0x1.b739f82187f4cp-2",
    "-0x1.d577189f6fe75p-1",
    "-0x1.9fc6efe4e69a8p-1",
    "-0x1.d27eda2fce78ep-4",
    "0x1.a2570e74bfa9ep+0",
    "-0x1.82ef3decd4e99p-1",
]
GOLDEN_FAR = ["0x1.f14b4d9a92f12p-3", "-0x1.22c724ab534fep-1", "0x1.8789a28fdad19p+0"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(37,), (23, 31), (5, 7, 11)], ids=str)
def test_any_shard_is_the_slice_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bitwise; storage is longer than the logical tensor, and the surplus is zero."""
    chance = random.Random(len(shape))
    stored = tuple(n + 5 for n in shape)
    whole = torch.zeros(stored, dtype=dtype)
    whole[tuple(slice(n) for n in shape)] = draw(shape, dtype=dtype)
    for _ in range(40):
        begin = [chance.randrange(n) for n in stored]
        end = [chance.randint(b, n) for b, n in zip(begin, stored)]
        block = torch.full([e - b for b, e in zip(begin, end)], torch.nan, dtype=dtype)
        normal_(block, 0, NAME, begin, shape, 1.0)
        assert block.equal(whole[tuple(slice(b, e) for b, e in zip(begin, end))]), (begin, end)
    assert whole[tuple(slice(n) for n in shape)].count_nonzero() == math.prod(shape)


def test_narrow_values_are_roundings_of_the_float64_ones() -> None:
    wide = draw((200, 50))
    for dtype in (torch.float32, torch.bfloat16):
        assert draw((200, 50), dtype=dtype).equal(wide.to(dtype))


def test_standard_deviation_scales_exactly_once() -> None:
    out = torch.empty(50, 40, dtype=torch.float64)
    normal_(out, 0, NAME, [0, 0], (50, 40), 0.25)  # a power of two: no rounding
    assert out.equal(draw((50, 40)) * 0.25)


def test_names_and_seeds_are_uncorrelated() -> None:
    sources = [(0, NAME), (1, NAME), (2, NAME), (0, NAME.replace("3", "4")), (10, "embedding"),
               (1, "0embedding"), (-1, NAME), (2**40, NAME)]  # fmt: skip
    drawn = torch.stack([draw((200, 200), *source).flatten() for source in sources])
    correlation = torch.corrcoef(drawn) - torch.eye(len(sources))
    assert correlation.abs().max() < 4.5 / 200
    squares = torch.corrcoef(drawn.square()) - torch.eye(len(sources))
    assert squares.abs().max() < 4.5 / 200


def test_neighbours_are_uncorrelated() -> None:
    x = draw(SAMPLE)
    n = x.numel()
    for lag in (1, 2, 3, 64, 399, 400):
        a, b = x.view(-1)[:-lag], x.view(-1)[lag:]
        assert abs(float((a * b).mean())) < 4.5 / n**0.5, lag
        assert abs(float((a.square() * b.square()).mean()) - 1) < 4.5 * 8**0.5 / n**0.5, lag


def test_moments_and_distribution_are_normal() -> None:
    x = draw(SAMPLE).view(-1)
    n = x.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        found = float((x**power).mean())
        assert abs(found - moment) < 4 * math.sqrt(variance / n), f"moment {power}: {found}"
    # Kolmogorov-Smirnov: the statistic exceeds 1.95 / √n once in a thousand seeds
    below = (1 + torch.erf(x.sort().values / math.sqrt(2))) / 2
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    statistic = torch.maximum((below - steps[:-1]).max(), (steps[1:] - below).max())
    assert float(statistic) < 1.95 / n**0.5
    tail = (x.abs() > 3).double().mean()
    assert float(tail) == pytest.approx(math.erfc(3 / math.sqrt(2)), abs=4 * (0.0027 / n) ** 0.5)
    assert 4.0 < float(x.abs().max()) < 6.5


def test_logarithm_and_cosine_are_accurate() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.rand(20_000, generator=g, dtype=torch.float64)
    u = torch.cat([u, 2.0 ** -torch.arange(1, 54).double(), 1 - 2.0 ** -torch.arange(2, 54)])
    # both pass zero, where only the absolute error is of interest
    assert (initialize._log(u) - u.log()).abs().max() < 1e-14
    torch.testing.assert_close(initialize._log(u), u.log(), rtol=1e-14, atol=1e-16)
    assert (initialize._cos_turn(u) - (2 * math.pi * u).cos()).abs().max() < 2e-15


def test_threads_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = draw((300, 500), dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert draw((300, 500), dtype=torch.float32).equal(wanted), threads
    finally:
        torch.set_num_threads(before)
    for chunk in (997, 4096, 1 << 20):
        monkeypatch.setattr(initialize, "_CHUNK", chunk)
        assert draw((300, 500), dtype=torch.float32).equal(wanted), chunk


def test_golden_values() -> None:
    """These numbers are the start of every run ever made: they never change."""
    assert initialize.parameter_key(0, NAME) == KEY
    assert [float(v).hex() for v in draw((3, 2)).view(-1)] == GOLDEN
    big = torch.empty(1, 3, dtype=torch.float64)
    normal_(big, 123, "embedding.weight", [99_999, 8189], (100_000, 8192), 1.0)
    assert [float(v).hex() for v in big.view(-1)] == GOLDEN_FAR


def std(config: ModelConfig, name: str, shape: tuple[int, ...] = (7, 5)) -> float:
    return standard_deviation(config, name, shape)


CONFIG = ModelConfig(vocab_size=83, vocab_multiple=8, hidden=16, layers=8)


def block(name: str, stored: tuple[int, ...], config: ModelConfig = CONFIG) -> Tensor:
    out = torch.full(stored, torch.nan)
    shape = unpadded_shape(config, name, stored)
    initialize_(out, config, 0, name, [0] * len(stored), shape)
    return out


def test_kinds_of_parameters() -> None:
    assert block("blocks.0.attention_norm.weight", (16,)).eq(1).all()
    assert block("blocks.0.attention_norm.bias", (16,)).eq(0).all()
    assert block("blocks.0.attention.q_proj.bias", (16,)).eq(0).all()
    for name in ("embedding.weight", "head.weight"):
        rows = block(name, (88, 16))
        assert rows[83:].eq(0).all()
        assert rows[:83].count_nonzero() == 83 * 16
    assert block("blocks.0.attention.q_proj.weight", (88, 16)).count_nonzero() == 88 * 16
    assert not block("embedding.weight", (88, 16)).equal(block("head.weight", (88, 16)))


def test_vocabulary_padding_changes_no_weight() -> None:
    wider = ModelConfig(vocab_size=83, vocab_multiple=128, hidden=16, layers=8)
    for name in ("embedding.weight", "head.weight"):
        assert block(name, (128, 16), wider)[:88].equal(block(name, (88, 16)))


def test_residual_outputs_shrink_with_depth() -> None:
    assert std(CONFIG, "blocks.0.attention.o_proj.weight") == 0.02 / 4
    assert std(CONFIG, "blocks.7.feedforward.down_proj.weight") == 0.02 / 4
    assert std(CONFIG, "blocks.0.feedforward.up_proj.weight") == 0.02
    flat = ModelConfig(layers=8, init=InitConfig(std=0.1, scale_outputs=False))
    assert std(flat, "blocks.0.attention.o_proj.weight") == 0.1
    drawn = block("blocks.0.attention.o_proj.weight", (200, 200))
    assert float(drawn.std()) == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize(
    ("block", "shrunk", "factor"),
    [
        ("pre", "o down", 16**0.5),
        ("post", "o down", 16**0.5),
        ("mixln", "o down", 16**0.5),
        ("hybrid", "o down", 16**0.5),
        ("hybrid_star", "o down", 16**0.5),
        ("span", "o down", 8**0.5),
        ("deepnorm", "o down v up", 64**0.25),
        ("lns", "", 1.0),
        ("peri", "", 1.0),
        ("reordered", "", 1.0),
        ("keel", "", 1.0),
        ("adaln", "", 1.0),
    ],
)
def test_what_each_placement_shrinks(block: str, shrunk: str, factor: float) -> None:
    """Eight blocks; a feed-forward layer of experts or another alike."""
    config = chosen(CONFIG, block=block)
    for part in ("q", "k", "v", "o", "gate", "up", "down"):
        inside = "attention" if part in "qkvo" else "feedforward.experts"
        found = std(config, f"blocks.3.{inside}.{part}_proj.weight", (2, 7, 5))
        assert found == pytest.approx(0.02 / (factor if part in shrunk.split() else 1)), part
    for name in ("embedding.weight", "head.weight", "mtp.1.projection.weight"):
        assert std(config, name) == 0.02


def test_every_placement_says_what_it_shrinks() -> None:
    marks = test_what_each_placement_shrinks.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(BLOCKS.names())


def test_another_factor_on_the_outputs() -> None:
    for block in ("pre", "span", "keel", "deepnorm"):
        config = replace(chosen(CONFIG, block=block), init=InitConfig(output_gain=0.3))
        assert std(config, "blocks.0.attention.o_proj.weight") == 0.02 * 0.3
        assert std(config, "blocks.0.feedforward.down_proj.weight") == 0.02 * 0.3
        others = 64**0.25 if block == "deepnorm" else 1
        assert std(config, "blocks.0.attention.v_proj.weight") == 0.02 / others
        assert std(config, "blocks.0.attention.q_proj.weight") == 0.02
    flat = replace(chosen(CONFIG, block="deepnorm"), init=InitConfig(scale_outputs=False))
    assert std(flat, "blocks.0.attention.v_proj.weight") == 0.02


def test_fan_in_and_embedding() -> None:
    init = InitConfig(std=1.0, rule="fan_in")
    config = replace(CONFIG, init=init)
    assert std(config, "blocks.0.attention.q_proj.weight", (64, 25)) == 1 / 5
    assert std(config, "blocks.0.feedforward.experts.up_proj.weight", (8, 64, 25)) == 1 / 5
    assert std(config, "blocks.0.attention.o_proj.weight", (64, 25)) == pytest.approx(1 / 5 / 4)
    assert std(config, "head.weight", (83, 16)) == 1 / 4
    assert std(config, "embedding.weight", (83, 16)) == 1.0
    for rule in ("constant", "fan_in"):
        small = replace(CONFIG, init=InitConfig(std=1.0, rule=rule, embedding_std=0.3))
        assert std(small, "embedding.weight", (83, 16)) == 0.3
        assert std(small, "mtp.1.embedding.weight", (83, 16)) == 0.3


def test_settings_that_are_refused() -> None:
    for key in ("std", "embedding_std", "output_gain"):
        for value in (0.0, -1.0):
            problem = (key, f"must be positive, got {value}")
            assert InitConfig(**{key: value}).problems() == [problem]  # type: ignore[arg-type]
    both = InitConfig(scale_outputs=False, output_gain=0.5)
    assert both.problems() == [
        ("output_gain", "is set but scale_outputs=false: it would be ignored")
    ]
    assert InitConfig(std=1.0, rule="fan_in", embedding_std=0.1, output_gain=2.0).problems() == []
