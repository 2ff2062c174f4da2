"""How one tensor of a model lies in exported files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Tensor ``name`` of a file: ours, or its slice ``index``, times ``scale`` plus ``shift``."""

    name: str
    index: int | None = None
    scale: float = 1.0
    shift: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is the whole tensor, bit for bit."""
        return self.index is None and self.scale == 1 and self.shift == 0

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        return tuple(ours if self.index is None else ours[1:])

    def export(self, ours: Tensor) -> Tensor:
        """Rounded once, to the dtype of ``ours``."""
        part = ours if self.index is None else ours[self.index]
        if self.scale == 1 and self.shift == 0:
            return part
        return (part.double() * self.scale + self.shift).to(ours.dtype)

    def restore(self, stored: Tensor) -> Tensor:
        """The reverse of :meth:`export`, in at least float32."""
        if self.scale == 1 and self.shift == 0:
            return stored
        wide = (stored.double() - self.shift) / self.scale
        return wide.to(torch.promote_types(stored.dtype, torch.float32))


def restored(places: Sequence[Stored], tensors: Sequence[Tensor]) -> Tensor:
    """Our tensor from everything that files hold of it."""
    if places[0].index is None:
        return places[0].restore(tensors[0])
    return torch.stack([place.restore(t) for place, t in zip(places, tensors, strict=True)])
