"""What the arguments of a Hugging Face forward pass say about who sees whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import KeyValueStore
from .config import ModelConfig
from .decoding import DecodingContext, padded_positions
from .denoisers import SlotContext
from .families import family_of


def causal_context(
    ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    store: KeyValueStore | None = None,
    past: int = 0,
) -> DecodingContext:
    """Of an autoregressive model, which has ``past`` tokens in its store."""
    written = past + ids.shape[1]
    documents = visible = None
    positions = torch.arange(past, written, device=ids.device)
    if attention_mask is not None and attention_mask.dim() == 4:
        visible = attention_mask
        # read only as "there is a mask"
        documents = torch.zeros(ids.shape[0], written, dtype=torch.long, device=ids.device)
    elif attention_mask is not None:
        if tuple(attention_mask.shape) != (ids.shape[0], written):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, not "
                f"{(ids.shape[0], written)}: it covers the {past} tokens in the cache as well"
            )
        if not attention_mask.all():
            documents = attention_mask.to(ids.device, torch.long)
            positions = padded_positions(documents)[:, past:]
    if position_ids is not None:
        positions = position_ids
    return DecodingContext(
        positions, documents=documents, store=store, offset=past, visible=visible
    )


def diffusion_context(
    ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    config: ModelConfig,
    objective: Mapping[str, Any],
) -> SlotContext:
    """Of a diffusion model.  A 4-D attention_mask says by itself who sees whom."""
    shape, device = tuple(ids.shape), ids.device
    real = torch.ones(shape, dtype=torch.bool, device=device)
    visible = None
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool:
            raise ValueError("a 4-D attention_mask must be boolean, True where a token is seen")
        visible = attention_mask.to(device)
    elif attention_mask is not None:
        if tuple(attention_mask.shape) != shape:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, not {shape}")
        real = attention_mask.to(device, torch.bool)
    positions = padded_positions(real)
    if position_ids is not None:
        positions = position_ids.to(device).expand(shape)
    if visible is None:
        stage = _stages(ids, real, positions, config, objective)
        if stage is not None or not real.all():
            own = torch.eye(shape[1], dtype=torch.bool, device=device)
            seen = real[:, None] if stage is None else real[:, None] & _up_to(stage)
            visible = (seen | own)[:, None]
    return SlotContext(positions, "bidirectional", visible=visible)


def _up_to(stage: Tensor) -> Tensor:
    return stage[:, None, :] <= stage[:, :, None]


def _stages(
    ids: Tensor, real: Tensor, positions: Tensor, config: ModelConfig, objective: Mapping[str, Any]
) -> Tensor | None:
    """When each token becomes known, int64 [B, S]: it sees those that do so no later.  None where
    all see each other."""
    family = family_of(objective)
    if family == "block":
        stage: Tensor = positions // objective["block_size"]
        return stage
    if family != "eso":
        return None
    masked = real & (ids == config.mask_id)
    known = real & ~masked
    if objective["variant"] == "A":
        return masked.cumsum(1) * masked
    return torch.where(masked, known.sum(1, keepdim=True) + masked.cumsum(1), known.cumsum(1))
