"""Norms: the papers' formulas, torch's own, gradients, and statistics that stay in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.norms import NORMS, LayerNorm, RMSNorm


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


@pytest.mark.parametrize("component", [RMSNorm, LayerNorm])
def test_problems(component: Any) -> None:
    assert component.Config(eps=1e-6).problems() == []
    assert component.Config(eps=0.0).problems() == [("eps", "must be positive, got 0.0")]
