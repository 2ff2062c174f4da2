"""Classes of transformers with experts.

Files hold every matrix of every expert by itself, whatever transformers makes of them in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from .config import ModelConfig
from .hf_native import ATTENTION, GATED, OUTSIDE, PRE, Names, Native, unjudged
from .hf_rotary import ROTATIONS, Tree, rope_parameters, rotation_from_hf
from .positions import PartialRoPE, RoPE
from .routers import Sigmoid, TopK


def _experts(part: str, gate: str, up: str, down: str) -> Names:
    """Names of the experts' matrices below ``part`` of a layer; # stands for the expert."""
    ours, theirs = "blocks.*.feedforward.experts", f"model.layers.*.{part}.experts.#"
    names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{ours}.{k}.weight": f"{theirs}.{name}.weight" for k, name in names.items()}


_ROUTER = "blocks.*.feedforward.router.weight"
_MLP_EXPERTS = {
    **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    _ROUTER: "model.layers.*.mlp.gate.weight",
}


_JUDGED: dict[Any, set[str]] = {
    TopK.Config: {"k", "gates"},
    Sigmoid.Config: {"k", "groups", "top_groups", "normalise", "scaling", "bias_rate"},
}


class _Experts(Native):
    """What classes with experts have in common."""

    feedforwards = ("moe",)

    def feedforward_obstacles(self, config: ModelConfig) -> list[str]:
        moe, name = config.feedforward, self.model_type
        found = self.router_obstacles(moe.router)
        if moe.shared_experts and not self.shared:
            found.append(f"feedforward.shared_experts={moe.shared_experts} ({name} has none)")
        if self.shared and not moe.shared_experts:
            found.append(f"feedforward.shared_experts=0 ({name}: at least 1)")
        judged = _JUDGED.get(type(moe.router))
        if judged is not None:
            found += unjudged("feedforward.router.", moe.router, judged, name)
        return found

    shared: ClassVar[bool] = False

    def router_obstacles(self, router: Any) -> list[str]:
        if not isinstance(router, TopK.Config):
            return [f"feedforward.router: {type(router).__qualname__} ({self.model_type}: topk)"]
        if router.gates == "softmax" and not self.plain_softmax:
            return [f"feedforward.router.gates=softmax ({self.model_type} renormalises)"]
        return []

    plain_softmax: ClassVar[bool] = False


class Mixtral(_Experts):
    """The k largest of a softmax, divided by their sum, in every layer."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    default_base = 1e6
    default_eps = 1e-5
    table: ClassVar[Names] = {
        **OUTSIDE,
        **ATTENTION,
        **PRE,
        **_experts("block_sparse_moe", "w1", "w3", "w2"),
        _ROUTER: "model.layers.*.block_sparse_moe.gate.weight",
    }
    demands: ClassVar[Mapping[str, Any]] = {**Native.demands, "sliding_window": None}

    def feedforward_obstacles(self, config: ModelConfig) -> list[str]:
        return super().feedforward_obstacles(config) + _dense_obstacles(config, "mixtral")

    def feedforward_keys(self, config: ModelConfig) -> Tree:
        moe = config.feedforward
        return {
            "intermediate_size": moe.hidden,
            "hidden_act": "silu",
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.router.k,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
        }

    def read_feedforward(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        moe = {
            "type": "moe",
            "experts": hf.get("num_local_experts", 8),
            "hidden": hf["intermediate_size"],
            "router": {"type": "topk", "k": hf.get("num_experts_per_tok", 2)},
        }
        return {"feedforward": moe}, []


class Qwen3Moe(_Experts):
    """Mixtral with QK-norm; some layers may be dense and gates may stay what the softmax gave."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    qk_norm = ("head",)
    whole_heads = False
    plain_softmax = True
    table: ClassVar[Names] = {**OUTSIDE, **ATTENTION, **PRE, **GATED, **_MLP_EXPERTS}
    written: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }

    def feedforward_keys(self, config: ModelConfig) -> Tree:
        moe = config.feedforward
        return {
            "intermediate_size": moe.dense_hidden or moe.hidden,
            "moe_intermediate_size": moe.hidden,
            "hidden_act": "silu",
            # transformers 5 writes the first of these, other readers know the second
            "num_local_experts": moe.experts,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.router.k,
            "norm_topk_prob": moe.router.gates != "softmax",
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_layers(config),
        }

    def read_feedforward(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        step, only = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or []
        layers = range(hf["num_hidden_layers"])
        dense = [layer for layer in layers if layer in only or (layer + 1) % step]
        where, problems = _pattern(dense, hf)
        normed = hf.get("norm_topk_prob", False)
        moe = {
            "type": "moe",
            "experts": hf.get("num_local_experts") or hf.get("num_experts") or 128,
            "hidden": hf.get("moe_intermediate_size", 768),
            "router": {
                "type": "topk",
                "k": hf.get("num_experts_per_tok", 8),
                "gates": "renormalised" if normed else "softmax",
            },
            **where,
        }
        return {"feedforward": moe}, problems

    def head_dim(self, hf: Mapping[str, Any]) -> int:
        return super().head_dim(hf)


class Glm4Moe(_Experts):
    """DeepSeek-V3's router and shared experts around grouped-query attention (DeepSeek-V3's own
    class has another kind of attention); with or without QK-norm and biases of q, k and v."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    qk_norm = ("", "head")
    qkv_bias = None
    whole_heads = False
    shared = True
    default_eps = 1e-5
    positions = (*ROTATIONS, "partial")
    wide = (".mlp.gate.weight", ".e_score_correction_bias")
    table: ClassVar[Names] = {
        **OUTSIDE,
        **ATTENTION,
        **PRE,
        **GATED,
        **_MLP_EXPERTS,
        "blocks.*.feedforward.router.selection_bias": (
            "model.layers.*.mlp.gate.e_score_correction_bias"
        ),
        **{
            f"blocks.*.feedforward.shared_experts.{part}.weight": (
                f"model.layers.*.mlp.shared_experts.{part}.weight"
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        },
    }
    demands: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "mlp_bias": False}

    def router_obstacles(self, router: Any) -> list[str]:
        if isinstance(router, Sigmoid.Config):
            return []
        return [f"feedforward.router: {type(router).__qualname__} (glm4_moe: sigmoid)"]

    def feedforward_obstacles(self, config: ModelConfig) -> list[str]:
        found, moe = super().feedforward_obstacles(config), config.feedforward
        width = moe.shared_experts * (moe.shared_hidden or moe.hidden)
        if width % moe.hidden:
            found.append(
                f"feedforward.shared_hidden={moe.shared_hidden} (glm4_moe: together a multiple of "
                f"hidden={moe.hidden})"
            )
        if moe.every > 1:
            found.append(f"feedforward.every={moe.every} (glm4_moe: 1)")
        return found

    def keys(self, config: ModelConfig) -> Tree:
        return {
            **super().keys(config),
            "attention_bias": config.attention.qkv_bias,
            "use_qk_norm": config.attention.qk_norm,
            "partial_rotary_factor": self.rotation(config)["partial_rotary_factor"],
            "num_nextn_predict_layers": 0,
        }

    def position_obstacles(self, config: ModelConfig) -> list[str]:
        position, dim = config.position, config.attention.head_dim
        if not isinstance(position, PartialRoPE.Config):
            return super().position_obstacles(config)
        rotated = int(dim * position.fraction)  # which we round down to pairs
        if rotated >= 2 and rotated % 2 == 0:
            return []
        return [f"position.fraction={position.fraction} of {dim} is not an even number"]

    def rotation(self, config: ModelConfig) -> Tree:
        position = config.position
        if isinstance(position, PartialRoPE.Config):
            plain, fraction = RoPE.Config(base=position.base), position.fraction
        else:
            plain, fraction = position, 1.0
        rope = rope_parameters(plain, config.attention.head_dim)
        return {**rope, "partial_rotary_factor": fraction}

    def feedforward_keys(self, config: ModelConfig) -> Tree:
        moe, router = config.feedforward, config.feedforward.router
        width = moe.shared_experts * (moe.shared_hidden or moe.hidden)
        return {
            "intermediate_size": moe.dense_hidden or moe.hidden,
            "moe_intermediate_size": moe.hidden,
            "hidden_act": "silu",
            "n_routed_experts": moe.experts,
            "n_shared_experts": width // moe.hidden,
            "num_experts_per_tok": router.k,
            "n_group": router.groups,
            "topk_group": router.top_groups,
            "norm_topk_prob": router.normalise,
            "routed_scaling_factor": router.scaling,
            "first_k_dense_replace": min(moe.first_dense, config.layers),
        }

    def read_attention(self, hf: Mapping[str, Any]) -> Tree:
        return {
            "qk_norm": bool(hf.get("use_qk_norm")),
            "qkv_bias": bool(hf.get("attention_bias")),
        }

    def read_position(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        fraction = {**hf, **rope}.get("partial_rotary_factor", 0.5)
        whole = {**rope, "partial_rotary_factor": 1.0}
        found, problems = rotation_from_hf({**hf, "rope_parameters": whole}, self.default_base)
        if fraction == 1:
            return {"position": found}, problems
        if found.get("type") != "rope":
            problems.append(f"partial_rotary_factor={fraction} with rope_type={rope['rope_type']}")
        partial = {"type": "partial", "base": found.get("base"), "fraction": fraction}
        return {"position": partial}, problems

    def read_feedforward(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        dense = [*range(min(hf.get("first_k_dense_replace", 1), hf["num_hidden_layers"]))]
        where, problems = _pattern(dense, hf)
        hidden, shared = hf.get("moe_intermediate_size", 1408), hf.get("n_shared_experts", 1)
        if not shared:
            problems.append(f"n_shared_experts={shared}")
        moe = {
            "type": "moe",
            "experts": hf.get("n_routed_experts") or hf.get("num_local_experts") or 128,
            "hidden": hidden,
            "router": {
                "type": "sigmoid",
                "k": hf.get("num_experts_per_tok", 8),
                "groups": hf.get("n_group") or 1,
                "top_groups": hf.get("topk_group") or 1,
                "normalise": hf.get("norm_topk_prob", True),
                "scaling": hf.get("routed_scaling_factor", 1.0),
            },
            "balance": {"kind": "none"},
            "shared_experts": shared,
            **where,
        }
        return {"feedforward": moe}, problems

    def read_others(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        depth = hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0
        return {}, [f"num_nextn_predict_layers={depth}"] if depth else []


def dense_layers(config: ModelConfig) -> list[int]:
    """The layers without experts."""
    moe = config.feedforward
    return [layer for layer in range(config.layers) if moe.at(layer) is not moe]


def _dense_obstacles(config: ModelConfig, name: str) -> list[str]:
    dense = dense_layers(config)
    return [f"feedforward: layers {dense} have no experts ({name}: all have)"] if dense else []


def _pattern(dense: Collection[int], hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """``first_dense``, ``every`` and ``dense_hidden`` of a model whose layers ``dense`` have no
    experts, and why there are none."""
    if not dense:
        return {}, []
    layers = range(hf["num_hidden_layers"])
    for every in range(1, len(layers) + 1):
        for first in range(len(layers) + 1):
            sparse = {n for n in layers if n >= first and (n - first + 1) % every == 0}
            if sparse.isdisjoint(dense) and len(sparse) + len(dense) == len(layers):
                size = hf["intermediate_size"]
                return {"first_dense": first, "every": every, "dense_hidden": size}, []
    return {}, [f"layers without experts: {sorted(dense)} (ours: some first ones, then a pattern)"]
