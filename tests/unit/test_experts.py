"""Expert layers: the flat dispatcher against a dense sum, auxiliary losses, configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.balancing import router_z, sequence_balance
from models.collectives import axis, bound
from models.config import ModelConfig
from models.declarations import named_state
from models.experts import (
    BalanceConfig,
    Experts,
    MoE,
    active_pairs,
    exchange_blocks,
)
from models.feedforward import SwiGLU
from models.flops import unit_sizes
from models.mtp import MTPConfig
from models.routers import LapSum, ReLU, Sigmoid, TopK, TopP
from models.transformer import Transformer
from parallel.collectives import GroupAxis
from parallel.expert import expert_layers
from pretrain.decode import decode, encode
from tests.distributed import run_ranks

EXPERTS, DIM, HIDDEN, TOKENS = 5, 6, 7, 11
ROUTERS = {
    "topk": TopK.Config(),
    "switch": TopK.Config(k=1, gates="softmax"),
    "sigmoid": Sigmoid.Config(),
    "relu": ReLU.Config(),
    "top_p": TopP.Config(p=0.5),
    "lapsum": LapSum.Config(threshold=1.0),
    "lapsum-learned": LapSum.Config(learned=True, threshold=1.0),
}


def fill(module: torch.nn.Module, std: float = 0.7) -> Any:
    module.double()
    for index, parameter in enumerate(module.parameters()):
        g = torch.Generator().manual_seed(index)
        parameter.data = std * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    for _, buffer in named_state(module):
        buffer.fill_(0.25)
    return module


def random(*shape: int, seed: int = 99) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def dense(experts: Any, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
    """Every expert on every token."""
    out = torch.zeros_like(x)
    for e in range(chosen.shape[1]):
        gate, up, down = (getattr(experts, f"{n}_proj").weight[e] for n in ("gate", "up", "down"))
        share = (gates[:, e] * chosen[:, e])[:, None]
        out = out + share * ((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return out


def maps() -> dict[str, Tensor]:
    random_map = random(TOKENS, EXPERTS, seed=1) > 0.3
    idle = random_map.clone()
    idle[:, 2] = False
    some = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    some[0] = True  # one token with all, one with one, others with none
    some[3, 4] = True
    return {
        "random": random_map,
        "an idle expert": idle,
        "few": some,
        "none": torch.zeros_like(some),
        "all": torch.ones_like(some),
    }


@pytest.mark.parametrize("name", maps())
def test_the_flat_dispatcher_is_the_dense_sum(name: str) -> None:
    chosen, x, gates = maps()[name], random(TOKENS, DIM), random(TOKENS, EXPERTS, seed=3).abs()
    results = []
    for compute in (lambda m, *args: m(*args), dense):
        module = fill(Experts(EXPERTS, DIM, HIDDEN, 2))
        inputs = (x.clone().requires_grad_(), chosen, gates.clone().requires_grad_())
        out = compute(module, *inputs)
        (out * random(TOKENS, DIM, seed=7)).sum().backward()
        found = [out, inputs[0].grad, inputs[2].grad, *(p.grad for p in module.parameters())]
        results.append([torch.zeros(()) if t is None else t for t in found])
    for flat, reference in zip(*results, strict=True):
        torch.testing.assert_close(flat.expand_as(reference), reference, rtol=1e-12, atol=1e-13)
    module = fill(Experts(EXPERTS, DIM, HIDDEN, 2))
    module(x, chosen, gates).sum().backward()
    for parameter in module.parameters():  # where nothing came, exactly 0, and there
        idle = ~chosen.any(0)
        assert parameter.grad is not None and not parameter.grad[idle].any()


def test_every_active_pair_is_one_row() -> None:
    for chosen in maps().values():
        pairs = active_pairs(chosen, 2)
        assert pairs.counts == chosen.sum(0).tolist()
        assert sum(pairs.counts) == len(pairs.tokens) == len(pairs.experts) == chosen.sum()
        again = torch.zeros_like(chosen)
        again[pairs.tokens, pairs.experts] = True
        assert torch.equal(again, chosen)
        assert pairs.experts.tolist() == sorted(pairs.experts.tolist())
    planned = active_pairs(torch.empty(8, 4, dtype=torch.bool, device="meta"), 3)
    assert planned.counts == [6, 6, 6, 6] and planned.tokens.shape == (24,)


def test_blocks_change_order_and_back() -> None:
    sizes = [[2, 0, 1], [1, 3, 0]]
    rows = torch.arange(7)
    there = exchange_blocks(rows, sizes)
    assert there.tolist() == [0, 1, 3, 4, 5, 6, 2]
    turned = [list(column) for column in zip(*sizes, strict=True)]
    assert torch.equal(exchange_blocks(there, turned), rows)


def test_gradients() -> None:
    module = fill(Experts(3, 2, 2, 2))
    chosen = torch.tensor([[True, False, True], [False, False, True], [True, False, False]])
    parameters = dict(module.named_parameters())

    def call(x: Tensor, gates: Tensor, *values: Tensor) -> Any:
        given = dict(zip(parameters, values))
        return torch.func.functional_call(module, given, (x, chosen, gates))

    inputs = (random(3, 2).requires_grad_(), random(3, 3, seed=2).requires_grad_())
    assert torch.autograd.gradcheck(call, (*inputs, *parameters.values()))


def layer(router: str, **more: Any) -> MoE:
    config = MoE.Config(experts=4, hidden=HIDDEN, router=ROUTERS[router], **more)
    found: MoE = fill(MoE(config, DIM))
    shared = torch.nn.ModuleDict()
    found.use_shared(shared)
    fill(shared)
    return found


@pytest.mark.parametrize("router", ROUTERS)
def test_a_layer_is_the_weighted_sum_of_its_experts(router: str) -> None:
    module, x = layer(router, shared_experts=2, shared_hidden=3), random(2, TOKENS, DIM)
    flat = x.flatten(0, 1)
    k = module._budget[0]()[0] if module._budget else None
    routing = module.router(flat, k)
    wanted = dense(module.experts, flat, routing.map, routing.gates).view_as(x)
    assert module.shared_experts is not None
    assert module.shared_experts.gate_proj.weight.shape == (6, DIM)
    wanted = wanted + module.shared_experts(x)
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_token_changes_no_other(router: str) -> None:
    """Every token is routed alone: causal, and independent of its batch."""
    module, x = layer(router), random(1, TOKENS, DIM)
    changed = x.clone()
    changed[0, 4] += 1.0
    other = torch.arange(TOKENS) != 4
    torch.testing.assert_close(module(x)[0, other], module(changed)[0, other], rtol=0, atol=1e-13)
    assert not torch.equal(module(x)[0, 4], module(changed)[0, 4])


def test_hard_lapsum_is_an_unweighted_top_k() -> None:
    """Integer k, scale to 0, threshold below every kept gate."""
    module, x = layer("lapsum"), random(1, TOKENS, DIM)
    router = LapSum.Config(k=2.0, scale=1e-4, threshold=1.0)
    hard = MoE(replace(module.config, router=router), DIM).double()
    hard.load_state_dict(module.state_dict())
    logits = x[0] @ module.router.weight.T
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    wanted = dense(module.experts, x[0], chosen, torch.ones_like(logits))
    torch.testing.assert_close(hard(x)[0], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_shares_of_the_hidden_width_add_up_to_the_whole(router: str) -> None:
    x, total = random(2, 3, DIM), torch.zeros(2, 3, DIM, dtype=torch.float64)
    for part in (slice(0, 3), slice(3, HIDDEN)):
        share = layer(router)
        for name in ("gate_proj", "up_proj"):
            weight = getattr(share.experts, name).weight
            weight.data = weight.data[:, part].contiguous()
        down = share.experts.down_proj.weight
        down.data = down.data[:, :, part].contiguous()
        total += share(x)
    torch.testing.assert_close(total, layer(router)(x), rtol=1e-12, atol=1e-13)


BALANCE = BalanceConfig(weight=0.3, z_loss=0.05)


@pytest.mark.parametrize("recompute", [False, True])
def test_auxiliary_losses_come_with_the_gates(recompute: bool) -> None:
    """Their gradient is autograd's, and what is noted is their value, once."""
    x, tokens = random(2, TOKENS, DIM), 100
    module = layer("topk", balance=BALANCE)
    module.begin_step(tokens)
    for half in x:  # two micro-batches
        given = half[None].clone().requires_grad_()
        call = checkpoint(module, given, use_reentrant=False) if recompute else module(given)
        call.square().sum().backward()
    plain = layer("topk", balance=BALANCE)
    routing = plain.router(x.flatten(0, 1))
    balance = sequence_balance(routing.probabilities, routing.map, 2)
    z = router_z(routing.logits)
    loss = (0.3 * balance + 0.05 * z) / tokens
    (plain(x).square().sum() + loss).backward()
    for (name, found), (_, wanted) in zip(module.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-11, atol=1e-13, msg=name)
    assert float(module.sums["balance"]) == pytest.approx(float(balance), rel=1e-13)
    assert float(module.sums["router_z"]) == pytest.approx(float(z), rel=1e-13)
    assert float(module.sums["total"]) == pytest.approx(float(loss), rel=1e-13)
    assert module.sums["counts"].tolist() == routing.map.sum(0).tolist()
    assert float(module.sums["tokens"]) == 2 * TOKENS


def test_what_is_noted_when() -> None:
    """Losses in backward passes of training, figures of evaluations in forward passes."""
    module, x = layer("topk", balance=BALANCE), random(1, TOKENS, DIM)
    module(x).sum().backward()  # nobody began a step
    module.begin_step(100)
    module(x)  # a forward pass alone
    assert module.sums == {}
    with torch.no_grad():
        module(x)
        module(x)
    assert float(module.sums["tokens"]) == 2 * TOKENS
    assert not module.sums["total"] and "balance" not in module.sums
    module.begin_step(100)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module(x.requires_grad_()).sum().backward()  # frozen, in the middle of what is trained
    assert "total" in module.sums


@pytest.mark.parametrize("recompute", [False, True])
def test_routers_count_once_per_backward_pass(recompute: bool) -> None:
    """With and without recomputation; not in evaluation, without a backward pass, or frozen."""
    module = layer("topk", balance=BalanceConfig(kind="global"))
    activity = module.router.get_buffer("activity")
    before = activity.clone()

    def run(seed: int) -> Tensor:
        x = random(1, TOKENS, DIM, seed=seed).requires_grad_()
        out = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        assert isinstance(out, Tensor)
        return out.sum()

    module.begin_step(TOKENS)
    run(1)
    with torch.no_grad():
        run(1)
    module.router.weight.requires_grad_(False)
    run(1).backward()
    module.router.update_state(1)
    assert torch.equal(activity, before)
    module.router.weight.requires_grad_(True)
    module.begin_step(2 * TOKENS)
    for seed in (1, 2):
        run(seed).backward()
    module.router.update_state(1)
    maps = [module.router(random(TOKENS, DIM, seed=seed)).map for seed in (1, 2)]
    torch.testing.assert_close(activity, torch.cat(maps).to(activity.dtype).mean(0))


def test_the_weight_of_relu_routing_is_what_it_adapts() -> None:
    module = layer("relu")
    routing = module.router(random(TOKENS, DIM))
    weight, _ = module.losses(routing, 1)["balance"]
    assert weight is module.router.coefficient


def test_the_global_loss_uses_the_shares_of_the_step_before() -> None:
    module = layer("topk", balance=BalanceConfig(kind="global", weight=1.0))
    x = random(1, TOKENS, DIM)
    module.begin_step(TOKENS)
    module(x).sum().backward()
    routing = module.router(x[0])
    uniform = routing.probabilities.sum()  # activity was equal
    assert float(module.sums["balance"].detach()) == pytest.approx(float(uniform), rel=1e-12)
    module.router.update_state(1)
    shares = routing.map.double().mean(0)
    torch.testing.assert_close(module.router.get_buffer("activity"), shares)
    module.begin_step(TOKENS)
    module(x).sum().backward()
    wanted = 4 * (shares / shares.sum() * routing.probabilities.sum(0)).sum()
    assert float(module.sums["balance"].detach()) == pytest.approx(float(wanted), rel=1e-12)


# ------------------------------------------------------------------------------- configuration


def test_which_layers_have_experts() -> None:
    config = MoE.Config(first_dense=1, every=2, dense_hidden=9)
    kinds = [type(config.at(layer)) for layer in range(6)]
    dense_layer, moe = SwiGLU.Config, MoE.Config
    assert kinds == [dense_layer, dense_layer, moe, dense_layer, moe, dense_layer]
    assert config.at(0).hidden == 9
    model = ModelConfig(layers=5, feedforward=config, mtp=MTPConfig(depth=3))
    assert expert_layers(model) == [2, 4, 6]
    with torch.device("meta"):
        blocks = Transformer(model).blocks
    assert [isinstance(b.feedforward, MoE) for b in blocks.values()] == [0, 0, 1, 0, 1]
    assert expert_layers(ModelConfig()) == []


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "experts": ({"experts": 0}, "experts", "must be positive, got 0"),
    "k": ({"experts": 2, "router": TopK.Config(k=3)}, "router.k", "must lie in 1 to 2, got 3"),
    "shared": ({"shared_hidden": 8}, "shared_hidden", "shared_experts=0: it would be ignored"),
    "dense missing": ({"first_dense": 1}, "dense_hidden", "is required"),
    "dense idle": ({"dense_hidden": 4}, "dense_hidden", "it would be ignored"),
    "every": ({"every": 0}, "every", "must be positive, got 0"),
    "relu weight": (
        {"router": ReLU.Config(), "balance": BalanceConfig(weight=0.1)},
        "balance.weight", "relu adapts its own",
    ),
    "relu none": (
        {"router": ReLU.Config(), "balance": BalanceConfig(kind="none")},
        "balance.kind", "needs the balancing loss",
    ),
    "none weighted": (
        {"balance": BalanceConfig(kind="none", weight=0.1)}, "balance.weight", "would be ignored",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_refused(name: str) -> None:
    fields, path, text = WRONG[name]
    found = dict(MoE.Config(**fields).problems())
    assert text in found[path]


LEARNED = LapSum.Config(learned=True)


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"first_dense": 3}, "first_dense", "leaves none of the 3 layers with experts"),
        ({"every": 4}, "every", "leaves none of the 3 layers with experts"),
        ({"first_dense": 2, "router": LEARNED}, "router.learned", "one layer has experts"),
        ({"first_dense": 1, "router": LEARNED}, "", ""),
        ({"every": 3}, "", ""),
    ],
)
def test_what_does_not_go_with_the_depth_is_refused(
    fields: dict[str, Any], path: str, text: str
) -> None:
    config = MoE.Config(**fields, dense_hidden=9)
    found = ModelConfig(layers=3, feedforward=config).problems()
    assert [name for name, _ in found] == [f"feedforward.{path}"] * bool(path)
    assert all(text in why for _, why in found)


def test_negative_weights_are_refused() -> None:
    assert BalanceConfig(z_loss=-1.0).problems() == [("z_loss", "must not be negative, got -1.0")]


def test_a_file_can_say_all_of_it() -> None:
    tree = {
        "feedforward": {
            "type": "moe",
            "experts": 6,
            "router": {"type": "lapsum", "learned": True, "k": 1.5},
            "balance": {"kind": "global", "weight": 0.02},
            "shared_experts": 1,
        }
    }
    config = decode(ModelConfig, tree)
    assert isinstance(config.feedforward.router, LapSum.Config)
    assert config.feedforward.balance == BalanceConfig("global", 0.02)
    assert decode(ModelConfig, encode(config)) == config


def test_counts_of_parameters_and_flops() -> None:
    experts, hidden, dim, length = 8, 16, 12, 10
    feedforward = MoE.Config(experts=experts, hidden=hidden, router=TopK.Config(k=2))
    config = ModelConfig(hidden=dim, layers=1, feedforward=feedforward)
    dense_config = replace(config, feedforward=SwiGLU.Config(hidden=hidden))
    moe, plain = (unit_sizes(c, length)["blocks.0"] for c in (config, dense_config))
    expert, router = 3 * dim * hidden, experts * dim
    assert moe.parameters - plain.parameters == (experts - 1) * expert + router
    assert moe.active - plain.active == expert + router
    assert moe.flops - plain.flops == 2 * length * (expert + router)
    assert plain.active == plain.parameters


# ---------------------------------------------------------------------------------- exchange


def _exchange(rank: int, world: int) -> list[Tensor]:
    ep = GroupAxis(torch.distributed.group.WORLD)
    sizes = [[0, 3], [0, 1]]  # rank 0 receives nothing
    send, receive = sizes[rank], [line[rank] for line in sizes]
    x = (10 * rank + torch.arange(float(sum(send))))[:, None].requires_grad_()
    out = ep.exchange(x, send, receive)
    (out * (1 + out.detach())).sum().backward()
    assert x.grad is not None
    with bound({"ep": ep}):
        counts = axis("ep").exchange(torch.tensor([[rank, 7], [rank, 8]]), [1, 1], [1, 1])
    return [out.detach(), x.detach(), x.grad, counts]


def test_uneven_rows_find_their_way_and_back() -> None:
    first, second = run_ranks(2, _exchange)
    assert first[0].shape == (0, 1)
    assert second[0][:, 0].tolist() == [0.0, 1.0, 2.0, 10.0]
    for _, x, grad, _ in (first, second):
        assert torch.equal(grad, 1 + x)
    assert first[3].tolist() == [[0, 7], [1, 7]] and second[3].tolist() == [[0, 8], [1, 8]]
