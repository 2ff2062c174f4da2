"""The collectives seam: values, and adjoint pairs <A x, y> = <x, Aᵀ y> in real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.collectives import Axis, axis, bind, bound
from parallel.collectives import GroupAxis, mesh_axes
from parallel.mesh import Mesh
from tests.distributed import run_ranks


def test_the_default_axis_is_the_identity() -> None:
    one = axis("tp")
    assert (one.size, one.rank) == (1, 0)
    x = torch.randn(2, 3, requires_grad=True)
    results = [one.sum_(x), one.max_(x), one.copy(x), one.reduce(x), one.gather(x, 1),
               one.reduce_scatter(x, 0)]  # fmt: skip
    assert all(result is x for result in results)


def test_binding_nests_and_ends() -> None:
    first, second = Axis(), Axis()
    with bound({"tp": first}):
        assert axis("tp") is first
        with contextlib.suppress(RuntimeError), bound({"cp": second}):
            assert axis("cp") is second and axis("tp") is not first
            raise RuntimeError
        assert axis("tp") is first and axis("cp") is not second
        bind({})
        assert axis("tp") is not first
    assert axis("tp").size == 1


def test_a_single_process_binds_nothing() -> None:
    assert mesh_axes(Mesh({}, torch.device("cpu")), sequence_parallel=True) == {}


def random(rank: int, *shape: int) -> Tensor:
    """Everybody knows what rank ``rank`` drew."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


SHAPE = (6, 12, 18)  # 2 and 3 divide every dimension


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 2).contiguous().transpose(0, 2)


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda x, rank: x,
    "transposed": lambda x, rank: transposed(x),
    "strided": lambda x, rank: torch.stack([x, -x], -1)[..., 0],
    "expanded": lambda x, rank: x[:, :1].expand(SHAPE),
    "another on each rank": lambda x, rank: transposed(x) if rank % 2 else x,
}


def inputs(rank: int, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    x = change(random(rank, *SHAPE), rank)
    assert x.shape == SHAPE
    return x


def world_dot(a: Tensor, b: Tensor) -> float:
    """Σ over ranks of <a, b>."""
    total = (a * b).sum()
    dist.all_reduce(total)
    return float(total)


def _check(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    ring = GroupAxis(group)
    assert (ring.size, ring.rank) == (world, rank)
    for name, change in LAYOUTS.items():
        everyone = [inputs(r, change) for r in range(world)]
        total = torch.stack(everyone).sum(0)
        _check_values(ring, everyone, total, name)
        mine = everyone[rank]
        for dim in (0, 1, 2, -1):
            whole = list(SHAPE)
            whole[dim] *= world
            part = list(SHAPE)
            part[dim] //= world
            _check_adjoint(partial(ring.gather, dim=dim), mine, random(rank + 10, *whole))
            _check_adjoint(partial(ring.reduce_scatter, dim=dim), mine, random(rank + 10, *part))
        _check_replicated(ring, mine, change)
        assert everyone[rank].equal(inputs(rank, change)), "an input was overwritten"


def _check_values(ring: GroupAxis, everyone: list[Tensor], total: Tensor, name: str) -> None:
    mine = everyone[ring.rank]
    assert ring.copy(mine).equal(mine), name
    torch.testing.assert_close(ring.reduce(mine), total, msg=name)
    for dim in (0, 1, 2, -1):
        assert ring.gather(mine, dim).equal(torch.cat(everyone, dim)), (name, dim)
        wanted = total.chunk(ring.size, dim)[ring.rank]
        torch.testing.assert_close(ring.reduce_scatter(mine, dim), wanted)
    own = mine.contiguous().clone()
    assert ring.sum_(own) is own
    torch.testing.assert_close(own, total)
    own = mine.contiguous().clone()
    assert ring.max_(own) is own and own.equal(torch.stack(everyone).amax(0))


def _check_adjoint(operator: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Inputs and outputs differ from rank to rank and every one of them counts."""
    x = x.detach().requires_grad_()
    out = operator(x)
    assert out.shape == y.shape
    (pulled,) = torch.autograd.grad(out, x, y)
    assert world_dot(out.detach(), y) == pytest.approx(world_dot(x.detach(), pulled), rel=1e-12)


def _check_replicated(
    ring: GroupAxis, mine: Tensor, change: Callable[[Tensor, int], Tensor]
) -> None:
    """``copy`` goes from one shared value to many, ``reduce`` back: the shared side counts once."""
    shared = inputs(99, change).detach().requires_grad_()
    y = inputs(ring.rank + 10, change)  # the upstream gradient has any strides, too
    (pulled,) = torch.autograd.grad(ring.copy(shared), shared, y)
    right = float((shared * pulled).sum())
    assert world_dot(shared.detach(), y) == pytest.approx(right, rel=1e-12)
    x = mine.detach().requires_grad_()
    y = inputs(98, change)
    out = ring.reduce(x)
    (pulled,) = torch.autograd.grad(out, x, y)
    assert pulled.equal(y)
    left = float((out * y).sum())
    assert left == pytest.approx(world_dot(x.detach(), pulled), rel=1e-12)
    # the pair in a row: a column-row region whose gradient is that of the whole
    (pulled,) = torch.autograd.grad(ring.reduce(ring.copy(shared) * (ring.rank + 1)), shared, y)
    torch.testing.assert_close(pulled, y * sum(range(1, ring.size + 1)))


@pytest.mark.parametrize("world", [2, 3])
def test_values_and_adjoints(world: int) -> None:
    run_ranks(world, _check)


def _bindings(rank: int, world: int) -> list[dict[str, tuple[int, int]]]:
    mesh = Mesh({"dp": 2, "tp": 2}, torch.device("cpu"))
    return [
        {name: (a.size, a.rank) for name, a in mesh_axes(mesh, parallel).items()}
        for parallel in (False, True)
    ]


def test_axes_of_a_mesh() -> None:
    for rank, (plain, sequence) in enumerate(run_ranks(4, _bindings)):
        assert plain == {"tp": (2, rank % 2), "dp": (2, rank // 2)}
        assert sequence == {**plain, "sp": plain["tp"]}
