"""Mixture of experts: every token goes through the experts that its router chose, and no other.

Tokens are never dropped and a token may have any number of experts.  Work follows a flat list of
(token, expert) pairs, expert after expert; a fixed top-k is a special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .balancing import entropy, global_balance, router_z, sequence_balance
from .collectives import axis
from .feedforward import FEEDFORWARDS, SwiGLU
from .grouped import ExpertLinear
from .lapsum import Budget
from .linear import accumulation_dtype
from .routers import ROUTERS, ReLU, Router, Routing, TopK

Problems = list[tuple[str, str]]


@dataclass(frozen=True)
class Pairs:
    """Active (token, expert) pairs, expert after expert, tokens ascending.

    tokens, experts: int64 [N].  counts: pairs of each expert.
    """

    tokens: Tensor
    experts: Tensor
    counts: list[int]


def active_pairs(chosen: Tensor, expected: float) -> Pairs:
    """The true entries of ``chosen`` bool [T, E].

    expected: experts per token.  Without data (on the meta device) there are so many, in equal
    shares: what a plan of memory assumes.
    """
    if chosen.is_meta:
        each = round(chosen.shape[0] * expected / chosen.shape[1])
        index = chosen.new_empty((each * chosen.shape[1], 2), dtype=torch.int64)
        return Pairs(index[:, 1], index[:, 0], [each] * chosen.shape[1])
    experts, tokens = chosen.T.nonzero(as_tuple=True)
    return Pairs(tokens, experts, chosen.sum(0).tolist())


def exchange_blocks(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows that lie in blocks [A][B] of ``sizes`` rows, put in the order [B][A]."""
    width = len(sizes[0])
    if len(sizes) == 1 or width == 1:
        return rows
    blocks = rows.split([size for line in sizes for size in line])
    return torch.cat([block for b in range(width) for block in blocks[b::width]])


class Experts(nn.Module):
    """SwiGLU experts.  Each rank of ``ep`` holds some of them, each rank of ``tp`` a slice of all
    of those, which gives a share of the result."""

    plan: ClassVar[dict[str, str]] = {
        "gate_proj.weight": "expert_column",
        "up_proj.weight": "expert_column",
        "down_proj.weight": "expert_row",
    }

    def __init__(self, experts: int, dim: int, hidden: int, expected: float) -> None:
        super().__init__()
        self.expected = expected
        self.compute_dtype: torch.dtype | None = None
        self.gate_proj = ExpertLinear(experts, dim, hidden)
        self.up_proj = ExpertLinear(experts, dim, hidden)
        self.down_proj = ExpertLinear(experts, hidden, dim)

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Σ_e gates[t, e] · expert_e(x[t]) over ``chosen`` [T, E], for x [T, D]: [T, D].

        Terms of a token are added in the order of the experts, in at least fp32.
        """
        pairs = active_pairs(chosen, self.expected)
        rows = x.to(self.compute_dtype or x.dtype).index_select(0, pairs.tokens)
        rows = self._at_owners(rows, pairs.counts)
        weighted = rows.to(accumulation_dtype(rows.dtype))
        weighted = weighted * gates[pairs.tokens, pairs.experts].to(weighted.dtype)[:, None]
        out = weighted.new_zeros(x.shape).index_add(0, pairs.tokens, weighted)
        return out.to(rows.dtype)

    def _at_owners(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows through the experts that they are for, wherever those are, and back."""
        ep = axis("ep")
        if ep.size == 1:
            return self._compute(rows, counts)
        local = len(counts) // ep.size
        sent = [counts[i : i + local] for i in range(0, len(counts), local)]
        if rows.is_meta:
            arrived = [counts[:local]] * ep.size
        else:
            ones = [1] * ep.size
            arrived = ep.exchange(torch.tensor(sent, device=rows.device), ones, ones).tolist()
        send, receive = [sum(line) for line in sent], [sum(line) for line in arrived]
        here = exchange_blocks(ep.exchange(rows, send, receive), arrived)
        each = [sum(column) for column in zip(*arrived, strict=True)]
        back = exchange_blocks(self._compute(here, each), [*zip(*arrived, strict=True)])
        return ep.exchange(back, receive, send)

    def _compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        hidden = F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)
        out: Tensor = self.down_proj(hidden, counts)
        return out


class SharedExperts(SwiGLU):
    """Experts that every token uses, side by side: one wide SwiGLU inside the layer's region."""

    region: ClassVar[bool] = False


@dataclass(frozen=True)
class BalanceConfig:
    """Auxiliary losses of every expert layer, each divided by the tokens of the global batch."""

    kind: Literal["sequence", "global", "none"] = field(
        default="sequence",
        metadata={
            "help": "balance experts over each sequence, or with the shares of the previous step"
        },
    )
    weight: float | None = field(
        default=None,
        metadata={"help": "of the balancing loss; null = 0.01, or what the router adapts"},
    )
    z_loss: float = field(default=0.0, metadata={"help": "weight of (log Σ exp logits)²; 0 = off"})
    entropy: float = field(
        default=0.0, metadata={"help": "weight of the entropy of softmax(logits); 0 = off"}
    )

    def problems(self) -> Problems:
        return [
            (name, f"must not be negative, got {value}")
            for name in ("weight", "z_loss", "entropy")
            if (value := getattr(self, name)) is not None and value < 0
        ]


class _Attach(torch.autograd.Function):
    """The identity on the gates, through which a loss gets its gradient: whoever backpropagates
    through the gates does so through ``loss``, times ``share``.  ``note`` is called then: once,
    however often the forward pass ran."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, loss: Tensor, share: float, note: Callable[[], None]
    ) -> Tensor:
        ctx.note, ctx.gradient = note, torch.full_like(loss, share)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.note()
        return grad, ctx.gradient, None, None


@FEEDFORWARDS.register("moe")
class MoE(nn.Module):
    """Σ_e gate_e(x) · expert_e(x) over the experts that the router chose, plus shared experts.

    The router sees whole sequences on every tensor-parallel rank, so that all of them choose alike;
    experts there give shares of the result, and gates therefore get shares of their gradients.

    tokens: of the step's global batch, which the auxiliary losses are divided by; None outside of
    training and its evaluations: no such loss.  sums: what this step's backward passes added up (an
    evaluation's forward passes).
    """

    plan: ClassVar[dict[str, str]] = {}
    region: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Config:
        experts: int = field(default=8, metadata={"help": "experts of a layer"})
        hidden: int = field(default=128, metadata={"help": "width of one expert"})
        router: Any = field(
            default=TopK.Config(), metadata={"registry": ROUTERS, "help": "who chooses experts"}
        )
        balance: BalanceConfig = field(
            default=BalanceConfig(), metadata={"help": "auxiliary losses"}
        )
        shared_experts: int = field(default=0, metadata={"help": "experts that all tokens use"})
        shared_hidden: int | None = field(
            default=None, metadata={"help": "width of one shared expert; null = hidden"}
        )
        first_dense: int = field(
            default=0, metadata={"help": "this many layers at the beginning are swiglu"}
        )
        every: int = field(
            default=1, metadata={"help": "of the rest, every n-th layer has experts"}
        )
        dense_hidden: int | None = field(
            default=None, metadata={"help": "width of the layers without experts"}
        )

        def problems(self) -> Problems:
            found: Problems = [
                (name, f"must be positive, got {value}")
                for name in ("experts", "hidden", "shared_hidden", "every", "dense_hidden")
                if (value := getattr(self, name)) is not None and value < 1
            ]
            found += [
                (name, f"must not be negative, got {getattr(self, name)}")
                for name in ("shared_experts", "first_dense")
                if getattr(self, name) < 0
            ]
            if self.shared_hidden is not None and not self.shared_experts:
                found.append(("shared_hidden", "is set but shared_experts=0: it would be ignored"))
            dense = self.first_dense > 0 or self.every > 1
            if dense and self.dense_hidden is None:
                found.append(("dense_hidden", "is required: first_dense and every leave layers"
                              " without experts"))  # fmt: skip
            if self.dense_hidden is not None and not dense:
                text = "is set but every layer has experts: it would be ignored"
                found.append(("dense_hidden", text))
            found += self._balance_problems()
            if self.experts > 0 and not self.router.problems():
                found += [(f"router.{n}", t) for n, t in self.router.problems_with(self.experts)]
            return found

        def _balance_problems(self) -> Problems:
            adapts = isinstance(self.router, ReLU.Config)
            found: Problems = []
            if adapts and self.balance.kind == "none":
                text = "none, but relu needs the balancing loss to stay sparse"
                found.append(("balance.kind", text))
            if self.balance.weight is not None and (adapts or self.balance.kind == "none"):
                why = "relu adapts its own" if adapts else "balance.kind=none"
                found.append(("balance.weight", f"is set but {why}: it would be ignored"))
            return found

        def places(self, layers: int) -> range:
            """The layers with experts among the first ``layers`` ones."""
            return range(self.first_dense + self.every - 1, layers, self.every)

        def problems_with(self, layers: int) -> Problems:
            """What does not go with a trunk of ``layers`` blocks."""
            if self.first_dense < 0 or self.every < 1:
                return []
            found = len(self.places(layers))
            if not found:
                text = f"leaves none of the {layers} layers with experts"
                return [("first_dense" if self.first_dense >= layers else "every", text)]
            if getattr(self.router, "learned", False) and found == 1:
                text = "is set but one layer has experts: it would be ignored"
                return [("router.learned", text)]
            return []

        def at(self, layer: int) -> Any:
            """The config of global layer ``layer``: this one, or that of a dense layer."""
            if layer in self.places(layer + 1):
                return self
            assert self.dense_hidden is not None
            return SwiGLU.Config(hidden=self.dense_hidden)

    def __init__(self, config: Config, dim: int, layer: int = 0, layers: int = 1) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.tokens: int | None = None
        self.sums: dict[str, Tensor] = {}
        carries = config.balance.kind == "global"
        self.router: Router = ROUTERS.build(config.router, dim, config.experts, carries)
        self.experts = Experts(config.experts, dim, config.hidden, self.router.max_active)
        width = config.shared_experts * (config.shared_hidden or config.hidden)
        self.shared_experts = SharedExperts(SwiGLU.Config(width), dim) if width else None
        # The layers that split a learned budget; those behind the trunk have a constant one.
        self._sharing = config.places(layers)
        self._budget: tuple[Budget, ...] = ()  # in a tuple: not a submodule of this one

    def use_shared(self, shared: nn.ModuleDict) -> None:
        router, sharing = self.config.router, self._sharing
        if getattr(router, "learned", False) and self.layer in sharing:
            if "budget" not in shared:
                most = router.most(self.config.experts)
                shared["budget"] = Budget(len(sharing), router.k * len(sharing), most)
            budget = shared["budget"]
            assert isinstance(budget, Budget)
            self._budget = (budget,)

    @torch.compiler.disable  # sizes depend on the data: a compiled block ends before and after
    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        k = self._budget[0]()[self._sharing.index(self.layer)] if self._budget else None
        routing = self.router(flat, k)
        gates = self._with_losses(routing, x.shape[0])
        out: Tensor = self.experts(flat, routing.map, gates).view(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def begin_step(self, tokens: int | None) -> None:
        """Forget the step before."""
        self.tokens, self.sums = tokens, {}
        self.router.forget()

    def losses(self, routing: Routing, sequences: int) -> dict[str, tuple[Tensor | float, Tensor]]:
        """Weight and sum over the tokens of every auxiliary loss, by name."""
        balance, router = self.config.balance, self.router
        weight: Tensor | float | None = router.balance_weight
        if weight is None:
            weight = 0.01 if balance.weight is None else balance.weight
        found: dict[str, tuple[Tensor | float, Tensor]] = {}
        if balance.kind == "sequence":
            value = sequence_balance(
                routing.probabilities, routing.map, sequences, ("cp",), router.balance_active
            )
            found["balance"] = weight, value
        elif balance.kind == "global":
            activity = router.get_buffer("activity")
            value = global_balance(routing.probabilities, activity, router.balance_active)
            found["balance"] = weight, value
        if balance.z_loss:
            found["router_z"] = balance.z_loss, router_z(routing.logits)
        if balance.entropy:
            found["router_entropy"] = balance.entropy, entropy(routing.logits)
        return found

    def _with_losses(self, routing: Routing, sequences: int) -> Tensor:
        """The gates, with the auxiliary losses hung on."""
        gates = routing.gates
        if self.tokens is not None and not torch.is_grad_enabled():  # an evaluation has no losses
            self._note(routing, {}, gates.new_zeros(()), False)
        if self.tokens is None or not gates.requires_grad:
            return gates
        losses = self.losses(routing, sequences)
        parts = [weight * value for weight, value in losses.values()]
        total = torch.stack(parts).sum() / self.tokens if parts else gates.new_zeros(())
        learns = self.router.weight.requires_grad
        note = partial(self._note, routing, losses, total.detach(), learns)
        out: Tensor = _Attach.apply(gates, total, 1 / axis("tp").size, note)
        return out

    def _note(self, routing: Routing, losses: dict[str, Any], total: Tensor, learns: bool) -> None:
        """Add up a micro-batch; ``total``: of its losses, ``learns``: whether the router does."""
        tokens, used = routing.map.shape[0], routing.map.sum(0)
        if learns:
            self.router.count(used, tokens)
        found = {name: value.detach() for name, (_, value) in losses.items()}
        found |= {name: tokens * value for name, value in routing.figures.items()}
        found |= {"total": total, "counts": used, "tokens": total.new_tensor(tokens)}
        for name, value in found.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def extra_flops(self, sequence_length: int) -> int:
        """Of the router and of the experts that a token is expected to use."""
        experts, hidden, dim = self.experts.gate_proj.weight.shape
        return round(2 * sequence_length * dim * (experts + 3 * hidden * self.expected_active))

    @property
    def expected_active(self) -> float:
        """The router's k, or without one the most experts there can be."""
        return float(getattr(self.config.router, "k", self.router.max_active))

    @property
    def idle_parameters(self) -> int:
        """Of the experts that a token is not expected to use."""
        experts = self.config.experts
        whole = sum(parameter.numel() for parameter in self.experts.parameters())
        return round(whole * (1 - self.expected_active / experts))
