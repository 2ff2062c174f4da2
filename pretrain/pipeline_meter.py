"""What the pipeline of a run really did: its bubble, its timeline, the costs of its units."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist

from parallel.pipeline.actions import COMPUTE
from parallel.pipeline.measure import (
    measured_bubble,
    measured_costs,
    stage_seconds,
    whole_heads,
)
from parallel.pipeline.rebalance import rebalanced
from parallel.pipeline.simulate import simulate_orders
from parallel.pipeline.timeline import svg_timeline

from .engine import Engine, Recording
from .run_folder import RunFolder, write_atomic


class PipelineMeter:
    """Looks at recorded steps; every rank of the run takes part.

    ``due`` says which steps to record.  The first step is not representative, so the second is
    measured, and from then on every ``measure_every``-th.
    """

    def __init__(self, engine: Engine, folder: RunFolder, is_first_rank: bool) -> None:
        self.engine, self.folder, self.is_first_rank = engine, folder, is_first_rank
        self.config = engine.parallel.pipeline
        self.note = ""

    def due(self, step: int) -> bool:
        every = self.config.measure_every
        if self.engine.parallel.pp == 1 or not every:
            return False
        return step == 2 or step % every == 0

    def report(self, step: int) -> dict[str, float]:
        """Figures of the step just recorded; moves head chunks for the next one if that is
        configured, and notes it."""
        recording = self.engine.recording
        assert recording is not None
        everything = self._gather(recording)
        events = [event for part in everything for event in part.events]
        busy = [
            sum(e.end - e.start for e in part.events if e.action.kind in COMPUTE)
            for part in everything
        ]
        engine = self.engine
        assert engine.costs is not None
        costs = measured_costs(engine.placement, engine.costs, stage_seconds(events))
        orders = engine.schedule(recording.micro_batches).compute_orders()
        predicted = simulate_orders(engine.placement, orders, costs)
        figures = {
            "pipeline/bubble": measured_bubble(busy, [part.seconds for part in everything]),
            "pipeline/bubble_predicted": predicted.bubble_fraction,
        }
        if self.is_first_rank:
            title = f"step {step}: bubble {figures['pipeline/bubble']:.1%}"
            drawing = svg_timeline(events, title=title, unit="s")
            write_atomic(self.folder.path / "timeline.svg", drawing)
            write_atomic(self.folder.path / "unit_costs.yaml", self._cost_file(step, costs))
        self.note = self._rebalance(costs, recording.micro_batches)
        return figures

    def _gather(self, recording: Recording) -> list[Recording]:
        group = self.engine.model.mesh.group("pp")
        everything: list[Any] = [None] * self.engine.parallel.pp
        dist.all_gather_object(everything, recording, group=group)
        return everything

    def _cost_file(self, step: int, costs: Any) -> str:
        """A file for ``parallel.pipeline.costs`` and for planning."""
        lines = [f"# seconds per micro-batch, measured in step {step}", "units:"]
        for name, cost in whole_heads(costs, self.engine.placement).items():
            fixed = f", fixed: {cost.fixed:.6g}" if cost.fixed else ""
            times = f"forward: {cost.forward:.6g}, backward: {cost.backward:.6g}{fixed}"
            lines.append(f"  {name}: {{{times}}}")
        return "\n".join(lines) + "\n"

    def _rebalance(self, costs: Any, micro_batches: int) -> str:
        """Hand chunks on between hosts when that should make steps faster; says so."""
        if not self.config.rebalance:
            return ""
        engine = self.engine
        group = engine.model.mesh.group("data")
        placement = rebalanced(engine.placement, costs)
        if group is not None:  # one pipeline decides for all: their orders must agree
            decided: list[Any] = [placement, costs]
            dist.broadcast_object_list(decided, group_src=0, group=group)
            placement, costs = decided
        if placement == engine.placement:
            return ""
        engine.place(placement, costs)
        loads = costs.rank_loads(placement)
        spread = max(loads) / statistics.mean(loads)
        return f"head chunks moved: busiest rank now {spread:.3f} of the mean (measured costs)"
