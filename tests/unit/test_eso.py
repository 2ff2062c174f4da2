"""Interpolating objective: its bound on enumerable distributions, and its layouts against plain
forward passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import SequenceContext, Visibility
from models.config import ModelConfig
from models.losses import IGNORE
from parallel.stage import MicroBatch
from pretrain.objectives.base import build_objective
from pretrain.objectives.block import noisy_and_clean, twice
from pretrain.objectives.diffusion import Windows
from pretrain.objectives.eso import SEQUENTIAL, Eso
from pretrain.objectives.masked import Masked
from tests.enumerable import Joint, losses, visible_conditionals
from tests.networks import SMALL, every_component, network

VOCABULARY, LENGTH = 3, 4
MODEL = ModelConfig(vocab_size=VOCABULARY + 1, mask_token=True)
MASK = MODEL.mask_id
JOINT = Joint.random(VOCABULARY, LENGTH)
ALPHAS = [0.0, 0.25, 0.5, 0.9, 1.0]
VARIANTS: list[Any] = ["A", "B"]
KINDS: list[dict[str, Any]] = [
    {"alpha0": 0.0},
    *({"alpha0": a, "variant": v} for a in (0.6, 1.0) for v in VARIANTS),
]


PERFECT = visible_conditionals(JOINT.conditional, MASK)


def eso(model: ModelConfig = MODEL, batch: int = 1, seed: int = 0, **options: Any) -> Any:
    return build_objective(Eso.Config(**options), model, seed, batch)


def window(x: tuple[int, ...], rows: int = 1) -> Tensor:
    return torch.tensor([[0, *x]]).repeat(rows, 1)


def inconsistent(position: int, known: dict[int, int]) -> Tensor:
    """Conditionals that belong to no joint distribution."""
    seed = hash((position, tuple(sorted(known.items())))) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).softmax(0)


def negative_log_likelihood(batch: MicroBatch) -> float:
    """Of the labels, unweighted, under the perfect denoiser."""
    labels = batch.fields["labels"]
    picked = PERFECT(batch).gather(2, labels.clamp(min=0)[..., None])
    return -float(picked[..., 0][labels != IGNORE].sum())


def hidden_sets() -> Iterator[tuple[int, Tensor]]:
    for chosen in itertools.product((False, True), repeat=LENGTH):
        if any(chosen):
            yield sum(chosen), torch.tensor([chosen])


def exact(objective: Any, x: tuple[int, ...]) -> float:
    """The bound of x with all noise summed over.  A set of k masked tokens weighs in the diffusion
    term ∫ m^(k−1) (1 − m)^(n−k) dm over the chances m of a mask from 1 − α0 to 1."""
    a0 = objective.config.alpha0
    one = Windows(torch.tensor([x]), torch.ones(1, LENGTH, dtype=torch.bool), None)
    total, order = 0.0, torch.rand(LENGTH, dtype=torch.float64)
    nodes = torch.tensor([-(0.6**0.5), 0.0, 0.6**0.5], dtype=torch.float64)  # Gauss, degree 5
    m, dm = 1 - a0 / 2 + a0 / 2 * nodes, a0 / 2 * torch.tensor([5.0, 8.0, 5.0]).double() / 9
    for k, hidden in hidden_sets():
        weight = float((dm * m ** (k - 1) * (1 - m) ** (LENGTH - k)).sum())
        if a0:
            total += weight * negative_log_likelihood(objective.diffused(one, hidden, order, 1.0))
        chance = (1 - a0) ** k * a0 ** (LENGTH - k)
        if chance:
            total += chance * negative_log_likelihood(objective.sequential(one, hidden, order))
    return total


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("alpha0", ALPHAS)
def test_the_bound_is_exact_for_a_perfect_denoiser(alpha0: float, variant: Any) -> None:
    objective = eso(alpha0=alpha0, variant=variant)
    for x in itertools.islice(JOINT.sequences(), 0, None, 17):
        assert exact(objective, x) == pytest.approx(-JOINT.log_probability(x), abs=1e-12)


def test_a_sequential_slot_that_sees_its_own_token_gives_the_answer_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaking(stage: Tensor) -> Visibility:
        honest = noisy_and_clean(stage)
        return Visibility(honest.rank, twice(stage), honest.group)

    monkeypatch.setattr("pretrain.objectives.eso.noisy_and_clean", leaking)
    assert exact(eso(alpha0=0.0), (2, 0, 1, 1)) == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_diffusion_is_masked_diffusion_for_any_table(variant: Any) -> None:
    tokens = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=torch.manual_seed(0))
    model = visible_conditionals(inconsistent, MASK)
    masked = build_objective(Masked.Config(), MODEL, 3, 16)
    for evaluation in (False, True):
        wanted = losses(masked, model, tokens, range(16), evaluation)["nelbo"]
        objective = eso(batch=16, seed=3, variant=variant)
        found = losses(objective, model, tokens, range(16), evaluation)["nelbo"]
        assert found == pytest.approx(wanted, rel=1e-12)


def test_no_diffusion_is_left_to_right_for_any_table() -> None:
    model = visible_conditionals(inconsistent, MASK)
    for index, x in enumerate(itertools.islice(JOINT.sequences(), 0, None, 5)):
        wanted = -sum(
            float(inconsistent(i, dict(enumerate(x[:i])))[x[i]].log()) for i in range(LENGTH)
        )
        for evaluation in (False, True):
            found = losses(eso(alpha0=0.0), model, window(x), [index], evaluation)["nelbo"]
            assert LENGTH * found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_objective_estimates_the_bound(evaluation: bool) -> None:
    """Both terms, each of its own samples, with noise spread over the batch."""
    x, draws, groups = (2, 0, 1, 1), 32, 12
    objective = eso(batch=draws, alpha0=0.6, diffusion_share=0.4)
    steps = [range(g * draws, (g + 1) * draws) for g in range(groups)]
    means = [losses(objective, PERFECT, window(x, draws), step, evaluation) for step in steps]
    found = LENGTH * torch.tensor([mean["nelbo"] for mean in means])
    bound, error = -JOINT.log_probability(x), float(found.std()) / groups**0.5
    assert abs(float(found.mean()) - bound) < 4 * error + 2e-3 * bound
    assert error < 0.1 * bound


def test_flat_weights_are_for_diffusion_in_training() -> None:
    tokens = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=torch.manual_seed(0))
    model = visible_conditionals(inconsistent, MASK)
    flat, elbo = (eso(batch=16, alpha0=0.5, weighting=w) for w in ("flat", "elbo"))
    bound, both = (losses(o, model, tokens, range(16)) for o in (elbo, flat))
    assert both["nelbo"] == bound["nelbo"]
    evaluated = [losses(o, model, tokens, range(16), True) for o in (flat, elbo)]
    assert evaluated[0] == evaluated[1]
    batch = flat.micro_batch(tokens, None, range(16))
    counts = flat.counts([batch])
    assert [(t.name, t.weight) for t in flat.terms(counts)] == [("nelbo", 0.0), ("flat", 1.0)]
    labels = batch.fields["labels"]
    chosen = model(batch).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    loss = -chosen.masked_fill(labels == IGNORE, 0)
    ordered = batch.fields[SEQUENTIAL]
    wanted = loss[~ordered].sum() / counts["diffusion"] + loss[ordered].sum() / counts[SEQUENTIAL]
    assert both["flat"] == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_step_is_shared_between_the_terms(share: float) -> None:
    tokens = torch.zeros(16, 201, dtype=torch.long)
    objective = eso(batch=16, alpha0=0.5, diffusion_share=share)
    batch = objective.micro_batch(tokens, None, range(32, 48))
    ordered = batch.fields[SEQUENTIAL]
    assert (ordered.all(1) | ~ordered.any(1)).all()
    diffused = ~ordered[:, 0]
    assert diffused.sum() == round(16 * share)
    times = 0.5 / batch.fields["weights"][diffused].unflatten(1, (2, 200)).amax(2)
    level = (times - 0.5) / 0.5  # chance of a mask: from 1 − α0 to 1
    count = level.numel()
    assert (level.flatten().sort().values * count - torch.arange(count)).abs().max() < 2.1
    masked = (batch.ids == MASK).double().unflatten(1, (2, 200)).mean(2)
    assert (masked[diffused] - times).abs().max() < 0.15
    assert (masked[~diffused, 0] - 0.5).abs().max() < 0.15 and (masked[~diffused, 1] == 0).all()
    n = 200 * int(diffused.sum())
    assert objective.counts([batch]) == {"diffusion": 2 * n, SEQUENTIAL: 3200 - n}
    evaluated = objective.evaluation_batch(tokens, None, range(16))
    assert objective.counts([evaluated]) == {"diffusion": 2 * 3200, SEQUENTIAL: 3200}
    assert evaluated.fields[SEQUENTIAL][:, 0].tolist() == [False, True] * 16


@pytest.mark.parametrize("alpha0", ALPHAS)
def test_the_share_of_judged_slots_is_told(alpha0: float) -> None:
    share = 0.25 if 0 < alpha0 < 1 else 0.5
    objective = eso(batch=64, alpha0=alpha0, diffusion_share=share)
    batch = objective.micro_batch(torch.zeros(64, 101, dtype=torch.long), None, range(64))
    judged = (batch.fields["labels"] != IGNORE).double().mean()
    assert float(judged) == pytest.approx(objective.config.judged, abs=0.01)


def rows_of(batch: MicroBatch, ordered: bool) -> Tensor:
    return (batch.fields[SEQUENTIAL][:, 0] == ordered).nonzero()[:, 0]


def real_batch(variant: Any, alpha0: float, length: int = 6) -> tuple[MicroBatch, Tensor]:
    """Eight sequences of one or two documents, some padded, in both terms, and their logits."""
    tokens = torch.randint(0, 8, (8, length + 1), generator=torch.manual_seed(1))
    documents = (torch.arange(length + 1) > torch.arange(8)[:, None] - 1).long()
    documents = documents.masked_fill(
        torch.arange(length + 1) > torch.arange(8, 0, -1)[:, None], -1
    )
    objective = eso(SMALL, 8, documents="mask", alpha0=alpha0, variant=variant)
    batch = objective.evaluation_batch(tokens, documents, range(8))
    return batch, network().logits(batch.ids, batch.context())


@pytest.mark.parametrize(("alpha0", "variant"), [(0.0, "B"), (0.5, "A"), (0.5, "B")])
def test_the_sequential_layout_equals_a_forward_pass_per_token(alpha0: float, variant: Any) -> None:
    """Of a real transformer, each masked token's logits are those of [what is known ; mask]."""
    batch, found = real_batch(variant, alpha0)
    assert batch.positions is not None and batch.documents is not None
    model, compared = network(), 0
    for row in rows_of(batch, True).tolist():
        for slot in (batch.fields["labels"][row] != IGNORE).nonzero()[:, 0].tolist():
            seen = torch.arange(slot + 1)
            ids = torch.cat([batch.ids[row, 6 : 6 + slot], batch.ids[row, slot : slot + 1]])[None]
            known = batch.ids[row, :slot] != SMALL.mask_id
            rank = torch.cat([(~known).long().cumsum(0), torch.tensor([slot + 1])])[None]
            mask: Any = Visibility(rank, rank, rank) if variant == "A" else "causal"
            documents = batch.documents[row : row + 1, seen]
            context = SequenceContext(batch.positions[row : row + 1, seen], mask, documents)
            wanted = model.logits(ids, context)[0, -1]
            assert (found[row, slot] - wanted).abs().max() < 1e-12
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(("alpha0", "variant"), [*itertools.product((0.5, 1.0), VARIANTS)])
def test_diffused_rows_equal_plain_forward_passes(alpha0: float, variant: Any) -> None:
    """Two times side by side are two sequences; in B each is causal, so what a prefix gives does
    not depend on what follows."""
    batch, found = real_batch(variant, alpha0)
    assert batch.positions is not None and batch.documents is not None
    model = network()
    for row in rows_of(batch, False).tolist():
        for begin in range(0, batch.ids.shape[1], 6):
            whole = range(begin + 1, begin + 7) if variant == "B" else [begin + 6]
            for end in whole:
                span = (slice(row, row + 1), slice(begin, end))
                masked = batch.ids[span] == SMALL.mask_id
                known = masked.long().cumsum(1)
                mask: Any = Visibility(known, known, known) if variant == "A" else "causal"
                context = SequenceContext(batch.positions[span], mask, batch.documents[span])
                wanted = model.logits(batch.ids[span], context)[0]
                assert (found[row, begin:end] - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_noise_belongs_to_the_sample(kind: dict[str, Any]) -> None:
    tokens = torch.randint(0, VOCABULARY, (12, 9), generator=torch.manual_seed(1))
    documents = torch.zeros_like(tokens).masked_fill(torch.arange(9) > 6, -1)
    whole = eso(batch=12, **kind).micro_batch(tokens, documents, range(24, 36))
    for size in (1, 3, 4):
        parts = [
            eso(batch=12, **kind).micro_batch(
                tokens[i : i + size], documents[i : i + size], range(24 + i, 24 + i + size)
            ).tensors() for i in range(0, 12, size)
        ]  # fmt: skip
        assert all(map(torch.equal, map(torch.cat, zip(*parts, strict=True)), whole.tensors()))
    assert whole.positions is not None
    padding = whole.positions >= 6
    assert padding.sum() == 12 * 2 * whole.ids.shape[1] // 8
    assert (whole.ids[padding] != MASK).all()
    assert all((whole.fields[name][padding] == IGNORE).all() for name in ("targets", "labels"))
    evaluated = [
        eso(batch=n, seed=seed, **kind).evaluation_batch(tokens, documents, range(12)).ids
        for n, seed in ((12, 0), (3, 1))
    ]
    assert torch.equal(*evaluated)
    if kind["alpha0"]:
        other = eso(batch=12, seed=1, **kind).micro_batch(tokens, documents, range(24, 36))
        assert not torch.equal(other.ids, whole.ids)


@pytest.mark.parametrize("what", every_component(), ids=lambda what: what[0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_component_works_or_is_refused(variant: Any, what: tuple[str, ModelConfig]) -> None:
    """No slot of another document, or of padding, changes anything."""
    name, config = what
    options: dict[str, Any] = {"alpha0": 0.5, "variant": variant, "documents": "mask"}
    refused = Eso.Config(**options).model_problems(config)
    assert bool(refused) == (name == "position nope")
    if refused:
        return
    tokens = torch.randint(0, 8, (2, 9), generator=torch.manual_seed(0))
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2])
    batch = eso(config, 2, **options).evaluation_batch(tokens, documents, range(2))
    model = network(config)
    before = model.logits(batch.ids, batch.context())
    assert before.isfinite().all() and batch.positions is not None
    in_rows = twice(documents[:, 1:].repeat_interleave(2, 0))
    first = in_rows.gather(1, batch.positions) == 0
    ids = torch.where(first | (batch.ids == SMALL.mask_id), batch.ids, (batch.ids + 1) % 8)
    after = model.logits(ids, batch.context())
    assert (before - after)[first].abs().max() < 1e-12
    assert (before - after)[~first].abs().max() > 1e-3


def test_what_does_not_fit_is_refused() -> None:
    def paths(**options: Any) -> list[str]:
        return [path for path, _ in Eso.Config(**options).problems()]

    assert paths() == paths(alpha0=0.0) == paths(alpha0=0.5, variant="A", diffusion_share=0.3) == []
    assert paths(alpha0=1.5) == paths(alpha0=math.nan) == ["alpha0"]
    assert paths(alpha0=0.0, variant="A", weighting="flat") == ["variant", "weighting"]
    assert paths(diffusion_share=0.3) == ["diffusion_share"]
    assert paths(alpha0=0.5, diffusion_share=1.0) == ["diffusion_share"]
    ((path, _),) = Eso.Config(alpha0=0.5).training_problems(8, 1)
    assert path == "alpha0" and not Eso.Config(alpha0=0.5).training_problems(8, 2)
    assert not Eso.Config().training_problems(8, 1)
    assert [path for path, _ in Eso.Config().model_problems(ModelConfig())] == ["type"]
