"""How one stage's units are wired: what each reads, and where each output goes.

An output may be read by several units: the next block, a multi-token-prediction block, and heads
that live on other stages and read some rows of it only.  Each reader gets a *port*.  Gradients that
come back through the ports are summed in the order of the readers in the model, the rows of one
head first being put together, so that the sum does not depend on where the readers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pipeline.units import HEAD, Edge, Placement, Unit, data_flow


@dataclass(frozen=True)
class Port:
    """One reader of a unit's output: ``target`` stage, the ``chunks`` of rows it reads (all when
    empty), and its place ``order`` in the sum of gradients."""

    producer: Unit
    target: int
    order: int
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wiring:
    """One stage.  inputs, outputs: edges.  sources: per input, its local ports.  steps: units in
    order (the first chunk stands for all of a head's), each with the port it reads and the ports of
    its output.  leaving: per output edge, its port."""

    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    sources: tuple[tuple[Port, ...], ...]
    steps: tuple[tuple[Unit, Port | None, tuple[Port, ...]], ...]
    leaving: tuple[Port, ...]
    head_chunks: int


def stage_wiring(placement: Placement, number: int) -> Wiring:
    """The wiring of stage ``number``."""
    units = placement.units
    flow = data_flow(units, placement.mtp_input)
    stage_of = {unit: s for s, stage in enumerate(placement.stages) for unit in stage}
    head_chunks = sum(unit.kind == HEAD and unit.index == 0 for unit in units)
    inputs, outputs = placement.inputs[number], placement.outputs[number]

    def readers(producer: Unit) -> list[Unit]:
        return [unit for unit in units if flow[unit] == producer]

    def order(producer: Unit, reader: Unit) -> int:
        """All chunks of a head count as the reader where the first of them is."""
        return next(
            i
            for i, unit in enumerate(readers(producer))
            if (unit.kind, unit.index) == (reader.kind, reader.index)
        )

    def port(producer: Unit, reader: Unit, target: int) -> Port:
        chunks: tuple[int, ...] = ()
        if reader.kind == HEAD:
            here = [u for u in placement.stages[target] if u.kind == HEAD]
            rows = tuple(sorted(u.chunk for u in here if u.index == reader.index))
            chunks = rows if len(rows) < head_chunks else ()
        return Port(producer, target, order(producer, reader), chunks)

    def local(producer: Unit) -> tuple[Port, ...]:
        found = [port(producer, u, number) for u in readers(producer) if stage_of[u] == number]
        return tuple(dict.fromkeys(found))

    def crossing(edge: Edge) -> Port:
        first = next(u for u in readers(edge.producer) if stage_of[u] == edge.target)
        return Port(edge.producer, edge.target, order(edge.producer, first), edge.chunks)

    steps: list[tuple[Unit, Port | None, tuple[Port, ...]]] = []
    seen: set[tuple[str, int]] = set()
    for unit in placement.stages[number]:
        if (unit.kind, unit.index) in seen:
            continue
        seen.add((unit.kind, unit.index))
        producer = flow[unit]
        reads = None if producer is None else port(producer, unit, number)
        leaves = tuple(crossing(edge) for edge in outputs if edge.producer == unit)
        steps.append((unit, reads, () if unit.kind == HEAD else local(unit) + leaves))
    return Wiring(
        inputs,
        outputs,
        tuple(local(edge.producer) for edge in inputs),
        tuple(steps),
        tuple(crossing(edge) for edge in outputs),
        head_chunks,
    )


def deliver(
    value: Tensor, ports: Sequence[Port], head_chunks: int, ready: dict[Port, Tensor]
) -> None:
    """Put ``value`` [B, S, D], or the rows of it that a port reads, into ``ready`` for each."""
    if len(ports) == 1 and not ports[0].chunks:
        ready[ports[0]] = value
        return
    ready.update(zip(ports, _Deliver.apply(value, ports, head_chunks), strict=True))


def select_rows(x: Tensor, chunks: Sequence[int], of: int, ranks: int = 1) -> Tensor:
    """The positions of ``chunks`` (each one of ``of`` equal parts) of x [B, S, ...], contiguous.

    With ``ranks`` the sequence is that of so many sequence-parallel ranks one after another and
    the chunks are those of every rank's share.
    """
    batch, length = x.shape[0], x.shape[1] // ranks
    parts = x.reshape(batch, ranks, of, length // of, *x.shape[2:])
    first, last = chunks[0], chunks[-1] + 1
    if last - first == len(chunks):
        rows = parts[:, :, first:last]
    else:
        rows = parts[:, :, list(chunks)]
    return rows.reshape(batch, ranks * len(chunks) * (length // of), *x.shape[2:]).contiguous()


class _Deliver(torch.autograd.Function):
    """Copies for several readers; the backward pass sums in reader order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ports: Sequence[Port], of: int) -> tuple[Tensor, ...]:
        ctx.ports, ctx.of, ctx.shape = ports, of, x.shape
        ctx.set_materialize_grads(False)
        return tuple(
            select_rows(x, port.chunks, of) if port.chunks else x.view_as(x) for port in ports
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total: Tensor | None = None
        by_order: dict[int, list[tuple[Port, Tensor]]] = {}
        for port, gradient in zip(ctx.ports, gradients, strict=True):
            if gradient is not None:
                by_order.setdefault(port.order, []).append((port, gradient))
        for _, parts in sorted(by_order.items()):
            for gradient in _assembled(parts, ctx.shape, ctx.of):
                total = gradient if total is None else total + gradient
        return total, None, None


def _assembled(parts: list[tuple[Port, Tensor]], shape: torch.Size, of: int) -> list[Tensor]:
    """Whole gradients as they are, and one tensor put together from rows."""
    whole = [gradient for port, gradient in parts if not port.chunks]
    rows = [(port, gradient) for port, gradient in parts if port.chunks]
    if rows:
        joined = rows[0][1].new_zeros(shape)
        chunked = joined.view(shape[0], of, shape[1] // of, *shape[2:])
        for port, gradient in rows:
            chunked[:, list(port.chunks)] = gradient.view(
                shape[0], len(port.chunks), shape[1] // of, *shape[2:]
            )
        whole.append(joined)
    return whole
