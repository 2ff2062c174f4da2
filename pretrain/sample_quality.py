"""How good samples are, as far as an autoregressive model can tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data_tools.tokenizers import TextTokenizer

from .lm_eval_adapter import TextScorer, is_causal
from .sequence_losses import standard_error
from .trained import TrainedModel


@dataclass(frozen=True)
class SampleQuality:
    """Of ``samples`` texts of ``tokens`` tokens in all, in the judge's tokens.

    loss: nats per token under the judge, the first token of a sample included (behind the prompt,
    or an end-of-text token).  standard_error: of that, over samples; None of a single one.
    bits_per_byte: of the same text, to compare under one judge what models with other tokenizers
    say.  entropy: nats, of the frequencies of tokens within a sample, mean over samples; that of as
    many tokens of the text that the judge learned from is what to compare it with.
    """

    samples: int
    tokens: int
    loss: float
    standard_error: float | None
    bits_per_byte: float
    entropy: float

    @property
    def perplexity(self) -> float:
        """Generative perplexity, exp(loss).  Repetition lowers it, and shows in ``entropy``."""
        return math.exp(min(self.loss, 700.0))

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return (
            f"generative perplexity {self.perplexity:.2f} ({self.loss:.4f}{error} nats per token, "
            f"{self.bits_per_byte:.3f} bits per byte), unigram entropy {self.entropy:.3f} nats, "
            f"{self.samples} samples of {self.tokens} tokens in all"
        )


def require_judge(trained: TrainedModel) -> None:
    """ValueError unless it is an autoregressive model."""
    if not is_causal(trained):
        raise ValueError(
            f"{trained.path}: objective {trained.objective['type']} only bounds likelihoods; an "
            "autoregressive model judges samples"
        )


def sample_quality(
    judge: TextScorer,
    samples: Sequence[Sequence[int]],
    words: TextTokenizer,
    prompt: Sequence[int] = (),
) -> SampleQuality:
    """Of ``samples`` behind a ``prompt``, which is not judged; tokens of the tokenizer ``words``.

    Where that is the judge's own they are judged as they are; otherwise their text is tokenised
    anew, so that any model can be judged.  Empty samples do not count.  ValueError if nothing is
    left, or if the judge is no autoregressive model.
    """
    require_judge(judge.trained)
    own = words.sha256 == judge.words.sha256
    texts = [words.decode(ids) for ids in samples]
    beginning, before = words.decode(prompt), list(prompt)
    if own:
        whole = [[*prompt, *ids] for ids in samples]
    else:
        before = judge.words.encode(beginning)
        whole = [judge.words.encode(beginning + text) for text in texts]
    whole = [ids for ids in whole if len(ids) > len(before)]
    if not whole:
        raise ValueError("all samples are empty: there is nothing to judge")
    *nats, given = judge.token_sequences([*whole, before])
    sums = given - torch.tensor(nats, dtype=torch.float64)
    sizes = torch.tensor([len(ids) - len(before) for ids in whole], dtype=torch.float64)
    return SampleQuality(
        samples=len(whole),
        tokens=int(sizes.sum()),
        loss=float(sums.sum() / sizes.sum()),
        standard_error=standard_error(sums, sizes),
        bits_per_byte=float(sums.sum()) / math.log(2) / sum(len(t.encode()) for t in texts),
        entropy=sum(unigram_entropy(ids[len(before) :]) for ids in whole) / len(whole),
    )


def unigram_entropy(ids: Sequence[int]) -> float:
    """−Σ p log p of the frequencies p of tokens, in nats."""
    return math.fsum(-n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())
