"""Row-wise loss terms and the chunked linear head.

A *term* turns rows of logits into loss rows and says what their logit gradient is made of; the
head multiplies hidden rows by the vocabulary matrix a chunk of rows at a time, evaluates every
term, forms the input and weight gradients at once and frees the logits.  [tokens, vocabulary] is
never held.  Under tensor parallelism each rank holds a slice of the vocabulary and the statistics
are combined over the ``tp`` axis.

Normalisers are global counts known before the forward pass; nothing here averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .collectives import axis
from .linear import accumulation_dtype
from .token_weighting import TokenWeighting

IGNORE = -100
"""Label of a row that carries no loss."""


@dataclass
class LogitRows:
    """One chunk of rows of this rank's vocabulary slice.

    logits: [n, v] in at least fp32, after the soft cap, unpadded.  start: first vocabulary id of
    the slice.  vocab_size: the true, whole vocabulary.  log_z: [n], log Σ exp over the whole
    vocabulary.  exponentials: [n, v], exp(logits − top), with top [n].
    """

    logits: Tensor
    start: int
    vocab_size: int
    log_z: Tensor
    exponentials: Tensor
    top: Tensor

    def pick(self, ids: Tensor) -> Tensor:
        """logits[row, ids[row]] over the sharded vocabulary; ids outside it give 0.  [n]."""
        local, inside = self.locate(ids)
        if self.logits.shape[1] == 0:
            picked = torch.zeros_like(self.log_z)
        else:
            picked = self.logits.gather(1, local[:, None]).squeeze(1) * inside
        return axis("tp").sum_(picked)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id in this slice (clamped) and whether it is there."""
        local = ids - self.start
        inside = (local >= 0) & (local < self.logits.shape[1])
        return local.clamp(0, max(self.logits.shape[1] - 1, 0)), inside

    @property
    def normalizer(self) -> Tensor:
        """softmax / exponentials of each row, [n]."""
        return (self.top - self.log_z).exp()

    def mean(self) -> Tensor:
        """Mean logit of each row over the whole vocabulary, [n]."""
        return axis("tp").sum_(self.logits.sum(1)) / self.vocab_size


@dataclass
class LogitGradient:
    """d loss / d logits as softmax·s + Σ onehot(id)·v + u, with s, v, u of shape [n], and besides,
    in a slice of the rows, softmax ⊙ t with t of their shape [m, v], which is overwritten."""

    softmax: Tensor | None = None
    onehot: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    uniform: Tensor | None = None
    tilt: tuple[slice, Tensor] | None = None


Elsewhere = Callable[[Tensor, Tensor], None]
"""Takes inputs x [n, D] and output gradients g [n, v] of a weight gradient gᵀ x (its first v rows)
that is made elsewhere.  g is overwritten afterwards."""


class Term(Protocol):
    """A row-wise loss term.  ``weight`` and ``normalizer`` (a global count, > 0) are fixed before
    the forward pass: the total is Σ rows · weight / normalizer.  ``depth``: of the head that it
    judges, 0 for the next token.  ``views``: how many sequences of a batch, one behind the other,
    it compares; their rows of one position are neighbours and in one chunk.  ``judges``: which rows
    can have a loss, bool [n]; None for all."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def normalizer(self) -> float: ...
    @property
    def depth(self) -> int: ...
    @property
    def views(self) -> int: ...

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None: ...
    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        """Loss rows [n] (0 where nothing is predicted) and their logit gradient."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """(1 − ε)·(log_z − logit[label]) + ε·(log_z − mean logit) where label ≠ IGNORE.

    ``fields``: ``labels`` int64 [n], and those named ``row_weights`` [n] multiply each row.
    ``weighting`` multiplies it by a constant that log_z − logit[label] decides.
    """

    normalizer: float
    label_smoothing: float = 0.0
    weight: float = 1.0
    name: str = "cross_entropy"
    labels: str = "labels"
    depth: int = 0
    weighting: TokenWeighting | None = None
    row_weights: str | None = None
    views: ClassVar[int] = 1

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return fields[self.labels] != IGNORE

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        labels, smoothing = fields[self.labels], self.label_smoothing
        valid = (labels != IGNORE).to(rows.log_z.dtype)
        if self.row_weights is not None:
            valid = valid * fields[self.row_weights].to(valid.dtype)
        picked = rows.pick(labels)
        if self.weighting is not None:
            valid = valid * self.weighting.weights(rows.log_z - picked)
        loss = rows.log_z - (1 - smoothing) * picked
        gradient = LogitGradient(softmax=valid, onehot=[(labels, valid * (smoothing - 1))])
        if smoothing:
            loss = loss - smoothing * rows.mean()
            gradient.uniform = valid * (-smoothing / rows.vocab_size)
        return loss * valid, gradient


@dataclass(frozen=True)
class ZLoss:
    """log_z² where label ≠ IGNORE  (PaLM, arXiv 2204.02311, section 5: weight 1e-4)."""

    normalizer: float
    weight: float = 1e-4
    name: str = "z_loss"
    labels: str = "labels"
    depth: int = 0
    views: ClassVar[int] = 1

    def judges(self, fields: Mapping[str, Tensor]) -> Tensor | None:
        return fields[self.labels] != IGNORE

    def rows(self, rows: LogitRows, fields: Mapping[str, Tensor]) -> tuple[Tensor, LogitGradient]:
        valid = (fields[self.labels] != IGNORE).to(rows.log_z.dtype)
        loss = rows.log_z.square() * valid
        return loss, LogitGradient(softmax=2 * rows.log_z * valid)


@dataclass(frozen=True)
class HeadOptions:
    """How logits are formed: true vocabulary, soft cap, rows per chunk (0 = chosen), dtype of the
    matrix products (None = the weight's)."""

    vocab_size: int
    softcap: float | None = None
    chunk_rows: int = 0
    compute_dtype: torch.dtype | None = None

    def rows_per_chunk(self, local_vocab: int, device_type: str = "cpu") -> int:
        if self.chunk_rows:
            return self.chunk_rows
        if device_type == "cuda":
            # By arithmetic, not yet measured on a GPU: below about a thousand rows, adding to the
            # fp32 weight gradient costs more than the products.
            return max(1024, min(8192, 2**27 // max(1, local_vocab)))
        # Measured on a CPU: the logits of a chunk should stay in the cache (4 MiB in fp32); below
        # 256 rows the matrix products lose more than that gains.
        return max(256, min(4096, 2**20 // max(1, local_vocab)))


@dataclass
class HeadResult:
    """total: Σ over terms of rows · weight / normalizer (scalar).  sums: per term, the plain sum
    of its loss rows (scalar, unweighted).  d_hidden, d_weight: gradients of total, or None."""

    total: Tensor
    sums: dict[str, Tensor]
    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None


def normalize_rows(logits: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp over the vocabulary, sharded over ``tp``, for logits [n, v]: (log_z [n], top [n]).

    ``workspace`` [n, v] receives exp(logits − top), with top the largest logit of each row; the
    gradient is made from it, so the exponentials are taken once.
    """
    tp = axis("tp")
    if logits.shape[1]:
        top = logits.amax(1)
    else:
        top = logits.new_full((logits.shape[0],), -torch.inf)
    top = tp.max_(top)
    total = tp.sum_(torch.sub(logits, top[:, None], out=workspace).exp_().sum(1))
    return total.log_().add_(top), top


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _logit_gradient(
    rows: LogitRows,
    parts: Sequence[tuple[float, LogitGradient]],
    softcap: float | None,
) -> Tensor:
    """Combine the terms' gradients into one [n, v] tensor, in the memory of the exponentials."""
    slope = None if softcap is None else 1 - (rows.logits / softcap).square()
    softmax = uniform = None
    for scale, part in parts:
        if part.softmax is not None:
            softmax = part.softmax * scale if softmax is None else softmax + part.softmax * scale
        if part.uniform is not None:
            uniform = part.uniform * scale if uniform is None else uniform + part.uniform * scale
    gradient, normalizer = rows.exponentials, rows.normalizer
    tilted = []
    for scale, part in parts:
        if part.tilt is not None:
            span, values = part.tilt
            values.mul_(gradient[span]).mul_((normalizer[span] * scale)[:, None])
            tilted.append((span, values))
    if softmax is None:
        gradient.zero_()
    else:
        gradient.mul_((softmax * normalizer)[:, None])
    for span, values in tilted:
        gradient[span] += values
    if gradient.shape[1]:
        for scale, part in parts:
            for ids, values in part.onehot:
                column, inside = rows.locate(ids)
                gradient.scatter_add_(1, column[:, None], (values * inside * scale)[:, None])
    if uniform is not None:
        gradient.add_(uniform[:, None])
    return gradient if slope is None else gradient.mul_(slope)


def common_views(terms: Sequence[Term]) -> int:
    """Rows that must stay together for all ``terms``."""
    return max((term.views for term in terms), default=1)


ROW_TILE = 16
"""Rows are kept in multiples of this many: matrix products treat a remainder in another way, and a
row should have the same bits whatever rows are beside it."""


def judged_rows(terms: Sequence[Term], fields: Mapping[str, Tensor]) -> Tensor | None:
    """Indices of the rows that any of ``terms`` judges, where it pays to leave out the others: they
    are a quarter at least.  None for all of them."""
    judged: Tensor | None = None
    for term in terms:
        rows = term.judges(fields)
        if rows is None:
            return None
        judged = rows if judged is None else judged | rows
    if judged is None or judged.is_meta:
        return None
    count = -(-int(judged.sum()) // ROW_TILE) * ROW_TILE
    if 4 * count > 3 * len(judged):
        return None
    return judged.logical_not().argsort(stable=True)[:count].sort().values


def evaluate_head(
    hidden: Tensor,
    weight: Tensor,
    fields: Mapping[str, Tensor],
    terms: Sequence[Term],
    options: HeadOptions,
    gradients: bool,
    elsewhere: Elsewhere | None = None,
) -> HeadResult:
    """Loss of hidden rows [N, D] under the vocabulary slice ``weight`` [V_local, D].

    Rows that a term compares follow one another.  Every field has N rows.  With ``gradients``,
    ``d_hidden`` [N, D] has the hidden dtype (under tensor parallelism it is this rank's share, to
    be summed over ``tp``) and ``d_weight`` has the weight's shape and dtype, accumulated in at
    least fp32.  What ``d_weight`` is made of is given to ``elsewhere`` instead, if there is such.
    """
    dtype = options.compute_dtype or weight.dtype
    wide = accumulation_dtype(dtype)
    start = axis("tp").rank * weight.shape[0]
    local_vocab = min(max(options.vocab_size - start, 0), weight.shape[0])
    matrix = weight[:local_vocab].to(dtype)
    result = HeadResult(
        total=torch.zeros((), dtype=wide, device=hidden.device),
        sums={t.name: torch.zeros((), dtype=wide, device=hidden.device) for t in terms},
    )
    accumulator = None
    if gradients:
        result.d_hidden = torch.empty_like(hidden)
        if elsewhere is None:
            accumulator = torch.zeros_like(weight, dtype=wide)
    views = common_views(terms)
    rows_per_chunk = options.rows_per_chunk(weight.shape[0], hidden.device.type)
    rows_per_chunk = min(max(rows_per_chunk // views, 1) * views, hidden.shape[0])
    # Two buffers for all chunks: fresh ones of this size cost more than the arithmetic on them.
    buffers = torch.empty(2, rows_per_chunk, local_vocab, dtype=wide, device=hidden.device)
    for begin in range(0, hidden.shape[0], max(rows_per_chunk, 1)):
        span = slice(begin, begin + rows_per_chunk)
        x = hidden[span].to(dtype)
        logits, exponentials = buffers[:, : x.shape[0]]
        if wide == dtype:
            torch.mm(x, matrix.T, out=logits)
        else:
            logits.copy_(x @ matrix.T)
        logits = capped(logits, options.softcap)
        log_z, top = normalize_rows(logits, exponentials)
        rows = LogitRows(logits, start, options.vocab_size, log_z, exponentials, top)
        chunk_fields = {name: value[span] for name, value in fields.items()}
        parts = []
        for term in terms:
            loss, gradient = term.rows(rows, chunk_fields)
            summed = loss.sum()
            scale = term.weight / term.normalizer
            result.sums[term.name] += summed
            result.total += summed * scale
            parts.append((scale, gradient))
        if gradients:
            assert result.d_hidden is not None
            g = _logit_gradient(rows, parts, options.softcap).to(dtype)
            result.d_hidden[span] = g @ matrix
            if accumulator is None:
                assert elsewhere is not None
                elsewhere(x, g)
            elif wide == dtype:
                accumulator[:local_vocab].addmm_(g.T, x)
            else:
                accumulator[:local_vocab] += g.T @ x
    if accumulator is not None:
        result.d_weight = accumulator.to(weight.dtype)
    return result


def _nowhere(x: Tensor, g: Tensor) -> None:
    pass


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        fields: Mapping[str, Tensor],
        terms: Sequence[Term],
        options: HeadOptions,
        sums: dict[str, Tensor],
        elsewhere: Elsewhere | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if not ctx.needs_input_grad[1]:
            elsewhere = _nowhere  # the weight is frozen
        result = evaluate_head(hidden, weight, fields, terms, options, wanted, elsewhere)
        sums.update(result.sums)
        ctx.gradients = (result.d_hidden, result.d_weight)
        return result.total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        if d_weight is not None:
            d_weight.mul_(grad)
        return d_hidden.mul_(grad), d_weight, None, None, None, None, None


def chunked_head_loss(
    hidden: Tensor,
    weight: Tensor,
    fields: Mapping[str, Tensor],
    terms: Sequence[Term],
    options: HeadOptions,
    elsewhere: Elsewhere | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Differentiable form of :func:`evaluate_head`: (total, per-term sums).

    What goes ``elsewhere`` belongs to the gradient of the total itself, not of a multiple of it.
    """
    sums: dict[str, Tensor] = {}
    # grad mode is off inside a Function's forward, so the decision is taken from its inputs
    if not torch.is_grad_enabled():
        result = evaluate_head(hidden, weight, fields, terms, options, gradients=False)
        return result.total, result.sums
    total: Tensor = _ChunkedHead.apply(hidden, weight, fields, terms, options, sums, elsewhere)
    return total, sums
