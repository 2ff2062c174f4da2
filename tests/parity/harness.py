"""The parity matrix: one layout against the plain single-process run.

``run_case`` builds the model under a layout in real processes, takes one step on a fixed global
batch whose valid-token counts differ from rank to rank, and returns the loss, the gradient norm and
every whole gradient.  The reference is the same model in one process on the undivided batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.attention import AttentionConfig
from models.config import ModelConfig
from models.feedforward import SwiGLU
from models.initialize import normal_
from models.losses import IGNORE
from parallel.apply import BuildOptions, ParallelModel, local_tensor, shard_offsets
from parallel.gradients import full_gradients, gradient_norm
from parallel.mesh import ParallelConfig, build_mesh
from parallel.pipeline.units import Placement
from pretrain.engine import Engine, build_engine
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.objectives.diffusion import DiffusionConfig
from tests.distributed import run_ranks

SEQUENCE = 16
SMALL = ModelConfig(
    vocab_size=83,  # not a multiple of anything: the padded rows must stay out of every softmax
    vocab_multiple=8,
    hidden=24,
    layers=5,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=6, qk_norm=True),
    feedforward=SwiGLU.Config(hidden=20),
)


@dataclass(frozen=True)
class Case:
    """One entry of the matrix."""

    world: int = 1
    parallel: ParallelConfig = ParallelConfig()
    model: ModelConfig = SMALL
    objective: Any = Causal.Config(z_loss=1e-3)
    micro_batches: int = 1  # per data rank
    sequences: int = 12  # in the global batch
    noise: bool = False  # a level of its own in every slot
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    compile: bool = False
    placement: Placement | None = None
    sabotage: Callable[[Engine], None] | None = None

    def reference(self) -> Case:
        alone = replace(self, world=1, parallel=ParallelConfig(), micro_batches=1)
        return replace(alone, sabotage=None, placement=None)


def global_batch(case: Case, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and document numbers [sequences, SEQUENCE + 1]; a function of the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (case.sequences, SEQUENCE + 1)
    tokens = torch.randint(0, case.model.predicted_vocab_size, shape, generator=generator)
    starts = torch.rand(shape, generator=generator) < 0.2
    return tokens, starts.long().cumsum(1)


def kept_labels(case: Case, step: int) -> Tensor:
    """[sequences, SEQUENCE]: sequence i keeps about i/n of its labels, and the first none."""
    generator = torch.Generator().manual_seed(2000 + step)
    keep = torch.arange(case.sequences)[:, None] / case.sequences
    return torch.rand((case.sequences, SEQUENCE), generator=generator) < keep


def noise_levels(case: Case, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(3000 + step)
    shape = (case.sequences, SEQUENCE)
    return 5 * torch.rand(shape, generator=generator, dtype=case.dtype)


def micro_batches(case: Case, engine: Engine, step: int = 0) -> list[Any]:
    """This data rank's share of the global batch, cut into micro-batches."""
    mesh = engine.model.mesh
    return micro_batches_of(case, step, mesh.data_rank, mesh.data_size)


def micro_batches_of(case: Case, step: int, data_rank: int, data_size: int) -> list[Any]:
    tokens, documents = global_batch(case, step)
    keep = kept_labels(case, step)
    objective = build_objective(case.objective, case.model, batch=case.sequences)
    if isinstance(case.objective, DiffusionConfig):
        # what is counted differs from rank to rank through padding, for noise decides the labels
        length = torch.arange(case.sequences)[:, None] * SEQUENCE // case.sequences
        documents = documents.masked_fill(torch.arange(SEQUENCE + 1) > length, -1)
        keep = torch.ones_like(keep)
    share = case.sequences // data_size
    size = share // case.micro_batches
    assert size * case.micro_batches * data_size == case.sequences
    result = []
    for begin in range(data_rank * share, (data_rank + 1) * share, size):
        span = slice(begin, begin + size)
        batch = objective.micro_batch(tokens[span], documents[span], range(begin, begin + size))
        views = batch.ids.shape[0] // size  # rows per sequence, one behind the other
        dropped = ~keep[span].repeat_interleave(views, 0)
        for name, value in batch.fields.items():
            if name.startswith("labels") and dropped.any():
                batch.fields[name] = value.masked_fill(dropped, IGNORE)
        if case.noise:
            batch.noise = noise_levels(case, step)[span].repeat(views, 1)
        result.append(batch)
    return result


def options_of(case: Case) -> BuildOptions:
    return BuildOptions(
        dtype=case.dtype, compute_dtype=case.compute_dtype, seed=7, compile=case.compile
    )


def enlarge(model: ParallelModel) -> None:
    """Larger weights than the default: gradients of every parameter must be far from rounding.
    What positions, modulations and biases learn starts at 0, where mistakes cancel."""
    for name, parameter in model.named_parameters():
        if ".position." in name or ".modulation." in name or name.endswith("bias"):
            offsets, shape = shard_offsets(model, name, parameter), model.plans[name].shape
            normal_(local_tensor(parameter), 1, name, offsets, shape, 0.2)
        elif parameter.dim() > 1 and "embedding" not in name and "head" not in name:
            parameter.detach().mul_(5)


def build(case: Case) -> Engine:
    mesh = build_mesh(case.parallel, torch.device("cpu"))
    options = options_of(case)
    engine = build_engine(case.model, case.parallel, mesh, options, SEQUENCE, case.placement)
    enlarge(engine.model)
    if case.sabotage is not None:
        case.sabotage(engine)
    return engine


def one_step(case: Case) -> dict[str, Any]:
    """Loss, norm and whole gradients of one step on this rank (gradients of its own stages)."""
    engine = build(case)
    objective = build_objective(case.objective, case.model, batch=case.sequences)
    result = engine.forward_backward(micro_batches(case, engine), objective)
    norm = gradient_norm(engine.model)
    return {
        "losses": result.losses,
        "total": result.total,
        "experts": result.experts,
        "norm": float(norm),
        "gradients": {n: g.clone() for n, g in full_gradients(engine.model).items()},
    }


def _ranks(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [one_step(case) for case in cases]


_results: dict[str, list[dict[str, Any]]] = {}


def run_together(cases: Sequence[Case]) -> None:
    """Run cases of equal world size in one set of processes and remember what each rank found.

    Starting processes costs more than the cases themselves.
    """
    missing = [case for case in cases if repr(case) not in _results]
    if missing:
        (world,) = {case.world for case in missing}
        found = run_ranks(world, _ranks, missing, timeout=180)
        for index, case in enumerate(missing):
            _results[repr(case)] = [rank[index] for rank in found]


def run_case(case: Case) -> list[dict[str, Any]]:
    """What every rank found."""
    run_together([case])
    return _results[repr(case)]


def reference(case: Case) -> dict[str, Any]:
    return run_case(case.reference())[0]


def gradient_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """max over parameters of ‖g − r‖₂ / max(‖r‖₂, 1e-6·‖all r‖₂), and the worst name."""
    scale = torch.stack([r.double().norm() for r in wanted.values()]).norm()
    worst = (0.0, "")
    for name, g in found.items():
        r = wanted[name].double()
        error = (g.double() - r).norm() / torch.maximum(r.norm(), 1e-6 * scale)
        worst = max(worst, (float(error), name)) if error == error else (float("inf"), name)
    return worst


def assert_parity(case: Case) -> None:
    """Every rank agrees with the reference on the loss and on every gradient it holds; together
    they hold them all."""
    wanted = reference(case)
    tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5
    seen: set[str] = set()
    for rank, found in enumerate(run_case(case)):
        for name, value in wanted["losses"].items():
            error = abs(found["losses"][name] - value) / max(abs(value), 1e-30)
            assert error <= tolerance, f"rank {rank}: {name} {found['losses'][name]} vs {value}"
        error, worst = gradient_error(found["gradients"], wanted["gradients"])
        assert error <= tolerance, f"rank {rank}: gradient of {worst} is off by {error:.2e}"
        norm_error = abs(found["norm"] - wanted["norm"]) / wanted["norm"]
        assert norm_error <= tolerance, f"rank {rank}: norm {found['norm']} vs {wanted['norm']}"
        seen |= set(found["gradients"])
    assert seen == set(wanted["gradients"]), seen ^ set(wanted["gradients"])
