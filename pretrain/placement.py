"""From a configuration to a placement: what units cost, which rank runs them, who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from models.config import ModelConfig
from models.flops import unit_sizes
from models.transformer import Transformer, logical_name, module_name
from parallel.mesh import ParallelConfig
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost, given_costs
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.units import EMBEDDING, HEAD, MTP, Placement, Unit, model_units
from parallel.stage import unit_name

from .yaml_text import parse_yaml


def cost_table(
    config: ModelConfig, sequence_length: int, element_bytes: int = 4, chunks: int = 1
) -> CostTable:
    """Costs of every unit per sequence: FLOPs for times, bytes for sizes.

    Weights that units share (vocabulary matrices, a repeated block) count once per rank.
    """
    sizes = unit_sizes(config, sequence_length)
    hidden = config.hidden * sequence_length * element_bytes
    vocabulary = config.padded_vocab_size * config.hidden * element_bytes
    table = ("vocabulary", vocabulary) if config.tie_embeddings else ("embedding", vocabulary)

    def cost(unit: Unit) -> UnitCost:
        size = sizes[unit_name(unit)]
        weights = float(sizes[module_name(config, unit_name(unit))].parameters * element_bytes)
        shared: list[tuple[str, float]] = []
        if unit.kind == EMBEDDING or (unit.kind == MTP and config.mtp.shares_embedding):
            shared.append(table)
        if unit.kind == HEAD:
            shared.append(table if config.tie_embeddings else ("head", vocabulary))
        if unit.kind == MTP and config.mtp.kind == "repeated":
            shared.append(("mtp", weights))
        own = unit.kind in (EMBEDDING, HEAD) or any(name == "mtp" for name, _ in shared)
        part = 1 / chunks if unit.kind == HEAD else 1.0
        return UnitCost(
            forward=size.flops * part,
            backward=2 * size.flops * part,
            activation_bytes=size.activations * element_bytes * part,
            parameter_bytes=0.0 if own else weights,
            output_bytes=hidden,
            shared_bytes=tuple(shared),
        )

    units = model_units(config.layers, config.mtp.depth, chunks)
    return CostTable(by_unit={unit: cost(unit) for unit in units})


def read_costs(path: str, units: Sequence[Unit], counted: CostTable) -> tuple[CostTable, Network]:
    """Times from a YAML or JSON file (see ``given_costs``), sizes as counted.  ``ValueError`` names
    the file."""
    try:
        document = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
        if not isinstance(document, dict):
            raise ValueError("expected 'units' with times, such as {units: {t: 1, h: 2}}")
        given, network = given_costs(document, units)
    except (OSError, ValueError) as error:
        raise ValueError(f"costs={path}: {error}") from None
    by_unit = {
        unit: replace(counted[unit], forward=given[unit].forward, backward=given[unit].backward)
        for unit in units
    }
    return CostTable(by_unit=by_unit), network


def plan_request(
    config: ModelConfig,
    parallel: ParallelConfig,
    sequence_length: int,
    micro_batches: int | None = None,
) -> PlanRequest:
    """What the planner is asked; ``micro_batches`` of one step, 8 per rank unless given."""
    pipeline = parallel.pipeline
    chunks = pipeline.chunks(parallel.rows(sequence_length))
    units = tuple(model_units(config.layers, config.mtp.depth, chunks))
    costs, network = cost_table(config, sequence_length, chunks=chunks), INSTANT
    if pipeline.costs is not None:
        costs, network = read_costs(pipeline.costs, units, costs)
    return PlanRequest(
        units=units,
        num_ranks=parallel.pp,
        stages_per_rank=pipeline.virtual_stages,
        costs=costs,
        network=network,
        layout=pipeline.layout,
        mtp_input=config.mtp.wiring,
        schedule=pipeline.schedule if pipeline.planner == "adahc" else "adahc",
        num_microbatches=micro_batches,
        max_hosts=pipeline.max_hosts,
        max_in_flight=pipeline.max_in_flight,
    )


@lru_cache(maxsize=16)  # asked when a configuration is checked, and again to build its engine
def plan_placement(
    config: ModelConfig,
    parallel: ParallelConfig,
    sequence_length: int,
    micro_batches: int | None = None,
) -> Placement:
    """Which unit runs where; ``ValueError`` when the planner cannot place this model."""
    request = plan_request(config, parallel, sequence_length, micro_batches)
    return make_placement(parallel.pipeline.planner if parallel.pp > 1 else "balanced", request)


def rank_units(placement: Placement, rank: int) -> set[str]:
    """Names of the units of one pipeline rank."""
    stages = placement.stages_of(rank)
    return {unit_name(unit) for stage in stages for unit in placement.stages[stage]}


def shared_hosts(config: ModelConfig, placement: Placement) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks that hold each parameter, for those with several: vocabulary matrices that
    heads and multi-token-prediction blocks share, a block that is repeated, and what all blocks
    share."""
    hosts: dict[str, list[int]] = {}
    for rank in range(placement.num_ranks):
        units = rank_units(placement, rank)
        with torch.device("meta"):
            part = Transformer(config, units)
        for name in {logical_name(name, config) for name, _ in part.named_parameters()}:
            hosts.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in sorted(hosts.items()) if len(ranks) > 1}
