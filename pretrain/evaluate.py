"""Validation loss, perplexity and bits per byte."""

from __future__ import annotations

import math

from .config import RunConfig
from .data import Batches, build_blend, bytes_per_token
from .engine import Engine
from .objectives.base import Objective


class Evaluator:
    """The same validation sequences every time, under any layout.

    ``loss`` is the mean of the objective's primary term in nats per token (an upper bound where the
    objective is one); bits per byte use the tokens per byte of the whole validation text.
    """

    def __init__(self, config: RunConfig, engine: Engine, objective: Objective) -> None:
        self.engine = engine
        self.objective = objective
        self.sequences = 0
        if not config.data.validation:
            return
        mesh = engine.model.mesh
        length = config.training.sequence_length
        blend = build_blend(config.data, config.data.validation, length, 0, None)
        share = config.training.micro_batch * mesh.data_size
        self.sequences = min(config.evaluation.sequences, blend.num_samples) // share * share
        if self.sequences == 0:
            raise ValueError(
                f"evaluation: {min(config.evaluation.sequences, blend.num_samples)} validation "
                f"sequences are fewer than one batch of {share}"
            )
        self.bytes_per_token = bytes_per_token(config.data.validation)
        self.batches = Batches(
            blend, objective, config.training.micro_batch, mesh.data_rank, mesh.data_size,
            mesh.device,
        )  # fmt: skip

    def run(self) -> dict[str, float]:
        """``eval/…`` figures (empty without validation data); the same on every rank."""
        if not self.sequences:
            return {}
        result = self.engine.evaluate(self.batches.read(0, self.sequences), self.objective)
        loss = result.losses[self.objective.primary]
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/bits_per_byte": loss / math.log(2) / self.bytes_per_token,
        }
