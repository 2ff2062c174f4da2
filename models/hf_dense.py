"""Classes of transformers without experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from .config import ModelConfig
from .hf_native import ATTENTION, GATED, OUTSIDE, Names, Native, component
from .hf_rotary import ROTATIONS, Tree, rope_parameters, rotation_obstacles
from .positions import RNoPE, RoPE


class Llama(Native):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    written: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    }


class Qwen2(Native):
    """Llama with biases of q, k and v."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    qkv_bias = True
    demands: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in Native.demands.items() if key != "attention_bias"
    }
    written: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False, "sliding_window": None}

    def attention_obstacles(self, config: ModelConfig) -> list[str]:
        found, attention = super().attention_obstacles(config), config.attention
        whole = config.hidden % attention.heads == 0
        if whole and attention.head_dim != config.hidden // attention.heads:
            found.append(f"attention.head_dim={attention.head_dim} (qwen2 has hidden / heads)")
        return found


class Qwen3(Native):
    """Llama with QK-norm."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = ("head",)
    whole_heads = False
    written: ClassVar[Mapping[str, Any]] = {"attention_bias": False, **Qwen2.written}

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return 128


class Olmo2(Native):
    """Norms behind the layers, and QK-norm over all heads at once."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    blocks = ("reordered",)
    qk_norm = ("projection",)
    default_eps = 1e-5
    table: ClassVar[Names] = {
        **OUTSIDE,
        **ATTENTION,
        "blocks.*.attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "blocks.*.feedforward_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
        **GATED,
    }
    written: ClassVar[Mapping[str, Any]] = {"attention_bias": False}


class SmolLM3(Native):
    """Llama in which some layers, or all, have no rotation."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    positions = ("rnope", "nope")
    default_base = 2000000.0
    tied = True
    written: ClassVar[Mapping[str, Any]] = {**Llama.written, **Qwen2.written}

    def position_obstacles(self, config: ModelConfig) -> list[str]:
        if not isinstance(config.position, RNoPE.Config):
            return []
        inner = config.position.inner
        if component(inner) not in ROTATIONS:
            allowed = " or ".join(ROTATIONS)
            return [f"position.inner={component(inner)} ({self.model_type} has {allowed})"]
        return rotation_obstacles(inner, config.attention.head_dim)

    def rotation(self, config: ModelConfig) -> Tree:
        inner = getattr(config.position, "inner", RoPE.Config())
        return rope_parameters(inner, config.attention.head_dim)

    def keys(self, config: ModelConfig) -> Tree:
        every = getattr(config.position, "every", 1)
        rotated = [int((layer + 1) % every > 0) for layer in range(config.layers)]
        return {**super().keys(config), "no_rope_layers": rotated, "no_rope_layer_interval": every}

    def read_position(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        found, problems = super().read_position(hf)
        layers, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval", 4)
        rotated = hf.get("no_rope_layers") or [int((n + 1) % every > 0) for n in range(layers)]
        if 0 not in rotated:
            return found, problems
        every = rotated.index(0) + 1
        if [bool((n + 1) % every) for n in range(layers)] != [bool(x) for x in rotated]:
            problems.append(f"no_rope_layers={rotated} (ours: each n-th one is 0)")
        if every == 1:
            return {"position": {"type": "nope"}}, problems
        return {"position": {"type": "rnope", "inner": found["position"], "every": every}}, problems


class Gemma2(Native):
    """Norms before and behind the layers, whose gains are stored minus one, GeGLU, and embeddings
    that are multiplied by √hidden.

    The factor is taken out of the stored embedding; where the head reads it too, out of the last
    norm's gain as well.
    """

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    blocks = ("peri",)
    feedforwards = ("geglu",)
    softcap = True
    tied = True
    table: ClassVar[Names] = {
        **OUTSIDE,
        **ATTENTION,
        "blocks.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
        "blocks.*.attention_output_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "blocks.*.feedforward_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
        "blocks.*.feedforward_output_norm.weight": (
            "model.layers.*.post_feedforward_layernorm.weight"
        ),
        **GATED,
    }
    demands: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }

    def fold(self, part: str, layer: int, config: ModelConfig) -> tuple[float, float]:
        root = math.sqrt(config.hidden)
        if part == "embedding.weight":
            return 1 / root, 0.0
        if part == "final_norm.weight":
            return root if config.tie_embeddings else 1.0, -1.0
        return 1.0, -1.0 if "_norm." in part else 0.0

    def keys(self, config: ModelConfig) -> Tree:
        return {
            **super().keys(config),
            "attention_bias": False,
            "query_pre_attn_scalar": config.attention.head_dim,
            "layer_types": ["full_attention"] * config.layers,
            "final_logit_softcapping": config.logit_softcap,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }

    def feedforward_keys(self, config: ModelConfig) -> Tree:
        act = "gelu_pytorch_tanh"
        hidden = config.feedforward.hidden
        return {"intermediate_size": hidden, "hidden_act": act, "hidden_activation": act}

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return 256

    def read_others(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        problems = [
            f"{key}={value}"
            for key, default in self.without.items()
            if (value := hf.get(key, default))
        ]
        if set(hf.get("layer_types") or ["sliding_attention"]) != {"full_attention"}:
            problems.append("layer_types: not every layer attends to everything")
        head_dim = hf.get("head_dim") or self.head_dim(hf)
        if hf.get("query_pre_attn_scalar", 256) != head_dim:
            problems.append(f"query_pre_attn_scalar is not head_dim={head_dim}")
        return {"logit_softcap": hf.get("final_logit_softcapping", self.cap)}, problems

    cap: ClassVar[float | None] = 30.0
    without: ClassVar[Mapping[str, Any]] = {
        "attn_logit_softcapping": 50.0,
        "use_bidirectional_attention": None,
    }


class Gemma3(Gemma2):
    """Gemma 2 with QK-norm, of text alone."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    qk_norm = ("head",)
    default_base = 1e6
    cap = None
    without: ClassVar[Mapping[str, Any]] = dict.fromkeys(Gemma2.without)
