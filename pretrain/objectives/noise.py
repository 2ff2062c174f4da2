"""Random numbers that belong to a sample, and to nothing else.

Each is a function of (seed, stream, index of the sample): the same for every way in which a batch
is divided among ranks and micro-batches, and after a resume.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from data_tools.blend import permute
from models.initialize import parameter_key

U = TypeVar("U", float, np.ndarray)
_SPACE = 1 << 128  # counters of one sample


class SampleNoise:
    """One stream.  ``batch``: samples per step, over which ``stratified`` numbers are spread."""

    def __init__(self, seed: int, stream: str, batch: int = 1) -> None:
        self.seed, self.stream, self.batch = seed, stream, batch
        self.key = parameter_key(seed, stream)

    def bits(self, index: int, count: int) -> np.ndarray:
        """uint64 [count]; a longer request begins with the same numbers  (Philox 4x64-10: Salmon et
        al. 2011)."""
        bits: np.ndarray = np.random.Philox(key=self.key, counter=index * _SPACE).random_raw(count)
        return bits

    def uniform(self, index: int, count: int) -> np.ndarray:
        """float64 [count] in (0, 1), 52 random bits, never 0 or 1."""
        return ((self.bits(index, count) >> np.uint64(12)) + 0.5) * 2.0**-52

    def stratified(self, index: int, uniform: U, parts: int = 1, part: Any = 0) -> U:
        """``uniform`` moved into the stratum of sample ``index``: the samples of a step, each of
        which has so many ``parts``, fall into the equal parts of (0, 1) once each, in an order of
        their own in every step.  Numbers, or arrays of equally many ``uniform`` and ``part``."""
        step, place = divmod(index, self.batch)
        strata = self.batch * parts
        stratum: Any = permute(place * parts + part, strata, (self.key, step))
        return (stratum + uniform) / strata
