"""What one micro-batch takes in a pipeline stage, composed of what its units take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from .observed import UnitRun


@dataclass(frozen=True)
class Most:
    """Bytes of one unit at its worst moment in one part of a step: ``again``, when gradients exist
    already, and at ``first``, when those with the logical names ``created`` are made."""

    again: int
    first: int
    created: tuple[str, ...] = ()

    def named(self, module: str) -> Most:
        """For parameters whose names begin with ``module``."""
        names = (module + n.removeprefix(".") if n.startswith(".") else n for n in self.created)
        return replace(self, created=tuple(names))


@dataclass(frozen=True)
class UnitProfile:
    """Bytes of one unit and one micro-batch.

    kept: stays from the unit's forward to its backward, less what its input's last use frees.
    left: what its backward leaves for an action that makes weight gradients, if there is one.
    forward: the most during its forward beyond what was there before.  backward: the most during
    its backward beyond what it and the units before it keep and those behind it have left; the
    gradients of those not included.  weight: the most while its weight gradients are made beyond
    what is left, and there already.
    """

    kept: int
    left: int
    forward: Most
    backward: Most
    weight: Most

    def named(self, module: str) -> UnitProfile:
        parts = (part.named(module) for part in (self.forward, self.backward, self.weight))
        return UnitProfile(self.kept, self.left, *parts)


Sizes = Mapping[str, int]


@dataclass(frozen=True)
class StageProfile:
    """All units of a stage in execution order.

    Wherever ``sizes`` is asked for: bytes of every gradient, in the pass that creates those of the
    stage; None in later ones.
    """

    units: tuple[str, ...]
    profiles: tuple[UnitProfile, ...]

    @property
    def kept(self) -> int:
        return sum(p.kept for p in self.profiles)

    @property
    def left(self) -> int:
        return sum(p.left for p in self.profiles)

    def created(self, part: str) -> list[str]:
        """Names of the gradients that the first ``forward``, ``backward`` or ``weight`` creates."""
        return [name for p in self.profiles for name in getattr(p, part).created]

    def forward_peak(self, sizes: Sizes | None = None) -> int:
        """The most that a forward pass adds."""
        before = accumulate((p.kept for p in self.profiles), initial=0)
        return _highest(zip(before, (p.forward for p in self.profiles)), sizes)

    def backward_peak(self, sizes: Sizes | None = None) -> int:
        """The most during a backward pass beyond ``kept``."""
        before, starts = self.kept, []
        for p in reversed(self.profiles):
            starts.append((before, p.backward))
            before += p.left - p.kept
        return _highest(starts, sizes) - self.kept

    def weight_peak(self, sizes: Sizes | None = None) -> int:
        """The most while weight gradients are made in an action of their own, beyond ``left``."""
        freed = accumulate((-p.left for p in self.profiles), initial=0)
        return _highest(zip(freed, (p.weight for p in self.profiles)), sizes)


def _highest(units: Iterable[tuple[int, Most]], sizes: Sizes | None) -> int:
    """The highest of ``units`` in the order in which they run, each with what is there before."""
    peaks, created = [], 0
    for before, most in units:
        peaks.append(before + (most.again if sizes is None else created + most.first))
        created += 0 if sizes is None else sum(sizes[name] for name in most.created)
    return max(peaks)


def unit_profile(module: str, first: UnitRun, again: UnitRun) -> UnitProfile:
    """Of a unit whose parameters begin with ``module``, which is left out of their names.

    Run when no gradient existed (or not all), and again.
    """
    created = [
        tuple("." + n.removeprefix(module) if n.startswith(module) else n for n in names)
        for names in first.created
    ]
    return UnitProfile(
        kept=again.kept,
        left=again.left,
        forward=Most(again.forward, first.forward, created[0]),
        backward=Most(again.backward, first.backward, created[1]),
        weight=Most(again.weight, first.weight, created[2]),
    )
