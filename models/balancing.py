"""Losses that keep experts in use, as sums over tokens.

Every function returns a scalar that its caller divides by the number of tokens of the global batch
(sequences all have one length, so that is the mean over sequences of a loss per sequence).  Summed
over micro-batches and ranks they are the loss of one process: none of them multiplies two averages
over what happens to be in a micro-batch.

With f_e the share of tokens that expert e gets, P_e the mean of its probability and a = Σ f_e the
mean number of active experts, the balancing loss is E Σ_e (f_e / a) P_e  (Fedus et al. 2021,
Switch, arXiv 2101.03961, eq. 4–6, where a = 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2, where
a = k).  It is 1 when experts are used equally.  Where a varies it is the realised one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .collectives import axis


def sequence_balance(
    probabilities: Tensor,
    map: Tensor,
    sequences: int,
    axes: Sequence[str] = (),
    active: float | None = None,
) -> Tensor:
    """The balancing loss of each sequence, with f and P over its own tokens, times its length.

    probabilities, map: [T, E], ``sequences`` sequences one after the other.  axes: those over which
    the positions of a sequence are spread; each rank gets its share of the loss.  active: what
    stands for a, if not what was really active.
    """
    per_sequence = (sequences, -1, map.shape[-1])
    counts = map.view(per_sequence).sum(1)
    length = map.shape[0] // sequences
    for name in axes:
        counts = axis(name).sum_(counts)
        length *= axis(name).size
    counts = counts.to(probabilities.dtype)
    total = counts.sum(-1, keepdim=True) if active is None else active * length
    return map.shape[-1] * (counts / total * probabilities.view(per_sequence).sum(1)).sum()


def global_balance(probabilities: Tensor, activity: Tensor, active: float | None = None) -> Tensor:
    """The balancing loss of all tokens of a step, with f and a of the step before.

    activity [E]: the share of that step's tokens that used each expert; it must be the same on
    every rank and for every micro-batch of the step.
    """
    total = activity.sum() if active is None else active
    weights = (activity / total).to(probabilities.dtype)
    return probabilities.shape[-1] * (weights * probabilities.sum(0)).sum()


def router_z(logits: Tensor) -> Tensor:
    """Σ over tokens of (log Σ_e exp logit_e)²  (Zoph et al. 2022, ST-MoE, arXiv 2202.08906,
    eq. 5)."""
    return logits.logsumexp(-1).square().sum()


def entropy(logits: Tensor) -> Tensor:
    """Σ over tokens of −Σ_e p_e log p_e with p = softmax(logits): top-p routing needs it small, or
    it uses ever more experts (Huang et al. 2024, arXiv 2403.07652)."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum()
