"""A split of an expert budget that is known, for the expert study to find again.

A teacher and a student are the same transformer with frozen random weights and SoftMoE layers; the
teacher's budget is split unevenly, the student starts with equal parts and learns nothing but the
split, from the teacher's next-token probabilities.  It learns them through the training engine, so
on several pipeline ranks the gradient of the shared budget crosses real processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import run_ranks
from models.attention import AttentionConfig
from models.config import InitConfig, ModelConfig
from models.experts import BalanceConfig, MoE
from models.losses import LogitGradient, LogitRows, Term
from models.routers import LapSum
from parallel.apply import BuildOptions
from parallel.mesh import ParallelConfig, build_mesh
from parallel.stage import MicroBatch
from pretrain.engine import Engine, build_engine

VOCABULARY, SEQUENCES, LENGTH, EXPERTS = 16, 8, 64, 8
PLANTED = (1.1, 1.3, 1.2, 4.4)
RATE, DECAY_FROM = 0.1, 0.5  # of Adam; the share of the steps before it falls to nothing
BUDGET = "shared.budget.eta"


@dataclass(frozen=True)
class Planted:
    """One run.  pool: batches that are seen again and again."""

    seed: int
    steps: int
    pool: int
    pp: int = 1


@dataclass(frozen=True)
class SoftTargets:
    """Σ_v p_v (log p_v − log q_v), p from the fields ``target_v``."""

    normalizer: float
    name: str = "divergence"
    weight: float = 1.0
    depth: int = 0
    views: int = 1

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        loss, pieces = rows.log_z.clone(), []
        for v in range(VOCABULARY):
            p = fields[f"target_{v}"]
            ids = torch.full_like(p, v, dtype=torch.int64)
            loss += p * (p.log() - rows.pick(ids))
            pieces.append((ids, -p))
        return loss, LogitGradient(softmax=torch.ones_like(loss), onehot=pieces)


class Imitation:
    """The objective: the mean divergence from the teacher."""

    primary = "divergence"
    is_bound = False

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        return MicroBatch(tokens)

    evaluation_batch = micro_batch

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        return {"positions": sum(batch.ids.numel() for batch in batches)}

    def terms(self, counts: dict[str, int]) -> list[Term]:
        return [SoftTargets(float(counts["positions"]))]

    evaluation_terms = terms


def model_config() -> ModelConfig:
    router = LapSum.Config(k=sum(PLANTED) / 4, learned=True, threshold=1.0, expansion=1.5)
    return ModelConfig(
        vocab_size=VOCABULARY,
        vocab_multiple=VOCABULARY,
        hidden=32,
        layers=len(PLANTED),
        attention=AttentionConfig(heads=4, kv_heads=4, head_dim=8),
        feedforward=MoE.Config(
            experts=EXPERTS, hidden=32, router=router, balance=BalanceConfig(kind="none")
        ),
        init=InitConfig(std=1.0, rule="fan_in", scale_outputs=False),
    )


def build(seed: int, parallel: ParallelConfig) -> tuple[Engine, Tensor]:
    """The engine with everything frozen but the budget, and that."""
    mesh = build_mesh(parallel, torch.device("cpu"))
    options = BuildOptions(dtype=torch.float64, seed=seed)
    engine = build_engine(model_config(), parallel, mesh, options, LENGTH)
    parameters = dict(engine.model.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name == BUDGET)
    return engine, parameters[BUDGET]


@torch.no_grad()
def lessons(seed: int, pool: int) -> list[list[MicroBatch]]:
    """Two micro-batches of random tokens per batch, with the teacher's probabilities."""
    engine, eta = build(seed, ParallelConfig())
    shares = torch.tensor(PLANTED, dtype=eta.dtype) - 1
    eta.copy_((shares / shares.sum()).log())
    part = engine.model.part.eval()
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(pool):
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=g)
        columns = part.logits(ids).softmax(-1).unbind(-1)
        fields = {f"target_{v}": column.contiguous() for v, column in enumerate(columns)}
        halves = [slice(0, SEQUENCES // 2), slice(SEQUENCES // 2, None)]
        found.append(
            [MicroBatch(ids[half], {n: f[half] for n, f in fields.items()}) for half in halves]
        )
    return found


def learn(
    rank: int, world: int, job: Planted, batches: list[list[MicroBatch]]
) -> tuple[list[list[float]], list[float]]:
    """On one rank: k of every layer before each step and after the last one, and the losses."""
    engine, eta = build(job.seed, ParallelConfig(pp=job.pp))
    budget = engine.model.part.shared["budget"]
    optimizer = torch.optim.Adam([eta], lr=RATE)
    hold = round(DECAY_FROM * job.steps)
    path, losses = [budget().tolist()], []
    for step in range(job.steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (job.steps - step) / (job.steps - hold))
        losses.append(engine.forward_backward(batches[step % job.pool], Imitation()).total)
        optimizer.step()
        path.append(budget().tolist())
    return path, losses


def run(job: Planted) -> list[tuple[list[list[float]], list[float]]]:
    """What every rank found; ranks are processes of their own if there are several."""
    batches = lessons(job.seed, job.pool)
    if job.pp == 1:
        return [learn(0, 1, job, batches)]
    return run_ranks(job.pp, learn, job, batches)
