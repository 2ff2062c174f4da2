"""Attention against an explicit softmax; who sees whom; shares of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import (
    Attention,
    AttentionBackend,
    AttentionConfig,
    SequenceContext,
    Visibility,
    attend,
)
from models.norms import RMSNorm
from models.positions import NoPE, RoPE
from models.rotary import HeadShape

# Flex on a CPU is the reference of its compiled form; it says how slow it is.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BATCH, HEADS, KV_HEADS, LENGTH, DIM, WIDTH = 2, 6, 2, 9, 4, 10
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [5, 3, 3, 3, 3, 7, 7, 8, 5]])


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def qkv(kv_heads: int = KV_HEADS) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(BATCH, HEADS, LENGTH, DIM),
        random(BATCH, kv_heads, LENGTH, DIM, seed=1),
        random(BATCH, kv_heads, LENGTH, DIM, seed=2),
    )


def context(mask: Any = "causal", documents: Tensor | None = None) -> SequenceContext:
    return SequenceContext(torch.arange(LENGTH), mask, documents)


def visible(mask: Any, documents: Tensor | None, b: int, i: int, j: int) -> bool:
    """May token i of sequence b see token j?"""
    same = documents is None or bool(documents[b, i] == documents[b, j])
    if isinstance(mask, Visibility):
        ranked = mask.rank[b, j] <= mask.limit[b, i]
        return same and bool(ranked or mask.group[b, i] == mask.group[b, j])
    return same and (mask == "bidirectional" or j <= i)


def literal(q: Tensor, k: Tensor, v: Tensor, mask: Any, documents: Tensor | None) -> Tensor:
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(BATCH):
        for h in range(q.shape[1]):
            for i in range(LENGTH):
                seen = [j for j in range(LENGTH) if visible(mask, documents, b, i, j)]
                scores = torch.stack([q[b, h, i] @ k[b, h // group, j] for j in seen])
                weights = (scores / DIM**0.5).exp()
                values = torch.stack([v[b, h // group, j] for j in seen])
                out[b, h, i] = (weights[:, None] * values).sum(0) / weights.sum()
    return out


BLOCKS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 2, 2, 2, 2, 3]])
OWN = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
# later slots see earlier blocks and themselves; blocks 1 see each other
ORDERED = Visibility(BLOCKS, BLOCKS - 1, torch.where(BLOCKS == 1, -1, OWN))
MASKS: list[tuple[Any, Tensor | None]] = [
    ("causal", None), ("bidirectional", None), ("causal", DOCUMENTS),
    ("bidirectional", DOCUMENTS), (ORDERED, None), (ORDERED, DOCUMENTS),
]  # fmt: skip
BACKENDS: list[AttentionBackend] = ["sdpa", "flex"]
NAMES = ["causal", "bidirectional", "causal-documents", "bidirectional-documents", "ordered",
         "ordered-documents"]  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("mask", "documents"), MASKS, ids=NAMES)
def test_grouped_queries_are_an_explicit_softmax(
    mask: Any, documents: Tensor | None, kv_heads: int
) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(kv_heads))
    found = attend(q, k, v, context(mask, documents), "sdpa")
    wanted = literal(q, k, v, mask, documents)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    upstream = random(*q.shape, seed=3)
    gradients = (torch.autograd.grad(out, (q, k, v), upstream) for out in (found, wanted))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mask", "documents"), MASKS, ids=NAMES)
def test_only_visible_tokens_matter(mask: Any, documents: Tensor | None, backend: Any) -> None:
    """A hidden token changes nothing, bit for bit; every visible one changes something."""
    q, k, v = qkv()
    with torch.no_grad():
        before = attend(q, k, v, context(mask, documents), backend)
        for j in range(LENGTH) if backend == "sdpa" else (0, 4, 8):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, j] += 1.0
            other_v[:, :, j] -= 1.0
            after = attend(q, other_k, other_v, context(mask, documents), backend)
            for b in range(BATCH):
                for i in range(LENGTH):
                    same = after[b, :, i].equal(before[b, :, i])
                    assert same != visible(mask, documents, b, i, j), (b, i, j)


@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize(("mask", "documents"), MASKS, ids=NAMES)
def test_flex_equals_sdpa(mask: Any, documents: Tensor | None, kv_heads: int) -> None:
    q, k, v = (t.float() for t in qkv(kv_heads))
    with torch.no_grad():
        found = attend(q, k, v, context(mask, documents), "flex")
        wanted = attend(q, k, v, context(mask, documents), "sdpa")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_masks_are_built_once_per_forward_pass() -> None:
    q, k, v = qkv()
    shared = context("causal", DOCUMENTS)
    with torch.no_grad():
        for backend in BACKENDS:
            first = attend(q, k, v, shared, backend)
            kept = dict(shared.cache)
            assert attend(q, k, v, shared, backend).equal(first)
            assert all(shared.cache[key] is value for key, value in kept.items())
    assert len(shared.cache) == 2


def test_the_plain_kinds_are_special_cases() -> None:
    q, k, v = qkv()
    slots = torch.arange(LENGTH).expand(BATCH, -1)
    for kind, rank in (("causal", slots), ("bidirectional", torch.zeros_like(slots))):
        found = attend(q, k, v, context(Visibility(rank, rank, OWN), DOCUMENTS), "sdpa")
        assert found.equal(attend(q, k, v, context(kind, DOCUMENTS), "sdpa"))


def test_distances_are_those_of_positions() -> None:
    """Tokens in another order, with their positions, give the same result in that order."""
    q, k, v = qkv()
    slopes, order = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.9, 0.7]), torch.randperm(LENGTH)
    wanted = attend(q, k, v, context("bidirectional"), "sdpa", slopes)[:, :, order]
    moved = SequenceContext(order.expand(BATCH, -1), "bidirectional")
    shuffled = (x[:, :, order] for x in (q, k, v))
    for backend in BACKENDS:
        with torch.no_grad():
            found = attend(*(x.clone() for x in shuffled), moved, backend, slopes)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        shuffled = (x[:, :, order] for x in (q, k, v))


def test_queries_at_the_end_of_longer_keys() -> None:
    """Decoding: the last queries of a sequence, against all of its keys."""
    q, k, v = qkv()
    whole = attend(q, k, v, context(), "auto")
    last = attend(q[:, :, -3:], k, v, context(), "auto")
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=1e-13, atol=1e-14)


def test_flash_has_no_document_mask() -> None:
    with pytest.raises(ValueError, match="flash knows causal and full masks: use flex or sdpa"):
        attend(*qkv(), context(ORDERED), "flash")
    with pytest.raises(ValueError, match="flash has no document mask: use flex or sdpa"):
        attend(*qkv(), context("causal", DOCUMENTS), "flash")


def head_norm(dim: int) -> RMSNorm:
    return RMSNorm(RMSNorm.Config(), dim)


def layer(**options: Any) -> Attention:
    config = AttentionConfig(HEADS, KV_HEADS, DIM, **options)
    module = Attention(config, WIDTH, 0, 1, head_norm, RoPE.Config()).double()
    for index, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=index + 10)
    return module


@pytest.mark.parametrize("qk_norm", [False, True])
def test_layer_is_its_parts(qk_norm: bool) -> None:
    module = layer(qk_norm=qk_norm, qkv_bias=True)
    x = random(BATCH, LENGTH, WIDTH)
    parts = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        projection = getattr(module, f"{name}_proj")
        part = (x @ projection.weight.T + projection.bias).view(BATCH, LENGTH, heads, DIM)
        if qk_norm and name != "v":
            part = part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            part = part * getattr(module, f"{name}_norm").weight
        parts.append(part)
    q, k = RoPE(RoPE.Config(), HeadShape(DIM)).rotate(parts[0], parts[1], context())
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), parts[2].transpose(1, 2)
    heads_out = literal(q, k, v, "causal", None)
    wanted = heads_out.transpose(1, 2).reshape(BATCH, LENGTH, -1) @ module.o_proj.weight.T
    torch.testing.assert_close(module(x, context()), wanted, rtol=1e-11, atol=1e-12)


def test_shares_of_heads_add_up_to_the_whole() -> None:
    """Slices of the weights, as tensor parallelism stores them: head counts come from them."""
    module = layer(qk_norm=True, qkv_bias=True)
    x = random(BATCH, LENGTH, WIDTH)
    total = torch.zeros_like(x)
    for rank in range(2):
        share = layer(qk_norm=True, qkv_bias=True)
        for name, parameter in share.named_parameters():
            kind = Attention.plan.get(name)
            if kind is not None:
                dim = {"column": 0, "row": 1}[kind]
                parameter.data = parameter.data.chunk(2, dim)[rank].contiguous()
        assert share.q_proj.weight.shape == (HEADS * DIM // 2, WIDTH)
        assert share.k_proj.weight.shape == (KV_HEADS * DIM // 2, WIDTH)
        total += share(x, context())
    torch.testing.assert_close(total, module(x, context()), rtol=1e-12, atol=1e-12)


def test_without_positions_order_is_only_the_mask() -> None:
    module = Attention(AttentionConfig(2, 2, 4), WIDTH, 0, 1, head_norm, NoPE.Config()).double()
    for index, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=index)
    x, order = random(1, LENGTH, WIDTH), torch.arange(LENGTH).flip(0)
    both = (
        module(x, context("bidirectional"))[:, order],
        module(x[:, order], context("bidirectional")),
    )
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (AttentionConfig(), []),
        (AttentionConfig(heads=0, kv_heads=0, head_dim=-2), ["heads", "kv_heads", "head_dim"]),
        (AttentionConfig(heads=6, kv_heads=4), ["kv_heads"]),
        (AttentionConfig(head_dim=7), ["head_dim"]),
    ],
)
def test_problems(config: AttentionConfig, paths: list[str]) -> None:
    assert [path for path, _ in config.problems()] == paths
