"""A class of transformers that computes some of our models exactly: what it holds, and how.

One subclass of :class:`Native` per class of transformers; the attributes say what it holds, the
table how its tensors are called, and three methods what config.json says.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from .attention import AttentionConfig
from .blocks import BLOCKS
from .config import ModelConfig
from .feedforward import FEEDFORWARDS
from .hf_custom import standard_keys
from .hf_rotary import ROTATIONS, Tree, rope_parameters, rotation_from_hf, rotation_obstacles
from .hf_stored import Stored
from .norms import NORMS
from .positions import POSITIONS

Names = Mapping[str, str]

# One row per tensor of a model; * stands for the layer.  Read in both directions.
OUTSIDE: Names = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
ATTENTION: Names = {
    "blocks.*.attention.q_proj.weight": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.attention.q_proj.bias": "model.layers.*.self_attn.q_proj.bias",
    "blocks.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "blocks.*.attention.k_proj.weight": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.attention.k_proj.bias": "model.layers.*.self_attn.k_proj.bias",
    "blocks.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "blocks.*.attention.v_proj.weight": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.attention.v_proj.bias": "model.layers.*.self_attn.v_proj.bias",
    "blocks.*.attention.o_proj.weight": "model.layers.*.self_attn.o_proj.weight",
}
GATED: Names = {
    "blocks.*.feedforward.gate_proj.weight": "model.layers.*.mlp.gate_proj.weight",
    "blocks.*.feedforward.up_proj.weight": "model.layers.*.mlp.up_proj.weight",
    "blocks.*.feedforward.down_proj.weight": "model.layers.*.mlp.down_proj.weight",
}
PRE: Names = {
    "blocks.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "blocks.*.feedforward_norm.weight": "model.layers.*.post_attention_layernorm.weight",
}
TRAINING_ONLY = (".router.activity",)
"""Ends of the names of state that no output depends on."""
_LAYER = re.compile(r"\.(\d+)\.")

# Keys of the configuration that are judged below or by a class, or do not change the function.
JUDGED: dict[Any, set[str]] = {
    ModelConfig: {
        "vocab_size", "hidden", "layers", "attention", "feedforward", "block", "norm", "position",
        "tie_embeddings", "mask_token", "vocab_multiple", "logit_softcap", "residual_dtype", "init",
        "mtp",
    },
    AttentionConfig: {"heads", "kv_heads", "head_dim", "qk_norm", "qk_norm_span", "qkv_bias"},
    "rms": {"eps", "gain"},
    "swiglu": {"hidden"},
    "geglu": {"hidden"},
    "rope": {"base"},
    "pi": {"base", "factor"},
    "ntk": {"base", "factor"},
    "rnope": {"inner", "every"},
    "partial": {"base", "fraction"},
    "yarn": {"base", "factor", "original_length", "beta_fast", "beta_slow"},
    "llama3": {"base", "factor", "original_length", "low_freq_factor", "high_freq_factor"},
    "moe": {
        "experts", "hidden", "router", "balance", "shared_experts", "shared_hidden", "first_dense",
        "every", "dense_hidden",
    },
}  # fmt: skip


class Native:
    """Base of the classes of transformers; by itself what most of them have in common.

    automatic: whether it may be taken without being asked for.  qk_norm: what q and k must be
    normalised over, of "", "head", "projection".  qkv_bias: whether q, k and v have one; None:
    either.  demands: keys of config.json that must have this value where they are present.
    written: keys that are always written.  heads_fill: head_dim is hidden / heads.
    wide: ends of the names of what is kept in float32 whatever the dtype of the rest.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    automatic: ClassVar[bool] = True
    table: ClassVar[Names] = {**OUTSIDE, **ATTENTION, **PRE, **GATED}
    blocks: ClassVar[tuple[str, ...]] = ("pre", "lns")
    feedforwards: ClassVar[tuple[str, ...]] = ("swiglu",)
    positions: ClassVar[tuple[str, ...]] = ROTATIONS
    qk_norm: ClassVar[tuple[str, ...]] = ("",)
    qkv_bias: ClassVar[bool | None] = False
    softcap: ClassVar[bool] = False
    whole_heads: ClassVar[bool] = True
    default_base: ClassVar[float] = 10000.0
    default_eps: ClassVar[float] = 1e-6
    tied: ClassVar[bool] = False
    old_rope: ClassVar[bool] = True
    demands: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "mlp_bias": False,
        "use_sliding_window": False,
        "attention_bias": False,
    }
    written: ClassVar[Mapping[str, Any]] = {}
    wide: ClassVar[tuple[str, ...]] = ()

    # ------------------------------------------------------------------------- what it holds

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Why it does not compute ``config`` exactly, one reason per item; empty if it does.

        A key of the configuration that nobody has judged yet is a reason unless it has its default
        value.
        """
        found = self._component_obstacles(config)
        if config.logit_softcap is not None and not self.softcap:
            found.append(f"logit_softcap={config.logit_softcap} ({self.model_type} has none)")
        if config.mask_token:
            found.append(f"mask_token=true ({self.model_type} would predict it)")
        found += self.mtp_obstacles(config)
        found += self.position_obstacles(config)
        found += self.attention_obstacles(config)
        if component(config.feedforward) in self.feedforwards:
            found += self.feedforward_obstacles(config)
        return found + self._unjudged(config)

    def _components(self) -> dict[str, tuple[str, ...]]:
        """What it has of each kind of component; the first one may be shown to a person."""
        return {
            "block": self.blocks,
            "norm": ("rms",),
            "feedforward": self.feedforwards,
            "position": self.positions,
        }

    def misfits(self, config: ModelConfig) -> int:
        """Number of components that it has none of."""
        return len(self._component_obstacles(config))

    def _component_obstacles(self, config: ModelConfig) -> list[str]:
        found = []
        for key, names in self._components().items():
            name = component(getattr(config, key))
            if name not in names:
                found.append(f"{key}={name} ({self.model_type} has {' or '.join(names)})")
        return found

    def _unjudged(self, config: ModelConfig) -> list[str]:
        parts: list[tuple[str, Any, set[str]]] = [
            ("", config, JUDGED[ModelConfig]),
            ("attention.", config.attention, JUDGED[AttentionConfig]),
        ]
        for key, names in self._components().items():
            part = getattr(config, key)
            if component(part) in names:
                parts.append((f"{key}.", part, JUDGED.get(component(part), set())))
        return [text for part in parts for text in unjudged(*part, self.model_type)]

    def mtp_obstacles(self, config: ModelConfig) -> list[str]:
        depth = config.mtp.depth
        return [f"mtp.depth={depth} ({self.model_type} has none)"] if depth else []

    def attention_obstacles(self, config: ModelConfig) -> list[str]:
        attention, name = config.attention, self.model_type
        found = []
        span = attention.qk_norm_span if attention.qk_norm else ""
        if span not in self.qk_norm:
            if attention.qk_norm and any(self.qk_norm):
                allowed = " or ".join(filter(None, self.qk_norm))
                found.append(f"attention.qk_norm_span={span} ({name}: {allowed})")
            else:
                always = "always" if any(self.qk_norm) else "never"
                found.append(f"attention.qk_norm={attention.qk_norm} ({name}: {always})")
        if self.qkv_bias is not None and attention.qkv_bias != self.qkv_bias:
            why = "always" if self.qkv_bias else "would also put one on o_proj"
            found.append(f"attention.qkv_bias={attention.qkv_bias} ({name}: {why})")
        if self.whole_heads and config.hidden % attention.heads:
            found.append(f"hidden={config.hidden} is not a multiple of heads={attention.heads}")
        return found

    def position_obstacles(self, config: ModelConfig) -> list[str]:
        return rotation_obstacles(config.position, config.attention.head_dim)

    def feedforward_obstacles(self, config: ModelConfig) -> list[str]:
        """What it cannot hold of a feed-forward layer of a kind that it has."""
        return []

    # ------------------------------------------------------------------------------- tensors

    def stored(self, name: str, config: ModelConfig) -> tuple[Stored, ...]:
        """How the tensor ``name`` lies in files, () if only training needs it; ``ValueError`` if it
        has no place there."""
        if name.endswith(TRAINING_ONLY):
            return ()
        layer = _LAYER.search(name)
        part = name if layer is None or name in self.table else _LAYER.sub(".*.", name, count=1)
        theirs = self.table.get(part)
        if theirs is None:
            raise ValueError(f"{name} has no name in a {self.model_type} model")
        if layer is not None:
            theirs = theirs.replace("*", layer[1], 1)
        scale, shift = self.fold(part, -1 if layer is None else int(layer[1]), config)
        if "#" not in theirs:
            return (Stored(theirs, None, scale, shift),)
        return tuple(
            Stored(theirs.replace("#", str(expert)), expert, scale, shift)
            for expert in range(config.feedforward.experts)
        )

    def fold(self, part: str, layer: int, config: ModelConfig) -> tuple[float, float]:
        """(factor, term) that turn a tensor of ours into theirs: (1, 0) for the very same.

        part: its name with * for the layer.  The scaling of norms with depth goes into their gains.
        """
        if component(config.block) == "lns" and part in PRE:
            return 1 / math.sqrt(layer + 1), 0.0
        return 1.0, 0.0

    # --------------------------------------------------------------------------- config.json

    def keys(self, config: ModelConfig) -> Tree:
        """config.json without what every target writes and token ids."""
        rope = self.rotation(config)
        found = {
            **standard_keys(config),
            **self.feedforward_keys(config),
            "rms_norm_eps": config.norm.eps,
            "initializer_range": config.init.std,
            "attention_dropout": 0.0,
            "rope_parameters": rope,
        }
        if self.old_rope:
            # readers from before transformers 5 know only these
            scaled = rope["rope_type"] != "default"
            found |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if scaled else None}
        return {**found, **self.written}

    def rotation(self, config: ModelConfig) -> Tree:
        return rope_parameters(config.position, config.attention.head_dim)

    def feedforward_keys(self, config: ModelConfig) -> Tree:
        return {"intermediate_size": config.feedforward.hidden, "hidden_act": "silu"}

    def read(self, hf: Mapping[str, Any]) -> Tree:
        """The ModelConfig, as plain dicts, of what config.json describes.

        Raises:
            ValueError: it is no model of ours; the text lists every reason.
        """
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                    "num_attention_heads")  # fmt: skip
        missing = [key for key in required if not isinstance(hf.get(key), int)]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        problems = [
            f"{key}={hf[key]!r}"
            for key, value in self.demands.items()
            if hf.get(key, value) != value
        ]
        if hf.get("quantization_config"):
            problems.append("quantization_config is set (quantised weights)")
        heads = hf["num_attention_heads"]
        tree: Tree = {
            "vocab_size": hf["vocab_size"],
            "hidden": hf["hidden_size"],
            "layers": hf["num_hidden_layers"],
            "attention": {
                "heads": heads,
                "kv_heads": hf.get("num_key_value_heads") or heads,
                "head_dim": hf.get("head_dim") or self.head_dim(hf),
                **self.read_attention(hf),
            },
            "block": {"type": self.blocks[0]},
            "norm": {"type": "rms", "eps": hf.get("rms_norm_eps", self.default_eps)},
            "tie_embeddings": hf.get("tie_word_embeddings", self.tied),
            "init": {"std": hf.get("initializer_range", 0.02)},
        }
        for part, wrong in (
            self.read_position(hf),
            self.read_feedforward(hf),
            self.read_others(hf),
        ):
            tree |= part
            problems += wrong
        if problems:
            raise ValueError(
                f"this {self.model_type} model is not one of ours: {'; '.join(problems)}"
            )
        return tree

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        """Where config.json does not say."""
        size: int = hf["hidden_size"] // hf["num_attention_heads"]
        return size

    def read_attention(self, hf: Mapping[str, Any]) -> Tree:
        span = self.qk_norm[0]
        return {
            "qk_norm": bool(span),
            **({"qk_norm_span": span} if span else {}),
            "qkv_bias": bool(self.qkv_bias),
        }

    def read_position(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        position, problems = rotation_from_hf(hf, self.default_base)
        return {"position": position}, problems

    def read_feedforward(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        hidden = hf["intermediate_size"]
        return {"feedforward": {"type": self.feedforwards[0], "hidden": hidden}}, []

    def read_others(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        """Whatever else the class has."""
        kinds = set(hf.get("layer_types") or ["full_attention"])
        return {}, [f"layer_types={hf['layer_types']}"] if kinds != {"full_attention"} else []


def component(config: Any) -> str:
    """The name under which a component's configuration is registered; "" for other ones."""
    for registry in (BLOCKS, NORMS, FEEDFORWARDS, POSITIONS):
        try:
            return registry.name_of(type(config))
        except ValueError:
            continue
    return ""


def unjudged(label: str, part: Any, judged: Collection[str], model_type: str) -> list[str]:
    """Keys of a configuration that differ from their defaults and are not among ``judged``."""
    return [
        f"{label}{field.name}={value!r} (unknown to {model_type})"
        for field in dataclasses.fields(part)
        if field.name not in judged and (value := getattr(part, field.name)) != _default(field)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
