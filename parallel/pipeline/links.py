"""Process groups for a pipeline's point-to-point traffic.

Each (channel, sender, receiver) of a schedule gets a two-rank group of its own.  A group then
carries messages in one direction and one order only, so a receive that is posted early can hold up
nothing but its own link, on backends without tags as well (NCCL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.pipeline.actions import Schedule

Link = tuple[str, int, int]  # channel, sending and receiving rank of the pipeline


@dataclass(frozen=True)
class Links:
    """This process's place in its pipeline (``ranks[rank]`` is its global rank), its groups, and
    every link that exists in the pipeline."""

    rank: int
    ranks: tuple[int, ...]
    groups: Mapping[Link, dist.ProcessGroup]
    device: torch.device
    made: frozenset[Link] = frozenset()


def create_links(
    schedule: Schedule,
    pipelines: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
    known: Links | None = None,
) -> Links:
    """Create and warm up every link of ``schedule``; collective over the default process group.
    Links that ``known`` has (the same on every process) are kept and not made again.

    ``pipelines`` lists the global ranks of every pipeline (one per data-parallel replica), each in
    pipeline order; every process passes the same list.  The links also serve any schedule whose
    own links are among them, such as the forward-only one.
    """
    size, me = schedule.placement.num_ranks, dist.get_rank()
    members = [rank for pipeline in pipelines for rank in pipeline]
    if any(len(pipeline) != size for pipeline in pipelines) or len(set(members)) != len(members):
        raise ValueError(f"pipelines {pipelines} must hold {size} ranks each, and each rank once")
    if me not in members:
        raise ValueError(f"rank {me} is in none of the pipelines {pipelines}")
    mine: tuple[int, ...] = ()
    groups: dict[Link, dist.ProcessGroup] = {}
    made = frozenset() if known is None else known.made
    for pipeline in pipelines:
        for channel, sender, receiver in (link for link in schedule.links if link not in made):
            pair = [pipeline[sender], pipeline[receiver]]
            group = dist.new_group(pair, timeout=timeout)
            if me in pair:
                groups[channel, sender, receiver] = group
        if me in pipeline:
            mine = tuple(pipeline)
    made = made.union(schedule.links)
    links = Links(mine.index(me), mine, groups, torch.device(device), made)
    _warm_up(links)
    if known is not None:
        groups.update(known.groups)
    return links


def _warm_up(links: Links) -> None:
    """One blocking message on every link, in the same order everywhere.

    Communicators are made on first use; here no rank can wait for one in the middle of a step.
    """
    word = torch.zeros(1, device=links.device)
    for (_, sender, receiver), group in sorted(links.groups.items(), key=lambda item: item[0]):
        if sender == links.rank:
            dist.send(word, links.ranks[receiver], group=group)
        else:
            dist.recv(word, links.ranks[sender], group=group)
