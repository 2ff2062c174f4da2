"""Between our models and Hugging Face's: tensor names, config keys, and what is representable.

A *target* is what an exported folder says it is.  Most are classes of transformers, usable wherever
those are known, and hold only models that they compute exactly (hf_native.py).  ``custom`` holds
every model, by carrying the model's own code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .config import ModelConfig
from .families import family_of
from .hf_custom import (
    MODEL_TYPE,
    cacheable,
    classes,
    custom_name,
    objective_keys,
    standard_keys,
)  # fmt: skip
from .hf_dense import Gemma2, Gemma3, Llama, Olmo2, Qwen2, Qwen3, SmolLM3
from .hf_moe import Glm4Moe, Mixtral, Qwen3Moe
from .hf_mtp import Mellum
from .hf_native import Native
from .hf_stored import Stored

CUSTOM_TARGET = "custom"
AUTOREGRESSIVE: Mapping[str, Any] = {"type": "causal"}
# Where several come equally close to a model, the first one explains what is in the way.
_CLASSES: tuple[type[Native], ...] = (
    Qwen2, Llama, Qwen3, Mellum, Olmo2, SmolLM3, Gemma2, Gemma3, Mixtral, Qwen3Moe, Glm4Moe,
)  # fmt: skip
NATIVE: dict[str, Native] = {kind.model_type: kind() for kind in _CLASSES}
NATIVE_TARGETS = tuple(NATIVE)


def stored_as(name: str, target: str, config: ModelConfig) -> tuple[Stored, ...]:
    """How the tensor ``name`` of a ``config`` model lies in exported files: as one tensor, or in
    slices.  ``ValueError`` if it has no place there."""
    if target == CUSTOM_TARGET:
        return (Stored(custom_name(name, config)),)
    return NATIVE[target].stored(name, config)


def layout(
    names: Collection[str], target: str, config: ModelConfig
) -> dict[str, tuple[Stored, ...]]:
    """:func:`stored_as` of every tensor of a model."""
    places = {name: stored_as(name, target, config) for name in names}
    stored = [place.name for parts in places.values() for place in parts]
    assert len(set(stored)) == len(stored), "two tensors have one name"
    return places


def keeps_wide(stored: str, target: str) -> bool:
    """Whether the class of ``target`` computes with the tensor ``stored`` in float32 even where all
    others are narrower.  (Our own code says so itself: models/declarations.py.)"""
    return target != CUSTOM_TARGET and stored.endswith(NATIVE[target].wide or ("\0",))


def obstacles(
    config: ModelConfig, target: str, objective: Mapping[str, Any] = AUTOREGRESSIVE
) -> list[str]:
    """Why ``target`` cannot represent a ``config`` model trained with ``objective`` exactly, one
    reason per item; empty if it can."""
    if target == CUSTOM_TARGET:
        return []
    return _diffusion_obstacles(objective) + NATIVE[target].obstacles(config)


def _diffusion_obstacles(objective: Mapping[str, Any]) -> list[str]:
    """No native class has the attention of a diffusion model, or fills text in its way."""
    if family_of(objective) == "causal":
        return []
    return [f"objective={objective['type']} (the class is autoregressive)"]


def native_target(
    config: ModelConfig, objective: Mapping[str, Any] = AUTOREGRESSIVE
) -> tuple[str | None, list[str]]:
    """(a native target that represents the model exactly, []) or (None, the reasons of the one
    that comes closest)."""
    reasons = {
        name: obstacles(config, name, objective) for name in NATIVE if NATIVE[name].automatic
    }
    nearest = min(reasons, key=lambda name: (len(reasons[name]), NATIVE[name].misfits(config)))
    return (None, reasons[nearest]) if reasons[nearest] else (nearest, [])


def hf_config(
    config: ModelConfig,
    target: str,
    *,
    dtype: str,
    sequence_length: int,
    tree: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] = AUTOREGRESSIVE,
) -> dict[str, Any]:
    """The content of config.json, without token ids.

    Args:
        dtype: of the stored tensors, "float32" for example.
        sequence_length: tokens per sequence in training.
        tree: ``config`` as plain dicts; the custom target stores it.
        objective: what it was trained with; the custom target stores it.

    Raises:
        ValueError: ``target`` cannot represent ``config``; the text lists the reasons.
    """
    reasons = obstacles(config, target, objective)
    if reasons:
        raise ValueError(f"{target} cannot represent this model exactly: {'; '.join(reasons)}")
    common = {
        "dtype": dtype,
        "use_cache": cacheable(config) and family_of(objective) == "causal",
        "max_position_embeddings": sequence_length,
    }
    if target != CUSTOM_TARGET:
        kind = NATIVE[target]
        head = {"architectures": [kind.architecture], "model_type": target}
        return {**head, **common, **kind.keys(config)}
    assert tree is not None
    auto_map = classes(objective)
    return {
        "architectures": [[*auto_map.values()][-1].split(".")[1]],
        "model_type": MODEL_TYPE,
        "auto_map": auto_map,
        "model": dict(tree),
        "objective": dict(objective),
        **common,
        **standard_keys(config),
        **objective_keys(objective),
    }


def target_of(hf: Mapping[str, Any]) -> str:
    """The target that the config.json ``hf`` belongs to; ``ValueError`` if it is none of ours."""
    kind = hf.get("model_type")
    if kind == MODEL_TYPE:
        return CUSTOM_TARGET
    if kind not in NATIVE:
        allowed = ", ".join((*NATIVE_TARGETS, MODEL_TYPE))
        raise ValueError(f"model_type {kind!r} is not supported: allowed are {allowed}")
    return str(kind)


def model_config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelConfig, as plain dicts, of the model that the config.json ``hf`` describes.

    Raises:
        ValueError: it is no model of ours; the text lists every reason.
    """
    target = target_of(hf)
    return dict(hf["model"]) if target == CUSTOM_TARGET else NATIVE[target].read(hf)
