"""Planners: which unit goes to which stage and rank.  A planner is one registered function."""

from __future__ import annotations

from parallel.pipeline import adahc, baselines  # noqa: F401 (they register planners)
from parallel.pipeline.request import PLANNERS, PlanRequest, hosts
from parallel.pipeline.units import Placement, lookup

__all__ = ["PLANNERS", "PlanRequest", "make_placement"]


def make_placement(name: str, request: PlanRequest) -> Placement:
    """Run a registered planner; ``ValueError`` when the name or the request does not fit."""
    if name == "vocab":
        raise ValueError(
            "planner vocab, heads divided by vocabulary over the pipeline ranks, exists in "
            "comparisons alone and cannot be run; planner 'adahc' divides heads by tokens"
        )
    placement = lookup("pipeline planner", PLANNERS, name)(request)
    used = hosts(placement)
    if request.max_hosts is not None and len(used) > request.max_hosts:
        raise ValueError(
            f"planner {name} puts heads on ranks {list(used)}, but at most {request.max_hosts} may "
            "hold a copy of the head"
        )
    return placement
