"""Where norms and residuals sit: each placement is its formula, from its own parts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.attention import Attention, AttentionConfig, SequenceContext
from models.blocks import BLOCKS, KeelBlock, MixNormBlock, PeriNormBlock, SpanNormBlock, block_class
from models.collectives import Axis, bound
from models.config import ModelConfig
from models.declarations import named_state
from models.feedforward import SwiGLU
from models.mtp import MTPConfig
from models.norms import NORMS, AttentionVariance, BHyT, LayerNorm, RMSNorm
from models.positions import AdaRoPE, RNoPE
from models.shared import shared_modules
from models.transformer import Transformer, build_block
from parallel.apply import apply_recompute
from tests.components import chosen, legal_pairs

CONFIG = ModelConfig(
    vocab_size=11,
    hidden=12,
    layers=3,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=4),
    feedforward=SwiGLU.Config(hidden=10),
)
LENGTH = 5


def build(name: str, layer: int = 1, config: ModelConfig = CONFIG, **options: Any) -> Any:
    """A float64 block of random weights, gains included."""
    block_config = BLOCKS.config_class(name)(**options)
    block = build_block(replace(config, block=block_config), layer, "auto")
    block.add_module("shared", shared_modules(block))
    block.double()
    for index, (key, parameter) in enumerate(block.named_parameters()):
        g = torch.Generator().manual_seed(index)
        value = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        parameter.data = value + 1.5 if key.endswith("norm.weight") else value
        if key.startswith(("shared", "modulation")):
            parameter.data *= 0.1
        if key.endswith(".alpha"):
            parameter.data.fill_(0.1)  # no output is near its bound
    for _, state in named_state(block):
        state.fill_(0.7)
    return block


def unit_gains(block: Any) -> Any:
    for module in block.modules():
        if isinstance(module, RMSNorm):
            module.weight.data.fill_(1.0)
    return block


def inputs() -> tuple[Tensor, SequenceContext]:
    g = torch.Generator().manual_seed(99)
    x = torch.randn(2, LENGTH, CONFIG.hidden, generator=g, dtype=torch.float64)
    return x, SequenceContext(torch.arange(LENGTH))


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * norm.weight


# The papers' equations, from a block b, its input x, attention a and feed-forward layer f.
Layer = Callable[[Tensor], Tensor]


def pre(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = x + a(rms(x, b.attention_norm))
    return y + f(rms(y, b.feedforward_norm))


def post(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = rms(x + a(x), b.attention_norm)
    return rms(y + f(y), b.feedforward_norm)


def lns_third(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = x + a(rms(x, b.attention_norm) / math.sqrt(3))
    return y + f(rms(y, b.feedforward_norm) / math.sqrt(3))


def deepnorm(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    alpha = 6**0.25  # three blocks
    y = rms(alpha * x + a(x), b.attention_norm)
    return rms(alpha * y + f(y), b.feedforward_norm)


def span(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = rms(x + a(x), b.attention_norm)
    return rms(x + f(y), b.feedforward_norm)


def span_first(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = rms(x + a(rms(x, b.input_norm)), b.attention_norm)
    return rms(x + f(y), b.feedforward_norm)


def span_alpha(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = rms(2.5 * x + a(x), b.attention_norm)
    return rms(2.5 * x + f(y), b.feedforward_norm)


def peri(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = x + rms(a(rms(x, b.attention_norm)), b.attention_output_norm)
    return y + rms(f(rms(y, b.feedforward_norm)), b.feedforward_output_norm)


def peri_first(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    return peri(b, rms(x, b.embedding_norm), a, f)


def reordered(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    y = x + rms(a(x), b.attention_norm)
    return y + rms(f(y), b.feedforward_norm)


def keel(alpha: float) -> Callable[..., Tensor]:
    def formula(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
        y = rms(alpha * x + a(rms(x, b.attention_norm)), b.attention_output_norm)
        return rms(alpha * y + f(rms(y, b.feedforward_norm)), b.feedforward_output_norm)

    return formula


def hybrid(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    z = rms(x + a(x), b.feedforward_norm)
    return z + f(z)


def adaln(b: Any, x: Tensor, a: Layer, f: Layer) -> Tensor:
    """Without noise σ is 0, of whose sinusoids one half is 1 and the other 0."""
    first, second = b.shared["noise"].first, b.shared["noise"].second
    c = first[:, :128].sum(1) + b.shared["noise"].first_bias
    c = second @ (c / (1 + (-c).exp())) + b.shared["noise"].second_bias
    c = b.modulation.weight @ (c / (1 + (-c).exp())) + b.modulation.bias
    shift, scale, gate, shift2, scale2, gate2 = c.view(6, -1)
    y = x + gate * a(rms(x, b.attention_norm) * (1 + scale) + shift)
    return y + gate2 * f(rms(y, b.feedforward_norm) * (1 + scale2) + shift2)


FORMULAS: list[tuple[str, int, dict[str, Any], Callable[..., Tensor]]] = [
    ("pre", 1, {}, pre),
    ("post", 1, {}, post),
    ("lns", 2, {}, lns_third),
    ("deepnorm", 1, {}, deepnorm),
    ("span", 1, {}, span),
    ("span", 0, {}, span_first),
    ("span", 1, {"residual_alpha": 2.5}, span_alpha),
    ("peri", 0, {}, peri),
    ("peri", 0, {"embedding_norm": True}, peri_first),
    ("peri", 1, {"embedding_norm": True}, peri),
    ("reordered", 1, {}, reordered),
    ("keel", 1, {}, keel(6)),
    ("keel", 1, {"alpha": 3.0}, keel(3)),
    ("hybrid", 0, {}, hybrid),
    ("hybrid", 1, {}, hybrid),
    ("hybrid_star", 0, {}, pre),
    ("hybrid_star", 1, {}, hybrid),
    ("mixln", 0, {"post_fraction": 0.34}, post),
    ("mixln", 1, {"post_fraction": 0.34}, pre),
    ("mixln", 0, {"post_fraction": 0.33}, pre),
    ("adaln", 1, {"condition_dim": 7}, adaln),
]


@pytest.mark.parametrize(("name", "layer", "options", "formula"), FORMULAS)
def test_formulas(name: str, layer: int, options: Any, formula: Callable[..., Tensor]) -> None:
    block, (x, context) = build(name, layer, **options), inputs()
    wanted = formula(block, x, lambda v: block.attention(v, context), block.feedforward)
    torch.testing.assert_close(block(x, context), wanted, rtol=1e-12, atol=1e-12)


def test_every_placement_has_a_formula() -> None:
    assert {name for name, *_ in FORMULAS} == set(BLOCKS.names())


@pytest.mark.parametrize("name", ["hybrid", "hybrid_star"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_hybrid_normalises_every_head(name: str, layer: int, qk_norm: bool) -> None:
    """What the norms of q, k and v make of weights that are larger by head: the same."""
    attention = replace(CONFIG.attention, qk_norm=qk_norm)
    block, (x, context) = build(name, layer, replace(CONFIG, attention=attention)), inputs()
    names = {key for key, _ in block.attention.named_parameters() if "norm" in key}
    assert names == {f"{part}_norm.weight" for part in "qkv"}
    before = block.attention(x, context)
    for projection, size in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
        weight = getattr(block.attention, projection).weight
        assert weight.shape[0] == size
        weight.data *= torch.arange(1, size // 4 + 1).repeat_interleave(4)[:, None] * 1e4
    torch.testing.assert_close(block.attention(x, context), before, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------ properties, identities

NORMALISED = ["post", "span", "deepnorm", "keel"]


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_outputs_have_unit_mean_square(name: str, layer: int) -> None:
    block, (x, context) = unit_gains(build(name, layer)), inputs()
    for scale in (1.0, 30.0):
        square = block(scale * x, context).square().mean(-1)
        torch.testing.assert_close(square, torch.ones_like(square), rtol=0, atol=1e-5)
    assert not block_class(block.config).final_norm


def silence(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.zero_()


def test_span_skips_whole_blocks() -> None:
    """Without layers x' = N(x); the first norm feeds the first attention and touches no skip."""
    x, context = inputs()
    for layer in (0, 1):
        block = unit_gains(build("span", layer))
        assert (block.input_norm is not None) == (layer == 0)
        silence(block.attention)
        y = rms(x, block.attention_norm)
        wanted = rms(x + block.feedforward(y), block.feedforward_norm)
        torch.testing.assert_close(block(x, context), wanted, rtol=1e-12, atol=1e-12)
        silence(block.feedforward)
        x.requires_grad_()
        out = block(x, context)
        torch.testing.assert_close(out, rms(x, block.feedforward_norm), rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(out, x, rows_like(out))[0]
        wanted = torch.autograd.grad(rms(x, block.feedforward_norm), x, rows_like(out))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def rows_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)


def twins(first: str, second: str, layer: int = 1, **options: Any) -> tuple[Any, Any]:
    """Two placements that share their weights."""
    a, b = build(first, layer, **options), build(second, layer)
    b.load_state_dict({**b.state_dict(), **a.state_dict()}, strict=False)
    return a, b


def test_span_is_post_when_attention_adds_nothing() -> None:
    """Then y = N(x) = x for rows of unit RMS and unit gains; with attention they differ."""
    span_block, post_block = map(unit_gains, twins("span", "post"))
    x, context = inputs()
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    apart = (span_block(x, context) - post_block(x, context)).abs().max()
    assert apart > 0.1
    for block in (span_block, post_block):
        silence(block.attention.o_proj)
    torch.testing.assert_close(span_block(x, context), post_block(x, context), rtol=1e-4, atol=1e-4)


def divide_outputs(block: Any, alpha: float) -> None:
    block.attention.o_proj.weight.data /= alpha
    block.feedforward.down_proj.weight.data /= alpha


def without_eps(block: Any) -> Any:
    for module in block.modules():
        if isinstance(module, RMSNorm):
            module.eps = 0.0
    return block


@pytest.mark.parametrize(
    ("name", "alpha"), [("deepnorm", 6**0.25), ("keel", 6.0), ("span", 1 / 3**0.5)]
)
def test_a_factor_on_the_residual_divides_the_outputs(name: str, alpha: float) -> None:
    """N(αx + f) = N(x + f / α), but for eps."""
    x, context = inputs()
    if name == "deepnorm":
        scaled, plain = twins("deepnorm", "post")
    else:
        option = {"span": "residual_alpha", "keel": "alpha"}[name]
        scaled, plain = (build(name, 1, CONFIG, **{option: value}) for value in (alpha, 1.0))
    divide_outputs(plain, alpha)
    for block in (scaled, plain):
        without_eps(block)
    torch.testing.assert_close(scaled(x, context), plain(x, context), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layer", [0, 2, 7])
def test_layer_norm_scaling_is_pre_with_smaller_gains(layer: int) -> None:
    config = replace(CONFIG, layers=8)
    scaled, plain = build("lns", layer, config), build("pre", layer, config)
    for norm in (plain.attention_norm, plain.feedforward_norm):
        norm.weight.data /= math.sqrt(layer + 1)
    x, context = inputs()
    torch.testing.assert_close(scaled(x, context), plain(x, context), rtol=1e-12, atol=1e-12)
    unit_gains(scaled)
    seen: list[Tensor] = []
    scaled.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    scaled.feedforward.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    scaled(x, context)
    for value in seen:
        square = value.square().mean(-1)
        torch.testing.assert_close(square, torch.full_like(square, 1 / (layer + 1)), rtol=1e-4,
                                   atol=0)  # fmt: skip


def test_mixed_placement_at_its_ends() -> None:
    x, context = inputs()
    for layer in range(3):
        for fraction, name in ((0.0, "pre"), (1.0, "post")):
            mixed, plain = twins("mixln", name, layer, post_fraction=fraction)
            assert mixed(x, context).equal(plain(x, context))


@pytest.mark.parametrize("layers", [10, 12, 24])
def test_how_many_blocks_are_post(layers: int) -> None:
    """Also where the product of fraction and depth is a rounding below a whole number."""
    config = replace(CONFIG, layers=layers)
    x, context = inputs()
    for posts in range(layers + 1):
        for layer in {max(posts - 1, 0), min(posts, layers)}:
            block = unit_gains(build("mixln", layer, config, post_fraction=posts / layers))
            normalised = (block(x, context).square().mean(-1) - 1).abs().max() < 1e-4
            assert normalised == (layer < posts), (posts, layer)


# --------------------------------------------------------------------------------------- BHyT


def bhyt_model(**options: Any) -> ModelConfig:
    return replace(CONFIG, norm=BHyT.Config(sequence_length=LENGTH, **options))


def test_bhyt_estimates_the_second_mean_square() -> None:
    """The published block, written out."""
    block, (x, context) = build("pre", config=bhyt_model(kappa=4.0)), inputs()
    n1, n2 = block.attention_norm, block.feedforward_norm
    square = x.square().sum(-1, keepdim=True) / CONFIG.hidden
    first = n1.weight * torch.tanh(n1.lam / 4 / (square + 1e-6).sqrt() * x)
    h = x + block.attention(first, context)
    estimate = square + 0.7 * n1.lam**2 / 16
    second = n2.weight * torch.tanh(n2.lam / 4 / (estimate + 1e-6).sqrt() * h)
    wanted = h + block.feedforward(second)
    torch.testing.assert_close(block(x, context), wanted, rtol=1e-12, atol=1e-12)


def test_the_estimate_is_blind_to_lambda_but_not_to_its_input() -> None:
    variance = AttentionVariance(BHyT.Config(), nn.Identity())
    variance.c.fill_(0.5)
    lam = torch.tensor([3.0], requires_grad=True)
    square = torch.tensor([[2.0]], requires_grad=True)
    estimate = variance(square, lam / 10)
    assert float(estimate.detach()) == pytest.approx(2 + 0.5 * 0.09)
    estimate.sum().backward()
    assert lam.grad is None and square.grad is not None and square.grad.eq(1).all()
    assert not variance.c.requires_grad


class Summed(Axis):
    """An axis whose members are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.parts = size, dict[int, Tensor]()
        self.barrier = threading.Barrier(size)

    def sum_(self, x: Tensor) -> Tensor:
        self.parts[threading.get_ident()] = x.clone()
        self.barrier.wait(timeout=30)
        return x.copy_(torch.stack(list(self.parts.values())).sum(0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [8, 4], ids=["one per query", "shared by two"])
def test_c_is_the_norm_of_the_whole_product(kv_heads: int, ranks: int) -> None:
    """Against a sum over query heads, on every rank that holds some of them."""
    config = replace(
        bhyt_model(), attention=AttentionConfig(heads=8, kv_heads=kv_heads, head_dim=4)
    )
    attention = build("pre", config=config).attention
    product = torch.zeros(CONFIG.hidden, CONFIG.hidden, dtype=torch.float64)
    for head in range(8):
        kv = head * kv_heads // 8
        value = attention.v_proj.weight[4 * kv : 4 * kv + 4]
        product += (attention.o_proj.weight[:, 4 * head : 4 * head + 4] @ value).detach()
    wanted = float(sum(v**2 for v in product.view(-1))) / (LENGTH * CONFIG.hidden)
    found: dict[int, Tensor] = {}

    def measure(rank: int) -> None:
        share = build("pre", config=config)
        for name, dim in (("v_proj", 0), ("o_proj", 1)):
            weight = getattr(share.attention, name).weight
            weight.data = weight.data.chunk(ranks, dim)[rank].contiguous()
        share.variance.update_state(0)
        found[rank] = share.variance.c

    with bound({"tp": Summed(ranks)}):
        threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(found) == set(range(ranks))
    assert [float(c) for c in found.values()] == pytest.approx([wanted] * ranks, rel=1e-12)


def test_c_follows_the_weights_on_schedule() -> None:
    block = build("pre", config=bhyt_model(refresh_every=3))
    variance = block.variance
    assert variance.initial("c") == 0.0 and variance.state == ("c",)
    assert "variance.c" in block.state_dict()
    assert not list(variance.parameters()), "attention is no second submodule"
    seen = []
    variance.update_state(0)
    for step in range(1, 8):
        block.attention.o_proj.weight.data *= 2
        assert variance.reads_weights(step) == (step in (3, 6))
        variance.update_state(step)
        seen.append(float(variance.c))
    first = seen[0]
    assert seen == pytest.approx([first, first] + [first * 64] * 3 + [first * 4096] * 2)


def test_the_estimate_where_attention_averages_evenly() -> None:
    """Q = K = 0 without a causal mask: the assumption of the estimate holds, and it is right to a
    few per cent, at each site's gain."""
    tokens, dim = 128, 64
    config = ModelConfig(
        hidden=dim,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16),
        norm=BHyT.Config(sequence_length=tokens, attention_lambda=1.0),
    )
    block = build_block(config, 0, "auto")
    g = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5
    assert isinstance(block.attention, Attention) and isinstance(block.attention_norm, BHyT)
    block.attention.q_proj.weight.data.zero_()
    block.attention.k_proj.weight.data.zero_()
    block.attention.o_proj.weight.data *= 30
    block.attention_norm.weight.data.fill_(1.0)
    block.attention_norm.lam.data.fill_(1.0)  # type: ignore[union-attr]
    variance: Any = block.variance
    variance.update_state(0)
    x = torch.randn(64, tokens, dim, generator=g)
    context = SequenceContext(torch.arange(tokens), mask="bidirectional")
    with torch.no_grad():
        h = x + block.attention(block.attention_norm(x), context)
        estimate = variance(x.square().mean(-1, keepdim=True), block.attention_norm.gain(x.dtype))
    added, wanted = (v.mean() - x.square().mean() for v in (estimate, h.square()))
    assert float(added) > 0.01
    assert float(estimate.mean() / h.square().mean()) == pytest.approx(1, rel=0.005)
    assert float(added / wanted) == pytest.approx(1, rel=0.1)


# ------------------------------------------------------------------------- every placement

PAIRS = legal_pairs()
# What a norm or a block does alone shows beside the default of the other.
ENTRIES = [
    pytest.param(norm, block, marks=[pytest.mark.slow] * (norm != "rms" and block != "pre"))
    for norm, block in PAIRS
]


def pair(norm: str, block: str, layer: int = 1) -> Any:
    return build(block, layer, chosen(CONFIG, norm=norm))


@pytest.mark.parametrize(("norm", "name"), PAIRS)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_parameter_takes_part(norm: str, name: str, layer: int) -> None:
    block, (x, context) = pair(norm, name, layer), inputs()
    out = block(x.requires_grad_(), context)
    assert out.shape == x.shape
    (out * inputs()[0].flip(1)).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    for key, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize(("norm", "name"), ENTRIES)
def test_later_tokens_change_nothing(norm: str, name: str) -> None:
    block, (x, context) = pair(norm, name), inputs()
    changed = x.clone()
    changed[:, 3:] += rows_like(x)[:, 3:]
    before, after = block(x, context), block(changed, context)
    assert before[:, :3].equal(after[:, :3])
    assert not before[:, 3:].isclose(after[:, 3:]).all(-1).any()


@pytest.mark.parametrize(("norm", "name"), ENTRIES)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit(norm: str, name: str, mode: Any) -> None:
    found = []
    for recompute in ("none", mode):
        block, (x, context) = pair(norm, name), inputs()
        apply_recompute(block, recompute)
        x.requires_grad_()
        out = block(x, context)
        (out * inputs()[0].flip(1)).sum().backward()
        found.append([out, x.grad, *(p.grad for p in block.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", BLOCKS.names())
def test_final_norm_only_where_the_output_is_not_normalised(name: str) -> None:
    model = Transformer(chosen(CONFIG, block=name))
    wanted = name not in NORMALISED
    assert (model.final_norm is not None) == wanted
    names = {key for key, _ in model.named_parameters()}
    assert any(key.startswith("final_norm.") for key in names) == wanted


def test_blocks_behind_the_trunk_count_on_and_are_not_counted() -> None:
    """The two extra blocks are the fourth and fifth of a model of three."""
    for kind in ("sequential", "parallel"):
        config = replace(CONFIG, mtp=MTPConfig(2, kind=kind))
        model: Any = Transformer(replace(config, block=BLOCKS.config_class("deepnorm")()))
        mtp = [getattr(module, "block", module) for module in model.mtp.values()]
        found = [(block.layer, block.layers) for block in [*model.blocks.values(), *mtp]]
        assert found == [(layer, 3) for layer in range(5)]
    mixed: Any = Transformer(chosen(replace(config, mtp=MTPConfig(1)), block="mixln"))
    behind = unit_gains(mixed.mtp["1"].block)
    assert behind.layer == 3 and behind.layers == 3


def test_residual_stream_is_wide_where_updates_are_small() -> None:
    for name in BLOCKS.names():
        for layers in (63, 64, 200):
            config = replace(chosen(CONFIG, block=name), layers=layers)
            auto = name in ("deepnorm", "keel") and layers >= 64
            assert config.wide_residual == auto, (name, layers)
            assert not replace(config, residual_dtype="compute").wide_residual
            assert replace(config, residual_dtype="float32").wide_residual


# ------------------------------------------------------------------------------------ legality


def test_bhyt_goes_with_pre_alone() -> None:
    for norm in NORMS.names():
        for block in BLOCKS.names():
            found = chosen(CONFIG, norm=norm, block=block).problems()
            if norm.startswith("bhyt") and block != "pre":
                text = f"{norm} goes with block=pre, not with block={block}"
                assert found == [("norm", text)]
            else:
                assert found == []


def test_what_does_not_go_together() -> None:
    biased = replace(CONFIG.attention, qkv_bias=True)
    whole = replace(CONFIG.attention, qk_norm=True, qk_norm_span="projection")
    refused: list[tuple[ModelConfig, str]] = [
        (replace(bhyt_model(), attention=biased), "use bhyt_exact"),
        (replace(CONFIG, attention=whole, norm=LayerNorm.Config()), "projection is an RMS norm"),
        (replace(chosen(CONFIG, block="hybrid"), attention=whole), "normalises each head"),
    ]
    for config, text in refused:
        ((path, found),) = config.problems()
        assert text in found and path in ("norm", "attention.qk_norm_span")
    assert replace(chosen(CONFIG, norm="bhyt_exact"), attention=biased).problems() == []
    for norm in ("rms", "dyt", "bhyt"):
        assert replace(chosen(CONFIG, norm=norm), attention=whole).problems() == []
    ((path, found),) = replace(whole, qk_norm=False).problems()
    assert path == "qk_norm_span" and "it would be ignored" in found


def test_what_may_not_be_meant() -> None:
    for name in ("bhyt", "bhyt_exact"):
        shallow = chosen(replace(CONFIG, layers=99), norm=name)
        deep = chosen(replace(CONFIG, layers=100), norm=name)
        assert shallow.notes(1024) == []
        (note,) = deep.notes(1024)
        assert "lambda / kappa = 0.1 of model.norm is not below 1 / sqrt(layers) = 0.1" in note
    (note,) = chosen(CONFIG, norm="bhyt").notes(512)
    assert "sequence_length = 1024" in note and "sequences have 512 tokens" in note
    (note,) = replace(chosen(CONFIG, norm="derf", block="span"), layers=16).notes(512)
    assert "derf squashes the residual stream itself with block=span" in note
    assert replace(chosen(CONFIG, norm="derf"), layers=16).notes(512) == []
    (note,) = replace(chosen(CONFIG, block="mixln"), layers=3).notes(512)
    assert "post_fraction = 0.25 of 3 blocks is less than one: all of them are pre" in note
    assert replace(chosen(CONFIG, block="mixln"), layers=4).notes(512) == []
    learned = AdaRoPE.Config(reference_length=512)
    for position in (learned, RNoPE.Config(learned)):
        (note,) = replace(CONFIG, position=position).notes(512)
        assert "reference_length = 512 is not below the 512 tokens" in note
    assert replace(CONFIG, position=learned).notes(513) == []
    assert CONFIG.notes(512) == chosen(CONFIG, norm="bhyt_exact").notes(512) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MixNormBlock.Config(post_fraction=1.1), "post_fraction"),
        (MixNormBlock.Config(post_fraction=-0.1), "post_fraction"),
        (SpanNormBlock.Config(residual_alpha=0.0), "residual_alpha"),
        (KeelBlock.Config(alpha=-1.0), "alpha"),
    ],
)
def test_problems(config: Any, key: str) -> None:
    assert [path for path, _ in config.problems()] == [key]
    assert type(config)().problems() == []
    assert PeriNormBlock.Config(embedding_norm=True) != PeriNormBlock.Config()
