"""The model as a list of units, and their placement on virtual stages and ranks.

A unit is the smallest thing a planner moves: ``E`` the embedding, ``t`` one block, ``n`` the
final norm, ``m_k`` the k-th multi-token-prediction block, ``n_k`` the norm behind it and ``h_k,c``
the head of depth k on the token rows of chunk c.  Everything downstream (schedules, checker,
simulator, executor) derives its dependencies from the data flow between units described here.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

EMBEDDING, BLOCK, NORM, MTP, HEAD = "E", "t", "n", "m", "h"
KINDS = (EMBEDDING, BLOCK, NORM, MTP, HEAD)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unit:
    """One placeable piece of the model.

    ``index`` is the block number for ``t`` (from 0), the depth for ``m`` (from 1), ``n`` and ``h``
    (0 is next-token prediction), and 0 otherwise.  ``chunk`` is the token chunk of a head.
    """

    kind: str
    index: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown unit kind {self.kind!r}: allowed are {KINDS}")

    def __str__(self) -> str:
        if self.kind == EMBEDDING or (self.kind == NORM and self.index == 0):
            return self.kind
        return f"{self.kind}{self.index}" + (f",{self.chunk}" if self.kind == HEAD else "")


def model_units(num_layers: int, mtp_depth: int = 0, head_chunks: int = 1) -> list[Unit]:
    """All units of a model in data-flow order: ``E t0.. n m1 n1 .. h0,0 h0,1 .. h1,0 ..``."""
    for name, value, least in (
        ("num_layers", num_layers, 0),
        ("mtp_depth", mtp_depth, 0),
        ("head_chunks", head_chunks, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: at least {least} is needed")
    return [
        Unit(EMBEDDING),
        *(Unit(BLOCK, layer) for layer in range(num_layers)),
        Unit(NORM),
        *(Unit(kind, depth) for depth in range(1, mtp_depth + 1) for kind in (MTP, NORM)),
        *(Unit(HEAD, depth, c) for depth in range(mtp_depth + 1) for c in range(head_chunks)),
    ]


WIRINGS = ("block", "norm", "trunk")


def data_flow(units: Sequence[Unit], mtp_input: str = "block") -> dict[Unit, Unit | None]:
    """The unit whose output each unit reads; ``None`` for the embedding, which reads token ids.

    ``mtp_input`` says what a multi-token-prediction block reads: what the previous depth's last
    ``"block"`` gave (before its norm), the previous depth's ``"norm"``, or, for parallel heads, the
    ``"trunk"``: all blocks but the last, which is the head of next-token prediction.  Token ids
    and labels are no part of the data flow: every rank reads them itself.
    """
    if mtp_input not in WIRINGS:
        raise ValueError(f"mtp_input is {mtp_input!r}: allowed are {WIRINGS}")
    layers = sum(unit.kind == BLOCK for unit in units)

    def block(layer: int) -> Unit:
        return Unit(BLOCK, layer) if layer >= 0 else Unit(EMBEDDING)

    def source(unit: Unit) -> Unit | None:
        match unit.kind:
            case "E":
                return None
            case "t":
                return block(unit.index - 1)
            case "n":
                return Unit(MTP, unit.index) if unit.index else block(layers - 1)
            case "h":
                return Unit(NORM, unit.index)
        if mtp_input == "trunk":
            return block(layers - 2)
        if mtp_input == "norm":
            return Unit(NORM, unit.index - 1)
        return Unit(MTP, unit.index - 1) if unit.index > 1 else block(layers - 1)

    return {unit: source(unit) for unit in units}


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that stage ``source`` computes and stage ``target`` reads, once per micro-batch.

    ``tensor`` is the producing unit's name, followed by the head chunks in brackets when the
    target reads the token rows of these ``chunks`` alone; ``share`` is that fraction of the rows.
    """

    tensor: str
    source: int
    target: int
    producer: Unit
    chunks: tuple[int, ...] = ()  # all rows when empty
    share: Fraction = Fraction(1)


@dataclass(frozen=True)
class Placement:
    """Which stage holds which units, and which rank runs which stage.

    ``units`` is the whole model, ``stages[s]`` the units of (virtual) stage s in the order they
    run, ``ranks[s]`` its rank.  Stages are numbered in data-flow order.  ``ValueError`` names every
    dropped, duplicated or misplaced unit, an empty stage, or a rank without a stage.
    """

    units: tuple[Unit, ...]
    stages: tuple[tuple[Unit, ...], ...]
    ranks: tuple[int, ...]
    mtp_input: str = "block"

    @classmethod
    def interleaved(
        cls,
        units: Iterable[Unit],
        stages: Iterable[Iterable[Unit]],
        num_ranks: int,
        mtp_input: str = "block",
    ) -> Placement:
        """The default map: stage s on rank s mod ``num_ranks``."""
        groups = tuple(tuple(stage) for stage in stages)
        if num_ranks < 1 or len(groups) < num_ranks:
            raise ValueError(f"{len(groups)} stages cannot occupy {num_ranks} ranks")
        ranks = tuple(stage % num_ranks for stage in range(len(groups)))
        return cls(tuple(units), groups, ranks, mtp_input)

    def __post_init__(self) -> None:
        problems = []
        placed = Counter(unit for stage in self.stages for unit in stage)
        expected = Counter(self.units)
        for label, names in (
            ("dropped", [u for u in self.units if not placed[u]]),
            ("placed more than once", [u for u, count in placed.items() if count > 1]),
            ("not in the model", [u for u in placed if not expected[u]]),
            ("listed twice in the model", [u for u, count in expected.items() if count > 1]),
        ):
            if names:
                problems.append(f"units {label}: {' '.join(map(str, names))}")
        empty = [stage for stage, units in enumerate(self.stages) if not units]
        if empty:
            problems.append(f"stages without a unit: {empty}; give each stage at least one")
        if len(self.ranks) != len(self.stages):
            problems.append(f"{len(self.stages)} stages but {len(self.ranks)} ranks given")
        elif not self.ranks or set(self.ranks) != set(range(max(self.ranks) + 1)):
            problems.append(f"ranks {self.ranks} must cover 0 to the highest one without a gap")
        if not problems:
            problems = self._order_problems()
        if problems:
            raise ValueError("bad placement: " + "; ".join(problems))

    def _order_problems(self) -> list[str]:
        at = {u: (s, i) for s, stage in enumerate(self.stages) for i, u in enumerate(stage)}
        return [
            f"unit {unit} (stage {at[unit][0]}) runs before {source} (stage {at[source][0]}), "
            "whose output it reads"
            for unit, source in data_flow(self.units, self.mtp_input).items()
            if source is not None and at[source] > at[unit]
        ]

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)

    def units_of(self, rank: int) -> tuple[Unit, ...]:
        """The units of one rank, in order."""
        return tuple(unit for stage in self.stages_of(rank) for unit in self.stages[stage])

    @cached_property
    def head_only(self) -> tuple[bool, ...]:
        """Per stage: holds heads alone, so that forward and backward can be one action."""
        return tuple(all(unit.kind == HEAD for unit in stage) for stage in self.stages)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every tensor that crosses stages, one per (producing unit, target stage)."""
        flow = data_flow(self.units, self.mtp_input)
        stage_of = {unit: s for s, stage in enumerate(self.stages) for unit in stage}
        chunks = Counter(unit.index for unit in self.units if unit.kind == HEAD)
        readers: dict[tuple[Unit, int], list[Unit]] = {}
        for target, stage in enumerate(self.stages):
            for unit in stage:
                source = flow[unit]
                if source is not None and stage_of[source] != target:
                    readers.setdefault((source, target), []).append(unit)
        edges = []
        for (producer, target), units in readers.items():
            name, share = str(producer), Fraction(1)
            rows: tuple[int, ...] = ()
            if all(unit.kind == HEAD for unit in units):
                share = Fraction(len(units), chunks[units[0].index])
                if share < 1:
                    rows = tuple(sorted(unit.chunk for unit in units))
                    name += str(list(rows)).replace(" ", "")
            edges.append(Edge(name, stage_of[producer], target, producer, rows, share))
        order = {unit: i for i, unit in enumerate(self.units)}
        return tuple(sorted(edges, key=lambda e: (e.source, e.target, order[e.producer])))

    @cached_property
    def inputs(self) -> tuple[tuple[Edge, ...], ...]:
        """Per stage: the edges it reads."""
        return tuple(
            tuple(e for e in self.edges if e.target == stage) for stage in range(self.num_stages)
        )

    @cached_property
    def outputs(self) -> tuple[tuple[Edge, ...], ...]:
        """Per stage: the edges it writes."""
        return tuple(
            tuple(e for e in self.edges if e.source == stage) for stage in range(self.num_stages)
        )

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage} on rank {rank}: {' '.join(map(str, units))}"
            for stage, (rank, units) in enumerate(zip(self.ranks, self.stages))
        )


def lookup(what: str, table: Mapping[str, T], name: str) -> T:
    """``table[name]``, or a ``ValueError`` with the allowed and the nearest names."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}: allowed are {sorted(table)}{hint}")
