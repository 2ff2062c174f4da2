"""Parameter and FLOP counts against torch's own counter and against known numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.attention import SequenceContext
from models.config import SIZES, ModelConfig
from models.flops import (
    forward_flops,
    parameter_count,
    training_flops_per_token,
    unit_sizes,
)
from models.losses import CrossEntropy
from models.mtp import MTPConfig
from models.transformer import Transformer, unit_names
from pretrain.activations import StageMeter
from pretrain.config import DataConfig, RunConfig, SourceConfig, TrainingConfig
from pretrain.decode import decode
from tests.components import choices

# With a vocabulary of 32,000; 7b and 70b are Llama 2's published counts.
PARAMETERS = {
    "1m": 8_930_432,
    "3m": 13_862_592,
    "10m": 27_918_400,
    "30m": 58_073_600,
    "125m": 109_529_856,
    "350m": 341_099_520,
    "1.3b": 1_364_297_728,
    "7b": 6_738_415_616,
    "70b": 68_976_648_192,
}
# (sequence length, FLOPs of the forward pass per token)
FLOPS = {
    "1m": (256, 10_190_848),
    "3m": (256, 16_220_160),
    "10m": (512, 39_280_640),
    "30m": (512, 91_750_400),
    "125m": (1024, 256_770_048),
    "350m": (2048, 883_425_280),
    "1.3b": (2048, 2_999_975_936),
    "7b": (4096, 15_361_638_400),
    "70b": (4096, 148_163_788_800),
}
BATCH, SEQUENCE = 2, 12


def sized(name: str, vocab_size: int = 32_000, **more: Any) -> ModelConfig:
    return decode(ModelConfig, {**SIZES[name], "vocab_size": vocab_size, **more})


def tiny(norm: str, block: str, position: str, feedforward: str, qk_norm: bool) -> ModelConfig:
    """Grouped queries, a vocabulary with padding, and a head width unlike the rest."""
    tree = {
        "vocab_size": 37,
        "vocab_multiple": 16,
        "hidden": 20,
        "layers": 2,
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 6, "qk_norm": qk_norm},
        "norm": norm,
        "block": block,
        "position": position,
        "feedforward": {"type": feedforward, "hidden": 28},
        "tie_embeddings": qk_norm,
    }
    return decode(ModelConfig, tree)


def real_model(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def counted(config: ModelConfig) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass, as torch counts them."""
    model = real_model(config)
    assert model.head is not None
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    context = SequenceContext(torch.arange(SEQUENCE))
    forward, backward = (FlopCounterMode(display=False) for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel for CPUs is not counted
        with forward:
            hidden = model.depth_outputs(ids, context)
            loss = sum(model.head.logits(y).sum() for y in hidden)
        with backward:
            assert isinstance(loss, torch.Tensor)
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_the_ladder_is_complete() -> None:
    assert set(PARAMETERS) == set(FLOPS) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_its_exact_counts(name: str) -> None:
    config = sized(name)
    length, flops = FLOPS[name]
    assert parameter_count(config) == PARAMETERS[name]
    assert forward_flops(config, length) == flops * length
    assert training_flops_per_token(config, length) == 3 * flops


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_module(name: str) -> None:
    config = sized(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_padding_is_not_counted() -> None:
    config = sized("1m", vocab_size=100)
    with torch.device("meta"):
        model = Transformer(config)
    stored = sum(p.numel() for p in model.parameters())
    assert stored - parameter_count(config) == 2 * 28 * config.hidden


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("names", choices(), ids=lambda names: "-".join(names.values()))
def test_flops_are_those_that_torch_counts(names: dict[str, str], qk_norm: bool) -> None:
    config = tiny(**names, qk_norm=qk_norm)
    forward, backward = counted(config)
    expected = BATCH * forward_flops(config, SEQUENCE)
    assert forward == expected
    # The gradient of a learned frequency is a product that has no partner in the forward pass.
    pairs = config.attention.head_dim // 2
    heads = config.attention.heads + config.attention.kv_heads
    learned = names["position"] in ("adarope", "lerope")
    tables = 2 * BATCH * SEQUENCE * pairs * heads * config.layers if learned else 0
    # That of a noise level is not made: each block and the final norm embed it.
    embeds = names["block"] == "adaln"
    levels = 2 * BATCH * 128 * 256 * (config.layers + 1) if embeds else 0
    assert 2 * expected <= backward + levels <= 2 * expected + tables
    counted_before = training_flops_per_token(config, SEQUENCE) * BATCH * SEQUENCE
    assert counted_before == forward + 2 * expected


MTP = [
    {"depth": 1},
    {"depth": 4, "embedding": "own", "input": "norm"},
    {"depth": 3, "kind": "repeated", "embedding": "own"},
    {"depth": 2, "kind": "parallel"},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mtp", MTP, ids=str)
def test_multi_token_prediction_is_counted(mtp: dict[str, Any], tied: bool) -> None:
    """Operations at every depth, parameters once; the shared embedding and head add none."""
    plain = tiny("rms", "pre", "rope", "swiglu", tied)
    config = replace(plain, mtp=MTPConfig(**mtp))
    forward, backward = counted(config)
    assert forward == BATCH * forward_flops(config, SEQUENCE)
    assert backward == 2 * forward
    model = Transformer(config)
    padded = sum(
        "embedding.weight" in name or "head" in name for name, _ in model.named_parameters()
    )
    stored = sum(p.numel() for p in model.parameters())
    assert parameter_count(config) == stored - padded * (48 - 37) * 20
    sizes, before = unit_sizes(config, SEQUENCE), unit_sizes(plain, SEQUENCE)
    assert list(sizes) == unit_names(config)
    assert {name: size for name, size in sizes.items() if not name.startswith("mtp")} == before
    block, head = before["blocks.0"], before["head"]
    chained = mtp.get("kind") != "parallel"
    for depth in range(1, config.mtp.depth + 1):
        unit, norm = sizes[f"mtp.{depth}"], sizes[f"mtp_norms.{depth}"]
        assert unit.flops == block.flops + chained * 2 * (2 * 20 * 20) * SEQUENCE
        if depth in config.mtp.modules:
            own = 37 * 20 if "embedding" in mtp else 0
            assert unit.parameters == block.parameters + chained * (2 * 20 * 20 + 2 * 20) + own
        else:
            assert unit.parameters == 0
        assert norm.parameters == (20 if depth in config.mtp.modules else 0)
        assert norm.flops == 0
    added = config.mtp.depth * (sizes["mtp.1"].flops + head.flops)
    assert forward_flops(config, SEQUENCE) == forward_flops(plain, SEQUENCE) + added


@pytest.mark.parametrize("name", ["1m", "3m"])
def test_flops_of_the_small_sizes(name: str) -> None:
    config = sized(name, vocab_size=300)
    forward, backward = counted(config)
    assert forward == BATCH * forward_flops(config, SEQUENCE)
    assert backward == 2 * forward


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_chunked_loss_costs_what_logits_cost(softcap: float | None) -> None:
    """Its forward pass does the backward products too: three times the head in all.  The last
    one, an in-place addmm, is unknown to torch's counter."""
    config = sized("1m", vocab_size=300, logit_softcap=softcap)
    model = real_model(config)
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    context = SequenceContext(torch.arange(SEQUENCE))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = model(ids, context)
        assert model.head is not None
        total, _ = model.head(hidden, {"labels": ids}, [CrossEntropy(float(ids.numel()))])
        total.backward()
    tokens = BATCH * SEQUENCE
    uncounted = 2 * tokens * config.vocab_size * config.hidden
    wanted = training_flops_per_token(config, SEQUENCE) * tokens
    assert counter.get_total_flops() + uncounted == wanted


# The scaling study of diffusion language models (arXiv 2602.15014), from its profiler's files:
# (width, layers, heads); of a sequence of 2,048 tokens, multiply-adds in units of 1e9 and floating-
# point operations; all parameters, to five digits.
STUDY = {
    "6M": ((256, 6, 4), 26.4427, 53.026e9, 22_450_400),
    "472M": ((1280, 18, 10), 808.683, 1618.7e9, 454_224_000),
    "2121M": ((2176, 28, 17), 3400.9, 6805.4e9, 1_778_500_000),
}


@pytest.mark.parametrize("name", STUDY)
def test_the_study_s_models_have_its_counts(name: str) -> None:
    """2 L (12 n d² + V d): linear maps and the head alone.  Ours counts attention's products and
    the modulation as well; its operations include element-wise ones, at most 0.3 %."""
    (width, layers, heads), macs, flops, parameters = STUDY[name]
    path = Path(__file__).parents[2] / "recipes" / "sdllm-6m.yaml"
    config = decode(
        ModelConfig, {**yaml.safe_load(path.read_text())["model"], "vocab_size": 32_001}
    )
    config = replace(
        config,
        hidden=width,
        layers=layers,
        attention=replace(config.attention, heads=heads, kv_heads=heads, head_dim=width // heads),
        feedforward=replace(config.feedforward, hidden=4 * width),
    )
    formula = 2 * 2048 * (12 * layers * width**2 + 32_000 * width)
    attention = layers * 4 * 2048**2 * width
    condition = layers * 6 * width * 128 + 2 * width * 128 + (layers + 1) * (256 + 128) * 128
    assert forward_flops(config, 2048) == formula + attention + 2 * condition
    assert formula == pytest.approx(2e9 * macs, rel=2e-4)
    assert formula == pytest.approx(flops, rel=3e-3)
    with_head_bias = parameter_count(config) + 32_001
    assert with_head_bias == pytest.approx(parameters, rel=5e-5)
    assert config.init.embedding_std == pytest.approx((3 * 256) ** -0.5, rel=1e-4)


def test_units_add_up() -> None:
    config = sized("1m")
    sizes = unit_sizes(config, 64)
    assert list(sizes) == unit_names(config)
    assert sum(size.flops for size in sizes.values()) == forward_flops(config, 64)
    assert sizes["embedding"].flops == 0
    assert sizes["head"].flops == 2 * 32_000 * 128 * 64


@pytest.mark.parametrize("name", ["1m", "125m", "7b"])
def test_the_quick_estimate_of_activations(name: str) -> None:
    """``UnitSize.activations`` is within 5 % of what a block keeps on float32."""
    config = sized(name)
    run = RunConfig(
        model=config,
        data=DataConfig(train=(SourceConfig(path="x"),)),
        training=TrainingConfig(sequence_length=512, micro_batch=1, batch_tokens=512, steps=1),
    )
    kept = StageMeter(run).profile(["blocks.0", "blocks.1"]).profiles[1].kept
    estimate = unit_sizes(config, 512)["blocks.0"].activations * 4
    assert estimate == pytest.approx(kept, rel=0.05)
