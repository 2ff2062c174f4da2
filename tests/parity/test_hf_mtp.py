"""Multi-token prediction leaves and comes back: every depth's logits, and every bit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attention import SequenceContext
from models.hf_custom import MTP_PARTS
from models.hf_names import hf_config, model_config_from_hf
from models.transformer import Transformer
from pretrain.export import ExportError, export_hugging_face
from pretrain.import_hf import import_hugging_face
from pretrain.trained import TrainedModelError, open_trained
from pretrain.verify_hf import VerificationError, compute_reference, verify
from tests.parity.test_hf import all_tensors, edit_weights, load, model_tensors
from tests.trained import save_run, tiny_config

pytestmark = pytest.mark.parity

QK_NORM = {"attention": {"qk_norm": True, "head_dim": 16}}
CUSTOM: dict[str, dict[str, Any]] = {
    "sequential": {"mtp": {"depth": 2}},
    "conventions": {
        "mtp": {"depth": 2, "embedding": "own", "input": "norm", "concat": "hidden_first"},
        "tie_embeddings": True,
    },
    "parallel": {"mtp": {"depth": 3, "kind": "parallel"}, "norm": "layer", **QK_NORM},
    "repeated": {"mtp": {"depth": 3, "kind": "repeated"}, "logit_softcap": 5.0},
    "post": {"mtp": {"depth": 1}, "block": "post", "feedforward": {"type": "gelu", "hidden": 40}},
}
MELLUM: dict[str, dict[str, Any]] = {
    "mellum": {"mtp": {"depth": 1, "input": "norm"}, **QK_NORM},
    "mellum-tied-hidden-first": {
        "mtp": {"depth": 1, "input": "norm", "concat": "hidden_first"},
        "position": {"type": "yarn", "factor": 3.0, "original_length": 16},
        "tie_embeddings": True,
        "layers": 3,
        **QK_NORM,
    },
}


def target_of(case: str) -> str:
    return "mellum" if case in MELLUM else "custom"


def depth_logits(model: Transformer, ids: Tensor) -> list[Tensor]:
    assert model.head is not None
    outputs = model.depth_outputs(ids, SequenceContext(torch.arange(ids.shape[1])))
    return [model.head.logits(hidden) for hidden in outputs]


def ids() -> Tensor:
    return torch.randint(301, (2, 20), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("case", CUSTOM)
def test_the_custom_class_predicts_at_every_depth(case: str, tmp_path: Path) -> None:
    trained = save_run(tmp_path / "run", tiny_config(**CUSTOM[case]))
    done = export_hugging_face(tmp_path / "run", tmp_path / "model")
    assert done.target == "custom" and "mtp.depth=" in done.notes[0]
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    model = load(tmp_path / "model")
    with torch.no_grad():
        found, wanted = model.depth_logits(ids()), depth_logits(trained, ids())
        assert (model(ids()).logits - wanted[0]).abs().max() <= 1e-5
    assert len(found) == len(wanted) == trained.config.mtp.depth + 1
    for ours, theirs in zip(wanted, found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 < 0.3 < ours.std()
    assert model.config.num_nextn_predict_layers == trained.config.mtp.depth
    again = tmp_path / "again"
    model.save_pretrained(again)
    assert all_tensors(again).keys() == all_tensors(tmp_path / "model").keys()
    with torch.no_grad():
        assert load(again).depth_logits(ids())[-1].equal(found[-1])
    moved = model.to(torch.float64)  # every part of a block goes along
    with torch.no_grad():
        assert moved.depth_logits(ids())[-1].dtype == torch.float64


def test_names_are_those_of_deepseek(tmp_path: Path) -> None:
    """The layers behind the last one; what the shared tensors are not stored for."""
    save_run(tmp_path / "run", tiny_config(**CUSTOM["sequential"]))
    export_hugging_face(tmp_path / "run", tmp_path / "model", check=False)
    stored = [name for name in all_tensors(tmp_path / "model") if "transformer" not in name]
    parts = """enorm hnorm eh_proj input_layernorm self_attn.q_proj self_attn.k_proj
    self_attn.v_proj self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj
    mlp.down_proj shared_head.norm""".split()
    layers = [f"model.layers.{layer}.{part}.weight" for layer in (2, 3) for part in parts]
    assert sorted(stored) == sorted([*layers, "lm_head.weight"])
    assert len(set(MTP_PARTS.values())) == len(MTP_PARTS)


@pytest.mark.parametrize("case", [*CUSTOM, *MELLUM])
def test_ours_to_hugging_face_to_ours_is_bitwise(case: str, tmp_path: Path) -> None:
    changes = (CUSTOM | MELLUM)[case]
    save_run(tmp_path / "run", tiny_config(**changes, vocab_multiple=50))
    export_hugging_face(
        tmp_path / "run", tmp_path / "model", target=target_of(case), max_shard_bytes=30_000,
        check=False,
    )  # fmt: skip
    import_hugging_face(tmp_path / "model", tmp_path / "back", vocab_multiple=50)
    before, after = model_tensors(tmp_path / "run"), model_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert any(name.startswith("model/mtp.1.") for name in before)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert open_trained(tmp_path / "run").config == open_trained(tmp_path / "back").config


@pytest.mark.parametrize("case", MELLUM)
def test_transformers_drafts_tokens_with_the_native_block(case: str, tmp_path: Path) -> None:
    """Its own code gives our depth-1 logits, and speculative decoding the same text."""
    save_run(tmp_path / "run", tiny_config(**MELLUM[case]))
    done = export_hugging_face(tmp_path / "run", tmp_path / "model", target="mellum")
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    model = load(tmp_path / "model")
    assert type(model).__module__.startswith("transformers.models.mellum")
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(ids()[:1, :5], **options)
    assert model.generate(ids()[:1, :5], use_mtp=True, **options).equal(plain)
    assert len(set(plain[0].tolist())) > 5


def test_a_native_folder_as_transformers_writes_it(tmp_path: Path) -> None:
    """It rewrites config.json, and saves the next-token model alone."""
    config = tiny_config(**MELLUM["mellum-tied-hidden-first"])
    save_run(tmp_path / "run", config)
    export_hugging_face(tmp_path / "run", tmp_path / "model", target="mellum", check=False)
    load(tmp_path / "model").save_pretrained(tmp_path / "theirs")
    with pytest.raises(TrainedModelError, match=r"missing \(15\): mtp.1.block.attention.k_norm"):
        open_trained(tmp_path / "theirs")
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "theirs")
    import_hugging_face(tmp_path / "theirs", tmp_path / "back")
    assert open_trained(tmp_path / "back").config == config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        ({"mtp_mlp_layer_types": ["sparse"]}, "mtp_mlp_layer_types=['sparse'] (ours: dense)"),
        ({"mlp_layer_types": None}, "mlp_layer_types=None"),
    ],
)
def test_other_kinds_of_layers_are_refused(changes: dict[str, Any], reason: str) -> None:
    config = tiny_config(**MELLUM["mellum"])
    content = hf_config(config, "mellum", dtype="float32", sequence_length=64)
    assert model_config_from_hf(content)["mtp"]["depth"] == 1
    plain = {key: value for key, value in content.items() if "nextn" not in key}
    assert "mtp" not in model_config_from_hf(plain)
    with pytest.raises(ValueError) as error:
        model_config_from_hf({**content, **changes})
    assert reason in str(error.value)


MISSING = {
    "sequential": r"only in part: .*missing_keys.*eh_proj",
    "mellum": r"transformers cannot load the MTP block: .*missing",
}


@pytest.mark.parametrize("case", MISSING)
def test_a_wrong_block_is_caught(case: str, tmp_path: Path) -> None:
    config = tiny_config(**(CUSTOM | MELLUM)[case])
    save_run(tmp_path / "run", config)
    target = target_of(case)
    export_hugging_face(tmp_path / "run", tmp_path / "model", target=target, check=False)
    reference = compute_reference(open_trained(tmp_path / "run"))
    verify(tmp_path / "model", target, reference)
    projection = "mtp.fc.weight" if case == "mellum" else "model.layers.3.eh_proj.weight"
    edit_weights(tmp_path / "model", lambda t: t.update({projection: t[projection].roll(32, 1)}))
    where = "the MTP block or the head" if case == "mellum" else "mtp.2.projection"
    with pytest.raises(VerificationError, match=f"differs is that of {where}, by"):
        verify(tmp_path / "model", target, reference)
    edit_weights(tmp_path / "model", lambda t: t.pop(projection))
    with pytest.raises(VerificationError, match=MISSING[case]):
        verify(tmp_path / "model", target, reference)


@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        ("llama", {"mtp": {"depth": 2}}, "mtp.depth=2 (llama has none)"),
        ("mellum", QK_NORM, "mtp.depth=0 (mellum: 1)"),
        ("mellum", {"mtp": {"depth": 1}, **QK_NORM}, "mtp.input=block (mellum: norm)"),
        (
            "mellum",
            {"mtp": {"depth": 2, "input": "norm", "embedding": "own"}, **QK_NORM},
            "mtp.depth=2 (mellum: 1); mtp.embedding=own (mellum: shared)",
        ),
        ("mellum", {"mtp": {"depth": 1, "input": "norm"}}, "attention.qk_norm=False"),
    ],
)
def test_nothing_is_dropped_in_silence(
    target: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_run(tmp_path / "run", tiny_config(**changes))
    with pytest.raises(ExportError) as error:
        export_hugging_face(tmp_path / "run", tmp_path / "out", target=target)
    assert reason in str(error.value)
    assert ("--drop-mtp" in str(error.value)) == ("mtp" in changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["sequential", "mellum", "post"])
def test_the_next_token_model_alone_when_asked_for(case: str, tmp_path: Path) -> None:
    config = tiny_config(**(CUSTOM | MELLUM)[case])
    trained = save_run(tmp_path / "run", config)
    done = export_hugging_face(tmp_path / "run", tmp_path / "model", drop_mtp=True)
    wanted = {"sequential": "llama", "mellum": "qwen3", "post": "custom"}[case]
    assert done.target == wanted
    assert done.verification is not None and done.verification.largest_difference <= 1e-5
    plain = dataclasses.replace(config, mtp=type(config.mtp)())
    assert done.tensors == len(list(Transformer(plain).parameters()))
    assert not [name for name in all_tensors(tmp_path / "model") if "mtp" in name]
    with torch.no_grad():
        difference = load(tmp_path / "model")(ids()).logits - trained.logits(ids())
    assert difference.abs().max() <= 1e-5
    save_run(tmp_path / "plain", plain)
    with pytest.raises(ExportError, match="has no multi-token prediction"):
        export_hugging_face(tmp_path / "plain", tmp_path / "out", drop_mtp=True)


def test_a_foreign_tensor_of_a_block_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_config(**CUSTOM["sequential"]))
    export_hugging_face(tmp_path / "run", tmp_path / "model", check=False)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.9.enorm.weight"] = tensors["model.layers.2.enorm.weight"].clone()
    save_file(tensors, file)
    with pytest.raises(
        TrainedModelError, match=r"not in the model \(1\): model.layers.9.enorm.weight"
    ):
        open_trained(tmp_path / "model")
