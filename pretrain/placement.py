"""From a configuration to a placement: what units cost, which rank runs them, who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from models.config import ModelConfig
from models.flops import unit_sizes
from models.transformer import Transformer, logical_name, module_name
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.pipeline.cost import INSTANT, CostTable, Network, UnitCost, given_costs
from parallel.pipeline.planner import PlanRequest, make_placement
from parallel.pipeline.units import EMBEDDING, HEAD, MTP, Placement, Unit, model_units
from parallel.stage import unit_name

from .yaml_text import parse_yaml

STATES = 4  # weight, gradient and two moments of AdamW, all of the weight's type
HEAD_PASSES = 4  # over the vocabulary matrix in a head, however few its rows: read for logits and
# for the gradient of hidden states, its own gradient read and written
EXCHANGE_PASSES = 5  # over a gradient, to receive one further copy of it and add it


def cost_table(
    config: ModelConfig,
    sequence_length: int,
    chunks: int = 1,
    micro_batch: int = 1,
    flops_per_byte: float = PipelineConfig.flops_per_byte,
    element_bytes: int = 4,
) -> CostTable:
    """Costs of every unit per micro-batch of so many sequences: FLOPs for times, bytes for sizes.

    Weights that units share (vocabulary matrices, a repeated block) count once per rank.  A whole
    head takes the time of its FLOPs; what of it does not divide among chunks is the share of moving
    the matrix through memory, where ``flops_per_byte`` can be done while a byte is moved.
    """
    sizes = unit_sizes(config, sequence_length)
    positions = sequence_length * micro_batch
    hidden = config.hidden * positions * element_bytes
    vocabulary = config.padded_vocab_size * config.hidden * element_bytes
    table = ("vocabulary", vocabulary) if config.tie_embeddings else ("embedding", vocabulary)
    moved = HEAD_PASSES * vocabulary * flops_per_byte
    fixed_share = moved / (moved + 3 * sizes["head"].flops * micro_batch)
    shared_sizes: dict[str, float] = {}

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
        shared_sizes.update(shared)
        own = unit.kind in (EMBEDDING, HEAD) or any(name == "mtp" for name, _ in shared)
        fixed = fixed_share if unit.kind == HEAD else 0.0
        part = 1 / chunks if unit.kind == HEAD else 1.0
        flops = size.flops * micro_batch
        return UnitCost(
            forward=flops * (1 - fixed) * part,
            backward=2 * flops * (1 - fixed) * part,
            fixed=3 * flops * fixed,
            activation_bytes=size.activations * micro_batch * element_bytes * part,
            parameter_bytes=0.0 if own else weights,
            output_bytes=hidden,
            shared_bytes=tuple(shared),
        )

    units = model_units(config.layers, config.mtp.depth, chunks)
    by_unit = {unit: cost(unit) for unit in units}
    passes = EXCHANGE_PASSES * flops_per_byte
    exchange = {name: size * passes for name, size in shared_sizes.items()}
    return CostTable(by_unit=by_unit, exchange=exchange)


def read_costs(
    path: str, text: str, units: Sequence[Unit], counted: CostTable
) -> tuple[CostTable, Network]:
    """Times from YAML or JSON (see ``given_costs``), sizes as counted.  Without a time for the
    exchange of a shared weight, that is its bytes over the bandwidth.  ``ValueError`` names the
    file."""
    try:
        document = parse_yaml(text, path)
        if not isinstance(document, dict):
            raise ValueError("expected 'units' with times, such as {units: {t: 1, h: 2}}")
        given, network = given_costs(document, units)
    except ValueError as error:
        raise ValueError(f"costs={path}: {error}") from None
    by_unit = {
        unit: replace(
            counted[unit],
            forward=given[unit].forward,
            backward=given[unit].backward,
            fixed=given[unit].fixed,
        )
        for unit in units
    }
    shared = dict(pair for unit in units for pair in counted[unit].shared_bytes)
    exchange = {name: size / network.bandwidth for name, size in shared.items()}
    return CostTable(by_unit=by_unit, exchange=exchange | dict(given.exchange)), network


def _held_by_a_rank(costs: CostTable, parallel: ParallelConfig) -> CostTable:
    """Bytes that one rank stores and sends, of a whole model's: with gradients and optimizer
    state, divided as tensor and fully sharded parallelism do."""
    stored = STATES / (parallel.tp * parallel.fsdp)
    crossing = 1 / (parallel.tp if parallel.sp else 1)
    by_unit = {
        unit: replace(
            cost,
            activation_bytes=cost.activation_bytes / parallel.tp,
            output_bytes=cost.output_bytes * crossing,
            parameter_bytes=cost.parameter_bytes * stored,
            shared_bytes=tuple((name, size * stored) for name, size in cost.shared_bytes),
        )
        for unit, cost in costs.by_unit.items()
    }
    return replace(costs, by_unit=by_unit)


class Planned(NamedTuple):
    """What the planner was asked, and where it puts every unit."""

    request: PlanRequest
    placement: Placement


def plan_request(
    config: ModelConfig,
    parallel: ParallelConfig,
    sequence_length: int,
    micro_batches: int | None = None,
    micro_batch: int = 1,
) -> PlanRequest:
    """What the planner is asked; ``micro_batches`` of one step, 8 per rank unless given, each of
    ``micro_batch`` sequences.  Times are FLOPs on all tensor ranks together, or seconds from a
    file."""
    text = _cost_text(parallel)
    return _request(config, parallel, sequence_length, micro_batches, micro_batch, text)


def plan_pipeline(
    config: ModelConfig,
    parallel: ParallelConfig,
    sequence_length: int,
    micro_batches: int | None = None,
    micro_batch: int = 1,
) -> Planned:
    """Which unit runs where, planned once per process for equal arguments; ``ValueError`` when the
    planner cannot place this model."""
    text = _cost_text(parallel)
    return _planned(config, parallel, sequence_length, micro_batches, micro_batch, text)


def _cost_text(parallel: ParallelConfig) -> str:
    path = parallel.pipeline.costs
    try:
        return "" if path is None else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"costs={path}: {error}") from None


def _request(
    config: ModelConfig, parallel: ParallelConfig, sequence_length: int,
    micro_batches: int | None, micro_batch: int, cost_text: str,
) -> PlanRequest:  # fmt: skip
    pipeline = parallel.pipeline
    chunks = pipeline.chunks(parallel.rows(sequence_length))
    units = tuple(model_units(config.layers, config.mtp.depth, chunks))
    costs = cost_table(config, sequence_length, chunks, micro_batch, pipeline.flops_per_byte)
    network, gib = INSTANT, pipeline.max_memory_gib
    if pipeline.costs is not None:
        costs, network = read_costs(pipeline.costs, cost_text, units, costs)
    return PlanRequest(
        units=units,
        num_ranks=parallel.pp,
        stages_per_rank=pipeline.virtual_stages,
        costs=_held_by_a_rank(costs, parallel),
        network=network,
        layout=pipeline.layout,
        mtp_input=config.mtp.wiring,
        schedule=pipeline.schedule if pipeline.planner == "adahc" else "adahc",
        num_microbatches=micro_batches,
        max_hosts=pipeline.max_hosts,
        max_in_flight=pipeline.max_in_flight,
        memory_bytes=None if gib is None else gib * 2**30,
    )


@lru_cache(maxsize=16)  # asked when a configuration is checked, and again to build its engine
def _planned(
    config: ModelConfig, parallel: ParallelConfig, sequence_length: int,
    micro_batches: int | None, micro_batch: int, cost_text: str,
) -> Planned:  # fmt: skip
    request = _request(
        config, parallel, sequence_length, micro_batches, micro_batch, cost_text
    )  # fmt: skip
    planner = parallel.pipeline.planner if parallel.pp > 1 else "balanced"
    return Planned(request, make_placement(planner, request))


def placement_problems(
    config: ModelConfig,
    parallel: ParallelConfig,
    sequence_length: int,
    micro_batches: int,
    micro_batch: int,
) -> list[tuple[str, str]]:
    """Why the configured planner cannot place this model, as (path, message)."""
    pipeline, path = parallel.pipeline, "parallel.pipeline"
    try:
        placement = plan_pipeline(
            config, parallel, sequence_length, micro_batches, micro_batch
        ).placement
    except ValueError as error:
        if str(error).startswith("costs="):
            return [(path, str(error))]
        name = "layout" if pipeline.planner == "explicit" else "planner"
        return [(f"{path}.{name}", str(error))]
    stages = parallel.pp * pipeline.virtual_stages
    if placement.num_stages != stages and not pipeline.schedule.startswith("adahc"):
        text = f"describes {placement.num_stages} stages, but pp·virtual_stages = {stages}"
        return [(f"{path}.layout", text)]
    return []


def rank_units(placement: Placement, rank: int) -> set[str]:
    """Names of the units of one pipeline rank."""
    return set(map(unit_name, placement.units_of(rank)))


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
