"""Parameters and floating-point operations per unit, counted from the modules themselves.

The model is built on the meta device and walked: every ``Linear`` costs 2 operations per weight and
position, attention adds its two batched products, and a component with other arithmetic worth
counting says so in ``extra_flops(sequence_length)``.  So a new component needs no entry here.
A multiply-add is two operations; element-wise work is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .attention import Attention
from .config import ModelConfig
from .linear import Linear
from .transformer import Head, Transformer, unit_names


@dataclass(frozen=True)
class UnitSize:
    """parameters: without vocabulary padding (a tied head has none).  flops: of the forward pass
    of one sequence.  activations: elements kept for backward per sequence, an estimate."""

    parameters: int
    flops: int
    activations: int


def attention_flops(module: Attention, sequence_length: int) -> int:
    """q kᵀ and its product with v over every pair of positions.  A causal mask halves the useful
    work, not this count, which is what ``FlopCounterMode`` and the usual MFU report."""
    heads = module.q_proj.weight.shape[0]
    return 2 * 2 * heads * sequence_length * sequence_length


def module_flops(module: nn.Module, sequence_length: int) -> int:
    total = 0
    for part in module.modules():
        if isinstance(part, Linear):
            total += 2 * part.weight.numel() * sequence_length
        elif isinstance(part, Attention):
            total += attention_flops(part, sequence_length)
        extra = getattr(part, "extra_flops", None)
        if extra is not None:
            total += extra(sequence_length)
    return total


def _module_activations(module: nn.Module, sequence_length: int) -> int:
    """Inputs and outputs of every linear map: an estimate in closed form (maps that share an
    input make up for what else is kept)."""
    maps = [part for part in module.modules() if isinstance(part, Linear)]
    return sum(sum(part.weight.shape) for part in maps) * sequence_length


def unit_sizes(config: ModelConfig, sequence_length: int) -> dict[str, UnitSize]:
    """Sizes of every unit, by unit name, in execution order."""
    with torch.device("meta"):
        model = Transformer(config)
    vocabulary = config.vocab_size * config.hidden
    sizes = {}
    for name in unit_names(config):
        if name == "embedding":
            sizes[name] = UnitSize(vocabulary, 0, config.hidden * sequence_length)
            continue
        module = getattr(model, name) if "." not in name else model.blocks[name.split(".")[1]]
        if isinstance(module, Head):
            own = 0 if config.tie_embeddings else vocabulary
            flops = 2 * vocabulary * sequence_length
            sizes[name] = UnitSize(own, flops, config.hidden * sequence_length)
        elif module is None:
            sizes[name] = UnitSize(0, 0, 0)
        else:
            parameters = sum(p.numel() for p in module.parameters())
            activations = _module_activations(module, sequence_length)
            sizes[name] = UnitSize(parameters, module_flops(module, sequence_length), activations)
    return sizes


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters without vocabulary padding; a tied matrix counts once."""
    return sum(size.parameters for size in unit_sizes(config, 1).values())


def forward_flops(config: ModelConfig, sequence_length: int) -> int:
    """Operations of the forward pass of one sequence."""
    return sum(size.flops for size in unit_sizes(config, sequence_length).values())


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward (twice the forward) per token; recomputation is not counted."""
    return 3 * forward_flops(config, sequence_length) / sequence_length
