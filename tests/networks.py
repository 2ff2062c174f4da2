"""Real transformers small enough for exact comparisons, in float64, one for every component."""

from __future__ import annotations

from models.attention import AttentionConfig
from models.config import ModelConfig
from models.feedforward import SwiGLU
from models.transformer import Transformer
from tests.components import FIELDS, chosen
from tests.trained import tiny_model

SMALL = ModelConfig(
    vocab_size=9,
    mask_token=True,
    hidden=16,
    layers=2,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=4),
    feedforward=SwiGLU.Config(hidden=12),
)


def network(config: ModelConfig = SMALL) -> Transformer:
    return tiny_model(config).double()


def every_component() -> list[tuple[str, ModelConfig]]:
    """``SMALL`` with each component of each registry, by name."""
    return [
        (f"{field} {name}", chosen(SMALL, **{field: name}))
        for field, registry in FIELDS.items()
        for name in registry.names()
    ]
