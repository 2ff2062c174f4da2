"""Positions: Hugging Face's tables and rotation, relative angles, parts that stay put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.attention import AttentionConfig, SequenceContext, attend
from models.collectives import Axis, bound
from models.config import ModelConfig
from models.hf_rotary import rope_parameters
from models.positions import (
    NTK,
    PI,
    POSITIONS,
    ALiBi,
    Llama3,
    NoPE,
    PartialRoPE,
    RNoPE,
    RoPE,
    YaRN,
    biases_scores,
)
from models.rotary import HeadShape
from models.shared import shared_modules
from pretrain.config import KernelsConfig, RunConfig

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
    found: tuple[Tensor, Tensor] = built(config, q, k).rotate(q, k, context)
    return found


def built(config: Any, q: Tensor, k: Tensor) -> Any:
    """The encoding of these heads; what it learns is far from its start."""
    module = POSITIONS.build(config, HeadShape(q.shape[-1], q.shape[2], k.shape[2]))
    shared_modules(module)
    return randomized(module, 0.3)


def randomized(module: Any, std: float) -> Any:
    g = torch.Generator().manual_seed(5)
    holders = [module, *getattr(module, "_shared", ())]
    for parameter in (p for holder in holders for p in holder.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64) * std
    return module


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


LLAMA3 = [
    (128, Llama3.Config(base=500_000.0)),  # Llama 3.1
    (64, Llama3.Config(base=500_000.0, factor=32.0)),  # Llama 3.2
    (32, Llama3.Config(original_length=100, low_freq_factor=0.5, high_freq_factor=8.0)),
    (2, Llama3.Config(factor=1.0)),
]


@pytest.mark.parametrize(("dim", "config"), LLAMA3, ids=str)
def test_llama3_is_hugging_faces_bit_for_bit(dim: int, config: Llama3.Config) -> None:
    rope = rope_parameters(config, dim)
    assert rope["rope_type"] == "llama3"
    theirs = ROPE_INIT_FUNCTIONS["llama3"](hugging_face(dim, rope), torch.device("cpu"))
    assert table(config, dim, torch.float32).equal(theirs[0])
    assert config.magnitude() == theirs[1] == 1.0


def test_llama3_keeps_divides_and_mixes() -> None:
    config = Llama3.Config(base=500_000.0)
    found, plain = table(config, 128), table(RoPE.Config(config.base), 128)
    turns = 8192 * plain / (2 * torch.pi)
    for band, factor in ((turns > 4, 1.0), (turns < 1, 0.125)):
        assert band.any()
        assert found[band].equal(plain[band] * factor)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    assert share.numel() > 1
    torch.testing.assert_close(found[between], plain[between] * (share + (1 - share) / 8))


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
    "config",
    [
        RoPE.Config(),
        PartialRoPE.Config(),
        PartialRoPE.Config(bands="fastest"),
        PI.Config(),
        NTK.Config(),
        YaRN.Config(original_length=64),
        Llama3.Config(original_length=64),
        RNoPE.Config(),
    ],
    ids=str,
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


@pytest.mark.parametrize(("fraction", "kept"), [(0.5, 4), (0.75, 6), (1.0, 8), (0.01, 1)])
def test_the_fastest_pairs_alone_rotate(fraction: float, kept: int) -> None:
    """p-RoPE: pair i is dimensions i and i + d/2, and slow pairs stay where they are."""
    config = PartialRoPE.Config(fraction=fraction, bands="fastest")
    found = rotate(config, *pair(), torch.arange(LENGTH))
    whole = rotate(RoPE.Config(), *pair(), torch.arange(LENGTH))
    turns = (torch.arange(DIM) % (DIM // 2)) < kept
    for out, before, turned in zip(found, pair(), whole):
        assert out[..., turns].equal(turned[..., turns])
        assert out[..., ~turns].equal(before[..., ~turns])


@pytest.mark.parametrize(("dim", "base", "factor"), [(16, 1e4, 4.0), (128, 5e5, 16.0)])
def test_interpolation_is_hugging_faces(dim: int, base: float, factor: float) -> None:
    given = {"rope_type": "linear", "rope_theta": base, "factor": factor}
    device = torch.device("cpu")
    theirs, magnitude = ROPE_INIT_FUNCTIONS["linear"](hugging_face(dim, given), device)
    found = table(PI.Config(base, factor), dim, torch.float32)
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=0)
    assert magnitude == 1.0 == PI.Config(base, factor).magnitude()
    q, k = pair(dim=dim)
    slow = rotate(PI.Config(base, 4.0), q, k, 4 * torch.arange(LENGTH))
    plain = rotate(RoPE.Config(base), q, k, torch.arange(LENGTH))
    torch.testing.assert_close(slow, plain, rtol=1e-12, atol=1e-12)


def test_ntk_keeps_the_fastest_and_divides_the_slowest() -> None:
    found, plain = table(NTK.Config(factor=8.0), 64), table(RoPE.Config(), 64)
    ratio = plain / found
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1].item(), 8.0, rtol=1e-12, atol=0)
    assert (ratio.diff() > 0).all()
    torch.testing.assert_close(ratio.log().diff(2), torch.zeros(30).double(), rtol=0, atol=1e-12)


def test_every_fourth_layer_without_positions() -> None:
    """The layers that SmolLM3 of transformers gives no positions."""
    theirs = SmolLM3Config(num_hidden_layers=10, no_rope_layer_interval=3).no_rope_layers
    q, k = pair()
    positions = torch.arange(LENGTH)
    turned = rotate(YaRN.Config(original_length=64), q, k, positions)[0]
    for layer, rotates in enumerate(theirs):
        shape = HeadShape(DIM, HEADS, 1, layer, 10)
        config = RNoPE.Config(YaRN.Config(original_length=64), every=3)
        found = POSITIONS.build(config, shape).rotate(q, k, SequenceContext(positions))[0]
        assert found.equal(turned if rotates else q), layer


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20])
def test_alibi_slopes_are_hugging_faces(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    alibi = ALiBi(ALiBi.Config(), HeadShape(DIM, heads))
    torch.testing.assert_close(alibi.slopes(heads, theirs.device).float(), theirs)


def test_each_tensor_rank_has_its_own_slopes() -> None:
    alibi = ALiBi(ALiBi.Config(), HeadShape(DIM, 6))
    whole = alibi.slopes(6, torch.device("cpu"))
    for rank in range(2):
        tp = Axis()
        tp.rank, tp.size = rank, 2
        with bound({"tp": tp}):
            assert alibi.slopes(3, whole.device).equal(whole[3 * rank : 3 * rank + 3])


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [5, 3, 3, 3, 3, 7, 7, 8, 5, 9]])
MASKS: list[Any] = [("causal", None), ("bidirectional", None), ("causal", DOCUMENTS),
                    ("bidirectional", DOCUMENTS)]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize(("mask", "documents"), MASKS)
def test_alibi_scores_fall_with_distance(mask: Any, documents: Tensor | None, backend: Any) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 10, 8, generator=g).double() for heads in (6, 2, 2))
    slopes = ALiBi(ALiBi.Config(), HeadShape(8, 6, 2)).slopes(6, q.device)
    slot = torch.arange(10)
    scores = q @ k.repeat_interleave(3, 1).mT / 8**0.5
    scores = scores - slopes[:, None, None] * (slot[:, None] - slot).abs()
    hidden = SequenceContext(slot, mask, documents).dense_mask(10, 10, q.device)
    if hidden is not None:
        scores = scores.masked_fill(~hidden, -torch.inf)
    wanted = scores.softmax(-1) @ v.repeat_interleave(3, 1)
    with torch.no_grad():
        found = attend(q, k, v, SequenceContext(slot, mask, documents), backend, slopes)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 if backend == "flex" else 1e-12)


def test_flash_adds_no_bias() -> None:
    q = torch.randn(1, 2, 4, 8)
    context, slopes = SequenceContext(torch.arange(4)), torch.ones(2)
    with pytest.raises(ValueError, match="flash adds no position bias: use flex or sdpa"):
        attend(q, q, q, context, "flash", slopes)
    assert biases_scores(RNoPE.Config(ALiBi.Config())) and not biases_scores(RoPE.Config())


def test_a_run_with_a_bias_and_flash_is_refused() -> None:
    for position, refused in [(ALiBi.Config(), True), (RoPE.Config(), False)]:
        run = RunConfig(
            model=ModelConfig(position=position), kernels=KernelsConfig(attention="flash")
        )
        assert (("kernels.attention", "flash has no position bias: use flex or sdpa")
                in run.problems()) is refused  # fmt: skip


@pytest.mark.parametrize(("mask", "documents"), MASKS)
def test_visible_keys_are_the_rows_of_the_mask(mask: Any, documents: Tensor | None) -> None:
    context = SequenceContext(torch.arange(10), mask, documents)
    dense = context.dense_mask(10, 10, torch.device("cpu"))
    wanted = torch.full((10,), 10) if dense is None else dense.sum(-1)[:, 0]
    found = context.visible_keys(10, torch.device("cpu"))
    assert found.expand(wanted.shape).equal(wanted)
    assert context.visible_keys(10, torch.device("cpu")) is found


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
        (Llama3.Config(factor=0.5, original_length=0, low_freq_factor=0.0),
         ["factor", "original_length", "low_freq_factor"]),
        (Llama3.Config(low_freq_factor=4.0), ["high_freq_factor"]),
        (PI.Config(base=1.0, factor=0.5), ["base", "factor"]),
        (NTK.Config(factor=0.0), ["factor"]),
        (RNoPE.Config(every=1), ["every"]),
        (RNoPE.Config(NoPE.Config()), ["inner"]),
        (RNoPE.Config(RNoPE.Config()), ["inner"]),
        (RNoPE.Config(ALiBi.Config(), every=2), []),
    ],
)  # fmt: skip
def test_problems(config: Any, paths: list[str]) -> None:
    assert [path for path, _ in config.problems()] == paths


def test_a_share_that_is_no_pair_is_refused() -> None:
    attention = AttentionConfig(head_dim=16)
    for position, path in (
        (PartialRoPE.Config(fraction=0.12), "position.fraction"),
        (RNoPE.Config(PartialRoPE.Config(fraction=0.12)), "position.inner.fraction"),
    ):
        found = ModelConfig(position=position, attention=attention).problems()
        assert found == [(path, "0.12 of head_dim=16 is no pair: at least 0.125")]
    least = PartialRoPE.Config(fraction=0.125)
    assert ModelConfig(position=least, attention=attention).problems() == []
    assert len(table(least, 16)) == 1
