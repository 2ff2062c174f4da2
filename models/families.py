"""What kind of language model an objective trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Family = Literal["masked", "uniform", "block", "eso", "causal"]
FAMILIES: tuple[Family, ...] = get_args(Family)


def family_of(objective: Mapping[str, Any]) -> Family:
    """What a model trained with ``objective``, settings such as {"type": "masked"}, is; one that is
    no diffusion is autoregressive."""
    named: Any = objective.get("type")
    return named if named in FAMILIES else "causal"
