"""Which tokens are sample k: windows, packed documents and blends, without any stored order.

Everything here is a pure function of (seed, sample index) and takes constant memory, so start-up,
resume and random access cost the same for a thousand samples and for a billion.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeVar

import numpy as np

from data_tools.indexed import IndexedReader
from data_tools.packing import load_packing

_MASK = (1 << 64) - 1
_ROUNDS = 8
_BLOCK = 4096
Index = TypeVar("Index", int, np.ndarray)


class BlendError(ValueError):
    """A sampling request that the data cannot meet."""


def permute(index: Index, n: int, key: tuple[int | str, ...]) -> Index:
    """Where a pseudo-random permutation of range(n), chosen by `key`, sends `index`.

    A Feistel network over the smallest power of two that holds n, walked until the result falls
    below n. An exact bijection, O(1) memory, below two walks on average.

    Args:
        index: an int, or an integer array of any shape; values in [0, n).
        n: at most 2^62.
        key: any difference gives another permutation.
    """
    keys = _round_keys(key)
    bits = max((n - 1).bit_length(), 2)
    assert n in range(1, (1 << 62) + 1)
    if not isinstance(index, np.ndarray):
        index = int(index)
        assert 0 <= index < n
        while True:
            index = _feistel(index, bits, keys)
            if index < n:
                return index
    assert index.size == 0 or (index.min() >= 0 and index.max() < n)
    out = index.astype(np.uint64).reshape(-1)
    walking = np.arange(out.size)
    while walking.size:
        out[walking] = _feistel(out[walking], bits, keys)
        walking = walking[out[walking] >= n]
    return out.astype(np.int64).reshape(index.shape)


def _round_keys(key: tuple[int | str, ...]) -> list[int]:
    text = ",".join(map(str, key))
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]


def _feistel(x: Any, bits: int, keys: list[int]) -> Any:
    """One pass over numbers of `bits` bits: Python ints or uint64 arrays, with equal results."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = x >> right_bits, x & ((1 << right_bits) - 1)
    for key in keys:
        # The halves may differ by a bit; they swap widths each round, and the rounds are even.
        mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
        left, right = right, left ^ ((mixed ^ (mixed >> 29)) & ((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


@dataclasses.dataclass(frozen=True)
class Sample:
    """One training sequence with its next tokens.

    Attributes:
        tokens: int64 [sequence_length + 1]; position t predicts token t + 1.
        documents: int32 [sequence_length + 1], which document of this sample a token belongs to,
            counted from 0; -1 on padding.
    """

    tokens: np.ndarray
    documents: np.ndarray

    @property
    def label_mask(self) -> np.ndarray:
        """bool [sequence_length]: the next token is of the same document and not padding."""
        return (self.documents[1:] == self.documents[:-1]) & (self.documents[1:] >= 0)


class Sampler(Protocol):
    """A source of samples; `num_samples` of them make one epoch, and k may go beyond."""

    num_samples: int

    def sample(self, k: int) -> Sample: ...


class WindowSampler:
    """Fixed windows of the token stream, permuted anew in every epoch.

    Window w is tokens w S .. w S + S (both included: neighbours share one token), so every token
    but the first is a label exactly once per epoch; the last (tokens - 1) mod S tokens are unused.

    Raises:
        BlendError: the stream is shorter than one window.
    """

    def __init__(self, reader: IndexedReader, sequence_length: int, seed: int) -> None:
        if sequence_length < 1:
            raise BlendError(f"sequence length {sequence_length} must be at least 1")
        self.reader, self.sequence_length, self.seed = reader, sequence_length, seed
        self.num_samples = (reader.num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise BlendError(
                f"{reader.prefix}: {reader.num_tokens:,} tokens are too few for one sample of "
                f"{sequence_length:,} + 1"
            )

    def window(self, k: int) -> int:
        """The window that sample k shows."""
        epoch, k = divmod(k, self.num_samples)
        return permute(k, self.num_samples, (self.seed, "windows", epoch))

    def sample(self, k: int) -> Sample:
        start, count = self.window(k) * self.sequence_length, self.sequence_length + 1
        tokens = self.reader.read(start, count).astype(np.int64)
        spans = self.reader.document_spans(start, count)[1]
        documents = np.repeat(np.arange(len(spans), dtype=np.int32), spans)
        return Sample(tokens, documents)


class PackedSampler:
    """Whole documents packed together by `launch/prepare.py --pack`, permuted in every epoch.

    Documents longer than a sample were cut; what a sample lacks is filled with token 0 and
    document -1. Every token but the first of its document is a label exactly once per epoch.

    Raises:
        DatasetError: there is no packing index for this length, or it is of other data.
    """

    def __init__(self, reader: IndexedReader, sequence_length: int, seed: int) -> None:
        self.reader, self.sequence_length, self.seed = reader, sequence_length, seed
        self._pieces, self._bins = load_packing(reader, sequence_length)
        self.num_samples = len(self._bins) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling a mapped array would copy the whole index.
        return (type(self), (self.reader, self.sequence_length, self.seed))

    def sample(self, k: int) -> Sample:
        epoch, k = divmod(k, self.num_samples)
        pack = permute(k, self.num_samples, (self.seed, "packs", epoch))
        tokens = np.zeros(self.sequence_length + 1, np.int64)
        documents = np.full(self.sequence_length + 1, -1, np.int32)
        end = 0
        pieces = self._pieces[self._bins[pack] : self._bins[pack + 1]].tolist()
        for number, (start, length) in enumerate(pieces):
            begin, end = end, end + length
            tokens[begin:end] = self.reader.read(start, length)
            documents[begin:end] = number
        return Sample(tokens, documents)


class Blend:
    """Samples of several sources in exact proportions.

    Slots come in blocks of 4,096 (doubled until the smallest weight earns a slot per block). After
    b blocks, source i has given the largest-remainder share of its weight of all slots, hence
    always within one sample of the exact share; inside a block the sources are interleaved by a
    permutation keyed by (seed, block). Sources see their samples in their own order, 0, 1, 2, ...

    Args:
        sources: samplers; a source has `num_samples` per epoch.
        weights: positive, need not add up to one. Default: one epoch of each at the same time.
        num_samples: how many samples will be drawn; default: all that `max_epochs` allows.
        max_epochs: how often each source may be repeated, one number or one per source.

    Raises:
        BlendError: bad weights, or `num_samples` needs more of a source than it may give.
    """

    def __init__(
        self,
        sources: Sequence[Sampler],
        weights: Sequence[float] | None = None,
        *,
        seed: int,
        num_samples: int | None = None,
        max_epochs: float | Sequence[float] = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        self.sources, self.seed = list(sources), seed
        self.names = list(names or (f"source {i}" for i in range(len(self.sources))))
        count = len(self.sources)
        if weights is None:
            weights = [source.num_samples for source in self.sources]
        epochs = [max_epochs] * count if isinstance(max_epochs, int | float) else list(max_epochs)
        if count == 0 or {len(weights), len(epochs), len(self.names)} != {count}:
            raise BlendError(
                f"a blend of {count} sources with {len(weights)} weights, {len(epochs)} epoch "
                f"limits and {len(self.names)} names: one of each per source, and at least one"
            )
        for name, weight, limit in zip(self.names, weights, epochs):
            if not (math.isfinite(weight) and weight > 0 and limit > 0):
                raise BlendError(f"{name}: weight {weight} and max_epochs {limit} must be positive")
        exact = [Fraction(str(weight)) for weight in weights]
        shared = math.lcm(*((weight / sum(exact)).denominator for weight in exact))
        self._parts = [int(weight / sum(exact) * shared) for weight in exact]  # of `shared`
        self._shared = shared
        self.block = _BLOCK
        while self.block * min(self._parts) < shared:
            self.block *= 2
        self._allowed = [
            source.num_samples * limit if math.isinf(limit) else int(source.num_samples * limit)
            for source, limit in zip(self.sources, epochs)
        ]
        self._last_block: tuple[int, np.ndarray, np.ndarray] | None = None
        self.num_samples = self._most() if num_samples is None else num_samples
        self._check(epochs)

    def _check(self, epochs: Sequence[float]) -> None:
        problems = [
            f"{name}: {source.num_samples:,} samples available per epoch, {need:,} needed, "
            f"{need / source.num_samples:.2f} epochs, at most {limit:g} allowed"
            for name, source, need, allowed, limit in zip(
                self.names, self.sources, self.counts(self.num_samples), self._allowed, epochs
            )
            if need > allowed
        ]
        if problems:
            raise BlendError(
                f"{self.num_samples:,} samples are more than the data allows ({self._most():,}): "
                + "; ".join(problems)
            )
        if self.num_samples < 1:
            raise BlendError(f"a blend of {self.num_samples} samples: the sources are too small")

    def _shares(self, slots: int) -> np.ndarray:
        """Largest-remainder shares of the first `slots` slots, int64 [sources], adding up to it.

        They never shrink from one block to the next, because a block holds at least one exact
        share of the smallest weight and each share is within one of its exact value.
        """
        floors, rest = zip(*(divmod(slots * part, self._shared) for part in self._parts))
        shares = np.array(floors, np.int64)
        by_remainder = sorted(range(len(rest)), key=lambda i: (-rest[i], i))
        shares[by_remainder[: slots - int(shares.sum())]] += 1
        return shares

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples that each source gave before a block, and the ends of their slots in it."""
        last = self._last_block  # read once: other threads may replace it
        if last is None or last[0] != number:
            before = self._shares(number * self.block)
            quotas = self._shares((number + 1) * self.block) - before
            last = self._last_block = (number, before, np.cumsum(quotas))
        return last[1:]

    def _place(self, number: int, slots: Index) -> Index:
        return permute(slots, self.block, (self.seed, "blend", number))

    def counts(self, num_samples: int) -> np.ndarray:
        """Samples that each source contributes to the first `num_samples`, int64 [sources]."""
        number, slots = divmod(num_samples, self.block)
        before, ends = self._block(number)
        sources = np.searchsorted(ends, self._place(number, np.arange(slots)), side="right")
        return before + np.bincount(sources, minlength=len(ends))

    def _most(self) -> int:
        """The largest number of samples that stays within every source's epochs."""
        if all(map(math.isinf, self._allowed)):
            raise BlendError("set num_samples: without an epoch limit a blend never ends")
        low, high = 0, 1  # in blocks: low fits, high does not
        while self._fits(high * self.block):
            low, high = high, 2 * high
        low, high = low * self.block, high * self.block
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, num_samples: int) -> bool:
        return all(need <= most for need, most in zip(self.counts(num_samples), self._allowed))

    def locate(self, k: int) -> tuple[int, int]:
        """(source, index of the sample within that source) of slot k."""
        number, slot = divmod(k, self.block)
        before, ends = self._block(number)
        place = self._place(number, slot)
        source = int(np.searchsorted(ends, place, side="right"))
        first = int(ends[source - 1]) if source else 0
        return source, int(before[source]) + place - first

    def sample(self, k: int) -> Sample:
        """Raises: BlendError if k is not below `num_samples`."""
        if not 0 <= k < self.num_samples:
            raise BlendError(f"sample {k:,} is outside the blend of {self.num_samples:,} samples")
        source, index = self.locate(k)
        return self.sources[source].sample(index)
