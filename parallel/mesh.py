"""The layout of ranks: configuration, legality, the device mesh.

Axes, outermost first: ``pp`` (pipeline), ``dp`` (replicas), ``fsdp`` (fully sharded data
parallel), ``tp`` (tensor).  Every rank of one ``tp`` group is a neighbour of the others.  Expert
parallelism divides the replicas: dp = ``edp`` (replicas of each expert) × ``ep`` (ranks that share
the experts of one replica).
"""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.config import ModelConfig
from models.feedforward import widths

AXES = ("pp", "dp", "fsdp", "tp")


@dataclass(frozen=True)
class PipelineConfig:
    """How units are placed on pipeline ranks and in which order they run."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "adahc", "adahc_zb"] = field(
        default="1f1b",
        metadata={
            "help": "order of actions; zb_h1 and adahc_zb compute weight gradients apart,"
            " adahc and adahc_zb fit any placement"
        },
    )
    virtual_stages: int = field(
        default=1, metadata={"help": "stages per rank; more than 1 needs schedule=interleaved"}
    )
    planner: Literal["uniform", "balanced", "standalone", "split", "adahc", "explicit"] = field(
        default="balanced",
        metadata={
            "help": "how units are spread over stages; adahc cuts heads into chunks and takes the"
            " fastest plan of all kinds"
        },
    )
    layout: str | None = field(
        default=None,
        metadata={"help": "Megatron layout string for planner=explicit, e.g. 'Et*3|tt|t,L'"},
    )
    head_chunks: int | None = field(
        default=None,
        metadata={"help": "planner=adahc: token chunks of each head; null = 16, or what divides"},
    )
    max_hosts: int | None = field(
        default=None, metadata={"help": "planner=adahc: most ranks with a copy of the head"}
    )
    max_in_flight: int | None = field(
        default=None,
        metadata={"help": "planner=adahc: most micro-batches between forward and backward"},
    )
    max_memory_gib: float | None = field(
        default=None,
        metadata={"help": "planner=adahc: most memory of a rank, as launch/plan.py estimates it"},
    )
    costs: str | None = field(
        default=None, metadata={"help": "file with times per unit; null = in proportion to FLOPs"}
    )
    flops_per_byte: float = field(
        default=10.0,
        metadata={
            "help": "FLOPs while a byte of memory is moved, for what a head costs however few its"
            " rows: about 10 on a CPU core, 100 and more on an accelerator"
        },
    )
    measure_every: int = field(
        default=50,
        metadata={"help": "steps between measurements of bubble, timeline and costs; 0 = never"},
    )
    rebalance: bool = field(
        default=False,
        metadata={
            "help": "planner=adahc: move head chunks between hosts as measured (times differ from"
            " run to run, so runs no longer repeat bit for bit)"
        },
    )

    @property
    def splits_weight_gradients(self) -> bool:
        return self.schedule in ("zb_h1", "adahc_zb")

    def chunks(self, rows: int) -> int:
        """Chunks of each head for ``rows`` positions of a sequence on each tensor rank."""
        if self.planner != "adahc":
            return 1
        return self.head_chunks or math.gcd(rows, 16)

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.virtual_stages < 1:
            found.append(("virtual_stages", f"must be positive, got {self.virtual_stages}"))
        if (self.virtual_stages > 1) != (self.schedule == "interleaved"):
            found.append(
                ("schedule", f"{self.schedule!r} does not fit virtual_stages={self.virtual_stages}:"
                 " interleaved needs at least 2, the others exactly 1")
            )  # fmt: skip
        if (self.layout is not None) != (self.planner == "explicit"):
            found.append(("layout", "is given exactly when planner=explicit"))
        if self.planner == "adahc" and self.schedule not in ("adahc", "adahc_zb"):
            text = f"{self.schedule!r} runs no head chunks: planner=adahc needs adahc or adahc_zb"
            found.append(("schedule", text))
        for name in ("head_chunks", "max_hosts", "max_in_flight", "max_memory_gib"):
            value = getattr(self, name)
            if value is not None and self.planner != "adahc":
                found.append((name, "is set but planner is not adahc: it would be ignored"))
            elif value is not None and not 0 < value < math.inf:
                found.append((name, f"must be positive, got {value}"))
        if not 0 <= self.flops_per_byte < math.inf:
            found.append(("flops_per_byte", f"must not be negative, got {self.flops_per_byte}"))
        if self.measure_every < 0:
            found.append(("measure_every", f"must not be negative, got {self.measure_every}"))
        if self.rebalance and not (self.planner == "adahc" and self.measure_every):
            text = "needs planner=adahc and measure_every > 0: it would be ignored"
            found.append(("rebalance", text))
        return found


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of every parallel axis and how micro-batches are run."""

    dp: int | None = field(
        default=None, metadata={"help": "replicas; null = whatever the other axes leave"}
    )
    fsdp: int = field(default=1, metadata={"help": "ranks that share one sharded replica"})
    ep: int = field(
        default=1, metadata={"help": "ranks among dp that share a model's experts; divides dp"}
    )
    tp: int = field(default=1, metadata={"help": "tensor-parallel ranks"})
    sp: bool = field(
        default=False, metadata={"help": "shard the sequence between tensor-parallel regions"}
    )
    pp: int = field(default=1, metadata={"help": "pipeline ranks"})
    pipeline: PipelineConfig = PipelineConfig()
    recompute: Literal["none", "selective", "full"] = field(
        default="none",
        metadata={"help": "activations recomputed in backward: selective keeps matrix products"},
    )
    reshard_after_forward: bool = field(
        default=True, metadata={"help": "fsdp: free gathered weights between forward and backward"}
    )
    timeout_minutes: float = field(
        default=10.0, metadata={"help": "collectives that wait longer than this fail"}
    )

    def problems(self) -> list[tuple[str, str]]:
        found = [
            (name, f"must be positive, got {getattr(self, name)}")
            for name in ("fsdp", "ep", "tp", "pp", "timeout_minutes")
            if getattr(self, name) <= 0
        ]
        if self.dp is not None and self.dp < 1:
            found.append(("dp", f"must be positive, got {self.dp}"))
        if self.ep > 1 and self.fsdp > 1:
            found.append(
                ("ep", f"{self.ep} does not go with fsdp={self.fsdp}: the two would divide the same"
                 " dimension of the expert weights; use dp for the ranks that ep divides")
            )  # fmt: skip
        if self.sp and self.tp == 1:
            found.append(("sp", "sequence parallelism needs tp > 1: it would be ignored"))
        if self.pp == 1 and self.pipeline != PipelineConfig():
            found.append(("pipeline", "is set but pp=1: it would be ignored"))
        if self.fsdp == 1 and not self.reshard_after_forward:
            found.append(("reshard_after_forward", "is false but fsdp=1: it would be ignored"))
        if self.pp > 1 and self.fsdp > 1 and self.reshard_after_forward:
            found.append(
                ("reshard_after_forward", "must be false with pp > 1 and fsdp > 1: weights would"
                 " be gathered again for every micro-batch")
            )  # fmt: skip
        return found

    def rows(self, sequence_length: int) -> int:
        """Positions of a sequence that cross pipeline ranks from one tensor rank."""
        return sequence_length // (self.tp if self.sp else 1)

    @property
    def model_parallel(self) -> int:
        return self.fsdp * self.tp * self.pp

    def replicas(self, world_size: int) -> int:
        return self.dp if self.dp is not None else max(1, world_size // self.model_parallel)


def layout_problems(
    parallel: ParallelConfig, model: ModelConfig, world_size: int, sequence_length: int
) -> list[tuple[str, str]]:
    """Everything that is illegal about this layout of this model, as (path, message)."""
    found = []
    ranks = parallel.replicas(world_size) * parallel.model_parallel
    if ranks != world_size:
        started = "1 process was" if world_size == 1 else f"{world_size} processes were"
        found.append(
            ("parallel", f"dp·fsdp·tp·pp = {parallel.replicas(world_size)}·{parallel.fsdp}·"
             f"{parallel.tp}·{parallel.pp} = {ranks}, but {started} started")
        )  # fmt: skip
    divisible = {
        "model.attention.heads": model.attention.heads,
        "model.attention.kv_heads": model.attention.kv_heads,
        **{f"model.feedforward.{name}": n for name, n in widths(model.feedforward).items()},
        "model.vocab_multiple": model.padded_vocab_size,
    }
    for path, value in divisible.items():
        if value % parallel.tp:
            what = "the padded vocabulary" if path.endswith("multiple") else path
            found.append(("parallel.tp", f"{parallel.tp} does not divide {what} = {value}"))
    found += _expert_problems(parallel, model, world_size)
    if parallel.sp and sequence_length % parallel.tp:
        found.append(
            ("parallel.sp", f"tp={parallel.tp} does not divide sequence length {sequence_length}")
        )
    return found + _placement_problems(parallel, model, sequence_length)


def _expert_problems(
    parallel: ParallelConfig, model: ModelConfig, world_size: int
) -> list[tuple[str, str]]:
    if parallel.ep == 1:
        return []
    replicas, experts = parallel.replicas(world_size), getattr(model.feedforward, "experts", 0)
    if not experts:
        text = f"is {parallel.ep} but model.feedforward has no experts: it would be ignored"
        return [("parallel.ep", text)]
    return [
        ("parallel.ep", f"{parallel.ep} does not divide {what} = {value}")
        for what, value in (("dp", replicas), ("model.feedforward.experts", experts))
        if value % parallel.ep
    ]


def _placement_problems(
    parallel: ParallelConfig, model: ModelConfig, sequence_length: int
) -> list[tuple[str, str]]:
    """What no planner can place."""
    pipeline, depth = parallel.pipeline, model.mtp.depth
    stages = parallel.pp * pipeline.virtual_stages
    if stages > model.layers + 3 + 2 * depth:
        text = f"{stages} stages cannot be filled by {model.layers} blocks plus embedding, final"
        text += " norm and head" + (
            f" and {depth} blocks of multi-token prediction" if depth else ""
        )
        return [("parallel.pp", text)]
    if parallel.pp == 1:
        return []
    rows = parallel.rows(sequence_length)
    if rows % pipeline.chunks(rows):
        text = f"{pipeline.head_chunks} does not divide the {rows} positions of a rank"
        return [("parallel.pipeline.head_chunks", text)]
    return []


class Mesh:
    """Coordinates and process groups of this rank.  Without torch.distributed every axis has one
    member and no group."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        self.sizes = {name: sizes.get(name, 1) for name in AXES}
        self.expert = sizes.get("ep", 1)
        self.device = device
        self.device_mesh: DeviceMesh | None = None
        self.coordinate = dict.fromkeys(AXES, 0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            shape = dict(self.sizes)
            if self.expert > 1:
                shape = {"pp": self.size("pp"), "edp": self.size("edp"), "ep": self.expert,
                         "fsdp": 1, "tp": self.size("tp")}  # fmt: skip
            self.device_mesh = init_device_mesh(
                device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
            )
            coordinate = self.device_mesh.get_coordinate()
            assert coordinate is not None
            place = dict(zip(shape, coordinate, strict=True))
            if self.expert > 1:
                place["dp"] = place["edp"] * self.expert + place["ep"]
                self.device_mesh["edp", "ep"]._flatten("dp")
                self.device_mesh["edp", "ep", "fsdp"]._flatten("data")
            else:
                self.device_mesh["dp", "fsdp"]._flatten("data")
            self.coordinate = {name: place[name] for name in AXES}

    @property
    def data_size(self) -> int:
        return self.sizes["dp"] * self.sizes["fsdp"]

    @property
    def data_rank(self) -> int:
        return self.coordinate["dp"] * self.sizes["fsdp"] + self.coordinate["fsdp"]

    def size(self, axis: str) -> int:
        if axis == "edp":
            return self.sizes["dp"] // self.expert
        if axis == "ep":
            return self.expert
        return self.data_size if axis == "data" else self.sizes[axis]

    def rank(self, axis: str) -> int:
        if axis == "edp":
            return self.coordinate["dp"] // self.expert
        if axis == "ep":
            return self.coordinate["dp"] % self.expert
        return self.data_rank if axis == "data" else self.coordinate[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group along ``axis`` (``data`` = dp × fsdp, dp = edp × ep); None when it has one
        member."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        if axis == "edp" and self.expert == 1:
            axis = "dp"
        return self.device_mesh.get_group(axis)

    def sub(self, *axes: str) -> DeviceMesh:
        assert self.device_mesh is not None
        return self.device_mesh[axes]


def build_mesh(parallel: ParallelConfig, device: torch.device) -> Mesh:
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {
        "pp": parallel.pp,
        "dp": parallel.replicas(world),
        "fsdp": parallel.fsdp,
        "ep": parallel.ep,
        "tp": parallel.tp,
    }
    return Mesh(sizes, device)


def initialize_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Join the job that torchrun describes in the environment; nothing for a plain process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ValueError(
            f"cannot meet the other processes at {place} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}; if the port is taken, choose another one"
        ) from None
