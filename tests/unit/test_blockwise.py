"""Samplers that keep what they have computed: blocks, ordered tokens, caches that approximate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import SequenceContext
from models.blocks import BLOCKS
from models.blockwise import Blocks
from models.decoding import Sampling
from models.denoisers import BidirectionalDenoiser, BlockDenoiser
from models.denoising import SAMPLERS, Canvas, Denoiser
from models.families import FAMILIES, family_of
from models.norms import NORMS
from models.ordered import Columns, Eso, EsoDenoiser, OrderedDenoiser
from models.positions import POSITIONS
from models.samplers import default_sampler, denoiser_of, sample
from models.soar import SOAR
from models.transformer import Transformer, unit_names
from models.unmasking import FirstHitting, Remasking, Threshold
from pretrain.objectives.base import OBJECTIVES
from pretrain.objectives.diffusion import Windows
from tests.denoisers import MaskedTable, chi_square
from tests.enumerable import Joint
from tests.trained import tiny_config, tiny_model

MASK = 11
PROMPTS = [[3, 1, 4, 1, 5], [8], [2, 7], []]
DRAWN = Sampling(temperature=1.0)


def model_of(**changes: Any) -> Transformer:
    return tiny_model(tiny_config(vocab_size=MASK + 1, mask_token=True, **changes)).double()


def random_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(MASK, (1, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------- block diffusion

INNER = [FirstHitting.Config(), Remasking.Config(steps=2), Threshold.Config(threshold=0.3)]


@pytest.mark.parametrize("inner", INNER)
def test_a_block_cache_changes_nothing(inner: Any) -> None:
    model = model_of()
    config = Blocks.Config(inner=inner)
    texts, report = sample(BlockDenoiser(model, 4), PROMPTS, 10, config, DRAWN, seed=3)
    assert [len(text) for text in texts] == [10] * 4
    assert all(0 <= token < MASK for text in texts for token in text)
    plain = BlockDenoiser(model, 4, use_cache=False)
    assert (texts, report) == sample(plain, PROMPTS, 10, config, DRAWN, seed=3)
    alone, _ = sample(BlockDenoiser(model, 4), PROMPTS[:1], 10, config, DRAWN, seed=3)
    assert alone == texts[:1]


def test_a_block_sees_what_it_saw_in_training() -> None:
    """Logits for a partly filled block against the 2n slots of the objective."""
    model, objective = model_of(), OBJECTIVES.config_class("block")(block_size=4)
    ids = random_ids(12)
    windows = Windows(ids, torch.ones_like(ids, dtype=torch.bool), None)
    built = OBJECTIVES.build(objective, model.config, 0, 1)
    batch = built.noised(windows, [5], built.training)
    context = SequenceContext(batch.positions, batch.mask)
    trained = model.logits(batch.ids, context)[:, :12, :MASK]
    assert (batch.ids[:, :12] == MASK).any()
    for use_cache in (True, False):
        denoiser = BlockDenoiser(model, 4, use_cache)
        for begin in (0, 4, 8):
            filled = torch.cat([ids[:, :begin], batch.ids[:, begin:12]], 1)
            canvas = Canvas(filled, windows.real, 0, begin, begin + 4)
            seen = denoiser(canvas)
            torch.testing.assert_close(seen, trained[:, begin : begin + 4], rtol=0, atol=1e-12)


COMPONENTS = [
    (kind, name)
    for kind, registry in (("position", POSITIONS), ("norm", NORMS), ("block", BLOCKS))
    for name in registry.names()
]


@pytest.mark.parametrize("kind, name", [*COMPONENTS, ("feedforward", "moe")])
@torch.inference_mode()
def test_caches_are_exact_with_every_component(kind: str, name: str) -> None:
    model, ids = model_of(**{kind: name}), random_ids(12)
    real = torch.ones_like(ids, dtype=torch.bool)
    blocks = [BlockDenoiser(model, 4, use_cache) for use_cache in (True, False)]
    for begin in (0, 4, 4, 8, 8):
        kept, plain = (blocked(Canvas(ids, real, 0, begin, begin + 4)) for blocked in blocks)
        torch.testing.assert_close(kept, plain, rtol=0, atol=1e-12)
    ordered = [EsoDenoiser(model, use_cache=use_cache) for use_cache in (True, False)]
    known = [[0]]
    for asked in ([3, 5], [2], [9, 8, 7]):
        kept, plain = (one.ask(Canvas(ids, real, 1, 1, 12), known, [1], [asked]) for one in ordered)
        torch.testing.assert_close(kept, plain, rtol=0, atol=1e-12)
        known[0].extend(asked)


def test_blocks_of_the_whole_text_are_one_window() -> None:
    denoiser = BidirectionalDenoiser(model_of())
    for inner in (Remasking.Config(steps=3), SOAR.Config(threshold=0.4)):
        plain = sample(denoiser, PROMPTS[:3], 9, inner)
        assert sample(denoiser, PROMPTS[:3], 9, Blocks.Config(9, inner)) == plain
    by_three, report = sample(denoiser, PROMPTS[:1], 9, Blocks.Config(3, Remasking.Config(1)))
    assert by_three != plain[0] and report.committed == [[3, 3, 3]]


def test_sampling_ends_with_the_last_text() -> None:
    denoiser = BlockDenoiser(model_of(), 4)
    config = Blocks.Config(inner=FirstHitting.Config())
    full, whole = sample(denoiser, PROMPTS[:2], 24, config, seed=1)
    eos = next(t for t in full[0][:8] if t in full[1][:8])
    texts, short = sample(denoiser, PROMPTS[:2], 24, config, seed=1, eos=eos)
    assert texts == [text[: text.index(eos)] for text in full]
    assert short.calls < whole.calls


def test_blocks_of_a_perfect_denoiser_give_the_distribution() -> None:
    joint = Joint.random(3, 3, seed=1)
    config = Blocks.Config(2, FirstHitting.Config())
    texts, _ = sample(MaskedTable(joint), [[]] * 1500, 3, config, DRAWN)
    statistic, limit = chi_square(texts, joint.table)
    assert statistic < limit


# ---------------------------------------------------------- caches that are an approximation


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_are_exact_where_one_layer_reads_only_embeddings(cache: Any) -> None:
    """The keys and values of one layer depend on nothing but their own tokens; those of two do."""
    for layers in (1, 2):
        model = model_of(layers=layers)
        kept = BidirectionalDenoiser(model, cache=cache)
        plain = BidirectionalDenoiser(model)
        ids, real = random_ids(12).repeat(2, 1), torch.ones(2, 12, dtype=torch.bool)
        ids[:, 4:] = MASK
        real[0, :2] = False
        error = 0.0
        for begin in (4, 8):
            canvas = Canvas(ids, real, 4, begin, begin + 4)
            for step in range(4):
                difference = (kept(canvas) - plain(canvas)).detach().abs().max()
                error = max(error, float(difference))
                assert step or difference < 1e-12  # the first pass over a window is exact
                ids[:, begin + step] = step
        assert error < 1e-12 if layers == 1 else error > 1e-3


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_sampling_with_a_cache(cache: Any) -> None:
    model = model_of(layers=1)
    config = Blocks.Config(3, Remasking.Config())
    for guidance in (0.0, 1.5):
        plain = sample(BidirectionalDenoiser(model, guidance=guidance), PROMPTS[:3], 9, config)
        kept = BidirectionalDenoiser(model, guidance=guidance, cache=cache)
        assert sample(kept, PROMPTS[:3], 9, config) == plain
        assert sample(kept, PROMPTS[:3], 9, config) == plain  # nothing is left of the first time
    with pytest.raises(ValueError, match="every token may change"):
        BidirectionalDenoiser(model, "uniform", cache=cache)


# ------------------------------------------------------------------------------- Eso-LM


class OrderedTable(MaskedTable, OrderedDenoiser):
    """p(x[i] | what is known), whatever the order."""

    def __init__(self, joint: Joint, alpha0: float) -> None:
        super().__init__(joint)
        self.family, self.alpha0 = "eso", alpha0

    def answers(
        self, canvas: Canvas, known: Columns, together: Sequence[int], asked: Columns
    ) -> Tensor:
        for row, columns in zip(canvas.ids[:9], known):
            assert sorted(columns) == (row != self.mask_id).nonzero().flatten().tolist()
        rows = self.logits(canvas, 0.0)
        index = torch.zeros(len(asked), max(map(len, asked)), dtype=torch.long)
        for row, columns in zip(index, asked):
            row[: len(columns)] = torch.tensor(columns)
        return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


@pytest.mark.parametrize("alpha0", [0.0, 0.5, 1.0])
def test_a_perfect_ordered_denoiser_gives_the_distribution(alpha0: float) -> None:
    joint = Joint.random(3, 3, seed=1)
    denoiser = OrderedTable(joint, alpha0)
    texts, report = sample(denoiser, [[]] * 600, 3, Eso.Config(steps=40))
    statistic, limit = chi_square(texts, joint.table)
    assert statistic < limit
    assert all(sum(steps) == 3 for steps in report.committed)
    if alpha0 == 0:
        assert report.calls == 3
    if alpha0 == 1:
        at_once, _ = sample(denoiser, [[]] * 600, 3, Eso.Config(steps=1))
        statistic, limit = chi_square(at_once, joint.table)
        assert statistic > 2 * limit


@pytest.mark.parametrize("alpha0", [0.0, 0.4, 1.0])
def test_an_ordered_cache_changes_nothing(alpha0: float) -> None:
    model = model_of()
    config = Eso.Config(steps=4)
    denoiser = EsoDenoiser(model, alpha0)
    texts, report = sample(denoiser, PROMPTS, 10, config, seed=3)
    assert [len(text) for text in texts] == [10] * 4
    assert all(0 <= token < MASK for text in texts for token in text)
    plain = EsoDenoiser(model, alpha0, use_cache=False)
    assert (texts, report) == sample(plain, PROMPTS, 10, config, seed=3)
    assert sample(denoiser, PROMPTS[:1], 10, config, seed=3)[0] == texts[:1]
    assert sample(denoiser, PROMPTS, 10, config, seed=4)[0] != texts
    assert report.calls <= (0 if alpha0 == 0 else 4) + (0 if alpha0 == 1 else 10)


@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_ordered_tokens_see_what_they_saw_in_training(variant: Any, use_cache: bool) -> None:
    """Both terms of the objective: the same logits from the same orders."""
    model = model_of()
    config = OBJECTIVES.config_class("eso")(alpha0=0.5, variant=variant)
    built = OBJECTIVES.build(config, model.config, 0, 2)
    ids, length = random_ids(9), 9
    one = Windows(ids, torch.ones_like(ids, dtype=torch.bool), None)
    hidden = torch.tensor([[False, True, True, False, False, True, False, True, False]])
    order = torch.rand(length, generator=torch.Generator().manual_seed(2)).double()

    for sequential in (False, True):
        if sequential:
            batch = built.sequential(one, hidden, order)
        else:
            batch = built.diffused(one, hidden, order, 1.0)
        context = SequenceContext(batch.positions, batch.mask)
        logits = model.logits(batch.ids, context)[:, :length, :MASK]
        places = batch.positions[0, :length].tolist()
        known = [[place for place in places if not hidden[0, place]]]
        masks = [place for place in places if hidden[0, place]]
        trained = logits[:, -len(masks) :]
        canvas = Canvas(ids.masked_fill(hidden, MASK), one.real, 0, 0, length)
        denoiser = EsoDenoiser(model, 0.5, variant, use_cache)
        together = [len(known[0])]
        if not sequential:
            seen = denoiser.ask(canvas, known, together, [masks])
            torch.testing.assert_close(seen, trained, rtol=0, atol=1e-12)
            continue
        assert masks == sorted(masks)
        for k, column in enumerate(masks):
            seen = denoiser.ask(canvas, known, together, [[column]])
            torch.testing.assert_close(seen[:, 0], trained[:, k], rtol=0, atol=1e-12)
            canvas.ids[0, column] = ids[0, column]
            known[0].append(column)


# ------------------------------------------------------------------------ what goes together


def test_objectives_have_denoisers_and_samplers() -> None:
    model = model_of()
    headless = Transformer(model.config, unit_names(model.config)[:-1]).double()
    headless.load_state_dict(model.state_dict(), strict=False)
    trees: list[dict[str, Any]] = [
        {"type": "masked"}, {"type": "block", "block_size": 4},
        {"type": "eso", "alpha0": 0.5, "variant": "A"}, {"type": "uniform"},
    ]  # fmt: skip
    for tree in trees:
        denoiser = denoiser_of(model, tree)
        assert denoiser.family == tree["type"] == family_of(tree)
        config = default_sampler(denoiser.family)
        texts, _ = sample(denoiser, [[3, 1]], 6, config)
        assert len(texts[0]) == 6 and set(texts[0]) <= set(range(MASK))
        bare = denoiser_of(headless, tree, head=model.head)
        assert sample(bare, [[3, 1]], 6, config)[0] == texts
    assert family_of({"type": "perturbed"}) == family_of({}) == "causal"
    with pytest.raises(ValueError, match="autoregressive"):
        sample(denoiser_of(model, {"type": "causal"}), [[1]], 2, Eso.Config())
    with pytest.raises(ValueError, match=r"guidance=1\.5 is for masked"):
        denoiser_of(model, trees[1], guidance=1.5)


def test_every_family_has_a_sampler_and_names_no_other() -> None:
    for name in SAMPLERS.names():
        families = SAMPLERS.component(name).families  # type: ignore[attr-defined]
        assert families and "causal" not in families
        for family in set(FAMILIES) - set(families):
            with pytest.raises(ValueError, match=f"sampler={name} is for"):
                SAMPLERS.build(SAMPLERS.config_class(name)()).check(Denoiser(family, 5, 5))


def test_blocks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="trained on blocks of 4"):
        sample(BlockDenoiser(model_of(), 4), [[1]], 4, Blocks.Config(8))
    with pytest.raises(ValueError, match="a cache cannot follow"):
        sample(BlockDenoiser(model_of(), 4), [[1]], 4, Blocks.Config(inner=SOAR.Config()))
    uncached = BlockDenoiser(model_of(), 4, use_cache=False)
    assert len(sample(uncached, [[1]], 4, Blocks.Config(inner=SOAR.Config()))[0][0]) == 4
    assert Blocks.Config(block_size=0).problems() and not Blocks.Config().problems()
    assert Blocks.Config(inner=Eso.Config()).problems()
    assert Blocks.Config(inner=Blocks.Config()).problems() and Eso.Config(steps=0).problems()
