"""Where norms and residuals sit: each placement is its formula, from its own parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import AttentionConfig, SequenceContext
from models.blocks import BLOCKS
from models.config import ModelConfig
from models.feedforward import SwiGLU
from models.transformer import Transformer, build_block

CONFIG = ModelConfig(
    vocab_size=11,
    hidden=12,
    layers=3,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=4),
    feedforward=SwiGLU.Config(hidden=10),
)
LENGTH = 5


def config_of(name: str) -> ModelConfig:
    return replace(CONFIG, block=BLOCKS.config_class(name)())


def build(name: str) -> Any:
    block = build_block(config_of(name), 1, "auto").double()
    for index, parameter in enumerate(block.parameters()):
        g = torch.Generator().manual_seed(index)
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return block


def inputs() -> tuple[Tensor, SequenceContext]:
    g = torch.Generator().manual_seed(99)
    x = torch.randn(2, LENGTH, CONFIG.hidden, generator=g, dtype=torch.float64)
    return x, SequenceContext(torch.arange(LENGTH))


def test_pre_is_the_formula() -> None:
    block, (x, context) = build("pre"), inputs()
    a, n1, f, n2 = block.attention, block.attention_norm, block.feedforward, block.feedforward_norm
    middle = x + a(n1(x), context)
    assert block(x, context).equal(middle + f(n2(middle)))


def test_post_is_the_formula() -> None:
    block, (x, context) = build("post"), inputs()
    a, n1, f, n2 = block.attention, block.attention_norm, block.feedforward, block.feedforward_norm
    middle = n1(x + a(x, context))
    assert block(x, context).equal(n2(middle + f(middle)))


@pytest.mark.parametrize("name", BLOCKS.names())
def test_every_parameter_takes_part(name: str) -> None:
    block, (x, context) = build(name), inputs()
    out = block(x.requires_grad_(), context)
    assert out.shape == x.shape
    (out * inputs()[0].flip(1)).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    for key, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", BLOCKS.names())
def test_later_tokens_change_nothing(name: str) -> None:
    block, (x, context) = build(name), inputs()
    changed = x.clone()
    changed[:, 3:] += 1
    before, after = block(x, context), block(changed, context)
    assert before[:, :3].equal(after[:, :3])
    assert not before[:, 3:].isclose(after[:, 3:]).any()


@pytest.mark.parametrize("name", BLOCKS.names())
def test_final_norm_only_where_the_output_is_not_normalised(name: str) -> None:
    model = Transformer(config_of(name))
    wanted = BLOCKS.component(name).final_norm  # type: ignore[attr-defined]
    assert (model.final_norm is not None) == wanted
    names = {key for key, _ in model.named_parameters()}
    assert ("final_norm.weight" in names) == wanted


def test_which_blocks_want_a_final_norm() -> None:
    assert BLOCKS.component("pre").final_norm is True  # type: ignore[attr-defined]
    assert BLOCKS.component("post").final_norm is False  # type: ignore[attr-defined]
