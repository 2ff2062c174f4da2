"""Routers against the published modules, against routing token by token, and their state."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from models.collectives import bound
from models.routers import ROUTERS, Router, Routing
from parallel.collectives import GroupAxis
from tests.distributed import run_ranks

DIM, EXPERTS, TOKENS = 12, 8, 40
F64 = torch.float64


def build(
    name: str, dtype: torch.dtype = F64, experts: int = EXPERTS, spread: float = 1.0,
    activity: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """A router with random weights and declared state."""
    config = ROUTERS.config_class(name)(**options)
    assert config.problems() + config.problems_with(experts) == []
    router = ROUTERS.build(config, DIM, experts, activity).to(dtype)
    g = torch.Generator().manual_seed(3)
    router.weight.data = torch.randn(experts, DIM, generator=g, dtype=F64).to(dtype) * spread
    for key in router.state:
        router.get_buffer(key).fill_(router.initial(key))
    return router


def tokens(count: int = TOKENS, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=g, dtype=F64).to(dtype)


def as_routing(indices: Tensor, gates: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(map, gates) [T, E] of lists of experts [T, k]."""
    zeros = gates.new_zeros(len(indices), experts)
    return zeros.bool().scatter(1, indices, True), zeros.scatter(1, indices, gates)


def random_weights(module: Any) -> Any:
    g = torch.Generator().manual_seed(7)
    module.weight.data = torch.randn(module.weight.shape, generator=g)
    return module


def same_routing(router: Router, module: Any, experts: int, exact: bool) -> None:
    router.weight.data = module.weight.data.clone()
    x = tokens(300, torch.float32)
    _, values, indices = module(x)
    map, gates = as_routing(indices, values, experts)
    ours = router(x)
    assert torch.equal(ours.map, map)
    if exact:
        assert torch.equal(ours.gates, gates)
    torch.testing.assert_close(ours.gates, gates, rtol=2e-6, atol=0)


def test_is_mixtral() -> None:
    config = MixtralConfig(hidden_size=DIM, num_local_experts=8, num_experts_per_tok=2)
    for gates in ("renormalised", "selected"):  # the module's code and the paper's formula
        router = build("topk", torch.float32, k=2, gates=gates)
        same_routing(router, random_weights(MixtralTopKRouter(config)), 8, gates == "renormalised")


@pytest.mark.parametrize("normalise", [False, True])
def test_is_qwen3(normalise: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=DIM, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalise
    )
    gates = "renormalised" if normalise else "softmax"
    router = build("topk", torch.float32, 16, k=4, gates=gates)
    same_routing(router, random_weights(Qwen3MoeTopKRouter(config)), 16, not normalise)


@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("normalise", [False, True])
def test_is_deepseek(groups: int, top_groups: int, normalise: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=DIM, n_routed_experts=16, num_experts_per_tok=4, n_group=groups,
        topk_group=top_groups, norm_topk_prob=normalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    module = random_weights(DeepseekV3TopkRouter(config))
    bias = torch.linspace(-0.3, 0.3, 16)[torch.randperm(16)]
    module.e_score_correction_bias.copy_(bias)
    router = build(
        "sigmoid", torch.float32, 16, k=4, groups=groups, top_groups=top_groups,
        normalise=normalise, scaling=2.5,
    )  # fmt: skip
    router.selection_bias.copy_(bias)
    same_routing(router, module, 16, not normalise)


def test_switch_gates() -> None:
    """k = 1: the probability of the chosen expert."""
    router, x = build("topk", k=1, gates="softmax"), tokens()
    routing = router(x)
    best = (x @ router.weight.T).softmax(-1).max(-1)
    map, gates = as_routing(best.indices[:, None], best.values[:, None], EXPERTS)
    assert torch.equal(routing.map, map)
    torch.testing.assert_close(routing.gates, gates, rtol=1e-14, atol=0)


def nucleus(probabilities: list[float], p: float, most: int) -> set[int]:
    """The most probable experts, one after the other until they reach p."""
    chosen: list[int] = []
    for expert in sorted(range(len(probabilities)), key=lambda e: -probabilities[e]):
        if chosen and (sum(probabilities[e] for e in chosen) >= p or len(chosen) == most):
            break
        chosen.append(expert)
    return set(chosen)


@pytest.mark.parametrize("p, most", [(0.4, None), (0.9, None), (0.9, 3), (1.0, None), (1e-9, 2)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_top_p_token_by_token(p: float, most: int | None, renormalise: bool) -> None:
    router, x = build("top_p", spread=0.5, p=p, most=most, renormalise=renormalise), tokens()
    routing = router(x)
    for t, probabilities in enumerate((x @ router.weight.T).softmax(-1).tolist()):
        chosen = nucleus(probabilities, p, most or EXPERTS)
        whole = sum(probabilities[e] for e in chosen) if renormalise else 1.0
        gates = [probabilities[e] / whole if e in chosen else 0.0 for e in range(EXPERTS)]
        assert set(routing.map[t].nonzero().flatten().tolist()) == chosen
        torch.testing.assert_close(routing.gates[t].tolist(), gates, rtol=1e-13, atol=0)


def test_relu() -> None:
    router, x = build("relu", k=3.0), tokens()
    routing = router(x)
    logits = x @ router.weight.T
    torch.testing.assert_close(routing.gates, logits.clamp(min=0), rtol=1e-14, atol=0)
    assert torch.equal(routing.map, logits > 0)
    assert router.balance_active == 3.0 and torch.equal(router.balance_weight, router.coefficient)


def truncated(p: Tensor, k: float, threshold: float, expansion: float) -> Tensor:
    """The published rule for one token without ties: keep p ≥ clamp(c·k/n, p of rank m, p of rank
    1), with m = min(n, ceil(alpha·k))."""
    sorted_p = p.sort(descending=True).values
    m = min(len(p), math.ceil(expansion * k))
    tau = max(min(threshold * k / len(p), float(sorted_p[0])), float(sorted_p[m - 1]))
    return p >= tau


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("k, threshold, expansion", [(1.5, 1.8, 2.0), (1.0, 1.8, 4.0), (2.5, 0, 1)])
def test_truncation(spread: float, k: float, threshold: float, expansion: float) -> None:
    router = build(
        "lapsum", experts=32, spread=spread, k=k, threshold=threshold, expansion=expansion
    )
    routing = router(tokens(200))
    p = router.values(routing.logits, None)
    cap, active = math.ceil(expansion * k), routing.map.sum(-1)
    assert active.min() >= 1 and active.max() <= cap == router.max_active
    for t in range(200):
        assert torch.equal(routing.map[t], truncated(p[t].detach(), k, threshold, expansion))
    assert torch.equal(routing.gates, torch.where(routing.map, p, 0.0))
    wanted = (p >= threshold * k / 32).sum(-1)
    figures = {name: value.item() for name, value in routing.figures.items()}
    assert figures == pytest.approx(
        {
            "kept_mass": routing.gates.sum().item() / 200,
            "k": k,
            "cap_hits": (wanted > cap).sum().item() / 200,
            "floor_hits": (wanted == 0).sum().item() / 200,
            "budget_gap": active.sum().item() / 200 - k,
        }
    )


def test_cap_and_floor_hold_when_gates_are_equal() -> None:
    """The published rule would keep all experts here; of equals the first ones stay."""
    router = build("lapsum", experts=32, spread=0.0, k=1.5, expansion=2.0)
    assert router(tokens(3)).map.nonzero()[:, 1].tolist() == [0] * 3  # all below c·k/n: the floor
    router = build("lapsum", experts=32, spread=0.0, k=1.5, threshold=0.5, expansion=2.0)
    routing = router(tokens(3))
    assert routing.map.nonzero()[:, 1].tolist() == [0, 1, 2] * 3
    torch.testing.assert_close(routing.gates[:, :3], torch.full((3, 3), 1.5 / 32, dtype=F64))


def test_rounding_of_k_opens_no_place() -> None:
    router = build("lapsum", torch.float32, k=1.5, threshold=0.0, expansion=2.0)
    x, k = tokens(5, torch.float32), torch.tensor(1.5)
    for given in (k, torch.nextafter(k, torch.tensor(9.0))):
        assert router(x, given).map.sum(-1).tolist() == [3] * 5


def test_dropped_gates_carry_no_gradient_but_k_does() -> None:
    router, x = build("lapsum", k=1.5), tokens(6)
    k = torch.tensor(1.5, dtype=F64, requires_grad=True)
    routing = router(x, k)
    assert torch.equal(routing.gates[~routing.map], torch.zeros_like(routing.gates[~routing.map]))
    weights = tokens(6)[:, :EXPERTS]
    kept = router.values(routing.logits, k)
    (d_k,) = torch.autograd.grad((routing.gates * weights).sum(), k, retain_graph=True)
    (expected,) = torch.autograd.grad(kept, k, grad_outputs=weights * routing.map)
    torch.testing.assert_close(d_k, expected, rtol=1e-14, atol=0)
    assert d_k != 0


def test_small_scale_is_hard_top_k() -> None:
    """Integer k, no scale to speak of, a threshold below every kept gate: k gates of one."""
    router = build("lapsum", k=3.0, scale=1e-6, threshold=1.0, expansion=2.0)
    hard = build("topk", k=3)
    x = tokens()
    routing = router(x)
    assert torch.equal(routing.map, hard(x).map)
    torch.testing.assert_close(routing.gates, routing.map.double(), rtol=0, atol=1e-9)


def slot_mixing(x: Tensor, slots: Tensor) -> Tensor:
    """Soft MoE of Puigcerver et al. 2023 with identity experts: slots mix all tokens."""
    logits = x @ slots.T
    return logits.softmax(1) @ (logits.softmax(0).T @ x)


@pytest.mark.parametrize("name", ROUTERS.names())
def test_tokens_are_routed_alone(name: str) -> None:
    """Another token elsewhere changes nothing, nor does leaving the others out."""
    router, x = build(name), tokens()
    before = router(x)
    other = x.clone()
    other[30] = tokens(1, seed=9)
    after, first = router(other), router(x[:30])
    for field in ("map", "gates", "logits", "probabilities"):
        assert torch.equal(getattr(before, field)[:30], getattr(after, field)[:30])
        assert torch.equal(getattr(before, field)[31:], getattr(after, field)[31:])
        assert torch.equal(getattr(before, field)[:30], getattr(first, field))
    mixed = slot_mixing(x, router.weight), slot_mixing(other, router.weight)
    assert not torch.equal(mixed[0][:30], mixed[1][:30])  # what this test would notice


@pytest.mark.parametrize("name", ROUTERS.names())
def test_invariants(name: str) -> None:
    for dtype, wide in ((F64, F64), (torch.float32, torch.float32)):
        router = build(name, dtype)
        routing = router(tokens(dtype=dtype))
        assert routing.map.shape == routing.gates.shape == (TOKENS, EXPERTS)
        assert routing.map.dtype == torch.bool
        for field in ("gates", "logits", "probabilities"):
            assert getattr(routing, field).dtype == wide
        assert ((routing.gates != 0) == routing.map).all()
        assert 1 <= routing.map.sum(-1).max() <= router.max_active
        if name != "relu":
            sums = routing.probabilities.sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)
        for value in routing.figures.values():
            assert value.dim() == 0 and not value.requires_grad


@pytest.mark.parametrize("name", ROUTERS.names())
def test_narrow_tokens_are_routed_in_float32(name: str) -> None:
    router, x = build(name, torch.float32), tokens().bfloat16()
    routing, wide = router(x), router(x.float())
    assert torch.equal(routing.logits, wide.logits) and torch.equal(routing.gates, wide.gates)
    assert routing.gates.dtype == torch.float32


@pytest.mark.parametrize("name", ROUTERS.names())
def test_gradients(name: str) -> None:
    """gradcheck of gates, logits and probabilities w.r.t. tokens, weights and k; the maps of these
    tokens do not change with so small a step."""
    router, x = build(name), tokens(4).requires_grad_()
    k = torch.tensor(1.7, dtype=F64, requires_grad=True) if router.takes_budget else None

    def call(x: Tensor, weight: Tensor, *k: Tensor) -> Any:
        routing = torch.func.functional_call(router, {"weight": weight}, (x, *k))
        return routing.gates, routing.logits, routing.probabilities

    inputs = (x, router.weight, *([] if k is None else [k]))
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("name", ROUTERS.names())
def test_runs_without_data(name: str) -> None:
    with torch.device("meta"):
        router = ROUTERS.build(ROUTERS.config_class(name)(), DIM, EXPERTS, True)
        routing = router(torch.empty(5, DIM))
    assert routing.gates.shape == (5, EXPERTS) and routing.gates.is_meta
    assert 1 <= router.max_active <= EXPERTS
    assert all(router.initial(key) is not None for key in router.state)


def fixed_counts(router: Router, chosen: list[list[int]]) -> None:
    """One micro-batch that used these experts."""
    map = torch.zeros(len(chosen), EXPERTS, dtype=torch.bool)
    for t, experts in enumerate(chosen):
        map[t, experts] = True
    router.count(map.sum(0), len(map))


def test_selection_bias_follows_the_load() -> None:
    """Sign of (mean − load) over all micro-batches of the step; equal load leaves it."""
    router = build("sigmoid", bias_rate=0.25)
    router.selection_bias.copy_(torch.arange(8.0))
    fixed_counts(router, [[0, 1], [0, 2]])
    fixed_counts(router, [[0, 1], [3, 4], [5, 1], [2, 0]])  # loads 4 3 2 1 1 1 0 0, mean 1.5
    router.update_state(1)
    moved = router.selection_bias - torch.arange(8.0)
    assert moved.tolist() == [-0.25, -0.25, -0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    fixed_counts(router, [[0, 1], [2, 3], [4, 5], [6, 7]])
    before = router.selection_bias.clone()
    router.update_state(2)
    assert torch.equal(router.selection_bias, before)
    router.update_state(3)  # nothing was routed
    assert torch.equal(router.selection_bias, before)


def test_bias_changes_the_selection_but_not_the_gates() -> None:
    router, x = build("sigmoid", k=1, normalise=False), tokens()
    router.selection_bias[5] = 9.0
    routing = router(x)
    assert torch.equal(routing.map.nonzero()[:, 1], torch.full((TOKENS,), 5))
    torch.testing.assert_close(routing.gates[:, 5], (x @ router.weight[5]).sigmoid())


def test_l1_coefficient_follows_the_activity() -> None:
    router = build("relu", k=2.0, coefficient=1e-3, growth=1.5)
    for chosen, factor in (([[0, 1, 2]], 1.5), ([[0], [1]], 1.0), ([[0, 1], [2, 3]], 1.0)):
        fixed_counts(router, chosen)
        router.update_state(1)
        assert float(router.coefficient) == pytest.approx(1e-3 * factor, rel=1e-12)


def test_activity_is_carried() -> None:
    router = build("topk", activity=True)
    assert router.state == ("activity",) and router.activity.tolist() == [0.25] * 8
    fixed_counts(router, [[0, 1], [0, 2]])
    fixed_counts(router, [[0, 1], [3, 4]])
    router.update_state(1)
    assert router.activity.tolist() == [0.75, 0.5, 0.25, 0.25, 0.25, 0, 0, 0]
    assert build("topk").state == ()


def test_scale_schedule() -> None:
    """Half a cosine from 5 to 1 over 4 updates, then constant; the gates use it."""
    router, x = build("lapsum", scale=5.0, final_scale=1.0, scale_steps=4), tokens()
    seen = []
    for step in range(6):
        router.update_state(step)
        seen.append(float(router.scale))
        plain = build("lapsum", scale=seen[-1])
        assert torch.equal(router(x).gates, plain(x).gates)
    expected = [1 + 2 * (1 + math.cos(math.pi * min(step / 4, 1))) for step in range(6)]
    assert seen == pytest.approx(expected) and seen[0] == 5.0 and seen[4:] == [1.0, 1.0]
    assert router.state == ("scale",) and build("lapsum").state == ()


STATEFUL = ("sigmoid", "relu", "lapsum")


def update(x: Tensor) -> dict[str, Tensor]:
    """The state of three routers after a step on these tokens."""
    state = {}
    for name in STATEFUL:
        router = build(name, activity=True)
        router.count(router(x).map.sum(0), len(x))
        router.update_state(1)
        state.update({f"{name}.{key}": buffer for key, buffer in router.named_buffers()})
    return state


def update_on_rank(rank: int, world: int) -> dict[str, Tensor]:
    with bound({"dp": GroupAxis(dist.group.WORLD)}):  # type: ignore[arg-type]
        return update(tokens().chunk(world)[rank])


def test_state_is_that_of_one_process() -> None:
    """On every rank, whatever tokens it had."""
    expected = update(tokens())
    assert len(expected) == 5
    for state in run_ranks(2, update_on_rank):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(state[key], value), key


@dataclass
class Wrong:
    router: str
    options: dict[str, Any]
    key: str
    text: str


@pytest.mark.parametrize(
    "case",
    [
        Wrong("topk", {"k": 0}, "k", "must be positive, got 0"),
        Wrong("topk", {"k": 9}, "k", "must lie in 1 to 8, got 9"),
        Wrong("sigmoid", {"groups": 3, "top_groups": 1}, "groups", "must divide the 8 experts"),
        Wrong("sigmoid", {"groups": 8, "top_groups": 4}, "groups", "at least 2 experts in a group"),
        Wrong("sigmoid", {"groups": 4, "top_groups": 5}, "top_groups", "must lie in 1 to 4, got 5"),
        Wrong("sigmoid", {"groups": 4, "k": 3}, "k", "must lie in 1 to 2, got 3"),
        Wrong("sigmoid", {"bias_rate": -1.0}, "bias_rate", "must not be negative"),
        Wrong("sigmoid", {"scaling": 0.0}, "scaling", "must be positive"),
        Wrong("relu", {"k": 8.0}, "k", "must be below 8, got 8.0"),
        Wrong("relu", {"coefficient": 0.0}, "coefficient", "must be positive"),
        Wrong("relu", {"growth": 1.0}, "growth", "must exceed 1"),
        Wrong("top_p", {"p": 0.0}, "p", r"must lie in (0, 1], got 0.0"),
        Wrong("top_p", {"most": 0}, "most", "must be positive"),
        Wrong("top_p", {"most": 9}, "most", "must lie in 1 to 8, got 9"),
        Wrong("lapsum", {"k": 8.0}, "k", "must be below 8, got 8.0"),
        Wrong("lapsum", {"k": 4.0, "learned": True}, "k", "must be below 4, got 4.0"),
        Wrong("lapsum", {"k": 1.0, "learned": True}, "k", "must exceed 1 to be split"),
        Wrong("lapsum", {"scale": 0.0}, "scale", "must be positive"),
        Wrong("lapsum", {"final_scale": -1.0, "scale_steps": 3}, "final_scale", "must be positive"),
        Wrong(
            "lapsum", {"final_scale": 1.0}, "scale_steps", "be positive with final_scale=1.0, got 0"
        ),
        Wrong(
            "lapsum", {"scale_steps": 5}, "scale_steps", "must be 0 with final_scale=null, got 5"
        ),
        Wrong(
            "lapsum",
            {"k": 2.0, "threshold": 4.0},
            "threshold",
            "must be below experts / k = 4, got 4.0: no gate could reach c·k/n",
        ),
        Wrong("lapsum", {"threshold": -0.1}, "threshold", "must not be negative"),
        Wrong("lapsum", {"expansion": 0.9}, "expansion", "must be at least 1"),
    ],
    ids=lambda case: f"{case.router}-{case.key}",
)
def test_problems(case: Wrong) -> None:
    config = ROUTERS.config_class(case.router)(**case.options)
    found = [*config.problems(), *config.problems_with(EXPERTS)]
    assert any(key == case.key and case.text in text for key, text in found), found


def test_only_a_budget_router_takes_k() -> None:
    router = build("topk")
    with pytest.raises(AssertionError, match="takes no budget"):
        router(tokens(), torch.tensor(1.5))


def test_a_routing_can_be_replayed() -> None:
    """Gates follow a given map: what compares layouts whose rounding flips a choice."""
    router, x = build("topk", k=2), tokens()
    other = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    for t, pair in zip(range(TOKENS), itertools.cycle(itertools.combinations(range(EXPERTS), 2))):
        other[t, list(pair)] = True
    router.select = lambda *_: other
    routing: Routing = router(x)
    assert torch.equal(routing.map, other)
    torch.testing.assert_close(routing.gates.sum(-1), torch.ones(TOKENS, dtype=F64))
