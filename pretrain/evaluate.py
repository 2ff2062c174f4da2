"""Validation loss, perplexity and bits per byte."""

from __future__ import annotations

import math

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
        self.padded = -(-self.sequences * draws // share) * share
        self.bytes_per_token = bytes_per_token(config.data.validation)
        self.batches = Batches(
            blend, objective, config.training.micro_batch, mesh.data_rank, mesh.data_size,
            mesh.device, self.sequences, draws,
        )  # fmt: skip

    def run(self) -> dict[str, float]:
        """``eval/…`` figures (empty without validation data); the same on every rank."""
        if not self.sequences:
            return {}
        batches = self.batches.read(0, self.padded)
        result = self.engine.evaluate(batches, self.objective, self.sequences)
        loss = result.losses[self.objective.primary]
        assert result.sequences is not None
        sizes = sequence_sizes(batches, self.objective, self.sequences).to(result.sequences.device)
        sizes = self.engine.sum_over(("data",), sizes)
        error = standard_error(result.sequences, sizes)
        return {
            "eval/loss": loss,
            **({} if error is None else {"eval/standard_error": error}),
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/bits_per_byte": loss / math.log(2) / self.bytes_per_token,
            "eval/sequences": self.sequences,
            **{f"eval/experts_{name}": result.experts[name] for name in ("active", "load_cv")
               if name in result.experts},
        }  # fmt: skip
