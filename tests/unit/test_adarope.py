"""Learned frequencies and temperatures: identity at the start, gradients, precision, liveness."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.adarope import LearnedTable, middle
from models.attention import Attention, AttentionConfig, SequenceContext, attend
from models.config import ModelConfig
from models.decoding import DecodingContext, KeyValueCache, padded_positions
from models.norms import RMSNorm
from models.positions import (
    NTK,
    PI,
    POSITIONS,
    AdaRoPE,
    LeRoPE,
    Llama3,
    NoPE,
    PartialRoPE,
    RNoPE,
    RoPE,
    YaRN,
)
from models.rotary import HeadShape, LearnedRotation, rotate_half_split
from models.shared import shared_modules
from models.transformer import Transformer
from pretrain.optimizer_config import OptimizerConfig, Rule, model_rules
from tests.trained import tiny_config, tiny_model

HEADS, KV_HEADS, DIM, LENGTH, BATCH = 4, 2, 8, 12, 2
SHAPE = HeadShape(DIM, HEADS, KV_HEADS)
CONFIG = AdaRoPE.Config
GRANULARITIES: list[Any] = ["none", "global", "layer", "kv_head"]
TEMPERATURES: list[Any] = ["none", "context", "query", "power"]
EVERY = [CONFIG(granularity=g, temperature=t) for g in GRANULARITIES for t in TEMPERATURES]
CPU = torch.device("cpu")


def qk(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(BATCH, length, heads, DIM, generator=g, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS)
    )


def learned(config: Any, std: float = 0.0, shape: HeadShape = SHAPE) -> LearnedTable:
    """An encoding in float64, away from its start by ``std``."""
    module = POSITIONS.build(config, shape)
    assert isinstance(module, LearnedTable)
    module.shared = shared_modules(module)
    g = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        parameter.data = noise * std + module.initial(name.split(".")[-1])
    return module


def context(offset: int = 0, documents: Tensor | None = None) -> SequenceContext:
    return SequenceContext(torch.arange(LENGTH) + offset, documents=documents)


def explicit(module: LearnedTable, q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
    """The definition, by complex numbers, differentiated operation by operation."""
    theta = module.frequencies(q.dtype, CPU)
    scale = module.scale(q.shape[1], q.dtype, SequenceContext(positions))
    results = []
    for x, factor in ((q, scale), (k, None)):
        tables = theta.repeat_interleave(x.shape[2] // theta.shape[0], 0)
        turn = torch.polar(torch.ones((), dtype=q.dtype), positions[:, None, None] * tables)
        z = torch.complex(*x.chunk(2, -1)) * turn
        out = torch.cat([z.real, z.imag], -1) * module.config.magnitude()
        results.append(out if factor is None else out * factor.unsqueeze(-1))
    return results


def logits(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, S, S], causal."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(HEADS // KV_HEADS, 2))
    return scores.tril()


# ------------------------------------------------------------------------------- definitions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [RoPE.Config(), RoPE.Config(5e5), PI.Config(), NTK.Config(),
                                   YaRN.Config(), Llama3.Config()], ids=str)  # fmt: skip
def test_the_start_is_the_fixed_table_bit_for_bit(start: Any, dtype: torch.dtype) -> None:
    for length, heads, kv_heads, dim in [(12, 4, 2, 8), (37, 4, 4, 6), (5, 3, 1, 64)]:
        shape = HeadShape(dim, heads, kv_heads)
        g = torch.Generator().manual_seed(length)
        q = torch.randn(2, length, heads, dim, generator=g).to(dtype)
        k = torch.randn(2, length, kv_heads, dim, generator=g).to(dtype)
        batch = SequenceContext(torch.arange(length) + 4000)
        wanted = POSITIONS.build(start, shape).rotate(q, k, batch)
        for config in [*EVERY, LeRoPE.Config()]:
            module = learned(replace(config, start=start), 0.0, shape).float()
            for found, want in zip(module.rotate(q, k, batch), wanted):
                assert found.dtype == dtype and found.equal(want), config


@pytest.mark.parametrize("config", [*EVERY, LeRoPE.Config(), CONFIG(YaRN.Config())], ids=str)
def test_values_are_the_definition(config: Any) -> None:
    q, k = qk()
    module = learned(config, 0.5)
    found = module.rotate(q, k, context(offset=100))
    for a, b in zip(found, explicit(module, q, k, torch.arange(LENGTH) + 100)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_every_head_has_its_own_table_and_shares_it_with_its_queries() -> None:
    """With as many key heads as query heads, the tables of a group are repeated."""
    q, k = qk()
    grouped = learned(CONFIG(), 0.5)
    alone = learned(CONFIG(), 0.5, HeadShape(DIM, HEADS, HEADS))
    alone.log_scale.data = grouped.log_scale.data.repeat_interleave(2, 0)
    alone.beta.data = grouped.beta.data
    a, b = grouped.rotate(q, k, context())
    c, d = alone.rotate(q, k.repeat_interleave(2, 2), context())
    assert a.equal(c) and b.repeat_interleave(2, 2).equal(d)
    grouped.log_scale.data[1] += 0.1
    e, f = grouped.rotate(q, k, context())
    assert e[:, :, :2].equal(a[:, :, :2]) and f[:, :, 0].equal(b[:, :, 0])
    assert not e[:, 1:, 2].equal(a[:, 1:, 2]) and not f[:, 1:, 1].equal(b[:, 1:, 1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_logits_do_not_change_when_all_positions_shift(granularity: Any) -> None:
    q, k = qk()
    module = learned(CONFIG(granularity=granularity), 1.0)
    wanted = logits(*module.rotate(q, k, context()))
    for offset in (1, 1000):
        found = logits(*module.rotate(q, k, context(offset)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    stretched = SequenceContext(2 * torch.arange(LENGTH))
    assert (logits(*module.rotate(q, k, stretched)) - wanted).abs().max() > 0.1


def test_bands_without_frequency_are_partial_rotation() -> None:
    q, k = qk()
    module = learned(CONFIG(temperature="none"))
    for kept in (0, 1, 3, 4):
        module.log_scale.data.zero_()[:, kept:] = -math.inf
        found = module.rotate(q, k, context())
        fixed: Any = PartialRoPE.Config(fraction=2 * kept / DIM, bands="fastest")
        wanted = POSITIONS.build(fixed if kept else NoPE.Config(), SHAPE).rotate(q, k, context())
        assert all(a.equal(b) for a, b in zip(found, wanted))


# ------------------------------------------------------------------------------ temperatures


def test_query_temperature_counts_visible_keys() -> None:
    module = learned(CONFIG(reference_length=3), 0.5)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 12])
    found = module.scale(LENGTH, torch.float64, context(documents=documents))
    counts = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7], list(range(1, 13))])
    x = (counts.double().clamp(min=3) / 3).log()
    torch.testing.assert_close(found, 1 + x[..., None] * module.beta.detach())
    assert found is not None and (found[0, 5:8] == 1).all() and found.shape == (2, 12, HEADS)


@pytest.mark.parametrize("form", ["context", "power"])
def test_context_temperature_is_one_number_per_sequence(form: Any) -> None:
    module = learned(CONFIG(temperature=form, reference_length=6), 0.5)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 6 + [1] * 6])
    found = module.scale(LENGTH, torch.float64, context(documents=documents))
    x = math.log(7 / 6)
    wanted = 1 + module.beta * x
    if form == "power":
        wanted = (module.beta * x ** (1 + torch.nn.functional.softplus(module.gamma))).exp()
    assert found is not None and found.shape == (2, 1, HEADS)
    torch.testing.assert_close(found[0, 0], wanted)
    assert (found[1] == 1).all()
    alone = module.scale(LENGTH, torch.float64, context())
    assert alone is not None and alone.shape == (1, 1, HEADS)


def test_power_stays_within_bounds_and_is_finite_at_the_reference_length() -> None:
    module = learned(CONFIG(temperature="power", reference_length=LENGTH), 0.5)
    scale = module.scale(LENGTH, torch.float64, context())
    assert scale is not None and (scale == 1).all()
    scale.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    module = learned(CONFIG(temperature="power"))
    module.beta.data = torch.tensor([9.0, -9.0, 0.1, 0.0]).double()
    found = module.scale(LENGTH, torch.float64, context())
    assert found is not None
    torch.testing.assert_close(found[0, 0, :2], torch.tensor([4.0, 0.25]).double())
    assert 1 < found[0, 0, 2] < 4 and found[0, 0, 3] == 1


# ---------------------------------------------------------------------------------- gradients


ONE_OF_EACH = [
    CONFIG(granularity="none", temperature="power"),
    CONFIG(granularity="global", temperature="context"),
    CONFIG(granularity="layer", temperature="query"),
    CONFIG(YaRN.Config(original_length=64), temperature="power"),
    LeRoPE.Config(),
]


@pytest.mark.parametrize("config", ONE_OF_EACH, ids=str)
def test_gradients_of_everything(config: Any) -> None:
    """On the logits, for only there may positions be counted from the middle."""
    q, k = (t[:1, :4, :, :4] for t in qk())
    shape = HeadShape(4, HEADS, KV_HEADS)
    module = learned(config, 0.3, shape)
    batch = SequenceContext(torch.tensor([3, 4, 6, 11]))
    names = [name for name, _ in module.named_parameters()]

    def function(q: Tensor, k: Tensor, *values: Tensor) -> Tensor:
        fresh = learned(config, 0.0, shape)
        for name, value in zip(names, values):
            owner, _, key = name.rpartition(".")
            holder = fresh.get_submodule(owner)
            del holder._parameters[key]
            setattr(holder, key, value)
        return logits(*fresh.rotate(q, k, batch))

    parts = [t.detach().clone().requires_grad_() for t in (q, k, *module.parameters())]
    assert torch.autograd.gradcheck(function, parts)


def test_gradients_of_the_rotation_alone() -> None:
    """Of any function of its outputs, when positions count from 0."""
    q, k = (t[:, :4, :, :4] for t in qk())
    theta = torch.rand(KV_HEADS, 2, dtype=torch.float64)
    scale = torch.rand(BATCH, 4, HEADS, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 9], [5, 6, 7, 8]])
    origin = torch.zeros((), dtype=torch.int64)
    parts = [t.clone().requires_grad_() for t in (q, k, theta, scale)]
    assert torch.autograd.gradcheck(
        lambda *t: LearnedRotation.apply(*t, positions, origin, 1.3), parts
    )


@pytest.mark.parametrize("granularity", GRANULARITIES[1:])
def test_closed_form_equals_autograd_through_attention(granularity: Any) -> None:
    q, k = qk()
    results = []
    for own in (True, False):
        module = learned(CONFIG(granularity=granularity), 0.5)
        inputs = [t.clone().requires_grad_() for t in (q, k)]
        batch = context(offset=7)
        turned = (
            module.rotate(*inputs, batch)
            if own
            else explicit(module, *inputs, torch.arange(LENGTH) + 7)
        )
        heads_first = [t.transpose(1, 2) for t in turned]
        out = attend(*heads_first, qk(9)[1].transpose(1, 2), batch, "sdpa")
        out.square().sum().backward()
        results.append([t.grad for t in (*inputs, *module.parameters())])
    for a, b in zip(*results):
        assert a is not None and b is not None and b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def rotated_gradients(dtype: torch.dtype, offset: int) -> Any:
    """(q, k, ∂L/∂q', ∂L/∂k', θ) of causal attention over 256 positions from ``offset`` on, with q
    and k and the gradients of their rotations rounded to ``dtype``."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 16, generator=g, dtype=torch.float64) for _ in range(3))
    q, k = q.to(dtype).double(), k.to(dtype).double()
    theta = RoPE.Config().frequencies(16, torch.float64, CPU)[None]
    angle = (torch.arange(256, dtype=torch.float64) + offset)[:, None] * theta
    turned = [rotate_half_split(t, angle.cos(), angle.sin()).requires_grad_() for t in (q, k)]
    out = torch.nn.functional.scaled_dot_product_attention(*turned, v, is_causal=True)
    out.square().sum().backward()
    grads = [t.grad.transpose(1, 2).to(dtype) for t in turned if t.grad is not None]
    return [t.transpose(1, 2).to(dtype) for t in (q, k)], grads, theta


def frequency_gradient(dtype: torch.dtype, offset: int, reference: int) -> Tensor:
    (q, k), (dq, dk), theta = rotated_gradients(dtype, offset)
    wide = torch.promote_types(dtype, torch.float32)
    theta = theta.to(wide).requires_grad_()
    positions = torch.arange(256) + offset
    outputs = LearnedRotation.apply(q, k, theta, None, positions, torch.tensor(reference), 1.0)
    (found,) = torch.autograd.grad(outputs, theta, (dq, dk))
    return (found * theta).detach().double()


@pytest.mark.parametrize("offset", [0, 4096, 65_536])
def test_counting_positions_from_the_middle_saves_the_gradient(offset: int) -> None:
    """Relative errors of ∂L/∂ξ: (bf16 centred, bf16 from 0, fp32 centred, fp32 from 0)."""
    middle_of = offset + 127
    exact = frequency_gradient(torch.float64, offset, middle_of)
    from_zero = frequency_gradient(torch.float64, offset, 0)
    torch.testing.assert_close(exact, from_zero, rtol=1e-6, atol=1e-9)

    def error(dtype: torch.dtype, reference: int) -> float:
        found = frequency_gradient(dtype, offset, reference)
        return float((found - exact).norm() / exact.norm())

    assert error(torch.bfloat16, middle_of) < 1e-2
    assert error(torch.float32, middle_of) < 1e-2 * max(offset, 100) / 65_536
    if offset == 65_536:
        assert error(torch.bfloat16, 0) > 0.5  # the negative control
    batch = SequenceContext(torch.arange(256) + offset)
    assert middle(batch).item() == middle_of


def test_torques_of_queries_and_keys_cancel() -> None:
    """The gradient does not depend on where positions are counted from."""
    q, k = (t.requires_grad_() for t in qk())
    module = learned(CONFIG(temperature="none"), 0.5)
    theta = module.frequencies(torch.float64, CPU).detach().requires_grad_()
    gradients = []
    for reference in (0, 5, 10_000):
        turned = LearnedRotation.apply(
            q, k, theta, None, torch.arange(LENGTH), torch.tensor(reference), 1.0
        )
        (grad,) = torch.autograd.grad(logits(*turned).sin().sum(), theta)
        gradients.append(grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=1e-10 * 10_000)
    assert gradients[0].abs().min() > 1e-4


def test_each_sequence_is_counted_from_its_own_middle() -> None:
    positions = torch.stack([torch.arange(9), torch.arange(9) + 1000])
    assert middle(SequenceContext(positions)).tolist() == [[4], [1004]]
    assert middle(SequenceContext(torch.arange(10))).tolist() == [4]


# ------------------------------------------------------------------------------- in the model


def layer_of(config: Any) -> Attention:
    attention = AttentionConfig(HEADS, KV_HEADS, DIM)
    module = Attention(attention, 16, 0, 1, lambda dim: RMSNorm(RMSNorm.Config(), dim), config)
    g = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        start = 0.0 if "position" in name else 1.0
        parameter.data = torch.randn(parameter.shape, generator=g) * 0.5 * start
    return module


@pytest.mark.parametrize("temperature", ["context", "query", "power"])
def test_a_step_changes_the_next_forward_pass(temperature: Any) -> None:
    """A table kept from before, or cut from the graph, would show here."""
    module = layer_of(CONFIG(temperature=temperature))
    assert isinstance(module.position, LearnedTable)
    if temperature == "power":  # γ acts through β alone
        module.position.beta.data.fill_(0.1)
    x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(module.position.parameters(), lr=0.05)
    before = {name: p.detach().clone() for name, p in module.position.named_parameters()}
    first = module(x, context())
    first.square().mean().backward()
    optimizer.step()
    for name, parameter in module.position.named_parameters():
        assert (parameter != before[name]).all(), name
    second = module(x, context())
    assert (second - first).abs().max() > 1e-4
    module.position.load_state_dict(before)
    assert module(x, context()).equal(first)


def model_of(position: Any, **changes: Any) -> Transformer:
    return tiny_model(tiny_config(position=position, layers=3, **changes)).double()


SHARED: list[Any] = [{"type": "lerope"}, {"type": "adarope", "granularity": "global"}]


@pytest.mark.parametrize("position", SHARED, ids=str)
def test_all_layers_share_one_table(position: Any) -> None:
    model = model_of(position)
    names = [name for name, _ in model.named_parameters() if "log_scale" in name]
    assert names == ["shared.position.log_scale"]
    holders = {id(block.attention.position._shared[0]) for block in model.blocks.values()}
    assert holders == {id(model.shared["position"])}
    part = Transformer(model.config, ["blocks.1", "final_norm"])
    assert "shared.position.log_scale" in dict(part.named_parameters())
    assert not list(Transformer(model.config, ["final_norm", "head"]).shared)
    ids = torch.arange(24).view(2, 12)
    model.logits(ids).square().sum().backward()
    gradient = model.shared["position"].log_scale.grad
    assert isinstance(gradient, Tensor) and gradient.abs().min() > 0


def test_layers_without_positions_have_no_table() -> None:
    inner = CONFIG()
    model = Transformer(ModelConfig(layers=4, position=RNoPE.Config(inner, every=2)))
    names = [name for name, _ in model.named_parameters() if "log_scale" in name]
    assert names == [f"blocks.{layer}.attention.position.inner.log_scale" for layer in (0, 2)]


CACHE_SAFE: list[Any] = [
    {"type": "adarope", "granularity": granularity, "temperature": temperature}
    for granularity in GRANULARITIES
    for temperature in ("none", "query")
]


@pytest.mark.parametrize("position", CACHE_SAFE, ids=str)
def test_decoding_with_a_cache_and_padding_is_the_whole_sequence(position: Any) -> None:
    model = model_of(position)
    ids = torch.randint(301, (2, 9), generator=torch.Generator().manual_seed(4))
    whole = model.logits(ids)
    padded = torch.nn.functional.pad(ids, (3, 0))
    valid = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    for rows, seen, skip in [(ids, None, 0), (padded, valid, 3)]:
        cache = KeyValueCache(rows.shape[1])
        pieces = []
        for start, end in [(0, skip + 5), (skip + 5, skip + 8), (skip + 8, skip + 9)]:
            documents = None if seen is None else seen[:, :end]
            positions = torch.arange(start, end)
            if documents is not None:
                positions = padded_positions(documents)[:, start:]
            batch = DecodingContext(positions, documents=documents, store=cache, offset=start)
            pieces.append(model.logits(rows[:, start:end], batch))
        found = torch.cat(pieces, 1)[:, skip:]
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("temperature", ["context", "power"])
def test_a_context_temperature_ignores_padding_but_not_what_comes_later(temperature: Any) -> None:
    position = {"type": "adarope", "temperature": temperature, "reference_length": 4}
    model = model_of(position)
    ids = torch.randint(301, (2, 9), generator=torch.Generator().manual_seed(4))
    padded = torch.nn.functional.pad(ids, (12, 0))
    valid = torch.nn.functional.pad(torch.ones_like(ids), (12, 0))
    batch = DecodingContext(padded_positions(valid), documents=valid)
    whole = model.logits(ids)
    torch.testing.assert_close(model.logits(padded, batch)[:, 12:], whole, rtol=0, atol=1e-11)
    assert (model.logits(ids[:, :6]) - whole[:, :6]).abs().max() > 1e-3


def test_packed_documents_are_each_by_themselves() -> None:
    model = model_of({"type": "adarope"})
    ids = torch.randint(301, (1, 12), generator=torch.Generator().manual_seed(4))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = model.logits(ids, SequenceContext(torch.arange(12), documents=documents))
    alone = [model.logits(ids[:, :5]), model.logits(ids[:, 5:])]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (CONFIG(), []),
        (CONFIG(start=YaRN.Config()), []),
        (CONFIG(start=NoPE.Config()), ["start"]),
        (CONFIG(start=PartialRoPE.Config()), ["start"]),
        (CONFIG(start=CONFIG()), ["start"]),
        (LeRoPE.Config(start=LeRoPE.Config()), ["start"]),
        (CONFIG(reference_length=0), ["reference_length"]),
        (CONFIG(temperature="none", reference_length=9), ["reference_length"]),
    ],
)
def test_problems(config: Any, paths: list[str]) -> None:
    assert [path for path, _ in config.problems()] == paths


def test_declarations() -> None:
    """Kept in fp32, not decayed, sharded with the heads that they belong to."""
    for config in [*EVERY, LeRoPE.Config()]:
        module = learned(config)
        for holder in module.modules():
            for name, _ in holder.named_parameters(recurse=False):
                assert name in holder.wide and holder.optimizer_group[name] == "position"
                granularity = getattr(config, "granularity", "global")
                kind = {"kv_head": "head", "layer": "replicated", "global": "partial"}
                wanted = "head" if name in ("beta", "gamma") else kind[granularity]
                assert holder.plan[name] == wanted, (config, name)


@pytest.mark.parametrize("position", [*EVERY[1:], LeRoPE.Config()], ids=str)
def test_no_decay_no_muon_and_a_learning_rate_of_their_own(position: Any) -> None:
    config = OptimizerConfig(matrices="muon", position_lr=7.0)
    rules = model_rules(ModelConfig(position=position), config)
    learned_names = {"log_scale", "beta", "gamma"}
    ours = [rule for name, rule in rules.items() if name.rpartition(".")[2] in learned_names]
    assert ours and set(ours) == {Rule("adamw", False, 7.0, "position")}
