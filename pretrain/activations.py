"""Activation memory of a pipeline stage, measured on the real modules without doing arithmetic.

The stage is built as one tensor-parallel rank holds it and runs forward and backward on meta
tensors, which have shapes and lifetimes but no data; every storage that an operator allocates is
followed until nothing refers to it any more.  So a new component needs no formula here.  Of
consecutive blocks of equal structure the first, the second and the last are measured.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.attention import AttentionBackend, SequenceContext
from models.collectives import Axis, bound
from models.linear import accumulation_dtype
from models.losses import HeadOptions, Term
from models.transformer import Head, Transformer
from parallel.apply import apply_recompute
from parallel.collectives import GroupAxis
from parallel.stage import MicroBatch
from parallel.tensor import ParameterPlan, add_region_edges, compute_on_local, parameter_plans

from .config import RunConfig
from .objectives.base import build_objective


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
        storage = tensor.untyped_storage()
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
class UnitProfile:
    """Bytes of one unit and one micro-batch.

    kept: stays from the unit's forward to its backward, less what its input's last use frees.
    forward: the most during its forward beyond what was there before.  backward: the most during
    its backward beyond what it and the units before it keep, when gradients exist already;
    first_backward: the same, when they are being created (those of later units not included).
    """

    kept: int
    forward: int
    backward: int
    first_backward: int


@dataclass(frozen=True)
class StageProfile:
    """All units of a stage in execution order.  input_bytes: the tensor that it receives."""

    units: tuple[str, ...]
    profiles: tuple[UnitProfile, ...]
    input_bytes: int

    @property
    def kept(self) -> int:
        return sum(p.kept for p in self.profiles)

    @property
    def forward_peak(self) -> int:
        """The most that a forward pass adds."""
        before = accumulate((p.kept for p in self.profiles), initial=0)
        return max(start + p.forward for start, p in zip(before, self.profiles))

    def backward_peak(self, gradients: Sequence[int] | None) -> int:
        """The most during a backward pass beyond ``kept``.  ``gradients``: bytes that each unit's
        gradients take once created, in the stage's first backward pass; None in later ones."""
        kept_until = list(accumulate(p.kept for p in self.profiles))
        if gradients is None:
            peaks = [k + p.backward for k, p in zip(kept_until, self.profiles)]
        else:
            later = [sum(gradients[i + 1 :]) for i in range(len(gradients))]
            peaks = [k + p.first_backward + g for k, p, g in zip(kept_until, self.profiles, later)]
        return max(peaks) - self.kept


class _PlannedAxis(GroupAxis):
    """Member 0 of an axis of ``size`` ranks without a process group: the right shapes, no sums."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def max_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        return parts.flatten(0, 1) if dim == 0 else torch.cat(tuple(parts), dim=dim)

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor:
        return torch.empty_like(torch.stack(x.chunk(self.size, dim=dim))[0])


def local_shape(plan: ParameterPlan, tp: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel rank's part of a parameter."""
    return tuple(n // tp if dim == plan.dim else n for dim, n in enumerate(plan.shape))


def signature(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that compute the same on parameters of the same shapes."""
    return (str(block), *((name, tuple(p.shape)) for name, p in block.named_parameters()))


def _dense_mask(config: RunConfig) -> bool:
    """Whether documents become a [B, 1, S, S] mask: in SDPA, which ``auto`` leaves on a GPU."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return config.kernels.attention == "sdpa" or (config.kernels.attention == "auto" and not on_gpu)


class StageMeter:
    """Measures stages of one run on tensor-parallel rank 0, which holds the most vocabulary."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        with torch.device("meta"):
            blocks = Transformer(config.model).blocks
        self._kinds = {f"blocks.{layer}": signature(block) for layer, block in blocks.items()}
        self._measured: dict[Any, tuple[UnitProfile, ...]] = {}
        tp = config.parallel.tp
        self._axes: dict[str, Axis] = {"tp": _PlannedAxis(tp)} if tp > 1 else {}
        if config.parallel.sp:
            self._axes["sp"] = self._axes["tp"]
        self._batch, self._terms = self._objective()

    def _objective(self) -> tuple[MicroBatch, list[Term]]:
        """A micro-batch of zeros as the objective sees it, and its loss terms."""
        training = self.config.training
        objective = build_objective(self.config.objective, self.config.model)
        tokens = torch.zeros(training.micro_batch, training.sequence_length + 1, dtype=torch.long)
        batch = objective.micro_batch(tokens, torch.zeros_like(tokens), range(len(tokens)))
        kept = [batch.ids, *batch.fields.values(), batch.documents]
        self.batch_bytes = sum(t.nbytes for t in kept if t is not None)
        if not _dense_mask(self.config):
            batch = replace(batch, documents=None)
        return batch, objective.terms(objective.counts([batch]))

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of what crosses stages."""
        precision = self.config.precision
        dtype = precision.compute_dtype or precision.weight_dtype
        wide = self.config.model.residual_dtype == "float32"
        return accumulation_dtype(dtype) if wide else dtype

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """[B, S, D] between units, S being this rank's share under sequence parallelism."""
        batch, length = self._batch.ids.shape
        share = self.config.parallel.tp if self.config.parallel.sp else 1
        return (batch, length // share, self.config.model.hidden)

    @property
    def boundary_bytes(self) -> int:
        """One tensor between two stages."""
        return math.prod(self.hidden_shape) * self.residual_dtype.itemsize

    def profile(self, units: Sequence[str]) -> StageProfile:
        """The profile of a stage made of ``units``."""
        chosen: list[str] = []
        stands_for: list[int] = []
        for _, group in groupby(units, key=lambda name: self._kinds.get(name, name)):
            names = list(group)
            measured = sorted({0, 1, len(names) - 1} & set(range(len(names))))
            for place in range(len(names)):
                stands_for.append(len(chosen) + measured.index(place if place in measured else 1))
            chosen += [names[place] for place in measured]
        key = tuple(self._kinds.get(name, name) for name in chosen)
        if key not in self._measured:
            self._measured[key] = self._measure(chosen)
        profiles = tuple(self._measured[key][place] for place in stands_for)
        received = 0 if units[0] == "embedding" else self.boundary_bytes
        return StageProfile(tuple(units), profiles, received)

    def _measure(self, units: Sequence[str]) -> tuple[UnitProfile, ...]:
        with fused_attention(), bound(self._axes):
            stage = self._build(units)
            runs = _Runs(stage, units, self._shapes(self._batch), self._terms)
            hidden = torch.empty(self.hidden_shape, dtype=self.residual_dtype, device="meta")
            first, later = runs.run(hidden), runs.run(hidden)
            profiles = [
                UnitProfile(after.kept, after.forward, after.backward, before.backward)
                for before, after in zip(first, later, strict=True)
            ]
            if stage.head is not None:
                most = later[-1].added + self._head_workspace(stage.head)
                profiles[-1] = replace(profiles[-1], forward=most)
        return tuple(profiles)

    def _build(self, units: Sequence[str]) -> Transformer:
        """The stage in the order of ``parallel.apply``, with plain local parameters."""
        config, parallel = self.config, self.config.parallel
        backend: AttentionBackend = "sdpa"  # keeps q, k, v, output and row statistics, as all do
        with torch.device("meta"):
            stage = Transformer(config.model, units, backend)
        plans = parameter_plans(stage, parallel.sp)
        stored, compute = config.precision.weight_dtype, config.precision.compute_dtype
        for prefix, module in stage.named_modules():
            for key in [key for key, _ in module.named_parameters(recurse=False)]:
                name = f"{prefix}.{key}" if prefix else key
                gathered = parallel.fsdp > 1 and name.startswith("blocks.")
                dtype = compute if gathered and compute is not None else stored
                shape = local_shape(plans[name], parallel.tp)
                setattr(module, key, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        if parallel.tp > 1:
            add_region_edges(stage)
        if parallel.tp > 1 or compute is not None:
            compute_on_local(stage, compute)
        for block in stage.blocks.values():
            apply_recompute(block, parallel.recompute)
        return stage

    def _shapes(self, batch: MicroBatch) -> MicroBatch:
        documents = batch.documents
        return replace(
            batch,
            ids=batch.ids.to("meta"),
            fields={name: value.to("meta") for name, value in batch.fields.items()},
            documents=None if documents is None else documents.to("meta"),
        )

    def _head_workspace(self, head: Head) -> int:
        """The most that the chunked loss holds beyond its results: measured on three chunks."""
        model, tp = self.config.model, self.config.parallel.tp
        chunk = HeadOptions(model.vocab_size).rows_per_chunk(head.matrix().shape[0])
        rows = min(3 * chunk, self._batch.ids.numel())
        share = tp if self.config.parallel.sp else 1
        rows = -(-rows // share) * share
        fields = {
            name: torch.empty(1, rows, dtype=value.dtype, device="meta")
            for name, value in self._batch.fields.items()
        }
        head.chunk_rows = 0
        shape = (1, rows // share, model.hidden)
        x = torch.empty(shape, dtype=self.residual_dtype, device="meta")
        x.requires_grad_()
        memory = Allocations([x, *fields.values(), head.matrix()])
        with memory:
            result = head(x, fields, self._terms)
            workspace = memory.peak - memory.live
        del result
        return workspace


@dataclass
class _Measured:
    kept: int
    forward: int
    added: int  # by the end of the forward pass, before its input is let go
    backward: int = 0


class _Runs:
    """Micro-batches through a stage, forward and backward, with a mark between its units."""

    def __init__(
        self, stage: Transformer, units: Sequence[str], batch: MicroBatch, terms: Sequence[Term]
    ) -> None:
        self.stage, self.units, self.batch, self.terms = stage, units, batch, terms
        if stage.head is not None:
            stage.head.chunk_rows = batch.ids.numel()  # chunks are measured apart
        self.parameters = list(stage.parameters())

    def run(self, hidden: Tensor) -> list[_Measured]:
        """One micro-batch; gradients stay.  ``hidden``: like what crosses stages."""
        received = torch.empty_like(hidden)
        x = self.batch.ids if self.stage.embedding is not None else hidden.detach()
        x.requires_grad_(x.is_floating_point())
        present = [x, received, *self.parameters, self.batch.ids, *self.batch.fields.values()]
        present += [p.grad for p in self.parameters if p.grad is not None]
        if self.batch.documents is not None:
            present.append(self.batch.documents)
        self.memory = Allocations(present)
        self.found: list[_Measured] = []
        with self.memory:
            out = self._forward(x)
            kept = sum(unit.kept for unit in self.found)
            self.found[0].kept += self.memory.live - kept  # of the context: kept or let go
            self._gradients_before = self._gradient_bytes()
            self._open(len(self.found) - 1)
            torch.autograd.backward(out, None if self.stage.head is not None else received)
            self._close()
        return self.found

    def _forward(self, x: Tensor) -> Tensor:
        context = self.batch.context()
        for index, name in enumerate(self.units):
            before = self.memory.live
            self.memory.restart()
            out = self._unit(name, x, context)
            added, most = self.memory.live - before, self.memory.peak - before
            x = out
            del out
            self.found.append(_Measured(self.memory.live - before, most, added))
            if name != "head" and x.requires_grad and index + 1 < len(self.units):
                x.register_hook(lambda _, index=index: self._enter(index))
        return x

    def _unit(self, name: str, x: Tensor, context: SequenceContext) -> Tensor:
        stage = self.stage
        if name == "head":
            assert stage.head is not None
            return stage.head(x, self.batch.fields, self.terms)[0]
        if name == "final_norm":
            return x if stage.final_norm is None else stage.final_norm(x)
        if name == "embedding":
            assert stage.embedding is not None
            return stage.embedding(x)
        return stage.blocks[name.removeprefix("blocks.")](x, context)

    def _gradient_bytes(self) -> int:
        return sum(p.grad.untyped_storage().nbytes() for p in self.parameters if p.grad is not None)

    def _enter(self, index: int) -> None:
        """The backward pass has reached unit ``index``."""
        self._close()
        self._open(index)

    def _open(self, index: int) -> None:
        self._index = index
        self._base = sum(unit.kept for unit in self.found[: index + 1])
        self._base += self._gradient_bytes() - self._gradients_before
        self.memory.restart()

    def _close(self) -> None:
        self.found[self._index].backward = self.memory.peak - self._base
