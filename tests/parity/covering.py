"""A pairwise covering array: few cases in which every pair of factor values occurs.

Run as a module it prints the multi-token-prediction cases as the table in ``docs/parity.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Value = Any
Row = dict[str, Value]

MTP_FACTORS: dict[str, tuple[Value, ...]] = {
    "depth": (0, 1, 2, 3, 4),
    "ranks": (2, 3, 4),
    "beside": ("-", "dp2", "tp2", "tp2+sp", "fsdp2"),
    "micro-batches": ("1", "P-1", "2P"),
    "plan": ("tail on last", "whole heads", "chunks"),
    "kind": ("sequential", "parallel", "repeated"),
    "tied": (False, True),
    "input": ("block", "norm"),
    "normalize": ("own_valid", "main_valid", "seq_len"),
    "documents": ("attend", "mask"),
}


def covering_array(factors: Mapping[str, Sequence[Value]]) -> list[Row]:
    """Rows of factor values that contain every pair of values of every two factors.

    Greedy and deterministic: each row takes the first uncovered pair and then, factor by factor,
    the value that covers the most pairs with those chosen so far.
    """
    names = list(factors)
    missing = {
        ((a, x), (b, y)): None
        for a, b in combinations(names, 2)
        for x, y in product(factors[a], factors[b])
    }
    rows = []
    while missing:
        (first, x), (second, y) = next(iter(missing))
        row: Row = {first: x, second: y}
        for name in names:
            if name not in row:
                gains = [_gain(row, name, value, missing, names) for value in factors[name]]
                row[name] = factors[name][gains.index(max(gains))]
        rows.append({name: row[name] for name in names})
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def pairs_of(row: Row) -> list[tuple[tuple[str, Value], tuple[str, Value]]]:
    return list(combinations(row.items(), 2))


def _gain(
    row: Row,
    name: str,
    value: Value,
    missing: Mapping[tuple[tuple[str, Value], tuple[str, Value]], None],
    names: Sequence[str],
) -> int:
    """How many uncovered pairs ``value`` makes with the values already in the row."""
    place = names.index(name)
    pairs = [
        ((other, row[other]), (name, value))
        if names.index(other) < place
        else ((name, value), (other, row[other]))
        for other in row
    ]
    return sum(pair in missing for pair in pairs)


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per row."""
    names = list(rows[0])
    lines = [["#", *names], ["---"] * (len(names) + 1)]
    lines += [[str(i), *(str(row[name]) for name in names)] for i, row in enumerate(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(covering_array(MTP_FACTORS)))
