"""Two ways to the likelihood of a sequence: an objective's own code, and sums over mask sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.likelihood import Request, Scoring, likelihoods, predictor, uniform_likelihood
from models.modeling_midspan_diffusion import MidspanForDiffusion
from pretrain.export import export_hugging_face
from pretrain.objective_likelihood import whole_likelihoods
from tests.trained import LENGTH, save_run, tiny_config, tiny_model

REQUEST = Request((7, 3), (90, 3, 41, 7))


def model(**changes: Any) -> Any:
    return tiny_model(tiny_config(**changes)).double()


@pytest.mark.parametrize("kind", ["masked", "block", "uniform"])
def test_exported_folders_say_the_same(kind: str, tmp_path: Path) -> None:
    settings = {"type": kind, **({"block_size": 3} if kind == "block" else {})}
    config = tiny_config(mask_token=kind != "uniform")
    trained = save_run(tmp_path / "run", config, objective=settings)
    wanted = likelihoods(trained, settings, [REQUEST, REQUEST.whole], LENGTH, Scoring(draws=8))
    export_hugging_face(tmp_path / "run", tmp_path / "folder", check=False)
    assert (tmp_path / "folder" / "likelihood.py").is_file()
    loaded = MidspanForDiffusion.from_pretrained(tmp_path / "folder")
    found = loaded.log_likelihood(
        [REQUEST.prompt, ()], [REQUEST.answer, REQUEST.whole.answer], draws=8
    )
    for ours, theirs in zip(wanted, found, strict=True):
        assert theirs.nats == pytest.approx(ours.nats, rel=1e-5)
        assert theirs.error == pytest.approx(ours.error, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "masked", "estimator": "count"},
        {"type": "masked", "estimator": "count", "documents": "mask"},
        {"type": "block", "estimator": "count", "block_size": 3},
    ],
)
def test_masked_models_agree_with_the_exact_sum(settings: dict[str, Any]) -> None:
    trained = model(mask_token=True)
    [exact] = likelihoods(trained, settings, [REQUEST.whole], LENGTH)
    assert exact.error == 0
    scoring = Scoring(draws=1024, batch=256)
    [found] = whole_likelihoods(trained, settings, [REQUEST], LENGTH, scoring)
    assert 0 < found.error < 0.02 * abs(exact.nats)
    assert abs(found.nats - exact.nats) < 4 * found.error + 2e-3 * abs(exact.nats)


def test_uniform_models_agree() -> None:
    trained = model()
    settings = {"type": "uniform"}
    scoring = Scoring(draws=1024, batch=256)
    [found] = whole_likelihoods(trained, settings, [REQUEST], LENGTH, scoring)
    [other] = likelihoods(trained, settings, [REQUEST], LENGTH, scoring)
    classes = trained.config.predicted_vocab_size
    predict = predictor(trained, settings)
    assert [other] == uniform_likelihood(predict, [REQUEST], classes, draws=1024, batch=256)
    error = (found.error**2 + other.error**2) ** 0.5
    assert abs(found.nats - other.nats) < 4 * error < 0.5 * abs(found.nats)


def test_an_interpolating_model_without_diffusion_is_exact() -> None:
    """α0 = 0: each token from those before it, by one mask token at its place."""
    trained = model(mask_token=True)
    settings = {"type": "eso", "alpha0": 0.0}
    [found] = whole_likelihoods(trained, settings, [REQUEST], LENGTH, Scoring(draws=2))
    assert found.error == pytest.approx(0, abs=1e-9)
    ids, nats = [*REQUEST.prompt, *REQUEST.answer], 0.0
    predict = predictor(trained, {"type": "causal"})
    for place, token in enumerate(ids):
        seen = torch.tensor([[*ids[:place], trained.config.mask_id]])
        nats += float(predict(seen, None)[0, -1].log_softmax(-1)[token])
    assert found.nats == pytest.approx(nats, rel=1e-9)


def test_an_interpolating_model_with_nothing_but_diffusion_is_masked_in_sorted_order() -> None:
    trained = model(mask_token=True)
    settings = {"type": "eso", "alpha0": 1.0, "variant": "A"}
    both = [
        whole_likelihoods(trained, settings, [REQUEST], LENGTH, Scoring(draws=512, seed=seed))[0]
        for seed in (0, 0, 1)
    ]
    assert both[0] == both[1] != both[2]
    assert abs(both[0].nats - both[2].nats) < 4 * 2**0.5 * both[0].error
    long = Request((1,) * LENGTH, (2,))
    with pytest.raises(ValueError, match=f"longer than the {LENGTH}"):
        whole_likelihoods(trained, settings, [long], LENGTH, Scoring())
