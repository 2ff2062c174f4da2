"""Grouped-query attention, mask kinds and backends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear
from .positions import POSITIONS, HeadShape

MaskKind = Literal["causal", "bidirectional"]


@dataclass(frozen=True)
class Visibility:
    """Which slots of a sequence see which, where neither of the plain kinds says it: slot i sees
    slot j if ``rank[j] <= limit[i]`` or ``group[i] == group[j]``.  All int64 [B, S].

    A causal mask is rank = limit = 0, 1, 2, …; a bidirectional one has them all equal.
    """

    rank: Tensor
    limit: Tensor
    group: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Visibility:
        return Visibility(change(self.rank), change(self.limit), change(self.group))

    def dense(self, queries: slice = slice(None)) -> Tensor:
        """Boolean [B, 1, queries, S], True = may attend."""
        limit, group = self.limit[:, queries, None], self.group[:, queries, None]
        return ((self.rank[:, None] <= limit) | (self.group[:, None] == group))[:, None]


@dataclass(frozen=True)
class Mixture:
    """Tokens that an input slot is a mixture of, instead of being one: embeddings of ``ids`` int64
    [B, S, k] are added with ``weights`` [B, S, k], which sum to 1."""

    ids: Tensor
    weights: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Mixture:
        return Mixture(change(self.ids), change(self.weights))


Mask = MaskKind | Visibility
AttentionBackend = Literal["auto", "sdpa", "flex", "flash"]


class KeyValueStore(Protocol):
    """What a decoding cache offers to a layer."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class SequenceContext:
    """What every layer needs to know about one batch of sequences.

    positions: int64 [S] or [B, S].  documents: int64 [B, S], or None when every token of a
    sequence may see the others; tokens attend only within equal document numbers.  keys: the
    number of keys when a decoding ``store`` holds earlier ones.  noise: how much noise is in each
    token of a diffusion model that is told so, σ = −log α in at least fp32, [B, S], or [B, 1] where
    it is the same all along a sequence (which costs much less); None for none.
    mixture: what the slots of the input stand for, where that is not one token each.
    ``cache`` keeps tables and masks for the duration of one forward pass.
    """

    positions: Tensor
    mask: Mask = "causal"
    documents: Tensor | None = None
    store: KeyValueStore | None = None
    noise: Tensor | None = None
    mixture: Mixture | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    def dense_mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Boolean [B or 1, 1, queries, keys], True = may attend; None when nothing is hidden."""
        name = ("dense", queries, keys)
        if name not in self.cache:
            self.cache[name] = self._build_dense(queries, keys, device)
        mask: Tensor | None = self.cache[name]
        return mask

    def visible_keys(self, queries: int, device: torch.device) -> Tensor:
        """How many keys each query may attend to, int64 [S] or [B, S]."""
        if "visible" not in self.cache:
            self.cache["visible"] = self._count_visible(queries, device)
        counts: Tensor = self.cache["visible"]
        return counts

    def _count_visible(self, queries: int, device: torch.device) -> Tensor:
        if isinstance(self.mask, Visibility):
            mask = self.dense_mask(queries, queries, device)
            assert mask is not None
            return mask.sum(-1)[:, 0]
        slot = torch.arange(queries, device=device)
        causal = self.mask == "causal"
        if self.documents is None:
            return slot + 1 if causal else torch.full_like(slot, queries)
        order = self.documents.argsort(dim=1, stable=True)
        differs = self.documents.gather(1, order).diff(dim=1) != 0
        begin = torch.where(F.pad(differs, (1, 0), value=True), slot, 0).cummax(1).values
        last = torch.where(F.pad(differs, (0, 1), value=True), slot, queries)
        end = slot if causal else last.flip(1).cummin(1).values.flip(1)
        return torch.empty_like(order).scatter_(1, order, end + 1 - begin)

    def score_bias(
        self, slopes: Tensor, queries: int, keys: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """−slope · |i − j| where attention is allowed and −inf elsewhere, [·, H, queries, keys]."""
        name = ("bias", queries, keys, dtype)
        if name not in self.cache:
            distance = self._distances(queries, keys, device)
            bias = (-slopes[:, None, None] * distance).to(dtype)
            mask = self.dense_mask(queries, keys, device)
            if mask is not None and mask.dtype == torch.bool:
                bias = bias.masked_fill(~mask, -torch.inf)
            self.cache[name] = bias if mask is None or mask.dtype == torch.bool else bias + mask
        bias = self.cache[name]
        return bias

    def _distances(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """|i − j| between the positions of queries and keys, [B or 1, 1, queries, keys]."""
        positions = self.positions if self.positions.dim() == 2 else self.positions[None]
        assert queries == keys == positions.shape[1]
        return (positions[:, :, None] - positions[:, None, :]).abs()[:, None]

    def _build_dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        mask = None
        if isinstance(self.mask, Visibility):
            mask = self.mask.dense(slice(keys - queries, keys))
        if self.mask == "causal":
            row = torch.arange(keys - queries, keys, device=device)
            mask = (row[:, None] >= torch.arange(keys, device=device)[None, :])[None, None]
        if self.documents is not None:
            rows = self.documents[:, keys - queries :]
            same = (rows[:, :, None] == self.documents[:, None, :])[:, None]
            mask = same if mask is None else mask & same
        return mask


@dataclass(frozen=True)
class AttentionConfig:
    """Shape of grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    heads: int = field(default=4, metadata={"help": "query heads"})
    kv_heads: int = field(default=4, metadata={"help": "key/value heads; divides heads"})
    head_dim: int = field(default=32, metadata={"help": "width of one head"})
    qk_norm: bool = field(default=False, metadata={"help": "normalise q and k"})
    qkv_bias: bool = field(default=False, metadata={"help": "bias on q, k and v"})
    qk_norm_span: Literal["head", "projection"] = field(
        default="head", metadata={"help": "what is normalised together: a head, or all of them"}
    )

    def problems(self) -> list[tuple[str, str]]:
        found = [
            (name, f"must be positive, got {getattr(self, name)}")
            for name in ("heads", "kv_heads", "head_dim")
            if getattr(self, name) < 1
        ]
        if not found and self.heads % self.kv_heads:
            found.append(("kv_heads", f"{self.kv_heads} does not divide heads={self.heads}"))
        if self.qk_norm_span != "head" and not self.qk_norm:
            text = f"{self.qk_norm_span} is set but qk_norm=false: it would be ignored"
            found.append(("qk_norm_span", text))
        if self.head_dim % 2:
            found.append(("head_dim", f"must be even, got {self.head_dim}"))
        return found


class Attention(nn.Module):
    """Self-attention over [B, S, D]; head counts are read from the local weights.

    layer, layers: the block's global index and the model's depth.  norm: builds the norm of a head,
    or of a whole projection.  normed: which of q, k and v have one besides the config's.
    """

    plan: ClassVar[dict[str, str]] = {
        "q_proj.weight": "column",
        "k_proj.weight": "column",
        "v_proj.weight": "column",
        "q_proj.bias": "column",
        "k_proj.bias": "column",
        "v_proj.bias": "column",
        "o_proj.weight": "row",
    }
    region: ClassVar[bool] = True
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    v_norm: nn.Module | None

    def __init__(
        self,
        config: AttentionConfig,
        dim: int,
        layer: int,
        layers: int,
        norm: Callable[[int], nn.Module],
        position: Any,
        backend: AttentionBackend = "auto",
        normed: str = "",
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.layer = layer
        self.backend = backend
        self.q_proj = Linear(dim, config.heads * config.head_dim, config.qkv_bias)
        self.k_proj = Linear(dim, config.kv_heads * config.head_dim, config.qkv_bias)
        self.v_proj = Linear(dim, config.kv_heads * config.head_dim, config.qkv_bias)
        self.o_proj = Linear(config.heads * config.head_dim, dim)
        self.whole = config.qk_norm_span == "projection"
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            has = name in normed or (config.qk_norm and name in "qk")
            width = config.head_dim * (heads if self.whole else 1)
            setattr(self, f"{name}_norm", norm(width) if has else None)
        shape = HeadShape(config.head_dim, config.heads, config.kv_heads, layer, layers)
        self.position = POSITIONS.build(position, shape)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        q = self._heads(self.q_proj(x), self.q_norm)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = self._heads(self.v_proj(x), self.v_norm)
        q, k = self.position.rotate(q, k, context)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.store is not None:
            k, v = context.store.extend(self.layer, k, v)
        slopes = self.position.slopes(q.shape[1], q.device)
        out = attend(q, k, v, context, self.backend, slopes)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """A projection [B, S, heads · d] as [B, S, heads, d], normalised."""
        if norm is not None and self.whole:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        return x if norm is None or self.whole else norm(x)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    backend: AttentionBackend,
    slopes: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d + mask − slope · |i − j|) v for q [B, H, S, d], k and v [B, K, T, d] and
    slopes [H] or None; result like q."""
    if backend == "auto":
        plain = context.documents is None and not isinstance(context.mask, Visibility)
        backend = "flex" if q.is_cuda and not plain and context.store is None else "sdpa"
    if backend == "flex":
        return _attend_flex(q, k, v, context, slopes)
    if backend == "flash":
        return _attend_flash(q, k, v, context, slopes)
    grouped = q.shape[1] != k.shape[1]
    if slopes is not None:
        bias = context.score_bias(slopes, q.shape[2], k.shape[2], q.dtype, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
    square = q.shape[2] == k.shape[2]
    if context.documents is None and context.mask == "causal" and square:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = context.dense_mask(q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, slopes: Tensor | None
) -> Tensor:
    """FlexAttention with a block mask.  It has no CPU backward; not yet run on a GPU."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    if "flex" not in context.cache:
        documents, mask = context.documents, context.mask

        def visible(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            if isinstance(mask, Visibility):
                seen = mask.rank[b, column] <= mask.limit[b, row]
                seen = seen | (mask.group[b, column] == mask.group[b, row])
            else:
                seen = row >= column if mask == "causal" else row >= 0
            if documents is not None:
                seen = seen & (documents[b, row] == documents[b, column])
            return seen

        same = documents is None and not isinstance(mask, Visibility)
        batch = None if same else q.shape[0]
        context.cache["flex"] = flex.create_block_mask(
            visible, batch, None, q.shape[2], k.shape[2], device=q.device
        )
    attention = flex.flex_attention if not q.is_cuda else _compiled_flex()
    out: Tensor = attention(
        q,
        k,
        v,
        score_mod=None if slopes is None else _falling_with_distance(slopes, context, q.device),
        block_mask=context.cache["flex"],
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


def _falling_with_distance(
    slopes: Tensor, context: SequenceContext, device: torch.device
) -> Callable[..., Tensor]:
    slopes, positions = slopes.to(device).float(), context.positions

    def biased(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if positions.dim() == 2:
            row, column = positions[b, row], positions[b, column]
        return score - slopes[h] * (row - column).abs()

    return biased


_flex_cache: dict[str, Any] = {}


def _compiled_flex() -> Any:
    if "attention" not in _flex_cache:
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        _flex_cache["attention"] = torch.compile(flex.flex_attention)
    return _flex_cache["attention"]


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, slopes: Tensor | None
) -> Tensor:
    """flash-attn 2.  Not yet run on a GPU; documents need the flex or sdpa backend."""
    if isinstance(context.mask, Visibility):
        raise ValueError("kernels.attention=flash knows causal and full masks: use flex or sdpa")
    if context.documents is not None:
        raise ValueError("kernels.attention=flash has no document mask: use flex or sdpa")
    if slopes is not None:
        raise ValueError("kernels.attention=flash adds no position bias: use flex or sdpa")
    flash = importlib.import_module("flash_attn")
    parts = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = flash.flash_attn_func(*parts, causal=context.mask == "causal")
    return out.transpose(1, 2)
