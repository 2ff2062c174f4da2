"""What the registries hold, as choices that a test can loop over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.blocks import BLOCKS
from models.config import ModelConfig
from models.feedforward import FEEDFORWARDS
from models.norms import NORMS
from models.positions import POSITIONS
from models.registry import Registry

FIELDS: dict[str, Registry] = {
    "norm": NORMS,
    "block": BLOCKS,
    "position": POSITIONS,
    "feedforward": FEEDFORWARDS,
}
DEFAULTS = {
    field: registry.name_of(type(getattr(ModelConfig(), field)))
    for field, registry in FIELDS.items()
}


def chosen(model: ModelConfig, **names: str) -> ModelConfig:
    """``model`` with the components of these names, with their default settings."""
    configs: dict[str, Any] = {
        field: FIELDS[field].config_class(name)() for field, name in names.items()
    }
    return replace(model, **configs)


def legal_pairs() -> list[tuple[str, str]]:
    """Every norm with every block that it goes with."""
    return [
        (norm, block)
        for norm in NORMS.names()
        for block in BLOCKS.names()
        if not chosen(ModelConfig(), norm=norm, block=block).problems()
    ]


def choices() -> list[dict[str, str]]:
    """Every legal pair of norm and block, and every other component with defaults beside it: the
    four names."""
    pairs = [DEFAULTS | {"norm": norm, "block": block} for norm, block in legal_pairs()]
    others = [
        DEFAULTS | {field: name}
        for field in ("position", "feedforward")
        for name in FIELDS[field].names()
        if name != DEFAULTS[field]
    ]
    return pairs + others
