"""What an objective is: everything that turns token windows into a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from models.config import ModelConfig
from models.losses import Term
from models.registry import Registry
from parallel.stage import MicroBatch

OBJECTIVES = Registry("objective")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What every objective can be told, and what it tells of itself.

    draws_noise: whether a loss is one draw of many, of a model that sees padding unless it is
    hidden.
    """

    draws_noise: ClassVar[bool] = False

    documents: Literal["attend", "mask"] = field(
        default="attend", metadata={"help": "may tokens see other documents of their window"}
    )

    @property
    def views(self) -> int:
        """Sequences that the model sees per sample of a training step."""
        return 1

    @property
    def canvas(self) -> int:
        """Slots of the model's input per token."""
        return 1

    @property
    def judged(self) -> float:
        """Share of the slots whose logits are made, on average."""
        return 1.0

    def notes(self) -> list[str]:
        """What a reader of the training loss must know."""
        return []

    def model_problems(self, model: ModelConfig) -> list[tuple[str, str]]:
        """What does not go with the model, like ``problems()``."""
        return []

    def training_problems(self, sequence_length: int, batch: int) -> list[tuple[str, str]]:
        """What does not go with the length of sequences and their number per step."""
        return []


class Objective(Protocol):
    """Registered class built as ``Objective(config, model, seed, batch)``, where ``batch`` is the
    number of samples per step; its ``Config`` is an ``ObjectiveConfig``.

    ``primary`` names the term whose mean is *the* loss of a run, in nats per counted token;
    ``is_bound`` says that it only bounds the likelihood.
    """

    primary: str
    is_bound: bool

    def micro_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        """Tokens int64 [B, S+1] (one more than the model sees), the document number of each token
        [B, S+1] (negative on padding) or None, and the global sample indices (noise depends on
        these and the seed alone).  Views of one sample are one behind the other."""
        ...

    def evaluation_batch(
        self, tokens: Tensor, documents: Tensor | None, sample_indices: Sequence[int]
    ) -> MicroBatch:
        """The same samples as they are evaluated."""
        ...

    def counts(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Integer normalisers of these micro-batches; the trainer sums them over all data ranks
        before the first forward pass."""
        ...

    def terms(self, counts: dict[str, int]) -> list[Term]:
        """Loss terms normalised by the *global* counts."""
        ...

    def evaluation_terms(self, counts: dict[str, int]) -> list[Term]:
        """The primary term as it is evaluated: the likelihood (or its bound) and nothing else."""
        ...


def build_objective(
    config: Any, model: ModelConfig | None = None, seed: int = 0, batch: int = 1
) -> Objective:
    """``model``: what is trained; None stands for one without multi-token prediction.  ``batch``:
    samples per step, over which noise is spread evenly."""
    objective: Objective = OBJECTIVES.build(config, model, seed, batch)
    return objective


def count_labels(batches: Sequence[MicroBatch], name: str, ignore: int) -> int:
    """Rows that carry a loss."""
    return int(sum(int(torch.count_nonzero(b.fields[name] != ignore)) for b in batches))
