"""The model as a list of units: parts compose, names are stable, a tied head has one parameter."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.attention import AttentionConfig, SequenceContext
from models.blocks import BLOCKS
from models.config import SIZES, InitConfig, ModelConfig
from models.feedforward import SwiGLU
from models.losses import CrossEntropy
from models.norms import LayerNorm
from models.transformer import Transformer, logical_name, unit_names
from pretrain.decode import decode

CONFIG = ModelConfig(
    vocab_size=83,
    vocab_multiple=8,
    hidden=12,
    layers=3,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=4, qk_norm=True),
    feedforward=SwiGLU.Config(hidden=10),
)
TIED = replace(CONFIG, tie_embeddings=True)
LENGTH = 7


def filled(model: Transformer) -> Transformer:
    """Float64 weights that depend on the name alone."""
    model.double()
    for name, parameter in model.named_parameters():
        seed = sum(map(ord, logical_name(name, model.config)))
        g = torch.Generator().manual_seed(seed)
        size = 20 if name.startswith("shared") else 2  # over so many inputs
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64) / size
    return model


def ids() -> Tensor:
    return torch.randint(0, 83, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def context() -> SequenceContext:
    return SequenceContext(torch.arange(LENGTH))


BLOCK_NAMES = """attention_norm.weight attention.q_proj.weight attention.k_proj.weight
attention.v_proj.weight attention.o_proj.weight attention.q_norm.weight attention.k_norm.weight
feedforward_norm.weight feedforward.gate_proj.weight feedforward.up_proj.weight
feedforward.down_proj.weight""".split()
NAMES = [
    "embedding.weight",
    *(f"blocks.{layer}.{name}" for layer in range(3) for name in BLOCK_NAMES),
    "final_norm.weight",
    "head.weight",
]


def test_names_are_stable() -> None:
    """Checkpoints and initial weights hang on them."""
    assert unit_names(CONFIG) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "final_norm",
                                  "head"]  # fmt: skip
    assert [name for name, _ in Transformer(CONFIG).named_parameters()] == NAMES
    assert [name for name, _ in Transformer(TIED).named_parameters()] == NAMES[:-1]
    other = replace(CONFIG, norm=LayerNorm.Config(), attention=AttentionConfig(2, 1, 4, True, True))
    added = {name for name, _ in Transformer(other).named_parameters()} - set(NAMES)
    assert {name for name in added if ".1." in name} == {
        f"blocks.1.{part}.bias"
        for part in ("attention_norm", "feedforward_norm", "attention.q_norm", "attention.k_norm",
                     "attention.q_proj", "attention.k_proj", "attention.v_proj")
    }  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 6))
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_parts_compose_to_the_whole(config: ModelConfig, cut: int) -> None:
    """Same names, same bits: output, loss, and the gradients added over the parts."""
    whole, units = filled(Transformer(config)), unit_names(config)
    parts = [filled(Transformer(config, part)) for part in (units[:cut], units[cut:])]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert names == NAMES  # a tied head away from the embedding owns a copy
    labels = {"labels": ids().roll(-1, 1)}
    terms = [CrossEntropy(14.0)]
    assert whole.head is not None and parts[1].head is not None
    hidden = whole(ids(), context())
    total, _ = whole.head(hidden, labels, terms)
    passed = parts[0](ids(), context())
    split_hidden = parts[1](passed, context())
    split_total, _ = parts[1].head(split_hidden, labels, terms)
    assert split_hidden.equal(hidden) and split_total.equal(total)
    assert parts[1].head.logits(split_hidden).equal(whole.logits(ids()))
    total.backward()
    split_total.backward()
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            name = logical_name(name, config)
            assert parameter.grad is not None
            gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad
    assert set(gradients) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-15)


def test_every_unit_alone() -> None:
    whole = filled(Transformer(CONFIG))
    x: Any = ids()
    for unit in unit_names(CONFIG)[:-1]:
        x = filled(Transformer(CONFIG, [unit]))(x, context())
    assert x.equal(whole(ids(), context()))
    with pytest.raises(AssertionError, match=r"unknown units \{'blocks.3'\}"):
        Transformer(CONFIG, ["blocks.3"])


def test_tied_head_is_one_parameter() -> None:
    tied = filled(Transformer(TIED))
    assert tied.embedding is not None and tied.head is not None
    assert tied.head.matrix() is tied.embedding.weight
    assert list(tied.head.parameters()) == []
    assert len(list(tied.parameters())) == len(list(Transformer(CONFIG).parameters())) - 1
    before = tied.logits(ids())
    tied.embedding.weight.data[5] += 1
    changed = (tied.logits(ids()) != before).any(0).any(0)
    assert changed[5]  # the head reads it
    tied.embedding.weight = nn.Parameter(torch.zeros_like(tied.embedding.weight))
    assert not tied.logits(ids()).any()  # and goes on reading it when it is replaced


def test_logical_names() -> None:
    assert logical_name("head.weight", TIED) == "embedding.weight"
    assert logical_name("head.weight", CONFIG) == "head.weight"
    assert logical_name("blocks.0.attention.q_proj.weight", TIED).startswith("blocks.0")


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_logits_are_of_the_true_vocabulary(softcap: float | None) -> None:
    model = filled(Transformer(replace(CONFIG, logit_softcap=softcap)))
    assert model.embedding is not None and model.head is not None
    assert model.embedding.weight.shape == model.head.weight.shape == (88, 12)
    logits = model.logits(ids())
    assert logits.shape == (2, LENGTH, 83)
    plain = model(ids(), context()) @ model.head.weight[:83].T
    wanted = plain if softcap is None else 1.5 * torch.tanh(plain / 1.5)
    torch.testing.assert_close(logits, wanted, rtol=1e-13, atol=1e-14)
    model.head.weight.data[83:] = torch.nan  # padding takes part in nothing
    assert model.logits(ids()).equal(logits)
    assert model.bfloat16().logits(ids()).dtype == torch.float32


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, labels = filled(Transformer(CONFIG)), ids().roll(-1, 1)
    assert model.head is not None
    total, sums = model.head(model(ids(), context()), {"labels": labels}, [CrossEntropy(7.0)])
    wanted = nn.functional.cross_entropy(model.logits(ids()).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(total, wanted * 2, rtol=1e-13, atol=0)
    torch.testing.assert_close(sums["cross_entropy"], wanted * 14, rtol=1e-13, atol=0)


@pytest.mark.parametrize("residual", ["compute", "float32"])
def test_residual_stream_dtype(residual: Any) -> None:
    model = filled(Transformer(replace(CONFIG, residual_dtype=residual))).bfloat16()
    assert model.embedding is not None
    wide = torch.float32 if residual == "float32" else torch.bfloat16
    assert model.embedding(ids()).dtype == wide
    assert model(ids(), context()).dtype == wide


@pytest.mark.parametrize("name", BLOCKS.names())
def test_causal_through_the_whole_model(name: str) -> None:
    model = filled(Transformer(replace(CONFIG, block=BLOCKS.config_class(name)())))
    changed = ids()
    changed[:, 4] = (changed[:, 4] + 1) % 83
    before, after = model.logits(ids()), model.logits(changed)
    assert before[:, :4].equal(after[:, :4])
    assert not before[:, 4:].isclose(after[:, 4:]).any()


# Counted by hand from the shapes: 2·V·D + D + L·(2·D·(heads + kv)·d + 3·D·F + 2·D), V = 32,000
PARAMETERS = {"7b": 6_738_415_616, "70b": 68_976_648_192}


@pytest.mark.parametrize("size", SIZES)
def test_every_size_builds_on_the_meta_device(size: str) -> None:
    config = decode(ModelConfig, {**SIZES[size], "vocab_size": 32_000})
    start = time.monotonic()
    with torch.device("meta"):
        model = Transformer(config)
    assert time.monotonic() - start < 20, "something allocates"
    assert all(parameter.is_meta for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    shape, heads = config.attention, config.attention.heads + config.attention.kv_heads
    block = 2 * config.hidden * heads * shape.head_dim + 3 * config.hidden * (
        config.feedforward.hidden
    )
    vocabulary = (1 if config.tie_embeddings else 2) * 32_000 * config.hidden
    norms = config.hidden * (2 * config.layers + 1)
    assert count == vocabulary + norms + config.layers * block
    assert count == PARAMETERS.get(size, count)
    millions = {"b": 1000, "m": 1}[size[-1]] * float(size[:-1])
    if millions >= 100:  # the smaller ones are named after their size with a small vocabulary
        assert count / 1e6 == pytest.approx(millions, rel=0.15)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (ModelConfig(), []),
        (ModelConfig(vocab_size=0, hidden=0, layers=0, vocab_multiple=0),
         ["vocab_size", "hidden", "layers", "vocab_multiple"]),
        (ModelConfig(logit_softcap=0.0), ["logit_softcap"]),
    ],
)  # fmt: skip
def test_problems(config: ModelConfig, paths: list[str]) -> None:
    assert [path for path, _ in config.problems()] == paths


def test_padding_and_init_config() -> None:
    assert CONFIG.padded_vocab_size == 88
    assert replace(CONFIG, vocab_size=88).padded_vocab_size == 88
    assert replace(CONFIG, vocab_size=89).padded_vocab_size == 96
    assert [path for path, _ in InitConfig(std=0.0).problems()] == ["std"]
