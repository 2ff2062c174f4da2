"""Between our models and Hugging Face's: tensor names, config keys, and what is representable.

A *target* is what an exported folder says it is.  ``llama``, ``qwen2``, ``qwen3`` and ``mellum``
are classes of transformers, usable wherever those are known, and hold only models that they
compute exactly.  ``custom`` holds every model, by carrying the model's own code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from .attention import AttentionConfig
from .blocks import BLOCKS
from .config import ModelConfig
from .feedforward import FEEDFORWARDS
from .hf_mtp import (
    MTP_TARGET,
    mellum_keys,
    mellum_names,
    mtp_from_custom,
    mtp_from_mellum,
    mtp_obstacles,
    mtp_to_custom,
)
from .norms import NORMS
from .positions import POSITIONS, YaRN

NATIVE_TARGETS = ("llama", "qwen2", "qwen3", MTP_TARGET)
CUSTOM_TARGET = "custom"
CUSTOM_MODEL_TYPE = "midspan"
CUSTOM_PREFIX = "model.transformer."
AUTO_MAP = {
    "AutoConfig": "configuration_midspan.MidspanConfig",
    "AutoModel": "modeling_midspan.MidspanModel",
    "AutoModelForCausalLM": "modeling_midspan.MidspanForCausalLM",
}

# One row per tensor of a model; * stands for the layer.  Read in both directions.
NATIVE_NAMES = (
    ("embedding.weight", "model.embed_tokens.weight"),
    ("blocks.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    ("blocks.*.attention.q_proj.weight", "model.layers.*.self_attn.q_proj.weight"),
    ("blocks.*.attention.q_proj.bias", "model.layers.*.self_attn.q_proj.bias"),
    ("blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
    ("blocks.*.attention.k_proj.weight", "model.layers.*.self_attn.k_proj.weight"),
    ("blocks.*.attention.k_proj.bias", "model.layers.*.self_attn.k_proj.bias"),
    ("blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
    ("blocks.*.attention.v_proj.weight", "model.layers.*.self_attn.v_proj.weight"),
    ("blocks.*.attention.v_proj.bias", "model.layers.*.self_attn.v_proj.bias"),
    ("blocks.*.attention.o_proj.weight", "model.layers.*.self_attn.o_proj.weight"),
    ("blocks.*.feedforward_norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    ("blocks.*.feedforward.gate_proj.weight", "model.layers.*.mlp.gate_proj.weight"),
    ("blocks.*.feedforward.up_proj.weight", "model.layers.*.mlp.up_proj.weight"),
    ("blocks.*.feedforward.down_proj.weight", "model.layers.*.mlp.down_proj.weight"),
    ("final_norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
)
_TO_HF = dict(NATIVE_NAMES)
_FROM_HF = {theirs: ours for ours, theirs in NATIVE_NAMES}
_LAYER = re.compile(r"\.(\d+)\.")

_MELLUM_NAMES = mellum_names(NATIVE_NAMES)


def _translate(table: Mapping[str, str], name: str) -> str | None:
    layer = _LAYER.search(name)
    if layer is None:
        return table.get(name)
    found = table.get(_LAYER.sub(".*.", name, count=1))
    return None if found is None else found.replace("*", layer[1], 1)


def to_hf(name: str, target: str, config: ModelConfig) -> str:
    """The name in the exported files of parameter ``name`` of a ``config`` model; ``ValueError`` if
    it has none."""
    if target == CUSTOM_TARGET:
        if name == "head.weight":
            return "lm_head.weight"
        return mtp_to_custom(name, config) or CUSTOM_PREFIX + name
    found = _MELLUM_NAMES.get(name) if target == MTP_TARGET else None
    found = found or _translate(_TO_HF, name)
    if found is None:
        raise ValueError(f"{name} has no name in a {target} model")
    return found


def from_hf(name: str, target: str, config: ModelConfig) -> str:
    """Our name of the exported tensor ``name``; ``ValueError`` if we have none."""
    found: str | None
    if target == MTP_TARGET and name in _MELLUM_NAMES.values():
        found = next(ours for ours, theirs in _MELLUM_NAMES.items() if theirs == name)
    elif target != CUSTOM_TARGET:
        found = _translate(_FROM_HF, name)
    elif name == "lm_head.weight":
        found = "head.weight"
    elif name.startswith(CUSTOM_PREFIX):
        found = name.removeprefix(CUSTOM_PREFIX)
    else:
        found = mtp_from_custom(name, config)
    if found is None:
        raise ValueError(f"{name} is no tensor that a {target} model of ours has")
    return found


# ------------------------------------------------------------------- what is representable

# Config keys that the native targets express, are judged below, or do not change the function.
_JUDGED = {
    ModelConfig: {
        "vocab_size", "hidden", "layers", "attention", "feedforward", "block", "norm", "position",
        "tie_embeddings", "vocab_multiple", "logit_softcap", "residual_dtype", "init", "mtp",
    },
    AttentionConfig: {"heads", "kv_heads", "head_dim", "qk_norm", "qkv_bias"},
}  # fmt: skip
_SAME = {
    "block": (BLOCKS, ("pre",)),
    "norm": (NORMS, ("rms",)),
    "feedforward": (FEEDFORWARDS, ("swiglu",)),
    "position": (POSITIONS, ("rope", "yarn")),
}


def obstacles(config: ModelConfig, target: str) -> list[str]:
    """Why ``target`` cannot represent ``config`` exactly, one reason per item; empty if it can.

    A config key that nobody has judged yet is a reason unless it has its default value.
    """
    if target == CUSTOM_TARGET:
        return []
    found = []
    for key, (registry, allowed) in _SAME.items():
        name = registry.name_of(type(getattr(config, key)))
        if name not in allowed:
            found.append(f"{key}={name} ({target} has {' or '.join(allowed)})")
    if config.logit_softcap is not None:
        found.append(f"logit_softcap={config.logit_softcap} ({target} has none)")
    found += mtp_obstacles(config.mtp, target)
    if isinstance(config.position, YaRN.Config):
        found += _yarn_obstacles(config)
    attention = config.attention
    normalises = target in ("qwen3", MTP_TARGET)
    if attention.qk_norm != normalises:
        always = "always" if normalises else "never"
        found.append(f"attention.qk_norm={attention.qk_norm} ({target}: {always})")
    if attention.qkv_bias != (target == "qwen2"):
        why = "always" if target == "qwen2" else "would also put one on o_proj"
        found.append(f"attention.qkv_bias={attention.qkv_bias} ({target}: {why})")
    if not normalises and config.hidden % attention.heads:
        found.append(f"hidden={config.hidden} is not a multiple of heads={attention.heads}")
    elif target == "qwen2" and attention.head_dim != config.hidden // attention.heads:
        found.append(f"attention.head_dim={attention.head_dim} (qwen2 has hidden / heads)")
    for part, label in ((config, ""), (attention, "attention.")):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in _JUDGED[type(part)] and value != field.default:
                found.append(f"{label}{field.name}={value!r} (unknown to {target})")
    return found


def _yarn_obstacles(config: ModelConfig) -> list[str]:
    low, high = config.position.ramp(config.attention.head_dim)
    if low <= high:
        return []
    return [
        f"position: the YaRN ramp is empty (ends {low} and {high}), which is computed otherwise"
    ]


def native_target(config: ModelConfig) -> tuple[str | None, list[str]]:
    """(the native target that represents ``config`` exactly, []) or (None, the reasons).

    ``mellum`` is only taken when asked for: few tools know it.
    """
    attention = config.attention
    target = "qwen3" if attention.qk_norm else "qwen2" if attention.qkv_bias else "llama"
    reasons = obstacles(config, target)
    return (None, reasons) if reasons else (target, [])


# ------------------------------------------------------------------------------ config files


def _rope_parameters(position: Any) -> dict[str, Any]:
    if not isinstance(position, YaRN.Config):
        return {"rope_type": "default", "rope_theta": position.base}
    return {
        "rope_type": "yarn",
        "rope_theta": position.base,
        "factor": position.factor,
        "original_max_position_embeddings": position.original_length,
        "beta_fast": position.beta_fast,
        "beta_slow": position.beta_slow,
        "attention_factor": position.magnitude(),
        "truncate": True,
    }


def hf_config(
    config: ModelConfig,
    target: str,
    *,
    dtype: str,
    sequence_length: int,
    tree: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of config.json, without token ids.

    Args:
        dtype: of the stored tensors, "float32" for example.
        sequence_length: tokens per sequence in training.
        tree: ``config`` as plain dicts; the custom target stores it.

    Raises:
        ValueError: ``target`` cannot represent ``config``; the text lists the reasons.
    """
    reasons = obstacles(config, target)
    if reasons:
        raise ValueError(f"{target} cannot represent this model exactly: {'; '.join(reasons)}")
    common = {"dtype": dtype, "use_cache": True, "max_position_embeddings": sequence_length}
    if target == CUSTOM_TARGET:
        assert tree is not None
        return {
            "architectures": ["MidspanForCausalLM"],
            "model_type": CUSTOM_MODEL_TYPE,
            "auto_map": AUTO_MAP,
            "model": dict(tree),
            **common,
            **standard_keys(config),
        }
    rope = _rope_parameters(config.position)
    native: dict[str, Any] = {
        "architectures": [f"{target.capitalize()}ForCausalLM"],
        "model_type": target,
        **common,
        **standard_keys(config),
        "intermediate_size": config.feedforward.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "initializer_range": config.init.std,
        "attention_dropout": 0.0,
        # readers from before transformers 5 know only the second and third form (_OLD_ROPE)
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
    }
    if target == "llama":
        native.update(attention_bias=False, mlp_bias=False, pretraining_tp=1)
    elif target == "qwen3":
        native.update(attention_bias=False, use_sliding_window=False, sliding_window=None)
    elif target == MTP_TARGET:
        native = {key: value for key, value in native.items() if key not in _OLD_ROPE}
        native.update(mellum_keys(config, rope))
    else:
        native.update(use_sliding_window=False, sliding_window=None)
    return native


_OLD_ROPE = ("rope_theta", "rope_scaling")


def standard_keys(config: ModelConfig) -> dict[str, Any]:
    """The sizes that Hugging Face tools look for, under the keys that they look for."""
    mtp = {"num_nextn_predict_layers": config.mtp.depth} if config.mtp.depth else {}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "tie_word_embeddings": config.tie_embeddings,
        **mtp,
    }


def target_of(hf: Mapping[str, Any]) -> str:
    """The target that the config.json ``hf`` belongs to; ``ValueError`` if it is none of ours."""
    kind = hf.get("model_type")
    if kind == CUSTOM_MODEL_TYPE:
        return CUSTOM_TARGET
    if kind not in NATIVE_TARGETS:
        allowed = ", ".join((*NATIVE_TARGETS, CUSTOM_MODEL_TYPE))
        raise ValueError(f"model_type {kind!r} is not supported: allowed are {allowed}")
    return str(kind)


def model_config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelConfig, as plain dicts, of the model that the config.json ``hf`` describes.

    Raises:
        ValueError: it is no model of ours; the text lists every reason.
    """
    target = target_of(hf)
    if target == CUSTOM_TARGET:
        return dict(hf["model"])
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads")  # fmt: skip
    missing = [key for key in required if not isinstance(hf.get(key), int)]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    problems = _foreign_settings(hf, target)
    normalises = target in ("qwen3", MTP_TARGET)
    mtp, wrong = mtp_from_mellum(hf) if target == MTP_TARGET else ({}, [])
    problems += wrong
    position, wrong = _position_from_hf(hf)
    problems += wrong
    if problems:
        raise ValueError(f"this {target} model is not one of ours: {'; '.join(problems)}")
    heads = hf["num_attention_heads"]
    default_dim = 128 if normalises else hf["hidden_size"] // heads
    return {
        "vocab_size": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "layers": hf["num_hidden_layers"],
        "attention": {
            "heads": heads,
            "kv_heads": hf.get("num_key_value_heads") or heads,
            "head_dim": hf.get("head_dim") or default_dim,
            "qk_norm": normalises,
            "qkv_bias": target == "qwen2",
        },
        "feedforward": {"type": "swiglu", "hidden": hf["intermediate_size"]},
        "block": {"type": "pre"},
        "norm": {"type": "rms", "eps": hf.get("rms_norm_eps", 1e-6)},
        "position": position,
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "init": {"std": hf.get("initializer_range", 0.02)},
        **({"mtp": mtp} if mtp else {}),
    }


def _foreign_settings(hf: Mapping[str, Any], target: str) -> list[str]:
    wanted = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
    if target != "qwen2":
        wanted["attention_bias"] = False
    problems = [
        f"{key}={hf[key]!r}" for key, value in wanted.items() if hf.get(key, value) != value
    ]
    if hf.get("quantization_config"):
        problems.append("quantization_config is set (quantised weights)")
    return problems


def _position_from_hf(hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    fraction = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    problems = [] if fraction == 1 else [f"partial_rotary_factor={fraction}"]
    if kind == "default":
        return {"type": "rope", "base": float(base)}, problems
    if kind != "yarn":
        return {}, [*problems, f"rope_type={kind!r}"]
    position: dict[str, Any] = {
        "type": "yarn",
        "base": float(base),
        "factor": float(rope.get("factor") or 0.0),
        "original_length": rope.get("original_max_position_embeddings"),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
    }
    if position["factor"] < 1 or not position["original_length"]:
        problems.append("yarn without factor >= 1 and original_max_position_embeddings")
        return position, problems
    arguments = {key: value for key, value in position.items() if key != "type"}
    own = YaRN.Config(**arguments).magnitude()
    if abs((rope.get("attention_factor") or own) - own) > 1e-6:
        problems.append(f"attention_factor={rope['attention_factor']} (ours is {own:.6f})")
    problems += [f"{key}={rope[key]}" for key in ("mscale", "mscale_all_dim") if rope.get(key)]
    if rope.get("truncate") is False:
        problems.append("truncate=False")
    return position, problems
