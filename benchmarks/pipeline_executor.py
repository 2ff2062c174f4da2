"""The pipeline executor against torch.distributed.pipelining, and the simulator against both.

Two gloo processes with one thread each hold the same modules (shared by both sides), run the same
micro-batches through the same schedule and compute the same loss.  The gradients of both sides are
compared before anything is timed; then whole steps are timed in turn, from a barrier to a barrier.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import (
    Options,
    Report,
    at_least,
    at_most,
    command,
    ratios,
    run_ranks,
    spread,
)
from benchmarks.two_ranks import (
    RANKS,
    TOLERANCE,
    VIRTUAL,
    model_config,
    peer_schedule,
    timed,
    transfer_seconds,
)
from models.config import ModelConfig
from models.losses import CrossEntropy
from models.transformer import Transformer
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.pipeline.actions import B, F, Schedule
from parallel.pipeline.cost import CostTable, UnitCost
from parallel.pipeline.executor import Executor
from parallel.pipeline.links import create_links
from parallel.pipeline.measure import Seconds, stage_seconds
from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.simulate import simulate
from parallel.pipeline.units import Placement
from parallel.stage import MicroBatch, ShardedWeights, Stage, unit_name
from pretrain.placement import plan_pipeline


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    vocabulary: int
    length: int
    micro_batch: int
    micro_batches: int

    def config(self) -> ModelConfig:
        return model_config(self.hidden, self.layers, self.vocabulary)


SHAPES = {
    # Stages of tens of milliseconds, as in training, and of a few, where overhead shows.
    "compute": Shape(256, 8, 4096, 128, 2, 8),
    "overhead": Shape(64, 8, 512, 64, 1, 8),
}
TOY = Shape(32, 6, 128, 16, 1, 4)


class Both:
    """Both sides over the same modules of one rank."""

    def __init__(self, rank: int, shape: Shape, name: str) -> None:
        config = shape.config()
        pipeline = PipelineConfig(name, VIRTUAL[name])  # type: ignore[arg-type]
        parallel = ParallelConfig(dp=1, pp=RANKS, pipeline=pipeline)
        self.placement = plan_pipeline(config, parallel, shape.length).placement
        self.schedule = make_schedule(name, self.placement, shape.micro_batches)
        torch.manual_seed(0)
        self.models = {
            stage: self._model(config, stage) for stage in self.placement.stages_of(rank)
        }
        generator = torch.Generator().manual_seed(1)
        size = (shape.micro_batches, shape.micro_batch, shape.length + 1)
        tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
        self.ids, self.labels = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        self.terms = [CrossEntropy(float(self.labels.numel()))]
        self._ours(create_links(self.schedule, [range(RANKS)]))
        self._theirs(name, shape)

    def _model(self, config: ModelConfig, stage: int) -> Transformer:
        units = [unit_name(unit) for unit in self.placement.stages[stage]]
        model = Transformer(config, units)
        generator = torch.Generator().manual_seed(100 + stage)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.05, generator=generator)
        return model

    def _ours(self, links: Any) -> None:
        self.batches = [
            MicroBatch(ids, {"labels": labels}) for ids, labels in zip(self.ids, self.labels)
        ]
        self.stages = {
            n: Stage(ShardedWeights(model, reshard=True), torch.float32, self.placement, n)
            for n, model in self.models.items()
        }
        self.executor = Executor(self.schedule, self.stages, links)
        self.recorder = Executor(self.schedule, self.stages, links, record=True)

    def _theirs(self, name: str, shape: Shape) -> None:
        last = self.placement.num_stages - 1

        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            head = self.models[last].head
            assert head is not None
            total: Tensor = head(hidden, {"labels": labels}, self.terms)[0]
            return total

        self.first, self.last = 0 in self.models, last in self.models
        self.peer = peer_schedule(name, self.models, shape.micro_batches, loss)

    def clear(self) -> None:
        for model in self.models.values():
            for parameter in model.parameters():
                parameter.grad = None

    def run_ours(self, executor: Executor | None = None) -> None:
        self.clear()
        for stage in self.stages.values():
            if stage.model.head is not None:
                stage.model.head.weight_gradients = stage.weights.gradients
            stage.begin(self.batches, self.terms)
        (executor or self.executor).run()

    def run_theirs(self) -> list[Tensor]:
        self.clear()
        for model in self.models.values():
            if model.head is not None:  # the peer finds gradients in the backward pass alone
                model.head.weight_gradients = None
        losses: list[Tensor] = []
        given = (self.ids.flatten(0, 1),) if self.first else ()
        target = {"target": self.labels.flatten(0, 1), "losses": losses} if self.last else {}
        self.peer.step(*given, **target, return_outputs=False)
        return losses

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{stage}.{name}": parameter.grad.clone()
            for stage, model in self.models.items()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    def difference(self) -> float:
        """The largest relative difference between both sides' gradients, and their losses'."""
        self.run_ours()
        mine = self.gradients()
        totals = [float(s.total) for s in self.stages.values() if s.total is not None]
        theirs_losses = self.run_theirs()
        theirs = self.gradients()
        assert mine.keys() == theirs.keys() and mine
        worst = max(float((mine[n] - theirs[n]).norm() / mine[n].norm()) for n in mine)
        for total in totals:
            other = sum(float(loss.detach()) for loss in theirs_losses)
            worst = max(worst, abs(other - total) / total)
        return worst


def recorded_seconds(both: Both) -> Seconds:
    """Median seconds of this rank's stages in a recorded run."""
    both.run_ours(both.recorder)
    return stage_seconds(both.recorder.events)


def predict(
    schedule: Schedule,
    placement: Placement,
    seconds: Seconds,
    transfer: float,
) -> float:
    """The simulator's step time from measured times; a stage's time is put on its first unit."""
    costs = {unit: UnitCost() for units in placement.stages for unit in units}
    for stage, units in enumerate(placement.stages):
        costs[units[0]] = UnitCost(seconds[stage, F], seconds[stage, B])
    return simulate(schedule, CostTable(by_unit=costs), latency=transfer).makespan


def on_rank(rank: int, world: int, shape: Shape, repeats: int) -> dict[str, Any]:
    """Everything that one process measures."""
    found: dict[str, Any] = {}
    pairs = {name: Both(rank, shape, name) for name in VIRTUAL}
    for name, both in pairs.items():
        found[f"{name} difference"] = both.difference()
    seconds: dict[str, list[float]] = {}
    for turn in range(-1, repeats):
        for name, both in pairs.items():
            ours, theirs = timed(both.run_ours), timed(both.run_theirs)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, recorded_seconds(both))
            stages = {stage: pair for part in everyone for stage, pair in part.items()}
            transfer = transfer_seconds(rank, (shape.micro_batch, shape.length, shape.hidden), 10)
            expected = predict(both.schedule, both.placement, stages, transfer)
            if turn >= 0:
                for side, value in (("ours", ours), ("torch", theirs), ("simulated", expected)):
                    seconds.setdefault(f"{name} {side}", []).append(value)
    found["seconds"] = seconds
    return found


def compare(label: str, shape: Shape, options: Options, report: Report) -> None:
    results = run_ranks(RANKS, on_rank, shape, options.repeats)
    for name in VIRTUAL:
        worst = max(result[f"{name} difference"] for result in results)
        if worst > TOLERANCE:
            raise ValueError(f"{label}, {name}: the two sides differ by {worst:.1e}")
        ours, peer, simulated = (
            results[0]["seconds"][f"{name} {side}"] for side in ("ours", "torch", "simulated")
        )
        report.samples |= {
            f"{label} {name} {side}": values
            for side, values in (("ours", ours), ("torch", peer), ("simulated", simulated))
        }
        ratio, error = ratios(peer, ours), [100 * (r - 1) for r in ratios(simulated, ours)]
        milliseconds = [[1000 * s for s in values] for values in (ours, peer)]
        report.rows.append(
            [
                label,
                name,
                *(spread(values, 1) for values in milliseconds),
                spread(ratio, 3),
                spread(error, 1),
                f"{worst:.0e}",
            ]
        )
        report.targets.append(
            at_least(
                f"{label}, {name}: at least 1.0 times torch (0.98 is the floor)", ratio, 1.0, 3
            )
        )
        if label != "overhead":  # the simulator counts compute and transfers alone
            claim = f"{label}, {name}: simulator within 5 %"
            report.targets.append(at_most(claim, [abs(e) for e in error], 5, 1))
    report.settings[label] = str(shape)


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    report = Report(
        "pipeline_executor",
        "How fast is a pipeline step on two processes, and does the simulator foresee it? Ratio: "
        "torch's time over ours, above 1 when ours is faster. Simulator: its step time from the "
        "stage times of a recorded run in the same round, against the measured step.",
        [
            "shape",
            "schedule",
            "ours ms",
            "torch ms",
            "torch / ours",
            "simulator error %",
            "gradient difference",
        ],
        {
            "both sides": "2 gloo processes, 1 thread each, fp32, the same module objects, "
            "micro-batches, stage boundaries and chunked head; a step is all forward and backward "
            "passes, gradients start from None",
        },
    )
    for label, shape in ({"toy": TOY} if options.quick else SHAPES).items():
        compare(label, shape, options, report)
    return report


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
