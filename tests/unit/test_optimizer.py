"""AdamW and Muon over local shards: torch's own on plain parameters, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.norms import LayerNorm
from parallel.apply import BuildOptions, build_parallel_model, local_tensor
from parallel.gradients import full_parameters, full_tensor
from parallel.mesh import Mesh, ParallelConfig, build_mesh
from parallel.tensor import is_fully_sharded
from pretrain.muon import Placed, deal, orthogonalize, update_scale
from pretrain.optimizer import ShardedOptimizer
from pretrain.optimizer_config import MuonConfig, OptimizerConfig, parameter_rules
from tests.distributed import run_ranks
from tests.parity.harness import SMALL

CONFIG = OptimizerConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
MODEL = replace(
    SMALL,
    norm=LayerNorm.Config(),
    attention=replace(SMALL.attention, head_dim=2, qkv_bias=True),
    layers=2,
)
MOMENTS = ("exp_avg", "exp_avg_sq")
RATES = [0.01, 0.02, 0.005, 0.01]
CPU = torch.device("cpu")


def plain_model(dtype: torch.dtype = torch.float32) -> Any:
    return build_parallel_model(
        MODEL, ParallelConfig(), Mesh({}, CPU), BuildOptions(dtype=dtype, seed=3)
    )


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + step)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def plain_step(optimizer: ShardedOptimizer, step: int) -> None:
    for name, parameter in optimizer.stored.items():
        parameter.grad = gradient(name, parameter.shape, step).to(parameter.dtype)
    optimizer.step(RATES[step])


def is_decayed(name: str, config: OptimizerConfig) -> bool:
    """Written out: matrices, and the embedding only if asked."""
    if name == "embedding.weight":
        return config.decay_embeddings
    return name.endswith("_proj.weight") or name == "head.weight"


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, decay_embeddings=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_torch_on_plain_parameters(config: OptimizerConfig, dtype: torch.dtype) -> None:
    model = plain_model(dtype)
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, copy in copies.items():
        groups.setdefault(0.2 if is_decayed(name, config) else 0.0, []).append(copy)
    torchs = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
        lr=config.lr, betas=(0.8, 0.9), eps=1e-6, fused=True,
    )  # fmt: skip
    ours = ShardedOptimizer(model, config, "torch")
    for step, lr in enumerate(RATES):
        plain_step(ours, step)
        for group in torchs.param_groups:
            group["lr"] = lr
        for name, copy in copies.items():
            copy.grad = gradient(name, copy.shape, step).to(dtype)
        torchs.step()
    state = ours.state_tensors()
    for name, parameter in model.named_parameters():
        assert parameter.equal(copies[name]), name
        for moment in MOMENTS:
            assert state[f"{moment}/{name}"].equal(torchs.state[copies[name]][moment])
    assert ours.steps == len(RATES)


def test_equals_the_formula() -> None:
    """Loshchilov & Hutter's algorithm 2, element by element, for one decayed parameter."""
    model, name = plain_model(torch.float64), "blocks.0.feedforward.up_proj.weight"
    parameter = dict(model.named_parameters())[name]
    x = parameter.detach().clone()
    first = second = torch.zeros_like(x)
    optimizer = ShardedOptimizer(model, CONFIG, "torch")
    for step, lr in enumerate(RATES):
        plain_step(optimizer, step)
        g = gradient(name, x.shape, step)
        first = 0.8 * first + 0.2 * g
        second = 0.9 * second + 0.1 * g * g
        unbiased = first / (1 - 0.8 ** (step + 1)), second / (1 - 0.9 ** (step + 1))
        x = x - lr * (unbiased[0] / (unbiased[1].sqrt() + 1e-6) + 0.2 * x)
    torch.testing.assert_close(parameter.detach(), x, rtol=1e-12, atol=1e-14)


def test_decay_by_kind() -> None:
    for config in (CONFIG, replace(CONFIG, decay_embeddings=True)):
        for name, rule in parameter_rules(plain_model().part, config).items():
            assert rule.decays == is_decayed(name, config), name
    names = [name for name, _ in plain_model().named_parameters()]
    decayed = {name.split(".")[-2] for name in names if is_decayed(name, CONFIG)}
    assert decayed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                       "down_proj", "head"}  # fmt: skip


def test_without_gradients_only_decay_acts() -> None:
    """A parameter that took no part has gradient zero: it decays like the others."""
    model = plain_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ShardedOptimizer(model, CONFIG, "torch").step(0.5)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.2 if is_decayed(name, CONFIG) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_state_names_and_storage() -> None:
    model = plain_model()
    optimizer = ShardedOptimizer(model, CONFIG, "torch")
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_tensors()
    assert list(state) == [f"{moment}/{name}" for name in names for moment in
                           ("exp_avg", "exp_avg_sq")]  # fmt: skip
    for name, parameter in model.named_parameters():
        assert optimizer.local[name].data_ptr() == parameter.data_ptr()
        for moment in MOMENTS:
            value = state[f"{moment}/{name}"]
            assert (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
            assert not value.any()
    plain_step(optimizer, 0)
    assert all(value.any() for value in state.values())  # the very tensors that are updated
    assert all(local.grad is None for local in optimizer.local.values())


LAYOUTS = [ParallelConfig(fsdp=3), ParallelConfig(dp=3)]


def _sharded(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Whole weights and moments after every step has been taken on shards."""
    found = []
    for parallel in LAYOUTS:
        options = BuildOptions(dtype=torch.float64, seed=3)
        model = build_parallel_model(MODEL, parallel, build_mesh(parallel, CPU), options)
        optimizer = ShardedOptimizer(model, CONFIG, "torch")
        empty = sum(local.numel() == 0 for local in optimizer.local.values())
        assert (empty > 0) == (rank == 2 and parallel.fsdp == 3)  # head norms have two elements
        for step in range(len(RATES)):
            for name, stored in optimizer.stored.items():
                whole = gradient(name, stored.shape, step)
                stored.grad = torch.zeros_like(stored)
                rows, share = local_tensor(stored.grad), math.ceil(len(whole) / 3)
                sharded = is_fully_sharded(stored)
                rows.copy_(whole.split(share)[rank] if sharded and len(rows) else whole[:0]
                           if sharded else whole)  # fmt: skip
            optimizer.step(RATES[step])
        whole_state = full_parameters(model)
        for key, value in optimizer.state_tensors().items():
            assert value.shape == optimizer.stored[key.split("/")[1]].shape
            name = key.split("/")[1]
            sharded = is_fully_sharded(optimizer.stored[name])
            whole_state[key] = full_tensor(model, name, local_tensor(value), sharded)
        found.append(whole_state)
    return found


def test_shards_are_stepped_like_the_whole() -> None:
    model = plain_model(torch.float64)
    optimizer = ShardedOptimizer(model, CONFIG, "torch")
    for step in range(len(RATES)):
        plain_step(optimizer, step)
    wanted = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    for rank in run_ranks(3, _sharded):
        for found in rank:
            assert set(found) == set(wanted)
            for name, value in found.items():
                # a shard's end may meet another vector width: the last bit is free
                torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-13, atol=1e-15)


def test_missing_apex_is_explained() -> None:
    with pytest.raises(ValueError, match="NVIDIA apex built from source") as caught:
        ShardedOptimizer(plain_model(), CONFIG, "apex")
    assert "\n" not in str(caught.value)


MUON = replace(CONFIG, matrices="muon", muon=MuonConfig(lr=0.03, momentum=0.9, steps=4))


def is_matrix(name: str) -> bool:
    """Written out: what Muon takes of ``MODEL``."""
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5)], ids=str)
def test_orthogonalize_gives_singular_values_near_one(shape: tuple[int, int]) -> None:
    x = gradient("x", torch.Size(shape), 0)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalize(x, 5)
    projected = u.T @ found @ v.T
    assert found.shape == x.shape and s.max() / s.min() > 3
    torch.testing.assert_close(projected, projected.diag().diag(), atol=1e-12, rtol=0)
    assert ((projected.diag() > 0.65) & (projected.diag() < 1.25)).all()
    assert not orthogonalize(torch.zeros(3, 4), 5).any()


def test_muon_equals_torch_bitwise_in_bfloat16() -> None:
    """torch's iteration runs in bfloat16: ours does on request, with the same operations."""
    for shape, scale, theirs in (
        ((6, 10), "spectral", "original"),
        ((10, 6), "spectral", "original"),
        ((10, 6), "match_rms", "match_rms_adamw"),
    ):
        for nesterov in (True, False):
            start = gradient("start", torch.Size(shape), 0).float()
            torchs = nn.Parameter(start.clone())
            optimizer = torch.optim.Muon(
                [torchs], lr=0.01, weight_decay=0.2, momentum=0.9, nesterov=nesterov, ns_steps=4,
                adjust_lr_fn=theirs,
            )  # fmt: skip
            ours, momentum = start.clone(), torch.zeros(shape)
            for step, lr in enumerate(RATES):
                g = gradient("g", torch.Size(shape), step).float()
                torchs.grad = g.clone()
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                momentum.lerp_(g, 0.1)
                direction = g.lerp(momentum, 0.9) if nesterov else momentum
                ours.mul_(1 - lr * 0.2)
                update = orthogonalize(direction.bfloat16(), 4)
                ours.add_(update, alpha=-lr * update_scale(shape, scale))
            assert ours.equal(torchs), (shape, scale, nesterov)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    """The whole update, against the formula for matrices and torch's AdamW for everything else."""
    model = plain_model(torch.float64)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    ours = ShardedOptimizer(model, MUON, "torch")
    other = ShardedOptimizer(adamw := plain_model(torch.float64), CONFIG, "torch")
    for step in range(len(RATES)):
        plain_step(ours, step)
        plain_step(other, step)
    wanted = dict(adamw.named_parameters())
    for name, parameter in model.named_parameters():
        if not is_matrix(name):
            assert parameter.equal(wanted[name]), name
            continue
        x, momentum = start[name], torch.zeros_like(start[name])
        for step, lr in enumerate(RATES):
            g = gradient(name, x.shape, step)
            momentum = 0.9 * momentum + 0.1 * g
            muon_lr = lr * 3  # of the peaks, 0.03 to 0.01
            update = orthogonalize(0.9 * momentum + 0.1 * g, 4)
            x = x * (1 - muon_lr * 0.2) - muon_lr * 0.2 * math.sqrt(max(x.shape)) * update
        torch.testing.assert_close(parameter.detach(), x, rtol=1e-10, atol=1e-12)
    names = {name for name in start if is_matrix(name)}
    assert len(names) == 7 * MODEL.layers
    keys = {k for k in ours.state_tensors() if k.split("/")[1] in names}
    assert keys == {f"momentum/{name}" for name in names}


def test_muon_in_bfloat16_is_for_gpus() -> None:
    with pytest.raises(ValueError, match=r"optimizer.muon.bfloat16=true is for GPUs"):
        ShardedOptimizer(plain_model(), replace(MUON, muon=MuonConfig(bfloat16=True)), "torch")


def test_work_is_dealt_out_evenly_and_experts_count_alone() -> None:
    shapes = {"a": (8, 4), "b": (4, 8), "experts": (3, 6, 4)}
    # two ranks share rows of a and columns of b, and divide the experts
    placed = [
        {
            "a": Placed((4 * rank, 0), (4, 4)),
            "b": Placed((0, 4 * rank), (4, 4)),
            "experts": Placed((2 * rank, 0, 0), (2 - rank, 6, 4)),
        }
        for rank in range(2)
    ]
    (found,), (other,) = deal(shapes, placed, 0), deal(shapes, placed, 1)
    assert [m[:2] for m in found.owned] == [("a", None), ("experts", 0), ("experts", 2)]
    assert [m[:2] for m in other.owned] == [("b", None), ("experts", 1)]
    assert (found.collect, found.hand_out) == (other.collect, other.hand_out)
    pieces = {(t.matrix[:2], t.block, t.source, t.target) for t in found.collect}
    assert (("a", None), ((4, 8), (0, 4)), 1, 0) in pieces
    assert (("b", None), ((0, 4), (0, 4)), 0, 1) in pieces
    assert (("experts", 2), ((0, 6), (0, 4)), 1, 0) in pieces
    replicas = deal({"a": (8, 4)}, [{"a": Placed((0, 0), (8, 4))}] * 3, 0)[0]
    assert [(t.source, t.target) for t in replicas.collect] == [(0, 0)]
    assert [(t.source, t.target) for t in replicas.hand_out] == [(0, 0), (0, 1), (0, 2)]


def test_large_matrices_are_taken_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.muon.ROUND_ELEMENTS", 12)
    shapes = dict.fromkeys("abcdefg", (2, 4)) | {"z": (5, 8)}
    here = {name: Placed((0, 0), shape) for name, shape in shapes.items()}
    rounds = deal(shapes, [here, here], 0)
    assert [[m.name for m in r.owned] for r in rounds] == [["z"], ["b"], ["d"], ["f"]]
    mine = [[m.name for m in r.owned] for r in deal(shapes, [here, here], 1)]
    assert mine == [["a"], ["c"], ["e"], ["g"]]


@pytest.mark.parametrize("config", [CONFIG, MUON], ids=lambda config: config.matrices)
def test_restored_state_goes_on_bitwise(config: OptimizerConfig) -> None:
    model = plain_model()
    optimizer = ShardedOptimizer(model, config, "torch")
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for step in range(len(RATES)):
        if step == 2:
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            moments = {n: m.clone() for n, m in optimizer.state_tensors().items()}
        plain_step(optimizer, step)
    other = plain_model()
    for name, parameter in other.named_parameters():
        parameter.detach().copy_(weights[name])
    resumed = ShardedOptimizer(other, config, "torch")
    for name, value in resumed.state_tensors().items():
        value.copy_(moments[name])
    resumed.restore(2)
    for step in (2, 3):
        plain_step(resumed, step)
    assert resumed.steps == optimizer.steps == 4
    wanted = dict(model.named_parameters())
    assert all(p.equal(wanted[n]) for n, p in other.named_parameters())
    forgetful = ShardedOptimizer(other, config, "torch")
    forgetful.restore(2)  # without its moments
    plain_step(forgetful, 3)
    assert not other.part.head.weight.equal(wanted["head.weight"])
