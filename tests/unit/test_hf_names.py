"""Names, configuration keys and what a Hugging Face class can represent."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from models.config import ModelConfig
from models.hf_names import (
    hf_config,
    layout,
    model_config_from_hf,
    native_target,
    obstacles,
    stored_as,
)
from models.hf_stored import Stored, restored
from models.positions import YaRN
from pretrain.config import FinishConfig
from pretrain.decode import decode, encode
from pretrain.export import TARGETS
from pretrain.trained import expected_shapes
from tests.components import choices
from tests.hf_cases import DENSE_FIRST, MOE, NATIVE, SIGMOID, target_of
from tests.trained import tiny_config


def exported(config: ModelConfig, target: str) -> dict[str, Any]:
    content = hf_config(config, target, dtype="float32", sequence_length=64, tree=encode(config))
    return json.loads(json.dumps(content))


def written_by_transformers(content: dict[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the files that the class of transformers saves."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{"pad_token_id": None, **content})
    )
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("case", NATIVE)
def test_native_names_and_shapes_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """The expected tensors, taken from our model, against the files that the class itself saves."""
    config = tiny_config(**NATIVE[case], vocab_multiple=1)
    target, reasons = native_target(config)
    assert (target, reasons) == (target_of(case), [])
    wanted = written_by_transformers(exported(config, target), tmp_path)
    shapes = expected_shapes(config, padded=False)
    found = {
        place.name: place.shape(shapes[name])
        for name, places in layout(shapes, target, config).items()
        for place in places
    }
    assert found == wanted


@pytest.mark.parametrize("case", [*NATIVE, "custom"])
def test_every_tensor_has_its_own_place(case: str) -> None:
    config = tiny_config(**NATIVE.get(case, {"mtp": {"depth": 3}, "norm": "derf"}))
    shapes = expected_shapes(config, padded=False)
    places = layout(shapes, target_of(case), config)
    assert places.keys() == shapes.keys()
    stored = [place.name for parts in places.values() for place in parts]
    assert len(set(stored)) == len(stored) >= len(shapes)


@pytest.mark.parametrize("name", ["blocks.0.router.weight", "blocks.weight", "mtp.0.head.weight"])
def test_a_tensor_without_a_native_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no name in a llama model"):
        stored_as(name, "llama", tiny_config())


@pytest.mark.parametrize(
    "place",
    [
        Stored("x"),
        Stored("x", scale=1 / math.sqrt(7)),
        Stored("x", shift=-1.0),
        Stored("x", scale=6.0, shift=-1.0),
    ],
)
def test_what_is_stored_comes_back(place: Stored) -> None:
    for dtype, slack in ((torch.float32, 2e-7), (torch.float64, 1e-15), (torch.bfloat16, 0.02)):
        ours = torch.linspace(0.4, 1.9, 40).to(dtype)
        stored = place.export(ours)
        assert stored.dtype == dtype
        back = restored([place], [stored])
        assert (back - ours).abs().max() <= slack
        assert place.plain == (back.equal(ours) and stored.equal(ours))


def test_slices_are_put_together_again() -> None:
    ours = torch.arange(24.0).view(3, 2, 4)
    places = [Stored(f"{n}", index=n) for n in range(3)]
    assert [place.shape(ours.shape) for place in places] == [(2, 4)] * 3
    parts = [place.export(ours) for place in places]
    assert parts[1].equal(ours[1]) and restored(places, parts).equal(ours)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"block": "post"}, "block=post"),
        ({"norm": "layer"}, "norm=layer"),
        ({"position": "partial"}, "position=partial"),
        ({"position": "alibi"}, "position=alibi"),
        ({"position": {"type": "rnope", "inner": "alibi"}}, "position.inner=alibi"),
        ({"feedforward": {"type": "gelu", "hidden": 40}}, "feedforward=gelu"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"attention": {"qk_norm": True, "qkv_bias": True}}, "qk_norm=True (qwen2: never)"),
        ({"hidden": 34}, "hidden=34 is not a multiple of heads=4"),
        ({"attention": {"qkv_bias": True, "head_dim": 16}}, "head_dim=16 (qwen2 has hidden"),
        (
            {"position": {"type": "yarn", "base": 100.0, "original_length": 10**9}},
            "the YaRN ramp is empty",
        ),
    ],
)  # fmt: skip
def test_what_no_class_computes_exactly_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    target, reasons = native_target(tiny_config(**changes))
    assert target is None
    assert len(reasons) == 1 and reason in reasons[0]


def test_every_reason_is_listed() -> None:
    config = tiny_config(block="post", norm="layer", position="nope", logit_softcap=5.0)
    with pytest.raises(ValueError) as error:
        exported(config, "llama")
    for word in ("block=post", "norm=layer", "position=nope", "logit_softcap=5.0"):
        assert word in str(error.value)
    assert obstacles(config, "custom") == []


def test_an_unjudged_config_key_is_an_obstacle() -> None:
    """A key that somebody adds to ModelConfig must not be dropped in silence."""

    @dataclass(frozen=True)
    class Extended(ModelConfig):
        extra_heads: int = 0

    plain = decode(Extended, encode(tiny_config()))
    assert native_target(plain) == ("llama", [])
    assert native_target(decode(Extended, {**encode(plain), "extra_heads": 2})) == (
        None,
        ["extra_heads=2 (unknown to llama)"],
    )


@pytest.mark.parametrize("case", NATIVE)
def test_config_round_trip(case: str) -> None:
    # which precision the residual stream has is no property of a native class
    config = tiny_config(**{**NATIVE[case], "residual_dtype": "auto"})
    target, _ = native_target(config)
    assert target is not None
    content = exported(config, target)
    assert decode(ModelConfig, model_config_from_hf(content)) == config
    # and after transformers has rewritten it, or with only one way of writing the rotation
    again = transformers.AutoConfig.for_model(**content).to_dict()
    assert decode(ModelConfig, model_config_from_hf(again)) == config
    legacy = {key: value for key, value in content.items() if key != "rope_parameters"}
    assert decode(ModelConfig, model_config_from_hf(legacy)) == config


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}, "rope_type='longrope'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "llama3 without original_max_position_embeddings, high_freq_factor",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 9,
                }
            },
            "llama3: high_freq_factor must exceed low_freq_factor=4.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn without factor"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_a_foreign_model_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    content = {**exported(tiny_config(), "llama"), **changes}
    with pytest.raises(ValueError) as error:
        model_config_from_hf(content)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "case, changes, reason",
    [
        ("olmo2", {"attention_bias": True}, "attention_bias=True"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "no_rope_layers=[0, 1, 1, 1]"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is not head_dim=8"),
        ("gemma2", {"layer_types": None}, "layer_types: not every layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("mixtral", {"sliding_window": 64}, "sliding_window=64"),
        ("qwen3_moe-plain", {"mlp_only_layers": [1]}, "layers without experts: [1]"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("glm4_moe", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        (
            "llama-pi",
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            "linear without factor >= 1",
        ),
        (
            "glm4_moe-partial",
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 with rope_type=linear",
        ),
    ],
)
def test_what_only_the_class_computes_is_refused(
    case: str, changes: dict[str, Any], reason: str
) -> None:
    content = exported(tiny_config(**NATIVE[case]), target_of(case))
    assert model_config_from_hf(content)
    with pytest.raises(ValueError) as error:
        model_config_from_hf({**content, **changes})
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "case, changes, reason",
    [
        ("olmo2", {"attention": {"qk_norm": True}}, "qk_norm_span=head (olmo2: projection)"),
        ("gemma2", {"block": {"type": "peri", "embedding_norm": True}}, "embedding_norm=True"),
        ("mixtral", {"feedforward": {**MOE, **DENSE_FIRST}}, "layers [0] have no experts"),
        ("mixtral", {"feedforward": SIGMOID}, "feedforward.router: Sigmoid.Config (mixtral: topk)"),
        (
            "mixtral",
            {"feedforward": {**MOE, "router": {"type": "topk", "gates": "softmax"}}},
            "router.gates=softmax (mixtral renormalises)",
        ),
        ("qwen3_moe", {"feedforward": {**MOE, "shared_experts": 1}}, "shared_experts=1"),
        ("glm4_moe", {"feedforward": {**SIGMOID, "shared_experts": 0}}, "shared_experts=0"),
        ("glm4_moe", {"feedforward": MOE}, "feedforward.router: TopK.Config (glm4_moe: sigmoid)"),
        (
            "glm4_moe",
            {"feedforward": {**SIGMOID, "shared_hidden": 10}},
            "shared_hidden=10 (glm4_moe: together a multiple of hidden=24)",
        ),
        (
            "glm4_moe",
            {"feedforward": {**SIGMOID, "every": 2, "dense_hidden": 8}},
            "feedforward.every=2",
        ),
        ("glm4_moe", {"position": {"type": "partial", "fraction": 0.45}}, "not an even number"),
        ("glm4_moe", {"position": {"type": "partial", "bands": "fastest"}}, "position.bands"),
    ],
)
def test_what_a_class_cannot_hold_is_an_obstacle(
    case: str, changes: dict[str, Any], reason: str
) -> None:
    target = target_of(case)
    assert obstacles(tiny_config(**NATIVE[case]), target) == []
    found = obstacles(tiny_config(**{**NATIVE[case], **changes}), target)
    assert any(reason in text for text in found), found


@pytest.mark.parametrize(
    "setting",
    [{"attention_factor": 2.0}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"truncate": False}],
)
def test_other_kinds_of_yarn_are_refused(setting: dict[str, Any]) -> None:
    content = exported(tiny_config(**NATIVE["llama-yarn"]), "llama")
    content["rope_parameters"].update(setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        model_config_from_hf(content)


@pytest.mark.parametrize(
    "dim, base, factor, original",
    [(8, 1e4, 3.0, 16), (64, 1e4, 4.0, 2048), (128, 1e6, 40.0, 4096), (128, 1e4, 1.0, 4096)],
)
def test_yarn_is_that_of_transformers(dim: int, base: float, factor: float, original: int) -> None:
    position = YaRN.Config(base=base, factor=factor, original_length=original)
    theirs = transformers.LlamaConfig(
        hidden_size=dim * 4,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=int(original * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": original,
        },
    )
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, magnitude = compute(theirs, "cpu")
    assert math.isclose(position.magnitude(), magnitude, rel_tol=1e-12)
    own = position.frequencies(dim, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(own, frequencies, rtol=2.4e-7, atol=0)


def test_the_stored_model_tree_is_complete() -> None:
    """The exported classes decode config.json by themselves, to the same ModelConfig."""
    from models.configuration_midspan import decode_model

    for names in choices():
        config = tiny_config(
            **names,
            logit_softcap=7.5,
            residual_dtype="float32",
            init={"std": 0.1, "scale_outputs": False},
            vocab_multiple=3,
        )
        content = exported(config, "custom")
        assert decode_model(content["model"]) == config
        assert decode(ModelConfig, model_config_from_hf(content)) == config
    with pytest.raises(ValueError, match="unknown keys"):
        decode_model({"hiden": 3})


def test_sizes_that_contradict_the_model_are_refused() -> None:
    from models.configuration_midspan import MidspanConfig

    with pytest.raises(ValueError, match="hidden_size contradicts"):
        MidspanConfig(model={"hidden": 64}, hidden_size=32)


def test_a_run_may_ask_for_every_target() -> None:
    choices = typing.get_args(typing.get_type_hints(FinishConfig)["export"])
    assert {*choices} == {*TARGETS, "none"} and len(choices) == len(TARGETS) + 1
