"""What a pipeline rank holds while it follows its list of actions through one step.

Timing does not matter: the order of the actions is fixed, and the executor posts receives and gives
buffers back at fixed places in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.pipeline.actions import (
    COMPUTE,
    HW,
    Action,
    B,
    F,
    H,
    I,
    Kind,
    Schedule,
    TensorId,
    W,
    reads,
)

from .activations import StageMeter
from .observed import Driving
from .stage_profile import StageProfile

PREFETCH = 2  # receives that the executor posts ahead on every link


class Edges:
    """Bytes of what crosses the stages of a schedule, as seen from one rank."""

    def __init__(self, schedule: Schedule, rank: int, meter: StageMeter) -> None:
        self.placement = schedule.placement
        self._sizes = {
            (e.tensor, e.source, e.target): meter.edge_bytes(e) for e in self.placement.edges
        }
        ranks = self.placement.ranks
        local = [e for e in self.placement.edges if ranks[e.source] == ranks[e.target] == rank]
        # Of all tensors that a stage reads from, and writes to, another stage of the rank.
        self.read_here: dict[int, int] = defaultdict(int)
        self.written_here: dict[int, int] = defaultdict(int)
        for edge in local:
            self.read_here[edge.target] += meter.edge_bytes(edge)
            self.written_here[edge.source] += meter.edge_bytes(edge)

    def __getitem__(self, tensor: TensorId) -> int:
        return self._sizes[tensor.name, tensor.source, tensor.target]


def receive_buffers(schedule: Schedule, rank: int, edges: Edges) -> int:
    """Bytes of all receive buffers, which are kept from step to step.

    A few receives are posted ahead on every link; a buffer can be filled again after the last
    action of the micro-batch and stage that read it.
    """
    actions = schedule.actions[rank]
    last = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind in COMPUTE}
    queues: dict[tuple[str, int], list[TensorId]] = defaultdict(list)
    for action in actions:
        if action.kind is Kind.RECV and action.tensor is not None:
            queues[action.channel, action.peer].append(action.tensor)
    place = {tensor: (link, i) for link, queue in queues.items() for i, tensor in enumerate(queue)}
    posted: Counter[tuple[str, int]] = Counter()
    taken: Counter[tuple[str, int]] = Counter()
    free: Counter[int] = Counter()
    lent: dict[tuple[int, int], list[int]] = defaultdict(list)
    made = 0

    def post(link: tuple[str, int], ahead: int) -> None:
        nonlocal made
        while posted[link] < min(taken[link] + ahead, len(queues[link])):
            size = edges[queues[link][posted[link]]]
            posted[link] += 1
            if free[size]:
                free[size] -= 1
            else:
                made += size

    for link in queues:
        post(link, PREFETCH)
    for i, action in enumerate(actions):
        if action.kind is Kind.RECV and action.tensor is not None:
            link, number = place[action.tensor]
            if number >= posted[link]:
                post(link, posted[link] - taken[link] + 1)
        elif action.kind in COMPUTE:
            key = action.stage, action.microbatch
            for tensor in reads(schedule.placement, action):
                if tensor in place:
                    link, _ = place[tensor]
                    taken[link] += 1
                    post(link, PREFETCH)
                    lent[key].append(edges[tensor])
            if last[key] == i:
                free.update(lent.pop(key, ()))
    return made


@dataclass
class StepPeaks:
    """The most of what changes while a step runs.

    activations: kept for backward passes and for weight gradients that follow them.  workspace:
    beyond that in one action.  sent: the gradient on its way to another rank.  in_flight:
    micro-batches between forward and backward, per stage held.  together: everything, with the
    gradients that exist.
    """

    activations: int = 0
    workspace: int = 0
    sent: int = 0
    in_flight: int = 0
    together: int = 0


class StepWalk:
    """Follows the actions of one rank.

    driving: how each stage is run.  gradient_bytes: of each parameter of the rank, from its first
    backward pass on.
    """

    def __init__(
        self, schedule: Schedule, rank: int, meter: StageMeter, driving: Sequence[Driving],
        gradient_bytes: Mapping[str, int], edges: Edges,
    ) -> None:  # fmt: skip
        self.placement, self.actions = schedule.placement, schedule.actions[rank]
        self.meter, self.driving, self.edges = meter, driving, edges
        self.gradient_bytes = gradient_bytes
        stages = self.placement.stages_of(rank)
        self.profiles = {stage: self._profile(stage) for stage in stages}
        # Parameters with a gradient, by the stage that created it.
        self.created: dict[int, set[str]] = {stage: set() for stage in stages}
        self.begun: set[tuple[int, Kind]] = set()
        self.kept = self.sent = self.handed = self.gradients = self.in_flight = 0

    def _profile(self, stage: int, existing: frozenset[str] = frozenset()) -> StageProfile:
        return self.meter.stage_profile(self.placement, stage, self.driving[stage], existing)

    def peaks(self) -> StepPeaks:
        found = StepPeaks()
        for action in self.actions:
            if action.kind is Kind.SEND and action.tensor is not None:
                # It stays until it has gone, or the next one goes.  What a forward pass made is
                # kept for the backward pass anyway.
                self.sent = self.edges[action.tensor] if action.tensor.gradient else 0
                self._note(found, 0)
            elif action.kind in COMPUTE:
                self._before(action)
                again, most, created = self._run(action)
                found.workspace = max(found.workspace, again)
                self._note(found, most)
                self._after(action)
                self.created[action.stage] |= created
                self.gradients += sum(self.gradient_bytes[name] for name in created)
                self._note(found, 0)
        return found

    def _note(self, found: StepPeaks, more: int) -> None:
        found.activations = max(found.activations, self.kept)
        found.sent = max(found.sent, self.sent)
        found.in_flight = max(found.in_flight, self.in_flight)
        now = self.kept + self.sent + self.handed + self.gradients
        found.together = max(found.together, now + more)

    def _before(self, action: Action) -> None:
        if action.kind is F:
            self.kept += self.profiles[action.stage].kept
            self.in_flight += 1

    def _run(self, action: Action) -> tuple[int, int, set[str]]:
        """The most during an action beyond what is there before it (in a forward pass, after it),
        usually and this time, and the gradients that it creates."""
        kind, stage = action.kind, action.stage
        profile = self.profiles[stage]
        again = _most(profile, kind)
        if (stage, kind) in self.begun:
            return again, again, set()
        self.begun.add((stage, kind))
        mine = {
            name for part in ("forward", "backward", "weight") for name in profile.created(part)
        }
        others = set[str]().union(*(s for number, s in self.created.items() if number != stage))
        profile = self._profile(stage, frozenset(mine & others))
        created = {name for part in _PARTS[kind] for name in profile.created(part)}
        return again, _most(profile, kind, self.gradient_bytes), created

    def _after(self, action: Action) -> None:
        kind, stage = action.kind, action.stage
        profile = self.profiles[stage]
        if kind in (B, I):
            self.kept -= profile.kept
            self.handed -= self.edges.written_here[stage]
        if kind in (B, I, H):  # gradients for a stage of the same rank wait there
            self.handed += self.edges.read_here[stage]
        if kind in (I, H):
            self.kept += profile.left
        if kind in (W, HW):
            self.kept -= profile.left
        if kind in (B, W):
            self.in_flight -= 1


_PARTS = {
    F: ("forward",),
    B: ("backward",),
    I: ("backward",),
    H: ("forward", "backward"),
    W: ("weight",),
    HW: ("weight",),
}


def _most(profile: StageProfile, kind: Kind, sizes: Mapping[str, int] | None = None) -> int:
    """The most during an action beyond what is kept for it, or after it.  ``sizes``: bytes of each
    gradient, when those of the stage do not exist yet."""
    if kind is F:
        return profile.forward_peak(sizes) - profile.kept
    if kind in (W, HW):
        return profile.weight_peak(sizes)
    most = profile.backward_peak(sizes)
    if kind is not H:
        return most
    created = 0 if sizes is None else sum(sizes[name] for name in profile.created("forward"))
    return max(profile.forward_peak(sizes), profile.kept + created + most)
