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
from .experts import MoE
from .linear import Linear
from .transformer import Embedding, Head, Transformer, module_name, unit_names


@dataclass(frozen=True)
class UnitSize:
    """parameters: without vocabulary padding, each counted at its first unit (a tied head has
    none; what blocks share counts at the first block).  active: of those, what a token is expected
    to use.  flops: of the forward pass of one sequence; the head's are those of one depth.
    activations: elements kept for backward per sequence, an estimate."""

    parameters: int
    active: int
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
    kept = sum(sum(part.weight.shape) for part in maps)
    for layer in moe_layers(module):
        _, hidden, dim = layer.experts.gate_proj.weight.shape
        kept += round(3 * (hidden + dim) * layer.expected_active)
    return kept * sequence_length


def moe_layers(module: nn.Module) -> list[MoE]:
    return [part for part in module.modules() if isinstance(part, MoE)]


def unit_sizes(config: ModelConfig, sequence_length: int) -> dict[str, UnitSize]:
    """Sizes of every unit, by unit name, in execution order."""
    with torch.device("meta"):
        model = Transformer(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden
    table = config.hidden * sequence_length
    modules = dict(model.named_modules())
    counted: set[nn.Parameter] = set()
    sizes = {}
    for name in unit_names(config):
        module = modules.get(module_name(config, name))
        if module is None:  # a norm that this model does not have
            sizes[name] = UnitSize(0, 0, 0, 0)
            continue
        own = set(module.parameters()) - counted
        if name == "blocks.0":
            own |= set(model.shared.parameters())
        counted |= own
        tables = [m for m in module.modules() if isinstance(m, (Embedding, Head))]
        padded = sum(p in own for m in tables for p in m.parameters())
        parameters = sum(p.numel() for p in own) - padding * padded
        if isinstance(module, Embedding):
            sizes[name] = UnitSize(parameters, parameters, 0, table)
        elif isinstance(module, Head):
            flops = 2 * config.predicted_vocab_size * table
            sizes[name] = UnitSize(parameters, parameters, flops, table)
        else:
            activations = _module_activations(module, sequence_length)
            flops = module_flops(module, sequence_length)
            idle = sum(m.idle_parameters for m in moe_layers(module) if m.router.weight in own)
            sizes[name] = UnitSize(parameters, parameters - idle, flops, activations)
    return sizes


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters without vocabulary padding; a tied matrix counts once."""
    return sum(size.parameters for size in unit_sizes(config, 1).values())


def forward_flops(config: ModelConfig, sequence_length: int) -> int:
    """Operations of the forward pass of one sequence, the head's at every depth."""
    sizes = unit_sizes(config, sequence_length)
    return sum(size.flops for size in sizes.values()) + config.mtp.depth * sizes["head"].flops


def training_flops_per_token(
    config: ModelConfig, sequence_length: int, views: int = 1, canvas: int = 1, judged: float = 1
) -> float:
    """Forward and backward (twice the forward) per token; recomputation is not counted.

    For each sequence of the data the model sees ``views`` of them, each ``canvas`` times as long,
    and makes the logits of a share ``judged`` of their positions.
    """
    slots = canvas * sequence_length
    head = (1 + config.mtp.depth) * unit_sizes(config, slots)["head"].flops
    forward = forward_flops(config, slots) - (1 - judged) * head
    return 3 * views * forward / sequence_length
