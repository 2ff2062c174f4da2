"""Samplers of masked diffusion that choose which tokens to keep: at random, by confidence, by a
threshold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .decoding import Sampling, draw
from .denoising import SAMPLERS, Canvas, Denoiser, RowNoise, Sampler, record

Order = Literal["confidence", "margin", "entropy", "random"]


def certainty(chances: Tensor, tokens: Tensor, order: Order) -> Tensor:
    """How sure a model is of tokens int64 [n], whose distributions are float64 [n, V]: the chance
    of the token, the lead of the likeliest over the second, or minus the entropy."""
    if order == "margin":
        first, second = chances.topk(min(2, chances.shape[-1])).values.unbind(-1)
        return first - second
    if order == "entropy":
        return -torch.special.entr(chances).sum(-1)
    return chances.gather(-1, tokens[:, None]).squeeze(-1)


def ranks(scores: Tensor) -> Tensor:
    """Place of each score [B, n] in its row, 0 for the highest; the left one of equals first."""
    return scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)


class _Unmasking(Sampler):
    """Predicts all hidden tokens, keeps some of them, hides the others again."""

    ORDER: ClassVar[Order] = "confidence"  # of a sampler whose config has none

    def __init__(self, config: Any, sampling: Sampling | None = None) -> None:
        super().__init__(config, sampling)
        self.order: Order = getattr(config, "order", self.ORDER)

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        window, step = canvas.window, 0
        first = denoiser.hidden(canvas).sum(1)
        while (hidden := denoiser.hidden(canvas)).any():
            before = window.clone()
            tokens, scores = self.propose(denoiser(canvas), hidden, noise)
            kept = hidden & self.keeps(ranks(scores), scores, first, step)
            window[kept] = tokens[kept]
            record(committed, before, window)
            step += 1

    def propose(self, logits: Tensor, hidden: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Tokens int64 and scores float64, both [B, n]; −inf where nothing is hidden."""
        rows = logits[hidden]
        if self.sampling.temperature == 0:
            chosen = rows.argmax(-1)
        else:
            chosen = draw(self.chances(rows), noise.uniform(hidden.shape[1])[hidden])
        tokens = torch.zeros_like(hidden, dtype=torch.long)
        tokens[hidden] = chosen
        if self.order == "random":
            scores = noise.uniform(hidden.shape[1])
        else:
            scores = torch.empty(hidden.shape, dtype=torch.float64, device=hidden.device)
            scores[hidden] = certainty(rows.double().softmax(-1), chosen, self.order)
        return tokens, scores.masked_fill(~hidden, -torch.inf)

    def keeps(self, rank: Tensor, scores: Tensor, first: Tensor, step: int) -> Tensor:
        """Which tokens stay, bool [B, n], of those that are hidden.  first: how many of each row
        were hidden in the beginning, int64 [B]."""
        raise NotImplementedError


@SAMPLERS.register("first_hitting")
class FirstHitting(_Unmasking):
    """One token at a time in random order: what ancestral sampling comes to with infinitely many
    steps (Zheng et al. 2024, arXiv 2409.02908).  When a token appears would only matter to a model
    that is told the time."""

    @dataclass(frozen=True)
    class Config:
        pass

    ORDER: ClassVar[Order] = "random"

    def keeps(self, rank: Tensor, scores: Tensor, first: Tensor, step: int) -> Tensor:
        return rank == 0


@SAMPLERS.register("remasking")
class Remasking(_Unmasking):
    """As many tokens in every step, the most certain ones: LLaDA's low-confidence remasking (Nie et
    al. 2025, arXiv 2502.09992) and, by ``order``, Dream's (arXiv 2508.15487).  Of M tokens, each of
    ``steps`` steps keeps ⌊M/steps⌋ and the first M mod steps one more.

    With one token per step, ``random``, ``margin`` and ``entropy`` draw from the model's
    distribution; ``confidence`` does not, for it prefers places where a likely token was drawn."""

    @dataclass(frozen=True)
    class Config:
        steps: int | None = field(
            default=None, metadata={"help": "steps until all are known; null: one token in each"}
        )
        order: Order = field(default="confidence", metadata={"help": "which tokens come first"})

        def problems(self) -> list[tuple[str, str]]:
            if self.steps is None or self.steps > 0:
                return []
            return [("steps", f"must be positive, got {self.steps}")]

    temperature: ClassVar[float] = 0.0

    def keeps(self, rank: Tensor, scores: Tensor, first: Tensor, step: int) -> Tensor:
        if self.config.steps is None:
            return rank == 0
        quota = first // self.config.steps + (step < first % self.config.steps)
        return rank < quota[:, None]


@SAMPLERS.register("threshold")
class Threshold(_Unmasking):
    """All tokens of which the model is sure enough, and always the surest (Fast-dLLM: Wu et al.
    2025, arXiv 2505.22618)."""

    @dataclass(frozen=True)
    class Config:
        threshold: float = field(default=0.9, metadata={"help": "least chance of a token, τ"})
        most: int | None = field(default=None, metadata={"help": "most tokens in a step"})

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if self.threshold <= 0:
                found.append(("threshold", f"must be positive, got {self.threshold}"))
            if self.most is not None and self.most < 1:
                found.append(("most", f"must be positive, got {self.most}"))
            return found

    temperature: ClassVar[float] = 0.0

    def keeps(self, rank: Tensor, scores: Tensor, first: Tensor, step: int) -> Tensor:
        sure = scores >= self.config.threshold
        if self.config.most is not None:
            sure &= rank < self.config.most
        return sure | (rank == 0)
