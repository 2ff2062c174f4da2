"""Validation loss, perplexity and bits per byte."""

from __future__ import annotations

import math

import torch

from data_tools.blend import Blend

from .config import RunConfig
from .data import Batches, build_blend, bytes_per_token
from .engine import Engine
from .objectives.base import Objective
from .sequence_losses import sequence_sizes, standard_error


def validation_blend(config: RunConfig) -> tuple[Blend, int]:
    """The validation stream and how many of its sequences are used: those asked for, or all."""
    length = config.training.sequence_length
    blend = build_blend(config.data, config.data.validation, length, 0, None)
    return blend, min(config.evaluation.sequences, blend.num_samples)


class Evaluator:
    """The same validation sequences every time, under any layout.

    Each is seen ``evaluation.draws`` times, every time with noise of its own, which depends on
    nothing but its number.  Where they do not fill the last batches, empty samples that carry no
    loss do.  ``loss`` is the mean of the objective's evaluation term in nats per token (an upper
    bound where the objective is one), and its standard error is that of a mean over sequences;
    bits per byte use the tokens per byte of the whole validation text.
    """

    def __init__(self, config: RunConfig, engine: Engine, objective: Objective) -> None:
        self.engine = engine
        self.objective = objective
        self.sequences = 0
        if not config.data.validation:
            return
        mesh = engine.model.mesh
        blend, self.sequences = validation_blend(config)
        share = config.training.micro_batch * mesh.data_size
        draws = config.evaluation.draws
        self.pass_size, self.padded = (
            -(-samples // share) * share for samples in (self.sequences, self.sequences * draws)
        )
        self.bytes_per_token = bytes_per_token(config.data.validation)
        self.batches = Batches(
            blend, objective, config.training.micro_batch, mesh.data_rank, mesh.data_size,
            mesh.device, self.sequences, draws,
        )  # fmt: skip

    def run(self) -> dict[str, float]:
        """``eval/…`` figures (empty without validation data); the same on every rank."""
        if not self.sequences:
            return {}
        device = self.engine.model.mesh.device
        sums, sizes = torch.zeros(2, self.sequences, dtype=torch.float64, device=device)
        experts: dict[str, float] = {}
        for first in range(0, self.padded, self.pass_size):  # memory for one draw at a time
            count = min(self.pass_size, self.padded - first)
            batches = self.batches.read(first, count)
            result = self.engine.evaluate(batches, self.objective, self.sequences)
            assert result.sequences is not None
            sums += result.sequences
            sizes += sequence_sizes(batches, self.objective, self.sequences).to(device)
            for name in {"active", "load_cv"} & result.experts.keys():
                part = result.experts[name] * count / self.padded
                experts[name] = experts.get(name, 0.0) + part
        sizes = self.engine.sum_over(("data",), sizes)
        loss, error = float(sums.sum() / sizes.sum()), standard_error(sums, sizes)
        return {
            "eval/loss": loss,
            **({} if error is None else {"eval/standard_error": error}),
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/bits_per_byte": loss / math.log(2) / self.bytes_per_token,
            "eval/sequences": self.sequences,
            **{f"eval/experts_{name}": value for name, value in sorted(experts.items())},
        }
