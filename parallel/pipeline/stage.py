"""What the executor asks of the module that holds a stage."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from parallel.pipeline.actions import HW, B, F, H, I, Kind, W

Tensors = torch.Tensor | tuple[torch.Tensor, ...] | None

METHODS = {
    F: "forward",
    B: "backward",
    I: "backward_input",
    W: "backward_weight",
    H: "head",
    HW: "head_weight",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
    Kind.REDUCE: "reduce_gradients",
}


class StageModule(Protocol):
    """The units of one stage on one rank.

    ``x`` is the stage's input and ``grad_output`` the gradient of its output: ``None`` for a stage
    without one, a tensor for one edge, a tuple in edge order for several (``Placement.inputs`` and
    ``outputs``); shapes likewise.  The first stage reads its own token ids; a stage with a head
    computes its loss inside.  ``x`` carries no gradient history.  It and ``grad_output`` are valid
    until the last action of their micro-batch in this stage and are overwritten afterwards.
    Shapes and ``dtype`` never depend on data.
    """

    dtype: torch.dtype

    def input_shape(self, microbatch: int) -> Any:
        """Shape of ``x``; not asked of a stage without input."""

    def output_shape(self, microbatch: int) -> Any:
        """Shape of what ``forward`` returns; not asked of a stage without output."""

    def forward(self, microbatch: int, x: Any) -> Tensors:
        """Action F.  With gradients disabled (evaluation) nothing is to be kept for later."""

    def backward(self, microbatch: int, grad_output: Any) -> Tensors:
        """Action B: accumulate parameter gradients and return the gradient of ``x``."""

    def unshard(self) -> None:
        """Gather sharded parameters."""

    def reshard(self) -> None:
        """Free gathered parameters."""

    def reduce_gradients(self) -> None:
        """Reduce the accumulated gradients over the data-parallel ranks."""


class SplitStageModule(StageModule, Protocol):
    """For schedules that compute input and weight gradients apart (I and W)."""

    def backward_input(self, microbatch: int, grad_output: Any) -> Tensors:
        """Action I: return the gradient of ``x``."""

    def backward_weight(self, microbatch: int) -> None:
        """Action W: accumulate the parameter gradients that I left over."""


class HeadStageModule(StageModule, Protocol):
    """For stages that hold heads alone and run forward and backward in one action (H, HW)."""

    def head(self, microbatch: int, x: Any) -> Tensors:
        """Action H: add to the loss and return the gradient of ``x``."""

    def head_weight(self, microbatch: int) -> None:
        """Action HW: accumulate the weight gradient that H left over."""
