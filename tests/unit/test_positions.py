"""Positions: Hugging Face's tables and rotation, relative angles, parts that stay put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.attention import SequenceContext
from models.positions import POSITIONS, HeadShape, NoPE, PartialRoPE, RoPE, YaRN

HEADS, DIM, LENGTH = 3, 16, 20


def pair(dtype: torch.dtype = torch.float64, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """q [2, S, 3, d], k [2, S, 1, d]."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, LENGTH, HEADS, dim, generator=g, dtype=torch.float64)
    k = torch.randn(2, LENGTH, 1, dim, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def rotate(config: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_in(SequenceContext(positions), config, q, k)


def rotate_in(context: SequenceContext, config: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    shape = HeadShape(q.shape[-1], q.shape[2], k.shape[2])
    found: tuple[Tensor, Tensor] = POSITIONS.build(config, shape).rotate(q, k, context)
    return found


def table(config: Any, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    found: Tensor = config.frequencies(dim, dtype, torch.device("cpu"))
    return found


def hugging_face(dim: int, parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_is_hugging_faces(base: float, dtype: torch.dtype) -> None:
    q, k = pair(dtype)
    positions = torch.arange(LENGTH) * 37
    config = hugging_face(DIM, {"rope_type": "default", "rope_theta": base})
    cos, sin = LlamaRotaryEmbedding(config)(q.float(), positions[None])
    wanted = apply_rotary_pos_emb(q.float().transpose(1, 2), k.float().transpose(1, 2), cos, sin)
    found = rotate(RoPE.Config(base), q, k, positions)
    for a, b in zip(found, wanted):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.float(), b.transpose(1, 2).to(dtype).float(), rtol=1e-6, atol=1e-6
        )


YARN = [
    (16, YaRN.Config()),
    (64, YaRN.Config(base=500_000.0, factor=8.0, original_length=4096)),
    (128, YaRN.Config(factor=16.0, original_length=4096, beta_fast=16.0, beta_slow=2.0)),
    (128, YaRN.Config(base=1e6, factor=40.0, original_length=32_768)),
    (32, YaRN.Config(factor=1.0)),
    (8, YaRN.Config(factor=2.0, original_length=64)),
]


@pytest.mark.parametrize(("dim", "config"), YARN, ids=str)
def test_yarn_is_hugging_faces(dim: int, config: YaRN.Config) -> None:
    theirs = hugging_face(
        dim,
        {
            "rope_type": "yarn",
            "rope_theta": config.base,
            "factor": config.factor,
            "original_max_position_embeddings": config.original_length,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
        },
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    found = table(config, dim, torch.float32)
    torch.testing.assert_close(found, frequencies, rtol=1e-6, atol=0)
    assert config.magnitude() == pytest.approx(factor, abs=1e-12)
    if config.factor > 1:
        assert not torch.allclose(found, table(RoPE.Config(config.base), dim, torch.float32))


def test_the_shortest_yarn_divides_what_turns_too_rarely() -> None:
    """One step shorter, the first pair turns less than once and should be divided as well."""
    found, plain = table(YaRN.Config(factor=4.0, original_length=7), 16), table(RoPE.Config(), 16)
    assert torch.equal(7 * plain / (2 * torch.pi) < 1, torch.arange(8) > 0)
    torch.testing.assert_close(found[1:], plain[1:] / 4, rtol=1e-15, atol=0)


def test_yarn_scales_and_interpolates_the_extremes() -> None:
    config = YaRN.Config(factor=4.0, original_length=2048)
    found, plain = table(config, 128), table(RoPE.Config(), 128)
    turns = 2048 * plain / (2 * torch.pi)
    assert found[turns > 64].equal(plain[turns > 64])
    torch.testing.assert_close(found[turns < 0.5], plain[turns < 0.5] / 4, rtol=1e-15, atol=0)
    assert (turns > 64).any() and (turns < 0.5).any()
    q, k = pair(dim=128)
    rotated, _ = rotate(config, q, k, torch.arange(LENGTH))
    torch.testing.assert_close(
        rotated.norm(dim=-1), q.norm(dim=-1) * (0.1 * torch.tensor(4.0).log().item() + 1)
    )


@pytest.mark.parametrize(
    "config", [RoPE.Config(), PartialRoPE.Config(), YaRN.Config(original_length=64)], ids=str
)
def test_scores_depend_on_the_distance_alone(config: Any) -> None:
    q, k = (t[:1, :1, :1].expand(1, LENGTH, 1, DIM) for t in pair())
    for start in (0, 5, 4000):
        a, b = rotate(config, q, k, torch.arange(LENGTH) + start)
        scores = a[0, :, 0] @ b[0, :, 0].T
        for distance in range(-LENGTH + 1, LENGTH):
            diagonal = scores.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
        if start == 0:
            first = scores
        torch.testing.assert_close(scores, first)
    assert first.std() > 0.1  # and on nothing less


@pytest.mark.parametrize(
    ("fraction", "rotated"), [(0.5, 8), (0.25, 4), (0.4, 6), (0.01, 2), (1.0, 16)]
)
def test_partial_leaves_the_rest_untouched(fraction: float, rotated: int) -> None:
    q, k = pair()
    positions = torch.arange(LENGTH)
    parts = rotate(PartialRoPE.Config(fraction=fraction), q, k, positions)
    whole = rotate(RoPE.Config(), q[..., :rotated], k[..., :rotated], positions)
    for out, before, turned in zip(parts, (q, k), whole):
        assert out[..., rotated:].equal(before[..., rotated:])
        assert out[..., :rotated].equal(turned)
        assert not out[:, 1:, :, :rotated].equal(before[:, 1:, :, :rotated])


def test_nope_is_the_identity() -> None:
    q, k = pair()
    found = rotate(NoPE.Config(), q, k, torch.arange(LENGTH))
    assert found[0] is q and found[1] is k


@pytest.mark.parametrize("name", POSITIONS.names())
def test_positions_of_a_batch_or_of_each_row(name: str) -> None:
    """[S] equals [B, S]; rows with other positions rotate on their own; dtypes are kept."""
    config = POSITIONS.config_class(name)()
    q, k = pair()
    shared = torch.arange(LENGTH)
    shifted = torch.stack([shared, shared + 3])
    both = rotate(config, q, k, shared)
    own = rotate(config, q, k, shifted)
    second = rotate(config, q[1:], k[1:], shared + 3)
    for a, b, c, before in zip(both, own, second, (q, k)):
        assert a.shape == before.shape
        assert a[0].equal(b[0]) and c[0].equal(b[1])
        assert rotate(config, q, k, shared.expand(2, -1))[0].equal(both[0])
    for dtype in (torch.float32, torch.bfloat16):
        assert [t.dtype for t in rotate(config, *pair(dtype), shared)] == [dtype] * 2


@pytest.mark.parametrize("name", POSITIONS.names())
def test_gradients(name: str) -> None:
    config = POSITIONS.config_class(name)()
    q, k = (t[:, :3, :, :4].clone().requires_grad_() for t in pair())
    positions = torch.tensor([0, 1, 7])
    assert torch.autograd.gradcheck(lambda q, k: rotate(config, q, k, positions), (q, k))


def test_narrow_inputs_use_wide_tables() -> None:
    """At position 4,001 a bf16 angle would be off by whole radians."""
    q, k = pair(torch.bfloat16)
    positions = torch.arange(LENGTH) + 4001
    found = rotate(RoPE.Config(), q, k, positions)
    wanted = rotate(RoPE.Config(), q.double(), k.double(), positions)
    for a, b in zip(found, wanted):
        assert (a.double() - b).abs().max() < 0.02


def test_layers_share_a_table_only_when_it_is_the_same() -> None:
    q, k = pair()
    positions = torch.arange(LENGTH)
    context = SequenceContext(positions)
    configs = [RoPE.Config(), RoPE.Config(), RoPE.Config(500.0), PartialRoPE.Config(fraction=1.0),
               YaRN.Config()]  # fmt: skip
    for config in configs:
        found = rotate_in(context, config, q, k)
        assert all(a.equal(b) for a, b in zip(found, rotate(config, q, k, positions)))
    rotate_in(context, RoPE.Config(), q.float(), k.float())
    assert len(context.cache) == 5


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (RoPE.Config(base=1.0), ["base"]),
        (PartialRoPE.Config(base=0.5, fraction=0.0), ["base", "fraction"]),
        (PartialRoPE.Config(fraction=1.5), ["fraction"]),
        (YaRN.Config(base=1.0, factor=0.5, original_length=0, beta_fast=1.0),
         ["base", "factor", "original_length", "beta_fast"]),
        (YaRN.Config(original_length=6), ["original_length"]),
        (YaRN.Config(original_length=7), []),
        (YaRN.Config(original_length=12, beta_slow=2.0), ["original_length"]),
        (YaRN.Config(beta_slow=0.0), ["beta_slow"]),
    ],
)  # fmt: skip
def test_problems(config: Any, paths: list[str]) -> None:
    assert [path for path, _ in config.problems()] == paths
