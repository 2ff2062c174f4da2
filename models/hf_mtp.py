"""Mellum: the class of transformers that has one of our blocks of multi-token prediction and drafts
tokens with it (``generate(use_mtp=True)``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .config import ModelConfig
from .hf_dense import Qwen3
from .hf_native import ATTENTION, GATED, PRE, Names
from .hf_rotary import Tree

MTP_TARGET = "mellum"


def _block(rows: Names) -> Names:
    """Names of the block inside, from those of ordinary layers."""
    return {
        ours.replace("blocks.*", "mtp.1.block"): theirs.replace("model.layers.*", "mtp.layers.0")
        for ours, theirs in rows.items()
    }


class Mellum(Qwen3):
    """Qwen3 with one such block.  Few tools know it, so it is only taken when asked for."""

    model_type = MTP_TARGET
    architecture = "MellumForCausalLM"
    automatic = False
    old_rope = False
    table: ClassVar[Names] = {
        **Qwen3.table,
        **_block({**ATTENTION, **PRE, **GATED}),
        "mtp.1.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "mtp.1.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "mtp.1.projection.weight": "mtp.fc.weight",
        "mtp_norms.1.weight": "mtp.norm.weight",
    }
    blocks = ("pre",)
    written: ClassVar[Mapping[str, Any]] = {}

    def mtp_obstacles(self, config: ModelConfig) -> list[str]:
        wanted = {"depth": 1, "kind": "sequential", "embedding": "shared", "input": "norm"}
        return [
            f"mtp.{name}={given} ({self.model_type}: {value})"
            for name, value in wanted.items()
            if (given := getattr(config.mtp, name)) != value
        ]

    def rotation(self, config: ModelConfig) -> Tree:
        return {"full_attention": super().rotation(config)}

    def keys(self, config: ModelConfig) -> Tree:
        """The class mixes kinds of layers: ours are dense and attend everywhere."""
        return {
            **super().keys(config),
            "attention_bias": False,
            "sliding_window": None,
            "layer_types": ["full_attention"] * config.layers,
            "mlp_layer_types": ["dense"] * config.layers,
            "mtp_layer_types": ["full_attention"],
            "mtp_mlp_layer_types": ["dense"],
            "mtp_hidden_states_first": config.mtp.concat == "hidden_first",
        }

    def read_others(self, hf: Mapping[str, Any]) -> tuple[Tree, list[str]]:
        depth = hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0
        kinds = {"layer_types": "full_attention", "mlp_layer_types": "dense"}
        if depth:
            kinds |= {f"mtp_{key}": kind for key, kind in kinds.items()}
        problems = [
            f"{key}={hf.get(key)} (ours: {kind})"
            for key, kind in kinds.items()
            if set(hf.get(key) or [None]) != {kind}
        ]
        if not depth:
            return {}, problems
        first = "hidden_first" if hf.get("mtp_hidden_states_first") else "embedding_first"
        return {"mtp": {"depth": depth, "input": "norm", "concat": first}}, problems
