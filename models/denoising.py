"""What samplers of diffusion models work on: sequences that are being filled, a denoiser that
predicts them, random numbers of their own, and what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .decoding import Sampling, hash_seed, probabilities
from .families import Family
from .registry import Registry

EPSILON = 1e-3
"""α at time 1, and the smallest time that is drawn in training."""

LAST_TIME = 1e-5


def alpha(time: Any) -> Any:
    """Chance that a token is still itself at ``time``, a number or an array: 1 at 0, ε at 1.
    Training and sampling share it."""
    return 1 - (1 - EPSILON) * time


@dataclass
class Canvas:
    """Sequences that are being filled.

    ids: int64 [B, S].  real: bool [B, S], False on padding, which is on the left.  prompt: columns
    that were given (or are padding).  begin, end: the columns that are being filled now; samplers
    write into those of ``ids`` in place, and all columns before them are final.  eos: what ends a
    text, so that nothing behind it matters.
    """

    ids: Tensor
    real: Tensor
    prompt: int
    begin: int
    end: int
    eos: int | None = None

    @property
    def window(self) -> Tensor:
        """The columns that are being filled, a view [B, end - begin]."""
        return self.ids[:, self.begin : self.end]

    def part(self, begin: int, end: int) -> Canvas:
        """The same sequences (not a copy), of which other columns are being filled."""
        return Canvas(self.ids, self.real, self.prompt, begin, end, self.eos)


class Denoiser:
    """Predicts tokens.  A subclass gives ``logits``; calling it counts.

    family: which diffusion the model was trained for.  vocabulary: ids that can be predicted, the
    first ones; a mask token and padding of the vocabulary are none of them.  mask_id: None without.
    calls: forward passes since it was made; sequences: how many sequences went through them.
    stateful: what it computes depends on calls before, so that every call must be of the same rows.
    """

    stateful = False
    block_size = 1  # tokens that are filled together at multiples of this many
    device = torch.device("cpu")

    def __init__(self, family: Family, vocabulary: int, mask_id: int | None = None) -> None:
        self.family, self.vocabulary, self.mask_id = family, vocabulary, mask_id
        self.calls = self.sequences = 0

    def reset(self) -> None:
        """Other sequences follow."""

    def __call__(self, canvas: Canvas, noise: float = 0.0) -> Tensor:
        """Logits [B, end - begin, vocabulary] of the columns that are being filled.  noise: σ =
        −log α of the sequences, for a model that is told."""
        self.calls += 1
        self.sequences += canvas.ids.shape[0]
        return self.logits(canvas, noise)[..., : self.vocabulary]

    def hidden(self, canvas: Canvas) -> Tensor:
        """Which columns that are being filled hold a mask, bool [B, end - begin]."""
        assert self.mask_id is not None
        return torch.eq(canvas.window, self.mask_id)

    def logits(self, canvas: Canvas, noise: float) -> Tensor:
        """Like a call; columns of the vocabulary behind ``vocabulary`` are cut off."""
        raise NotImplementedError


class RowNoise:
    """Uniform numbers, a stream per sequence: of the seed and the number of the sequence alone."""

    CHUNK: ClassVar[int] = 256

    def __init__(self, seed: int, rows: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(hash_seed(seed, row)) for row in rows]
        self._left = torch.empty(len(rows), 0, dtype=torch.float64, device=device)

    def uniform(self, count: int) -> Tensor:
        """float64 [B, count] in [0, 1)."""
        while self._left.shape[1] < count:
            chunk = torch.empty(len(self._generators), self.CHUNK, dtype=torch.float64)
            for row, generator in zip(chunk, self._generators):
                torch.rand(self.CHUNK, generator=generator, out=row)
            self._left = torch.cat([self._left, chunk.to(self._left.device)], 1)
        taken, self._left = self._left[:, :count], self._left[:, count:]
        return taken


@dataclass
class Report:
    """What sampling took: forward passes, sequences that went through them, and how many tokens
    each sequence got, or changed, in each of its steps."""

    calls: int = 0
    sequences: int = 0
    committed: list[list[int]] = field(default_factory=list)


class Sampler:
    """Registered class built as ``Sampler(config, sampling)``: a way to fill a canvas.

    families: what it fits.  temperature: of the tokens, unless told.  ``sampling`` shapes the
    distribution that tokens are drawn from.
    """

    families: ClassVar[tuple[Family, ...]] = ("masked",)
    temperature: ClassVar[float] = 1.0

    def __init__(self, config: Any, sampling: Sampling | None = None) -> None:
        self.config = config
        self.sampling = Sampling(self.temperature) if sampling is None else sampling

    def check(self, denoiser: Denoiser) -> None:
        """ValueError unless the two fit."""
        if denoiser.family not in self.families:
            name, fits = SAMPLERS.name_of(type(self.config)), " or ".join(self.families)
            raise ValueError(
                f"sampler={name} is for {fits} diffusion; this model {_REASONS[denoiser.family]}"
            )
        self.check_settings(denoiser)

    def check_settings(self, denoiser: Denoiser) -> None:
        """ValueError for settings that fit no model, or not this one."""
        if self.sampling.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty is for autoregressive models: tokens have no order"
            )

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        """Fill the window of ``canvas``, whose contents do not matter at first where a denoiser has
        no mask token, and else are masks and final tokens.  ``committed``: see ``Report``."""
        raise NotImplementedError

    def chances(self, logits: Tensor) -> Tensor:
        """Probabilities float64 [..., V] that tokens are drawn from."""
        return probabilities(logits.flatten(0, -2), self.sampling).view(logits.shape)


SAMPLERS = Registry("sampler")

_REASONS: dict[Family, str] = {
    "masked": "hides tokens behind a mask token",
    "uniform": "has no mask token, and any token may change until the end (try ancestral)",
    "block": "fills blocks of a fixed size from left to right (use blocks)",
    "eso": "sees tokens in the order in which they came (use eso)",
    "causal": "is autoregressive: it is sampled from left to right, without a sampler",
}


def record(committed: list[list[int]], before: Tensor, after: Tensor) -> None:
    """Note a step: how many columns of each row changed."""
    for steps, count in zip(committed, (before != after).sum(1).tolist()):
        steps.append(count)
