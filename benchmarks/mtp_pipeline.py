"""Multi-token prediction on two pipeline ranks: every planner, predicted and measured.

Two gloo processes with one thread each.  Unit times, of a head in pieces, the transfer of one
activation and the exchange of one vocabulary matrix are measured first; planners get these and
nothing else.  Then whole steps (all forward and backward passes, and the exchange of gradients of
shared weights) are timed in turn, from a barrier to a barrier.  Unit times are taken again at the
start of every round, because the machine's speed drifts: a round's predictions are what the
simulator makes of them.  The peer, torch.distributed.pipelining, runs the same modules with blocks
spread evenly and everything behind them on the last stage; its gradients are compared first.

The result file is written after every model, and models that it already has, measured with the same
settings on the same machine, are kept.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import (
    Options,
    Report,
    Target,
    at_least,
    at_most,
    command,
    machine,
    ratios,
    run_ranks,
    spread,
    versions,
    write,
)
from benchmarks.two_ranks import (
    RANKS,
    TOLERANCE,
    VIRTUAL,
    Peer,
    agreed,
    model_config,
    timed,
    transfer_seconds,
)
from benchmarks.unit_costs import average_costs, cut_heads, listed, measure_units
from models.config import ModelConfig
from models.transformer import Transformer
from parallel.apply import BuildOptions
from parallel.gradients import sum_over_ranks
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from parallel.pipeline.actions import Schedule
from parallel.pipeline.cost import CostTable, Network
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.simulate import simulate
from parallel.pipeline.units import BLOCK
from parallel.stage import MicroBatch
from pretrain.engine import Engine, build_engine
from pretrain.objectives.causal import Causal

CHUNKS = 8
PLANNERS = ("uniform", "balanced", "standalone", "split", "adahc")
PEERS = {f"torch {name}": name for name in VIRTUAL}
LEAST_ROUNDS = 3
MINUTES = 15.5  # of all models' rounds together; the whole takes some four more


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
        return model_config(self.hidden, self.layers, self.vocabulary, self.depth)

    @property
    def activation(self) -> tuple[int, int, int]:
        return (self.micro_batch, self.length, self.hidden)


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
# Each one's part of the time: its FLOPs, in hundredths of those of all.
PARTS = dict(zip(SHAPES, (16, 9, 12, 16, 28, 19), strict=True))
TOY = {"toy": Shape(32, 4, 256, 1, 16, 1, 4)}


class Bench:
    """One shape on one rank: measured costs, an engine per planner, the peers."""

    def __init__(self, rank: int, shape: Shape) -> None:
        config, self.shape, self.rank = shape.config(), shape, rank
        self.config = config
        self.objective = Causal(Causal.Config(), config)
        generator = torch.Generator().manual_seed(1)
        size = (shape.micro_batches, shape.micro_batch, shape.length + 1)
        tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
        self.batches: list[MicroBatch] = [
            self.objective.micro_batch(part, None, range(shape.micro_batch)) for part in tokens
        ]
        self.terms = self.objective.terms(self.objective.counts(self.batches))
        ids = torch.cat([batch.ids for batch in self.batches])
        fields = [list(batch.fields.values()) for batch in self.batches]
        given = (ids, torch.cat([torch.stack(depths, 1) for depths in fields]), self.terms)
        self.whole = Transformer(config)
        for parameter in self.whole.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        self.network = Network(transfer_seconds(rank, shape.activation))
        self.exchange = self._exchange(config)
        self.costs = self.unit_times(4)
        self.engines = {name: self._engine(config, name) for name in PLANNERS}
        self.schedules: dict[str, Schedule] = {
            name: engine.schedule(shape.micro_batches) for name, engine in self.engines.items()
        }
        self.peers = {
            name: Peer(rank, config, PEERS[name], shape.micro_batches, *given) for name in PEERS
        }
        self.difference = self._warm_up()

    def _exchange(self, config: ModelConfig) -> dict[str, float]:
        """Seconds to add up the two copies of a vocabulary matrix, once warm."""
        group = dist.group.WORLD
        assert group is not None
        matrix = torch.zeros(config.padded_vocab_size, config.hidden)
        both = tuple(range(RANKS))
        times = [timed(lambda: sum_over_ranks(matrix, both, self.rank, group)) for _ in range(4)]
        seconds: float = agreed(statistics.median(times[1:]))
        return {"embedding": seconds, "head": seconds}

    def unit_times(self, micro_batches: int) -> CostTable:
        """Both processes measure at once, as they will compute at once."""
        dist.barrier()
        batches = self.batches[:micro_batches]
        mine = measure_units(self.config, self.whole, batches, self.terms)
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, mine)
        return replace(average_costs(everyone), exchange=self.exchange)

    def _engine(self, config: ModelConfig, planner: str) -> Engine:
        shape = self.shape
        costs = cut_heads(self.costs, config, chunks_of(planner))
        request = PlanRequest(
            units=tuple(costs.by_unit),
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
        parallel = ParallelConfig(dp=1, pp=RANKS, pipeline=PipelineConfig(**parsed))
        engine = build_engine(
            config, parallel, build_mesh(parallel, torch.device("cpu")), BuildOptions(seed=3),
            shape.length, placement,
        )  # fmt: skip
        engine.network = self.network
        engine.place(placement, costs)
        return engine

    def predicted(self, planner: str, costs: CostTable) -> float:
        """Seconds of a step, from unit times."""
        table = cut_heads(costs, self.config, chunks_of(planner))
        return simulate(self.schedules[planner], table, self.network.latency).step

    def step(self, planner: str) -> None:
        self.engines[planner].forward_backward(self.batches, self.objective)

    def _warm_up(self) -> dict[str, float]:
        """Run everything once.  The largest relative difference of a gradient between ours and each
        peer's."""
        for engine in self.engines.values():
            engine.executor(self.shape.micro_batches)  # schedule, check, links
            engine.forward_backward(self.batches[:2], self.objective)
        engine, parts = self.engines["uniform"], [None] * RANKS
        mine = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        dist.all_gather_object(parts, mine)
        weights = {n: p for part in parts for n, p in part.items()}  # type: ignore[attr-defined]
        self.step("uniform")
        grads = {n: p.grad for n, p in engine.model.named_parameters()}
        dist.all_gather_object(parts, grads)
        wanted = {n: g for part in parts for n, g in part.items()}  # type: ignore[attr-defined]
        for peer in self.peers.values():
            peer.copy_weights(weights)
            peer.step()
        return {name: peer.difference(wanted) for name, peer in self.peers.items()}


def chunks_of(planner: str) -> int:
    return CHUNKS if planner == "adahc" else 1


def tail_share(costs: CostTable) -> float:
    """f: the share of everything behind the blocks in the measured time of a micro-batch."""
    units = costs.by_unit
    blocks = costs.together(unit for unit in units if unit.kind in ("E", BLOCK)).load
    return 1 - blocks / costs.together(units).load


def on_rank(rank: int, world: int, shape: Shape, rounds: int, seconds: float) -> dict[str, Any]:
    """``rounds`` rounds, or as many as ``seconds`` allow; at least ``LEAST_ROUNDS`` of them."""
    bench = Bench(rank, shape)
    runs: dict[str, Callable[[], object]] = {name: partial(bench.step, name) for name in PLANNERS}
    runs |= {name: peer.step for name, peer in bench.peers.items()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    predicted: dict[str, list[float]] = {name: [] for name in PLANNERS}
    start, tables = time.perf_counter(), []
    for turn in range(rounds):
        spent = time.perf_counter() - start
        if agreed(turn >= LEAST_ROUNDS and spent * (turn + 1) > seconds * turn):
            break
        tables.append(bench.unit_times(3))
        for name in PLANNERS:
            predicted[name].append(bench.predicted(name, tables[-1]))
        for name, run in runs.items():
            took[name].append(timed(run))
    costs = average_costs(tables)
    return {
        "f": tail_share(costs),
        "costs": listed(costs),
        "transfer": bench.network.latency,
        "predicted": predicted,
        "difference": bench.difference,
        "plan": str(bench.engines["adahc"].placement),
        "seconds": took,
    }


def compare(label: str, shape: Shape, options: Options, seconds: float, report: Report) -> None:
    timeout = 900 + 3 * seconds
    results = run_ranks(RANKS, on_rank, shape, options.repeats, seconds, timeout=timeout)
    for result in results:
        for peer, worst in result["difference"].items():
            if worst > TOLERANCE:
                raise ValueError(f"{label}: gradients of {peer} differ by {worst:.1e}")
    found = results[0]
    took, predicted = found["seconds"], found["predicted"]
    ideal = 1 + (RANKS - 1) * found["f"]
    for name, values in took.items():
        report.samples[f"{label}: {name}"] = values
        if name in predicted:
            report.samples[f"{label}: {name} predicted"] = predicted[name]
    tokens = shape.micro_batches * shape.micro_batch * shape.length
    for name, values in took.items():
        report.rows.append(
            [
                label,
                name,
                spread([tokens / value for value in values], 0),
                spread(_errors(predicted[name], values), 1) if name in predicted else "",
                spread(ratios(values, took["adahc"]), 3),
                _median_ratio(predicted[name], predicted["adahc"]) if name in predicted else "",
                f"{ideal:.3f}" if name == "uniform" else "",
            ]
        )
    report.targets += _targets(label, took, predicted, ideal)
    report.settings[label] = str(shape)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    plan = "; ".join(found["plan"].splitlines())
    report.notes.append(
        f"{label}: f = {found['f']:.2f} of the measured time; ms per micro-batch: "
        f"{found['costs']}; transfer {1000 * found['transfer']:.3g}; {len(values)} rounds, load "
        f"{load}; adahc's plan: {plan}"
    )


def _errors(predicted: list[float], measured: list[float]) -> list[float]:
    """Per cent, round by round."""
    return [100 * (ratio - 1) for ratio in ratios(predicted, measured)]


def _median_ratio(above: list[float], below: list[float]) -> str:
    return f"{statistics.median(ratios(above, below)):.3f}"


def _targets(
    label: str, took: dict[str, list[float]], predicted: dict[str, list[float]], ideal: float
) -> list[Target]:
    found, ours = [], took["adahc"]
    uniform = ratios(took["uniform"], ours)
    claim = f"{label}: at least 95 % of the ideal {ideal:.3f} over uniform"
    found.append(at_least(claim, uniform, 0.95 * ideal, 3))
    if ideal >= 1.42:
        found.append(at_least(f"{label}: 1.35 over uniform", uniform, 1.35, 3))
    for name, values in took.items():
        if name not in ("adahc", "uniform"):
            claim = f"{label}: never below 0.98 of {name}"
            found.append(at_least(claim, ratios(values, ours), 0.98, 3))
    worst = max(abs(statistics.median(_errors(predicted[n], took[n]))) for n in predicted)
    claim = f"{label}: predicted within 10 % of measured, every planner"
    return [*found, at_most(claim, [worst], 10, 1)]


# ---------------------------------------------------------------------- models already measured


def kept(path: Path, shapes: dict[str, Shape], report: Report, options: Options) -> list[str]:
    """Take over from an earlier result file what it has of these models, if that was measured with
    the same settings on the same machine; their names."""
    if not shapes or not path.exists():
        return []
    old = json.loads(path.read_text())
    here = machine()
    if (
        any(old["machine"].get(key) != here[key] for key in ("cpu", "system"))
        or (old["quick"], old["versions"]) != (options.quick, versions())
        or old["settings"].get("both sides") != report.settings["both sides"]
    ):
        return []
    done = [label for label, shape in shapes.items() if old["settings"].get(label) == str(shape)]
    for label in done:
        mine = f"{label}: "
        report.settings[label] = old["settings"][label]
        report.rows += [row for row in old["rows"] if row[0] == label]
        report.targets += [Target(**t) for t in old["targets"] if t["claim"].startswith(mine)]
        report.notes += [note for note in old["notes"] if note.startswith(mine)]
        report.samples |= {n: v for n, v in old["samples"].items() if n.startswith(mine)}
    return done


def chosen(numbers: list[int] | None) -> dict[str, Shape]:
    """Models by their numbers, all without any."""
    names = list(SHAPES)
    for number in numbers or ():
        if not 1 <= number <= len(names):
            raise ValueError(f"--shapes {number}: there are 1 to {len(names)}")
    return {names[n - 1]: SHAPES[names[n - 1]] for n in numbers or range(1, len(names) + 1)}


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    report = Report(
        "mtp_pipeline",
        "What do planners make of a model with multi-token prediction on two pipeline ranks? "
        "adahc cuts heads into chunks of token rows and takes the fastest plan it finds. Ratio: "
        "that row's time over adahc's, above 1 when adahc is faster, measured and simulated; the "
        "ideal over uniform is 1 + (P - 1) f with f the tail's share of the time.",
        ["model", "plan", "tokens/s", "prediction error %", "time / adahc's", "simulated", "ideal"],
        {
            "both sides": "2 gloo processes, 1 thread each, fp32; a step is all forward and "
            "backward passes and the exchange of shared weights' gradients; every plan of ours "
            f"under the schedule that simulates fastest, adahc with {CHUNKS} chunks per head, "
            "predicted from unit times of the same round; torch's schedules with blocks spread "
            "evenly and the tail on the last stage"
        },
    )
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes {arguments.minutes}: must be positive")
    shapes = TOY if options.quick else chosen(arguments.shapes)
    path = options.results / f"{report.name}.json"
    again = shapes if arguments.fresh or options.quick else {}
    wanted = {label: shape for label, shape in SHAPES.items() if label not in again}
    known = kept(path, wanted, report, options)
    for label, shape in shapes.items():
        if label in known:
            print(f"{label}: measured already (--fresh measures again)", flush=True)
            continue
        start = time.monotonic()
        seconds = 60 * arguments.minutes * PARTS.get(label, 100) / 100
        compare(label, shape, options, seconds, report)
        write(report, options)
        print(f"{label}: {time.monotonic() - start:.0f} s", flush=True)
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listing = "; ".join(f"{number}: {name}" for number, name in enumerate(SHAPES, 1))
    parser.add_argument("--shapes", type=int, nargs="+", metavar="N", help=f"models ({listing})")
    parser.add_argument(
        "--fresh", action="store_true", help="measure models again that the result file has"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M",
        help=f"for the rounds of all models together; --repeats at most, {LEAST_ROUNDS} at least "
        "(%(default)s)",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv, add_arguments)


if __name__ == "__main__":
    raise SystemExit(main())
