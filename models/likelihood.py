"""How likely a continuation is: log p(answer | prompt), or a bound of it, with its standard error.

A model is a function from ids int64 [B, S], and noise σ = −log α [B, 1] or None, to logits
[B, S, V].
All rows of a call have one length: there is no padding.  A request gets the same noise whatever is
asked besides, so its estimate depends on the model, the seed and itself alone.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .attention import Mask, SequenceContext, Visibility
from .denoising import EPSILON
from .families import family_of
from .losses import LogitRows, normalize_rows
from .transformer import Head, Transformer
from .uniform_state import UniformState

Predict = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Request:
    """Token ids.  What log p(answer | prompt) is asked for; the prompt may be empty."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def whole(self) -> Request:
        """Asks for log p(prompt, answer) instead.  Answers to one prompt compare by it just as
        well, were it known exactly; an estimate also has the noise of the prompt's tokens."""
        return Request((), self.prompt + self.answer)

    def blocks(self, size: int) -> list[Request]:
        """One per block of ``size`` tokens that the answer reaches into; their log-likelihoods add
        up to this one's."""
        ids, found = self.prompt + self.answer, []
        begin = len(self.prompt)
        while begin < len(ids):
            end = min((begin // size + 1) * size, len(ids))
            found.append(Request(ids[:begin], ids[begin:end]))
            begin = end
        return found


@dataclass(frozen=True)
class Estimate:
    """nats: log p(answer | prompt); of a diffusion model the expected value of a lower bound.
    error: standard error of that expectation, 0 where it was summed exactly.  greedy: whether the
    answer is what greedy decoding gives; None where nobody asked."""

    nats: float
    error: float = 0.0
    greedy: bool | None = None

    @classmethod
    def total(cls, parts: Sequence[Estimate]) -> Estimate:
        """Of independent parts."""
        greedy = None if None in {p.greedy for p in parts} else all(p.greedy for p in parts)
        error = math.hypot(*(part.error for part in parts))
        return cls(math.fsum(part.nats for part in parts), error, greedy)


@dataclass
class _Row:
    """One sequence that the model sees for request ``request``, in group ``group`` of its estimate.

    Of masked diffusion, the log-likelihoods of ``places`` count ``weight`` times.  alpha: of
    uniform-state diffusion, the chance that a token is still itself."""

    request: int
    group: int
    ids: list[int]
    places: list[int] = field(default_factory=list)
    weight: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True)
class Scoring:
    """How a diffusion model is asked.

    draws: forward passes per request, an even number; fewer where fewer tell everything.  batch:
    sequences of one forward pass.  guidance: of masked models, see ``masked_likelihood``.  whole:
    for log p(prompt, answer), see ``Request.whole``; uniform-state models know nothing else.
    greedy: find out whether an answer is the greedy one.
    """

    draws: int = 128
    seed: int = 0
    batch: int = 16
    guidance: float = 0.0
    whole: bool = False
    greedy: bool = False


def likelihoods(
    model: Transformer,
    objective: Mapping[str, Any],
    requests: Sequence[Request],
    limit: int,
    scoring: Scoring = Scoring(),
    head: Head | None = None,
) -> list[Estimate]:
    """Of a model that was trained with ``objective`` (its settings, such as {"type": "masked"}) on
    sequences of ``limit`` tokens.  head: the model's own where None."""
    kind = family_of(objective)
    if kind == "eso":
        raise ValueError("the likelihood of a continuation under objective eso is not known")
    if scoring.guidance and kind != "masked":
        raise ValueError(f"guidance is for masked diffusion, not for objective {kind}")
    predict = predictor(model, objective, head)
    if kind == "causal":
        if scoring.whole:
            raise ValueError(
                "an autoregressive model gives log p(answer | prompt) itself: no whole"
            )
        check_requests(requests, limit, unseen=1)  # the last token is predicted alone
        return causal_likelihood(predict, requests, scoring.batch)
    check_requests(requests, limit)
    noise: dict[str, Any] = {
        "draws": scoring.draws, "seed": scoring.seed, "batch": scoring.batch
    }  # fmt: skip
    if kind == "uniform":
        classes = model.config.predicted_vocab_size
        return uniform_likelihood(predict, requests, classes, **noise)
    parts = [[r.whole if scoring.whole else r] for r in requests]
    if kind == "block":
        parts = [request.blocks(objective["block_size"]) for [request] in parts]
    flat, mask = [part for each in parts for part in each], model.config.mask_id
    scores = masked_likelihood(predict, flat, mask, guidance=scoring.guidance, **noise)
    if scoring.greedy:
        scores = [
            replace(score, greedy=greedy_answer(predict, part, mask))
            for part, score in zip(flat, scores, strict=True)
        ]
    found = iter(scores)
    return [Estimate.total([next(found) for _ in each]) for each in parts]


def predictor(
    model: Transformer, objective: Mapping[str, Any], head: Head | None = None
) -> Predict:
    """What a model sees of sequences without padding, each token where it stands."""
    family, head = family_of(objective), head or model.head
    assert head is not None

    @torch.inference_mode()
    def predict(ids: Tensor, noise: Tensor | None) -> Tensor:
        ids = ids.to(head.matrix().device)
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask: Mask = "bidirectional"
        if family == "causal":
            mask = "causal"
        elif family == "block":
            block = (positions // objective["block_size"]).expand_as(ids)
            mask = Visibility(block, block, block)
        noise = None if noise is None else noise.to(ids.device)
        logits: Tensor = head.logits(model(ids, SequenceContext(positions, mask, noise=noise)))
        return logits

    return predict


def check_requests(requests: Sequence[Request], limit: int, unseen: int = 0) -> None:
    """``ValueError`` where one is empty or longer than the ``limit`` tokens that a model sees at
    once, which are all but the last ``unseen`` ones."""
    for request in requests:
        if not request.answer:
            raise ValueError("a continuation is empty: there is nothing to be likely")
        if len(request) - unseen > limit:
            raise ValueError(
                f"a request of {len(request.prompt)} + {len(request.answer)} tokens is longer than "
                f"the {limit} tokens that the model sees at once"
            )


def causal_likelihood(
    predict: Predict, requests: Sequence[Request], batch: int = 1
) -> list[Estimate]:
    """Exact, by one forward pass each.  Every prompt needs a token."""
    assert all(request.prompt for request in requests), (
        "an autoregressive model needs a first token"
    )
    found: dict[int, Estimate] = {}
    rows = [_Row(i, 0, [*r.prompt, *r.answer][:-1]) for i, r in enumerate(requests)]
    for same, ids in _batches(rows, batch):
        logits = predict(ids, None)
        for row, scores in zip(same, logits, strict=True):
            request = requests[row.request]
            answer = torch.tensor(request.answer, device=scores.device)
            scores = scores[len(request.prompt) - 1 :].double()
            chances = scores.log_softmax(-1).gather(1, answer[:, None])
            greedy = bool((scores.argmax(-1) == answer).all())
            found[row.request] = Estimate(float(chances.sum()), 0.0, greedy)
    return [found[number] for number in range(len(requests))]


def masked_likelihood(
    predict: Predict,
    requests: Sequence[Request],
    mask: int,
    *,
    draws: int = 128,
    seed: int = 0,
    guidance: float = 0.0,
    batch: int = 1,
) -> list[Estimate]:
    """The bound of masked diffusion, the prompt never masked:

        E_k E_S (n / k) Σ_{i ∈ S} log p(answer[i] | prompt, answer outside S)

    with k uniform on 1 … n and S uniform among the sets of k of the n places of the answer  (Ou et
    al. 2024, arXiv 2406.03736; Nie et al. 2025, arXiv 2502.09992).  Of up to ``draws`` sets the sum
    is exact; otherwise ``draws`` (an even number) of them are drawn, two from each of as many equal
    parts of the range of k.  The bound is tight for a model whose conditionals are those of one
    distribution.

    guidance w > 0 scores with logits u + (w + 1) (l − u), u those of the prompt masked (classifier-
    free guidance, arXiv 2410.18514): no likelihood of the model any more.
    """
    check_draws(draws)
    rows = []
    for number, request in enumerate(requests):
        for group, weight, chosen in _mask_sets(request, draws, seed):
            row = _Row(number, group, [*request.prompt, *request.answer], weight=weight)
            row.places = [len(request.prompt) + place for place in chosen]
            for place in row.places:
                row.ids[place] = mask
            rows.append(row)
    sums: list[dict[int, list[float]]] = [{} for _ in requests]
    for same, ids in _batches(rows, batch):
        logits = _guided(predict, ids, [len(requests[row.request].prompt) for row in same], mask,
                         guidance)  # fmt: skip
        for row, scores in zip(same, logits, strict=True):
            truth = requests[row.request].prompt + requests[row.request].answer
            places = torch.tensor(row.places, device=scores.device)
            wanted = torch.tensor([truth[place] for place in row.places], device=scores.device)
            chances = scores[places].double().log_softmax(-1).gather(1, wanted[:, None])
            value = row.weight * float(chances.sum())
            sums[row.request].setdefault(row.group, []).append(value)
    return [_estimate(groups) for groups in sums]


def uniform_likelihood(
    predict: Predict,
    requests: Sequence[Request],
    classes: int,
    *,
    epsilon: float = EPSILON,
    draws: int = 128,
    seed: int = 0,
    batch: int = 1,
) -> list[Estimate]:
    """The bound of uniform-state diffusion of log p(prompt, answer), from ``draws`` times (an even
    number), two in each of as many equal parts of (``epsilon``, 1), α(t) = 1 − (1 − ``epsilon``) t.

    The prompt is noised with the answer, because the model knows no sequence of which a part is
    clean: see ``Request.whole``.  ``classes``: ids that noise can be, 0 … classes − 1.
    """
    check_draws(draws)
    rows = [
        row
        for number, request in enumerate(requests)
        for row in _replaced(number, request, classes, epsilon, draws, seed)
    ]
    sums: list[dict[int, list[float]]] = [{} for _ in requests]
    term = UniformState(1.0)
    for same, ids in _batches(rows, batch):
        clean = [requests[row.request].prompt + requests[row.request].answer for row in same]
        alpha = torch.tensor([row.alpha for row in same], dtype=torch.float64)
        alpha = alpha[:, None].expand(ids.shape)
        logits = predict(ids, -alpha[:, :1].log())[..., :classes].double().flatten(0, 1)
        fields = {
            "targets": torch.tensor(clean),
            "noisy": ids,
            "odds": alpha / (1 - alpha),
            "rate": (1 - epsilon) / alpha,
        }
        exponentials = torch.empty_like(logits)
        log_z, top = normalize_rows(logits, exponentials)
        loss, _ = term.rows(
            LogitRows(logits, 0, classes, log_z, exponentials, top),
            {name: value.flatten().to(logits.device) for name, value in fields.items()},
        )
        for row, value in zip(same, loss.view(ids.shape).sum(1).tolist(), strict=True):
            sums[row.request].setdefault(row.group, []).append(-value)
    return [_estimate(groups) for groups in sums]


def greedy_answer(predict: Predict, request: Request, mask: int) -> bool:
    """Whether a masked model, always committing the token it is surest of, gives the answer."""
    ids = torch.tensor([[*request.prompt, *([mask] * len(request.answer))]])
    answer = torch.tensor(request.answer)
    begin = len(request.prompt)
    for _ in range(len(request.answer)):
        chances = predict(ids, None)[0, begin:].double().softmax(-1).cpu()
        best, token = chances.max(-1)
        hidden = ids[0, begin:] == mask
        place = int(best.where(hidden, -1.0).argmax())
        if token[place] != answer[place]:
            return False
        ids[0, begin + place] = token[place]
    return True


def check_draws(draws: int) -> None:
    """``ValueError`` unless they go in pairs."""
    if draws < 2 or draws % 2:
        raise ValueError(f"draws must be an even number, at least 2: given {draws}")


def _generator(request: Request, seed: int) -> torch.Generator:
    """Of noise that belongs to this request."""
    numbers = [seed, len(request.prompt), *request.prompt, *request.answer]
    digest = hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _mask_sets(
    request: Request, draws: int, seed: int
) -> Iterator[tuple[int, float, Sequence[int]]]:
    """(group, weight, places in the answer).  All sets, in one group of one value each, or
    ``draws`` of them in pairs."""
    n = len(request.answer)
    if 2**n - 1 <= draws:
        for k in range(1, n + 1):
            weight = math.factorial(k - 1) * math.factorial(n - k) / math.factorial(n)
            for places in itertools.combinations(range(n), k):
                yield -1, weight, places
        return
    generator = _generator(request, seed)
    for draw in range(draws):
        part, parts = draw // 2, draws // 2
        u = torch.rand(1 + n, generator=generator, dtype=torch.float64)
        k = min(int((part + float(u[0])) / parts * n) + 1, n)
        yield part, n / k, u[1:].argsort()[:k].tolist()


def _replaced(
    number: int, request: Request, classes: int, epsilon: float, draws: int, seed: int
) -> Iterator[_Row]:
    """The whole request with some of its tokens replaced by any others, ``draws`` times."""
    clean, generator = torch.tensor(request.prompt + request.answer), _generator(request, seed)
    for draw in range(draws):
        part, parts = draw // 2, draws // 2
        u = torch.rand(1 + len(clean), generator=generator, dtype=torch.float64)
        time = epsilon + (1 - epsilon) * (part + float(u[0])) / parts
        alpha = 1 - (1 - epsilon) * time
        other = torch.randint(classes, clean.shape, generator=generator)
        yield _Row(number, part, clean.where(u[1:] < alpha, other).tolist(), alpha=alpha)


def _estimate(groups: dict[int, list[float]]) -> Estimate:
    """Mean over groups of two values each, which are equally likely parts; or the sum of group −1.

    The two draws of a part tell its variance, so that the error is that of the stratified mean."""
    if -1 in groups:
        return Estimate(math.fsum(groups[-1]))
    parts = len(groups)
    mean = math.fsum(a + b for a, b in groups.values()) / (2 * parts)
    variance = math.fsum((a - b) ** 2 for a, b in groups.values()) / (4 * parts**2)
    return Estimate(mean, math.sqrt(variance))


def _batches(rows: Iterable[_Row], batch: int) -> Iterator[tuple[list[_Row], Tensor]]:
    """Rows of one length at a time, at most ``batch``."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    for _, same in itertools.groupby(ordered, key=lambda row: len(row.ids)):
        left = list(same)
        for begin in range(0, len(left), batch):
            some = left[begin : begin + batch]
            yield some, torch.tensor([row.ids for row in some])


def _guided(
    predict: Predict, ids: Tensor, prompts: Sequence[int], mask: int, guidance: float
) -> Tensor:
    """Logits of ids [B, S], moved away from those without the prompts (so many tokens each)."""
    logits = predict(ids, None)
    if not guidance:
        return logits
    blind = ids.clone()
    for row, length in zip(blind, prompts, strict=True):
        row[:length] = mask
    without = predict(blind, None)
    return without + (guidance + 1) * (logits - without)
