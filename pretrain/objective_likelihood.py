"""The likelihood of whole sequences under any diffusion objective, by the code that trains it."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.likelihood import Estimate, Request, Scoring, check_draws, check_requests
from models.transformer import Transformer

from .decode import decode
from .objectives.base import OBJECTIVES
from .objectives.diffusion import Diffusion
from .objectives.noise import SampleNoise
from .sequence_losses import SEQUENCE, BySequence


@torch.inference_mode()
def whole_likelihoods(
    model: Transformer,
    settings: Mapping[str, Any],
    requests: Sequence[Request],
    limit: int,
    scoring: Scoring,
) -> list[Estimate]:
    """The bound of log p(prompt, answer) of each request under the objective with these
    ``settings``, from ``scoring.draws`` draws of its noise, spread evenly over time.

    The error is that of independent draws, and so not below the true one.
    """
    check_draws(scoring.draws)
    check_requests(requests, limit)
    rest = {name: value for name, value in settings.items() if name != "type"}
    config: Any = decode(OBJECTIVES.config_class(settings["type"]), rest)
    objective: Diffusion = OBJECTIVES.build(config, model.config)
    return [_estimate(model, objective, request, scoring) for request in requests]


def _estimate(model: Transformer, objective: Any, request: Request, scoring: Scoring) -> Estimate:
    ids = torch.tensor([[0, *request.prompt, *request.answer]])  # the first is never seen
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    noise = SampleNoise(scoring.seed, f"likelihood of {digest}", scoring.draws)
    nats = []
    for begin in range(0, scoring.draws, scoring.batch):
        numbers = range(begin, min(begin + scoring.batch, scoring.draws))
        tokens = ids.repeat(len(numbers), 1)
        windows = objective.windows(tokens, torch.zeros_like(tokens))
        batch = objective.noised(windows, numbers, noise)
        rows = torch.arange(len(numbers)).repeat_interleave(len(batch.ids) // len(numbers))
        batch.fields[SEQUENCE] = rows[:, None].repeat(1, batch.ids.shape[1])
        head = model.head
        assert head is not None
        device = head.matrix().device
        batch = batch.map(lambda x, device=device: x.to(device))
        counts = objective.counts([batch])
        sums = torch.zeros(len(numbers) + 1, dtype=torch.float64, device=batch.ids.device)
        [term] = objective.evaluation_terms(counts)
        hidden = model(batch.ids, batch.context())
        head(hidden, batch.fields, [BySequence(term, sums)])
        per_token = sums[:-1] * len(numbers) / term.normalizer
        nats += (-per_token * (ids.shape[1] - 1)).tolist()
    return Estimate(statistics.fmean(nats), statistics.stdev(nats) / math.sqrt(len(nats)))
