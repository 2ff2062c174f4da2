"""Rotations of queries and keys, as config.json of a Hugging Face class describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .positions import NTK, PI, Llama3, RoPE, YaRN

Tree = dict[str, Any]

ROTATIONS = ("rope", "pi", "ntk", "yarn", "llama3")
"""Position encodings that every class with a rotation knows.  NTK scaling is another base."""


def rope_parameters(position: Any, dim: int) -> Tree:
    """``rope_parameters`` of a position encoding among ROTATIONS, on heads of ``dim``."""
    if isinstance(position, NTK.Config):
        power = 1 if dim == 2 else position.factor ** (dim / (dim - 2))
        return {"rope_type": "default", "rope_theta": position.base * power}
    if isinstance(position, PI.Config):
        return {"rope_type": "linear", "rope_theta": position.base, "factor": position.factor}
    if isinstance(position, Llama3.Config):
        return {
            "rope_type": "llama3",
            "rope_theta": position.base,
            "factor": position.factor,
            "original_max_position_embeddings": position.original_length,
            "low_freq_factor": position.low_freq_factor,
            "high_freq_factor": position.high_freq_factor,
        }
    if not isinstance(position, YaRN.Config):
        assert isinstance(position, RoPE.Config)
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


def rotation_obstacles(position: Any, dim: int) -> list[str]:
    """Why transformers would compute another table, one reason per item."""
    if not isinstance(position, YaRN.Config):
        return []
    low, high = position.ramp(dim)
    if low <= high:
        return []
    return [
        f"position: the YaRN ramp is empty (ends {low} and {high}), which is computed otherwise"
    ]


def rotation_from_hf(hf: Mapping[str, Any], default_base: float) -> tuple[Tree, list[str]]:
    """(``position`` of the ModelConfig as plain dicts, why it is none of ours)."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = float(rope.get("rope_theta") or hf.get("rope_theta") or default_base)
    fraction = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    problems = [] if fraction == 1 else [f"partial_rotary_factor={fraction}"]
    if kind == "default":
        return {"type": "rope", "base": base}, problems
    factor = float(rope.get("factor") or 0.0)
    if kind == "linear":
        if factor < 1:
            problems.append("linear without factor >= 1")
        return {"type": "pi", "base": base, "factor": factor}, problems
    read = {"yarn": _yarn_from_hf, "llama3": _llama3_from_hf}.get(kind)
    if read is None:
        return {}, [*problems, f"rope_type={kind!r}"]
    position, wrong = read(rope, base, factor)
    return position, problems + wrong


def _llama3_from_hf(rope: Mapping[str, Any], base: float, factor: float) -> tuple[Tree, list[str]]:
    names = {
        "original_length": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    }
    missing = [theirs for theirs in names.values() if not rope.get(theirs)]
    if factor < 1 or missing:
        return {}, [f"llama3 without {', '.join(missing) or 'factor >= 1'}"]
    settings: Tree = {"base": base, "factor": factor}
    settings |= {ours: rope[theirs] for ours, theirs in names.items()}
    wrong = [f"llama3: {key} {text}" for key, text in Llama3.Config(**settings).problems()]
    return {"type": "llama3", **settings}, wrong


def _yarn_from_hf(rope: Mapping[str, Any], base: float, factor: float) -> tuple[Tree, list[str]]:
    settings: Tree = {
        "base": base,
        "factor": factor,
        "original_length": rope.get("original_max_position_embeddings"),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
    }
    position = {"type": "yarn", **settings}
    if factor < 1 or not settings["original_length"]:
        return position, ["yarn without factor >= 1 and original_max_position_embeddings"]
    own = YaRN.Config(**settings).magnitude()
    problems = []
    if abs((rope.get("attention_factor") or own) - own) > 1e-6:
        problems.append(f"attention_factor={rope['attention_factor']} (ours is {own:.6f})")
    problems += [f"{key}={rope[key]}" for key in ("mscale", "mscale_all_dim") if rope.get(key)]
    if rope.get("truncate") is False:
        problems.append("truncate=False")
    return position, problems
