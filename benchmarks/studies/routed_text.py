"""Small language models that differ in their router alone, for the expert study."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch import prepare
from models.experts import MoE
from models.routing import Router, Routing
from parallel.apply import BuildOptions, update_state
from parallel.gradients import clip_gradients, gradient_norm
from parallel.mesh import build_mesh
from pretrain.config import RunConfig, load_run_config
from pretrain.data import Batches, build_blend
from pretrain.engine import Engine, build_engine
from pretrain.evaluate import Evaluator
from pretrain.objectives.base import build_objective
from pretrain.optimizer import ShardedOptimizer
from pretrain.schedule import learning_rate_factor

EXPERTS = 8
ROUTERS: dict[str, str] = {
    "top-1": "{type: topk, k: 1, gates: softmax}",
    "top-2": "{type: topk, k: 2}",
    "top-3": "{type: topk, k: 3}",
    "ReMoE": "{type: relu, k: 2.0}",
    "LapSum": "{type: lapsum, k: 1.5, threshold: 1.3}",
    "LapSum, learned split": "{type: lapsum, k: 1.5, threshold: 1.3, learned: true}",
}
"""All aim at two active experts; the other two top-k are the scale."""

SETTINGS = (
    "model.hidden=64",
    "model.layers=4",
    "model.attention={heads: 2, kv_heads: 2, head_dim: 32}",
    "model.init={std: 1.0, rule: fan_in, embedding_std: 0.1}",
    "optimizer.lr=3e-3",
    "schedule.warmup_steps=2",
    "training.sequence_length=128",
)


@dataclass(frozen=True)
class Text:
    """One run.  router: a key of ``ROUTERS``."""

    router: str
    seed: int
    steps: int
    sequences: int
    validation: int
    data: str


@dataclass
class Learned:
    """loss: validation, nats per token; bits: per byte of text.  training, inference: mean active
    experts of the last tenth of the steps and on the validation text.  layers: the latter by layer.
    budget: k by layer.  figures: what else was measured, of the last step."""

    loss: float
    bits: float
    training: float
    inference: float
    layers: list[float]
    budget: list[float]
    curve: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def make_data(folder: Path, quick: bool) -> str:
    """Tokenise the bundled novels, or one as bytes."""
    if quick:
        novel = Path(prepare.__file__).parent.parent / "data_tools/corpora/austen/persuasion.txt"
        source = ["--corpus", str(novel), "--document-start", "Chapter .*", "--tokenizer", "bytes"]
    else:
        source = ["--corpus", "austen", "--train-tokenizer", "1024"]
    with contextlib.redirect_stdout(sys.stderr):
        code = prepare.main([*source, "--workers", "1", "--out", str(folder / "text")])
    if code:
        raise ValueError("the text for the study could not be prepared")
    return str(folder / "text")


def config_of(job: Text) -> RunConfig:
    learned = ["optimizer.budget_lr=3"] if "learned" in ROUTERS[job.router] else []
    router = ROUTERS[job.router]
    return load_run_config(
        [],
        [
            *SETTINGS,
            *learned,
            f"model.feedforward={{type: moe, experts: {EXPERTS}, hidden: 64, router: {router}}}",
            f"data.train=[{{path: {job.data}/train}}]",
            f"data.validation=[{{path: {job.data}/validation}}]",
            f"training.batch_tokens={128 * job.sequences}",
            f"training.micro_batch={job.sequences}",
            f"training.steps={job.steps}",
            f"evaluation.sequences={job.validation}",
            f"seed={job.seed}",
        ],
        1,
    )


def train(job: Text) -> Learned:
    config = config_of(job)
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    objective = build_objective(config.objective, config.model)
    length, total = config.training.sequence_length, job.steps * job.sequences
    blend = build_blend(config.data, config.data.train, length, config.seed, total)
    batches = Batches(blend, objective, job.sequences, 0, 1, mesh.device)
    options = BuildOptions(seed=config.seed)
    engine = build_engine(config.model, config.parallel, mesh, options, length)
    optimizer = ShardedOptimizer(engine.model, config.optimizer, config.kernels.optimizer)
    curve, active = [], []
    for step in range(job.steps):
        batch = batches.read(step * job.sequences, job.sequences)
        result = engine.forward_backward(batch, objective)
        clip_gradients(engine.model, gradient_norm(engine.model), 1.0)
        optimizer.step(config.optimizer.lr * learning_rate_factor(config.schedule, step, job.steps))
        update_state(engine.model, step + 1)
        curve.append(result.losses["cross_entropy"])
        active.append(result.experts["active"])
    last = active[-max(1, job.steps // 10) :]
    found, layers = evaluate(config, engine)
    return Learned(
        loss=found["eval/loss"],
        bits=found["eval/bits_per_byte"],
        training=sum(last) / len(last),
        inference=sum(layers) / len(layers),
        layers=layers,
        budget=budget_of(engine),
        curve=curve,
        figures={n: v for n, v in result.experts.items() if "/" not in n},
    )


def evaluate(config: RunConfig, engine: Engine) -> tuple[dict[str, float], list[float]]:
    """Validation figures, and the mean number of active experts there by layer."""
    used: dict[Router, list[Tensor]] = {}

    def note(router: Any, inputs: Any, routing: Routing) -> None:
        used.setdefault(router, []).append(routing.map.sum(-1).double().mean())

    layers = [m.router for m in engine.model.part.modules() if isinstance(m, MoE)]
    handles = [router.register_forward_hook(note) for router in layers]
    found = Evaluator(config, engine, build_objective(config.objective, config.model)).run()
    for handle in handles:
        handle.remove()
    return found, [float(torch.stack(used[router]).mean()) for router in layers]


def budget_of(engine: Engine) -> list[float]:
    shared = engine.model.part.shared
    return shared["budget"]().tolist() if "budget" in shared else []
