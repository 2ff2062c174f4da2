"""Samplers against distributions that can be summed over, and what none of them may ever do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.ancestral import Ancestral, PredictorCorrector, reverse_chances
from models.attention import SequenceContext
from models.decoding import Sampling
from models.denoisers import BidirectionalDenoiser
from models.denoising import SAMPLERS, Canvas, Denoiser, alpha
from models.samplers import sample
from models.transformer import Transformer
from models.unmasking import FirstHitting, Remasking, Threshold, certainty
from tests.denoisers import MaskedTable, UniformTable, chi_square, marginals
from tests.enumerable import Joint
from tests.trained import tiny_config, tiny_model

JOINT = Joint.random(3, 3, seed=1)
DRAWN = Sampling(temperature=1.0)
VOCABULARY = 12  # 11 tokens and a mask token, of 128 stored rows


def drawn(denoiser: Denoiser, config: Any, count: int = 1500) -> list[list[int]]:
    return sample(denoiser, [[]] * count, denoiser.joint.length, config, DRAWN)[0]  # type: ignore[attr-defined]


def test_the_table_is_that_of_the_distribution() -> None:
    denoiser = MaskedTable(JOINT)
    for ids in ([3, 3, 3], [3, 1, 3], [0, 3, 2], [2, 1, 0]):
        row = torch.tensor(ids) @ torch.tensor([16, 4, 1])
        torch.testing.assert_close(denoiser.table[row].exp(), JOINT.denoise(ids, 3))


@pytest.mark.parametrize("config", [
    FirstHitting.Config(),
    Remasking.Config(order="random"),
    Remasking.Config(order="margin"),
    Remasking.Config(order="entropy"),
    Ancestral.Config(steps=150),
    Ancestral.Config(steps=150, last="ancestral"),
    PredictorCorrector.Config(steps=150, eta=0.05),
    PredictorCorrector.Config(steps=150, schedule="rescale", eta=0.3),
    PredictorCorrector.Config(steps=150, schedule="constant", eta=0.98),
])  # fmt: skip
def test_a_perfect_masked_denoiser_gives_the_distribution(config: Any) -> None:
    """One token at a time, or in so many steps that two in one are rare."""
    statistic, limit = chi_square(drawn(MaskedTable(JOINT), config), JOINT.table)
    assert statistic < limit


@pytest.mark.parametrize("config", [
    Ancestral.Config(steps=60),
    Ancestral.Config(steps=60, last="ancestral"),
    PredictorCorrector.Config(steps=60, eta=0.1),
])  # fmt: skip
def test_a_perfect_uniform_denoiser_gives_the_distribution(config: Any) -> None:
    statistic, limit = chi_square(drawn(UniformTable(JOINT), config), JOINT.table)
    assert statistic < limit


@pytest.mark.parametrize("denoiser", [MaskedTable(JOINT), UniformTable(JOINT)],
                         ids=["masked", "uniform"])  # fmt: skip
def test_all_tokens_at_once_are_independent(denoiser: Denoiser) -> None:
    """A single step gives the product of the marginals, which is not the distribution."""
    texts = drawn(denoiser, Ancestral.Config(steps=1, last="ancestral"))
    statistic, limit = chi_square(texts, marginals(JOINT))
    assert statistic < limit
    statistic, limit = chi_square(texts, JOINT.table)
    assert statistic > 3 * limit


@pytest.mark.parametrize("config", [Remasking.Config(steps=2, order="random"),
                                    Remasking.Config(order="confidence")])  # fmt: skip
def test_samplers_that_are_not_exact(config: Any) -> None:
    """Two tokens at once; an order that depends on the tokens that were drawn."""
    statistic, limit = chi_square(drawn(MaskedTable(JOINT), config), JOINT.table)
    assert statistic > 1.5 * limit


@pytest.mark.parametrize("denoiser", [MaskedTable(JOINT), UniformTable(JOINT)],
                         ids=["masked", "uniform"])  # fmt: skip
def test_a_corrector_that_corrects_nothing_is_ancestral(denoiser: Denoiser) -> None:
    plain = drawn(denoiser, Ancestral.Config(steps=8), 200)
    for config in (
        PredictorCorrector.Config(steps=8, schedule="constant", eta=1.0),
        PredictorCorrector.Config(steps=8, schedule="cap", eta=0.0),
        PredictorCorrector.Config(steps=8, schedule="rescale", eta=0.0),
    ):
        assert drawn(denoiser, config, 200) == plain
    corrected = PredictorCorrector.Config(steps=8, schedule="constant", eta=0.0)
    assert drawn(denoiser, corrected, 200) != plain


@pytest.mark.parametrize("schedule", ["cap", "rescale"])
def test_kappa_is_the_chance_of_hiding_again(schedule: Any) -> None:
    """ReMDM's two chances, from κ: σ of hiding, (α_s − (1 − σ) α_t)/(1 − α_t) of appearing."""
    eta, alpha_t, alpha_s = 0.1, alpha(0.6), alpha(0.55)
    walk = PredictorCorrector(PredictorCorrector.Config(schedule=schedule, eta=eta))
    kappa = walk.kappa(alpha_t, alpha_s)
    hides = (1 - kappa) * (1 - alpha_s)
    most = min(1, (1 - alpha_s) / alpha_t)
    assert hides == pytest.approx(min(eta, most) if schedule == "cap" else eta * most)
    appears = kappa * (alpha_s - alpha_t) / (1 - alpha_t) + (1 - kappa) * alpha_s
    assert appears == pytest.approx((alpha_s - (1 - hides) * alpha_t) / (1 - alpha_t))
    assert walk.kappa(alpha_t, 1.0) == 1.0


def test_reverse_chances_are_bayes_rule() -> None:
    """q(z_s | z_t, p) by summing over the clean token and every z_s."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    z = torch.randint(5, (7,), generator=generator)

    def kernel(keep: float) -> torch.Tensor:
        return keep * torch.eye(5, dtype=torch.float64) + (1 - keep) / 5

    alpha_t, alpha_s = 0.3, 0.45
    joint = (p @ kernel(alpha_s)) * kernel(alpha_t / alpha_s)[:, z].T  # [row, z_s]
    expected = joint / joint.sum(-1, keepdim=True)
    torch.testing.assert_close(reverse_chances(p, z, alpha_t, alpha_s), expected)
    start = p * kernel(alpha_t)[:, z].T
    start /= start.sum(-1, keepdim=True)
    torch.testing.assert_close(reverse_chances(p, z, alpha_t, 1.0), start)
    mixed = 0.7 * expected + 0.3 * start @ kernel(alpha_s)
    torch.testing.assert_close(reverse_chances(p, z, alpha_t, alpha_s, 0.7), mixed)


def test_forward_passes_are_counted() -> None:
    denoiser = MaskedTable(JOINT)
    _, report = sample(denoiser, [[], []], 3, Remasking.Config())
    assert (report.calls, report.sequences) == (3, 6) == (denoiser.calls, denoiser.sequences)
    assert report.committed == [[1, 1, 1], [1, 1, 1]]
    _, report = sample(denoiser, [[]], 3, Remasking.Config(steps=2))
    assert report.committed == [[2, 1]] and report.calls == 2
    _, report = sample(denoiser, [[]], 3, Remasking.Config(steps=9))
    assert report.committed == [[1, 1, 1]]
    # many steps cost no more passes than there are tokens: nothing is asked when nothing appears
    _, report = sample(denoiser, [[]], 3, Ancestral.Config(steps=500))
    assert report.calls <= 3 and len(report.committed[0]) == 500
    assert sum(report.committed[0]) == 3
    _, report = sample(UniformTable(JOINT), [[]], 3, Ancestral.Config(steps=5))
    assert report.calls == 6  # the last one is greedy


def test_a_threshold_keeps_all_that_is_sure_and_always_one() -> None:
    denoiser = MaskedTable(JOINT)
    _, report = sample(denoiser, [[]], 3, Threshold.Config(threshold=1.1))
    assert report.committed == [[1, 1, 1]]
    _, report = sample(denoiser, [[]], 3, Threshold.Config(threshold=1e-9))
    assert report.committed == [[3]]
    _, report = sample(denoiser, [[]], 3, Threshold.Config(threshold=1e-9, most=2))
    assert report.committed == [[2, 1]]
    best = denoiser.table[-1].exp().max(-1).values.sort().values
    between = float(best[1] + best[2]) / 2
    _, report = sample(denoiser, [[]], 3, Threshold.Config(threshold=between))
    assert report.committed[0][0] == 1


def test_orders_of_certainty() -> None:
    chances = torch.tensor([[0.5, 0.45, 0.05], [0.48, 0.26, 0.26], [0.4, 0.3, 0.3]]).double()
    tokens = chances.argmax(-1)
    first = {order: int(certainty(chances, tokens, order).argmax())
             for order in ("confidence", "margin", "entropy")}  # fmt: skip
    assert first == {"confidence": 0, "margin": 1, "entropy": 0}
    entropy = -(chances * chances.log()).sum(-1)
    torch.testing.assert_close(certainty(chances, tokens, "entropy"), -entropy)
    drawn_token = torch.tensor([2, 2, 2])
    assert certainty(chances, drawn_token, "confidence").tolist() == pytest.approx(
        [0.05, 0.26, 0.3]
    )


# ------------------------------------------------------------------------------- real models


def model_of(family: str, **changes: Any) -> Transformer:
    return tiny_model(
        tiny_config(vocab_size=VOCABULARY, mask_token=family != "uniform", **changes)
    ).double()


def denoiser_of(family: str) -> Denoiser:
    return BidirectionalDenoiser(model_of(family), family)  # type: ignore[arg-type]


SHORT: dict[str, dict[str, Any]] = {
    "ancestral": {"steps": 12},
    "corrector": {"steps": 12, "eta": 0.2},
}
CASES = [
    pytest.param(family, SAMPLERS.config_class(name)(**SHORT.get(name, {})), id=f"{family}-{name}")
    for name in SAMPLERS.names()
    for family in ("masked", "uniform")
    if family in SAMPLERS.component(name).families  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("family, config", CASES)
def test_batches_seeds_and_forbidden_tokens(family: str, config: Any) -> None:
    denoiser = denoiser_of(family)
    prompts = [[3, 1, 4, 1, 5], [8], [2, 7]]
    texts, report = sample(denoiser, prompts, 9, config, seed=5)
    assert [len(text) for text in texts] == [9, 9, 9]
    tokens = {token for text in texts for token in text}
    assert tokens <= set(range(denoiser.vocabulary)) and len(tokens) > 2
    assert texts == sample(denoiser, prompts, 9, config, seed=5)[0]
    # a text does not depend on the other prompts, nor on padding
    assert sample(denoiser, prompts[:1], 9, config, seed=5)[0] == texts[:1]
    assert sample(denoiser, [[9]] + prompts[1:], 9, config, seed=5)[0][1:] == texts[1:]
    assert all(sum(steps) >= 9 for steps in report.committed) or family == "uniform"
    drawing = SAMPLERS.build(config).sampling.temperature > 0
    assert (sample(denoiser, prompts, 9, config, seed=6)[0] != texts) == drawing


def test_logits_are_the_models_own() -> None:
    """No padding: those of the plain bidirectional model; a prompt stays what it is."""
    seen = []

    class Watched(BidirectionalDenoiser):
        def logits(self, canvas: Any, noise: float) -> torch.Tensor:
            result = super().logits(canvas, noise)
            seen.append((canvas.ids.tolist(), result))
            return result

    model = model_of("masked")
    sample(Watched(model), [[3, 1, 4]], 5, Remasking.Config())
    assert len(seen) == 5
    for given, logits in seen:
        assert given[0][:3] == [3, 1, 4]
        ids = torch.tensor(given)
        context = SequenceContext(torch.arange(8), "bidirectional")
        torch.testing.assert_close(logits, model.logits(ids, context)[:, 3:])


def test_an_end_of_text_cuts() -> None:
    denoiser = denoiser_of("masked")
    [text], _ = sample(denoiser, [[3, 1]], 9, FirstHitting.Config(), seed=1)
    [cut], _ = sample(denoiser, [[3, 1]], 9, FirstHitting.Config(), seed=1, eos=text[4])
    assert cut == text[: text.index(text[4])]


def test_greedy_one_by_one_by_hand() -> None:
    model = model_of("masked")
    denoiser = BidirectionalDenoiser(model)
    [text], _ = sample(denoiser, [[5]], 6, Remasking.Config())
    ids = torch.tensor([[5] + [VOCABULARY - 1] * 6])
    for _ in range(6):
        p = model.logits(ids, SequenceContext(torch.arange(7), "bidirectional")).softmax(-1)
        best = p.max(-1).values.masked_fill(ids != VOCABULARY - 1, -1)[0]
        ids[0, best.argmax()] = p[0, best.argmax()].argmax()
    assert ids[0, 1:].tolist() == text


def test_guidance() -> None:
    """0 is none, −1 forgets the prompt, and 2 is the sum by hand."""
    model = model_of("masked")
    ids = torch.tensor([[3, 1, 4, 11, 11]])
    canvas = Canvas(ids, torch.ones_like(ids, dtype=torch.bool), 3, 3, 5)
    hidden = Canvas(torch.full_like(ids, 11), canvas.real, 3, 3, 5)
    plain = BidirectionalDenoiser(model)
    given, free = plain(canvas), plain(hidden)
    torch.testing.assert_close(BidirectionalDenoiser(model, guidance=-1.0)(canvas), free)
    guided = BidirectionalDenoiser(model, guidance=2.0)
    torch.testing.assert_close(guided(canvas), free + 3 * (given - free))
    assert (guided.calls, guided.sequences) == (1, 2)
    with pytest.raises(ValueError, match="no mask token"):
        BidirectionalDenoiser(model_of("uniform"), "uniform", guidance=1.0)


@pytest.mark.parametrize("name, family, reason", [
    ("threshold", "uniform", "any token may change"),
    ("ancestral", "causal", "left to right"),
    ("first_hitting", "block", "use blocks"),
    ("corrector", "eso", "use eso"),
])  # fmt: skip
def test_a_sampler_that_does_not_fit_says_why(name: str, family: Any, reason: str) -> None:
    denoiser = Denoiser(family, 11, 11)
    with pytest.raises(ValueError, match=f"sampler={name} is for .*{reason}"):
        sample(denoiser, [[]], 3, SAMPLERS.config_class(name)())


def test_what_cannot_be_is_refused() -> None:
    denoiser = MaskedTable(JOINT)
    with pytest.raises(ValueError, match=r"ids \[3\]"):
        sample(denoiser, [[3]], 2, Remasking.Config())
    with pytest.raises(ValueError, match="repetition_penalty"):
        sample(denoiser, [[]], 3, Remasking.Config(), Sampling(repetition_penalty=2.0))
    assert Ancestral.Config(steps=0).problems() and Threshold.Config(threshold=0).problems()
    assert Remasking.Config(steps=0).problems() and Threshold.Config(most=0).problems()
    assert PredictorCorrector.Config(eta=2).problems()
    with pytest.raises(ValueError, match="mask token"):
        BidirectionalDenoiser(model_of("uniform"), "masked")
