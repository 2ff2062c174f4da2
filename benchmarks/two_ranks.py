"""What the benchmarks on two pipeline ranks share: models, the peer's schedules, timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from models.attention import AttentionConfig, SequenceContext
from models.config import ModelConfig
from models.feedforward import SwiGLU
from models.losses import Term
from models.mtp import MTPConfig
from models.transformer import Transformer
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.units import model_units
from parallel.stage import unit_name

RANKS = 2
VIRTUAL = {"1f1b": 1, "interleaved": 2}  # stages per rank
TOLERANCE = 1e-5  # relative, of gradients of both sides


def model_config(hidden: int, layers: int, vocabulary: int, depth: int = 0) -> ModelConfig:
    """A Llama shape with heads of 64."""
    heads = max(1, hidden // 64)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden=hidden,
        layers=layers,
        attention=AttentionConfig(heads, heads, hidden // heads),
        feedforward=SwiGLU.Config(hidden=hidden * 8 // 3 // 32 * 32),
        mtp=MTPConfig(depth=depth),
    )


class Body(nn.Module):
    """A stage as the peer wants it: ids or hidden states in, hidden states out.  The last one gives
    those of all depths, stacked behind the batch where there are several."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        model, config = self.model, self.model.config
        context = SequenceContext(torch.arange(x.shape[1]))
        if "embedding" in model.units:
            x = model.run_unit("embedding", None, x, context)
        for layer in range(config.layers):
            if f"blocks.{layer}" in model.units:
                x = model.run_unit(f"blocks.{layer}", x, x, context)
        if "final_norm" not in model.units:
            return x
        outputs = [model.run_unit("final_norm", x, x, context)]
        for depth in range(1, config.mtp.depth + 1):
            assert ids is not None
            x = model.run_unit(f"mtp.{depth}", x, ids, context)
            outputs.append(model.run_unit(f"mtp_norms.{depth}", x, ids, context))
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs, 1)


def peer_schedule(
    name: str, models: dict[int, Transformer], micro_batches: int, loss: Callable[..., Tensor]
) -> Any:
    """torch.distributed.pipelining over this rank's stages: ``1f1b`` or ``interleaved``."""
    number = RANKS * VIRTUAL[name]
    stages: list[Any] = [
        PipelineStage(Body(model), stage, number, torch.device("cpu"))
        for stage, model in models.items()
    ]
    if name == "1f1b":
        return Schedule1F1B(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, scale_grads=False)


class Peer:
    """torch.distributed.pipelining over blocks spread evenly, the tail on the last stage.

    ids: [N, S] of all micro-batches, labels: [N, depths, S].
    """

    def __init__(
        self, rank: int, config: ModelConfig, name: str, micro_batches: int,
        ids: Tensor, labels: Tensor, terms: Sequence[Term],
    ) -> None:  # fmt: skip
        self.config, self.ids, self.labels, self.terms = config, ids, labels, terms
        units = tuple(model_units(config.layers, config.mtp.depth))
        placement = make_placement("uniform", PlanRequest(units, RANKS, VIRTUAL[name]))
        self.models = {}
        for stage in placement.stages_of(rank):
            torch.manual_seed(0)
            names = {unit_name(unit) for unit in placement.stages[stage]}
            self.models[stage] = Transformer(self.config, names)
        self.first, self.last = 0 in self.models, placement.num_stages - 1 in self.models
        self.schedule = peer_schedule(name, self.models, micro_batches, self.loss)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = self.models[max(self.models)].head
        assert head is not None
        total = hidden.new_zeros(())
        for depth in range(self.config.mtp.depth + 1):
            name = f"labels_{depth}" if depth else "labels"
            terms = [term for term in self.terms if term.depth == depth]
            part: Tensor = head(hidden[:, depth], {name: labels[:, depth]}, terms)[0]
            total = total + part
        return total

    def copy_weights(self, whole: dict[str, Tensor]) -> None:
        for model in self.models.values():
            model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def difference(self, wanted: dict[str, Tensor]) -> float:
        worst = 0.0
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                if name == "embedding.weight":  # two copies here, each with its share
                    continue
                assert parameter.grad is not None
                error = (parameter.grad - wanted[name]).norm() / wanted[name].norm()
                worst = max(worst, float(error))
        return worst

    def step(self) -> None:
        for model in self.models.values():
            for parameter in model.parameters():
                parameter.grad = None
        given = (self.ids,) if self.first else ()
        extra: dict[str, Any] = {}
        if self.last:
            extra = {"target": self.labels, "losses": [], "ids": self.ids}
        elif not self.first:
            extra = {"ids": self.ids}
        self.schedule.step(*given, **extra, return_outputs=False)


def timed(run: Callable[[], object]) -> float:
    """Seconds from a barrier to a barrier."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def agreed(value: Any) -> Any:
    """The first rank's."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def transfer_seconds(rank: int, shape: Sequence[int], repeats: int = 20) -> float:
    """One way of one activation of this shape, the median of some round trips; the same on both
    ranks."""
    word, times = torch.zeros(*shape), []
    for _ in range(repeats):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(word, 1 - rank)
            else:
                dist.recv(word, 1 - rank)
        times.append((time.perf_counter() - start) / 2)
    found: float = agreed(statistics.median(times))
    return found
