"""Perturbed positions and the divergence between views: draws, documents, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.attention import AttentionConfig
from models.collectives import bound
from models.config import InitConfig, ModelConfig
from models.distillation import ViewDivergence
from models.feedforward import SwiGLU
from models.losses import IGNORE, CrossEntropy, HeadOptions, LogitRows, Term, evaluate_head
from models.positions import ALiBi, NoPE, RNoPE
from models.transformer import head_rows
from parallel.apply import BuildOptions, build_parallel_model
from parallel.collectives import GroupAxis
from parallel.mesh import Mesh, ParallelConfig
from pretrain.engine import build_engine
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal
from pretrain.objectives.perturbed import DIVERGENCE, Perturbed
from tests.distributed import run_ranks

LENGTH = 12
MODEL = ModelConfig(
    vocab_size=19, vocab_multiple=4, hidden=16, layers=2, feedforward=SwiGLU.Config(hidden=24),
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8), init=InitConfig(std=0.3),
)  # fmt: skip
CPU = torch.device("cpu")


def samples(count: int = 6) -> tuple[Tensor, Tensor]:
    """Tokens, and documents of 5 tokens; the last sequence ends in padding."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, MODEL.vocab_size, (count, LENGTH + 1), generator=g)
    documents = torch.arange(LENGTH + 1).repeat(count, 1) // 5
    documents[-1, 9:] = -1
    return tokens, documents


def batch(count: int = 6, seed: int = 0, first: int = 0, **options: Any) -> Any:
    objective = build_objective(Perturbed.Config(**options), MODEL, seed)
    tokens, documents = samples(count)
    return objective.micro_batch(tokens, documents, range(first, first + count))


def test_a_view_behind_each_sequence() -> None:
    plain = build_objective(Causal.Config(documents="mask"), MODEL)
    tokens, documents = samples()
    wanted, found = plain.micro_batch(tokens, documents, range(6)), batch(documents="mask")
    assert found.ids[0::2].equal(wanted.ids) and found.ids[1::2].equal(wanted.ids)
    assert found.documents[0::2].equal(wanted.documents)
    assert found.documents[1::2].equal(wanted.documents)
    assert found.fields["labels"][0::2].equal(wanted.fields["labels"])
    assert (found.fields["labels"][1::2] == IGNORE).all()
    assert found.positions[0::2].equal(torch.arange(LENGTH).repeat(6, 1))
    assert not found.fields[DIVERGENCE][0::2].any()


def changed(weights: Tensor) -> tuple[int, int]:
    """[s, e) of one row of weights, which add up to one."""
    inside = weights.nonzero()[:, 0]
    start, end = int(inside[0]), int(inside[-1]) + 1
    assert len(inside) == end - start
    torch.testing.assert_close(
        weights[start:end], torch.full_like(weights[start:end], 1 / (end - start))
    )
    return start, end


@pytest.mark.parametrize("mode", ["attend", "mask"])
@pytest.mark.parametrize("view", ["skip", "cyclic"])
def test_positions_by_hand(view: Any, mode: Any) -> None:
    for seed in range(20):
        found = batch(seed=seed, view=view, documents=mode, max_skip=7 if view == "skip" else None)
        for row in range(6):
            positions = found.positions[2 * row + 1].tolist()
            start, end = changed(found.fields[DIVERGENCE][2 * row + 1])
            length = 9 if row == 5 else LENGTH
            begin = 5 * (start // 5) if mode == "mask" else 0
            assert end == (min(begin + 5, length) if mode == "mask" else length)
            if view == "skip":
                gap = positions[start] - start
                assert 1 <= gap <= 7
                moved = [i + gap for i in range(start, end)]
                wanted = [*range(start), *moved, *range(end, LENGTH)]
            else:  # a permutation of the document's positions
                turned = [begin + (i - start) % (end - begin) for i in range(begin, end)]
                wanted = [*range(begin), *turned, *range(end, LENGTH)]
                if start == begin:
                    assert positions == list(range(LENGTH))
            assert positions == wanted


def test_draws_depend_on_seed_and_sample_alone() -> None:
    found = batch(6).positions
    assert batch(3).positions[:4].equal(found[:4])  # the last one of each ends in padding
    tokens, documents = samples()
    objective = build_objective(Perturbed.Config(), MODEL)
    late: Any = objective.micro_batch(tokens[4:5], documents[4:5], range(4, 5))
    assert late.positions.equal(found[8:10])
    assert not batch(6, seed=1).positions.equal(found)
    assert not batch(6, first=6).positions.equal(found)


def test_draws_are_uniform() -> None:
    objective = build_objective(Perturbed.Config(), MODEL)
    tokens = torch.zeros(3000, LENGTH + 1, dtype=torch.long)
    found: Any = objective.micro_batch(tokens, None, range(3000))
    starts = (found.fields[DIVERGENCE][1::2] != 0).int().argmax(1)
    gaps = found.positions[1::2, -1] - (LENGTH - 1)
    for values, low in ((starts, 0), (gaps, 1)):
        counts = torch.bincount(values - low, minlength=LENGTH)
        assert len(counts) == LENGTH and (counts - 250).abs().max() < 5 * 250**0.5
    assert abs(float(torch.corrcoef(torch.stack([starts, gaps]).double())[0, 1])) < 0.06


def test_padding_alone_has_no_view() -> None:
    objective = build_objective(Perturbed.Config(), MODEL)
    tokens = torch.zeros(2, LENGTH + 1, dtype=torch.long)
    documents = torch.full_like(tokens, -1)
    documents[0] = 0
    found: Any = objective.micro_batch(tokens, documents, range(2))
    assert objective.counts([found]) == {"labels": LENGTH, "sequences": 1}
    assert not found.fields[DIVERGENCE][3].any()
    assert found.positions[3].equal(torch.arange(LENGTH))


def test_terms_and_evaluation() -> None:
    tokens, documents = samples()
    objective = build_objective(Perturbed.Config(distill_weight=0.5), MODEL)
    assert objective.terms({"labels": 60, "sequences": 6})[-1] == ViewDivergence(6.0, 0.5)
    evaluated = objective.evaluation_batch(tokens, documents, range(6))
    plain = build_objective(Causal.Config(), MODEL).micro_batch(tokens, documents, range(6))
    assert evaluated.ids.equal(plain.ids) and evaluated.positions is None
    assert evaluated.fields.keys() == {"labels"}
    assert objective.evaluation_terms(objective.counts([evaluated])) == [
        CrossEntropy(float((plain.fields["labels"] != IGNORE).sum()))
    ]
    pose = build_objective(Perturbed.Config(method="pose"), MODEL)
    perturbed: Any = pose.micro_batch(tokens, documents, range(6))
    assert perturbed.ids.equal(plain.ids) and perturbed.positions.equal(batch().positions[1::2])
    assert pose.terms(pose.counts([perturbed])) == objective.evaluation_terms({"labels": 68})
    assert (Perturbed.Config().views, Perturbed.Config(method="pose").views) == (2, 1)


@pytest.mark.parametrize("mode", ["attend", "mask"])
@pytest.mark.parametrize("view", ["skip", "cyclic"])
def test_nothing_changes_but_the_weighted_rows(view: Any, mode: Any) -> None:
    """Logits of true and perturbed positions: the same before s and in other documents."""
    options = BuildOptions(dtype=torch.float64, seed=3)
    model = build_parallel_model(MODEL, ParallelConfig(), Mesh({}, CPU), options).part
    moved = 0
    for seed in range(6):
        found = batch(5, seed=seed, view=view, documents=mode)
        with torch.no_grad():
            logits = model.logits(found.ids, found.context())
        change = (logits[1::2] - logits[0::2]).abs().amax(-1)[:4]  # the last one has padding
        outside = found.fields[DIVERGENCE][1:8:2] == 0
        assert change[outside].max() < 1e-13
        moved += int((change[~outside] > 1e-9).sum())
    assert moved > 20


def rows_of(logits: Tensor) -> LogitRows:
    top = logits.amax(1)
    return LogitRows(
        logits, 0, logits.shape[1], logits.logsumexp(1), (logits - top[:, None]).exp(), top
    )


def dense(logits: Tensor, weights: Tensor) -> Tensor:
    """Σ w KL(perturbed ‖ clean), with the clean view a constant."""
    log_p = logits.log_softmax(1)
    clean, perturbed = log_p[0::2].detach(), log_p[1::2]
    return (weights[1::2] * (perturbed.exp() * (perturbed - clean)).sum(1)).sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with-cross-entropy"])
def test_divergence_equals_autograd(softcap: float | None, chunk: int, beside: bool) -> None:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(10, 6, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 6, generator=g, dtype=torch.float64).requires_grad_()
    weights = torch.rand(10, generator=g, dtype=torch.float64)
    weights[3] = 0
    labels = torch.randint(0, 9, (10,), generator=g)
    logits = hidden @ weight[:7].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = 0.3 / 5 * dense(logits, weights)
    terms: list[Term] = [ViewDivergence(5.0, 0.3)]
    labels = labels % 7
    if beside:
        wanted = wanted + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 8
        terms.insert(0, CrossEntropy(8.0))
    d_hidden, d_weight = torch.autograd.grad(wanted, (hidden, weight))
    fields = {"divergence_weights": weights, "labels": labels}
    with torch.no_grad():
        found = evaluate_head(
            hidden, weight, fields, terms, HeadOptions(7, softcap, chunk), gradients=True
        )
    torch.testing.assert_close(found.total, wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.d_hidden, d_hidden, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found.d_weight, d_weight, rtol=1e-11, atol=1e-13)
    if not beside:
        assert found.d_hidden is not None and not found.d_hidden[0::2].any()
        assert not found.d_hidden[3].any() and found.d_hidden[5].any()


def test_equal_views_diverge_by_exactly_nothing() -> None:
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 9, generator=g).repeat_interleave(2, 0) * 20
    loss, gradient = ViewDivergence(1.0).rows(
        rows_of(logits), {"divergence_weights": torch.ones(8)}
    )
    assert gradient.tilt is not None
    assert not loss.any() and not gradient.tilt[1].any()


def _shards(rank: int, world: int) -> tuple[Any, ...]:
    hidden, weight, weights = sharded_inputs()
    with bound({"tp": GroupAxis(dist.new_group())}):
        found = evaluate_head(
            hidden, weight.chunk(2)[rank].clone(), {"divergence_weights": weights},
            [ViewDivergence(5.0, 0.3)], HeadOptions(9, 3.0, 4), gradients=True,
        )  # fmt: skip
    return found.total, found.d_hidden, found.d_weight


def sharded_inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(10, 6, generator=g, dtype=torch.float64)
    weight = torch.randn(12, 6, generator=g, dtype=torch.float64)
    return hidden, weight, torch.rand(10, generator=g, dtype=torch.float64)


def test_vocabulary_shards_equal_the_whole() -> None:
    hidden, weight, weights = sharded_inputs()
    whole = evaluate_head(
        hidden, weight, {"divergence_weights": weights}, [ViewDivergence(5.0, 0.3)],
        HeadOptions(9, 3.0, 4), gradients=True,
    )  # fmt: skip
    parts = run_ranks(2, _shards)
    for part in parts:
        torch.testing.assert_close(part[0], whole.total, rtol=1e-13, atol=0)
    torch.testing.assert_close(sum(part[1] for part in parts), whole.d_hidden)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole.d_weight)


def test_rows_of_two_views_are_neighbours() -> None:
    x = torch.arange(2 * 2 * 3).view(4, 3)  # two sequences of two views, three positions
    assert head_rows(x, 1).tolist() == list(range(12))
    assert head_rows(x, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def step(
    model: ModelConfig, made: Any, objective: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    parallel = ParallelConfig()
    options = BuildOptions(dtype=torch.float64, seed=3)
    engine = build_engine(model, parallel, Mesh({}, CPU), options, LENGTH)
    result = engine.forward_backward([made], objective)
    gradients = {name: p.grad for name, p in engine.model.named_parameters()}
    return result.losses, {name: g for name, g in gradients.items() if g is not None}


def test_no_gap_gives_plain_training() -> None:
    """y = 0: no divergence, and the gradient of cross-entropy alone."""
    plain = build_objective(Causal.Config(), MODEL)
    tokens, documents = samples()
    wanted, gradients = step(MODEL, plain.micro_batch(tokens, documents, range(6)), plain)
    objective = build_objective(Perturbed.Config(), MODEL)
    made = batch()
    unmoved = replace(made, positions=torch.arange(LENGTH).repeat(12, 1))
    losses, found = step(MODEL, unmoved, objective)
    assert losses["distillation"] == 0 and found.keys() == gradients.keys()
    assert losses["cross_entropy"] == pytest.approx(wanted["cross_entropy"], rel=1e-14)
    for name, g in found.items():
        torch.testing.assert_close(g, gradients[name], rtol=1e-11, atol=1e-15)
    losses, moved = step(MODEL, made, objective)
    assert losses["distillation"] > 1e-3
    assert not torch.allclose(moved["head.weight"], found["head.weight"], rtol=1e-6)


def test_without_positions_there_is_no_divergence() -> None:
    model = replace(MODEL, position=NoPE.Config())
    losses, _ = step(model, batch(), build_objective(Perturbed.Config(), model))
    assert abs(losses["distillation"]) < 1e-15


def test_problems() -> None:
    assert Perturbed.Config().problems() == []
    config = Perturbed.Config(method="pose", distill_weight=0.5, view="cyclic", max_skip=3)
    assert config.problems() == [
        ("distill_weight", "is set but method=pose: it would be ignored"),
        ("max_skip", "is set but view=cyclic: it would be ignored"),
    ]
    assert [p for p, _ in Perturbed.Config(max_skip=0, distill_weight=0.0).problems()] == [
        "distill_weight",
        "max_skip",
    ]
    for position in (NoPE.Config(), ALiBi.Config(), RNoPE.Config(inner=ALiBi.Config())):
        [(path, text)] = Perturbed.Config().model_problems(replace(MODEL, position=position))
        assert path == "type" and text.startswith("perturbed needs rotary positions, not ")
    assert not Perturbed.Config().model_problems(replace(MODEL, position=RNoPE.Config()))
