"""SOAR, which searches over the order of tokens where a model is unsure, and else accelerates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .denoising import SAMPLERS, Canvas, Denoiser, RowNoise, Sampler


@dataclass(frozen=True)
class _Member:
    """A partly filled window of a beam.  ids: int64 [n].  total: chances of the tokens that were
    filled in, summed; path: how many in each step.  sure: it comes from the last step, as the only
    continuation of a member that the model was sure of.  hidden: tokens that are left."""

    ids: Tensor
    total: float
    path: tuple[int, ...]
    sure: bool
    hidden: int

    def filled(self, places: Tensor, tokens: Tensor, chances: Tensor, sure: bool) -> _Member:
        """A copy with more tokens, at ``places`` [k]; ``tokens`` and ``chances`` are of all [n]."""
        ids = self.ids.clone()
        ids[places] = tokens[places]
        total, count = self.total + float(chances[places].sum()), len(places)
        return _Member(ids, total, (*self.path, count), sure, self.hidden - count)


def _beam_problems(config: SOAR.Config | PositionBeam.Config) -> list[tuple[str, str]]:
    if config.beam > 0:
        return []
    return [("beam", f"must be positive, got {config.beam}")]


class _BeamSearch(Sampler):
    """Keeps the best members of each sequence's beam; all members of all sequences go through the
    model together, and each gets at least one token, so that n tokens take n passes at most."""

    temperature: ClassVar[float] = 0.0

    def check_settings(self, denoiser: Denoiser) -> None:
        super().check_settings(denoiser)
        name = SAMPLERS.name_of(type(self.config))
        if self.sampling.temperature != 0:
            raise ValueError(f"sampler={name} takes the likeliest tokens: temperature must be 0")
        if denoiser.stateful:
            raise ValueError(
                f"sampler={name} has beams that come and go: a cache cannot follow them"
            )

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        left = denoiser.hidden(canvas).sum(1).tolist()
        beams = [[_Member(ids.clone(), 0.0, (), False, n)] for ids, n in zip(canvas.window, left)]
        while any(member.hidden for beam in beams for member in beam):
            followers = iter(self._continued(denoiser, canvas, beams))
            for row, beam in enumerate(beams):
                found = []
                for member in beam:
                    found += next(followers) if member.hidden else [_unmoved(member)]
                if any(member.hidden for member in beam):
                    beams[row] = self._best(found, beam[0].hidden)
        for ids, beam, steps in zip(canvas.window, beams, committed):
            ids.copy_(beam[0].ids)
            steps.extend(beam[0].path)

    def _continued(
        self, denoiser: Denoiser, canvas: Canvas, beams: list[list[_Member]]
    ) -> list[list[_Member]]:
        """The continuations of every member that is not finished."""
        pairs = [(r, member) for r, beam in enumerate(beams) for member in beam if member.hidden]
        rows = torch.tensor([row for row, _ in pairs], device=canvas.ids.device)
        together = Canvas(
            canvas.ids[rows], canvas.real[rows], canvas.prompt, canvas.begin, canvas.end
        )
        together.window.copy_(torch.stack([member.ids for _, member in pairs]))
        hidden = denoiser.hidden(together)
        judged = denoiser(together)[hidden].double().softmax(-1).max(-1)
        tokens = torch.zeros_like(together.window)
        chances = torch.full(hidden.shape, -torch.inf, dtype=torch.float64, device=hidden.device)
        tokens[hidden], chances[hidden] = judged.indices, judged.values
        order = chances.argsort(dim=1, descending=True, stable=True)
        return [
            self._follow(member, *of_member)
            for (_, member), *of_member in zip(pairs, order, tokens, chances)
        ]

    def _follow(
        self, member: _Member, order: Tensor, tokens: Tensor, chances: Tensor
    ) -> list[_Member]:
        """One continuation with all tokens that the model is sure of, or several with one each.
        order: the places of the window, the surest first."""
        sure = self.sure(chances)
        if sure:
            return [member.filled(order[:sure], tokens, chances, True)]
        width = min(self.config.beam, member.hidden)
        return [member.filled(place[None], tokens, chances, False) for place in order[:width]]

    def _best(self, found: list[_Member], hidden: int) -> list[_Member]:
        """The beam of the next step.  hidden: how many tokens its first member lacked."""
        unique: dict[tuple[int, ...], _Member] = {}
        for member in sorted(found, key=self.score, reverse=True):
            unique.setdefault(tuple(member.ids.tolist()), member)
        ranked = list(unique.values())
        return ranked[: 1 if self.collapses(ranked, hidden) else self.config.beam]

    def score(self, member: _Member) -> float:
        """Mean chance of the tokens that were filled in."""
        return member.total / max(sum(member.path), 1)

    def sure(self, chances: Tensor) -> int:
        """How many tokens a step may fill in at once for their chances [n]; 0 to search."""
        return 0

    def collapses(self, ranked: list[_Member], hidden: int) -> bool:
        return False


def _unmoved(member: _Member) -> _Member:
    """A finished member, which the step does not concern."""
    return _Member(member.ids, member.total, member.path, False, 0)


@SAMPLERS.register("pbs")
class PositionBeam(_BeamSearch):
    """Position beam search: every member continues with each of the ``beam`` surest tokens, one at
    a time: a search over where, not what.  SOAR without acceleration."""

    @dataclass(frozen=True)
    class Config:
        beam: int = field(default=2, metadata={"help": "sequences that are kept"})

        def problems(self) -> list[tuple[str, str]]:
            return _beam_problems(self)


@SAMPLERS.register("soar")
class SOAR(_BeamSearch):
    """Search or accelerate (Cao et al. 2026, arXiv 2602.10953): a member with ``least`` tokens or
    more whose chances exceed ``threshold`` continues with all of them (``most`` at most); any other
    is searched like in ``pbs``.  Where acceleration wins, the beam shrinks to one member.

    A member's score is the mean chance of its tokens (as in the authors' code for Dream), or their
    sum (for LLaDA).  When the beam shrinks: if the best continuation is an accelerated one, as the
    paper is said to describe, or if any is and the best one has fewer hidden tokens than the beam's
    first member had, which is what the code does.
    """

    @dataclass(frozen=True)
    class Config:
        beam: int = field(default=2, metadata={"help": "sequences that are kept in a search"})
        threshold: float = field(default=0.9, metadata={"help": "chance of a sure token, τ"})
        least: int = field(default=1, metadata={"help": "sure tokens that accelerate, n_min"})
        most: int = field(default=5, metadata={"help": "most tokens at once, n_max"})
        score: Literal["mean", "sum"] = field(
            default="mean", metadata={"help": "of the tokens' chances"}
        )
        collapse: Literal["best", "any"] = field(
            default="best", metadata={"help": "which accelerated continuation ends a search"}
        )

        def problems(self) -> list[tuple[str, str]]:
            found = _beam_problems(self)
            if self.threshold <= 0:
                found.append(("threshold", f"must be positive, got {self.threshold}"))
            if self.least < 1:
                found.append(("least", f"must be positive, got {self.least}"))
            if self.most < self.least:
                text = f"must be at least least={self.least}, got {self.most}"
                found.append(("most", text))
            return found

    def score(self, member: _Member) -> float:
        return member.total if self.config.score == "sum" else super().score(member)

    def sure(self, chances: Tensor) -> int:
        count = int((chances > self.config.threshold).sum())
        return min(count, self.config.most) if count >= self.config.least else 0

    def collapses(self, ranked: list[_Member], hidden: int) -> bool:
        if self.config.collapse == "best":
            return ranked[0].sure
        return any(member.sure for member in ranked) and ranked[0].hidden < hidden
