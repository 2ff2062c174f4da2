"""Sampling from a diffusion model: prompts in, texts and a report out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from . import ancestral as ancestral  # registers itself, like the next ones
from . import soar as soar
from . import unmasking as unmasking
from .decoding import Sampling, until
from .denoising import SAMPLERS, Canvas, Denoiser, Report, RowNoise, Sampler


@torch.inference_mode()
def sample(
    denoiser: Denoiser,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    config: Any,
    sampling: Sampling | None = None,
    *,
    eos: int | None = None,
    seed: int = 0,
) -> tuple[list[list[int]], Report]:
    """Add ``new_tokens`` tokens to each prompt (token ids, possibly none) with the sampler that
    ``config`` belongs to.  A text ends before its first ``eos``.

    Sequence i draws its noise from (seed, i): the same call gives the same text, whatever the other
    prompts of the batch are, but for ties among tokens that a model is equally sure of.  ValueError
    where sampler, model and prompts do not go together.
    """
    assert prompts and new_tokens > 0
    sampler: Sampler = SAMPLERS.build(config, sampling)
    sampler.check(denoiser)
    wrong = {
        token for prompt in prompts for token in prompt if not 0 <= token < denoiser.vocabulary
    }
    if wrong:
        raise ValueError(f"prompts hold ids {sorted(wrong)}, which are none of the model's tokens")
    calls, sequences = denoiser.calls, denoiser.sequences
    report = Report(committed=[[] for _ in prompts])
    texts: list[list[int]] = [[] for _ in prompts]
    together = defaultdict(list)  # prompts whose blocks lie side by side when padded on the left
    for row, prompt in enumerate(prompts):
        together[len(prompt) % denoiser.block_size].append(row)
    for rows in together.values():
        canvas = _canvas(denoiser, [prompts[row] for row in rows], new_tokens)
        denoiser.reset()
        noise = RowNoise(seed, rows, denoiser.device)
        sampler.fill(denoiser, canvas, noise, [report.committed[row] for row in rows])
        for row, text in zip(rows, canvas.ids[:, canvas.prompt :].tolist()):
            texts[row] = until(text, eos)
    report.calls, report.sequences = denoiser.calls - calls, denoiser.sequences - sequences
    return texts, report


def _canvas(denoiser: Denoiser, prompts: Sequence[Sequence[int]], new_tokens: int) -> Canvas:
    empty = 0 if denoiser.mask_id is None else denoiser.mask_id
    width = max(map(len, prompts))
    rows = [[0] * (width - len(p)) + list(p) + [empty] * new_tokens for p in prompts]
    real = [[False] * (width - len(p)) + [True] * (len(p) + new_tokens) for p in prompts]
    return Canvas(
        torch.tensor(rows, device=denoiser.device),
        torch.tensor(real, device=denoiser.device),
        prompt=width, begin=width, end=width + new_tokens,
    )  # fmt: skip
