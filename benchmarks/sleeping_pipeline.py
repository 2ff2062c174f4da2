"""Does the executor do what the simulator says?  Four ranks whose stages sleep instead of compute.

Sleeping stages need no cores, so four processes on two cores run as four machines would, and what
is left over is the executor's own: order, sending, waiting.  Every plan of one model with
multi-token prediction, head chunks and split weight gradients included.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import Options, Report, at_most, command, run_ranks, spread
from parallel.pipeline.actions import HW, B, F, H, I, Kind, W
from parallel.pipeline.cost import CostTable, given_costs
from parallel.pipeline.executor import Executor
from parallel.pipeline.links import create_links
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.schedules import Conditions, make_schedule
from parallel.pipeline.simulate import simulate
from parallel.pipeline.units import Placement, model_units

RANKS, BLOCKS, DEPTH, MICRO_BATCHES, CHUNKS = 4, 12, 2, 12, 8
COSTS = {"t": 1.0, "m": 1.133, "h": 4.4}
PLANS = {  # planner: schedule
    "uniform": "1f1b",
    "standalone": "adahc",
    "split": "adahc",
    "adahc": "adahc",
    "adahc ": "adahc_zb",
}
SHAPE = (1, 16, 8)


class Sleeper:
    """A stage that takes the time its costs say and passes on zeros."""

    dtype = torch.float32

    def __init__(self, placement: Placement, number: int, costs: CostTable, split: bool) -> None:
        self.inputs = len(placement.inputs[number])
        self.outputs = len(placement.outputs[number])
        self.cost, self.split = costs.stage(placement, number), split

    def input_shape(self, microbatch: int) -> Any:
        return SHAPE if self.inputs == 1 else [SHAPE] * self.inputs

    def output_shape(self, microbatch: int) -> Any:
        return SHAPE if self.outputs == 1 else [SHAPE] * self.outputs

    def rest(self, kind: Kind, tensors: int) -> Tensor | tuple[Tensor, ...] | None:
        time.sleep(self.cost.duration(kind, self.split))
        made = tuple(torch.zeros(SHAPE) for _ in range(tensors))
        return made[0] if len(made) == 1 else made or None

    def forward(self, microbatch: int, x: Any) -> Any:
        return self.rest(F, self.outputs)

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        return self.rest(B, self.inputs)

    def backward_input(self, microbatch: int, grad_output: Any) -> Any:
        return self.rest(I, self.inputs)

    def backward_weight(self, microbatch: int) -> None:
        self.rest(W, 0)

    def head(self, microbatch: int, x: Any) -> Any:
        return self.rest(H, self.inputs)

    def head_weight(self, microbatch: int) -> None:
        self.rest(HW, 0)

    def unshard(self) -> None:
        """Nothing is sharded."""

    reshard = reduce_gradients = unshard


def on_rank(rank: int, world: int, block_seconds: float, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for plan, schedule_name in PLANS.items():
        planner = plan.strip()
        chunks = CHUNKS if planner == "adahc" else 1
        units = tuple(model_units(BLOCKS, DEPTH, chunks))
        scaled = {kind: cost * block_seconds for kind, cost in COSTS.items()}
        costs, _ = given_costs({"units": scaled}, units)
        wanted = schedule_name if planner == "adahc" else "adahc"
        request = PlanRequest(
            units, RANKS, costs=costs, schedule=wanted, num_microbatches=MICRO_BATCHES
        )
        placement = make_placement(planner, request)
        schedule = make_schedule(schedule_name, placement, MICRO_BATCHES, Conditions(costs))
        split = {a.stage for order in schedule.compute_orders() for a in order if a.kind is HW}
        stages = {
            number: Sleeper(placement, number, costs, number in split)
            for number in placement.stages_of(rank)
        }
        executor = Executor(schedule, stages, create_links(schedule, [range(RANKS)]))
        seconds = []
        for turn in range(-1, repeats):
            dist.barrier()
            start = time.perf_counter()
            executor.run()
            dist.barrier()
            if turn >= 0:
                seconds.append(time.perf_counter() - start)
        found[plan] = (schedule_name, simulate(schedule, costs).makespan, seconds)
    return found


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    block_seconds = 0.002 if options.quick else 0.02
    report = Report(
        "sleeping_pipeline",
        "Does the executor take the time that the simulator gives a schedule? Four ranks whose "
        "stages sleep; the error is the simulator's, against the measured step.",
        ["planner", "schedule", "simulated s", "measured s", "error %"],
        {
            "model": f"{BLOCKS} blocks of {1000 * block_seconds:g} ms forward, depth {DEPTH}, a "
            f"head of {COSTS['h']} blocks, {RANKS} gloo processes, {MICRO_BATCHES} micro-batches"
        },
    )
    results = run_ranks(RANKS, on_rank, block_seconds, options.repeats)
    for plan, (schedule, simulated, seconds) in results[0].items():
        error = [100 * (simulated / value - 1) for value in seconds]
        report.rows.append(
            [plan.strip(), schedule, f"{simulated:.3f}", spread(seconds, 3), spread(error, 1)]
        )
        report.samples[f"{plan.strip()} {schedule}"] = seconds
        claim = f"{plan.strip()}, {schedule}: simulator within 5 %"
        report.targets.append(at_most(claim, [abs(e) for e in error], 5, 1))
    return report


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
