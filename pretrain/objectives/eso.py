"""Interpolation between autoregression and masked diffusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.attention import Mask, Visibility
from models.config import ModelConfig
from models.denoising import EPSILON, alpha
from models.losses import IGNORE, CrossEntropy, LogitGradient, LogitRows, Term
from parallel.stage import MicroBatch

from .base import OBJECTIVES
from .block import noisy_and_clean
from .diffusion import Diffusion, DiffusionConfig, Windows
from .noise import SampleNoise

SEQUENTIAL = "sequential"
"""Row field, bool: whether a row belongs to the sequential term, not to that of diffusion."""


@dataclass(frozen=True)
class TwoTerms(CrossEntropy):
    """Cross-entropy whose rows of the sequential term weigh ``sequential``, and those of diffusion
    what the field ``weights`` says, or 1 with ``flat``."""

    row_weights: str | None = "weights"
    sequential: float = 1.0
    flat: bool = False

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        weights = fields["weights"]
        noisy = torch.ones_like(weights) if self.flat else weights
        weights = torch.where(fields[SEQUENTIAL], self.sequential, noisy)
        return super().rows(rows, {**fields, "weights": weights})


def side_by_side(batches: Sequence[MicroBatch], dim: int) -> MicroBatch:
    """Micro-batches of one shape joined along their rows (0) or slots (1)."""
    columns = zip(*(batch.tensors() for batch in batches), strict=True)
    joined = (torch.cat(column, dim) for column in columns)
    return batches[0].map(lambda _: next(joined))


@OBJECTIVES.register("eso")
class Eso(Diffusion):
    """Eso-LM (Sahoo et al. 2025, arXiv 2506.01928): z_0 has each token masked with chance 1 − α0;
    what is masked in it is predicted from left to right, and how z_0 comes about is diffusion:

        NELBO = E_{z_0} Σ_{i masked in z_0} −log p(x[i] | z_0, x[j] for all masked j < i)
              + E_t E_{z_t} w Σ_{i masked in z_t} −log p(x[i] | z_t)

    with α(t) from α0 at t = 0 to about 0 at t = 1 and w = −α' / (1 − α).  α0 = 1 is masked
    diffusion, α0 = 0 autoregression.

    Attention lets a sampler cache what it has computed, because tokens are put in the order in
    which they become known: unmasked ones in a random order, then masked ones, from left to right
    in the sequential term and in a random order in the other; their positions go with them.
    Variant ``B`` is causal in that order.  In variant ``A`` unmasked tokens see each other.

    Diffusion needs n slots for n tokens, the sequential term 2n: [z_0 ; x], where a token of z_0
    sees those of x before it.  With 0 < α0 < 1 ``diffusion_share`` of the samples of every step
    serve the diffusion term, and to fill their slots each is noised twice, at times half a period
    apart; the others serve the sequential term.  Each term is divided by its own tokens.  In
    evaluation each sequence serves both.

    ``weighting: flat`` trains with w = 1, as in masked diffusion; what is reported and evaluated is
    the NELBO.
    """

    @dataclass(frozen=True)
    class Config(DiffusionConfig):
        alpha0: float = field(
            default=1.0, metadata={"help": "unmasked share that diffusion makes: 0 none, 1 all"}
        )
        variant: Literal["A", "B"] = field(
            default="B", metadata={"help": "unmasked tokens: A see each other, B are causal"}
        )
        weighting: Literal["elbo", "flat"] = field(
            default="elbo", metadata={"help": "of diffusion in training: the bound's, or 1"}
        )
        diffusion_share: float = field(
            default=0.5, metadata={"help": "0 < alpha0 < 1: samples of the diffusion term"}
        )

        @property
        def has_both(self) -> bool:
            return 0 < self.alpha0 < 1

        @property
        def canvas(self) -> int:
            return 1 if self.alpha0 == 1 else 2

        @property
        def judged(self) -> float:
            diffusion, sequential = 1 - self.alpha0 / 2, (1 - self.alpha0) / 2
            share = self.diffusion_share if self.has_both else self.alpha0
            return share * diffusion + (1 - share) * sequential

        def diffusion_samples(self, batch: int) -> int:
            """How many of the samples of a step serve the diffusion term, where there are both."""
            return min(max(round(self.diffusion_share * batch), 1), batch - 1)

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if not 0 <= self.alpha0 <= 1:
                found.append(("alpha0", f"must be in [0, 1], got {self.alpha0}"))
            if not 0 < self.diffusion_share < 1:
                text = f"must be between 0 and 1, got {self.diffusion_share}"
                found.append(("diffusion_share", text))
            idle = [name for name in ("variant", "weighting") if not self.alpha0]
            idle += [] if self.has_both else ["diffusion_share"]
            for name in idle:
                if getattr(self, name) != getattr(type(self), name):
                    text = f"is set but alpha0={self.alpha0:g}: it would be ignored"
                    found.append((name, text))
            return found

        def training_problems(self, sequence_length: int, batch: int) -> list[tuple[str, str]]:
            if not self.has_both or batch > 1:
                return []
            return [("alpha0", "between 0 and 1 needs two samples per step, one for each term")]

        def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
            found = super().model_problems(model) + self.needs_mask_token(model)
            return found + (self.needs_positions(model) if self.alpha0 else [])

    config: Config

    def noised(
        self, windows: Windows, sample_indices: Sequence[int], noise: SampleNoise
    ) -> MicroBatch:
        rows, documents = [], windows.documents
        if documents is None and self.config.has_both:  # they keep what is side by side apart
            documents = torch.zeros_like(windows.tokens)
        for row, index in enumerate(sample_indices):
            only = slice(row, row + 1)
            seen = None if documents is None else documents[only]
            one = Windows(windows.tokens[only], windows.real[only], seen)
            rows += self._sample(one, index, noise)
        return side_by_side(rows, 0)

    def _sample(self, one: Windows, index: int, noise: SampleNoise) -> list[MicroBatch]:
        """The rows that one sample becomes: of one term in training, of both in evaluation."""
        uniform = noise.uniform(index, 1 + 3 * one.tokens.shape[1])
        level, orders = noise.stratified(index, float(uniform[0])), uniform[1:].reshape(3, -1)
        if self.config.alpha0 == 1:
            return [self._diffused(one, orders[0], level)]
        if self.config.alpha0 == 0:
            return [self._sequential(one, orders[2])]
        if noise is not self.training:
            return [self._twice(one, orders, level), self._sequential(one, orders[2])]
        place, share = level * noise.batch, self.config.diffusion_samples(noise.batch)
        if place < share:
            return [self._twice(one, orders, place / share)]
        return [self._sequential(one, orders[2])]

    def _twice(self, one: Windows, orders: np.ndarray, level: float) -> MicroBatch:
        """Noised at two times, neither of which sees the other."""
        assert one.documents is not None
        return side_by_side([
            self._diffused(replace(one, documents=2 * one.documents + copy), orders[copy],
                           (level + copy / 2) % 1)
            for copy in range(2)
        ], 1)  # fmt: skip

    def _diffused(self, one: Windows, order: np.ndarray, level: float) -> MicroBatch:
        chance, weight = self.chance(level)
        hidden = torch.from_numpy(order < chance) & one.real
        # Given which tokens are masked, their numbers are independent and uniform below ``chance``,
        # the others' above it: both kinds are in a random order.
        return self.diffused(one, hidden, -torch.from_numpy(order), weight)

    def _sequential(self, one: Windows, order: np.ndarray) -> MicroBatch:
        hidden = torch.from_numpy(order < 1 - self.config.alpha0) & one.real
        return self.sequential(one, hidden, -torch.from_numpy(order))

    def chance(self, level: float) -> tuple[float, float]:
        """1 − α and w = −α' / (1 − α) at the time of this level of noise, in (0, 1)."""
        time = np.asarray(EPSILON + (1 - EPSILON) * level)
        chance = 1 - self.config.alpha0 * float(alpha(time))
        return chance, self.config.alpha0 * (1 - EPSILON) / chance

    def diffused(self, one: Windows, hidden: Tensor, order: Tensor, weight: float) -> MicroBatch:
        """Of one sequence: unmasked tokens, those that are ``hidden`` (bool [1, n]), padding, each
        by ``order`` (float64 [n])."""
        place, stage = self._sorted(one, hidden, order)
        slots = -torch.arange(1, place.shape[1] + 1)[None]
        mask: Mask = Visibility(stage, stage, slots)
        if self.config.alpha0 == 1 and self.config.variant == "B":
            mask = "causal"
        return self._row(one, hidden, place, mask, weight)

    def sequential(self, one: Windows, hidden: Tensor, order: Tensor) -> MicroBatch:
        """The same with hidden tokens from left to right, and the clean sequence behind it."""
        natural = torch.arange(len(order), dtype=order.dtype)
        place, stage = self._sorted(one, hidden, torch.where(hidden[0], natural, order))
        noisy = self._row(one, hidden, place, noisy_and_clean(stage), 1.0, sequential=True)
        clean = self._row(one, torch.zeros_like(hidden), place, noisy.mask, 1.0, sequential=True)
        clean.fields["targets"] = torch.full_like(place, IGNORE)
        both = side_by_side([replace(x, mask="causal") for x in (noisy, clean)], 1)
        return replace(both, mask=noisy.mask)

    def _sorted(self, one: Windows, hidden: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Position of the token in each slot, and when it becomes known, both int64 [1, n]."""
        kind = torch.where(one.real, hidden.long(), 2)[0]
        by_order = order.argsort(stable=True)
        place = by_order[kind[by_order].argsort(stable=True)][None]
        if self.config.variant == "A":
            return place, hidden.gather(1, place).cumsum(1)
        return place, torch.arange(place.shape[1])[None]

    def _row(
        self, one: Windows, hidden: Tensor, place: Tensor, mask: Mask, weight: float,
        sequential: bool = False,
    ) -> MicroBatch:  # fmt: skip
        """One slot per token, in the order of ``place``."""
        tokens, masked, real = (x.gather(1, place) for x in (one.tokens, hidden, one.real))
        fields = {
            "targets": tokens.masked_fill(~real, IGNORE),
            "labels": tokens.masked_fill(~masked, IGNORE),
            "weights": masked * torch.tensor(weight, dtype=torch.float64),
            SEQUENTIAL: torch.full_like(masked, sequential),
        }
        documents = None if one.documents is None else one.documents.gather(1, place)
        ids = tokens.masked_fill(masked, self.model.mask_id)
        return MicroBatch(ids, fields, mask, documents, place)

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Tokens of each term, noised or not; in diffusion, of both times."""
        targets = [(b.fields["targets"] != IGNORE, b.fields[SEQUENTIAL]) for b in batches]
        found = {}
        if self.config.alpha0 > 0:
            found["diffusion"] = sum(int((real & ~ordered).sum()) for real, ordered in targets)
        if self.config.alpha0 < 1:
            found[SEQUENTIAL] = sum(int((real & ordered).sum()) for real, ordered in targets)
        return found

    def terms(self, counts: dict[str, int]) -> list[Term]:
        bound = self._bound(counts)
        if self.config.weighting == "elbo":
            return [bound]
        return [replace(bound, weight=0.0), replace(bound, name="flat", flat=True)]

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        return [self._bound(counts)]

    def _bound(self, counts: dict[str, int]) -> TwoTerms:
        diffusion, sequential = counts.get("diffusion", 0), counts.get(SEQUENTIAL, 0)
        count = float(max(diffusion or sequential, 1))
        return TwoTerms(count, name=self.primary, sequential=count / max(sequential, 1))
