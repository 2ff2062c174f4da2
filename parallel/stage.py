"""One pipeline stage: a part of the model and its micro-batches, run forward and backward.

The executor drives stages through ``forward`` and ``backward``; a model without pipeline
parallelism is one stage that owns every unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.attention import MaskKind, SequenceContext
from models.collectives import axis
from models.linear import accumulation_dtype
from models.losses import Term
from models.transformer import Transformer

from .apply import sharded_units


@dataclass
class MicroBatch:
    """Token ids [B, S] with what an objective says about them.

    fields: row fields of the loss terms, each [B, S].  documents: int64 [B, S] or None.
    """

    ids: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    mask: MaskKind = "causal"
    documents: Tensor | None = None

    def context(self) -> SequenceContext:
        positions = torch.arange(self.ids.shape[1], device=self.ids.device)
        return SequenceContext(positions, self.mask, self.documents)


class Stage:
    """Runs ``model`` (some units of the whole) on the micro-batches of one optimizer step.

    ``compute_dtype`` is the dtype of matrix products, and of the residual stream between stages
    unless the model asks for a wider one.
    """

    def __init__(
        self, model: Transformer, compute_dtype: torch.dtype, reshard: bool = True
    ) -> None:
        self.model = model
        wide = model.config.residual_dtype == "float32"
        self.dtype = accumulation_dtype(compute_dtype) if wide else compute_dtype
        self.units = sharded_units(model)
        self.reshard_each_time = reshard
        self.begin([], [])

    def begin(self, micro_batches: Sequence[MicroBatch], terms: Sequence[Term]) -> None:
        """Start a step: nothing has run, sums are empty."""
        self.micro_batches = list(micro_batches)
        self.terms = list(terms)
        self.sums: dict[str, Tensor] = {}
        self.total: Tensor | None = None
        self._saved: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._backwards = 0

    def input_shape(self, index: int) -> tuple[int, int, int]:
        """[B, S, D] of what crosses stages; S is this rank's share under sequence parallelism."""
        batch, length = self.micro_batches[index].ids.shape
        return (batch, length // axis("sp").size, self.model.config.hidden)

    output_shape = input_shape

    def forward(self, index: int, x: Tensor | None) -> Tensor | None:
        """Micro-batch ``index`` through this stage: hidden [B, S, D] for the next stage, or None
        where the loss was computed.  ``x`` is None on the stage that embeds."""
        batch = self.micro_batches[index]
        inputs = None
        if self.model.embedding is None:
            assert x is not None
            inputs = x.detach().requires_grad_(torch.is_grad_enabled())
        out = self.model(batch.ids if inputs is None else inputs, batch.context())
        if self.model.head is not None:
            out, sums = self.model.head(out, batch.fields, self.terms)
            self._add(out.detach(), sums)
        if torch.is_grad_enabled():
            self._saved[index] = (inputs, out)
        return None if self.model.head is not None else out.detach()

    def backward(self, index: int, grad_output: Tensor | None) -> Tensor | None:
        """Gradient of the loss w.r.t. this stage's input (None where ids were the input)."""
        inputs, out = self._saved.pop(index)
        self._backwards += 1
        self._synchronise(self._backwards == len(self.micro_batches))
        torch.autograd.backward(out, grad_output)
        return None if inputs is None else inputs.grad

    def _add(self, total: Tensor, sums: Mapping[str, Tensor]) -> None:
        self.total = total if self.total is None else self.total + total
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _synchronise(self, last: bool) -> None:
        """Where weights are gathered anew each time, reduce each micro-batch's gradients, so that
        no rank holds them whole; otherwise accumulate them and reduce in the last backward pass."""
        now = last or self.reshard_each_time
        for unit in self.units:
            unit.set_requires_gradient_sync(now)
            unit.set_is_last_backward(last)
            unit.set_reshard_after_backward(now)

    def unshard(self) -> None:
        """Gather the sharded weights now instead of at first use."""
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def reduce_gradients(self) -> None:
        """Sharded gradients were reduced by the last backward pass; assert that it has run."""
        assert self._backwards == len(self.micro_batches), "a backward pass is missing"
