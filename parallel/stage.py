"""One pipeline stage: a part of the model and its micro-batches, run forward and backward.

The executor drives stages through ``forward``, ``backward`` and ``head``; a model without pipeline
parallelism is one stage that owns every unit.  Several stages of a rank share one ``Transformer``,
so a weight that two of them use is stored, reduced and updated once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.attention import Mask, Mixture, SequenceContext, Visibility
from models.collectives import axis
from models.linear import accumulation_dtype
from models.losses import Term
from models.transformer import Transformer

from .apply import sharded_units
from .pipeline.units import HEAD, Placement, Unit
from .ports import Port, Wiring, deliver, select_rows, stage_wiring
from .split import Owed, WeightGradients, reduce_now

_NAMES = {"E": "embedding", "t": "blocks.{}", "n": "final_norm", "m": "mtp.{}", "h": "head"}


def unit_name(unit: Unit) -> str:
    """The model's name of a pipeline unit."""
    if unit.kind == "n" and unit.index:
        return f"mtp_norms.{unit.index}"
    return _NAMES[unit.kind].format(unit.index)


@dataclass
class MicroBatch:
    """Token ids [B, S] with what an objective says about them.

    fields: row fields of the loss terms, each [B, S].  documents: int64 [B, S] or None.
    positions: int64 [B, S]; None for 0, 1, 2, ….  noise: [B, S] or [B, 1], of a diffusion model
    that is told how much there is.  mixture: what the model reads, if it is not ``ids``.
    """

    ids: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    mask: Mask = "causal"
    documents: Tensor | None = None
    positions: Tensor | None = None
    noise: Tensor | None = None
    mixture: Mixture | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The same with every tensor changed, to another device for example."""
        return MicroBatch(
            change(self.ids),
            {name: change(value) for name, value in self.fields.items()},
            self.mask.map(change) if isinstance(self.mask, Visibility) else self.mask,
            None if self.documents is None else change(self.documents),
            None if self.positions is None else change(self.positions),
            None if self.noise is None else change(self.noise),
            None if self.mixture is None else self.mixture.map(change),
        )

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            found.append(x)
            return x

        self.map(note)
        return found

    def context(self) -> SequenceContext:
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.ids.shape[1], device=self.ids.device)
        return SequenceContext(
            positions, self.mask, self.documents, noise=self.noise, mixture=self.mixture
        )


class ShardedWeights:
    """The fully sharded roots of one rank, as its stages use them.

    A root is reduced for the last time, and its gathered weights are freed, when every stage that
    uses it has run its last backward pass.
    """

    def __init__(self, model: Transformer, reshard: bool) -> None:
        self.model, self.reshard_each_time = model, reshard
        self.gradients = WeightGradients()
        if model.head is not None:
            model.head.weight_gradients = self.gradients
        self._left: dict[FSDPModule, dict[int, int]] = {}
        self._holders: dict[FSDPModule, set[int]] = {}

    def forget(self) -> None:
        """The stages changed: expect nothing of them."""
        self._left.clear()

    def expect(self, roots: Sequence[FSDPModule], stage: int, backwards: int) -> None:
        """``stage`` will run ``backwards`` backward passes through these roots."""
        for root in roots:
            self._left.setdefault(root, {})[stage] = backwards

    def before_backward(self, roots: Sequence[FSDPModule], stage: int) -> None:
        """Where weights are gathered anew each time, reduce each micro-batch's gradients, so that
        no rank holds them whole; otherwise accumulate them and reduce in the last backward pass."""
        for root in roots:
            self._left[root][stage] -= 1
            last = not any(self._left[root].values())
            now = last or self.reshard_each_time
            root.set_requires_gradient_sync(now)
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(now)

    def before_input_gradients(self, roots: Sequence[FSDPModule]) -> None:
        """Weight gradients follow in an action of their own: nothing is complete before it."""
        for root in roots:
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(False)

    def after_weight_gradients(self, roots: Sequence[FSDPModule], stage: int) -> None:
        for root in roots:
            self._left[root][stage] -= 1
            if not any(self._left[root].values()):
                reduce_now(root)

    def unshard(self, roots: Sequence[FSDPModule], stage: int) -> None:
        for root in roots:
            holders = self._holders.setdefault(root, set())
            if not holders:
                root.unshard()
            holders.add(stage)

    def reshard(self, roots: Sequence[FSDPModule], stage: int) -> None:
        for root in roots:
            holders = self._holders.setdefault(root, set())
            holders.discard(stage)
            if not holders:
                root.reshard()


@dataclass
class _Saved:
    """What a micro-batch keeps between forward and backward: leaves, losses, outputs."""

    inputs: list[Tensor]
    totals: list[Tensor]
    outputs: list[Tensor]

    def run_backward(self, grad_output: Tensor | Sequence[Tensor] | None) -> None:
        """From the losses and what came back for the outputs; nothing where all is frozen."""
        ends: list[tuple[Tensor, Tensor | None]] = [(total, None) for total in self.totals]
        ends += zip(self.outputs, _many(grad_output), strict=True)
        needed = [end for end in ends if end[0].requires_grad]
        if needed:
            tensors, gradients = zip(*needed, strict=True)
            torch.autograd.backward(tensors, gradients)


class Stage:
    """Runs stage ``number`` of ``placement`` on the micro-batches of one optimizer step.

    ``weights`` holds the rank's ``Transformer``.  ``compute_dtype`` is the dtype of matrix
    products, and of the residual stream between stages unless the model asks for a wider one.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        compute_dtype: torch.dtype,
        placement: Placement,
        number: int,
    ) -> None:
        self.weights, self.model, self.number = weights, weights.model, number
        wide = self.model.config.wide_residual
        self.dtype = accumulation_dtype(compute_dtype) if wide else compute_dtype
        self.wiring: Wiring = stage_wiring(placement, number)
        self.roots = sharded_units(self.model, map(unit_name, placement.stages[number]))
        self.split_head = False  # whether head_weight follows head
        self.begin([], [])

    def begin(self, micro_batches: Sequence[MicroBatch], terms: Sequence[Term]) -> None:
        """Start a step: nothing has run, sums are empty."""
        self.micro_batches = list(micro_batches)
        self.terms = list(terms)
        self.sums: dict[str, Tensor] = {}
        self.total: Tensor | None = None
        self._saved: dict[int, _Saved] = {}
        self._late: dict[int, list[Owed]] = {}
        self._backwards = 0
        self.weights.expect(self.roots, self.number, len(self.micro_batches))

    def input_shape(self, index: int) -> tuple[int, ...] | list[tuple[int, ...]]:
        """[B, S, D] of each tensor that crosses stages; S is this rank's share under sequence
        parallelism, and less where only some rows are sent."""
        return self._shapes(index, [edge.chunks for edge in self.wiring.inputs])

    def output_shape(self, index: int) -> tuple[int, ...] | list[tuple[int, ...]]:
        return self._shapes(index, [edge.chunks for edge in self.wiring.outputs])

    def _shapes(
        self, index: int, chunks: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...] | list[tuple[int, ...]]:
        batch, length = self.micro_batches[index].ids.shape
        length //= axis("sp").size
        of = self.wiring.head_chunks
        shapes: list[tuple[int, ...]] = [
            (batch, length * len(rows) // of if rows else length, self.model.config.hidden)
            for rows in chunks
        ]
        return shapes[0] if len(shapes) == 1 else shapes

    def forward(
        self, index: int, x: Tensor | Sequence[Tensor] | None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Micro-batch ``index`` through this stage: one hidden [B, S, D] per outgoing edge, None
        without one.  ``x``: the same for incoming edges."""
        batch, grad = self.micro_batches[index], torch.is_grad_enabled()
        context = batch.context()
        inputs = [tensor.detach().requires_grad_(grad) for tensor in _many(x)]
        ready: dict[Port, Tensor] = {}
        of = self.wiring.head_chunks
        for edge, ports, tensor in zip(
            self.wiring.inputs, self.wiring.sources, inputs, strict=True
        ):
            if edge.chunks:  # just the rows that the one head here reads
                ready[ports[0]] = tensor
            else:
                deliver(tensor, ports, of, ready)
        totals = []
        for unit, port, ports in self.wiring.steps:
            hidden = None if port is None else ready.pop(port)
            if unit.kind == HEAD:
                assert hidden is not None and port is not None
                totals.append(self._loss(unit.index, hidden, port, batch))
            else:
                out = self.model.run_unit(unit_name(unit), hidden, batch.ids, context)
                deliver(out, ports, of, ready)
        outputs = [ready.pop(port) for port in self.wiring.leaving]
        if grad:
            self._saved[index] = _Saved(inputs, totals, outputs)
        return _few([out.detach() for out in outputs])

    def _loss(self, depth: int, hidden: Tensor, port: Port, batch: MicroBatch) -> Tensor:
        """Loss of the head of one depth on the rows that this stage has."""
        head = self.model.head
        assert head is not None
        fields = batch.fields
        if port.chunks:
            of, ranks = self.wiring.head_chunks, axis("sp").size
            fields = {n: select_rows(f, port.chunks, of, ranks) for n, f in fields.items()}
        terms = [term for term in self.terms if term.depth == depth]
        if not terms and not torch.is_grad_enabled():  # a depth that is not evaluated
            return hidden.new_zeros(())
        total, sums = head(hidden, fields, terms)
        self._add(total.detach(), sums)
        return total

    def backward(
        self, index: int, grad_output: Tensor | Sequence[Tensor] | None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Gradients of the loss w.r.t. this stage's inputs (None where ids were the input)."""
        saved = self._saved.pop(index)
        self._backwards += 1
        self.weights.before_backward(self.roots, self.number)
        saved.run_backward(grad_output)
        return _few([_gradient(tensor) for tensor in saved.inputs])

    def backward_input(
        self, index: int, grad_output: Tensor | Sequence[Tensor] | None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """As ``backward``, but linear maps keep what their weight gradients are made of."""
        saved = self._saved.pop(index)
        self.weights.before_input_gradients(self.roots)
        with self.weights.gradients.collect() as self._late[index]:
            saved.run_backward(grad_output)
        return _few([_gradient(tensor) for tensor in saved.inputs])

    def backward_weight(self, index: int) -> None:
        """The weight gradients that ``backward_input`` left over."""
        self._backwards += 1
        self.weights.gradients.add(self._late.pop(index))
        self.weights.after_weight_gradients(self.roots, self.number)

    def head(
        self, index: int, x: Tensor | Sequence[Tensor] | None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Forward and backward of a stage that holds heads alone."""
        if not self.split_head:
            self.forward(index, x)
            return self.backward(index, None)
        with self.weights.gradients.collect() as late:
            self.forward(index, x)
        result = self.backward_input(index, None)
        self._late[index] += late
        return result

    def head_weight(self, index: int) -> None:
        """The weight gradient that ``head`` left over."""
        self.backward_weight(index)

    def _add(self, total: Tensor, sums: Mapping[str, Tensor]) -> None:
        self.total = total if self.total is None else self.total + total
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def unshard(self) -> None:
        """Gather the sharded weights now instead of at first use."""
        self.weights.unshard(self.roots, self.number)

    def reshard(self) -> None:
        self.weights.reshard(self.roots, self.number)

    def reduce_gradients(self) -> None:
        """Sharded gradients were reduced by the last backward pass; assert that it has run."""
        assert self._backwards == len(self.micro_batches), "a backward pass is missing"


def _many(x: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return () if x is None else (x,) if isinstance(x, Tensor) else x


def _few(tensors: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
    return tensors[0] if len(tensors) == 1 else tuple(tensors) or None


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
