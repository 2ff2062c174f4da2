"""Models that classes of transformers hold, for tests of names, export and import."""

from __future__ import annotations

from typing import Any

QK_NORM = {"qk_norm": True, "head_dim": 16}
GEGLU = {"type": "geglu", "hidden": 40}
MOE = {"type": "moe", "experts": 6, "hidden": 24}
DENSE_FIRST = {"first_dense": 1, "dense_hidden": 56}
SIGMOID = {
    **MOE,
    "router": {"type": "sigmoid", "k": 3},
    "shared_experts": 2,
    "balance": {"kind": "none"},
}

NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True, "residual_dtype": "float32"},
    "llama-yarn": {"position": {"type": "yarn", "factor": 3.0, "original_length": 16}},
    "llama-llama3": {
        "position": {"type": "llama3", "base": 100.0, "factor": 3.0, "original_length": 32}
    },
    "llama-pi": {"position": {"type": "pi", "factor": 3.0, "base": 5000.0}},
    "llama-wide": {"hidden": 48, "attention": {"head_dim": 16, "kv_heads": 4}},
    "qwen2": {
        "attention": {"qkv_bias": True},
        "position": {"type": "rope", "base": 500.0},
        "init": {"std": 0.05},
    },
    "qwen3": {
        "attention": QK_NORM,
        "tie_embeddings": True,
        "norm": {"type": "rms", "eps": 1e-6},
    },
    "olmo2": {
        "block": "reordered",
        "attention": {"qk_norm": True, "qk_norm_span": "projection", "head_dim": 8},
    },
    "smollm3": {"position": {"type": "rnope", "every": 3}, "layers": 4, "tie_embeddings": True},
    "smollm3-nope": {"position": "nope"},
    "gemma2": {"block": "peri", "feedforward": GEGLU, "logit_softcap": 20.0},
    "gemma2-tied": {"block": "peri", "feedforward": GEGLU, "tie_embeddings": True},
    "gemma3_text": {
        "block": "peri",
        "feedforward": GEGLU,
        "attention": {"qk_norm": True},
        "position": {"type": "rope", "base": 1e6},
    },
    "mixtral": {"feedforward": MOE},
    "qwen3_moe": {"feedforward": MOE, "attention": QK_NORM},
    "qwen3_moe-plain": {
        "feedforward": {**MOE, **DENSE_FIRST, "router": {"type": "topk", "gates": "softmax"}},
        "attention": QK_NORM,
        "layers": 3,
    },
    "glm4_moe": {"feedforward": SIGMOID, "attention": {"qkv_bias": True, "head_dim": 16}},
    "glm4_moe-partial": {"feedforward": SIGMOID, "position": {"type": "partial", "fraction": 0.5}},
    "glm4_moe-groups": {
        "feedforward": {
            **SIGMOID,
            **DENSE_FIRST,
            "router": {
                "type": "sigmoid",
                "k": 2,
                "groups": 3,
                "top_groups": 2,
                "normalise": False,
                "scaling": 2.5,
            },
        },
        "attention": QK_NORM,
        "layers": 3,
    },
}
"""``<target>[-<variant>]``: what differs from the small model of tests/trained.py."""


def target_of(case: str) -> str:
    return case.split("-")[0]
