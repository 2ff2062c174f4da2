"""Norms: the papers' formulas, torch's own, gradients, and statistics that stay in fp32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.norm_functions import mean_square, squashed
from models.norms import (
    NORMS,
    BHyT,
    BHyTExact,
    Derf,
    DyT,
    LayerNorm,
    RMSNorm,
    Role,
    Site,
    make_norm,
)


def build(name: str, dim: int, **options: Any) -> Any:
    """A float64 norm with parameters far from their initial values."""
    g = torch.Generator().manual_seed(dim)
    module = NORMS.build(NORMS.config_class(name)(**options), dim).double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64) + 0.3
    return module


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rms_is_the_formula(eps: float) -> None:
    norm, x = build("rms", 6, eps=eps), rows(2, 3, 6)
    literal = torch.stack(
        [v / ((v * v).sum() / 6 + eps).sqrt() * norm.weight for v in x.view(-1, 6)]
    )
    torch.testing.assert_close(norm(x).view(-1, 6), literal, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(
        norm(x), F.rms_norm(x, (6,), norm.weight, eps), rtol=1e-14, atol=1e-15
    )


@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_the_formula(bias: bool) -> None:
    norm, x = build("layer", 6, eps=0.1, bias=bias), rows(2, 3, 6) + 2
    assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"][: 1 + bias]
    literal = []
    for v in x.view(-1, 6):
        mean = v.sum() / 6
        spread = ((v - mean) ** 2).sum() / 6  # the biased variance
        literal.append(
            (v - mean) / (spread + 0.1).sqrt() * norm.weight + (norm.bias if bias else 0)
        )
    torch.testing.assert_close(norm(x).view(-1, 6), torch.stack(literal), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_dyt_and_derf_are_their_formulas(bias: bool) -> None:
    x = rows(2, 3, 6)
    for name, names in (("dyt", ["alpha"]), ("derf", ["alpha", "shift"])):
        norm = build(name, 6, bias=bias)
        assert {key for key, _ in norm.named_parameters()} - {"weight", "bias"} == set(names)
        assert (norm.bias is not None) == bias
        literal = []
        for row in x.view(-1, 6):
            alpha = norm.alpha.item()
            f = [
                math.tanh(alpha * float(v)) if name == "dyt"
                else math.erf(alpha * float(v) + norm.shift.item())
                for v in row
            ]  # fmt: skip
            value = norm.weight.detach() * torch.tensor(f, dtype=torch.float64)
            literal.append(value + norm.bias.detach() if bias else value)
        torch.testing.assert_close(
            norm(x).view(-1, 6), torch.stack(literal), rtol=1e-13, atol=1e-14
        )


@pytest.mark.parametrize("name", ["bhyt", "bhyt_exact"])
def test_bhyt_is_the_formula(name: str) -> None:
    norm, x = build(name, 6, kappa=3.0, eps=0.2), rows(2, 3, 6)
    for given in (None, torch.rand(2, 3, 1, dtype=torch.float64)):
        square = x.square().sum(-1, keepdim=True) / 6 if given is None else given
        alpha = norm.lam / (3 * (square + 0.2).sqrt())
        wanted = norm.weight * torch.tanh(alpha * x)
        torch.testing.assert_close(norm(x, given), wanted, rtol=1e-13, atol=1e-14)


def test_a_fixed_lambda_is_no_parameter() -> None:
    fixed = build("bhyt", 6, learn_lambda=False, feedforward_lambda=2.0)
    learned = build("bhyt", 6, feedforward_lambda=2.0)
    assert [name for name, _ in fixed.named_parameters()] == ["weight"]
    assert [name for name, _ in learned.named_parameters()] == ["weight", "lam"]
    learned.lam.data.fill_(2.0)
    learned.weight.data.copy_(fixed.weight)
    assert learned(rows(3, 6)).equal(fixed(rows(3, 6)))


@pytest.mark.parametrize("lam", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("dim", [4, 64])
def test_bounds_of_bhyt_on_any_input(lam: float, dim: int) -> None:
    """tanh² z ≤ z² bounds a row's mean square, and its largest entry is at most √dim RMS; at most
    a share κ^-2 of it exceeds κ RMS (Chebyshev)."""
    kappa, eps = 10.0, 1e-6
    norm = build("bhyt_exact", dim, kappa=kappa, eps=eps)
    norm.lam.data.fill_(lam)
    g = torch.Generator().manual_seed(3)
    spikes = torch.zeros(200, dim, dtype=torch.float64)
    spikes[:, 0] = 1e3
    heavy = torch.randn(200, dim, generator=g, dtype=torch.float64) ** 9
    for x in (rows(200, dim), heavy, spikes, spikes + rows(200, dim)):
        out = norm(x).detach()
        gain = norm.weight.detach().abs()
        assert ((out / gain).square().mean(-1) <= (lam / kappa) ** 2 * (1 + 1e-12)).all()
        assert (out.abs() <= gain * math.tanh(lam * dim**0.5 / kappa) * (1 + 1e-12)).all()
        far = (lam * x / (kappa * mean_square(x).sqrt())).abs() > lam
        assert far.double().mean(-1).max() <= kappa**-2
    spike = (norm(spikes) / norm.weight)[0, 0]  # the bound is attained
    assert float(spike.detach()) == pytest.approx(math.tanh(lam * dim**0.5 / kappa), rel=1e-6)


def test_bhyt_of_a_small_lambda_is_a_scaled_rms_norm() -> None:
    bhyt, rms, x = build("bhyt_exact", 64), build("rms", 64, eps=1e-6), rows(50, 64)
    rms.weight.data.copy_(bhyt.weight)
    distances = []
    for lam in (1.0, 0.1, 0.01):
        bhyt.lam.data.fill_(lam)
        wanted = rms(x) * (lam / 10)
        distances.append(float((bhyt(x) - wanted).norm() / wanted.norm()))
    # tanh z = z − z³/3 + …: the relative distance falls with the square of lambda
    assert distances[0] < 0.02
    assert distances[1] == pytest.approx(distances[0] / 100, rel=0.05)
    assert distances[2] == pytest.approx(distances[1] / 100, rel=0.01)


def test_variance_behind_bhyt_of_a_normal_input() -> None:
    """For Gaussian rows and lambda / kappa = 0.2, tanh takes 7.2 % off the variance of 0.04."""
    norm = NORMS.build(BHyTExact.Config(), 4096).double()
    norm.weight.data.fill_(1.0)
    norm.lam.data.fill_(2.0)
    assert float(norm(rows(64, 4096)).square().mean()) == pytest.approx(0.928 * 0.04, rel=2e-3)


@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_bhyt_with_another_mean_square(given: bool) -> None:
    norm, x = build("bhyt", 5), rows(2, 3, 5).requires_grad_()
    other = (rows(2, 3, 5) + 1).requires_grad_()

    def call(x: Tensor, other: Tensor, weight: Tensor, lam: Tensor) -> Any:
        values = {"weight": weight, "lam": lam}
        square = mean_square(other) if given else None
        return torch.func.functional_call(norm, values, (x, square))

    inputs = (x, other, norm.weight, norm.lam)
    assert torch.autograd.gradcheck(call, inputs)


def test_parameters_of_rows_and_of_all() -> None:
    """A scale per row and one for all rows have the gradients of their broadcast."""
    x, weight = rows(2, 3, 5), rows(5)
    for f in ("tanh", "erf"):
        for shape in ((1,), (2, 3, 1)):
            scale = (rows(*shape) + 0.7).requires_grad_()
            shift = rows(1).requires_grad_()
            squashed(x, scale, weight, shift, f).square().sum().backward()
            found = (scale.grad, shift.grad)
            scale.grad = shift.grad = None
            z = scale * x + shift
            (weight * (z.tanh() if f == "tanh" else z.erf())).square().sum().backward()
            torch.testing.assert_close(found, (scale.grad, shift.grad), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["rms", "dyt", "derf", "bhyt", "bhyt_exact"])
def test_only_the_narrow_input_is_kept(name: str) -> None:
    norm = build(name, 256).float()
    x = rows(4, 32, 256).bfloat16().requires_grad_()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    rows_kept = 4 * 32 * 4 * 6  # float32 numbers, one per row
    assert sum(kept.values()) <= x.nbytes + rows_kept + 4096


@pytest.mark.parametrize("name", ["dyt", "derf", "bhyt", "bhyt_exact"])
def test_scalars_gather_their_gradient_in_float32(name: str) -> None:
    """Over 2^17 bf16 values of one sign: a bf16 sum would stop growing early."""
    norm, wide = build(name, 256).float(), build(name, 256)
    for module in (norm, wide):
        for parameter in module.parameters():
            parameter.data.fill_(0.5)
    x = rows(512, 256).abs().bfloat16()
    norm(x).sum().backward()
    wide(x.double()).sum().backward()
    for key in norm.wide:
        found, wanted = getattr(norm, key).grad, getattr(wide, key).grad
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_first_values() -> None:
    def first(config: Any, role: Role, key: str) -> float | None:
        value: float | None = NORMS.build(config, 4, Site(role)).initial(key)
        return value

    roles: tuple[Role, ...] = ("attention", "feedforward", "final")
    assert [first(RMSNorm.Config(gain=0.1), role, "weight") for role in roles] == [0.1, 0.1, 1.0]
    assert [first(DyT.Config(), role, "alpha") for role in roles] == [0.5, 0.5, 0.5]
    dyt = DyT.Config(alpha=0.2, attention_alpha=0.8)
    assert [first(dyt, role, "alpha") for role in roles] == [0.8, 0.2, 0.2]
    assert first(dyt, "attention", "weight") is first(dyt, "attention", "bias") is None
    derf = Derf.Config(attention_alpha=0.3)
    assert [first(derf, "attention", key) for key in ("alpha", "shift")] == [0.3, 0.0]
    bhyt = BHyT.Config(attention_lambda=2.0)
    assert [first(bhyt, role, "lam") for role in roles[:2]] == [2.0, 1.0]


def test_where_a_norm_does_not_stand_there_is_an_rms_norm() -> None:
    standing = {
        name: {
            role
            for role in RMSNorm.roles
            if type(make_norm(NORMS.config_class(name)(), 4, Site(role))) is NORMS.component(name)
        }
        for name in NORMS.names()
    }
    blocks = {"attention", "feedforward"}
    vectors = {*blocks, "final", "input", "embedding"}
    assert standing["bhyt"] == standing["bhyt_exact"] == blocks
    assert standing["dyt"] == standing["derf"] == vectors
    assert standing["rms"] == standing["layer"] == {*vectors, "head"}
    for name in NORMS.names():
        for role in set(RMSNorm.roles) - standing[name]:
            norm = make_norm(NORMS.config_class(name)(), 4, Site(role))
            assert isinstance(norm, RMSNorm) and norm.gain == 1.0 and norm.eps == 1e-5
    own = make_norm(RMSNorm.Config(eps=0.5), 4, Site("projection"))
    assert isinstance(own, RMSNorm) and own.eps == 0.5


@pytest.mark.parametrize("name", NORMS.names())
def test_gradients(name: str) -> None:
    norm, x = build(name, 5), rows(2, 3, 5).requires_grad_()
    parameters = dict(norm.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(norm, dict(zip(parameters, values)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS.names())
def test_shape_and_dtype_are_the_inputs(name: str, dtype: torch.dtype) -> None:
    """Stored weights are at least fp32 whatever the input."""
    norm = build(name, 8)
    norm = norm if dtype == torch.float64 else norm.float()
    for shape in ((8,), (3, 8), (2, 3, 4, 8), (2, 0, 8)):
        x = rows(*shape).to(dtype).requires_grad_()
        out = norm(x)
        assert (out.shape, out.dtype) == (x.shape, dtype)
        out.sum().backward()
        assert x.grad is not None and (x.grad.shape, x.grad.dtype) == (x.shape, dtype)
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in norm.parameters())


@pytest.mark.parametrize("name", NORMS.names())
def test_rows_do_not_meet_and_layout_does_not_matter(name: str) -> None:
    norm, x = build(name, 6), rows(4, 3, 6)
    changed = x.clone()
    changed[1, 1] *= 7
    kept = torch.ones(4, 3, dtype=torch.bool)
    kept[1, 1] = False
    assert norm(changed)[kept].equal(norm(x)[kept])
    torch.testing.assert_close(norm(x.transpose(0, 1)), norm(x).transpose(0, 1))


def _bf16_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.bfloat16()


def _bf16_layer(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight.bfloat16()


# With gains that are powers of two, rounding the normalised value is the only rounding.
BF16 = 1.01 * 2.0**-8


def bf16_error(norm: Any, call: Callable[[Tensor], Tensor], offset: float) -> float:
    """Largest error of ``call`` against ``norm`` in float64 on the same bf16 input, relative to
    values that are not small."""
    x = (rows(16, 1024) + offset).bfloat16()
    with torch.no_grad():
        wanted = norm(x.double())
        return float(((call(x).double() - wanted).abs() / wanted.abs().clamp(min=0.1)).max())


@pytest.mark.parametrize("name", NORMS.names())
def test_narrow_inputs_have_wide_statistics(name: str) -> None:
    norm = NORMS.build(NORMS.config_class(name)(), 1024)
    for key, parameter in norm.named_parameters():
        parameter.data.fill_(0.0 if key == "bias" else 0.5)
    wide = copy.deepcopy(norm).double()
    for offset in (0.0, 30.0):
        assert bf16_error(wide, norm, offset) < BF16, offset


@pytest.mark.parametrize(("name", "naive"), [("rms", _bf16_rms), ("layer", _bf16_layer)])
def test_narrow_statistics_would_be_noticed(name: str, naive: Callable[..., Tensor]) -> None:
    norm = build(name, 1024)
    for key, parameter in norm.named_parameters():
        parameter.data.fill_(0.0 if key == "bias" else 0.5)
    assert bf16_error(norm, lambda x: naive(x, norm.weight), 30.0) > 1.5 * BF16


@pytest.mark.parametrize("name", NORMS.names())
def test_large_and_zero_rows_stay_finite(name: str) -> None:
    norm = build(name, 8).float()
    x = torch.stack([torch.zeros(8), torch.full((8,), 1e18), torch.full((8,), 1e-18)])
    x.requires_grad_()
    norm(x).sum().backward()
    assert norm(x).isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("component", "keys"),
    [
        (RMSNorm, ["eps", "gain"]),
        (LayerNorm, ["eps"]),
        (DyT, ["alpha", "attention_alpha"]),
        (Derf, ["alpha", "attention_alpha"]),
        (BHyTExact, ["attention_lambda", "feedforward_lambda", "kappa", "eps"]),
        (BHyT, ["attention_lambda", "kappa", "eps", "sequence_length", "refresh_every"]),
    ],
)
def test_problems(component: Any, keys: list[str]) -> None:
    assert component.Config().problems() == []
    for key in keys:
        assert component.Config(**{key: 3}).problems() == []
        assert component.Config(**{key: 0}).problems() == [(key, "must be positive, got 0")]
