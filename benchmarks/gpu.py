"""The one script for a GPU machine: parity on CUDA, then a minute of training a 1.3B shape.

    python benchmarks/gpu.py --peak-tflops 989        # the GPU's dense bf16 peak, for MFU
    python benchmarks/gpu.py --device cpu --toy       # proves that the script works

Parity: loss and every gradient of each layout against the plain run on the same device, in the
error measure of docs/parity.md.  Two-process layouts need two devices.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Options, Report, Target, command, run_ranks, spread
from models.attention import AttentionBackend, AttentionConfig
from models.config import SIZES, ModelConfig
from models.feedforward import SwiGLU
from models.flops import parameter_count, training_flops_per_token
from parallel.apply import BuildOptions
from parallel.gradients import clip_gradients, full_gradients, gradient_norm
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from pretrain.engine import Engine, build_engine
from pretrain.objectives.causal import Causal
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import OptimizerConfig

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """One layout of the parity core."""

    name: str
    dtype: torch.dtype = torch.float64
    world: int = 1
    micro_batches: int = 1
    parallel: ParallelConfig = ParallelConfig()
    compile: bool = False
    backend: AttentionBackend = "sdpa"
    documents: bool = False

    def reference(self) -> "Case":
        return Case("reference", self.dtype, documents=self.documents)


def cases(device: torch.device, two: bool, compiled: bool) -> list[Case]:
    """What runs on this machine."""
    found = []
    for dtype in TOLERANCES:
        label = str(dtype).removeprefix("torch.")
        single = [
            Case("micro-batches", micro_batches=4),
            Case("recompute full", parallel=ParallelConfig(recompute="full")),
            Case("recompute selective", parallel=ParallelConfig(recompute="selective")),
            Case("documents", micro_batches=2, documents=True),
        ]
        layouts = {
            "dp2": ParallelConfig(dp=2),
            "fsdp2": ParallelConfig(fsdp=2),
            "tp2 sp": ParallelConfig(tp=2, sp=True),
            "pp2 1f1b": ParallelConfig(pp=2, pipeline=PipelineConfig("1f1b")),
        }
        pairs = [Case(n, world=2, micro_batches=2, parallel=p) for n, p in layouts.items()]
        for case in single + (pairs if two else []):
            found.append(replace(case, name=f"{case.name} {label}", dtype=dtype))
    if compiled:
        found.append(Case("compile float32", torch.float32, compile=True))
    if device.type == "cuda":  # FlexAttention has no backward pass on a CPU, and no float64
        found.append(Case("flex documents float32", torch.float32, backend="flex", documents=True))
    return found


def small() -> tuple[ModelConfig, int]:
    """A model that every attention kernel accepts, and its length."""
    config = ModelConfig(
        vocab_size=500,
        hidden=128,
        layers=3,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=32, qk_norm=True),
        feedforward=SwiGLU.Config(hidden=256),
    )
    return config, 128


def step_of(case: Case, device: torch.device) -> dict[str, Any]:
    """Loss and gradients (on the CPU) of one step on a fixed batch of eight sequences."""
    config, length = small()
    mesh = build_mesh(case.parallel, device)
    options = BuildOptions(
        dtype=case.dtype, seed=7, compile=case.compile, attention_backend=case.backend
    )
    engine = build_engine(config, case.parallel, mesh, options, length)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (8, length + 1), generator=generator)
    starts = torch.rand(tokens.shape, generator=generator) < 0.05
    documents = starts.long().cumsum(1) if case.documents else None
    objective = Causal(Causal.Config(documents="mask" if case.documents else "attend"))
    share = 8 // mesh.data_size
    size = share // case.micro_batches
    batches = []
    for index in range(case.micro_batches):
        begin = mesh.data_rank * share + index * size
        rows = slice(begin, begin + size)
        seen = None if documents is None else documents[rows].to(device)
        batches.append(objective.micro_batch(tokens[rows].to(device), seen, range(size)))
    result = engine.forward_backward(batches, objective)
    gradients = {name: g.cpu().clone() for name, g in full_gradients(engine.model).items()}
    return {"loss": result.total, "gradients": gradients}


def on_rank(rank: int, world: int, case: Case, kind: str) -> dict[str, Any]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    return step_of(case, device)


def error(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The larger of the loss's relative error and the worst parameter's gradient error."""
    reference: dict[str, Tensor] = wanted["gradients"]
    scale = torch.stack([r.double().norm() for r in reference.values()]).norm()
    worst = abs(found["loss"] - wanted["loss"]) / abs(wanted["loss"])
    for name, g in found["gradients"].items():
        r = reference[name].double()
        off = (g.double() - r).norm() / torch.maximum(r.norm(), 1e-6 * scale)
        worst = max(worst, float(off)) if off == off else float("inf")
    return worst


def parity(device: torch.device, report: Report, two: bool, compiled: bool) -> None:
    references: dict[str, dict[str, Any]] = {}
    for case in cases(device, two, compiled):
        key = repr(case.reference())
        if key not in references:
            references[key] = step_of(case.reference(), device)
        if case.world == 1:
            results = [step_of(case, device)]
        else:
            results = run_ranks(case.world, on_rank, case, device.type, timeout=300)
        worst = max(error(result, references[key]) for result in results)
        report.rows.append([f"parity: {case.name}", f"{worst:.1e}"])
        tolerance = TOLERANCES[case.dtype]
        claim = f"parity of {case.name} within {tolerance:g}"
        report.targets.append(Target(claim, f"{worst:.1e}", worst <= tolerance))
    if device.type == "cuda":
        cpu = step_of(Case("cpu"), torch.device("cpu"))
        worst = error(cpu, references[repr(Case("any").reference())])
        report.rows.append(["parity: CUDA against CPU, float64", f"{worst:.1e}"])
        claim = "parity of CUDA and CPU in float64 within 1e-10"
        report.targets.append(Target(claim, f"{worst:.1e}", worst <= 1e-10))


def large(toy: bool) -> tuple[ModelConfig, int]:
    size = SIZES["1m" if toy else "1.3b"]
    config = ModelConfig(
        vocab_size=256 if toy else 32_768,
        hidden=size["hidden"],
        layers=size["layers"],
        attention=AttentionConfig(**size["attention"]),
        feedforward=SwiGLU.Config(hidden=size["feedforward"]["hidden"]),
    )
    return config, 32 if toy else 2048


def training(device: torch.device, report: Report, arguments: argparse.Namespace) -> None:
    """Train for the given time; the first steps (compilation, allocator) are not counted."""
    config, length = large(arguments.quick)
    compiled = device.type == "cuda"
    parallel = ParallelConfig(dp=1, recompute=arguments.recompute)
    build = BuildOptions(compute_dtype=torch.bfloat16, compile=compiled)
    engine = build_engine(config, parallel, build_mesh(parallel, device), build, length)
    if arguments.chunk_rows:
        set_chunk(engine, arguments.chunk_rows)
    optimizer = ShardedOptimizer(engine.model, OptimizerConfig(lr=1e-4), "torch")
    objective = Causal(Causal.Config())
    batch = arguments.micro_batch
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), device=device)
    batches = [objective.micro_batch(tokens, None, range(batch))]

    def step() -> float:
        loss = engine.forward_backward(batches, objective).total
        clip_gradients(engine.model, gradient_norm(engine.model), 1.0)
        optimizer.step(1e-4)
        return loss

    first = step()
    for _ in range(1 if arguments.quick else 4):
        step()
    synchronise(device)
    seconds: list[float] = []
    end = time.perf_counter() + arguments.seconds
    while time.perf_counter() < end or len(seconds) < 2:
        start = time.perf_counter()
        last = step()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    speed = [batch * length / s for s in seconds]
    flops = training_flops_per_token(config, length)
    report.samples["training step"] = seconds
    report.settings["training"] = (
        f"{parameter_count(config) / 1e6:,.0f}M parameters, {batch} x {length} tokens, "
        "bf16 with fp32 master weights, "
        f"{'compiled blocks' if compiled else 'eager'}, recompute {arguments.recompute}, clipping "
        f"and AdamW included, {len(seconds)} steps in {sum(seconds):.0f} s"
    )
    report.rows += [
        ["training", spread(speed, 0, "tokens/s")],
        ["training", spread([s * flops / 1e12 for s in speed], 2, "TFLOP/s")],
        ["MFU", mfu(speed, flops, arguments.peak_tflops)],
        ["loss, first and last step (one batch repeated)", f"{first:.3f} {last:.3f}"],
    ]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        report.rows.append(["peak memory", f"{peak:.1f} GiB"])
    report.targets.append(Target("the loss falls", f"{first:.3f} to {last:.3f}", last < first))


def mfu(speed: list[float], flops: float, peak: float | None) -> str:
    if peak is None:
        return "n/a (give --peak-tflops)"
    return spread([100 * s * flops / 1e12 / peak for s in speed], 1, "%")


def set_chunk(engine: Engine, rows: int) -> None:
    for stage in engine.stages.values():
        if stage.model.head is not None:
            stage.model.head.chunk_rows = rows


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    toy = options.quick
    kind = arguments.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and not toy:
        raise ValueError(
            "no GPU here: --device cpu needs --toy, which only proves the script works"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    if arguments.seconds is None:
        arguments.seconds = 1.0 if toy else 60.0
    device = torch.device(kind)
    report = Report(
        "gpu",
        "Does a GPU give the same gradients under every layout, and how fast does it train a 1.3B "
        "shape in bf16?",
        ["what", "figure"],
        {"device": kind, "parity": "8 sequences of 128 tokens, 3 layers, QK-norm, GQA"},
    )
    two = arguments.full if kind == "cpu" else torch.cuda.device_count() >= 2
    if not two:
        report.notes.append("Layouts of two processes did not run: they need two devices.")
    parity(device, report, two, compiled=kind == "cuda" or arguments.full)
    training(device, report, arguments)
    if toy:
        report.notes.append("Toy sizes: no GPU figure.")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--toy", action="store_true", dest="quick", help="the same as --quick")
    add("--full", action="store_true", help="on a CPU: also compilation and two processes")
    add("--peak-tflops", type=float, metavar="X", help="dense bf16 peak of the device, for MFU")
    add("--seconds", type=float, metavar="S", help="how long to train (60; toy: 1)")
    add("--micro-batch", type=int, default=8, metavar="N", help="sequences per step (8)")
    add("--recompute", choices=["none", "selective", "full"], default="none")
    add("--chunk-rows", type=int, default=0, metavar="N", help="rows per head chunk (chosen)")


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
