"""Block diffusion: its bound on enumerable distributions, and the layout of noisy and clean slots
against one forward pass per block."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import SequenceContext, Visibility
from models.config import ModelConfig
from models.losses import IGNORE
from pretrain.config import KernelsConfig, RunConfig, TrainingConfig
from pretrain.objectives.base import build_objective
from pretrain.objectives.block import Block, noisy_and_clean, twice
from pretrain.objectives.masked import Masked
from tests.enumerable import Joint, losses, visible_conditionals
from tests.networks import SMALL, every_component, network

VOCABULARY, LENGTH = 3, 4
MODEL = ModelConfig(vocab_size=VOCABULARY + 1, mask_token=True)
MASK = MODEL.mask_id
JOINT = Joint.random(VOCABULARY, LENGTH)
SIZES = [1, 2, 4]


def window(x: tuple[int, ...], rows: int = 1) -> Tensor:
    return torch.tensor([[0, *x]]).repeat(rows, 1)


table = visible_conditionals(JOINT.conditional, MASK)


def exact(size: int, x: tuple[int, ...]) -> float:
    """The bound of x, all noise summed over, from the logits of the 2n layout.  Blocks do not see
    each other's noise, so that those of all blocks may be enumerated together."""
    objective: Any = build_objective(Block.Config(block_size=size), MODEL)
    total = 0.0
    for hidden in itertools.product((False, True), repeat=size):
        k = sum(hidden)
        if k == 0:
            continue
        weight = math.factorial(k - 1) * math.factorial(size - k) / math.factorial(size)
        masked = torch.tensor([hidden * (LENGTH // size)])
        weights = torch.full(masked.shape, weight, dtype=torch.float64)
        objective.hide = lambda *_, drawn=(masked, weights): drawn
        total += LENGTH * losses(objective, table, window(x), [0])["nelbo"]
    return total


@pytest.mark.parametrize("size", SIZES)
def test_the_bound_is_exact_for_a_perfect_denoiser(size: int) -> None:
    for x in itertools.islice(JOINT.sequences(), 0, None, 7):
        assert exact(size, x) == pytest.approx(-JOINT.log_probability(x), abs=1e-12)


def test_clean_tokens_of_the_own_block_would_give_the_answer_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaking(stage: Tensor) -> Visibility:
        honest = noisy_and_clean(stage)
        return Visibility(honest.rank, twice(stage), honest.group)

    monkeypatch.setattr("pretrain.objectives.block.noisy_and_clean", leaking)
    assert exact(2, (2, 0, 1, 1)) == 0


def test_blocks_of_one_token_are_autoregressive() -> None:
    objective = build_objective(Block.Config(block_size=1, estimator="count"), MODEL)
    for index, x in enumerate(itertools.islice(JOINT.sequences(), 0, None, 5)):
        for evaluation in (False, True):
            found = losses(objective, table, window(x), [index], evaluation)["nelbo"]
            assert LENGTH * found == pytest.approx(-JOINT.log_probability(x), abs=1e-12)


@pytest.mark.parametrize("estimator", ["time", "count"])
def test_one_block_is_masked_diffusion(estimator: Any) -> None:
    tokens = torch.randint(0, VOCABULARY, (8, 13), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(13) > torch.arange(5, 13)[:, None]
    documents = torch.zeros_like(tokens).masked_fill(padding, -1)
    config = Block.Config(block_size=12, estimator=estimator)
    block = build_objective(config, MODEL, 3, 8).micro_batch(tokens, documents, range(8, 16))
    masked = build_objective(Masked.Config(estimator=estimator), MODEL, 3, 8)
    plain = masked.micro_batch(tokens, documents, range(8, 16))
    assert torch.equal(block.ids[:, :12], plain.ids) and torch.equal(
        block.ids[:, 12:], tokens[:, 1:]
    )
    for name, value in plain.fields.items():
        assert torch.equal(block.fields[name][:, :12], value)
    x = torch.randint(0, 8, (8, 13), generator=torch.Generator().manual_seed(0))
    model = network(SMALL)
    batches = [
        build_objective(c, SMALL, 3, 8).micro_batch(x, documents, range(8))
        for c in (config, Masked.Config(estimator=estimator))
    ]
    two, one = (model.logits(b.ids, b.context()) for b in batches)
    real = ~padding[:, 1:]
    assert (two[:, :12] - one)[real].abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["time", "count"])
def test_the_objective_estimates_the_bound(estimator: Any) -> None:
    x, draws, groups = (2, 0, 1, 1), 32, 12
    objective = build_objective(Block.Config(block_size=2, estimator=estimator), MODEL, 0, draws)
    steps = [range(g * draws, (g + 1) * draws) for g in range(groups)]
    means = [losses(objective, table, window(x, draws), step)["nelbo"] for step in steps]
    found = LENGTH * torch.tensor(means)
    bound, error = -JOINT.log_probability(x), float(found.std()) / groups**0.5
    assert abs(float(found.mean()) - bound) < 4 * error + 2e-3 * bound
    assert error < 0.1 * bound


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_two_halves_equal_one_forward_pass_per_block(size: int) -> None:
    """Of a real transformer, each block's logits are those of [clean prefix ; noisy block]."""
    length, model = 6, network(SMALL)
    tokens = torch.randint(0, 8, (2, length + 1), generator=torch.Generator().manual_seed(size))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])
    objective = build_objective(Block.Config(block_size=size, documents="mask"), SMALL, 0, 2)
    batch = objective.micro_batch(tokens, documents, range(2))
    found = model.logits(batch.ids, batch.context())
    for begin in range(0, length, size):
        end = begin + size
        ids = torch.cat([tokens[:, 1 : begin + 1], batch.ids[:, begin:end]], 1)
        blocks = (torch.arange(end) // size).expand_as(ids)
        alone = Visibility(blocks, blocks, blocks)
        context = SequenceContext(torch.arange(end), alone, documents[:, 1 : end + 1])
        wanted = model.logits(ids, context)[:, begin:]
        assert (found[:, begin:end] - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["time", "count"])
def test_every_block_has_a_level_of_its_own(estimator: Any) -> None:
    tokens = torch.zeros(16, 4001, dtype=torch.long)
    config = Block.Config(block_size=1000, estimator=estimator)
    batch = build_objective(config, MODEL, 0, 16).micro_batch(tokens, None, range(32, 48))
    clean, labels = batch.ids[:, 4000:], batch.fields["labels"]
    assert (clean == 0).all() and (labels[:, 4000:] == IGNORE).all()
    share = (labels[:, :4000].unflatten(1, (4, 1000)) != IGNORE).double().mean(2)
    time = 1 / batch.fields["weights"][:, :4000].unflatten(1, (4, 1000)).amax(2)
    assert (share - time).abs().max() < 0.09
    assert (time.flatten().sort().values * 64 - torch.arange(64)).abs().max() <= 1.1


@pytest.mark.parametrize("options", [{}, {"clip": (0.4, 0.7)}, {"estimator": "count"}], ids=str)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_share_of_judged_slots_is_told(size: int, options: dict[str, Any]) -> None:
    config = Block.Config(block_size=size, **options)
    batch = build_objective(config, MODEL, 0, 64).micro_batch(
        torch.zeros(64, 101, dtype=torch.long), None, range(64)
    )
    judged = (batch.fields["labels"] != IGNORE).double().mean()
    assert float(judged) == pytest.approx(config.judged, abs=0.01)


def test_clipped_levels_are_for_training_alone() -> None:
    tokens = torch.zeros(32, 65, dtype=torch.long)
    config = Block.Config(block_size=16, clip=(0.3, 0.8))
    objective = build_objective(config, MODEL, 0, 32)
    weights = objective.micro_batch(tokens, None, range(32)).fields["weights"]
    drawn = 1 / weights[weights > 0]
    assert 0.3 <= drawn.min() < 0.32 and 0.78 < drawn.max() <= 0.8 + 1e-3
    whole = build_objective(Block.Config(block_size=16), MODEL, 1, 32)
    found, wanted = (o.evaluation_batch(tokens, None, range(32)) for o in (objective, whole))
    assert all(map(torch.equal, found.tensors(), wanted.tensors()))


@pytest.mark.parametrize("estimator", ["time", "count"])
def test_noise_belongs_to_the_sample(estimator: Any) -> None:
    tokens = torch.randint(0, VOCABULARY, (12, 9), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros_like(tokens).masked_fill(torch.arange(9) > 6, -1)
    config = Block.Config(block_size=4, estimator=estimator)
    whole = build_objective(config, MODEL, 0, 12).micro_batch(tokens, documents, range(24, 36))
    for size in (1, 3, 4):
        parts = [
            build_objective(config, MODEL, 0, 12).micro_batch(
                tokens[i : i + size], documents[i : i + size], range(24 + i, 24 + i + size)
            ).tensors() for i in range(0, 12, size)
        ]  # fmt: skip
        assert all(map(torch.equal, map(torch.cat, zip(*parts, strict=True)), whole.tensors()))
    padding = twice(documents[:, 1:] < 0)
    assert (whole.ids[padding] != MASK).all()
    assert all((whole.fields[name][padding] == IGNORE).all() for name in ("targets", "labels"))
    assert whole.documents is not None and torch.equal(whole.documents == 0, padding)


@pytest.mark.parametrize("what", every_component(), ids=lambda what: what[0])
def test_every_component_works_or_is_refused(what: tuple[str, ModelConfig]) -> None:
    """Through blocks, nothing reaches a token from the blocks behind it or from padding."""
    name, config = what
    objective = Block.Config(block_size=4)
    refused = objective.model_problems(config)
    assert bool(refused) == (name == "position nope")
    if refused:
        return
    tokens = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(0))
    documents = torch.zeros_like(tokens)
    documents[1, -2:] = -1
    batch = build_objective(objective, config, 0, 2).micro_batch(tokens, documents, range(2))
    model = network(config)
    before = model.logits(batch.ids, batch.context())
    assert before.isfinite().all()
    changed = batch.ids.clone()
    changed[0, 8 + 4 :] = (changed[0, 8 + 4 :] + 1) % 8  # the clean second block
    changed[1, [6, 7, 14, 15]] = (changed[1, [6, 7, 14, 15]] + 1) % 8  # padding
    after = model.logits(changed, batch.context())
    assert (before[0, :8] - after[0, :8]).abs().max() < 1e-12
    assert (before[1, :6] - after[1, :6]).abs().max() < 1e-12
    clean = batch.ids.clone()
    clean[0, 8] = (clean[0, 8] + 1) % 8
    after = model.logits(clean, batch.context())
    assert (before[0, :4] - after[0, :4]).abs().max() < 1e-12
    assert (before[0, 4:8] - after[0, 4:8]).abs().max() > 1e-6


def test_what_does_not_fit_is_refused() -> None:
    assert not Block.Config(block_size=4).training_problems(12, 1)
    ((path, text),) = Block.Config(block_size=5).training_problems(12, 1)
    assert path == "block_size" and "does not divide sequence_length=12" in text
    for clip in ((0.5, 0.5), (-0.1, 1.0), (0.2, 1.1)):
        ((path, _),) = Block.Config(clip=clip).problems()
        assert path == "clip"
    ((path, _),) = Block.Config(block_size=0).problems()
    assert path == "block_size" and not Block.Config(block_size=0).training_problems(12, 1)
    assert [path for path, _ in Block.Config().model_problems(ModelConfig())] == ["type"]
    run = RunConfig(
        model=MODEL, objective=Block.Config(block_size=5), kernels=KernelsConfig(attention="flash"),
        training=TrainingConfig(sequence_length=12, batch_tokens=24, steps=1),
    )  # fmt: skip
    assert ("objective.block_size", text) in run.problems()
    text = "flash hides no padding, as diffusion needs: use flex or sdpa"
    assert ("kernels.attention", text) in run.problems()


def test_a_clip_says_that_its_loss_is_no_bound() -> None:
    assert not Block.Config().notes()
    (note,) = Block.Config(clip=(0.3, 0.8)).notes()
    assert "from 0.3 to 0.8" in note and "none in training" in note
