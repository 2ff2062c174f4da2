"""SOAR: what it reduces to, what it may never do, and a trap that greedy decoding falls into."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from models.decoding import Sampling
from models.denoisers import BidirectionalDenoiser
from models.samplers import sample
from models.soar import SOAR, PositionBeam
from models.unmasking import Remasking, Threshold
from tests.denoisers import MaskedTable
from tests.enumerable import Joint
from tests.trained import tiny_config, tiny_model

SEEDS = range(6)


def fill(joint: Joint, config: Any) -> tuple[list[int], Any, MaskedTable]:
    denoiser = MaskedTable(joint)
    [text], report = sample(denoiser, [[]], joint.length, config)
    return text, report, denoiser


def joints() -> list[Joint]:
    return [Joint.random(3, 4, seed) for seed in SEEDS]


@pytest.mark.parametrize("score", ["mean", "sum"])
@pytest.mark.parametrize("beam", [1, 2, 3])
def test_without_sure_tokens_it_is_position_beam_search(beam: int, score: Any) -> None:
    for joint in joints():
        soar, report, seen = fill(joint, SOAR.Config(beam=beam, threshold=1.0, score=score))
        pbs, fixed, seen_by_pbs = fill(joint, PositionBeam.Config(beam=beam))
        assert soar == pbs and report == fixed
        assert all(map(torch.equal, seen.seen, seen_by_pbs.seen))


def test_with_one_member_and_no_sure_tokens_it_is_greedy() -> None:
    for joint in joints():
        soar, report, _ = fill(joint, SOAR.Config(beam=1, threshold=1.0))
        greedy, by_one, _ = fill(joint, Remasking.Config())
        assert soar == greedy and report == by_one


@pytest.mark.parametrize("threshold, most", [(0.3, 2), (0.45, 5), (0.4, 3)])
def test_with_one_member_it_is_decoding_by_a_threshold(threshold: float, most: int) -> None:
    together = 0
    for joint in joints():
        soar, report, _ = fill(joint, SOAR.Config(beam=1, threshold=threshold, most=most))
        parallel, other, _ = fill(joint, Threshold.Config(threshold=threshold, most=most))
        assert soar == parallel and report == other
        together += max(report.committed[0]) > 1
    assert together  # in some of them, or the test would say nothing


@pytest.mark.parametrize("collapse", ["best", "any"])
@pytest.mark.parametrize("score", ["mean", "sum"])
@pytest.mark.parametrize("least, most", [(1, 2), (2, 3)])
def test_tokens_stay_and_passes_are_few(collapse: Any, score: Any, least: int, most: int) -> None:
    config = SOAR.Config(3, 0.5, least, most, score, collapse)
    for joint in joints():
        text, report, denoiser = fill(joint, config)
        assert report.calls <= joint.length
        assert report.sequences <= 3 * report.calls
        assert sum(report.committed[0]) == joint.length
        assert all(count == 1 or least <= count <= most for count in report.committed[0])
        mask = denoiser.mask_id
        for before, after in itertools.pairwise(denoiser.seen):
            for member in after:
                parents = (before == member) | (before == mask)
                assert parents.all(1).any(), "a member changed a token"
        assert all(0 <= token < 3 for token in text)


def trap() -> Joint:
    """x[0] = 0 is likeliest (0.6), but leaves x[1] open; x[1] = 0 (0.55) nearly settles x[0]."""
    table = torch.full((4, 4), 1e-6, dtype=torch.float64)
    table[0] = 0.15
    table[1, 0] = 0.4
    return Joint(table / table.sum())


def test_greedy_falls_into_the_trap_and_soar_does_not() -> None:
    joint = trap()
    greedy, by_one, _ = fill(joint, Remasking.Config())
    found, report, _ = fill(joint, SOAR.Config(beam=2))
    assert greedy[0] == 0 and found == [1, 0]
    assert joint.log_probability(found) > joint.log_probability(greedy) + 0.9
    assert joint.log_probability(found) == float(joint.table.max().log())
    assert report.calls == by_one.calls == 2 and report.sequences == 3


def test_the_beam_shrinks_where_acceleration_wins() -> None:
    """A first token settles the other three."""
    table = torch.full((2, 2, 2, 2), 1e-4, dtype=torch.float64)
    table[0, 0, 0, 0], table[1, 1, 1, 1] = 0.6, 0.4
    joint = Joint(table / table.sum())
    found, report, denoiser = fill(joint, SOAR.Config(beam=2, threshold=0.9, most=2))
    assert found == [0, 0, 0, 0]
    assert report.committed == [[1, 2, 1]]
    assert [len(ids) for ids in denoiser.seen] == [1, 2, 1]
    _, fixed, _ = fill(joint, PositionBeam.Config(beam=2))
    assert fixed.calls == 4 > report.calls


def test_a_batch_is_its_sequences_and_real_models_work() -> None:
    model = tiny_model(tiny_config(vocab_size=12, mask_token=True)).double()
    denoiser = BidirectionalDenoiser(model)
    prompts = [[3, 1, 4, 1, 5], [8], [2, 7]]
    config = SOAR.Config(beam=3, threshold=0.5)
    texts, report = sample(denoiser, prompts, 9, config)
    assert report.calls <= 9 and {t for text in texts for t in text} <= set(range(11))
    for prompt, text, steps in zip(prompts, texts, report.committed):
        alone, one = sample(denoiser, [prompt], 9, config)
        assert alone == [text] and one.committed == [steps]
        assert sample(denoiser, [prompt], 9, config, seed=7)[0] == alone


def test_what_does_not_go_together() -> None:
    joint = trap()
    with pytest.raises(ValueError, match="temperature must be 0"):
        sample(MaskedTable(joint), [[]], 2, SOAR.Config(), Sampling(temperature=1.0))
    model = tiny_model(tiny_config(vocab_size=12, mask_token=True))
    with pytest.raises(ValueError, match="a cache cannot follow"):
        sample(BidirectionalDenoiser(model, cache="dual"), [[]], 2, PositionBeam.Config())
    for wrong in ({"beam": 0}, {"threshold": 0.0}, {"least": 0}, {"least": 3, "most": 2}):
        assert SOAR.Config(**wrong).problems()
    assert PositionBeam.Config(beam=0).problems() and not SOAR.Config().problems()
