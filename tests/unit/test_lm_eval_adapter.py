"""What a model says to lm-evaluation-harness, asked without it."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.tokenizers import byte_tokenizer
from models.likelihood import Request, Scoring, predictor
from models.transformer import Transformer
from pretrain.lm_eval_adapter import TextScorer, harness
from pretrain.trained import TrainedModel, build_model, open_trained
from tests.trained import LENGTH, save_run, tiny_config

WORDS = byte_tokenizer()
EOS = WORDS.eos_id or 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrainedModel, Transformer]]:
    found = {}
    for name, objective, changes in (
        ("causal", {"type": "causal"}, {}),
        ("masked", {"type": "masked"}, {"mask_token": True}),
        ("block", {"type": "block", "block_size": 4}, {"mask_token": True}),
        ("uniform", {"type": "uniform"}, {}),
        ("eso", {"type": "eso", "alpha0": 0.5}, {"mask_token": True}),
    ):
        folder = tmp_path_factory.mktemp(name)
        save_run(folder, tiny_config(**changes))
        trained = dataclasses.replace(open_trained(folder), objective=objective)
        found[name] = trained, build_model(trained)
    return found


def scorer(models: Any, name: str, truncate: bool = False, **scoring: Any) -> TextScorer:
    trained, model = models[name]
    return TextScorer(trained, model, WORDS, Scoring(**scoring), truncate)


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.encode(text))


def test_requests_keep_the_tokens_of_the_joined_text(models: Any) -> None:
    causal, masked = scorer(models, "causal"), scorer(models, "masked")
    for asked in (causal, masked):
        assert asked.request("a cat  ", "sat") == Request(ids("a cat"), ids("  sat"))
    assert causal.request("", "sat") == Request((EOS,), ids("sat"))
    assert masked.request("", "sat") == Request((), ids("sat"))
    assert masked.request(" ", "sat") == Request((), ids(" sat"))


def test_an_autoregressive_model_is_exact(models: Any) -> None:
    _, model = models["causal"]
    texts = [("It is", " a truth"), ("", "é")]
    found = scorer(models, "causal").continuations(texts)
    for (context, answer), (nats, greedy) in zip(texts, found, strict=True):
        prompt = ids(context) or (EOS,)
        whole = torch.tensor([[*prompt, *ids(answer)]])
        with torch.no_grad():
            chances = model.logits(whole[:, :-1])[0].double().log_softmax(-1)[len(prompt) - 1 :]
        wanted = chances.gather(1, whole[0, len(prompt) :, None]).sum()
        assert nats == pytest.approx(float(wanted), rel=1e-6) and not greedy


def test_a_long_text_is_scored_in_windows(models: Any) -> None:
    text = "x" * (2 * LENGTH + 5)
    for name, before in (("causal", [(EOS,), ids("x"), ids("x")]), ("masked", [(), (), ()])):
        asked = scorer(models, name, draws=2)
        windows = list(asked.windows(WORDS.encode(text)))
        assert [w.prompt for w in windows] == before
        assert [len(w.answer) for w in windows] == [LENGTH, LENGTH, 5]
        assert asked.texts([text, ""])[1] == 0.0
    causal = scorer(models, "causal")
    parts = causal.continuations([("", text[:LENGTH]), ("x", text[:LENGTH]), ("x", text[:5])])
    assert causal.texts([text])[0] == pytest.approx(sum(nats for nats, _ in parts), rel=1e-9)


@pytest.mark.parametrize("name", ["masked", "block"])
def test_answers_of_few_tokens_are_summed_exactly(models: Any, name: str) -> None:
    """One-token answers have a total chance below 1, and more draws change nothing."""
    asked = scorer(models, name, draws=8, greedy=True)
    answers = [chr(code) for code in range(128)]
    found = asked.continuations([("The", answer) for answer in answers])
    assert 0.2 < sum(math.exp(nats) for nats, _ in found) < 1
    assert sum(greedy for _, greedy in found) <= 1
    few = asked.continuations([("The", " ca")])
    assert few == scorer(models, name, draws=128, seed=5, greedy=True).continuations(
        [("The", " ca")]
    )
    many = [scorer(models, name, draws=16, seed=s).continuations([("", "a cat sat")])
            for s in (0, 0, 1)]  # fmt: skip
    assert many[0] == many[1] and (many[0] != many[2]) == (name == "masked")


def test_blocks_see_nothing_behind_them(models: Any) -> None:
    """The first block of a longer answer has its own likelihood, whatever follows."""
    asked = scorer(models, "block")
    first, rest = asked.request("a", "bcd"), asked.request("abcd", "efgh")
    whole = asked.request("a", "bcdefgh")
    assert whole.blocks(4) == [first, rest]
    _, model = models["block"]
    predict = predictor(model, {"type": "block", "block_size": 4})
    seen, cut = (
        predict(torch.tensor([[*range(8)]]), None),
        predict(torch.tensor([[*range(4)]]), None),
    )
    torch.testing.assert_close(seen[:, :4], cut)


@pytest.mark.parametrize("name", ["uniform", "eso"])
def test_some_models_score_the_whole(models: Any, name: str) -> None:
    asked = scorer(models, name, draws=4)
    (whole, greedy), (joined, _) = asked.continuations([("ab", "cd"), ("a", "bcd")])
    assert whole < 0 and not greedy
    assert (whole == joined) == (name == "eso")  # where the noise is that of the joined text
    assert asked.continuations([("ab", "cd")]) == [(whole, False)]


def test_what_cannot_be_scored_is_an_error(models: Any) -> None:
    long = "x" * LENGTH
    for name in ("causal", "masked"):
        with pytest.raises(ValueError, match=f"longer than the {LENGTH}"):
            scorer(models, name, draws=2).continuations([("ab", long)])
        with pytest.raises(ValueError, match="continuation is empty"):
            scorer(models, name).continuations([("ab", "")])
    cut = scorer(models, "masked", truncate=True)
    assert cut.request(long, "abc") == Request(ids(long[3:]), ids("abc"))
    assert scorer(models, "causal", truncate=True).request(long, "abc") == Request(
        ids(long[2:]), ids("abc")
    )
    for name, scoring, words in (
        ("eso", {"draws": 3}, "even number"),
        ("causal", {"whole": True}, "no whole"),
        ("block", {"guidance": 1.0}, "guidance is for masked diffusion"),
        ("masked", {"draws": 3}, "even number"),
    ):
        with pytest.raises(ValueError, match=words):
            scorer(models, name, **scoring).continuations([("ab", "cd")])


@pytest.mark.parametrize("name", ["causal", "masked", "block", "uniform"])
def test_text_stops_where_the_task_says(models: Any, name: str) -> None:
    asked = scorer(models, name)
    text = asked.until("It is", {"until": [], "max_gen_toks": 20})
    assert len(text) > 4
    stop = text[3]
    assert asked.until("It is", {"until": [stop], "max_gen_toks": 20}) == text.split(stop)[0]


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"lm_eval cannot be used here .*\[eval\]"):
        harness()
