"""Samplers that undo noise along a grid of times, for masked and for uniform-state diffusion."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .decoding import draw
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


@dataclass(frozen=True)
class GridConfig:
    """What every walk along a grid of times can be told."""

    steps: int = field(default=64, metadata={"help": "steps from noise to text"})
    last: Literal["greedy", "ancestral"] = field(
        default="greedy",
        metadata={"help": "noise left at the end becomes the likeliest token, or a drawn one"},
    )

    def problems(self) -> list[tuple[str, str]]:
        return [] if self.steps > 0 else [("steps", f"must be positive, got {self.steps}")]


class _GridWalk(Sampler):
    """From time 1 to 1e-5 in equal steps.  A step from t to s < t draws z[s] from

        κ q(z[s] | z[t], p) + (1 − κ) q_s(· | x̂),   x̂ from q(z[0] | z[t], p),

    the reverse of noising for the prediction p of the model, mixed with going to time 0 and adding
    noise again.  Both have the marginals of noised text at s.
    """

    families: ClassVar[tuple[Family, ...]] = ("masked", "uniform")

    def kappa(self, alpha_t: float, alpha_s: float) -> float:
        return 1.0

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        walk: Any = _Uniform(self) if denoiser.family == "uniform" else _Masked(self)
        walk.begin(denoiser, canvas, noise)
        grid = torch.linspace(1, LAST_TIME, self.config.steps + 1, dtype=torch.float64).tolist()
        levels = [alpha(time) for time in grid]
        if self.config.last == "ancestral":
            levels[-1] = 1.0
        for alpha_t, alpha_s in itertools.pairwise(levels):
            before = canvas.window.clone()
            walk.step(denoiser, canvas, noise, alpha_t, alpha_s)
            record(committed, before, canvas.window)
        if self.config.last == "greedy":
            before = canvas.window.clone()
            walk.clean(denoiser, canvas, levels[-1])
            if not torch.equal(before, canvas.window):
                record(committed, before, canvas.window)


class _Masked:
    """A hidden token appears, drawn from p, with chance κ (α_s − α_t)/(1 − α_t) + (1 − κ) α_s, and
    a known one hides again with chance (1 − κ)(1 − α_s).  The model is not told the time, and asked
    only in steps in which something appears."""

    def __init__(self, walk: _GridWalk) -> None:
        self.walk = walk
        self.fixed = torch.empty(0)

    def begin(self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise) -> None:
        self.fixed = ~denoiser.hidden(canvas)

    def step(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, alpha_t: float, alpha_s: float
    ) -> None:
        window, kappa = canvas.window, self.walk.kappa(alpha_t, alpha_s)
        chance, which = noise.uniform(2 * window.shape[1]).chunk(2, 1)
        hidden = denoiser.hidden(canvas)
        appear = kappa * (alpha_s - alpha_t) / (1 - alpha_t) + (1 - kappa) * alpha_s
        appears = hidden & (chance < appear)
        hides = ~hidden & ~self.fixed & (chance < (1 - kappa) * (1 - alpha_s))
        if appears.any():
            chances = self.walk.chances(denoiser(canvas)[appears])
            window[appears] = draw(chances, which[appears])
        assert denoiser.mask_id is not None
        window[hides] = denoiser.mask_id

    def clean(self, denoiser: Denoiser, canvas: Canvas, alpha_t: float) -> None:
        hidden = denoiser.hidden(canvas)
        if hidden.any():
            canvas.window[hidden] = denoiser(canvas)[hidden].argmax(-1)


class _Uniform:
    """Any token may become any other: z[s] is drawn from a distribution over the K tokens.

    With the p of a trained model, which predicts a token from all *others*,
    q(z[s] | z, p) = q(z | z[s]) q(z[s] | p) / q(z | p)  (Sahoo et al. 2025, arXiv 2506.10892), and
    the likeliest token at the end is that of q(z[0] | z, p), which also knows z, and not of p.
    """

    def __init__(self, walk: _GridWalk) -> None:
        self.walk = walk

    def begin(self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise) -> None:
        window = canvas.window
        window.copy_((noise.uniform(window.shape[1]) * denoiser.vocabulary).long())

    def step(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, alpha_t: float, alpha_s: float
    ) -> None:
        kappa = self.walk.kappa(alpha_t, alpha_s)
        chances = self._chances(denoiser, canvas, alpha_t, alpha_s, kappa)
        uniform = noise.uniform(canvas.window.shape[1])
        canvas.window.copy_(draw(chances.flatten(0, 1), uniform.flatten()).view_as(uniform))

    def clean(self, denoiser: Denoiser, canvas: Canvas, alpha_t: float) -> None:
        canvas.window.copy_(self._chances(denoiser, canvas, alpha_t, 1.0, 1.0).argmax(-1))

    def _chances(
        self, denoiser: Denoiser, canvas: Canvas, alpha_t: float, alpha_s: float, kappa: float
    ) -> Tensor:
        p = self.walk.chances(denoiser(canvas, -math.log(alpha_t)))
        return reverse_chances(p, canvas.window, alpha_t, alpha_s, kappa)


def reverse_chances(
    p: Tensor, z: Tensor, alpha_t: float, alpha_s: float, kappa: float = 1.0
) -> Tensor:
    """Distribution float64 [..., K] of the token at time s of uniform-state diffusion, for the
    prediction p [..., K] and the token z int64 [...] at time t; the mixture of ``_GridWalk``."""
    classes, ratio = p.shape[-1], alpha_t / alpha_s
    z = z[..., None]
    same = classes * alpha_t * p.gather(-1, z)
    total = same + 1 - alpha_t
    of_p = kappa * (alpha_s - alpha_t) + (1 - kappa) * alpha_s * (1 - alpha_t)
    of_all = (1 - alpha_s) / classes * (kappa * (1 - ratio) / total + 1 - kappa)
    of_z = kappa * (same + ratio - alpha_t) + (1 - kappa) * alpha_s * same
    return torch.addcdiv(of_all, p, total, value=of_p).scatter_add(-1, z, of_z / total)


@SAMPLERS.register("ancestral")
class Ancestral(_GridWalk):
    """The reverse of noising, step by step (κ = 1): Sahoo et al. 2024 (arXiv 2406.07524) for masks,
    2025 (arXiv 2506.10892) for uniform states.  Tokens that appear in the same step are drawn
    independently of each other: more steps are more exact."""

    @dataclass(frozen=True)
    class Config(GridConfig):
        pass


@SAMPLERS.register("corrector")
class PredictorCorrector(_GridWalk):
    """ψ-samplers (Deschenaux et al. 2026, arXiv 2602.21185), which repair earlier tokens.

    ``constant``: κ = η, from 1 (ancestral) to 0.  ``cap`` and ``rescale``: κ = 1 − σ/(1 − α_s) with
    σ = min(η, m) and η m, where m = min(1, (1 − α_s)/α_t) is the most that leaves marginals as they
    are; for masks σ is the chance that a token hides again (ReMDM: Wang et al. 2025, arXiv
    2503.00307).
    """

    @dataclass(frozen=True)
    class Config(GridConfig):
        schedule: Literal["constant", "cap", "rescale"] = field(
            default="cap", metadata={"help": "how κ depends on the time"}
        )
        eta: float = field(default=0.02, metadata={"help": "η, from 0 to 1"})

        def problems(self) -> list[tuple[str, str]]:
            found = super().problems()
            if not 0 <= self.eta <= 1:
                found.append(("eta", f"must be from 0 to 1, got {self.eta}"))
            return found

    def kappa(self, alpha_t: float, alpha_s: float) -> float:
        eta, schedule = self.config.eta, self.config.schedule
        if schedule == "constant":
            return float(eta)
        if alpha_s == 1:
            return 1.0
        most = min(1.0, (1 - alpha_s) / alpha_t)
        hides = min(eta, most) if schedule == "cap" else eta * most
        return min(max(1 - hides / (1 - alpha_s), 0.0), 1.0)
