"""The chunked head against plain autograd: values, every gradient, memory, vocabulary shards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.collectives import bound
from models.losses import (
    IGNORE,
    ROW_TILE,
    CrossEntropy,
    HeadOptions,
    LogitGradient,
    LogitRows,
    Term,
    ZLoss,
    chunked_head_loss,
    evaluate_head,
    judged_rows,
)
from models.token_weighting import LOWEST, TokenWeighting
from parallel.collectives import GroupAxis
from tests.distributed import run_ranks

TOKENS, VOCAB, DIM = 10, 9, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Setting:
    smoothing: float = 0.0
    z_weight: float = 0.0
    softcap: float | None = None
    weighted: bool = False

    def terms(self, count: float) -> list[Term]:
        weights = "row_weights" if self.weighted else None
        terms: list[Term] = [CrossEntropy(count, self.smoothing, row_weights=weights)]
        return [*terms, ZLoss(count, self.z_weight)] if self.z_weight else terms


SETTINGS = [
    Setting(*choice)
    for choice in itertools.product((0.0, 0.1), (0.0, 0.03), (None, 2.5), (False, True))
]
FULL = Setting(0.1, 0.03, 2.5, True)


def inputs(padded: int, tokens: int = TOKENS, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Float64 hidden rows and weights (garbage in the padding rows), labels, row weights."""
    g = torch.Generator().manual_seed(padded + tokens)
    return {
        "hidden": torch.randn(tokens, DIM, generator=g, dtype=torch.float64) * 2,
        "weight": torch.randn(padded, DIM, generator=g, dtype=torch.float64) * 2,
        "labels": torch.randint(0, vocab, (tokens,), generator=g),
        "row_weights": torch.rand(tokens, generator=g, dtype=torch.float64) + 0.1,
    }


def fields(data: Mapping[str, Tensor], setting: Setting) -> dict[str, Tensor]:
    names = ("labels", "row_weights") if setting.weighted else ("labels",)
    return {name: data[name] for name in names}


def plain(
    data: Mapping[str, Tensor], setting: Setting, count: float, vocab: int = VOCAB
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """(total, sums, d_hidden, d_weight) by ordinary autograd on the whole logits, in float64."""
    hidden, weight = (data[n].detach().to(torch.float64, copy=True) for n in ("hidden", "weight"))
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight[:vocab].T
    if setting.softcap:
        logits = setting.softcap * torch.tanh(logits / setting.softcap)
    labels = data["labels"]
    rows = F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=setting.smoothing
    )
    if setting.weighted:
        rows = rows * data["row_weights"]
    sums = {"cross_entropy": rows.sum()}
    total = sums["cross_entropy"] / count
    if setting.z_weight:
        sums["z_loss"] = (logits.logsumexp(1).square() * (labels != IGNORE)).sum()
        total = total + setting.z_weight * sums["z_loss"] / count
    d_hidden, d_weight = torch.autograd.grad(total, (hidden, weight))
    return total.detach(), {k: v.detach() for k, v in sums.items()}, d_hidden, d_weight


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; infinite when anything is not finite."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def chunked(
    data: Mapping[str, Tensor], setting: Setting, count: float, options: HeadOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    hidden = data["hidden"].to(dtype, copy=True).requires_grad_()
    weight = data["weight"].to(dtype, copy=True).requires_grad_()
    terms = setting.terms(count)
    total, sums = chunked_head_loss(hidden, weight, fields(data, setting), terms, options)
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    return total.detach(), sums, hidden.grad, weight.grad


def ignored_rows(kind: str) -> slice:
    """Rows without a label: with chunks of 3, the first two chunks have none to predict."""
    return {"none": slice(0, 0), "some": slice(0, 7), "all": slice(0, TOKENS)}[kind]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equals_plain_autograd(setting: Setting, dtype: torch.dtype) -> None:
    for padded, kind in itertools.product((VOCAB, VOCAB + 5), ("none", "some", "all")):
        data = inputs(padded)
        data["labels"][ignored_rows(kind)] = IGNORE
        data = {k: v.to(dtype) if k in ("hidden", "weight") else v for k, v in data.items()}
        count = 7.0  # of the whole world: unrelated to the labels here
        wanted = plain(data, setting, count)
        for chunk in (1, 3, 64, 0):
            options = HeadOptions(VOCAB, setting.softcap, chunk)
            found = chunked(data, setting, count, options, dtype)
            where = f"padded {padded}, ignored {kind}, chunk {chunk}"
            for name, value in wanted[1].items():
                assert error(found[1][name], value) <= TOLERANCE[dtype], where
            assert error(found[0], wanted[0]) <= TOLERANCE[dtype], where
            assert error(found[2], wanted[2]) <= TOLERANCE[dtype], where
            assert error(found[3], wanted[3]) <= TOLERANCE[dtype], where
            assert not found[3][VOCAB:].any(), f"{where}: padding rows have a gradient"
            assert not found[2][ignored_rows(kind)].any(), where


def test_finite_differences() -> None:
    """Independent of autograd: perturb every input element."""
    data = inputs(VOCAB + 2, tokens=4)
    data["labels"][1] = IGNORE
    options = HeadOptions(VOCAB, FULL.softcap, 3)
    _, _, d_hidden, d_weight = chunked(data, FULL, 3.0, options, torch.float64)

    def total() -> float:
        result = evaluate_head(
            data["hidden"], data["weight"], fields(data, FULL), FULL.terms(3.0), options, False
        )
        return float(result.total)

    for name, gradient in (("hidden", d_hidden), ("weight", d_weight)):
        x, step = data[name].view(-1), 1e-6
        for i in range(x.numel()):
            kept = x[i].item()
            x[i] = kept + step
            up = total()
            x[i] = kept - step
            slope = (up - total()) / (2 * step)
            x[i] = kept
            assert slope == pytest.approx(float(gradient.view(-1)[i]), abs=2e-9), (name, i)


@dataclass(frozen=True)
class Margin:
    """Σ mean logit + logit[a] − 2 logit[b]: no softmax part, two one-hot parts, a uniform one."""

    normalizer: float
    weight: float = 0.7
    name: str = "margin"
    depth: int = 0
    views: int = 1

    def judges(self, fields: Mapping[str, Tensor]) -> None:
        return None

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        a, b = fields["labels"], fields["others"]
        one = torch.ones_like(rows.log_z)
        loss = rows.mean() + rows.pick(a) - 2 * rows.pick(b)
        return loss, LogitGradient(None, [(a, one), (b, -2 * one)], one / rows.vocab_size)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with-cross-entropy"])
def test_any_term_fits(beside: bool) -> None:
    data = inputs(VOCAB + 5)
    rows = {"labels": data["labels"], "others": data["labels"].flip(0)}
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    logits = 2.5 * torch.tanh(hidden @ weight[:VOCAB].T / 2.5)
    picked = [logits.gather(1, rows[name][:, None]).sum() for name in ("labels", "others")]
    wanted = 0.7 / 3 * (logits.mean(1).sum() + picked[0] - 2 * picked[1])
    terms: list[Term] = [Margin(3.0)]
    if beside:
        wanted = wanted + F.cross_entropy(logits, data["labels"], reduction="sum") / 5
        terms.append(CrossEntropy(5.0))
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    total, _ = chunked_head_loss(hidden, weight, rows, terms, HeadOptions(VOCAB, 2.5, 3))
    assert error(total.detach(), wanted.detach()) <= 1e-12
    for found, right in zip(torch.autograd.grad(total, (hidden, weight)), gradients):
        assert error(found, right) <= 1e-12


def test_upstream_gradient_scales_both_gradients() -> None:
    data = inputs(VOCAB + 5)
    options = HeadOptions(VOCAB, None, 3)
    gradients = []
    for factor in (1.0, -3.5):
        hidden, weight = (data[n].clone().requires_grad_() for n in ("hidden", "weight"))
        total, _ = chunked_head_loss(hidden, weight, fields(data, FULL), FULL.terms(4.0), options)
        (total * factor).backward()
        gradients.append((hidden.grad, weight.grad))
    for one, scaled in zip(*gradients):
        assert one is not None and scaled is not None
        torch.testing.assert_close(scaled, -3.5 * one, rtol=1e-15, atol=0)


def test_narrow_compute_accumulates_the_weight_gradient_in_fp32() -> None:
    """1,024 equal rows, one chunk each: a bf16 sum would stop growing at 256 times one share."""
    tokens = 1024
    data = inputs(VOCAB, tokens=1)
    hidden = data["hidden"].expand(tokens, DIM).float().contiguous().requires_grad_()
    weight = data["weight"].float().requires_grad_()
    labels = data["labels"].expand(tokens).contiguous()
    options = HeadOptions(VOCAB, None, 1, compute_dtype=torch.bfloat16)
    terms = [CrossEntropy(1.0)]
    total, _ = chunked_head_loss(hidden, weight, {"labels": labels}, terms, options)
    total.backward()
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in data.items()}
    wanted = plain(rounded, Setting(), 1.0)
    assert total.dtype == torch.float32
    assert hidden.grad is not None and weight.grad is not None
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32
    assert error(weight.grad, tokens * wanted[3]) < 0.01  # rounding of the factors alone
    narrow = torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    for _ in range(tokens):
        narrow += wanted[3].bfloat16()
    assert error(narrow, tokens * wanted[3]) > 0.1  # what the assertion above would see


class Allocations(TorchDispatchMode):
    """Sizes of every tensor an operator returns, views of ``owned`` storage left out."""

    def __init__(self, *owned: Tensor) -> None:
        super().__init__()
        self.owned = {t.untyped_storage().data_ptr() for t in owned}
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(value, Tensor):
                continue
            if value.untyped_storage().data_ptr() not in self.owned:
                self.shapes.append(tuple(value.shape))
        return out

    @property
    def largest(self) -> int:
        return max(torch.Size(shape).numel() for shape in self.shapes)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_tokens_times_vocabulary_is_never_allocated(softcap: float | None) -> None:
    tokens, vocab, chunk = 256, 100, 8
    data = inputs(vocab, tokens, vocab)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    rows, terms = fields(data, FULL), FULL.terms(1.0)
    with Allocations() as seen:
        total, _ = chunked_head_loss(
            hidden, weight, rows, terms, HeadOptions(vocab, softcap, chunk)
        )
        total.backward()
    assert seen.largest <= max(2 * chunk * vocab, tokens * DIM)
    with Allocations() as naive:  # the recorder sees what it is there for
        F.cross_entropy(hidden @ weight.T, data["labels"]).backward()
    assert naive.largest == tokens * vocab


def test_evaluation_is_equal_and_keeps_no_gradient_buffers() -> None:
    tokens, vocab = 7, 100
    data = inputs(vocab, tokens, vocab)
    rows, terms = fields(data, FULL), FULL.terms(3.0)
    options = HeadOptions(vocab, 2.5, 3)
    hidden, weight = data["hidden"].requires_grad_(), data["weight"].requires_grad_()
    total, sums = chunked_head_loss(hidden, weight, rows, terms, options)
    with torch.no_grad(), Allocations(hidden, weight) as seen:
        quiet, quiet_sums = chunked_head_loss(hidden, weight, rows, terms, options)
    frozen, _ = chunked_head_loss(hidden.detach(), weight.detach(), rows, terms, options)
    assert total.requires_grad and not quiet.requires_grad and not frozen.requires_grad
    assert quiet.equal(total.detach()) and frozen.equal(quiet)
    assert all(quiet_sums[name].equal(sums[name]) for name in sums)
    assert weight.shape not in seen.shapes and hidden.shape not in seen.shapes
    with Allocations(hidden, weight) as training:
        chunked_head_loss(hidden, weight, rows, terms, options)
    assert weight.shape in training.shapes and hidden.shape in training.shapes


def test_chosen_chunks_bound_the_logits() -> None:
    for vocab in (1, 1000, 50_257, 128_256, 10**6):
        rows = HeadOptions(vocab).rows_per_chunk(vocab)
        assert 256 <= rows <= 4096
        assert rows == 256 or rows * vocab <= 2**20
        assert 1024 <= HeadOptions(vocab).rows_per_chunk(vocab, "cuda") <= 8192
    assert HeadOptions(10, chunk_rows=5).rows_per_chunk(10**6) == 5


def test_no_rows() -> None:
    data = inputs(VOCAB, tokens=0)
    found = chunked(data, FULL, 1.0, HeadOptions(VOCAB), torch.float64)
    assert float(found[0]) == 0 and found[2].shape == (0, DIM) and not found[3].any()


SHARDS = [(2, 9, 16), (2, 7, 16), (4, 9, 16), (4, 16, 16)]  # ranks, vocabulary, padded
"""Of 4 slices of 16 rows, ids 0 to 8 leave the last one empty; so do 0 to 6 one of 2."""


SHARDED = [Setting(), FULL]


def _shards(rank: int, world: int) -> list[tuple[Any, ...]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    found = []
    for (size, vocab, padded), setting in itertools.product(SHARDS, SHARDED):
        data = inputs(padded, vocab=vocab)
        data["labels"][3:5] = IGNORE
        tensor = GroupAxis(groups[size])
        data["weight"] = data["weight"].chunk(size)[tensor.rank].clone()
        with bound({"tp": tensor}):
            options = HeadOptions(vocab, setting.softcap, 4)
            found.append(chunked(data, setting, 5.0, options, torch.float64))
    return found


def test_vocabulary_shards_equal_the_whole() -> None:
    ranks = run_ranks(4, _shards)
    for index, ((size, vocab, padded), setting) in enumerate(itertools.product(SHARDS, SHARDED)):
        data = inputs(padded, vocab=vocab)
        data["labels"][3:5] = IGNORE
        total, sums, d_hidden, d_weight = plain(data, setting, 5.0, vocab)
        for first in range(0, 4, size):
            parts = [ranks[rank][index] for rank in range(first, first + size)]
            for part in parts:
                assert error(part[0], total) <= 1e-12
                assert all(error(part[1][name], sums[name]) <= 1e-12 for name in sums)
            assert error(sum(part[2] for part in parts), d_hidden) <= 1e-12
            assert error(torch.cat([part[3] for part in parts]), d_weight) <= 1e-12


def written_out(kind: str, alpha: float, p: Tensor) -> Tensor:
    return {
        "geometric": p**alpha,
        "harmonic": 1 / ((1 - alpha) + alpha / p),  # the harmonic mean of 1 and p
        "linear": (1 - alpha) + alpha * p,
    }[kind]


KINDS: list[Any] = ["geometric", "harmonic", "linear"]
WEIGHTINGS = [TokenWeighting(kind, alpha) for kind, alpha in itertools.product(KINDS, (0.3, 1.0))]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_weighted_tokens_have_weighted_gradients(weighting: TokenWeighting) -> None:
    """w·(softmax − onehot), w from the probability of the label; the divisor is not Σ w."""
    data = inputs(16)
    data["labels"][:3] = IGNORE
    hidden, weight = data["hidden"], data["weight"][:VOCAB]
    p = torch.softmax(hidden @ weight.T, 1)
    label = data["labels"].clamp(min=0)[:, None]
    w = written_out(weighting.kind, weighting.alpha, p.gather(1, label)[:, 0])
    w = w * (data["labels"] != IGNORE)
    gradient = w[:, None] * (p - F.one_hot(label[:, 0], VOCAB)) / 7.0
    result = evaluate_head(
        hidden, data["weight"], {"labels": data["labels"]},
        [CrossEntropy(7.0, weighting=weighting, name="weighted")], HeadOptions(VOCAB, None, 4),
        gradients=True,
    )  # fmt: skip
    assert result.d_hidden is not None and result.d_weight is not None
    assert error(result.d_hidden, gradient @ weight) <= 1e-12
    assert error(result.d_weight[:VOCAB], gradient.T @ hidden) <= 1e-12
    rows = -w * p.gather(1, label)[:, 0].log()
    assert error(result.sums["weighted"], rows.sum()) <= 1e-12
    assert error(result.total, rows.sum() / 7.0) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_share_zero_is_plain_cross_entropy_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    data = inputs(16)
    data["labels"][2] = IGNORE
    data["hidden"][4] *= 500  # probabilities that are 0 in any dtype
    plain_term = CrossEntropy(7.0, 0.1)
    weighted = replace(plain_term, weighting=TokenWeighting(kind, 0.0), name="weighted")
    found = []
    for terms in ([plain_term], [replace(plain_term, weight=0.0), weighted]):
        hidden, weight = (data[name].to(dtype) for name in ("hidden", "weight"))
        options = HeadOptions(VOCAB, None, 4)
        found.append(evaluate_head(hidden, weight, data, terms, options, gradients=True))
    one, two = found
    assert one.total.equal(two.total) and one.sums["cross_entropy"].equal(two.sums["weighted"])
    assert one.sums["cross_entropy"].equal(two.sums["cross_entropy"])
    assert one.d_hidden is not None and two.d_hidden is not None and two.d_weight is not None
    assert one.d_weight is not None
    assert one.d_hidden.equal(two.d_hidden) and one.d_weight.equal(two.d_weight)


def test_weights_stay_within_their_bounds() -> None:
    surprise = torch.tensor([0.0, -1e-9, 1.0, 50.0, 1e4])
    for weighting in WEIGHTINGS:
        found = weighting.weights(surprise)
        assert found.isfinite().all() and found.min() >= LOWEST and found.max() <= 1
        assert (found[1:] <= found[:-1]).all()


def test_rows_without_a_loss_are_left_out_in_tiles() -> None:
    labels = torch.full((100,), IGNORE)
    labels[[3, 50, 99]] = 1
    terms: list[Term] = [CrossEntropy(1.0), ZLoss(1.0)]
    found = judged_rows(terms, {"labels": labels})
    assert found is not None and len(found) == ROW_TILE == 16
    assert {3, 50, 99} <= set(found.tolist()) and found.equal(found.unique())
    labels[:70] = 1
    assert judged_rows(terms, {"labels": labels}) is None  # 80 of 100 rows would be left
