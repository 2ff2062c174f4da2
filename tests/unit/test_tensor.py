"""Sharding plans, specialised classes, and storage on a tensor axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from models.blocks import BLOCKS
from models.config import ModelConfig
from models.declarations import wide_parameters
from models.feedforward import FEEDFORWARDS
from models.linear import Linear
from models.norms import NORMS
from models.positions import POSITIONS
from models.transformer import Embedding, Head, Transformer
from parallel.mesh import Mesh, ParallelConfig, build_mesh
from parallel.tensor import (
    add_region_edges,
    apply_tensor_parallel,
    compute_on_local,
    parameter_plans,
    shard_parameters,
    specialise,
)
from tests.distributed import run_ranks
from tests.parity.harness import SMALL

BIASED = replace(SMALL, attention=replace(SMALL.attention, qkv_bias=True))
FIELDS = {"norm": NORMS, "block": BLOCKS, "position": POSITIONS, "feedforward": FEEDFORWARDS}
VARIANTS = {
    f"{field}-{name}": replace(BIASED, **{field: registry.config_class(name)()})
    for field, registry in FIELDS.items()
    for name in registry.names()
} | {"tied": replace(SMALL, tie_embeddings=True)}


def meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_component_names_its_parameters(variant: str) -> None:
    """Each matrix is sharded; what is not, is a vector or kept wide, as routers are, or is applied
    once per sequence."""
    model = meta(VARIANTS[variant])
    plans = parameter_plans(model, sequence_parallel=True)
    assert list(plans) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        plan = plans[name]
        assert plan.shape == tuple(parameter.shape)
        assert (plan.dim is None) == plan.partial
        small = parameter.dim() < 2 or parameter in wide_parameters(model)
        small |= name.endswith(".modulation.weight")
        assert plan.dim is not None or small, f"{name} is a replicated matrix"


def test_an_unplanned_parameter_is_an_error() -> None:
    model = meta(SMALL)
    attention: Any = model.blocks["3"].attention
    attention.gate = nn.Parameter(torch.empty(4))
    with pytest.raises(ValueError, match=r"'blocks\.3\.attention\.gate' is named by no sharding"):
        parameter_plans(model, sequence_parallel=False)


def test_which_dimension_and_which_sums() -> None:
    """Replicated parameters have partial gradients inside a region (other heads on each rank), and
    everywhere once ranks see other positions."""
    for sequence in (False, True):
        plans = parameter_plans(meta(BIASED), sequence)
        found = {name: (p.dim, p.partial) for name, p in plans.items() if "blocks" not in name}
        assert found == {
            "embedding.weight": (0, False),
            "final_norm.weight": (None, sequence),
            "head.weight": (0, False),
        }
        found = {name: (p.dim, p.partial) for name, p in plans.items() if ".2." in name}
        column, row = (0, False), (1, False)
        assert {name.removeprefix("blocks.2."): kind for name, kind in found.items()} == {
            "attention_norm.weight": (None, sequence),
            "attention.q_proj.weight": column,
            "attention.q_proj.bias": column,
            "attention.k_proj.weight": column,
            "attention.k_proj.bias": column,
            "attention.v_proj.weight": column,
            "attention.v_proj.bias": column,
            "attention.o_proj.weight": row,
            "attention.q_norm.weight": (None, True),
            "attention.k_norm.weight": (None, True),
            "feedforward_norm.weight": (None, sequence),
            "feedforward.gate_proj.weight": column,
            "feedforward.up_proj.weight": column,
            "feedforward.down_proj.weight": row,
        }


def test_specialised_classes_leave_everything_else_alone() -> None:
    model = Transformer(SMALL)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    modules = list(model.modules())
    classes = [type(module) for module in modules]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    add_region_edges(model)
    compute_on_local(model, torch.bfloat16)
    assert [type(module).__name__ for module in modules] == [c.__name__ for c in classes]
    assert all(isinstance(m, c) for m, c in zip(modules, classes, strict=True))
    assert list(model.modules()) == modules
    assert [name for name, _ in model.named_parameters()] == list(state)
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    attention: Any = model.blocks["0"].attention
    read = attention.q_proj.weight
    assert read.dtype == torch.bfloat16  # what forward sees; storage stays
    assert attention.q_proj._parameters["weight"].dtype == torch.float32
    assert read.equal((state["blocks.0.attention.q_proj.weight"] + 1).bfloat16())
    assert attention.q_norm.weight.dtype == torch.float32  # norms choose for themselves
    read.sum().backward()
    assert attention.q_proj._parameters["weight"].grad.eq(1).all()
    embedding, head = model.embedding, model.head
    assert isinstance(embedding, Embedding) and isinstance(head, Head)
    assert embedding.compute_dtype == head.compute_dtype == torch.bfloat16


def test_one_class_per_base_and_key() -> None:
    a, b, c, other = (Linear(2, 2) for _ in range(4))
    for module in (a, b):
        specialise(module, ("test", 1), {"label": 1})
    specialise(c, ("test", 2), {"label": 2})
    assert type(a) is type(b) and type(a) is not type(c) and type(other) is Linear
    assert (a.label, c.label) == (1, 2)
    specialise(a, ("test", 2), {"label": 2})  # on top of the first
    assert a.label == 2 and type(a) is not type(c) and type(b).label == 1  # type: ignore[attr-defined]


def test_a_tensor_axis_of_one_changes_nothing() -> None:
    model = meta(SMALL)
    plans = parameter_plans(model, sequence_parallel=False)
    apply_tensor_parallel(model, plans, Mesh({}, torch.device("cpu")))
    assert type(model.embedding) is Embedding
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def _storage(rank: int, world: int) -> None:
    mesh = build_mesh(ParallelConfig(tp=world), torch.device("cpu"))
    model = meta(SMALL)
    plans = parameter_plans(model, sequence_parallel=False)
    shard_parameters(model, plans, mesh)
    assert set(plans) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        plan, local = plans[name], list(plans[name].shape)
        if plan.dim is not None:
            local[plan.dim] //= world
        assert tuple(parameter.shape) == plan.shape, name
        assert list(parameter._local_tensor.shape) == local, name
        assert parameter._local_tensor.is_meta and parameter._local_tensor.is_contiguous()
    model.to_empty(device="cpu")
    compute_on_local(model, None)
    attention: Any = model.blocks["0"].attention
    embedding: Any = model.embedding
    for module in (attention.q_proj, attention.q_norm, embedding):
        assert not isinstance(module.weight, DTensor)
    odd = meta(replace(SMALL, feedforward=replace(SMALL.feedforward, hidden=21)))
    with pytest.raises(ValueError, match=r"tp=2 does not divide dimension 0 of blocks\.0\.feedf"):
        shard_parameters(odd, parameter_plans(odd, sequence_parallel=False), mesh)


def test_storage_on_two_ranks() -> None:
    run_ranks(2, _storage)
