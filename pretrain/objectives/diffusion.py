"""What all diffusion objectives share: which tokens are noised, how much, and how that is counted.

A diffusion language model learns to undo noise: of a sequence x of n tokens some are replaced,
giving z, and the model predicts x from z.  α(t) is the chance that a token is still itself at time
t, from 1 at t = 0 to about 0 at t = 1; here it is log-linear, α(t) = 1 − (1 − ε) t with ε = 1e-3,
for which α'/(1 − α) = −1/t.  The training loss is an upper bound of −log p(x), the NELBO (negative
evidence lower bound).

The model sees the tokens that an autoregressive one predicts, 1 … S of a window of S + 1, so that
bits per byte of both are of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.config import ModelConfig
from models.losses import IGNORE
from models.positions import position_name
from parallel.stage import MicroBatch

from .base import ObjectiveConfig, count_labels
from .noise import SampleNoise

EVALUATION_STRATA = 64
"""So many evaluation samples in a row share one set of strata, however they are batched."""


@dataclass(frozen=True)
class DiffusionConfig(ObjectiveConfig):
    """Checks that the diffusion objectives share."""

    draws_noise: ClassVar[bool] = True

    def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
        found = []
        if model.mtp.depth:
            text = "predicts each token from all others, so there is none ahead: model.mtp.depth=0"
            found.append(("type", text))
        return found

    def needs_mask_token(self, model: ModelConfig) -> list[tuple[str, str]]:
        if model.mask_token:
            return []
        return [("type", "replaces tokens by a mask token: set model.mask_token=true")]

    def needs_positions(self, model: ModelConfig) -> list[tuple[str, str]]:
        if position_name(model.position) != "nope":
            return []
        return [
            ("type", "needs to tell masked tokens apart: model.position=nope tells no position")
        ]


@dataclass
class Windows:
    """Sequences to be noised.  tokens: int64 [B, S].  real: bool [B, S], False on padding.
    documents: int64 [B, S], or None where every token may see the others."""

    tokens: Tensor
    real: Tensor
    documents: Tensor | None


class Diffusion:
    """Base of the diffusion objectives.  ``training`` and ``evaluation`` are streams of noise."""

    primary = "nelbo"
    is_bound = True

    def __init__(
        self, config: DiffusionConfig, model: ModelConfig | None = None, seed: int = 0,
        batch: int = 1,
    ) -> None:  # fmt: skip
        assert model is not None, "noise is made for a vocabulary"
        self.config: Any = config
        self.model = model
        self.training = SampleNoise(seed, "training noise", batch)
        self.evaluation = SampleNoise(0, "evaluation noise", EVALUATION_STRATA)

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        return self.noised(self.windows(tokens, documents), sample_indices, self.training)

    def evaluation_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        return self.noised(self.windows(tokens, documents), sample_indices, self.evaluation)

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        """What the model sees.  The field ``targets`` holds the token that a slot stands for where
        a loss may fall on it, whether noise has hit it or not, and IGNORE elsewhere."""
        raise NotImplementedError

    def windows(self, tokens: Tensor, documents: Tensor | None) -> Windows:
        """From tokens int64 [B, S+1] and their document numbers, negative on padding."""
        tokens = tokens[:, 1:]
        if documents is None:
            if self.config.documents == "mask":
                raise ValueError("objective.documents=mask needs data with document boundaries")
            return Windows(tokens, torch.ones_like(tokens, dtype=torch.bool), None)
        documents = documents[:, 1:]
        real = documents >= 0
        if self.config.documents == "mask":
            return Windows(tokens, real, documents)
        return Windows(tokens, real, None if real.all() else real.long())

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        """All tokens of the sequences, noised or not."""
        return {"tokens": count_labels(batches, "targets", IGNORE)}
