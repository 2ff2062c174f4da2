"""The schedule's intermediate form: one static list of actions per rank.

What an action reads and writes is derived from the placement's edges alone.  A schedule may
therefore order any placement in any way that the checker accepts; nothing downstream knows 1F1B.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from parallel.pipeline.units import Edge, Placement


class Kind(StrEnum):
    """What an action does.  H and HW belong to stages that hold heads alone."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"  # the rest of I
    HEAD = "H"  # forward and backward of a head in one go (input gradients only, if HW follows)
    HEAD_WEIGHT = "HW"  # the weight gradient that H left over
    SEND = "SEND"
    RECV = "RECV"
    UNSHARD = "UNSHARD"  # gather the stage's sharded parameters
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"  # reduce the stage's gradients over the data-parallel ranks
    STEP = "STEP"  # optimizer step of the whole rank


F, B, I, W, H, HW = (  # noqa: E741
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.HEAD,
    Kind.HEAD_WEIGHT,
)
COMPUTE = frozenset((F, B, I, W, H, HW))
ACCUMULATE = frozenset((B, W, H, HW))  # adds to the stage's weight gradients


class TensorId(NamedTuple):
    """One micro-batch of one edge: the activation, or its gradient (which flows back).

    With ``source == target`` it names what a stage keeps for itself between two actions.
    """

    name: str
    source: int
    target: int
    microbatch: int
    gradient: bool = False

    def __str__(self) -> str:
        kind = "gradient of " if self.gradient else ""
        where = (self.target, self.source) if self.gradient else (self.source, self.target)
        return f"{kind}{self.name} (stage {where[0]} to {where[1]}, micro-batch {self.microbatch})"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    ``microbatch`` is −1 where the action concerns the whole stage.  SEND and RECV carry the
    ``tensor``, the ``peer`` rank and the ``channel``; their ``stage`` is the one of this rank that
    wrote or will read the tensor.  STEP has stage −1.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    tensor: TensorId | None = None
    peer: int = -1
    channel: str = ""

    def __str__(self) -> str:
        if self.tensor is not None:
            link = "to" if self.kind is Kind.SEND else "from"
            return f"{self.kind} of {self.tensor} {link} rank {self.peer} on channel {self.channel}"
        if self.microbatch < 0:
            return f"{self.kind}" + (f" of stage {self.stage}" if self.stage >= 0 else "")
        return f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"


Orders = list[list[Action]]


@dataclass(frozen=True)
class Schedule:
    """A placement, the number of micro-batches, and each rank's list of actions."""

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def links(self) -> tuple[tuple[str, int, int], ...]:
        """Every (channel, sending rank, receiving rank) in use, sorted."""
        return tuple(
            sorted(
                {
                    (action.channel, rank, action.peer)
                    for rank, actions in enumerate(self.actions)
                    for action in actions
                    if action.kind is Kind.SEND
                }
            )
        )

    def compute_orders(self) -> Orders:
        """Each rank's compute actions, without communication and parameter actions."""
        return [[a for a in actions if a.kind in COMPUTE] for actions in self.actions]


def _tensors(edges: tuple[Edge, ...], microbatch: int, gradient: bool) -> tuple[TensorId, ...]:
    return tuple(TensorId(e.tensor, e.source, e.target, microbatch, gradient) for e in edges)


def _kept(name: str, action: Action) -> tuple[TensorId, ...]:
    return (TensorId(name, action.stage, action.stage, action.microbatch),)


def reads(placement: Placement, action: Action) -> tuple[TensorId, ...]:
    """What must be on the rank before the action, stage tensors in edge order first."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD | Kind.HEAD:
            return _tensors(placement.inputs[stage], microbatch, False)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            gradients = _tensors(placement.outputs[stage], microbatch, True)
            return gradients + _kept("saved activations", action)
        case Kind.BACKWARD_WEIGHT | Kind.HEAD_WEIGHT:
            return _kept("saved weight inputs", action)
        case Kind.SEND:
            assert action.tensor is not None
            return (action.tensor,)
    return ()


def writes(placement: Placement, action: Action) -> tuple[TensorId, ...]:
    """What the action leaves on the rank, stage tensors in edge order first."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            activations = _tensors(placement.outputs[stage], microbatch, False)
            return activations + _kept("saved activations", action)
        case Kind.BACKWARD:
            return _tensors(placement.inputs[stage], microbatch, True)
        case Kind.BACKWARD_INPUT | Kind.HEAD:
            gradients = _tensors(placement.inputs[stage], microbatch, True)
            return gradients + _kept("saved weight inputs", action)
        case Kind.RECV:
            assert action.tensor is not None
            return (action.tensor,)
    return ()


def reader(tensor: TensorId) -> int:
    """The stage that reads a tensor."""
    return tensor.source if tensor.gradient else tensor.target


def writer(tensor: TensorId) -> int:
    """The stage that writes a tensor."""
    return tensor.target if tensor.gradient else tensor.source


def channel_of(placement: Placement, tensor: TensorId) -> str:
    """Activations and gradients never share a channel, nor do head rows and stage boundaries."""
    prefix = "head_" if placement.head_only[tensor.target] else ""
    return prefix + ("backward" if tensor.gradient else "forward")
