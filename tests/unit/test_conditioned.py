"""Blocks that are told how much noise there is: sinusoids, a reference, what starts at zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import AttentionConfig, SequenceContext
from models.collectives import Axis, bound
from models.conditioned import Modulation, NoiseEmbedding, modulated, noise_here, sinusoids
from models.config import InitConfig, ModelConfig
from models.declarations import wide_parameters
from models.feedforward import GELU
from models.norms import LayerNorm
from models.transformer import Transformer
from parallel.apply import BuildOptions, build_parallel_model
from parallel.mesh import ParallelConfig, build_mesh
from tests.components import chosen

CONFIG = chosen(
    ModelConfig(
        vocab_size=23,
        vocab_multiple=8,
        hidden=12,
        layers=3,
        attention=AttentionConfig(heads=2, kv_heads=2, head_dim=6),
        feedforward=GELU.Config(hidden=20, bias=True, tanh=True),
        norm=LayerNorm.Config(bias=False),
    ),
    block="adaln",
)
LENGTH = 7


def fresh(config: ModelConfig = CONFIG, seed: int = 0) -> Transformer:
    """Float64 weights as training starts from."""
    mesh = build_mesh(ParallelConfig(), torch.device("cpu"))
    options = BuildOptions(dtype=torch.float64, seed=seed)
    return build_parallel_model(config, ParallelConfig(), mesh, options).part


def random_model(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = value * (0.1 if name.startswith("shared") else 0.5)
    return model


def ids() -> Tensor:
    return torch.randint(0, 23, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def levels(seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 6 * torch.rand((2, LENGTH), generator=generator, dtype=torch.float64)


def told(noise: Tensor | None) -> SequenceContext:
    return SequenceContext(torch.arange(LENGTH), "bidirectional", noise=noise)


# ---------------------------------------------------------------------------------- the noise


def test_sinusoids_have_known_values() -> None:
    found = sinusoids(torch.tensor([[0.0, 2.0, 6.9]], dtype=torch.float64))
    assert found.shape == (1, 3, 256)
    for slot, sigma in enumerate((0.0, 2.0, 6.9)):
        for index in (0, 1, 64, 127):
            angle = sigma * 10_000 ** (-index / 128)
            assert found[0, slot, index].item() == pytest.approx(math.cos(angle), abs=1e-14)
            assert found[0, slot, 128 + index].item() == pytest.approx(math.sin(angle), abs=1e-14)


def test_noise_is_never_narrower_than_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert sinusoids(torch.ones(1, 1, dtype=dtype)).dtype == torch.float32
    model = Transformer(CONFIG)
    assert {p for n, p in model.named_parameters() if "shared" in n} == wide_parameters(model)
    silent = noise_here(torch.zeros(2, 3, 4, dtype=torch.bfloat16), told(None))
    assert silent.dtype == torch.float32 and silent.shape == (2, 1)


def test_each_rank_of_a_sequence_has_its_own_noise() -> None:
    class Slice(Axis):
        def __init__(self, rank: int) -> None:
            self.size, self.rank = 2, rank

    noise, x = levels()[:, :6], torch.zeros(2, 3, 1)
    for rank in range(2):
        with bound({"sp": Slice(rank)}):
            assert noise_here(x, told(noise)).equal(noise[:, 3 * rank : 3 * rank + 3])
            assert noise_here(x, told(noise[:, :1])).equal(noise[:, :1])


# ------------------------------------------------------------------------- a second implementation


def reference_logits(w: Mapping[str, Tensor], ids: Tensor, noise: Tensor) -> Tensor:
    """Of one sequence, position by position, from weights by name."""

    def exact(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    def silu(x: Tensor) -> Tensor:
        return x / (1 + (-x).exp())

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt() * weight

    def modulation(name: str, sigma: Tensor) -> Tensor:
        angles = sigma * exact(10_000 ** (-i / 128) for i in range(128))
        s = torch.cat([angles.cos(), angles.sin()])
        c = silu(w["shared.noise.first"] @ s + w["shared.noise.first_bias"])
        c = silu(w["shared.noise.second"] @ c + w["shared.noise.second_bias"])
        return (w[f"{name}.modulation.weight"] @ c + w[f"{name}.modulation.bias"]).view(-1, 12)

    def rotated(x: Tensor, position: int) -> Tensor:
        """Heads [2, 6]."""
        angles = exact(position * 10_000 ** (-i / 3) for i in range(3))
        a, b = x[:, :3], x[:, 3:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())

    stream = [w["embedding.weight"][i] for i in ids]
    for layer in range(3):
        b = f"blocks.{layer}"
        m = [modulation(b, sigma) for sigma in noise]  # shift, scale, gate, and again
        q, k, v = [], [], []
        for i, x in enumerate(stream):
            x = norm(x, w[f"{b}.attention_norm.weight"]) * (1 + m[i][1]) + m[i][0]
            a = f"{b}.attention"
            q.append(rotated((w[f"{a}.q_proj.weight"] @ x).view(2, 6), i))
            k.append(rotated((w[f"{a}.k_proj.weight"] @ x).view(2, 6), i))
            v.append((w[f"{a}.v_proj.weight"] @ x).view(2, 6))
        keys, values = torch.stack(k), torch.stack(v)
        for i, x in enumerate(stream):
            scores = (keys * q[i]).sum(-1) / math.sqrt(6)  # [positions, heads]
            seen = (scores.softmax(0)[..., None] * values).sum(0).flatten()
            x = x + m[i][2] * (w[f"{b}.attention.o_proj.weight"] @ seen)
            y = norm(x, w[f"{b}.feedforward_norm.weight"]) * (1 + m[i][4]) + m[i][3]
            f = f"{b}.feedforward"
            y = gelu(w[f"{f}.up_proj.weight"] @ y + w[f"{f}.up_proj.bias"])
            stream[i] = x + m[i][5] * (w[f"{f}.down_proj.weight"] @ y + w[f"{f}.down_bias"])
    logits = []
    for i, x in enumerate(stream):
        shift, scale = modulation("final_norm", noise[i])
        logits.append(
            w["head.weight"] @ (norm(x, w["final_norm.norm.weight"]) * (1 + scale) + shift)
        )
    return torch.stack(logits)[:, :23]


def test_the_model_is_the_reference() -> None:
    model, noise = random_model(), levels()
    weights = dict(model.named_parameters())
    found = model.logits(ids(), told(noise))
    for row in range(2):
        with torch.no_grad():
            wanted = reference_logits(weights, ids()[row], noise[row])
        torch.testing.assert_close(found[row], wanted, rtol=1e-12, atol=1e-12)


def test_the_output_depends_on_each_position_s_noise() -> None:
    model, noise = random_model(), levels()
    before = model.logits(ids(), told(noise))
    for slot in (0, LENGTH - 1):
        changed = noise.clone()
        changed[0, slot] += 0.5
        after = model.logits(ids(), told(changed))
        assert (after[0] - before[0]).abs().amax(-1).min() > 1e-4  # all see this slot
        assert after[1].equal(before[1])


def test_one_level_for_all_is_that_level_everywhere() -> None:
    model = random_model()
    level = torch.tensor([[0.3], [4.0]], dtype=torch.float64)
    once = model.logits(ids(), told(level))
    everywhere = model.logits(ids(), told(level.expand(2, LENGTH).contiguous()))
    torch.testing.assert_close(once, everywhere, rtol=1e-13, atol=1e-13)
    silent, zero = (model.logits(ids(), told(n)) for n in (None, torch.zeros_like(level)))
    assert silent.equal(zero) and not silent.isclose(once).any()


def test_a_small_scale_survives_bfloat16() -> None:
    x = torch.linspace(1, 2, 1000).bfloat16()
    scale = torch.full_like(x, 3e-3)  # 1 + scale is 1
    mean = (modulated(x, torch.zeros_like(x), scale).float() / x.float() - 1).mean().item()
    assert (1 + scale).eq(1).all() and mean == pytest.approx(3e-3, rel=0.3)


# ------------------------------------------------------------------------------ how training starts


def test_blocks_start_as_the_identity() -> None:
    model = fresh()
    assert model.embedding is not None
    x = model.embedding(ids())
    for noise in (None, levels()):
        y = x
        for layer in range(3):
            y = model.run_unit(f"blocks.{layer}", y, ids(), told(noise))
        assert y.equal(x)
    assert model(ids(), told(levels())).equal(model(ids(), told(levels(3))))
    assert model.logits(ids(), told(None)).abs().max() > 1e-3


def test_the_first_gradients_reach_the_gates_and_the_final_norm() -> None:
    """Gates first; what is behind them follows once they are open."""
    model = fresh()
    model.logits(ids(), told(levels())).square().sum().backward()
    found = {
        n: p.grad.abs().max().item() for n, p in model.named_parameters() if p.grad is not None
    }
    for layer in range(3):
        rows = model.get_parameter(f"blocks.{layer}.modulation.weight").grad
        assert rows is not None
        moved = rows.view(6, 12, 128).abs().amax((1, 2)) > 0
        assert moved.tolist() == [False, False, True, False, False, True]
        assert found[f"blocks.{layer}.attention.q_proj.weight"] == 0
    assert found["final_norm.modulation.weight"] > 0 and found["shared.noise.first"] == 0


def test_every_block_teaches_the_shared_network() -> None:
    model = random_model()
    embedding = model.shared["noise"]
    assert isinstance(embedding, NoiseEmbedding)
    users = [module for module in model.modules() if isinstance(module, Modulation)]
    assert len(users) == 4 and all(user._embedding == (embedding,) for user in users)
    whole = torch.autograd.grad(loss(model), list(embedding.parameters()))
    parts = []
    for user in users:  # the others see a copy that is not trained
        for other in users:
            other._embedding = (embedding if other is user else frozen(embedding),)
        part = torch.autograd.grad(loss(model), list(embedding.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in part)
        parts.append(part)
    for gradient, shares in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(shares), gradient, rtol=1e-10, atol=1e-12)


def loss(model: Transformer) -> Tensor:
    weights = torch.linspace(-1, 1, 23, dtype=torch.float64)
    return (F.log_softmax(model.logits(ids(), told(levels())), -1) * weights).sum()


def frozen(embedding: NoiseEmbedding) -> NoiseEmbedding:
    copy = NoiseEmbedding(embedding.second.shape[0]).double()
    copy.load_state_dict(embedding.state_dict())
    return copy.requires_grad_(False)


def test_a_part_without_blocks_has_the_network_if_it_has_the_final_norm() -> None:
    names = {name for name, _ in Transformer(CONFIG, ["final_norm", "head"]).named_parameters()}
    assert {name.partition(".")[0] for name in names} == {"shared", "final_norm", "head"}
    assert not list(Transformer(CONFIG, ["embedding", "head"]).shared)


# --------------------------------------------------------------------------------- the zero head


def test_a_head_that_starts_at_zero() -> None:
    config = replace(CONFIG, init=InitConfig(zero_head=True))
    model = fresh(config)
    assert model.logits(ids(), told(None)).eq(0).all()
    plain = dict(fresh().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.equal(plain[name]) == (name != "head.weight"), name


def test_a_tied_head_cannot_start_at_zero() -> None:
    config = replace(CONFIG, tie_embeddings=True, init=InitConfig(zero_head=True))
    ((path, text),) = config.problems()
    assert path == "init.zero_head" and "tie_embeddings=true" in text


def test_problems() -> None:
    block: Any = type(CONFIG.block)
    assert block(condition_dim=1).problems() == []
    assert block(condition_dim=0).problems() == [("condition_dim", "must be positive, got 0")]
