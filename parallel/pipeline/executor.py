"""Runs one rank's action list over torch.distributed point-to-point messages.

Receives are posted ahead, a few per link, in list order; sends do not block the compute that
follows.  A rank therefore waits only where a compute action needs a tensor that has not arrived.
Every receive is posted at its place in the list at the latest, which is all that the checker's
proof of freedom from deadlock asks for.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel.pipeline.actions import (
    COMPUTE,
    HW,
    Action,
    Kind,
    Schedule,
    TensorId,
    W,
    reads,
    writes,
)
from parallel.pipeline.links import Link, Links
from parallel.pipeline.schedules import forward_schedule
from parallel.pipeline.stage import METHODS, StageModule, Tensors
from parallel.pipeline.timeline import Event


class TransferError(RuntimeError):
    """A message did not arrive in time, or its peer died; the text says what waited for what."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An action with everything that can be worked out before the first run."""

    position: int
    action: Action
    link: Link | None
    reads: tuple[TensorId, ...]  # stage tensors only, in edge order
    writes: tuple[TensorId, ...]
    last_use: bool  # no later action of this (stage, micro-batch)


class _Program:
    """One rank's list, prepared: its steps, and the receives of each link in order."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        placement, actions = schedule.placement, schedule.actions[rank]
        last = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind in COMPUTE}
        self.steps: list[_Step] = []
        self.receives: dict[Link, list[_Step]] = {}
        for i, action in enumerate(actions):
            link = None
            if action.kind is Kind.SEND:
                link = (action.channel, rank, action.peer)
            elif action.kind is Kind.RECV:
                link = (action.channel, action.peer, rank)
            read, written = (
                tuple(tensor for tensor in tensors if tensor.source != tensor.target)
                for tensors in (reads(placement, action), writes(placement, action))
            )
            last_use = last.get((action.stage, action.microbatch)) == i
            step = _Step(i, action, link, read, written, last_use)
            self.steps.append(step)
            if link is not None and action.kind is Kind.RECV:
                self.receives.setdefault(link, []).append(step)


class Executor:
    """Runs the actions of one rank.

    ``stages`` maps this rank's stage numbers to their modules.  ``prefetch`` receives per link are
    posted ahead; up to ``send_window`` sends may be under way.  ``timeout`` (seconds) bounds each
    wait on a CPU; on an accelerator the groups' own timeout does.  ``on_step`` runs STEP.  With
    ``record``, ``events`` holds the times (``time.perf_counter``) of the latest run's compute
    actions and of its waits for receives; an accelerator is then synchronised around each.
    ``ValueError`` when modules, methods or links do not fit the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageModule],
        links: Links,
        *,
        timeout: float = 600.0,
        prefetch: int = 2,
        send_window: int = 8,
        on_step: Callable[[], None] | None = None,
        record: bool = False,
    ) -> None:
        if prefetch < 1 or send_window < 1:
            raise ValueError(f"prefetch {prefetch}, send_window {send_window}: at least 1 each")
        self.placement, self.stages, self.links = schedule.placement, stages, links
        self.timeout = timedelta(seconds=timeout)
        self.prefetch, self.send_window = prefetch, send_window
        self.on_step, self.record = on_step, record
        self.events: list[Event] = []
        # Receive buffers out of use, by shape and dtype; kept from one run to the next.
        self.free: dict[tuple[Any, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._training = _Program(schedule, links.rank)
        self._forward = _Program(forward_schedule(schedule), links.rank)
        self._check()

    def _check(self) -> None:
        rank, wanted = self.links.rank, self.placement.stages_of(self.links.rank)
        if tuple(sorted(self.stages)) != wanted:
            given = sorted(self.stages)
            raise ValueError(f"rank {rank} runs stages {list(wanted)}; modules given for {given}")
        for step in self._training.steps + self._forward.steps:
            action, method = step.action, METHODS.get(step.action.kind, "")
            if step.link is not None and step.link not in self.links.groups:
                raise ValueError(f"the links have no {step.link}, needed for {action}")
            if action.kind is Kind.STEP and self.on_step is None:
                raise ValueError("the schedule has a STEP action: give on_step")
            if method and not callable(getattr(self.stages[action.stage], method, None)):
                raise ValueError(f"the module of stage {action.stage} has no method {method}")

    def run(self) -> None:
        """One training step: all micro-batches forward and backward, gradients reduced.

        ``TransferError`` when a message is late; the executor cannot be used again after it.
        """
        self.events = []
        _Run(self, self._training).run()

    def run_forward(self) -> None:
        """All micro-batches forward only, with gradients disabled."""
        self.events = []
        with torch.no_grad():
            _Run(self, self._forward).run()


class _Run:
    """One pass over a program, and the tensors under way in it."""

    def __init__(self, executor: Executor, program: _Program) -> None:
        self.executor, self.program, self.links = executor, program, executor.links
        self.values: dict[TensorId, torch.Tensor] = {}
        self.receives: dict[TensorId, tuple[Any, torch.Tensor, _Step]] = {}
        self.posted: dict[Link, int] = defaultdict(int)
        self.taken: dict[Link, int] = defaultdict(int)
        self.sends: deque[tuple[Any, torch.Tensor, _Step]] = deque()
        self.current = program.steps[0]
        # Receive buffers that a stage still uses, by (stage, micro-batch).
        self.lent: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def run(self) -> None:
        executor = self.executor
        for link in self.program.receives:
            self.post(link, executor.prefetch)
        for step in self.program.steps:
            self.current, kind = step, step.action.kind
            if kind in COMPUTE:
                self.compute(step)
            elif kind is Kind.SEND:
                self.send(step)
            elif kind is Kind.RECV:
                if step.action.tensor not in self.receives:  # beyond the prefetched ones
                    assert step.link is not None
                    self.post(step.link, self.posted[step.link] - self.taken[step.link] + 1)
            elif kind is Kind.STEP:
                assert executor.on_step is not None
                executor.on_step()
            else:
                getattr(executor.stages[step.action.stage], METHODS[kind])()
        while self.sends:
            self.finish_send()

    def post(self, link: Link, ahead: int) -> None:
        """Post receives of a link until ``ahead`` of them are outstanding, or none is left."""
        queue, device = self.program.receives[link], self.links.device
        while self.posted[link] < min(self.taken[link] + ahead, len(queue)):
            step = queue[self.posted[link]]
            tensor = step.action.tensor
            assert tensor is not None
            module = self.executor.stages[step.action.stage]
            shape, dtype = self.shape(tensor, step.action.stage), module.dtype
            free = self.executor.free[shape, dtype]
            buffer = free.pop() if free else torch.empty(shape, dtype=dtype, device=device)
            source = self.links.ranks[step.action.peer]
            with self.explained(step):
                work = dist.irecv(buffer, source, group=self.links.groups[link])
            self.receives[tensor] = (work, buffer, step)
            self.posted[link] += 1

    def shape(self, tensor: TensorId, stage: int) -> tuple[int, ...]:
        """The agreed shape of a tensor at one of its two stages."""
        placement, module = self.executor.placement, self.executor.stages[stage]
        if stage == tensor.target:
            edges, shapes = placement.inputs[stage], module.input_shape(tensor.microbatch)
        else:
            edges, shapes = placement.outputs[stage], module.output_shape(tensor.microbatch)
        if len(edges) == 1:
            return tuple(shapes)
        names = [(edge.tensor, edge.source, edge.target) for edge in edges]
        return tuple(shapes[names.index((tensor.name, tensor.source, tensor.target))])

    def compute(self, step: _Step) -> None:
        action, executor = step.action, self.executor
        inputs = [self.take(tensor, step) for tensor in step.reads]
        method = getattr(executor.stages[action.stage], METHODS[action.kind])
        start = self.now()
        if action.kind in (W, HW):
            method(action.microbatch)
            outputs: tuple[torch.Tensor, ...] = ()
        else:
            packed = inputs[0] if len(inputs) == 1 else tuple(inputs) or None
            outputs = _unpack(method(action.microbatch, packed), step)
        if executor.record:
            executor.events.append(Event(self.links.rank, action, start, self.now()))
        self.values.update(zip(step.writes, (value.detach() for value in outputs)))
        self.release(step, outputs)

    def take(self, tensor: TensorId, step: _Step) -> torch.Tensor:
        """A tensor that an action reads: made on this rank, or received."""
        if tensor in self.values:
            return self.values.pop(tensor)
        work, buffer, receive = self.receives.pop(tensor)
        assert receive.link is not None
        start = self.now()
        self.wait(work, receive)
        if self.executor.record:
            self.executor.events.append(Event(self.links.rank, receive.action, start, self.now()))
        self.taken[receive.link] += 1
        self.post(receive.link, self.executor.prefetch)
        self.lent[step.action.stage, step.action.microbatch].append(buffer)
        return buffer

    def release(self, step: _Step, outputs: tuple[torch.Tensor, ...]) -> None:
        """After a micro-batch's last action in a stage, its receive buffers can be filled again."""
        key = (step.action.stage, step.action.microbatch)
        if key not in self.lent:
            return
        # A buffer that the stage itself hands on (an identity, a view) stays with its readers.
        handed_on = {_address(value) for value in outputs}
        self.lent[key] = [b for b in self.lent[key] if _address(b) not in handed_on]
        if step.last_use:
            for buffer in self.lent.pop(key):
                # detach() drops the gradient that the stage hung on the tensor.
                self.executor.free[tuple(buffer.shape), buffer.dtype].append(buffer.detach())

    def send(self, step: _Step) -> None:
        action, tensor = step.action, step.action.tensor
        assert tensor is not None and step.link is not None
        value = self.values.pop(tensor).contiguous()
        expected = (self.shape(tensor, action.stage), self.executor.stages[action.stage].dtype)
        if (tuple(value.shape), value.dtype) != expected:
            raise ValueError(
                f"rank {self.links.rank}: {action}: the stage returned {tuple(value.shape)} of "
                f"{value.dtype}, agreed are {expected[0]} of {expected[1]}"
            )
        group = self.links.groups[step.link]
        with self.explained(step):
            work = dist.isend(value, self.links.ranks[action.peer], group=group)
        self.sends.append((work, value, step))
        while self.sends and self.sends[0][0].is_completed():
            self.sends.popleft()
        if len(self.sends) > self.executor.send_window:
            self.finish_send()

    def finish_send(self) -> None:
        """Wait for the oldest send; its tensor is referenced until then."""
        work, _, step = self.sends.popleft()
        self.wait(work, step)

    def wait(self, work: Any, transfer: _Step) -> None:
        with self.explained(transfer):
            if self.links.device.type == "cpu":
                work.wait(self.executor.timeout)
            else:
                work.wait()  # orders the streams; the group's watchdog bounds the time

    @contextmanager
    def explained(self, transfer: _Step) -> Iterator[None]:
        """A failure names the rank, the message and the action that stands still."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            waited, ranks = time.perf_counter() - start, self.links.ranks
            raise TransferError(
                f"rank {self.links.rank} (global rank {ranks[self.links.rank]}) waited "
                f"{waited:.1f} s for {transfer.action} (global rank {ranks[transfer.action.peer]}) "
                f"at action {self.current.position + 1} of {len(self.program.steps)}: "
                f"{self.current.action}"
            ) from error

    def now(self) -> float:
        if self.executor.record and self.links.device.type != "cpu":
            torch.accelerator.synchronize(self.links.device)
        return time.perf_counter()


def _unpack(result: Tensors, step: _Step) -> tuple[torch.Tensor, ...]:
    """A stage's result as one tensor per edge; ``ValueError`` when it has another number."""
    count = len(step.writes)
    if count == 0:
        return ()
    outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result or ())
    if len(outputs) != count:
        raise ValueError(
            f"{step.action}: the stage returned {len(outputs)} tensors for {count} edges"
        )
    return outputs


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
