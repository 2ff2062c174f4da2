"""Sampling: the cache changes nothing, padding changes nothing, seeds decide everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.attention import SequenceContext
from models.decoding import (
    DecodingContext,
    KeyValueCache,
    Sampling,
    generate,
    padded_positions,
    penalize,
    probabilities,
)
from models.positions import POSITIONS
from models.transformer import Transformer
from tests.trained import tiny_config, tiny_model

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(tiny_config())


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(301, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("position", POSITIONS.names())
def test_cached_logits_are_those_of_the_whole_sequence(position: str) -> None:
    """Every split of a sequence into a prefix, a middle of several tokens, and single ones."""
    model = tiny_model(tiny_config(position=position, attention={"qk_norm": True})).double()
    ids = torch.tensor(prompts(11, 11))
    whole = model.logits(ids)
    for begin in range(1, 9):
        cache = KeyValueCache(11)
        pieces = []
        for start, end in [(0, begin), (begin, 9), (9, 10), (10, 11)]:
            if start == end:
                continue
            context = DecodingContext(torch.arange(start, end), store=cache, offset=start)
            pieces.append(model.logits(ids[:, start:end], context))
        assert cache.length == 11
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)


def test_a_wrong_mask_over_cached_keys_is_noticed(model: Transformer) -> None:
    """Negative control: with an offset of 0 the middle piece would not see the prefix."""
    ids = torch.tensor(prompts(6))
    cache = KeyValueCache(6)
    model.logits(ids[:, :2], DecodingContext(torch.arange(2), store=cache))
    context = DecodingContext(torch.arange(2, 6), store=cache, offset=0)
    wrong = model.logits(ids[:, 2:], context)
    assert (wrong - model.logits(ids)[:, 2:]).abs().max() > 1e-2


def test_padding_is_invisible_on_either_side() -> None:
    model = tiny_model(tiny_config()).double()
    ids = torch.tensor(prompts(9))
    whole = model.logits(ids)
    for left, right in [(3, 0), (0, 2), (2, 2)]:
        padded = torch.nn.functional.pad(ids, (left, right))
        valid = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        context = DecodingContext(padded_positions(valid), documents=valid)
        logits = model.logits(padded, context)
        assert logits.isfinite().all()
        real = logits[:, left : left + 9]
        torch.testing.assert_close(real, whole, rtol=0, atol=1e-12)


def test_slots_that_nobody_wrote_are_hidden() -> None:
    context = DecodingContext(torch.arange(2, 4), documents=torch.tensor([[0, 1, 1, 1]]), offset=2)
    mask = context.dense_mask(2, 6, torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    both = DecodingContext(torch.arange(2, 4), mask="bidirectional", offset=2)
    mask = both.dense_mask(2, 6, torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0]]


def test_without_a_cache_the_mask_is_the_training_mask() -> None:
    documents = torch.tensor([[1, 1, 2, 2, 2]])
    for kind in ("causal", "bidirectional"):
        context = SequenceContext(torch.arange(5), mask=kind, documents=documents)  # type: ignore[arg-type]
        own = DecodingContext(torch.arange(5), mask=kind, documents=documents)  # type: ignore[arg-type]
        expected = context.dense_mask(5, 5, torch.device("cpu"))
        assert torch.equal(own.dense_mask(5, 5, torch.device("cpu")), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "logit_softcap": 9.0}])
def test_cached_greedy_is_uncached_greedy(changes: dict[str, Any]) -> None:
    model = tiny_model(tiny_config(**changes))
    batch = prompts(5, 9, 1)
    cached = generate(model, batch, 24, GREEDY)
    assert cached == generate(model, batch, 24, GREEDY, use_cache=False)
    assert cached == [generate(model, [prompt], 24, GREEDY)[0] for prompt in batch]
    assert len({tuple(text) for text in cached}) == 3 and len(set(cached[0])) > 3
    # and by hand
    ids = torch.tensor([batch[0]])
    for _ in range(24):
        ids = torch.cat([ids, model.logits(ids)[:, -1:].argmax(-1)], 1)
    assert ids[0, 5:].tolist() == cached[0]


def test_the_seed_decides(model: Transformer) -> None:
    batch = prompts(4, 4, 7)
    first = generate(model, batch, 16, seed=5)
    assert first == generate(model, batch, 16, seed=5)
    assert first != generate(model, batch, 16, seed=6)
    # a sequence's noise does not depend on the other prompts
    assert generate(model, batch[:1], 16, seed=5)[0] == first[0]
    same = generate(model, batch[:1] * 3, 16, seed=5)
    assert len({tuple(text) for text in same}) == 3
    assert generate(model, batch, 16, seed=5, use_cache=False) == first


def test_a_sample_ends_before_eos(model: Transformer) -> None:
    batch = prompts(5, 5)
    free = generate(model, batch, 20, GREEDY)
    eos = free[0][6]
    ended = generate(model, batch, 20, GREEDY, eos=eos)
    for text, full in zip(ended, free):
        assert text == (full[: full.index(eos)] if eos in full else full)
    assert len(ended[0]) <= 6


def test_truncation_of_the_distribution() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    full = probabilities(logits, Sampling())
    torch.testing.assert_close(full, logits.double().exp(), rtol=1e-6, atol=0)
    top_2 = probabilities(logits, Sampling(top_k=2))
    torch.testing.assert_close(
        top_2, torch.tensor([[5, 2, 0, 0, 0]]).double() / 7, rtol=1e-6, atol=0
    )
    nucleus = probabilities(logits, Sampling(top_p=0.71))
    expected = torch.tensor([[50, 20, 15, 0, 0]]).double() / 85
    torch.testing.assert_close(nucleus, expected, rtol=1e-6, atol=0)
    assert probabilities(logits, Sampling(top_p=1e-9)).tolist() == [[1, 0, 0, 0, 0]]
    assert probabilities(logits, Sampling(top_k=99)).tolist() == full.tolist()
    cold = probabilities(logits, Sampling(temperature=0.5))
    squares = logits.double().exp().square()
    torch.testing.assert_close(cold, squares / squares.sum(), rtol=1e-6, atol=0)


def test_samples_follow_the_distribution() -> None:
    """A model whose logits do not depend on the input: frequencies against probabilities."""
    config = tiny_config(vocab_size=4, layers=1, norm="layer")
    model = tiny_model(config)
    with torch.no_grad():
        model.final_norm.weight.zero_()  # type: ignore[union-attr]
        model.final_norm.bias.zero_()[0] = 1.0  # type: ignore[union-attr]
        model.head.weight.zero_()[:4, 0] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # type: ignore[union-attr]
    texts = generate(model, [[0]] * 64, 64, seed=3)
    counts = torch.tensor(texts).flatten().bincount(minlength=4).double()
    expected = torch.tensor([0.4, 0.3, 0.2, 0.1]).double() * 4096
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom, probability 0.001


def test_repetition_penalty(model: Transformer) -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]
    batch = prompts(4, 6)
    unique = generate(model, batch, 30, Sampling(temperature=0.0, repetition_penalty=1e6))
    for prompt, text in zip(batch, unique):
        assert len(set(text)) == 30 and not set(text) & set(prompt)


@pytest.mark.parametrize(
    "given", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
              {"repetition_penalty": 0.0}],
)  # fmt: skip
def test_senseless_settings_are_named(given: dict[str, Any]) -> None:
    [(key, message)] = Sampling(**given).problems()
    assert key in given and "got" in message
    assert Sampling(0.7, 40, 0.9, 1.1).problems() == []
