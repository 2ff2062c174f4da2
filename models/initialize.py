"""Counter-based initial weights.

An element is a pure function of (seed, logical parameter name, its coordinates in the unpadded
tensor), so every layout starts from the same weights and a rank computes its own shard only.

Bits come from a 64-bit finaliser over the element's index (SplitMix64: Steele et al. 2014), the
normal from Box–Muller.  The logarithm and the cosine are evaluated here with additions,
multiplications, divisions and square roots alone: those are exactly rounded everywhere, whereas a
library's vectorised log may differ from its scalar one in the last bit, and a shard boundary
decides which of the two an element meets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import OUTPUTS, block_class
from .config import ModelConfig

_CHUNK = 1 << 18


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Finaliser of 64 bits: every input bit flips about half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _uniform(counter: Tensor, key: int) -> Tensor:
    """float64 in (0, 1), 52 random bits, never 0 or 1."""
    bits = mix(mix(counter * _signed(0x9E3779B97F4A7C15) + _signed(key)) ^ _signed(key))
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = exponent.to(torch.float64) - low.to(torch.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.zeros_like(s)
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    return 2 * s * series + exponent * math.log(2)


def _cos_turn(u: Tensor) -> Tensor:
    """cos(2πu) for u in (0, 1)."""
    distance = 0.25 - (u - 0.5).abs()  # cos(2πu) = −sin(2π·distance), within a quarter turn
    angle = distance * (2 * math.pi)
    square = angle * angle
    series = torch.zeros_like(angle)
    for k in range(10, -1, -1):
        series = series * square + (-1.0) ** k / math.factorial(2 * k + 1)
    return -(angle * series)


def parameter_key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def normal_(out: Tensor, seed: int, name: str, offsets: Sequence[int], shape: Sequence[int],
            std: float) -> None:  # fmt: skip
    """Fill ``out``, the block at ``offsets`` of a logical tensor of (unpadded) ``shape``, with
    N(0, std²); coordinates beyond ``shape`` are padding and become 0."""
    key = parameter_key(seed, name)
    flat = out.view(-1) if out.is_contiguous() else None
    assert flat is not None, "parameters are contiguous"
    for begin in range(0, flat.numel(), _CHUNK):
        position = torch.arange(
            begin, min(begin + _CHUNK, flat.numel()), device=out.device, dtype=torch.int64
        )
        counter = torch.zeros_like(position)
        inside = torch.ones_like(position, dtype=torch.bool)
        stride = 1
        for dim in range(out.dim() - 1, -1, -1):
            coordinate = position % out.shape[dim] + offsets[dim]
            position = position // out.shape[dim]
            inside &= coordinate < shape[dim]
            counter += coordinate * stride
            stride *= shape[dim]
        radius = torch.sqrt(-2 * _log(_uniform(2 * counter, key)))
        value = radius * _cos_turn(_uniform(2 * counter + 1, key)) * std
        flat[begin : begin + _CHUNK] = torch.where(inside, value, 0.0).to(out.dtype)


def standard_deviation(config: ModelConfig, name: str, shape: Sequence[int]) -> float:
    """Standard deviation of matrix ``name``, of ``shape`` [..., outputs, inputs].  Those that the
    placement of norms names shrink with depth."""
    init, parts = config.init, name.split(".")
    if name.endswith("embedding.weight"):
        return init.std if init.embedding_std is None else init.embedding_std
    std = init.std / math.sqrt(shape[-1]) if init.rule == "fan_in" else init.std
    if not init.scale_outputs:
        return std
    if init.output_gain is not None and any(part in OUTPUTS for part in parts):
        return std * init.output_gain
    shrink = block_class(config.block).shrink(config.layers)
    (divisor,) = [shrink[part] for part in parts if part in shrink] or [1.0]
    return std / divisor


def copy_block(out: Tensor, whole: Tensor, offsets: Sequence[int]) -> None:
    """Fill ``out`` with the block of ``whole`` at ``offsets``; what lies beyond is padding, 0."""
    spans = tuple(slice(a, a + n) for a, n in zip(offsets, out.shape, strict=True))
    block = whole[spans]
    out.zero_()
    out[tuple(slice(0, n) for n in block.shape)] = block.to(out)


def initialize_(
    out: Tensor, config: ModelConfig, seed: int, name: str,
    offsets: Sequence[int], shape: Sequence[int], declared: float | Tensor | None = None,
) -> None:  # fmt: skip
    """Initial value of the block of logical parameter ``name`` that starts at ``offsets``.

    ``declared``: a constant, or the whole logical tensor, where its module wants that."""
    with torch.no_grad():
        if isinstance(declared, Tensor):
            copy_block(out, declared, offsets)
        elif declared is not None:
            out.fill_(declared)
        elif name.endswith(".bias") or (name == "head.weight" and config.init.zero_head):
            out.zero_()
        elif len(shape) == 1:
            out.fill_(1.0)
        else:
            normal_(out, seed, name, offsets, shape, standard_deviation(config, name, shape))


def is_vocabulary(name: str) -> bool:
    """Whether the rows of parameter ``name`` are the tokens of the vocabulary."""
    return name.endswith("embedding.weight") or name == "head.weight"


def unpadded_shape(config: ModelConfig, name: str, stored: Sequence[int]) -> list[int]:
    """The shape of ``name`` without vocabulary padding."""
    if is_vocabulary(name):
        return [config.vocab_size, *stored[1:]]
    return list(stored)
