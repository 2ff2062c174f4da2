"""Transformers as denoisers: masks for padding, keys and values kept between forward passes,
classifier-free guidance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .attention import SequenceContext
from .decoding import padded_positions
from .denoising import Canvas, Denoiser
from .families import Family
from .transformer import Head, Transformer

Cache = Literal["none", "prefix", "dual"]


class SlotCache:
    """Keys and values of every layer at numbered slots.  ``slots`` int64 [B, Q]: where the next
    forward pass writes those of its queries; it reads all of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots = torch.empty(0)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, K, Q, d] to what all slots hold, [B, K, capacity, d]; zeros at first."""
        if layer not in self._buffers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._buffers[layer] = k.new_zeros(shape), v.new_zeros(shape)
        index = self.slots[:, None, :, None].expand_as(k)
        for buffer, new in zip(self._buffers[layer], (k, v)):
            buffer.scatter_(2, index, new)
        return self._buffers[layer]


@dataclass
class SlotContext(SequenceContext):
    """A context that is told what sees what: ``visible`` bool [B, 1, Q, keys], or None where
    everything is seen.  ``key_positions`` int64 [B, keys]; those of the queries where None."""

    visible: Tensor | None = None
    key_positions: Tensor | None = None

    def _build_dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        return self.visible

    def _count_visible(self, queries: int, device: torch.device) -> Tensor:
        if self.visible is None:
            return torch.full((queries,), queries, device=device)
        return self.visible.sum(-1)[:, 0]

    def _distances(self, queries: int, keys: int, device: torch.device) -> Tensor:
        of_keys = self.positions if self.key_positions is None else self.key_positions
        return (self.positions[:, :, None] - of_keys[:, None, :]).abs()[:, None]


class TransformerDenoiser(Denoiser):
    """head: that of a ``model`` without one of its own."""

    def __init__(self, model: Transformer, family: Family, head: Head | None = None) -> None:
        config = model.config
        mask_id = config.mask_id if config.mask_token and family != "uniform" else None
        super().__init__(family, config.predicted_vocab_size, mask_id)
        if family != "uniform" and mask_id is None:
            raise ValueError(f"{family} diffusion needs a model with a mask token")
        self.model = model
        self.device = next(model.parameters()).device
        self._head = model.head if head is None else head

    def head(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        return self._head.logits(hidden)


class BidirectionalDenoiser(TransformerDenoiser):
    """A model in which every token sees every other, of masked or uniform-state diffusion.

    guidance: w of l_un + (w + 1)(l − l_un), where l_un are the logits for a masked prompt (Nie et
    al. 2024, arXiv 2410.18514); its second half of sequences counts too.

    cache: an approximation of masked diffusion for models of two layers and more.  The first pass
    over a window is over everything; then ``prefix`` computes only the window and what is behind
    it, and ``dual`` only the window, with the keys and values that the other columns had in the
    first pass (Fast-dLLM: Wu et al. 2025, arXiv 2505.22618).
    """

    def __init__(
        self, model: Transformer, family: Family = "masked", guidance: float = 0.0,
        cache: Cache = "none", head: Head | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, family, head)
        if cache != "none" and family != "masked":
            raise ValueError(f"cache={cache} is for masked diffusion: here every token may change")
        if guidance and self.mask_id is None:
            raise ValueError("guidance hides the prompt, and this model has no mask token")
        self.guidance, self.cache = guidance, cache
        self.stateful = cache != "none"
        self.reset()

    def reset(self) -> None:
        self._store: SlotCache | None = None
        self._window: tuple[int, int] | None = None

    def logits(self, canvas: Canvas, noise: float) -> Tensor:
        ids, real = canvas.ids, canvas.real
        if self.guidance:
            assert self.mask_id is not None
            self.sequences += ids.shape[0]
            free = ids.clone()
            free[:, : canvas.prompt] = self.mask_id
            ids, real = torch.cat([ids, free]), torch.cat([real, real])
        logits = self.head(self._hidden(ids, real, canvas, noise))
        if self.guidance:
            given, free = logits.chunk(2)
            return free + (self.guidance + 1) * (given - free)
        return logits

    def _hidden(self, ids: Tensor, real: Tensor, canvas: Canvas, noise: float) -> Tensor:
        begin, end, length = canvas.begin, canvas.end, ids.shape[1]
        first, last = 0, length
        if self.cache != "none":
            if self._window == (begin, end):
                first, last = begin, end if self.cache == "dual" else length
            else:
                self._store = SlotCache(length)
                self._window = (begin, end)
            assert self._store is not None
            self._store.slots = torch.arange(first, last, device=ids.device).repeat(len(ids), 1)
        positions = padded_positions(real)
        visible = None
        if not real.all():
            own = torch.eye(length, dtype=torch.bool, device=ids.device)
            visible = (real[:, None] | own[first:last])[:, None]
        sigma = None
        if self.family == "uniform":
            sigma = torch.full(ids.shape, noise, dtype=torch.float64, device=ids.device)
        context = SlotContext(
            positions[:, first:last], "bidirectional", store=self._store, noise=sigma,
            visible=visible, key_positions=positions,
        )  # fmt: skip
        return self.model(ids[:, first:last], context)[:, begin - first : end - first]


class BlockDenoiser(TransformerDenoiser):
    """A model of block diffusion, which reads its blocks from left to right: a token sees its own
    block and those before it.  Keys and values of finished blocks are kept, which changes nothing.

    The canvas ends with the window, and both begin at multiples of ``block_size`` but for the
    tokens of the prompt in the first one.
    """

    def __init__(
        self, model: Transformer, block_size: int, use_cache: bool = True, head: Head | None = None
    ) -> None:
        super().__init__(model, "block", head)
        self.block_size, self.use_cache = block_size, use_cache
        self.stateful = use_cache
        self.reset()

    def reset(self) -> None:
        self._store: SlotCache | None = None
        self._kept = 0  # columns whose keys and values are final

    def logits(self, canvas: Canvas, noise: float) -> Tensor:
        begin, end = canvas.begin, canvas.end
        ids, real = canvas.ids[:, :end], canvas.real[:, :end]
        first, keys = self._kept, end
        if self.use_cache:
            self._store = self._store or SlotCache(canvas.ids.shape[1])
            self._store.slots = torch.arange(first, end, device=ids.device).repeat(len(ids), 1)
            keys = self._store.capacity
        real = torch.nn.functional.pad(real, (0, keys - end))
        column = torch.arange(keys, device=ids.device)
        block = column // self.block_size
        seen = (block <= block[first:end, None]) & real[:, None]
        seen = seen | (column == column[first:end, None])
        positions = padded_positions(real)
        context = SlotContext(
            positions[:, first:end], "bidirectional", store=self._store, visible=seen[:, None],
            key_positions=positions,
        )  # fmt: skip
        hidden = self.model(ids[:, first:], context)
        if self.use_cache:
            self._kept = begin // self.block_size * self.block_size
        return self.head(hidden[:, begin - first :])
