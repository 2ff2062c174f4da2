"""Denoisers that are tables: perfect ones of distributions small enough to be summed over."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from models.denoising import Canvas, Denoiser
from tests.enumerable import Joint


class MaskedTable(Denoiser):
    """p(x[i] | what is not masked), looked up."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        classes = joint.vocabulary
        super().__init__("masked", classes, mask_id=classes)
        summed = joint.table  # index ``classes`` of an axis: whatever that token is
        for axis in range(joint.length):
            summed = torch.cat([summed, summed.sum(axis, keepdim=True)], axis)
        tables = []
        for i in range(joint.length):
            table = summed.narrow(i, 0, classes).movedim(i, -1)
            table = (table / table.sum(-1, keepdim=True)).unsqueeze(i)
            table = table.repeat_interleave(classes + 1, i)
            for known in range(classes):
                table.select(i, known).copy_(torch.eye(classes)[known])
            tables.append(table.flatten(0, -2))
        self.table = torch.stack(tables, 1).log()  # [input, position, token]
        self.seen: list[Tensor] = []

    def logits(self, canvas: Canvas, noise: float) -> Tensor:
        self.seen.append(canvas.ids.clone())
        places = (self.vocabulary + 1) ** torch.arange(self.joint.length - 1, -1, -1)
        rows = self.table[(canvas.ids * places).sum(1)][:, canvas.begin : canvas.end]
        # what a model may say of ids that are none must not matter
        return torch.nn.functional.pad(rows.clamp(min=-1e30), (0, 3), value=99.0)


class UniformTable(Denoiser):
    """p(x[i] | z[j], j != i) for uniform noise of the level that it is told."""

    def __init__(self, joint: Joint) -> None:
        super().__init__("uniform", joint.vocabulary)
        self.joint = joint
        self._tables: dict[float, Tensor] = {}

    def logits(self, canvas: Canvas, noise: float) -> Tensor:
        if noise not in self._tables:
            self._tables[noise] = self._leave_one_out(math.exp(-noise))
        index = tuple(canvas.ids.unbind(1))
        return torch.stack([table[index] for table in self._tables[noise]], 1)

    def _leave_one_out(self, keep: float) -> Tensor:
        """log p, [position, z …, x]."""
        classes, length = self.vocabulary, self.joint.length
        kernel = keep * torch.eye(classes, dtype=torch.float64) + (1 - keep) / classes
        tables = []
        for i in range(length):
            table = self.joint.table
            for axis in range(length):
                if axis != i:
                    table = torch.tensordot(table, kernel, ([axis], [0])).movedim(-1, axis)
            table = (table / table.sum(i, keepdim=True)).movedim(i, -1)  # the others' z, and x
            tables.append(table.unsqueeze(i).expand(*[classes] * (length + 1)))
        return torch.stack(tables).log()


def chi_square(texts: Sequence[Sequence[int]], expected: Tensor) -> tuple[float, float]:
    """Pearson's statistic of ``texts`` against a distribution float64 [vocabulary] * length, and
    what chance exceeds in one of 10,000 cases (Wilson and Hilferty's approximation)."""
    found = Counter(map(tuple, texts))
    classes, length = expected.shape[0], expected.dim()
    statistic = 0.0
    for x in itertools.product(range(classes), repeat=length):
        mean = float(expected[x]) * len(texts)
        statistic += (found[x] - mean) ** 2 / mean
    free = classes**length - 1
    limit = free * (1 - 2 / (9 * free) + 3.719 * math.sqrt(2 / (9 * free))) ** 3
    return statistic, limit


def marginals(joint: Joint) -> Tensor:
    """The product of the marginals of ``joint``, as a distribution of its shape."""
    product = torch.ones((), dtype=torch.float64)
    for i in range(joint.length):
        product = product[..., None] * joint.conditional(i, {})
    return product
