"""Multi-token prediction on two pipeline ranks: every planner, predicted and measured.

Two gloo processes with one thread each.  Unit times are measured first, planners get these and
nothing else, and the simulator predicts each plan's step from them.  Then whole steps (all forward
and backward passes, and the exchange of gradients of shared weights) are timed in turn, from a
barrier to a barrier.  The peer, torch.distributed.pipelining, runs the same modules with blocks
spread evenly and everything behind them on the last stage; its gradients are compared first.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

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
from benchmarks.unit_costs import average_costs, measure_units
from models.attention import AttentionConfig, SequenceContext
from models.config import ModelConfig
from models.feedforward import SwiGLU
from models.mtp import MTPConfig
from models.transformer import Transformer
from parallel.apply import BuildOptions
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from parallel.pipeline.cost import CostTable, Network
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.simulate import simulate
from parallel.pipeline.units import BLOCK, HEAD, model_units
from parallel.stage import MicroBatch, unit_name
from pretrain.engine import Engine, build_engine
from pretrain.objectives.causal import Causal

RANKS = 2
CHUNKS = 8
PLANNERS = ("uniform", "balanced", "standalone", "split", "adahc")
PEERS = ("torch 1f1b", "torch interleaved")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    vocabulary: int
    depth: int
    length: int
    micro_batch: int
    micro_batches: int

    def config(self) -> ModelConfig:
        heads = max(1, self.hidden // 64)
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            attention=AttentionConfig(heads, heads, self.hidden // heads),
            feedforward=SwiGLU.Config(hidden=self.hidden * 8 // 3 // 32 * 32),
            mtp=MTPConfig(depth=self.depth),
        )


# Chosen before anything was measured; by FLOPs the tail (multi-token-prediction blocks and heads)
# is 0.19, 0.27, 0.27, 0.59, 0.64 and 0.72 of the model.
SHAPES = {
    "512 wide, 8k, depth 1": Shape(512, 16, 8192, 1, 128, 1, 8),
    "256 wide, 8k, depth 1": Shape(256, 16, 8192, 1, 128, 2, 8),
    "384 wide, 8k, depth 2": Shape(384, 20, 8192, 2, 128, 1, 8),
    "256 wide, 16k, depth 3": Shape(256, 16, 16384, 3, 128, 2, 8),
    "512 wide, 64k, depth 1": Shape(512, 12, 65536, 1, 128, 1, 8),
    "256 wide, 32k, depth 2": Shape(256, 12, 32768, 2, 128, 2, 8),
}
TOY = Shape(32, 4, 256, 1, 16, 1, 4)


class Body(nn.Module):
    """A stage as the peer wants it; the last one gives the hidden states of all depths."""

    def __init__(self, model: Transformer, config: ModelConfig) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.last = "final_norm" in model.units

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        model = self.model
        context = SequenceContext(torch.arange(x.shape[1]))
        if "embedding" in model.units:
            x = model.run_unit("embedding", None, x, context)
        for layer in range(self.config.layers):
            if f"blocks.{layer}" in model.units:
                x = model.run_unit(f"blocks.{layer}", x, x, context)
        if not self.last:
            return x
        assert ids is not None
        outputs = [model.run_unit("final_norm", x, ids, context)]
        for depth in range(1, self.config.mtp.depth + 1):
            x = model.run_unit(f"mtp.{depth}", x, ids, context)
            outputs.append(model.run_unit(f"mtp_norms.{depth}", x, ids, context))
        return torch.stack(outputs, 1)


class Peer:
    """torch.distributed.pipelining over blocks spread evenly, the tail on the last stage."""

    def __init__(self, rank: int, shape: Shape, name: str, bench: "Bench") -> None:
        self.bench, self.config = bench, shape.config()
        virtual = 2 if name == "torch interleaved" else 1
        number = RANKS * virtual
        units = tuple(model_units(shape.layers, shape.depth))
        placement = make_placement("uniform", PlanRequest(units, RANKS, virtual))
        self.models = {}
        for stage in placement.stages_of(rank):
            torch.manual_seed(0)
            self.models[stage] = Transformer(
                self.config, {unit_name(unit) for unit in placement.stages[stage]}
            )
        stages: list[Any] = [
            PipelineStage(Body(model, self.config), n, number, torch.device("cpu"))
            for n, model in self.models.items()
        ]
        self.first, self.last = 0 in self.models, number - 1 in self.models
        count = shape.micro_batches
        self.schedule: Any = (
            Schedule1F1B(stages[0], count, loss_fn=self.loss, scale_grads=False)
            if virtual == 1
            else ScheduleInterleaved1F1B(stages, count, loss_fn=self.loss, scale_grads=False)
        )

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = self.models[max(self.models)].head
        assert head is not None
        total = hidden.new_zeros(())
        for depth in range(self.config.mtp.depth + 1):
            name = f"labels_{depth}" if depth else "labels"
            terms = [term for term in self.bench.terms if term.depth == depth]
            part: Tensor = head(hidden[:, depth], {name: labels[:, depth]}, terms)[0]
            total = total + part
        return total

    def copy_weights(self, whole: dict[str, Tensor]) -> None:
        for model in self.models.values():
            model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def step(self) -> None:
        for model in self.models.values():
            for parameter in model.parameters():
                parameter.grad = None
        given = (self.bench.ids,) if self.first else ()
        extra: dict[str, Any] = {}
        if self.last:
            extra = {"target": self.bench.labels, "losses": [], "ids": self.bench.ids}
        elif not self.first:
            extra = {"ids": self.bench.ids}
        self.schedule.step(*given, **extra, return_outputs=False)


class Bench:
    """One shape on one rank: measured costs, an engine per planner, the peers."""

    def __init__(self, rank: int, shape: Shape) -> None:
        config, self.shape, self.rank = shape.config(), shape, rank
        self.objective = Causal(Causal.Config(), config)
        generator = torch.Generator().manual_seed(1)
        size = (shape.micro_batches, shape.micro_batch, shape.length + 1)
        tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
        self.batches: list[MicroBatch] = [
            self.objective.micro_batch(part, None, range(shape.micro_batch)) for part in tokens
        ]
        self.terms = self.objective.terms(self.objective.counts(self.batches))
        self.ids = torch.cat([batch.ids for batch in self.batches])
        fields = [list(batch.fields.values()) for batch in self.batches]
        self.labels = torch.cat([torch.stack(depths, 1) for depths in fields])
        self.costs = self._costs(config)
        self.network = Network(transfer_seconds(rank, shape))
        self.engines = {name: self._engine(config, name) for name in PLANNERS}
        self.peers = {name: Peer(rank, shape, name, self) for name in PEERS}

    def _costs(self, config: ModelConfig) -> CostTable:
        """Both processes measure at once, as they will compute at once."""
        model = Transformer(config)
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        dist.barrier()
        mine = measure_units(config, model, self.batches[:6], self.terms)
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, mine)
        return average_costs(everyone)

    def _engine(self, config: ModelConfig, planner: str) -> Engine:
        chunks = CHUNKS if planner == "adahc" else 1
        shape = self.shape
        costs = cut_heads(self.costs, config, chunks)
        request = PlanRequest(
            units=tuple(model_units(config.layers, config.mtp.depth, chunks)),
            num_ranks=RANKS,
            costs=costs,
            mtp_input=config.mtp.wiring,
            num_microbatches=shape.micro_batches,
            network=self.network,
        )
        placement = make_placement(planner, request)
        parsed: Any = {"schedule": "adahc", "planner": planner}
        if planner == "adahc":
            parsed["head_chunks"] = CHUNKS
        pipeline = PipelineConfig(**parsed)
        parallel = ParallelConfig(dp=1, pp=RANKS, pipeline=pipeline)
        engine = build_engine(
            config, parallel, build_mesh(parallel, torch.device("cpu")), BuildOptions(seed=3),
            shape.length, placement,
        )  # fmt: skip
        engine.place(placement, costs)
        return engine

    def predicted(self, planner: str) -> float:
        engine = self.engines[planner]
        assert engine.costs is not None
        schedule = engine.schedule(self.shape.micro_batches)
        return simulate(schedule, engine.costs, self.network.latency).makespan

    def step(self, planner: str) -> None:
        self.engines[planner].forward_backward(self.batches, self.objective)

    def difference(self, peer: str) -> float:
        """The largest relative difference of a gradient between ours and the peer's."""
        parts: list[Any] = [None] * RANKS
        engine = self.engines["uniform"]
        mine = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        dist.all_gather_object(parts, mine)
        self.peers[peer].copy_weights({n: p for part in parts for n, p in part.items()})
        self.step("uniform")
        grads = {n: p.grad for n, p in engine.model.named_parameters()}
        dist.all_gather_object(parts, grads)
        wanted = {n: g for part in parts for n, g in part.items()}
        self.peers[peer].step()
        worst = 0.0
        for model in self.peers[peer].models.values():
            for name, parameter in model.named_parameters():
                if name == "embedding.weight":  # two copies at the peer, each with its share
                    continue
                assert parameter.grad is not None
                error = (parameter.grad - wanted[name]).norm() / wanted[name].norm()
                worst = max(worst, float(error))
        return worst


def cut_heads(costs: CostTable, config: ModelConfig, chunks: int) -> CostTable:
    """Costs of whole heads divided among their chunks."""
    by_unit = {}
    for unit in model_units(config.layers, config.mtp.depth, chunks):
        cost = costs[replace(unit, chunk=0)]
        by_unit[unit] = cost.times(1 / chunks) if unit.kind == HEAD else cost
    return CostTable(by_unit=by_unit)


def transfer_seconds(rank: int, shape: Shape) -> float:
    """One way of one activation, the median of twenty round trips."""
    word = torch.zeros(shape.micro_batch, shape.length, shape.hidden)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(word, 1 - rank)
            else:
                dist.recv(word, 1 - rank)
        times.append((time.perf_counter() - start) / 2)
    median = [statistics.median(times)]
    dist.broadcast_object_list(median, 0)
    return median[0]


def tail_share(costs: CostTable) -> float:
    """f: the share of everything behind the blocks in the measured time of a micro-batch."""
    whole = sum(cost.load for cost in costs.by_unit.values())
    blocks = sum(cost.load for unit, cost in costs.by_unit.items() if unit.kind in ("E", BLOCK))
    return 1 - blocks / whole


def timed(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def on_rank(rank: int, world: int, shape: Shape, repeats: int) -> dict[str, Any]:
    bench = Bench(rank, shape)
    found: dict[str, Any] = {
        "f": tail_share(bench.costs),
        "predicted": {name: bench.predicted(name) for name in PLANNERS},
        "difference": {name: bench.difference(name) for name in PEERS},
        "plan": str(bench.engines["adahc"].placement),
    }
    runs: dict[str, Callable[[], object]] = {name: partial(bench.step, name) for name in PLANNERS}
    runs |= {name: peer.step for name, peer in bench.peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, repeats):
        for name, run in runs.items():
            value = timed(run)
            if turn >= 0:
                seconds[name].append(value)
    found["seconds"] = seconds
    return found


def compare(label: str, shape: Shape, options: Options, report: Report) -> None:
    results = run_ranks(RANKS, on_rank, shape, options.repeats)
    for result in results:
        for peer, worst in result["difference"].items():
            if worst > TOLERANCE:
                raise ValueError(f"{label}: gradients of {peer} differ by {worst:.1e}")
    found = results[0]
    seconds, predicted = found["seconds"], found["predicted"]
    ideal = 1 + (RANKS - 1) * found["f"]
    report.samples |= {f"{label}: {name}": values for name, values in seconds.items()}
    ours = seconds["adahc"]
    tokens = shape.micro_batches * shape.micro_batch * shape.length
    errors = []
    for name, values in seconds.items():
        ratio = ratios(values, ours)
        error = (
            [100 * (predicted[name] / value - 1) for value in values] if name in predicted else []
        )
        errors.append(statistics.median(map(abs, error)) if error else 0.0)
        report.rows.append(
            [
                label,
                name,
                spread([tokens / value for value in values], 0),
                spread(error, 1) if error else "",
                spread(ratio, 3),
                f"{ideal:.3f}" if name == "uniform" else "",
            ]
        )
        if name == "uniform":
            claim = f"{label}: at least 95 % of the ideal {ideal:.3f} over uniform"
            report.targets.append(at_least(claim, ratio, 0.95 * ideal, 3))
            if ideal >= 1.42:
                report.targets.append(at_least(f"{label}: 1.35 over uniform", ratio, 1.35, 3))
        elif name != "adahc":
            claim = f"{label}: never below 0.98 of {name}"
            report.targets.append(at_least(claim, ratio, 0.98, 3))
    claim = f"{label}: predicted within 10 % of measured, every planner"
    report.targets.append(at_most(claim, [max(errors)], 10, 1))
    report.settings[label] = str(shape)
    plan = "; ".join(line for line in found["plan"].splitlines())
    report.notes.append(f"{label}: f = {found['f']:.2f} of the measured time; adahc's plan: {plan}")


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    report = Report(
        "mtp_pipeline",
        "What do planners make of a model with multi-token prediction on two pipeline ranks? "
        "adahc cuts heads into chunks of token rows and takes the fastest plan it finds. Ratio: "
        "that row's time over adahc's, above 1 when adahc is faster; the ideal over uniform is "
        "1 + (P - 1) f with f the tail's share of the time.",
        ["model", "plan", "tokens/s", "prediction error %", "time / adahc's", "ideal"],
        {
            "both sides": "2 gloo processes, 1 thread each, fp32; a step is all forward and "
            "backward passes and the exchange of shared weights' gradients; every plan of ours "
            "under the schedule that simulates fastest, adahc with 8 chunks per head; torch's "
            "schedules with blocks spread evenly and the tail on the last stage"
        },
    )
    for label, shape in ({"toy": TOY} if options.quick else SHAPES).items():
        compare(label, shape, options, report)
    return report


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
