"""Masked diffusion: tokens hide behind a mask token, and are predicted from those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from models.config import ModelConfig
from models.losses import IGNORE, CrossEntropy, Term
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .diffusion import EPSILON, Diffusion, DiffusionConfig, Windows, alpha
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
            return super().model_problems(model) + self.needs_mask_token(model)

    config: Config

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        tokens = windows.tokens
        masked = torch.zeros_like(windows.real)
        weights = torch.zeros(tokens.shape, dtype=torch.float64)
        for row, index in enumerate(sample_indices):
            real = windows.real[row].numpy()
            hidden, weight = self._draw(noise, index, int(real.sum()))
            masked[row, windows.real[row]] = torch.from_numpy(hidden)
            weights[row] = weight
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

    def _draw(self, noise: SampleNoise, index: int, count: int) -> tuple[np.ndarray, float]:
        """Which of ``count`` tokens are masked, and the weight of each of them."""
        first, *each = noise.uniform(index, count + 1).tolist()
        level = noise.stratified(index, first)
        order = np.asarray(each)
        if self.config.estimator == "time":
            time = EPSILON + (1 - EPSILON) * level
            return order < 1 - float(alpha(torch.tensor(time, dtype=torch.float64))), 1 / time
        masks = min(int(level * count) + 1, count)
        return order.argsort().argsort() < masks, count / max(masks, 1)

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
