"""Muon over local shards: momentum that is orthogonalised before it is applied.

Newton–Schulz needs whole matrices.  Those of a pipeline stage are dealt out to its ranks in rounds:
each rank receives the pieces of its matrices, orthogonalises them, and sends every rank the pieces
that it stores.  Replicas share that work, and no rank holds more than its matrices of one round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.apply import ParallelModel, local_tensor, shard_offsets

from .optimizer_config import MuonConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd quintic that is iterated: steepest at 0 among those that stay near 1 (Jordan)."""

ROUND_ELEMENTS = 1 << 24
"""Elements of the matrices that a rank takes in one round, unless one alone is larger."""


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """About U Vᵀ for x = U S Vᵀ [m, n], in the dtype of x: singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.addmm(y, polynomial, y, beta=a)
    return y.T if x.shape[0] > x.shape[1] else y


def update_scale(shape: Sequence[int], kind: str) -> float:
    """Factor on the orthogonalised update.  ``match_rms``: its elements have about the size of
    AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4); ``spectral``: an output changes as much
    whatever the width (Jordan's)."""
    rows, columns = shape
    if kind == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


Block = tuple[tuple[int, int], tuple[int, int]]
"""(first, end) row and column."""


class Matrix(NamedTuple):
    """A weight matrix: a 2-D parameter, or ``number`` of a 3-D one (an expert)."""

    name: str
    number: int | None
    shape: tuple[int, int]


class Transfer(NamedTuple):
    """``block`` of ``matrix`` goes from a rank to another one (or itself)."""

    matrix: Matrix
    block: Block
    source: int
    target: int


@dataclass
class Round:
    """owned: this rank's matrices.  collect: pieces on the way to the owners; hand_out: back."""

    owned: list[Matrix]
    collect: list[Transfer]
    hand_out: list[Transfer]


class Placed(NamedTuple):
    """A rank's part of one parameter."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def deal(
    shapes: Mapping[str, tuple[int, ...]], placed: Sequence[Mapping[str, Placed]], rank: int
) -> list[Round]:
    """Who orthogonalises what.  ``placed``: per rank of the stage, its part of every parameter.

    Largest first, each to the rank with the least work in the round; the same on every rank.
    """
    matrices = [
        Matrix(name, number, (shape[-2], shape[-1]))
        for name, shape in shapes.items()
        for number in ([None] if len(shape) == 2 else range(shape[0]))
    ]
    matrices.sort(key=lambda m: (-math.prod(m.shape), m.name, m.number or 0))
    rounds: list[Round] = []
    load = [0] * len(placed)
    for matrix in matrices:
        owner = load.index(min(load))
        size = math.prod(matrix.shape)
        if not rounds or (load[owner] and load[owner] + size > ROUND_ELEMENTS):
            rounds.append(Round([], [], []))
            load, owner = [0] * len(placed), 0
        load[owner] += size
        current = rounds[-1]
        if owner == rank:
            current.owned.append(matrix)
        holders: dict[Block, list[int]] = {}
        for holder, parts in enumerate(placed):
            block = _block(matrix, parts[matrix.name])
            if block is not None:
                holders.setdefault(block, []).append(holder)
        for block, ranks in holders.items():
            source = owner if owner in ranks else ranks[owner % len(ranks)]
            current.collect.append(Transfer(matrix, block, source, owner))
            current.hand_out += [Transfer(matrix, block, owner, holder) for holder in ranks]
    return rounds


def _block(matrix: Matrix, part: Placed) -> Block | None:
    """The rows and columns of ``matrix`` that a part holds, if any."""
    if matrix.number is not None and not 0 <= matrix.number - part.offsets[0] < part.shape[0]:
        return None
    (row, column), (rows, columns) = part.offsets[-2:], part.shape[-2:]
    return ((row, row + rows), (column, column + columns)) if rows and columns else None


class ShardedMuon:
    """Momentum and updates of some parameters (by logical name) of this rank's stage.

    ``decay``: decoupled weight decay of all of them.  ``ValueError`` for bfloat16 on a CPU.
    """

    def __init__(
        self, model: ParallelModel, stored: Mapping[str, Tensor], config: MuonConfig, decay: float
    ) -> None:
        if config.bfloat16 and model.mesh.device.type == "cpu":
            raise ValueError("optimizer.muon.bfloat16=true is for GPUs: CPUs multiply it slowly")
        self.config, self.decay = config, decay
        self.local = {name: local_tensor(parameter) for name, parameter in stored.items()}
        self.momentum = {name: torch.zeros_like(local) for name, local in self.local.items()}
        self.placed = {
            name: Placed(
                tuple(shard_offsets(model, name, parameter)), tuple(self.local[name].shape)
            )
            for name, parameter in stored.items()
        }
        self.group, self.rank = _stage_group(model)
        everyone: list[dict[str, Placed]] = [self.placed]
        if self.group is not None:
            everyone *= dist.get_world_size(self.group)
            dist.all_gather_object(everyone, self.placed, group=self.group)
        shapes = {name: tuple(model.plans[name].shape) for name in stored}
        self.rounds = deal(shapes, everyone, self.rank)

    @torch.no_grad()
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """One update from this rank's part of every gradient."""
        for name, momentum in self.momentum.items():
            momentum.lerp_(gradients[name], 1 - self.config.momentum)
            self.local[name].mul_(1 - lr * self.decay)
        for current in self.rounds:
            whole = {m: self.local[m.name].new_empty(m.shape) for m in current.owned}
            take, put = partial(self._direction, gradients), partial(_place, whole)
            self._exchange(current.collect, take, put)
            for matrix, x in whole.items():
                narrow = x.to(torch.bfloat16) if self.config.bfloat16 else x
                whole[matrix] = orthogonalize(narrow, self.config.steps).to(x.dtype)
            self._exchange(current.hand_out, partial(_piece, whole), partial(self._apply, lr))

    def _direction(self, gradients: Mapping[str, Tensor], transfer: Transfer) -> Tensor:
        """This rank's piece of what is orthogonalised."""
        name, index = transfer.matrix.name, self._index(transfer.matrix)
        momentum = self.momentum[name][index]
        if not self.config.nesterov:
            return momentum
        return gradients[name][index].lerp(momentum, self.config.momentum)

    def _apply(self, lr: float, transfer: Transfer, update: Tensor) -> None:
        matrix = transfer.matrix
        target = self.local[matrix.name][self._index(matrix)]
        target.add_(update, alpha=-lr * update_scale(matrix.shape, self.config.scale))

    def _index(self, matrix: Matrix) -> int | slice:
        """Where the matrix is in this rank's part of its parameter."""
        if matrix.number is None:
            return slice(None)
        return matrix.number - self.placed[matrix.name].offsets[0]

    def _exchange(
        self,
        transfers: Sequence[Transfer],
        take: Callable[[Transfer], Tensor],
        put: Callable[[Transfer, Tensor], None],
    ) -> None:
        """Carry out transfers: what ``take`` gives at the source, ``put`` gets at the target."""
        sent = [t for t in transfers if t.source == self.rank != t.target]
        received = [t for t in transfers if t.target == self.rank != t.source]
        for t in transfers:
            if t.source == t.target == self.rank:
                put(t, take(t))
        if self.group is None:
            return
        sent.sort(key=lambda t: t.target)  # stable: of one pair of ranks in the order of the round
        received.sort(key=lambda t: t.source)
        like = next(iter(self.local.values()))
        out = torch.cat([like.new_empty(0), *(take(t).reshape(-1) for t in sent)])
        counts = [[0] * dist.get_world_size(self.group) for _ in range(2)]
        for t in sent:
            counts[0][t.target] += _size(t.block)
        for t in received:
            counts[1][t.source] += _size(t.block)
        arrived = like.new_empty(sum(counts[1]))
        dist.all_to_all_single(arrived, out, counts[1], counts[0], group=self.group)
        parts = arrived.split([_size(t.block) for t in received])
        for t, part in zip(received, parts, strict=True):
            (top, bottom), (left, right) = t.block
            put(t, part.view(bottom - top, right - left))


def _piece(whole: Mapping[Matrix, Tensor], transfer: Transfer) -> Tensor:
    (top, bottom), (left, right) = transfer.block
    return whole[transfer.matrix][top:bottom, left:right]


def _place(whole: Mapping[Matrix, Tensor], transfer: Transfer, piece: Tensor) -> None:
    _piece(whole, transfer).copy_(piece)


def _size(block: Block) -> int:
    (top, bottom), (left, right) = block
    return (bottom - top) * (right - left)


def _stage_group(model: ParallelModel) -> tuple[dist.ProcessGroup | None, int]:
    """All ranks of this pipeline rank, and the place of this one among them."""
    mesh = model.mesh.device_mesh
    if mesh is None:
        return None, 0
    names = mesh.mesh_dim_names
    assert names is not None
    inner = mesh[tuple(name for name in names if name != "pp")]._flatten("stage")
    if inner.size() == 1:
        return None, 0
    return inner.get_group(), inner.get_local_rank()
