"""Sampling from a diffusion model: prompts in, texts and a report out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .ancestral import Ancestral
from .blockwise import Blocks
from .decoding import Sampling, generate, until
from .denoisers import BidirectionalDenoiser, BlockDenoiser, Cache
from .denoising import SAMPLERS, Canvas, Denoiser, Report, RowNoise, Sampler
from .families import Family, family_of
from .ordered import Eso, EsoDenoiser
from .soar import SOAR as SOAR  # registers itself, as all the others do
from .transformer import Head, Transformer
from .unmasking import FirstHitting


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
        canvas = _canvas(denoiser, [prompts[row] for row in rows], new_tokens, eos)
        denoiser.reset()
        noise = RowNoise(seed, rows, denoiser.device)
        sampler.fill(denoiser, canvas, noise, [report.committed[row] for row in rows])
        for row, text in zip(rows, canvas.ids[:, canvas.prompt :].tolist()):
            texts[row] = until(text[:new_tokens], eos)
    report.calls, report.sequences = denoiser.calls - calls, denoiser.sequences - sequences
    return texts, report


def _canvas(
    denoiser: Denoiser, prompts: Sequence[Sequence[int]], new_tokens: int, eos: int | None
) -> Canvas:
    """Prompts padded on the left, and as many tokens to fill as fill the last block too."""
    empty = 0 if denoiser.mask_id is None else denoiser.mask_id
    width = max(map(len, prompts))
    new_tokens += -(width + new_tokens) % denoiser.block_size
    rows = [[0] * (width - len(p)) + list(p) + [empty] * new_tokens for p in prompts]
    real = [[False] * (width - len(p)) + [True] * (len(p) + new_tokens) for p in prompts]
    return Canvas(
        torch.tensor(rows, device=denoiser.device),
        torch.tensor(real, device=denoiser.device),
        prompt=width, begin=width, end=width + new_tokens, eos=eos,
    )  # fmt: skip


def default_sampler(family: Family) -> Any:
    """The config of the sampler that follows the process the model was trained for."""
    return {
        "masked": Ancestral.Config(), "uniform": Ancestral.Config(),
        "block": Blocks.Config(inner=FirstHitting.Config()), "eso": Eso.Config(),
    }[family]  # fmt: skip


def denoiser_of(
    model: Transformer, objective: Mapping[str, Any], guidance: float = 0.0, cache: Cache = "none",
    head: Head | None = None,
) -> Denoiser:  # fmt: skip
    """The denoiser of a model trained with ``objective``, settings with all their values.
    guidance, cache: see ``BidirectionalDenoiser``; ValueError for another one.  head: of a model
    without one of its own."""
    family = family_of(objective)
    if family in ("masked", "uniform"):
        return BidirectionalDenoiser(model, family, guidance, cache, head)
    for name, value, default in (("guidance", guidance, 0.0), ("cache", cache, "none")):
        if value != default:
            raise ValueError(f"{name}={value} is for masked diffusion, not for {family}")
    if family == "block":
        return BlockDenoiser(model, objective["block_size"], head=head)
    if family == "eso":
        return EsoDenoiser(model, objective["alpha0"], objective["variant"], head=head)
    return Denoiser("causal", model.config.predicted_vocab_size)  # which every sampler refuses


def continued(
    model: Transformer, objective: Mapping[str, Any], prompts: Sequence[Sequence[int]],
    new_tokens: int, sampling: Sampling, *, eos: int | None = None, seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """What a model trained with ``objective`` adds to each prompt (at least one token): token by
    token, or with the sampler that follows its diffusion."""
    family = family_of(objective)
    if family == "causal":
        return generate(model, prompts, new_tokens, sampling, eos=eos, seed=seed)
    denoiser = denoiser_of(model, objective)
    config = default_sampler(family)
    return sample(denoiser, prompts, new_tokens, config, sampling, eos=eos, seed=seed)[0]
