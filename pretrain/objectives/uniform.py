"""Uniform-state diffusion: tokens are replaced by others, and every one may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.attention import Mixture
from models.config import ModelConfig
from models.denoising import EPSILON
from models.losses import IGNORE, CrossEntropy, Term
from models.uniform_state import UniformState
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .diffusion import Diffusion, DiffusionConfig, Windows
from .gaussian import Curriculum, operator, soften, window
from .noise import SampleNoise


@dataclass(frozen=True)
class Corruption:
    """A noised sequence of n tokens.  ids: int64 [n].  alpha: of its time; rate: −α'/α there.
    soft: what the model reads instead, ids and weights [n, k], or None."""

    ids: np.ndarray
    alpha: float
    rate: float
    soft: tuple[np.ndarray, np.ndarray] | None = None


@OBJECTIVES.register("uniform")
class Uniform(Diffusion):
    """UDLM and Duo (Schiff et al. 2024, arXiv 2412.10193; Sahoo et al. 2025, arXiv 2506.10892):
    each token is replaced, with chance 1 − α(t), by a uniform draw from the K that the model can
    predict, which may be the token itself.  The loss is the bound in continuous time that
    ``models/uniform_state.py`` has, per token, noised or not, with t spread evenly over the global
    batch.  What minimises it is p(x[i] | all z but z[i]): a model sees z[i] and must look away.

    The model is told σ = −log α of every slot, and may use it or not.  ``denoising`` is the cross-
    entropy of x, for information.

    Rows are rare and dear at both ends of time: a replaced token near t = 0 counts 1/t times the
    cross-entropy of x, one that is still itself near t = 1 up to 1/α nats.  ``clip`` bounds what a
    row counts in training; the NELBO is reported beside it, and evaluation knows no clip.

    ``curriculum`` (Sahoo et al. 2025): in the first steps the model reads softmax(w/τ), a mixture
    of tokens, where z = argmax w (``gaussian.py``), with noise levels from α = 0.95 to 0.05 alone.
    What is then reported as NELBO is that of softer inputs over a part of time, and no bound;
    evaluation does not change.
    """

    @dataclass(frozen=True)
    class Config(DiffusionConfig):
        clip: float | None = field(
            default=None, metadata={"help": "nats that a token counts at most in training"}
        )
        curriculum: Curriculum = field(
            default=Curriculum(), metadata={"help": "soft inputs in the first steps"}
        )

        def problems(self) -> list[tuple[str, str]]:
            if self.clip is not None and not self.clip > 0:
                return [("clip", f"must be positive, got {self.clip}")]
            return []

        def notes(self) -> list[str]:
            steps = self.curriculum.steps
            if not steps:
                return []
            return [
                f"soft inputs up to step {steps} (objective.curriculum): what the console calls "
                "bound is none in training until then, only in evaluation"
            ]

        def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
            found = super().model_problems(model)
            if model.predicted_vocab_size < 2:
                text = "replaces tokens by others: the vocabulary needs two that can be predicted"
                found.append(("type", text))
            return found

    config: Config

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        found = []
        for index, tokens, real in zip(sample_indices, windows.tokens, windows.real, strict=True):
            soft = noise is self.training and index // noise.batch < self.config.curriculum.steps
            corrupt = self._soft if soft else self._replaced
            found.append(corrupt(noise, index, tokens[real].numpy()))
        ids = windows.tokens.clone()
        for row, new in enumerate(found):
            ids[row, windows.real[row]] = torch.from_numpy(new.ids)
        times = torch.tensor([(new.alpha, new.rate) for new in found], dtype=torch.float64)
        alpha, rate = times[:, :, None].unbind(1)
        fields = {
            "targets": windows.tokens.masked_fill(~windows.real, IGNORE),
            "noisy": ids,
            "odds": (alpha / (1 - alpha)).repeat(1, ids.shape[1]),
            "rate": rate.repeat(1, ids.shape[1]),
        }
        return MicroBatch(
            ids, fields, "bidirectional", windows.documents, noise=-alpha.log(),
            mixture=_mixture(ids, windows.real, [new.soft for new in found]),
        )  # fmt: skip

    def _replaced(self, noise: SampleNoise, index: int, tokens: np.ndarray) -> Corruption:
        first, *each = noise.uniform(index, 1 + len(tokens)).tolist()
        time = EPSILON + (1 - EPSILON) * noise.stratified(index, first)
        gone = (1 - EPSILON) * time
        # a number below the chance of a replacement is, divided by it, uniform again
        drawn, classes = np.asarray(each) / gone, self.model.predicted_vocab_size
        other = np.minimum(drawn * classes, classes - 1).astype(np.int64)
        ids = np.where(drawn < 1, other, tokens)
        return Corruption(ids, 1 - gone, (1 - EPSILON) / (1 - gone))

    def _soft(self, noise: SampleNoise, index: int, tokens: np.ndarray) -> Corruption:
        count, options = len(tokens), self.config.curriculum
        each = 2 * options.candidates + 1
        first, numbers = np.split(noise.uniform(index, 1 + count * each), [1])
        classes = self.model.predicted_vocab_size
        begin, end = window(classes)
        gamma = begin + (end - begin) * noise.stratified(index, float(first[0]))
        alpha, slope = operator(gamma, classes)
        ids, weights = soften(tokens, numbers.reshape(count, each), gamma, classes, options)
        return Corruption(ids[:, 0], alpha, -slope * (end - begin) / alpha, (ids, weights))

    def terms(self, counts: dict[str, int]) -> list[Term]:
        bound, clip = self._bound(counts), self.config.clip
        count = bound.normalizer
        denoising = CrossEntropy(count, weight=0.0, name="denoising", labels="targets")
        if clip is None:
            return [bound, denoising]
        return [UniformState(count, weight=0.0), UniformState(count, name="clipped", clip=clip),
                denoising]  # fmt: skip

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        return [self._bound(counts)]

    def _bound(self, counts: dict[str, int]) -> UniformState:
        return UniformState(float(max(counts["tokens"], 1)), name=self.primary)


def _mixture(
    ids: Tensor, real: Tensor, soft: Sequence[tuple[np.ndarray, np.ndarray] | None]
) -> Mixture | None:
    """What the slots of ``ids`` [B, S] are mixtures of, where any of them is."""
    kept = max((pair[0].shape[1] for pair in soft if pair is not None), default=0)
    if not kept:
        return None
    many = ids[:, :, None].repeat(1, 1, kept)
    weights = torch.zeros(many.shape, dtype=torch.float64)
    weights[:, :, 0] = 1
    for row, pair in enumerate(soft):
        if pair is not None:
            many[row, real[row]], weights[row, real[row]] = map(torch.from_numpy, pair)
    return Mixture(many, weights)
