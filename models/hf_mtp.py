"""Multi-token prediction in Hugging Face folders: names, config keys, what is representable.

In a ``custom`` folder MTP blocks are layers behind the last one, under DeepSeek-V3's names.  One
native class, ``mellum``, computes a model of ours with its block; transformers then drafts tokens
with it (``generate(use_mtp=True)``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .config import ModelConfig
from .mtp import MTPConfig

MTP_TARGET = "mellum"

MTP_PARTS = {
    "embedding": "embed_tokens",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward": "mlp",
}
"""Parts of an MTP block and of the block inside it, under DeepSeek-V3's names; others keep ours."""
_MERGING = ("embed_tokens", "enorm", "hnorm", "eh_proj")  # the rest belongs to the block inside
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:(shared_head\.norm)|(\w+))\.(.+)")


def mtp_to_custom(name: str, config: ModelConfig) -> str | None:
    """The name in a custom folder of a parameter of an MTP block; None for any other."""
    part, *rest = name.split(".")
    if part not in ("mtp", "mtp_norms"):
        return None
    layer = f"model.layers.{config.layers + int(rest[0]) - 1}"
    if part == "mtp_norms":
        return ".".join([layer, "shared_head.norm", *rest[1:]])
    _, first, *rest = [piece for piece in rest if piece != "block"]
    return ".".join([layer, MTP_PARTS.get(first, first), *rest])


def mtp_from_custom(name: str, config: ModelConfig) -> str | None:
    """The reverse of :func:`mtp_to_custom`."""
    match = _LAYER.fullmatch(name)
    depth = 0 if match is None else int(match[1]) - config.layers + 1
    if match is None or depth not in config.mtp.modules:
        return None
    if match[2]:
        return f"mtp_norms.{depth}.{match[4]}"
    ours = {theirs: part for part, theirs in MTP_PARTS.items()}.get(match[3], match[3])
    inside = config.mtp.kind != "parallel" and match[3] not in _MERGING
    return f"mtp.{depth}.{'block.' * inside}{ours}.{match[4]}"


def mellum_names(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names of a mellum model's one MTP block; ``rows``: those of its ordinary tensors."""
    inside = {
        ours.replace("blocks.*", "mtp.1.block"): theirs.replace("model.layers.*", "mtp.layers.0")
        for ours, theirs in rows
        if "*" in ours
    }
    return inside | {
        "mtp.1.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "mtp.1.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "mtp.1.projection.weight": "mtp.fc.weight",
        "mtp_norms.1.weight": "mtp.norm.weight",
    }


def mtp_obstacles(mtp: MTPConfig, target: str) -> list[str]:
    """Why the native class ``target`` cannot represent ``mtp``, one reason per item."""
    if target != MTP_TARGET:
        return [f"mtp.depth={mtp.depth} ({target} has none)"] if mtp.depth else []
    wanted = {"depth": 1, "kind": "sequential", "embedding": "shared", "input": "norm"}
    return [
        f"mtp.{name}={getattr(mtp, name)} ({target}: {value})"
        for name, value in wanted.items()
        if getattr(mtp, name) != value
    ]


def mellum_keys(config: ModelConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a class that mixes kinds of layers: ours are dense and attend everywhere."""
    return {
        "attention_bias": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.layers,
        "mlp_layer_types": ["dense"] * config.layers,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["dense"],
        "mtp_hidden_states_first": config.mtp.concat == "hidden_first",
        "rope_parameters": {"full_attention": dict(rope)},
    }


def mtp_from_mellum(hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(``mtp`` of the ModelConfig as plain dicts, why it is no model of ours)."""
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
    return {"depth": depth, "input": "norm", "concat": first}, problems
