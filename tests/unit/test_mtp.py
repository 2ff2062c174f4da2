"""Multi-token prediction: wiring, gradients against plain autograd, names, initial weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import AttentionConfig, SequenceContext
from models.blocks import PostNormBlock
from models.config import ModelConfig
from models.decoding import Sampling, generate
from models.feedforward import SwiGLU
from models.initialize import initialize_, unpadded_shape
from models.mtp import MTPConfig, fork, tokens_ahead
from models.norms import LayerNorm
from models.transformer import Transformer, module_name, unit_inputs, unit_names
from parallel.pipeline.units import Unit, data_flow, model_units
from parallel.stage import unit_name
from parallel.tensor import parameter_plans
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal

BASE = ModelConfig(
    vocab_size=83,
    vocab_multiple=8,
    hidden=12,
    layers=3,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=4),
    feedforward=SwiGLU.Config(hidden=10),
)
LENGTH = 9
CHAINS = [
    MTPConfig(3, kind, embedding, reads, order)
    for kind, embedding, reads, order in itertools.product(
        ("sequential", "repeated"),
        ("shared", "own"),
        ("block", "norm"),
        ("embedding_first", "hidden_first"),
    )
]
KINDS = [MTPConfig(3), MTPConfig(3, input="norm"), MTPConfig(3, "parallel"),
         MTPConfig(3, "repeated", "own")]  # fmt: skip


def named(mtp: MTPConfig) -> str:
    return f"{mtp.kind}-{mtp.embedding}-{mtp.input}-{mtp.concat}"


def filled(config: ModelConfig, units: Any = None, dtype: torch.dtype = torch.float64) -> Any:
    """Weights that depend on the logical name alone."""
    model = Transformer(config, units).to(dtype)
    for name, parameter in model.named_parameters():
        shape = unpadded_shape(config, name, parameter.shape)
        initialize_(parameter.data, config, 5, name, [0] * len(shape), shape)
        if parameter.dim() > 1:
            parameter.data.mul_(15)
        else:
            parameter.data.add_(torch.arange(len(parameter)) % 3 / 5)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 83, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def context() -> SequenceContext:
    return SequenceContext(torch.arange(LENGTH))


# -------------------------------------------------------------------- against plain autograd


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def expected_losses(model: Transformer, text: Tensor) -> list[Tensor]:
    """Mean cross-entropy of every depth, written down once more from the papers."""
    config, mtp = model.config, model.config.mtp
    weight = dict(model.named_parameters())
    ids = text[:, :-1]
    x = weight["embedding.weight"][ids]
    trunk = []
    for block in model.blocks.values():
        x = block(x, context())
        trunk.append(x)
    raw, normed = [x], [rms(x, weight["final_norm.weight"])]
    for depth in range(1, mtp.depth + 1):
        at = f"{1 if mtp.kind == 'repeated' else depth}"
        if mtp.kind == "parallel":
            hidden = model.mtp[at](trunk[-2], context())
        else:
            # beyond the end something else than the model takes: nobody may see it
            ahead = torch.full_like(ids, 7)
            for i in range(LENGTH - depth):
                ahead[:, i] = ids[:, i + depth]
            own = mtp.embedding == "own"
            table = weight[f"mtp.{at}.embedding.weight" if own else "embedding.weight"]
            e = rms(table[ahead], weight[f"mtp.{at}.embedding_norm.weight"])
            source = raw[-1] if mtp.input == "block" else normed[-1]
            h = rms(source, weight[f"mtp.{at}.hidden_norm.weight"])
            pair = [e, h] if mtp.concat == "embedding_first" else [h, e]
            merged = torch.cat(pair, -1) @ weight[f"mtp.{at}.projection.weight"].T
            hidden = model.mtp[at].block(merged, context())  # type: ignore[operator]
        raw.append(hidden)
        normed.append(rms(hidden, weight[f"mtp_norms.{at}.weight"]))
    matrix = weight["embedding.weight" if config.tie_embeddings else "head.weight"][:83]
    return [
        F.cross_entropy(
            (y[:, : LENGTH - k] @ matrix.T).flatten(0, 1), text[:, k + 1 :].flatten()
        )
        for k, y in enumerate(normed)
    ]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mtp", [*CHAINS, MTPConfig(3, "parallel")], ids=named)
def test_losses_and_gradients_are_those_of_plain_autograd(mtp: MTPConfig, tied: bool) -> None:
    config = replace(BASE, mtp=mtp, tie_embeddings=tied)
    model, text = filled(config), tokens()
    objective = build_objective(Causal.Config(mtp_weight=0.6), config)
    batch = objective.micro_batch(text, None, range(2))
    terms = objective.terms(objective.counts([batch]))
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, Tensor] = {}
    for depth, hidden in enumerate(model.depth_outputs(batch.ids, context())):
        judged = [term for term in terms if term.depth == depth]
        part, found = model.head(hidden, batch.fields, judged)
        total, sums = total + part, sums | found
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    losses = expected_losses(model, text)
    wanted = losses[0] + 0.6 / 3 * sum(losses[1:])
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-13, atol=0)
    for term, loss in zip(terms, losses, strict=True):
        torch.testing.assert_close(sums[term.name] / term.normalizer, loss, rtol=1e-13, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad.norm() > 0, name
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-13, name


def test_every_convention_changes_the_result() -> None:
    """Otherwise the comparison above could not tell them apart."""
    found: list[Tensor] = []
    for mtp in CHAINS[:8]:  # sequential
        losses = torch.stack(expected_losses(filled(replace(BASE, mtp=mtp)), tokens()))
        assert all((losses[1:] - other).abs().max() > 1e-3 for other in found)
        found.append(losses[1:])


def test_a_repeated_block_sums_its_gradients_over_depths() -> None:
    """The same weights as separate blocks give the shares that the one block adds up."""
    shared = filled(replace(BASE, mtp=MTPConfig(3, "repeated")))
    apart = filled(replace(BASE, mtp=MTPConfig(3)))
    for name, parameter in apart.named_parameters():
        source = module_name(shared.config, ".".join(name.split(".")[:2]))
        part = name.split(".", 2)[2] if name.startswith("mtp") else ""
        source = f"{source}.{part}" if part else name
        parameter.data.copy_(dict(shared.named_parameters())[source].data)
    direction = torch.randn(4, 2, LENGTH, 12, dtype=torch.float64)
    for model in (shared, apart):
        outputs = model.depth_outputs(tokens()[:, :-1], context())
        (torch.stack(outputs) * direction).sum().backward()
    shares = dict(apart.named_parameters())
    for name, parameter in shared.named_parameters():
        if name.startswith("mtp"):
            head, _, part = name.split(".", 2)
            wanted = sum(shares[f"{head}.{depth}.{part}"].grad for depth in (1, 2, 3))
            assert shares[name].grad.norm() > 0
        else:
            wanted = shares[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-11, atol=1e-13)


# --------------------------------------------------------------------------------------- fork


def test_fork_adds_gradients_in_the_order_of_its_aliases() -> None:
    large, small = 2.0**30, 1.0  # float32 loses the small one beside the large one
    for gradients in itertools.permutations([large, -large, small]):
        wanted = (torch.tensor(gradients[0]) + gradients[1]) + gradients[2]
        for built in itertools.permutations(range(3)):
            x = torch.zeros((), requires_grad=True)
            aliases = fork(x * 1, 3)
            total = sum(aliases[i] * gradients[i] for i in built)
            assert isinstance(total, Tensor)
            total.backward()
            assert x.grad is not None and x.grad.equal(wanted)


def test_autograd_alone_would_depend_on_the_graph() -> None:
    found = set()
    for built in itertools.permutations([2.0**30, -(2.0**30), 1.0]):
        x = torch.zeros((), requires_grad=True)
        y = x * 1
        readers = [y * gradient for gradient in built]
        torch.autograd.backward(readers)
        assert x.grad is not None
        found.add(x.grad.item())
    assert len(found) > 1


def test_fork_of_one_and_unused_aliases() -> None:
    x = torch.ones(3, requires_grad=True)
    assert fork(x, 1)[0] is x
    used, _ = fork(x * 1, 2)
    used.sum().backward()
    assert x.grad is not None and x.grad.equal(torch.ones(3))
    with torch.no_grad():
        assert all(alias.equal(x) for alias in fork(x, 4))
    assert len(fork(x, 4)) == 4


def test_gradients_of_the_trunk_are_added_in_unit_order() -> None:
    config = replace(BASE, mtp=MTPConfig(4, "parallel"))
    model = filled(config, dtype=torch.float32)
    ids = tokens()[:, :-1]
    captured: list[Tensor] = []

    def capture(module: Any, arguments: Any, output: Tensor) -> None:
        output.register_hook(captured.append)

    model.blocks["1"].register_forward_hook(capture)
    directions = torch.randn(5, 2, LENGTH, 12, generator=torch.Generator().manual_seed(1))
    outputs = model.depth_outputs(ids, context())
    torch.autograd.backward([(y * d).sum() for y, d in zip(reversed(outputs), directions.flip(0))])
    trunk = model.blocks["1"](model.blocks["0"](model.embedding(ids), context()), context())
    shares = []
    for depth, direction in enumerate(directions):
        x = trunk.detach().requires_grad_()
        last = model.blocks["2"] if depth == 0 else model.mtp[str(depth)]
        norm = model.final_norm if depth == 0 else model.mtp_norms[str(depth)]
        (norm(last(x, context())) * direction).sum().backward()
        assert x.grad is not None
        shares.append(x.grad)
    ordered = shares[0] + shares[1] + shares[2] + shares[3] + shares[4]
    assert captured[-1].equal(ordered)
    assert not ordered.equal(shares[4] + shares[3] + shares[2] + shares[1] + shares[0])


# --------------------------------------------------------------------------- documents, window


@pytest.mark.parametrize("mtp", KINDS, ids=named)
def test_losses_of_a_document_do_not_see_the_others(mtp: MTPConfig) -> None:
    """With documents=mask no depth predicts, or reads, across a boundary; attend does both."""
    config = replace(BASE, mtp=mtp)
    model, text = filled(config), tokens()
    documents = torch.tensor([[0] * 5 + [1] * 5, [0] * 2 + [1] * 8])
    changed = text.clone()
    changed[documents == 1] = (changed[documents == 1] + 11) % 83

    def losses(value: Tensor, mode: Any) -> list[Tensor]:
        objective = build_objective(Causal.Config(documents=mode), config)
        batch = objective.micro_batch(value, documents, range(2))
        outputs = model.depth_outputs(batch.ids, batch.context())
        rows = []
        for depth, hidden in enumerate(outputs):
            labels = batch.fields[f"labels_{depth}" if depth else "labels"]
            logits = model.head.logits(hidden).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="none")
            rows.append(loss.view(labels.shape) * (documents[:, :-1] == 0))
        return rows

    for depth, (before, after) in enumerate(zip(losses(text, "mask"), losses(changed, "mask"))):
        assert before.equal(after)
        assert int(before.count_nonzero()) == max(4 - depth, 0) + max(1 - depth, 0)
    for before, after in zip(losses(text, "attend"), losses(changed, "attend")):
        assert not before.equal(after)


def test_tokens_ahead() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert tokens_ahead(ids, 1).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert tokens_ahead(ids, 2).tolist() == [[3, 0, 0], [6, 0, 0]]
    assert tokens_ahead(ids, 4).tolist() == [[0, 0, 0], [0, 0, 0]]


# ------------------------------------------------------------------------------ units and parts


@pytest.mark.parametrize("mtp", KINDS, ids=named)
def test_units_are_those_of_the_pipeline(mtp: MTPConfig) -> None:
    config = replace(BASE, mtp=mtp)
    units = model_units(config.layers, mtp.depth, 2)
    names = list(dict.fromkeys(map(unit_name, units)))
    assert names == unit_names(config)
    flow = data_flow(units, mtp.wiring)
    sources = {
        unit_name(unit): unit_name(source)
        for unit, source in flow.items()
        if source is not None and unit.kind != "h"
    }
    assert sources == unit_inputs(config)
    assert flow[Unit("h", 2, 1)] == Unit("n", 2)


def steps(config: ModelConfig, part: Any) -> Iterator[tuple[str, Tensor]]:
    """Run every unit with ``part(name)``, the model that holds it."""
    values: dict[str, Tensor] = {}
    for name in unit_names(config)[:-1]:
        x = values.get(unit_inputs(config).get(name, ""))
        values[name] = part(name).run_unit(name, x, tokens()[:, :-1], context())
        yield name, values[name]


@pytest.mark.parametrize("block", [BASE.block, PostNormBlock.Config()], ids=["pre", "post"])
@pytest.mark.parametrize("mtp", [m for m in KINDS if m.input == "block"], ids=named)
def test_every_unit_alone(mtp: MTPConfig, block: Any) -> None:
    """A model of one unit has the modules that it needs, named as in the whole one."""
    config = replace(BASE, mtp=mtp, block=block)
    whole = filled(config)
    known = {name for name, _ in whole.named_parameters()}
    used = set()

    def alone(unit: str) -> Transformer:
        part: Transformer = filled(config, [unit])
        names = {name for name, _ in part.named_parameters()}
        used.update(names)
        embeds = unit == "embedding" or (unit.startswith("mtp.") and mtp.shares_embedding)
        assert (part.embedding is not None) == embeds
        module = module_name(config, unit)
        assert names - {"embedding.weight"} == {
            name for name in known if name.startswith(f"{module}.") and name != "embedding.weight"
        }
        return part

    outputs = dict(steps(config, alone))
    used.add("head.weight")
    assert used == known
    ends = ["final_norm", *(f"mtp_norms.{depth}" for depth in (1, 2, 3))]
    for name, wanted in zip(ends, whole.depth_outputs(tokens()[:, :-1], context()), strict=True):
        assert outputs[name].equal(wanted)
    assert outputs["final_norm"].equal(whole(tokens()[:, :-1], context()))


def test_a_late_part_does_not_embed_its_input() -> None:
    """It holds the embedding for an MTP block, and its main path still begins with a hidden."""
    config = replace(BASE, mtp=MTPConfig(1), tie_embeddings=True)
    units = unit_names(config)
    whole = filled(config)
    late = filled(config, units[3:])
    assert late.embedding is not None and late.head.matrix() is late.embedding.weight
    passed = filled(config, units[:3])(tokens()[:, :-1], context())
    assert late(passed, context()).equal(whole(tokens()[:, :-1], context()))
    with pytest.raises(AssertionError, match=r"unit blocks.0 is not here"):
        late.run_unit("blocks.0", passed, tokens()[:, :-1], context())


PARTS = ["embedding_norm.weight", "hidden_norm.weight", "projection.weight"]


def test_names_are_stable() -> None:
    """Checkpoints and initial weights hang on them."""

    def names(mtp: MTPConfig) -> list[str]:
        return [name for name, _ in Transformer(replace(BASE, mtp=mtp)).named_parameters()]

    plain = names(MTPConfig())
    inner = [name.removeprefix("blocks.0.") for name in plain if name.startswith("blocks.0.")]
    block = [f"block.{name}" for name in inner]
    chain = names(MTPConfig(2))
    assert [name for name in chain if not name.startswith("mtp")] == plain
    assert [name for name in chain if name.startswith("mtp")] == [
        *(f"mtp.{depth}.{part}" for depth in (1, 2) for part in (*PARTS, *block)),
        *(f"mtp_norms.{depth}.weight" for depth in (1, 2)),
    ]
    repeated = names(MTPConfig(3, "repeated", "own"))
    assert [name for name in repeated if name.startswith("mtp")] == [
        *(f"mtp.1.{part}" for part in ("embedding.weight", *PARTS, *block)),
        "mtp_norms.1.weight",
    ]
    heads = names(MTPConfig(2, "parallel"))
    assert [name for name in heads if name.startswith("mtp")] == [
        *(f"mtp.{depth}.{part}" for depth in (1, 2) for part in inner),
        *(f"mtp_norms.{depth}.weight" for depth in (1, 2)),
    ]


@pytest.mark.parametrize("mtp", KINDS, ids=named)
def test_every_parameter_has_a_sharding_plan(mtp: MTPConfig) -> None:
    """The projection works on each rank's own positions under sequence parallelism."""
    model = Transformer(replace(BASE, mtp=mtp, norm=LayerNorm.Config()))
    for sequence_parallel in (False, True):
        plans = parameter_plans(model, sequence_parallel)
        assert set(plans) == {name for name, _ in model.named_parameters()}
        for name, plan in plans.items():
            if name.endswith("projection.weight"):
                assert (plan.dim, plan.partial) == (None, sequence_parallel)
            if name.endswith("embedding.weight"):
                assert (plan.dim, plan.partial) == (0, False)


# ------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize("mtp", KINDS, ids=named)
def test_next_token_prediction_is_that_of_the_plain_model(mtp: MTPConfig) -> None:
    """Same initial weights, same logits, same continuations."""
    plain, more = filled(BASE), filled(replace(BASE, mtp=mtp))
    weights = dict(more.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.equal(weights[name])
    ids = tokens()[:, :-1]
    assert more.logits(ids).equal(plain.logits(ids))
    assert more.depth_outputs(ids, context())[0].equal(plain(ids, context()))
    for use_cache in (True, False):
        texts = [
            generate(model, [[3, 1, 4], [1, 5]], 12, Sampling(0.7), seed=2, use_cache=use_cache)
            for model in (plain, more)
        ]
        assert texts[0] == texts[1] and len(set(texts[0][0])) > 2


def test_initial_weights_of_the_blocks() -> None:
    config = replace(BASE, hidden=64, mtp=MTPConfig(2, embedding="own"))
    found = {}
    for name, parameter in Transformer(config).named_parameters():
        shape = unpadded_shape(config, name, parameter.shape)
        initialize_(parameter.data, config, 0, name, [0] * len(shape), shape)
        found[name] = parameter.data
    for depth in (1, 2):
        assert found[f"mtp.{depth}.projection.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        output = found[f"mtp.{depth}.block.feedforward.down_proj.weight"].std().item()
        assert output == pytest.approx(0.02 / 6**0.5, rel=0.1)  # two branches in three layers
        assert found[f"mtp_norms.{depth}.weight"].equal(torch.ones(64))
        table = found[f"mtp.{depth}.embedding.weight"]
        assert table.shape == (88, 64) and not table[83:].any() and table[:83].all()
    assert not found["mtp.1.projection.weight"].equal(found["mtp.2.projection.weight"])
    assert not found["mtp.1.embedding.weight"].equal(found["embedding.weight"])


@pytest.mark.parametrize("residual", ["compute", "float32"])
def test_residual_stream_dtype(residual: Any) -> None:
    config = replace(BASE, mtp=MTPConfig(2, embedding="own"), residual_dtype=residual)
    model = filled(config).bfloat16()
    wide = torch.float32 if residual == "float32" else torch.bfloat16
    outputs = model.depth_outputs(tokens()[:, :-1], context())
    assert [y.dtype for y in outputs] == [wide] * 3
