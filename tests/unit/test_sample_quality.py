"""Samples judged by an autoregressive model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from data_tools.tokenizers import byte_tokenizer
from models.likelihood import Scoring
from pretrain.lm_eval_adapter import TextScorer
from pretrain.sample_quality import sample_quality, unigram_entropy
from pretrain.trained import build_model, open_trained
from tests.trained import LENGTH, save_run, tiny_config

WORDS = byte_tokenizer()
SAMPLES = [WORDS.encode(text) for text in ("It is a truth", "aaaaaaaa", "", "é?")]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> TextScorer:
    folder: Path = tmp_path_factory.mktemp("judge")
    save_run(folder, tiny_config())
    trained = open_trained(folder)
    return TextScorer(trained, build_model(trained), WORDS, Scoring())


def nats(judge: TextScorer, ids: list[int]) -> float:
    whole = torch.tensor([[WORDS.eos_id, *ids]])
    with torch.no_grad():
        chances = judge.model.logits(whole[:, :-1])[0].double().log_softmax(-1)
    return -float(chances.gather(1, whole[0, 1:, None]).sum())


def test_perplexity_is_of_all_tokens(judge: TextScorer) -> None:
    found = sample_quality(judge, SAMPLES, WORDS)
    left = [ids for ids in SAMPLES if ids]
    total, count = sum(nats(judge, ids) for ids in left), sum(map(len, left))
    assert (found.samples, found.tokens) == (3, count)
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a token is a byte
    assert found.standard_error is not None and found.standard_error > 0
    assert f"perplexity {found.perplexity:.2f}" in str(found)
    assert sample_quality(judge, SAMPLES[:1], WORDS).standard_error is None


def test_a_prompt_is_seen_and_not_judged(judge: TextScorer) -> None:
    prompt, rest = WORDS.encode("It is "), WORDS.encode("a truth")
    found = sample_quality(judge, [rest], WORDS, prompt)
    wanted = nats(judge, prompt + rest) - nats(judge, prompt)
    assert found.tokens == len(rest)
    assert found.loss == pytest.approx(wanted / len(rest), rel=1e-6)
    assert found.entropy == unigram_entropy(rest)
    other = dataclasses.replace(WORDS, sha256="another")
    assert sample_quality(judge, [rest], other, prompt) == found


def test_repetition_shows_in_the_entropy(judge: TextScorer) -> None:
    assert unigram_entropy([3, 3, 3, 3]) == 0
    assert unigram_entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert unigram_entropy([1, 1, 2, 3]) == pytest.approx(1.5 * math.log(2))
    varied, repeated = (sample_quality(judge, [ids], WORDS) for ids in SAMPLES[:2])
    assert varied.entropy > 1.5 and repeated.entropy == 0
    both = sample_quality(judge, SAMPLES[:2], WORDS)
    assert both.entropy == pytest.approx(varied.entropy / 2)


def test_samples_of_another_tokenizer_are_judged_by_their_text(judge: TextScorer) -> None:
    """Unlike those of the judge's own, which stay what they are even where they spell no text."""
    other = dataclasses.replace(WORDS, sha256="another")
    assert sample_quality(judge, SAMPLES, other) == sample_quality(judge, SAMPLES, WORDS)
    broken = [[WORDS.encode("é")[0]] * 3]
    own, text = sample_quality(judge, broken, WORDS), sample_quality(judge, broken, other)
    assert own.tokens == 3 and text.tokens == 9  # a replacement character each, of three bytes


def test_samples_may_be_longer_than_the_judge_sees(judge: TextScorer) -> None:
    found = sample_quality(judge, [WORDS.encode("abc" * LENGTH)], WORDS)
    assert found.tokens == 3 * LENGTH and math.isfinite(found.loss)


def test_what_cannot_judge_or_be_judged_is_refused(judge: TextScorer) -> None:
    with pytest.raises(ValueError, match="nothing to judge"):
        sample_quality(judge, [[], []], WORDS)
    trained = dataclasses.replace(judge.trained, objective={"type": "masked"})
    masked = dataclasses.replace(judge, trained=trained)
    with pytest.raises(ValueError, match="objective masked only bounds likelihoods"):
        sample_quality(masked, SAMPLES, WORDS)
