"""Autoregressive sampling: a key/value cache, masks for padded prompts, and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import SequenceContext
from .transformer import Transformer


class KeyValueCache:
    """Keys and values of every layer, in buffers for ``capacity`` positions.

    The buffers take shape, dtype and device from the first keys that a layer brings.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Positions that every layer holds."""
        return min(self._lengths.values(), default=0)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [B, K, S, d]; returns everything so far, [B, K, length, d] each."""
        begin = self._lengths.get(layer, 0)
        end = begin + k.shape[2]
        assert end <= self.capacity, f"{end} positions in a cache for {self.capacity}"
        if layer not in self._buffers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._buffers[layer] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self._buffers[layer]
        keys[:, :, begin:end] = k
        values[:, :, begin:end] = v
        self._lengths[layer] = end
        return keys[:, :, :end], values[:, :, :end]


@dataclass
class DecodingContext(SequenceContext):
    """A context whose queries are the positions ``offset`` … of the keys in ``store``.

    ``documents`` covers all of them, [B, offset + queries]; 0 marks padding, which sees only
    padding, so that no row of the mask is empty.  A store may return more keys than were
    written; those are hidden.  ``visible`` [B or 1, 1, queries, keys] replaces all of that.
    """

    offset: int = 0
    visible: Tensor | None = None

    def _distances(self, queries: int, keys: int, device: torch.device) -> Tensor:
        slot = torch.arange(keys, device=device)
        row = torch.arange(self.offset, self.offset + queries, device=device)
        return (row[:, None] - slot).abs()[None, None]

    def _count_visible(self, queries: int, device: torch.device) -> Tensor:
        written = self.offset + queries
        mask = self.dense_mask(queries, written, device)
        assert mask is not None
        if mask.dtype != torch.bool:  # additive
            mask = mask > torch.finfo(mask.dtype).min / 2
        counts = mask.sum(-1)[:, 0]
        if self.documents is not None and self.visible is None:
            counts = counts.where(self.documents[:, self.offset : written] != 0, 1)
        return counts

    def _build_dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        if self.visible is not None:
            return self.visible[..., :keys].to(device)
        written = self.offset + queries
        slot = torch.arange(keys, device=device)
        last = slot[self.offset : written, None] if self.mask == "causal" else written - 1
        mask = (slot[None, :] <= last)[None, None]
        if self.documents is not None:
            documents = torch.nn.functional.pad(self.documents, (0, keys - written))
            rows = documents[:, self.offset : written]
            mask = mask & (rows[:, :, None] == documents[:, None, :])[:, None]
        return mask


def padded_positions(valid: Tensor) -> Tensor:
    """Positions int64 [B, S] that count the valid (nonzero) tokens; padding has 0."""
    return (valid.long().cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if not self.temperature >= 0:
            found.append(("temperature", f"must not be negative, got {self.temperature}"))
        if self.top_k is not None and self.top_k < 1:
            found.append(("top_k", f"must be at least 1, got {self.top_k}"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(("top_p", f"must be in (0, 1], got {self.top_p}"))
        if not self.repetition_penalty > 0:
            found.append(("repetition_penalty", f"must be positive, got {self.repetition_penalty}"))
        return found


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits [B, V] of ``seen`` tokens (bool [B, V])
    by ``penalty``  (Keskar et al. 2019, arXiv 1909.05858, section 4.1)."""
    punished = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, punished, logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Next-token probabilities float64 [B, V] of logits [B, V]: temperature, then the ``top_k``
    likeliest, then the smallest set of them whose probability reaches ``top_p``."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    scaled = logits.double() / sampling.temperature
    if sampling.top_k is not None:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    chances = scaled.softmax(-1)
    if sampling.top_p is not None:
        ordered, order = chances.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        chances = torch.zeros_like(chances).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def draw(chances: Tensor, noise: Tensor) -> Tensor:
    """One token per row of chances [n, V], which need not sum to 1, by inverting the cumulative
    distribution at noise float64 [n] in [0, 1)."""
    cumulative = chances.cumsum(-1)
    threshold = noise.to(chances.device)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return token.clamp(max=chances.shape[-1] - 1)


def _draw(chances: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row; each row has its own noise."""
    noise = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    return draw(chances, noise)


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    eos: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continue each prompt (token ids, at least one) by up to ``max_new_tokens`` tokens.

    A continuation ends before its first ``eos``.  Sequence i draws its noise from (seed, i):
    the same call gives the same text, whatever the other prompts of the batch are.
    """
    assert prompts and all(len(prompt) for prompt in prompts), "every prompt needs a token"
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    valid = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    padded = bool((lengths != width).any())
    generators = [torch.Generator().manual_seed(hash_seed(seed, row)) for row in range(len(rows))]
    cache = KeyValueCache(width + max_new_tokens) if use_cache else None
    running = torch.ones(len(rows), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        offset = 0 if cache is None else cache.length
        context = DecodingContext(
            padded_positions(valid)[:, offset:],
            documents=valid if padded else None,
            store=cache,
            offset=offset,
        )
        assert model.head is not None
        logits = model.head.logits(model(ids[:, offset:], context)[:, -1])
        if sampling.repetition_penalty != 1:
            seen = torch.zeros_like(logits).scatter_add_(1, ids, valid.to(logits.dtype)) > 0
            logits = penalize(logits, seen, sampling.repetition_penalty)
        token = _draw(probabilities(logits, sampling), generators)
        ids = torch.cat([ids, token[:, None]], dim=1)
        valid = torch.nn.functional.pad(valid, (0, 1), value=1)
        if eos is not None:
            running &= token != eos
            if not running.any():
                break
    return [until(row, eos) for row in ids[:, width:].tolist()]


def hash_seed(seed: int, row: int) -> int:
    """A generator seed for sequence ``row``; neighbours give unrelated streams."""
    mixed = (seed * 0x9E3779B97F4A7C15 + row * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 29)) & (2**63 - 1)


def until(tokens: list[int], eos: int | None) -> list[int]:
    """The tokens before the first ``eos``."""
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
