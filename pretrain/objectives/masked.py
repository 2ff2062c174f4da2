"""Masked diffusion: tokens hide behind a mask token, and are predicted from those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig
from models.denoising import EPSILON, alpha
from models.losses import IGNORE, CrossEntropy, Term
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .diffusion import Diffusion, DiffusionConfig, Windows
from .noise import SampleNoise


@OBJECTIVES.register("masked")
class Masked(Diffusion):
    """MDLM (Sahoo et al. 2024, arXiv 2406.07524): each token is masked with chance 1 − α(t), and

        NELBO = E_t E_z [ w Σ_{i masked} −log p(x[i] | z) ]    per token, masked or not,

    with w = −α'/(1 − α) = 1/t for ``estimator: time``, t in (ε, 1].  ``count`` draws k ~ U{1 … n},
    masks exactly k of the n tokens and has w = n/k: the same expectation with less variance (Ou et
    al. 2024, arXiv 2406.03736; Nie et al. 2025, arXiv 2502.09992).  Both are spread evenly over the
    global batch.

    ``weighting: flat`` trains with w = 1, which moves weight from lightly to heavily masked
    sequences (the low-variance loss of arXiv 2602.15014).  That is no bound: what is reported and
    evaluated is the NELBO.
    """

    @dataclass(frozen=True)
    class Config(DiffusionConfig):
        weighting: Literal["elbo", "flat"] = field(
            default="elbo", metadata={"help": "of a masked token in training: the bound's, or 1"}
        )
        estimator: Literal["time", "count"] = field(
            default="time", metadata={"help": "what is drawn: a time, or how many are masked"}
        )

        @property
        def judged(self) -> float:
            return 0.5

        def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
            found = super().model_problems(model) + self.needs_mask_token(model)
            return found + (self.needs_positions(model) if self.hides_several else [])

        @property
        def hides_several(self) -> bool:
            """Whether a token may have to be predicted beside other hidden ones."""
            return True

    config: Config

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        tokens = windows.tokens
        masked, weights = self.hide(windows, sample_indices, noise)
        return MicroBatch(
            tokens.masked_fill(masked, self.model.mask_id),
            {
                "targets": tokens.masked_fill(~windows.real, IGNORE),
                "labels": tokens.masked_fill(~masked, IGNORE),
                "weights": weights * masked,
            },
            "bidirectional",
            windows.documents,
        )

    def hide(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise, blocks: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Which tokens are masked, bool [B, S], and what the loss of one weighs, float64 [B, S].
        Each of so many ``blocks`` of a sequence has a time, or a number of masks, of its own."""
        masked = np.zeros(windows.real.shape, dtype=bool)
        weights = np.zeros(windows.real.shape)
        every = np.arange(blocks)
        for row, index in enumerate(sample_indices):
            uniform = noise.uniform(index, blocks + windows.real.shape[1])
            level = noise.stratified(index, uniform[:blocks], blocks, every)
            order = uniform[blocks:].reshape(blocks, -1)
            real = windows.real[row].numpy().reshape(blocks, -1)
            chosen, weight = self._draw(self.level(level, noise), order, real)
            masked[row], weights[row] = chosen.ravel(), weight.repeat(order.shape[1])
        return torch.from_numpy(masked), torch.from_numpy(weights)

    def level(self, uniform: np.ndarray, noise: SampleNoise) -> np.ndarray:
        """How noisy a sequence or block is, from 0 to 1, for numbers spread evenly over (0, 1)."""
        return uniform

    def _draw(
        self, level: np.ndarray, order: np.ndarray, real: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of each block are masked [blocks, n], and their weight [blocks].  order:
        random numbers of the tokens [blocks, n].  real: which of them there are [blocks, n]."""
        if self.config.estimator == "time":
            time = EPSILON + (1 - EPSILON) * level
            return (order < (1 - alpha(time))[:, None]) & real, 1 / time
        count = real.sum(1)
        masks = np.minimum((level * count).astype(np.int64) + 1, count)
        place = np.where(real, order, 1.0).argsort(1).argsort(1)
        return place < masks[:, None], count / np.maximum(masks, 1)

    def terms(self, counts: dict[str, int]) -> list[Term]:
        bound = self._bound(counts)
        if self.config.weighting == "elbo":
            return [bound]
        flat = CrossEntropy(bound.normalizer, name="flat")
        return [CrossEntropy(bound.normalizer, weight=0.0, name=bound.name, row_weights="weights"),
                flat]  # fmt: skip

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        return [self._bound(counts)]

    def _bound(self, counts: dict[str, int]) -> CrossEntropy:
        count = float(max(counts["tokens"], 1))
        return CrossEntropy(count, name=self.primary, row_weights="weights")
