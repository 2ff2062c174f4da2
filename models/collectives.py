"""The one seam between components and process groups.

Components are single-device code.  Where mathematics needs a value from other ranks (a softmax
over a sharded vocabulary, a norm over sharded heads) the component asks an *axis* by name, and
the default axis has one member, for which every operation is the identity.  ``parallel/`` binds
axes to process groups; nothing else crosses this boundary.

Axis names: ``tp`` (tensor), ``sp`` (sequence shards between tensor-parallel regions; present only
when sequence parallelism is on), ``cp`` (context), ``ep`` (expert), ``dp`` (data).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor


class Axis:
    """An axis with one member.  Subclasses bind it to a process group.

    ``sum_`` and ``max_`` work in place and carry no gradient; the others are differentiable.
    Four form two conjugate pairs: ``copy`` (backward: sum) with ``reduce`` (backward: copy), and
    ``gather`` (backward: reduce-scatter) with ``reduce_scatter`` (backward: gather).  ``exchange``
    is its own conjugate with the counts swapped.
    """

    size: int = 1
    rank: int = 0

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def max_(self, x: Tensor) -> Tensor:
        return x

    def copy(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all of rows: of x [sum(send), ...] the first ``send[0]`` rows go to member 0, and
        so on; the result [sum(receive), ...] holds what the members sent here, in their order."""
        return x


_SINGLE = Axis()
# A plain module global: autograd runs backward functions on threads that would not see a
# context variable.  Functions capture the axis in forward, so a later re-binding is harmless.
_axes: dict[str, Axis] = {}


def axis(name: str) -> Axis:
    """The axis bound to ``name``, or the single-member axis."""
    return _axes.get(name, _SINGLE)


def bind(axes: Mapping[str, Axis]) -> None:
    """Replace every binding; an empty mapping restores single-process behaviour."""
    _axes.clear()
    _axes.update(axes)


@contextmanager
def bound(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Bind ``axes`` for the duration of a ``with`` block."""
    before = dict(_axes)
    bind(axes)
    try:
        yield
    finally:
        bind(before)
