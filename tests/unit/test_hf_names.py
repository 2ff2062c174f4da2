"""Names, configuration keys and what a Hugging Face class can represent."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from models import hf_names
from models.blocks import BLOCKS
from models.config import ModelConfig
from models.feedforward import FEEDFORWARDS
from models.hf_names import (
    NATIVE_TARGETS,
    from_hf,
    hf_config,
    model_config_from_hf,
    native_target,
    obstacles,
    to_hf,
)
from models.norms import NORMS
from models.positions import POSITIONS, YaRN
from models.transformer import Transformer
from pretrain.decode import decode, encode
from tests.trained import tiny_config

NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True},
    "llama-yarn": {"position": {"type": "yarn", "factor": 3.0, "original_length": 16}},
    "qwen2": {"attention": {"qkv_bias": True}, "init": {"std": 0.05}},
    "qwen3": {"attention": {"qk_norm": True, "head_dim": 16}, "norm": {"type": "rms", "eps": 1e-6}},
}


def exported(config: ModelConfig, target: str) -> dict[str, Any]:
    content = hf_config(config, target, dtype="float32", sequence_length=64, tree=encode(config))
    return json.loads(json.dumps(content))


@pytest.mark.parametrize("case", NATIVE)
def test_native_names_and_shapes_are_those_of_transformers(case: str) -> None:
    """The expected tensors, taken from our model, against the class's own."""
    config = tiny_config(**NATIVE[case], vocab_multiple=1)
    target, reasons = native_target(config)
    assert (target, reasons) == (case.split("-")[0], [])
    content = exported(config, target)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**content)
        )
        ours = Transformer(config)
    wanted = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert {to_hf(name, target, config): shape for name, shape in shapes.items()} == wanted
    assert {from_hf(name, target, config) for name in wanted} == set(shapes)


@pytest.mark.parametrize("target", [*NATIVE_TARGETS, "custom"])
def test_names_go_both_ways(target: str) -> None:
    names = [
        ours.replace("*", layer) for ours, _ in hf_names.NATIVE_NAMES for layer in "0 17".split()
    ]
    config = tiny_config()
    exported = [to_hf(name, target, config) for name in names]
    assert [from_hf(name, target, config) for name in exported] == names
    assert len(set(exported)) == len(set(names))


@pytest.mark.parametrize("name", ["blocks.0.router.weight", "blocks.weight", "mtp.0.head.weight"])
def test_a_tensor_without_a_native_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no name in a llama model"):
        to_hf(name, "llama", tiny_config())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate.weight", "model.rotary.inv_freq"])
def test_a_foreign_tensor_is_an_error(name: str) -> None:
    for target in ("llama", "custom"):
        with pytest.raises(ValueError, match="no tensor that"):
            from_hf(name, target, tiny_config())


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"block": "post"}, "block=post"),
        ({"norm": "layer"}, "norm=layer"),
        ({"position": "partial"}, "position=partial"),
        ({"position": "nope"}, "position=nope"),
        ({"feedforward": {"type": "gelu", "hidden": 40}}, "feedforward=gelu"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"attention": {"qk_norm": True, "qkv_bias": True}}, "would also put one on o_proj"),
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


def test_an_unjudged_config_key_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that somebody adds to ModelConfig must not be dropped in silence."""

    @dataclass(frozen=True)
    class Extended(ModelConfig):
        extra_heads: int = 0

    monkeypatch.setitem(hf_names._JUDGED, Extended, hf_names._JUDGED[ModelConfig])
    plain = decode(Extended, encode(tiny_config()))
    assert native_target(plain) == ("llama", [])
    assert native_target(decode(Extended, {**encode(plain), "extra_heads": 2})) == (
        None,
        ["extra_heads=2 (unknown to llama)"],
    )


@pytest.mark.parametrize("case", NATIVE)
def test_config_round_trip(case: str) -> None:
    config = tiny_config(**NATIVE[case])
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
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
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


COMBINATIONS = list(
    itertools.product(NORMS.names(), BLOCKS.names(), POSITIONS.names(), FEEDFORWARDS.names())
)


def test_the_stored_model_tree_is_complete() -> None:
    """The exported classes decode config.json by themselves, to the same ModelConfig."""
    from models.configuration_midspan import decode_model

    for norm, block, position, feedforward in COMBINATIONS:
        config = tiny_config(
            norm=norm,
            block=block,
            position=position,
            feedforward=feedforward,
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
