"""What a pipeline stage allocates while one micro-batch runs through it, unit by unit."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.attention import SequenceContext
from models.collectives import axis
from models.losses import Term
from models.transformer import logical_name
from parallel.pipeline.actions import Kind
from parallel.ports import Port
from parallel.stage import MicroBatch, Stage


class Allocations(TorchDispatchMode):
    """Follows what operators allocate, on real or meta tensors.

    live: bytes of the storages that something still refers to.  peak: the most since
    ``restart``.  Scratch memory inside a single operator is not seen.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._existing = list(existing)  # kept alive: their storages are recognised by address
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in self._existing}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._see(value)
        return result

    def _see(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        self.peak = self.live


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]
    return out


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention on meta tensors by a fused kernel, as on every real device; torch itself would
    write out the scores there.  Fused kernels keep q, k, v, the output and one number per row.
    The function is replaced because no torch mode stays active while a backward pass recomputes."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _fused_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@dataclass(frozen=True)
class Driving:
    """How a schedule runs a stage: the kinds of its actions, and whether linear maps of the model
    can leave their weight gradients for later (some stage of the pipeline does)."""

    kinds: frozenset[Kind]
    split: bool


WHOLE = Driving(frozenset((Kind.FORWARD, Kind.BACKWARD)), False)


@dataclass
class UnitRun:
    """Bytes of one unit in one run.  ``UnitProfile`` explains them.

    created: logical names of the gradients that forward, backward and weight gradients create.
    rows: of the logits, 0 but for a head of this ``depth``.  beside_chunks: its forward without
    what it needs for one chunk of rows after the other.
    """

    kept: int = 0
    forward: int = 0
    backward: int = 0
    left: int = 0
    weight: int = 0
    created: tuple[list[str], list[str], list[str]] = field(default_factory=lambda: ([], [], []))
    rows: int = 0
    depth: int = 0
    beside_chunks: int = 0


class ObservedStage(Stage):
    """A stage whose units are told apart while it runs.

    During forward a unit lasts until the next one starts.  During backward units come in reverse
    order, because autograd follows the order of the forward pass; a hook on a unit's output tells
    that its turn has come.
    """

    def observe(
        self, batch: MicroBatch, terms: Sequence[Term], driving: Driving,
        existing: Collection[str] | None = None,
    ) -> list[UnitRun]:  # fmt: skip
        """Run ``batch`` forward and backward.  ``existing``: logical names of the parameters that
        have a gradient before; None for all."""
        self.begin([batch], terms)
        self.split_head = Kind.HEAD_WEIGHT in driving.kinds
        config, model = self.model.config, self.model
        self._named = {logical_name(n, config): p for n, p in model.named_parameters()}
        for name, p in self._named.items():
            p.grad = torch.empty_like(p) if existing is None or name in existing else None
        self._have = {name for name, p in self._named.items() if p.grad is not None}
        received = self._like(self.input_shape(0), self.wiring.inputs)
        gradients = self._like(self.output_shape(0), self.wiring.outputs)
        present = [*received, *gradients, *self._named.values(), batch.ids, *batch.fields.values()]
        present += [p.grad for p in self._named.values() if p.grad is not None]
        present += [] if batch.documents is None else [batch.documents]
        self.runs: list[UnitRun] = []
        self._peaks: dict[int, int] = {}
        self._marks: list[tuple[int, int]] = []
        self._made = self._made_before = 0
        self.memory = Allocations(present)
        original = self.model.run_unit
        self.model.run_unit = partial(self._unit, original)  # type: ignore[method-assign]
        try:
            with self.memory:
                self._drive(driving, received, gradients)
        finally:
            del self.model.run_unit
        later = 0
        for index in reversed(range(len(self.runs))):
            self.runs[index].backward = self._peaks.get(index, 0) - later
            later += self.runs[index].left
        return self.runs

    def _like(self, shape: Any, edges: Sequence[Any]) -> list[Tensor]:
        shapes = [shape] if len(edges) == 1 else shape
        return [torch.empty(s, dtype=self.dtype, device="meta") for s in shapes]

    def _drive(self, driving: Driving, received: list[Tensor], gradients: list[Tensor]) -> None:
        if Kind.HEAD in driving.kinds:
            self.head(0, received)
        else:
            self.forward(0, received)
            if Kind.BACKWARD_INPUT in driving.kinds:
                self.backward_input(0, gradients)
            else:
                self.backward(0, gradients)
        if driving.kinds & {Kind.BACKWARD_WEIGHT, Kind.HEAD_WEIGHT}:
            self.backward_weight(0)

    # Forward.

    def forward(self, index: int, x: Any) -> Any:
        batch, before = self.micro_batches[index], self.memory.live
        context = batch.context()
        shared = self.memory.live - before
        batch.context = lambda held=context: held  # type: ignore[method-assign, misc]
        result = super().forward(index, x)
        self._end_unit()
        del batch.context, context
        # What all units share is there during all of them; what is kept of it counts for the first.
        kept = self.memory.live - self._made - sum(run.kept for run in self.runs)
        self.runs[0].kept += kept
        for number, run in enumerate(self.runs):
            more = shared - (kept if number else 0)
            run.forward += more
            run.beside_chunks += more
        return result

    def _unit(
        self, run: Any, name: str, x: Tensor | None, ids: Tensor, context: SequenceContext
    ) -> Tensor:
        self._start_unit()
        out: Tensor = run(name, x, ids, context)
        if out.requires_grad:
            out.register_hook(partial(self._enter, len(self.runs) - 1))
        return out

    def _loss(self, depth: int, hidden: Tensor, port: Port, batch: MicroBatch) -> Tensor:
        self._start_unit()
        run, before = self.runs[-1], self._start
        run.depth, run.rows = depth, hidden.shape[0] * hidden.shape[1] * axis("sp").size
        assert self.model.head is not None

        def called(*_: Any) -> None:
            run.beside_chunks = self.memory.live - before  # the rows of the fields

        with self.model.head.register_forward_pre_hook(called):
            total = super()._loss(depth, hidden, port, batch)
        run.beside_chunks += self.memory.live - before  # results
        return total

    def _add(self, total: Tensor, sums: Any) -> None:
        """Sums over micro-batches are a few numbers per stage."""

    def _start_unit(self) -> None:
        if self.runs:
            self._end_unit()
        self._start, self._made_before = self.memory.live, self._made
        self.memory.restart()
        self.runs.append(UnitRun())

    def _end_unit(self) -> None:
        run = self.runs[-1]
        run.created[0].extend(self._created())
        run.kept = self.memory.live - self._start - (self._made - self._made_before)
        run.forward = self.memory.peak - self._start

    # Backward.

    def backward(self, index: int, grad_output: Any) -> Any:
        self._open(len(self.runs) - 1)
        super().backward(index, grad_output)
        self._close()

    def backward_input(self, index: int, grad_output: Any) -> Any:
        self._open(len(self.runs) - 1)
        super().backward_input(index, grad_output)
        self._close()
        self._marks.append((len(self.runs) - 1, len(self._late[index])))

    def _enter(self, unit: int, _: Tensor) -> None:
        self._close()
        self._open(unit)

    def _open(self, unit: int) -> None:
        self._window = unit
        self._base = self._made + sum(run.kept for run in self.runs[: unit + 1])
        self._marks.append((unit, len(self._late.get(0, ()))))
        self.memory.restart()

    def _close(self) -> None:
        peak = self.memory.peak - self._base
        self._peaks[self._window] = max(self._peaks.get(self._window, peak), peak)
        self.runs[self._window].created[1].extend(self._created())

    def _created(self) -> list[str]:
        """Names of the parameters that have a gradient only now."""
        found = {n: p.grad for n, p in self._named.items() if n not in self._have}
        names = [name for name, gradient in found.items() if gradient is not None]
        self._made += sum(g.untyped_storage().nbytes() for g in found.values() if g is not None)
        self._have.update(names)
        return names

    def backward_weight(self, index: int) -> None:
        """What was left over last comes first: that of a head, then unit after unit."""
        owed = self._late[index]
        for unit, start in reversed(self._marks):
            part = owed[start:]
            del owed[start:]
            if part:
                run, before, made = self.runs[unit], self.memory.live, self._made
                self.memory.restart()
                self.weights.gradients.add(part)
                run.weight = max(run.weight, self.memory.peak - before)
                run.created[2].extend(self._created())
                run.left += before - self.memory.live + self._made - made
        super().backward_weight(index)
