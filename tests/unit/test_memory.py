"""The memory model against what real builds and real steps hold."""

import gc
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.transformer import Transformer, unit_names
from parallel.apply import BuildOptions, apply_recompute, local_tensor
from parallel.gradients import local_gradient, zero_gradients
from parallel.mesh import ParallelConfig, PipelineConfig, build_mesh
from parallel.pipeline.actions import HW, F, H, I, Schedule, W
from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.units import Placement
from parallel.stage import MicroBatch, Stage
from parallel.tensor import compute_on_local
from pretrain.activations import StageMeter, around
from pretrain.config import RunConfig
from pretrain.engine import Engine, build_engine
from pretrain.memory import (
    RankMemory,
    bucket_bytes,
    memory_per_rank,
    static_bytes,
    stored_parameters,
)
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.observed import WHOLE, Allocations, Driving
from pretrain.optimizer import ShardedOptimizer
from pretrain.placement import plan_pipeline, rank_units
from tests.distributed import run_ranks
from tests.parity.placements import scattered
from tests.unit.memory_layouts import (
    LAYOUTS,
    MODEL,
    MTP,
    MTP_TIED,
    PARALLEL,
    SEQUENCE,
    TIED,
    Layout,
    run_config,
)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind plain tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    storages.pop(0, None)
    return sum(storages.values())


def batches(config: RunConfig, count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    training = config.training
    shape = (training.micro_batch, training.sequence_length + 1)
    objective = build_objective(config.objective, config.model)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        documents = torch.arange(shape[1]).expand(shape) // 5
        found.append(objective.micro_batch(tokens, documents, range(shape[0])))
    return found


def real_engine(config: RunConfig, placement: Placement | None = None) -> Engine:
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    precision = config.precision
    options = BuildOptions(dtype=precision.weight_dtype, compute_dtype=precision.compute_dtype)
    length = config.training.sequence_length
    return build_engine(config.model, config.parallel, mesh, options, length, placement)


def fully_sharded_bytes(engine: Engine) -> tuple[int, int]:
    """(whole weights, whole gradients) that fully_shard holds right now."""
    weights = gradients = 0
    for module in engine.model.part.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        assert group is not None
        for p in group.fsdp_params:
            weights += sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
            whole = p.unsharded_accumulated_grad
            if whole is None and hasattr(p, "_unsharded_param"):
                whole = p.unsharded_param.grad
            if whole is not None:
                whole = whole.to_local() if isinstance(whole, DTensor) else whole
                gradients += whole.untyped_storage().nbytes()
    return weights, gradients


def observe(stage: Stage, engine: Engine, seen: list[tuple[int, int]]) -> None:
    """Note what fully_shard holds after every backward pass of a stage."""
    run = stage.backward

    def observed(index: int, grad_output: Tensor | None) -> Tensor | None:
        result = run(index, grad_output)
        seen.append(fully_sharded_bytes(engine))
        return result

    stage.backward = observed  # type: ignore[method-assign]


def measure(rank: int, world: int, layouts: list[Layout]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        engine = real_engine(layout.config, layout.placed)
        optimizer = ShardedOptimizer(engine.model, layout.config.optimizer, "torch")
        midway: list[tuple[int, int]] = []
        for stage in engine.stages.values():
            observe(stage, engine, midway)
        objective = build_objective(layout.config.objective, layout.model)
        engine.forward_backward(batches(layout.config, layout.micro_batches), objective)
        parameters = [p for _, p in engine.model.named_parameters()]
        state = [t for s in optimizer.state.values() for t in s.values()]
        state += [] if optimizer.muon is None else optimizer.muon.momentum.values()
        found.append(
            {
                "coordinate": dict(engine.model.mesh.coordinate),
                "weights": storage_bytes(local_tensor(p) for p in parameters),
                "gradients": sum(local_gradient(p).numel() for p in parameters) * 4,
                "optimizer": storage_bytes(state),
                "midway": midway,
                **another_step(engine, layout),
            }
        )
    return found


def another_step(engine: Engine, layout: Layout) -> dict[str, Any]:
    """What operators allocate on this rank at most in one more step, beyond the receive buffers
    that the first step left, and the bytes of those."""
    executor = engine.executor(layout.micro_batches)
    executor.send_window = 1  # what the plan assumes: a sent tensor has gone when the next one goes
    zero_gradients(engine.model)
    data, config = batches(layout.config, layout.micro_batches), layout.config
    buffers = [buffer for free in executor.free.values() for buffer in free]
    allocations = Allocations([*buffers, *existing_tensors(engine, data)])
    with allocations:
        engine.forward_backward(data, build_objective(config.objective, config.model))
    return {
        "peak": allocations.peak,
        "receive": storage_bytes(buffers),
        "schedule": engine.schedule(layout.micro_batches),
    }


def existing_tensors(engine: Engine, data: Iterable[MicroBatch]) -> list[Tensor]:
    """Stored weights and token batches."""
    found = [local_tensor(p) for _, p in engine.model.named_parameters()]
    for batch in data:
        found += [batch.ids, *batch.fields.values()]
        found += [t for t in (batch.documents, batch.positions) if t is not None]
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout holds; one set of processes per world size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world in sorted({layout.world for layout in LAYOUTS.values()}):
        names = [name for name, layout in LAYOUTS.items() if layout.world == world]
        ranks = run_ranks(world, measure, [LAYOUTS[name] for name in names], timeout=180)
        found |= {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}
    return found


@cache
def prediction(layout: Layout, schedule: Schedule | None = None) -> list[RankMemory]:
    name = layout.parallel.pipeline.schedule
    schedule = schedule or make_schedule(name, layout.placement, layout.micro_batches)
    return memory_per_rank(layout.config, layout.world, layout.placement, schedule)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_gradients_and_optimizer_are_exact(name: str, measured: Any) -> None:
    layout = LAYOUTS[name]
    config = layout.config
    for real in measured[name]:
        at = real["coordinate"]
        parameters = stored_parameters(config, rank_units(layout.placement, at["pp"]))
        weights, _, optimizer = static_bytes(config, parameters, at["fsdp"])
        owned = sum(p.owned(config.parallel.fsdp, at["fsdp"]) for p in parameters) * 4
        assert real["weights"] == weights, at
        assert real["gradients"] == owned, at
        assert real["optimizer"] == optimizer, at


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reported_ranks_are_the_largest(name: str, measured: Any) -> None:
    for memory in prediction(LAYOUTS[name], measured[name][0]["schedule"]):
        ranks = [r for r in measured[name] if r["coordinate"]["pp"] == memory.pp_rank]
        for what in ("weights", "optimizer"):
            assert max(r[what] for r in ranks) == getattr(memory, what)


FULLY_SHARDED = [n for n in LAYOUTS if LAYOUTS[n].parallel.fsdp > 1 and not LAYOUTS[n].placed]


@pytest.mark.parametrize("name", FULLY_SHARDED)
def test_gathered_weights_and_whole_gradients(name: str, measured: Any) -> None:
    """Between micro-batches: nothing or everything gathered, and unreduced gradients whole."""
    layout = LAYOUTS[name]
    for memory in prediction(layout, measured[name][0]["schedule"]):
        ranks = [r for r in measured[name] if r["coordinate"]["pp"] == memory.pp_rank]
        for real in ranks:
            weights, whole = real["midway"][0]
            if layout.micro_batches == 1:
                assert (weights, whole) == (0, 0)
                continue
            size = 2 if layout.compute == "bfloat16" else 4
            config, fsdp = layout.config, layout.parallel.fsdp
            parameters = stored_parameters(config, rank_units(layout.placement, memory.pp_rank))
            sharded = [p for p in parameters if p.sharded]
            if layout.parallel.reshard_after_forward:
                assert (weights, whole) == (0, 0)
            else:
                assert whole == sum(p.numel for p in sharded) * 4
                expected = sum(p.stored(fsdp) * fsdp * (size if p.narrow else 4) for p in sharded)
                assert weights == expected
                assert memory.gathered > weights + whole - memory.gradients


@pytest.mark.parametrize("name", [n for n in LAYOUTS if LAYOUTS[n].parallel.fsdp == 1])
def test_the_peak_of_every_rank(name: str, measured: Any) -> None:
    """Receive buffers exactly; everything that a step allocates to 1 %, except that what was sent
    last may or may not have gone: a slow peer may leave two tensors more behind."""
    layout, reals = LAYOUTS[name], measured[name]
    meter = StageMeter(layout.config)
    tokens = 2 * layout.micro_batches * meter.batch_bytes
    predicted = prediction(layout, reals[0]["schedule"])
    for real in (real for real in reals if real["coordinate"]["tp"] == 0):
        memory = predicted[real["coordinate"]["pp"]]
        sent = memory.buffers - tokens - real["receive"]
        edges = [meter.edge_bytes(edge) for edge in layout.placement.edges]
        assert sent in {0, *edges}
        most = memory.peak - memory.weights - memory.optimizer - tokens - real["receive"]
        assert most - sent <= real["peak"] * 1.01, real["coordinate"]
        waiting = 2 * max(edges, default=0)
        assert real["peak"] <= most * 1.01 + waiting, real["coordinate"]


def real_tensors() -> list[Tensor]:
    """Every tensor with memory that Python knows of (not what tracing left behind)."""
    plain = (Tensor, torch.nn.Parameter)
    return [t for t in gc.get_objects() if type(t) in plain and t.device.type == "cpu"]


def saved_bytes(block: Any, x: Tensor, batch: MicroBatch) -> tuple[int, Tensor]:
    """Bytes of everything that one forward pass of ``block`` leaves behind but parameters and its
    input: saved by autograd, or found among Python's objects (what recomputation keeps)."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    gc.collect()
    before = real_tensors()
    known = {t.untyped_storage().data_ptr() for t in [*before, *block.parameters(), x]}
    del before
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x, batch.context())
    gc.collect()
    after = [*real_tensors(), *packed, out]
    return storage_bytes(t for t in after if t.untyped_storage().data_ptr() not in known), out


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_activations_of_a_block(mode: Any, compute: str) -> None:
    parallel = ParallelConfig(recompute=mode)
    config = run_config(MODEL, parallel, micro_batch=3, compute=compute)
    profile = StageMeter(config).profile(["blocks.0", "blocks.1"]).profiles[0]
    block = Transformer(MODEL, ["blocks.0"])
    for p in block.parameters():
        torch.nn.init.normal_(p)
    compute_on_local(block, config.precision.compute_dtype)
    apply_recompute(block.blocks["0"], mode)
    dtype = config.precision.compute_dtype or torch.float32
    x = torch.randn(3, SEQUENCE, MODEL.hidden, dtype=dtype).requires_grad_()
    (batch,) = batches(config, 1)
    real, _ = saved_bytes(block.blocks["0"], x, batch)
    assert profile.kept == real


def test_recomputation_keeps_less() -> None:
    kept = {}
    for mode in ("none", "selective", "full"):
        parallel = ParallelConfig(recompute=mode)
        config = run_config(MODEL, parallel, micro_batch=3)
        kept[mode] = StageMeter(config).profile(["blocks.0", "blocks.1"]).profiles[1].kept
    assert kept["full"] == 3 * SEQUENCE * MODEL.hidden * 4
    assert kept["full"] < kept["selective"] < kept["none"]


STEPS = [
    ("untied", "none", 1, "float32"),
    ("untied", "none", 3, "float32"),
    ("untied", "none", 3, "bfloat16"),
    ("untied", "selective", 3, "float32"),
    ("untied", "selective", 1, "bfloat16"),
    ("untied", "full", 3, "float32"),
    ("tied", "none", 1, "float32"),
    ("tied", "selective", 1, "float32"),
    ("tied", "full", 3, "bfloat16"),
]


@pytest.mark.parametrize("model, mode, micro_batches, compute", STEPS)
def test_the_peak_of_a_real_step(model: str, mode: Any, micro_batches: int, compute: str) -> None:
    """Everything that operators allocate in one training step of one process, followed live."""
    parallel = ParallelConfig(recompute=mode)
    config = run_config(
        TIED if model == "tied" else MODEL, parallel, micro_batches, 2, 32, compute=compute
    )
    check_peak(config, micro_batches)


def test_the_peak_with_document_masks() -> None:
    config = run_config(MODEL, batch=2, micro_batch=2, objective=Causal.Config(documents="mask"))
    check_peak(config, 2)


def test_the_peak_with_a_large_vocabulary() -> None:
    """Chunks of logits decide the peak."""
    model = replace(MODEL, vocab_size=40000, layers=1)
    config = run_config(model, batch=1, micro_batch=8, sequence=64)
    memory = check_peak(config, 1)
    assert memory.workspace > memory.activations


def check_peak(config: RunConfig, micro_batches: int) -> RankMemory:
    length = config.training.sequence_length
    placement = plan_pipeline(config.model, config.parallel, length).placement
    schedule = make_schedule("1f1b", placement, micro_batches)
    (memory,) = memory_per_rank(config, 1, placement, schedule)
    engine = real_engine(config)
    engine.executor(micro_batches)
    data = batches(config, micro_batches)
    allocations = Allocations(existing_tensors(engine, data))
    with allocations:
        engine.forward_backward(data, build_objective(config.objective, config.model))
    predicted = memory.peak - memory.weights - memory.optimizer - memory.buffers
    assert predicted == pytest.approx(allocations.peak, rel=0.01)
    return memory


@pytest.mark.parametrize("mode", ["none", "full"])
def test_equal_blocks_are_multiplied(mode: Any) -> None:
    """Measuring every block of a stage gives what measuring two of them gives."""
    config = run_config(MODEL, ParallelConfig(recompute=mode), micro_batch=2)
    short = StageMeter(config)
    long = StageMeter(config)
    long._kinds = {name: (name,) for name in long._kinds}  # no two are alike
    for units in (unit_names(MODEL), unit_names(MODEL)[1:5]):
        assert short.profile(units) == long.profile(units)


@pytest.mark.parametrize(
    "model, driving", [(MTP_TIED, Driving(frozenset((F, I, W)), True)), (PARALLEL, WHOLE)]
)
def test_equal_blocks_are_multiplied_beside_other_readers(model: Any, driving: Driving) -> None:
    config = run_config(replace(model, layers=6))
    short, long = StageMeter(config), StageMeter(config)
    long._kinds = {name: (name,) for name in long._kinds}
    whole = around(config.model, unit_names(config.model))
    found, wanted = (meter.stage_profile(*whole, driving) for meter in (short, long))
    assert found == wanted
    assert (found.left > 0) is driving.split


def test_a_stage_of_heads_alone_keeps_nothing() -> None:
    """Or, with weight gradients to come, what they are made of: rows of logit gradients, beside
    which there may be the input's gradient."""
    placement = scattered(MTP, 3, 4, 5)
    config = run_config(MTP, micro_batch=2)
    meter = StageMeter(config)
    for stage in (s for s, alone in enumerate(placement.head_only) if alone):
        at_once = meter.stage_profile(placement, stage, Driving(frozenset((H,)), False))
        split = meter.stage_profile(placement, stage, Driving(frozenset((H, HW)), True))
        rows = len(placement.stages[stage]) * 2 * SEQUENCE // 4
        assert at_once.left == 0 and at_once.created("forward") == ["head.weight"]
        logits = rows * MODEL.vocab_size * 4
        assert logits <= split.left <= logits + rows * MODEL.hidden * 4
        assert split.created("forward") == [] and split.created("weight") == ["head.weight"]


def test_activations_follow_the_schedule() -> None:
    """1F1B keeps S − s micro-batches in flight, GPipe all of them."""
    for schedule, expected in (("1f1b", [4, 3, 2, 1]), ("gpipe", [6, 6, 6, 6])):
        pipeline = PipelineConfig(schedule=schedule)  # type: ignore[arg-type]
        layout = Layout(4, ParallelConfig(pp=4, pipeline=pipeline), micro_batches=6)
        memory = prediction(layout)
        assert [m.in_flight for m in memory] == expected
        meter = StageMeter(layout.config)
        for m in memory:
            units = rank_units(layout.placement, m.pp_rank)
            assert m.activations == m.in_flight * meter.profile(units).kept


def test_tensor_and_sequence_parallelism_divide_activations() -> None:
    def kept(parallel: ParallelConfig) -> int:
        config = run_config(MODEL, parallel, micro_batch=4)
        return StageMeter(config).profile(["blocks.0", "blocks.1"]).profiles[1].kept

    plain, tp = kept(ParallelConfig()), kept(ParallelConfig(tp=2))
    sp = kept(ParallelConfig(tp=2, sp=True))
    assert sp < tp < plain


def test_a_bucket_of_one_is_reduced_in_place() -> None:
    mebibyte = 1 << 20
    assert bucket_bytes([40 * mebibyte]) == 0
    assert bucket_bytes([40 * mebibyte, mebibyte, 2 * mebibyte]) == 3 * mebibyte
    assert bucket_bytes([20 * mebibyte, 20 * mebibyte]) == 0
    assert bucket_bytes([20 * mebibyte, 12 * mebibyte]) == 32 * mebibyte
