"""Block diffusion: blocks from left to right, masked diffusion within each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.attention import Visibility
from models.losses import IGNORE
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .diffusion import Windows
from .masked import Masked
from .noise import SampleNoise

UNSEEN = 2**62
"""Rank of a slot that nobody sees by rank."""


def noisy_and_clean(stage: Tensor) -> Visibility:
    """Who sees whom in [z ; x], for the stage int64 [B, n] of each of n tokens: a noisy token sees
    the clean ones of earlier stages and the noisy ones of its own, a clean one the clean ones up to
    its own stage.  All [B, 2n]."""
    slots = torch.arange(1, stage.shape[1] + 1).expand_as(stage)
    return Visibility(
        rank=torch.cat([torch.full_like(stage, UNSEEN), stage], 1),
        limit=torch.cat([stage - 1, stage], 1),
        group=torch.cat([stage, -slots], 1),
    )


def twice(x: Tensor) -> Tensor:
    """[B, n] of the tokens as [B, 2n] of the slots."""
    return torch.cat([x, x], 1)


def halves(first: Tensor, second: float | int) -> Tensor:
    """``first`` [B, n] and as many slots of ``second`` behind it."""
    return torch.cat([first, torch.full_like(first, second)], 1)


@OBJECTIVES.register("block")
class Block(Masked):
    """BD3-LM (Arriola et al. 2025, arXiv 2503.09573): blocks of ``block_size`` tokens,

        NELBO = Σ_b NELBO of masked diffusion(block b | x of the blocks before it)

    with a time for every block of every sequence.  The model sees [z ; x], 2n slots for n tokens:
    noisy blocks, each of which sees itself and the clean blocks before it, and the clean ones,
    which see clean blocks up to their own.  One forward pass thus does what one per block would.

    With blocks of one token and ``estimator: count`` this is autoregressive prediction; with one
    block it is masked diffusion.

    ``clip`` draws levels of noise between two bounds in training, with the weights that they have
    in the whole range: gradients vary less, but the training loss is then biased, and bounds
    nothing.  Evaluation always draws from the whole range.
    """

    @dataclass(frozen=True)
    class Config(Masked.Config):
        block_size: int = field(
            default=16, metadata={"help": "tokens per block; divides the sequence length"}
        )
        clip: tuple[float, float] = field(
            default=(0.0, 1.0),
            metadata={"help": "masked share in training, from and to; its loss is then no bound"},
        )

        @property
        def canvas(self) -> int:
            return 2

        @property
        def judged(self) -> float:
            whole = self.estimator == "count"  # k of n tokens, k from 1 to n
            return (sum(self.clip) / 2 + whole / (2 * self.block_size)) / 2

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if self.block_size < 1:
                found.append(("block_size", f"must be positive, got {self.block_size}"))
            low, high = self.clip
            if not 0 <= low < high <= 1:
                text = f"must be two bounds with 0 <= low < high <= 1, got {low}, {high}"
                found.append(("clip", text))
            return found

        def notes(self) -> list[str]:
            low, high = self.clip
            if (low, high) == (0, 1):
                return []
            return [
                f"trains on masked shares from {low:g} to {high:g} (objective.clip): what the "
                "console calls bound is none in training, only in evaluation"
            ]

        def training_problems(self, sequence_length: int, batch: int) -> list[tuple[str, str]]:
            if self.problems() or sequence_length % self.block_size == 0:
                return []
            text = f"{self.block_size} does not divide sequence_length={sequence_length}"
            return [("block_size", text)]

        @property
        def hides_several(self) -> bool:
            return self.block_size > 1

    config: Config

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        tokens, size = windows.tokens, self.config.block_size
        length = tokens.shape[1]
        assert length % size == 0
        masked, weights = self.hide(windows, sample_indices, noise, length // size)
        positions = torch.arange(length).repeat(len(tokens), 1)
        return MicroBatch(
            torch.cat([tokens.masked_fill(masked, self.model.mask_id), tokens], 1),
            {
                "targets": halves(tokens.masked_fill(~windows.real, IGNORE), IGNORE),
                "labels": halves(tokens.masked_fill(~masked, IGNORE), IGNORE),
                "weights": halves(weights * masked, 0),
            },
            noisy_and_clean(positions // size),
            None if windows.documents is None else twice(windows.documents),
            twice(positions),
        )

    def level(self, uniform: np.ndarray, noise: SampleNoise) -> np.ndarray:
        low, high = self.config.clip if noise is self.training else (0.0, 1.0)
        return low + (high - low) * uniform
