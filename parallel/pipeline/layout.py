"""Layout strings in Megatron's notation, such as ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a block, ``m`` a multi-token-prediction block with its norm and ``L``
the loss: the final norm and the heads.  ``|`` ends a stage, ``x*3`` repeats one symbol,
``(...)*3`` repeats a group, commas and blanks are ignored.  With several ``L`` (one per depth) the
deepest head goes to the first of them, and the last one holds the norm and next-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from parallel.pipeline.units import (
    BLOCK,
    EMBEDDING,
    HEAD,
    MTP,
    NORM,
    Placement,
    Unit,
    model_units,
)

SYMBOLS = "EtmL|"
MOST_SYMBOLS = 100_000  # a mistyped repetition must not fill the memory


class LayoutError(ValueError):
    """A layout string that cannot be read; the message shows the place."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        where = f"\n  {text}\n  {' ' * position}^" if "\n" not in text else ""
        super().__init__(f"layout string, character {position + 1}: {problem}{where}")


def _repeat(text: str, at: int, size: int) -> tuple[int, int]:
    """The count behind ``*`` at ``at`` (1 without one), and where to go on."""
    if text[at : at + 1] != "*":
        return 1, at
    end = at + 1
    while text[end : end + 1].isdigit():
        end += 1
    if end == at + 1:
        raise LayoutError(text, at, "'*' needs a number behind it")
    digits = text[at + 1 : end]
    if len(digits) > 6 or int(digits) * size > MOST_SYMBOLS:
        raise LayoutError(text, at, f"repeating {digits} times gives too long a layout")
    return int(digits), end


def _expand(text: str) -> list[tuple[str, int]]:
    """Symbols with the position each came from, groups and repetitions written out."""
    open_groups: list[tuple[list[tuple[str, int]], int]] = []
    current: list[tuple[str, int]] = []
    at = 0
    while at < len(text):
        symbol = text[at]
        if symbol in SYMBOLS:
            count, end = _repeat(text, at + 1, 1)
            current += [(symbol, at)] * count
            at = end
        elif symbol == "(":
            open_groups.append((current, at))
            current, at = [], at + 1
        elif symbol == ")":
            if not open_groups:
                raise LayoutError(text, at, "')' without '('")
            outer, _ = open_groups.pop()
            count, end = _repeat(text, at + 1, len(current))
            current, at = outer + current * count, end
        elif symbol == "," or symbol.isspace():
            at += 1
        else:
            raise LayoutError(text, at, f"unexpected {symbol!r}; allowed are E t m L | ( ) * ,")
    if open_groups:
        raise LayoutError(text, open_groups[-1][1], "'(' is never closed")
    return current


def read_layout(
    text: str, num_ranks: int, head_chunks: int = 1, mtp_input: str = "block"
) -> Placement:
    """The placement a layout string describes, stage s on rank s mod ``num_ranks``.

    ``LayoutError`` shows the position of a wrong symbol; an empty stage is refused.
    """
    symbols = _expand(text)
    found = {kind: [at for s, at in symbols if s == kind] for kind in "EtmL"}
    if len(found["E"]) != 1:
        at = found["E"][1] if found["E"] else 0
        raise LayoutError(text, at, f"exactly one E is needed, {len(found['E'])} given")
    depth = len(found["m"])
    if len(found["L"]) not in (1, depth + 1):
        at = found["L"][-1] if found["L"] else max(len(text) - 1, 0)
        raise LayoutError(
            text, at, f"one L, or {depth + 1} for {depth} m, is needed; {len(found['L'])} given"
        )
    stages: list[list[Unit]] = [[]]
    blocks, mtp_blocks, losses = 0, 0, 0
    for symbol, at in symbols:
        if symbol == "|":
            if not stages[-1]:
                raise LayoutError(text, at, f"stage {len(stages) - 1} is empty")
            stages.append([])
        elif symbol == "E":
            stages[-1].append(Unit(EMBEDDING))
        elif symbol == "t":
            stages[-1].append(Unit(BLOCK, blocks))
            blocks += 1
        elif symbol == "m":
            mtp_blocks += 1
            stages[-1] += [Unit(MTP, mtp_blocks), Unit(NORM, mtp_blocks)]
        else:
            depths = range(depth + 1) if len(found["L"]) == 1 else [depth - losses]
            losses += 1
            stages[-1] += [Unit(NORM)] if 0 in depths else []
            stages[-1] += [Unit(HEAD, k, c) for k in depths for c in range(head_chunks)]
    if not stages[-1]:
        raise LayoutError(text, max(len(text) - 1, 0), f"stage {len(stages) - 1} is empty")
    units = model_units(blocks, depth, head_chunks)
    for stage in stages:
        stage.sort(key=units.index)
    try:
        return Placement.interleaved(units, stages, num_ranks, mtp_input)
    except ValueError as error:
        raise ValueError(f"layout string {text!r}: {error}") from None


def _symbols(stage: Sequence[Unit], depths: int, chunks: int) -> str | None:
    """One stage as symbols, or ``None`` when the notation has no word for it."""
    heads = [unit for unit in stage if unit.kind == HEAD]
    whole = {unit.index for unit in heads}
    if (Unit(NORM) in stage) != (0 in whole) or len(heads) != len(whole) * chunks:
        return None
    mtp = [{unit.index for unit in stage if unit.kind == kind} - {0} for kind in (MTP, NORM)]
    if mtp[0] != mtp[1]:
        return None
    losses = "L" if len(whole) == depths else "L" * len(whole)
    return "".join(u.kind for u in stage if u.kind in (EMBEDDING, BLOCK, MTP)) + losses


def write_layout(placement: Placement) -> str:
    """The layout string of a placement; ``ValueError`` when the notation cannot express it."""
    heads = [unit for unit in placement.units if unit.kind == HEAD]
    depths = len({unit.index for unit in heads})
    words = [_symbols(stage, depths, len(heads) // depths) for stage in placement.stages]
    text = "|".join(
        "".join(
            symbol + (f"*{size}" if (size := len(list(run))) > 1 else "")
            for symbol, run in groupby(word or "")
        )
        for word in words
    )
    refusal = f"a layout string cannot express this placement:\n{placement}"
    try:
        again = read_layout(text, placement.num_ranks, len(heads) // depths, placement.mtp_input)
    except ValueError:
        raise ValueError(refusal) from None
    if (again.ranks, again.stages) != (placement.ranks, placement.stages):
        raise ValueError(refusal)
    return text
