"""Sampling from models that see tokens in the order in which they became known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .decoding import draw, padded_positions
from .denoisers import SlotCache, SlotContext, TransformerDenoiser
from .denoising import (
    LAST_TIME,
    SAMPLERS,
    Canvas,
    Denoiser,
    RowNoise,
    Sampler,
    alpha,
    record,
)
from .families import Family
from .transformer import Head, Transformer

Columns = Sequence[Sequence[int]]
"""Columns of every sequence, in order; not equally many."""


def side_by_side(columns: Columns, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [B, longest], filled up with 0, and which of them there are, bool [B, longest]."""
    width = max(map(len, columns))
    rows = [[*row, *[0] * (width - len(row))] for row in columns]
    lengths = torch.tensor([len(row) for row in columns], device=device)
    return torch.tensor(rows, device=device), torch.arange(width, device=device) < lengths[:, None]


class OrderedDenoiser(Denoiser):
    """Predicts tokens from those that are known, in order; ``alpha0``: the share of tokens whose
    order is random, while the others come from left to right."""

    alpha0: float = 1.0

    def ask(
        self, canvas: Canvas, known: Columns, together: Sequence[int], asked: Columns
    ) -> Tensor:
        """Logits [B, most asked, vocabulary] of the masked columns that each sequence asks for.

        known: its columns that are known, in the order in which they became so, which only ever
        grows.  together: how many of them, the first ones, the prompt or diffusion made.
        """
        self.calls += 1
        self.sequences += canvas.ids.shape[0]
        return self.answers(canvas, known, together, asked)[..., : self.vocabulary]

    def answers(
        self, canvas: Canvas, known: Columns, together: Sequence[int], asked: Columns
    ) -> Tensor:
        raise NotImplementedError


class EsoDenoiser(TransformerDenoiser, OrderedDenoiser):
    """An Eso-LM (Sahoo et al. 2025, arXiv 2506.01928).  Variant ``B`` is causal in the order of
    tokens, so that keys and values of known ones are kept, which changes nothing; a pass is over
    what became known since the last one, and what is asked.  In variant ``A`` the tokens that
    diffusion made see each other, and every pass is over all that is known.
    """

    def __init__(
        self,
        model: Transformer,
        alpha0: float = 1.0,
        variant: Literal["A", "B"] = "B",
        use_cache: bool = True,
        head: Head | None = None,
    ) -> None:
        super().__init__(model, "eso", head)
        self.alpha0, self.variant = alpha0, variant
        self.use_cache = use_cache and variant == "B"
        self.stateful = self.use_cache
        self.reset()

    def reset(self) -> None:
        self._store: SlotCache | None = None
        self._kept: list[int] = []  # how many known columns of each sequence are in the store
        self._positions = torch.empty(0)  # of what is in its slots

    def answers(
        self, canvas: Canvas, known: Columns, together: Sequence[int], asked: Columns
    ) -> Tensor:
        device, (rows, length) = canvas.ids.device, canvas.ids.shape
        kept = self._kept or [0] * rows
        fed = [[*row[k:], *more] for row, k, more in zip(known, kept, asked)]
        column, there = side_by_side(fed, device)
        offset = torch.tensor(kept, device=device)[:, None]
        old = torch.tensor([len(row) for row in known], device=device)[:, None]
        slot = torch.arange(column.shape[1], device=device) + offset
        stage = slot
        if self.variant == "A":
            stage = (slot + 1 - torch.tensor(together, device=device)[:, None]).clamp(min=0)
        stage = stage.where(there, length)  # what is not there sees all, and none of those sees it
        ids = canvas.ids.gather(1, column).masked_fill(slot >= old, self.mask_id or 0)
        positions = padded_positions(canvas.real).gather(1, column)
        of_keys, at_keys = stage, positions
        if self.use_cache:
            if self._store is None:
                self._store = SlotCache(length + 1)  # the last slot takes what is not there
                self._positions = positions.new_zeros(rows, length + 1)
            self._store.slots = slot.where(there, length)
            of_keys = torch.arange(length + 1, device=device)[None]
            at_keys = self._positions = self._positions.scatter(1, self._store.slots, positions)
            self._kept = [len(row) for row in known]
        visible = (of_keys[:, None] <= stage[:, :, None])[:, None]
        context = SlotContext(
            positions, "bidirectional", store=self._store, visible=visible, key_positions=at_keys
        )
        hidden = self.model(ids, context)
        place = old - offset + torch.arange(max(map(len, asked)), device=device)
        place = place.clamp(max=column.shape[1] - 1)[..., None]
        return self.head(hidden.gather(1, place.expand(-1, -1, hidden.shape[-1])))


@SAMPLERS.register("eso")
class Eso(Sampler):
    """First diffusion: along a grid of times, as many random tokens appear in every step as they
    would in ancestral sampling, until each is known with chance α0.  Then the others, from left to
    right, one at a time.  What appears in one step is asked in a random order."""

    @dataclass(frozen=True)
    class Config:
        steps: int = field(default=64, metadata={"help": "steps of diffusion"})

        def problems(self) -> list[tuple[str, str]]:
            return [] if self.steps > 0 else [("steps", f"must be positive, got {self.steps}")]

    families: ClassVar[tuple[Family, ...]] = ("eso",)

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        assert isinstance(denoiser, OrderedDenoiser)
        known = [row[: canvas.begin].nonzero().flatten().tolist() for row in canvas.real]
        width = canvas.end - canvas.begin
        grid = torch.linspace(1, LAST_TIME, self.config.steps + 1, dtype=torch.float64).tolist()
        levels = [denoiser.alpha0 * alpha(time) for time in (*grid[:-1], 0.0)]
        for alpha_t, alpha_s in itertools.pairwise(levels if denoiser.alpha0 else ()):
            chance, order = noise.uniform(2 * width).chunk(2, 1)
            appears = denoiser.hidden(canvas) & (chance < (alpha_s - alpha_t) / (1 - alpha_t))
            turn = order.masked_fill(~appears, 2.0).argsort(1) + canvas.begin
            asked = [row[:n] for row, n in zip(turn.tolist(), appears.sum(1).tolist())]
            together = [len(row) for row in known]
            self._reveal(denoiser, canvas, known, together, asked, noise, committed)
        together = [len(row) for row in known]
        left = [
            (row.nonzero().flatten() + canvas.begin).tolist() for row in denoiser.hidden(canvas)
        ]
        for turns in itertools.zip_longest(*left):
            asked = [[] if column is None else [column] for column in turns]
            self._reveal(denoiser, canvas, known, together, asked, noise, committed)

    def _reveal(
        self,
        denoiser: OrderedDenoiser,
        canvas: Canvas,
        known: list[list[int]],
        together: list[int],
        asked: list[list[int]],
        noise: RowNoise,
        committed: list[list[int]],
    ) -> None:
        """Draw the tokens of the columns that are asked for; ``known`` takes them up."""
        before = canvas.window.clone()
        which = noise.uniform(canvas.end - canvas.begin)
        if any(asked):
            chances = self.chances(denoiser.ask(canvas, known, together, asked))
            column, there = side_by_side(asked, canvas.ids.device)
            uniform = which.gather(1, (column - canvas.begin).clamp(min=0))
            row = torch.arange(len(asked), device=column.device)[:, None].expand_as(column)
            canvas.ids[row[there], column[there]] = draw(chances[there], uniform[there])
        for columns, more in zip(known, asked):
            columns.extend(more)
        record(committed, before, canvas.window)
