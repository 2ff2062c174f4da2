"""Feed-forward layers: the papers' formulas, gradients, shares of features."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.collectives import Axis, bound
from models.feedforward import FEEDFORWARDS

WIDTH, HIDDEN = 6, 8
DENSE = ("geglu", "gelu", "swiglu")


def build(name: str, **options: Any) -> Any:
    config = FEEDFORWARDS.config_class(name)(hidden=HIDDEN, **options)
    module = FEEDFORWARDS.build(config, WIDTH).double()
    for index, parameter in enumerate(module.parameters()):
        g = torch.Generator().manual_seed(index)
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return module


def rows() -> Tensor:
    g = torch.Generator().manual_seed(9)
    return torch.randn(2, 3, WIDTH, generator=g, dtype=torch.float64)


def test_swiglu_is_the_formula() -> None:
    module, x = build("swiglu"), rows()
    gate, up = x @ module.gate_proj.weight.T, x @ module.up_proj.weight.T
    wanted = (gate / (1 + (-gate).exp()) * up) @ module.down_proj.weight.T
    torch.testing.assert_close(module(x), wanted, rtol=1e-13, atol=1e-14)


def test_gelu_is_the_exact_formula() -> None:
    module, x = build("gelu"), rows()
    up = x @ module.up_proj.weight.T
    wanted = (up * (1 + torch.erf(up / math.sqrt(2))) / 2) @ module.down_proj.weight.T
    torch.testing.assert_close(module(x), wanted, rtol=1e-13, atol=1e-14)


def test_gelu_with_biases_and_its_tanh_form() -> None:
    module, x = build("gelu", bias=True, tanh=True), rows()
    up = x @ module.up_proj.weight.T + module.up_proj.bias
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    wanted = (up / 2 * (1 + inner.tanh())) @ module.down_proj.weight.T + module.down_bias
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-13)


def test_geglu_is_the_tanh_form() -> None:
    module, x = build("geglu"), rows()
    gate, up = x @ module.gate_proj.weight.T, x @ module.up_proj.weight.T
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    wanted = (gate / 2 * (1 + inner.tanh()) * up) @ module.down_proj.weight.T
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", DENSE)
def test_gradients(name: str) -> None:
    module, x = build(name), rows()[:1, :2].clone().requires_grad_()
    parameters = dict(module.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(parameters, values)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


class Rank(Axis):
    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in DENSE), ("gelu", {"bias": True})]
)
def test_shares_of_features_add_up_to_the_whole(name: str, options: Any) -> None:
    x, total = rows(), torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    for rank in range(2):
        share = build(name, **options)
        for key, parameter in share.named_parameters():
            dim = {"column": 0, "row": 1, "replicated": None}[share.plan[key]]
            if dim is not None:
                parameter.data = parameter.data.chunk(2, dim)[rank].contiguous()
        with bound({"tp": Rank(rank)}):
            total += share(x)
    torch.testing.assert_close(total, build(name, **options)(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FEEDFORWARDS.names())
def test_problems(name: str) -> None:
    config = FEEDFORWARDS.config_class(name)
    assert config(hidden=1).problems() == []
    assert config(hidden=0).problems() == [("hidden", "must be positive, got 0")]
