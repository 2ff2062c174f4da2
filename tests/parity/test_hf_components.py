"""Every entry of every registry leaves as a folder of its own, and computes there what it did here:
in a process that has nothing but the folder and transformers."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import SequenceContext
from models.routers import ROUTERS
from pretrain.export import export_hugging_face
from pretrain.trained import stored_tensors
from tests.clean_process import run_clean
from tests.components import DEFAULTS, choices
from tests.trained import save_run, tiny_config

pytestmark = pytest.mark.parity

MOE = {"type": "moe", "experts": 5, "hidden": 16}
# Settings under which an entry does more than with its defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "norm": {"rms": {}, "bhyt": {"sequence_length": 48}},
    "position": {
        "rnope": {"every": 2},
        "yarn": {"original_length": 16},
        "llama3": {"base": 100.0, "original_length": 32},
        "partial": {"fraction": 0.5},
    },
    "feedforward": {
        "moe": {k: v for k, v in MOE.items() if k != "type"},
        "gelu": {"bias": True, "tanh": True},
    },
}
ROUTER_SETTINGS: dict[str, dict[str, Any]] = {
    "lapsum": {"learned": True},
    "sigmoid": {"k": 3},
}


def learned(**changes: Any) -> dict[str, Any]:
    return {"position": {"type": "adarope", **changes}}


EXTRA: dict[str, dict[str, Any]] = {
    "adarope per layer": learned(granularity="layer", temperature="none"),
    "adarope for all": learned(granularity="global", reference_length=5),
    "adarope fixed": learned(granularity="none", start={"type": "pi", "factor": 2.0}),
    "adarope by context": learned(temperature="context", reference_length=4),
    "adarope by a power": learned(temperature="power", reference_length=4),
    "adarope in some layers": {
        "position": {"type": "rnope", "inner": {"type": "adarope"}, "every": 2}
    },
    "p-rope": {"position": {"type": "partial", "bands": "fastest"}},
    "all experts at once": {
        "feedforward": {**MOE, "shared_experts": 2, "first_dense": 1, "dense_hidden": 24,
                        "router": {"type": "sigmoid", "k": 2}},
        "layers": 3,
    },
    "groups of experts": {
        "feedforward": {**MOE, "experts": 6, "balance": {"kind": "global"},
                        "router": {"type": "sigmoid", "groups": 3, "top_groups": 2}},
    },
    "falling scale": {
        "feedforward": {**MOE, "router": {"type": "lapsum", "scale": 5.0, "final_scale": 1.0,
                                          "scale_steps": 100}},
    },
    "projection norms": {"block": "reordered",
                         "attention": {"qk_norm": True, "qk_norm_span": "projection"}},
    "everything learned": {
        "norm": "bhyt", "position": "adarope", "logit_softcap": 9.0, "tie_embeddings": True,
        "feedforward": {**MOE, "router": {"type": "lapsum", "learned": True}},
    },
    "predicts ahead": {
        "mtp": {"depth": 2}, "norm": "bhyt", "position": "adarope",
        "feedforward": {**MOE, "router": {"type": "lapsum", "learned": True}},
    },
}  # fmt: skip


def cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for names in choices():
        if names["norm"] != DEFAULTS["norm"] and names["block"] != DEFAULTS["block"]:
            continue  # a pair is no more than its two files
        changes = {
            field: {"type": name, **SETTINGS.get(field, {}).get(name, {})}
            for field, name in names.items()
        }
        found["-".join(names.values())] = changes
    for name in ROUTERS.names():
        router = {"type": name, **ROUTER_SETTINGS.get(name, {})}
        found[f"router {name}"] = {"feedforward": {**MOE, "router": router}}
    return found | EXTRA


CASES = cases()
# Norms and blocks work on one token at a time, and all alike.
WRITERS = [case for case in CASES if not case.endswith("-rope-swiglu") or case.startswith("bhyt")]
DEPENDS_ON_LENGTH = ("adarope by context", "adarope by a power")

CLEAN = """
import pathlib, torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
folders, out = pathlib.Path(sys.argv[1]), {}
ids, writers = torch.tensor(json.loads(sys.argv[2])), json.loads(sys.argv[3])
noise = torch.linspace(0, 5, ids.numel()).view_as(ids)
load = transformers.AutoModelForCausalLM.from_pretrained
options = {"max_new_tokens": 6, "do_sample": False}
for folder in sorted(folders.iterdir()):
    model, info = load(folder / "model", trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), (folder.name, info)
    with torch.no_grad():
        logits, told = model(ids).logits, model(ids, noise=noise).logits
    out[folder.name] = {"logits": logits, "told": told}
    if folder.name not in writers:
        continue
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out[folder.name] |= {
        "default": model.generate(ids, attention_mask=mask, **options),
        "cached": model.generate(ids, attention_mask=mask, use_cache=True, **options),
        "uncached": model.generate(ids, attention_mask=mask, use_cache=False, **options),
        "alone": model.generate(ids[1:, 5:], **options),
    }
try:
    load(folder / "model", trust_remote_code=False)
    refused = ""
except ValueError as error:
    refused = str(error)
torch.save({"results": out, "refused": refused}, sys.argv[4])
"""


def prompts() -> Tensor:
    return torch.randint(1, 301, (2, 11), generator=torch.Generator().manual_seed(3))


def levels() -> Tensor:
    return torch.linspace(0, 5, 22).view(2, 11)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(our logits and what the clean process found, by case; why it refused to load unasked)."""
    folder = tmp_path_factory.mktemp("components")
    expected = {}
    for number, changes in enumerate(CASES.values()):
        place = folder / "all" / f"{number:03d}"
        trained = save_run(folder / "run", tiny_config(**changes))
        done = export_hugging_face(folder / "run", place / "model", target="custom", check=False)
        assert done.tensors == len(stored_tensors(trained))
        shutil.rmtree(folder / "run")
        with torch.no_grad():
            told = trained.logits(prompts(), SequenceContext(torch.arange(11), noise=levels()))
            expected[place.name] = {"expected": trained.logits(prompts()), "expected_told": told}
    ids, out = json.dumps(prompts().tolist()), folder / "result.pt"
    writers = json.dumps([key for case, key in zip(CASES, expected) if case in WRITERS])
    run_clean(CLEAN, folder, folder / "all", ids, writers, out)
    found = torch.load(out)
    results = {
        case: {**found["results"][key], **expected[key]}
        for case, key in zip(CASES, expected, strict=True)
    }
    return results, found["refused"]


@pytest.mark.parametrize("case", CASES)
def test_the_folder_computes_what_was_trained(
    case: str, exported: tuple[dict[str, Any], str]
) -> None:
    found = exported[0][case]
    wanted = found["expected"]
    assert wanted.std() > 0.05
    assert (found["logits"] - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_it_hears_of_noise_what_was_trained_to(
    case: str, exported: tuple[dict[str, Any], str]
) -> None:
    found = exported[0][case]
    wanted = found["expected_told"]
    assert (found["told"] - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())
    assert wanted.equal(found["expected"]) == ("adaln" not in case)


@pytest.mark.parametrize("case", WRITERS)
def test_it_writes_the_same_text_however_it_is_asked(
    case: str, exported: tuple[dict[str, Any], str]
) -> None:
    """With and without a cache, alone and in a batch with padding on the left."""
    found = exported[0][case]
    text = found["default"]
    assert text.equal(found["uncached"])
    assert text[1, 11:].equal(found["alone"][0, 6:])
    # elsewhere what was computed for a shorter text is something else: by default nothing is cached
    assert case in DEPENDS_ON_LENGTH or found["cached"].equal(text)


def test_without_trust_it_does_not_become_another_model(
    exported: tuple[dict[str, Any], str],
) -> None:
    assert "trust_remote_code=True" in exported[1]
