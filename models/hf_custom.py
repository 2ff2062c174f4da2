"""Names in a folder that carries the model's own code, and the sizes that its config.json repeats.

Such a folder holds every model.  Blocks of multi-token prediction are layers behind the last one
there, under DeepSeek-V3's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig
from .families import family_of

MODEL_TYPE = "midspan"
PREFIX = "model.transformer."
_BASE_CLASSES = {
    "AutoConfig": "configuration_midspan.MidspanConfig",
    "AutoModel": "modeling_midspan.MidspanModel",
}
CAUSAL_CLASSES = {
    **_BASE_CLASSES,
    "AutoModelForCausalLM": "modeling_midspan.MidspanForCausalLM",
}
DIFFUSION_CLASSES = {
    **_BASE_CLASSES,
    "AutoModelForMaskedLM": "modeling_midspan_diffusion.MidspanForDiffusion",
}

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


def custom_name(name: str, config: ModelConfig) -> str:
    """The name in the files of tensor ``name`` of a ``config`` model."""
    part, *rest = name.split(".")
    if name == "head.weight":
        return "lm_head.weight"
    if part not in ("mtp", "mtp_norms"):
        return PREFIX + name
    layer = f"model.layers.{config.layers + int(rest[0]) - 1}"
    if part == "mtp_norms":
        return ".".join([layer, "shared_head.norm", *rest[1:]])
    _, first, *rest = [piece for piece in rest if piece != "block"]
    return ".".join([layer, MTP_PARTS.get(first, first), *rest])


def cacheable(config: ModelConfig) -> bool:
    """Whether what is computed for a token stays what it is when more tokens come."""
    position = getattr(config.position, "inner", config.position)
    return getattr(position, "temperature", "none") in ("none", "query")


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
        **({"mask_token_id": config.mask_id} if config.mask_token else {}),
    }


def classes(objective: Mapping[str, Any]) -> dict[str, str]:
    """What transformers' auto classes find in the folder, the language model last."""
    return CAUSAL_CLASSES if family_of(objective) == "causal" else DIFFUSION_CLASSES


def objective_keys(objective: Mapping[str, Any]) -> dict[str, Any]:
    """What Hugging Face tools may want to know of how the model was trained: whether tokens see
    only those on their left."""
    return {"is_causal": family_of(objective) == "causal"}
