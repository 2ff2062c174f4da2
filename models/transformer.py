"""The model as a list of units: embedding, blocks, final norm, multi-token prediction, head.

Any unit may be absent, so one pipeline stage is a ``Transformer`` with fewer units; names carry
the global layer index and do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, AttentionBackend, Mixture, SequenceContext
from .blocks import BLOCKS, Block, block_class
from .collectives import axis
from .conditioned import ModulatedNorm
from .config import ModelConfig
from .feedforward import FEEDFORWARDS
from .linear import accumulation_dtype
from .losses import (
    Elsewhere,
    HeadOptions,
    Term,
    capped,
    chunked_head_loss,
    common_views,
    judged_rows,
)
from .mtp import MTPBlock, fork, tokens_ahead
from .norms import Role, Site, make_norm
from .shared import shared_modules


def unit_names(config: ModelConfig) -> list[str]:
    """Every unit in execution order: embedding, blocks.0 …, final_norm, mtp.1, mtp_norms.1 …, head
    (of every depth)."""
    blocks = [f"blocks.{layer}" for layer in range(config.layers)]
    depths = range(1, config.mtp.depth + 1)
    mtp = [f"{part}.{depth}" for depth in depths for part in ("mtp", "mtp_norms")]
    return ["embedding", *blocks, "final_norm", *mtp, "head"]


def unit_inputs(config: ModelConfig) -> dict[str, str]:
    """The unit whose output each unit reads, for all but the embedding and the head."""
    last = f"blocks.{config.layers - 1}"
    inputs = {f"blocks.{layer}": f"blocks.{layer - 1}" for layer in range(1, config.layers)}
    inputs |= {"blocks.0": "embedding", "final_norm": last}
    for depth in range(1, config.mtp.depth + 1):
        inputs[f"mtp.{depth}"] = {
            "block": f"mtp.{depth - 1}" if depth > 1 else last,
            "norm": f"mtp_norms.{depth - 1}" if depth > 1 else "final_norm",
            "trunk": f"blocks.{config.layers - 2}",
        }[config.mtp.wiring]
        inputs[f"mtp_norms.{depth}"] = f"mtp.{depth}"
    return inputs


def module_name(config: ModelConfig, unit: str) -> str:
    """The module of ``Transformer`` that computes ``unit``; a repeated block serves every depth."""
    part, _, depth = unit.partition(".")
    if part in ("mtp", "mtp_norms") and int(depth) not in config.mtp.modules:
        return f"{part}.1"
    return unit


class Embedding(nn.Module):
    """Token ids int64 [B, S], or a mixture of such, to [B, S, D]; the vocabulary may be sharded
    over ``tp``."""

    plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    region: ClassVar[bool] = True
    region_input: ClassVar[bool] = False  # ids are whole on every rank and carry no gradient

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compute_dtype: torch.dtype | None = None
        self.wide_residual = config.wide_residual
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden))

    def forward(self, ids: Tensor, mixture: Mixture | None = None) -> Tensor:
        weight = self.weight
        if mixture is not None:
            x = self._mixed(weight, mixture)
        elif axis("tp").size == 1:
            x = F.embedding(ids, weight)
        else:
            local, inside = self._locate(weight, ids)
            x = F.embedding(local, weight) * inside[..., None]
        if self.wide_residual:
            return x.to(accumulation_dtype(x.dtype))
        return x if self.compute_dtype is None else x.to(self.compute_dtype)

    def _mixed(self, weight: Tensor, mixture: Mixture) -> Tensor:
        """Without the k embeddings of each slot ever being held."""
        local, inside = self._locate(weight, mixture.ids)
        shares = (mixture.weights * inside).to(weight.dtype)
        rows = F.embedding_bag(
            local.flatten(0, 1), weight, mode="sum", per_sample_weights=shares.flatten(0, 1)
        )
        return rows.unflatten(0, local.shape[:2])

    @staticmethod
    def _locate(weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each id in this rank's part of the vocabulary (clamped), and if it is there."""
        local = ids - axis("tp").rank * weight.shape[0]
        inside = (local >= 0) & (local < weight.shape[0])
        return local.clamp(0, weight.shape[0] - 1), inside


class WeightGradients(Protocol):
    """Who makes weight gradients, if not the backward pass."""

    def elsewhere(self, owner: nn.Module, weight: Callable[[], Tensor]) -> Elsewhere | None:
        """Takes what the gradient of ``weight()``, a parameter of ``owner``, is made of; None to
        have the backward pass make it."""


def head_rows(x: Tensor, views: int) -> Tensor:
    """x [B, S, ...] as rows [B·S, ...]; of ``views`` sequences, one behind the other, the rows of a
    position are neighbours."""
    if views == 1:
        return x.flatten(0, 1)
    return x.unflatten(0, (-1, views)).transpose(1, 2).flatten(0, 2)


class Head(nn.Module):
    """Output projection and loss.  A tied head owns no weight where the embedding is present."""

    plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    region: ClassVar[bool] = True
    region_output: ClassVar[bool] = False  # the loss is complete on every rank

    def __init__(self, config: ModelConfig, embedding: Embedding | None) -> None:
        super().__init__()
        self.vocab_size = config.predicted_vocab_size
        self.mask_token = config.mask_token
        self.softcap = config.logit_softcap
        self.chunk_rows = 0
        self.weight_gradients: WeightGradients | None = None
        self.compute_dtype: torch.dtype | None = None
        # In a tuple, so that the embedding is not registered as a submodule a second time.
        self._tied = (embedding,)
        if embedding is None:
            self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden))

    def matrix(self) -> Tensor:
        """The vocabulary matrix in its stored dtype (the head casts it), [V or V_local, D]."""
        weight: Tensor = self.owner.weight
        return weight

    @property
    def owner(self) -> Head | Embedding:
        """The module whose parameter the vocabulary matrix is."""
        return self if self._tied[0] is None else self._tied[0]

    def forward(
        self, x: Tensor, fields: Mapping[str, Tensor], terms: Sequence[Term]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, S, D] and fields [B, S] to (total loss, per-term sums)."""
        options = HeadOptions(self.vocab_size, self.softcap, self.chunk_rows, self.compute_dtype)
        views = common_views(terms)
        rows = {name: head_rows(value, views) for name, value in fields.items()}
        maker = self.weight_gradients
        elsewhere = None if maker is None else maker.elsewhere(self.owner, self.matrix)
        hidden = head_rows(x, views)
        judged = judged_rows(terms, rows)
        if judged is not None:
            hidden = hidden[judged]
            rows = {name: value[judged] for name, value in rows.items()}
        return chunked_head_loss(hidden, self.matrix(), rows, terms, options, elsewhere)

    def logits(self, x: Tensor) -> Tensor:
        """Whole-vocabulary logits of x [..., D]: [..., vocab_size], a mask token's the lowest there
        is.  Single-process use."""
        weight = self.matrix()
        weight = weight[: self.vocab_size].to(self.compute_dtype or weight.dtype)
        logits = F.linear(x.to(weight.dtype), weight)
        logits = capped(logits.to(accumulation_dtype(logits.dtype)), self.softcap)
        if self.mask_token:
            logits = F.pad(logits, (0, 1), value=torch.finfo(logits.dtype).min)
        return logits


def build_norm(
    config: ModelConfig, role: Role, layer: int | None = None, dim: int | None = None
) -> nn.Module:
    """A norm over ``dim`` (the model's width) at block ``layer`` (behind the last one)."""
    site = Site(role, config.layers if layer is None else layer, config.layers)
    return make_norm(config.norm, config.hidden if dim is None else dim, site)


def build_last_norm(config: ModelConfig, layer: int | None = None) -> nn.Module:
    """The norm behind block ``layer``, which a head reads."""
    norm = build_norm(config, "final", layer)
    return block_class(config.block).last_norm(config.block, norm, config.hidden)


def normed(norm: nn.Module | None, x: Tensor, context: SequenceContext) -> Tensor:
    """The output of a last norm, if there is one."""
    if norm is None:
        return x
    out: Tensor = norm(x, context) if isinstance(norm, ModulatedNorm) else norm(x)
    return out


def build_block(config: ModelConfig, layer: int, backend: AttentionBackend) -> Block:
    """The block with global index ``layer``; one behind the trunk counts on from there, while the
    model's depth stays ``config.layers``."""
    layers = config.layers

    def norm(role: Role) -> nn.Module:
        return build_norm(config, role, layer)

    def head_norm(dim: int) -> nn.Module:
        return build_norm(config, config.attention.qk_norm_span, layer, dim)

    placement = block_class(config.block)
    attention = Attention(
        config.attention, config.hidden, layer, layers, head_norm, config.position, backend,
        placement.head_norms,
    )  # fmt: skip
    at = getattr(config.feedforward, "at", None)  # of kinds that differ from layer to layer
    chosen = config.feedforward if at is None else at(layer)
    feedforward = FEEDFORWARDS.build(chosen, config.hidden, layer, layers)
    block: Block = BLOCKS.build(config.block, layer, layers, attention, feedforward, norm)
    return block


def build_mtp(config: ModelConfig, depth: int, backend: AttentionBackend) -> nn.Module:
    """The block of ``depth``, counted as a layer behind the model's last one."""
    layer = config.layers + depth - 1
    block = build_block(config, layer, backend)
    if config.mtp.kind == "parallel":
        return block
    own = Embedding(config) if config.mtp.embedding == "own" else None
    return MTPBlock(
        config.mtp, config.hidden, block, lambda role: build_norm(config, role, layer), own
    )


class Transformer(nn.Module):
    """Whole model, or the part of it named by ``units`` (names as in :func:`unit_names`).

    A part holds the modules that its units need: one with a multi-token-prediction block holds the
    embedding that the block shares.
    """

    def __init__(
        self,
        config: ModelConfig,
        units: Collection[str] | None = None,
        attention_backend: AttentionBackend = "auto",
    ) -> None:
        super().__init__()
        names = unit_names(config)
        self.units = frozenset(names if units is None else units)
        assert self.units <= set(names), f"unknown units {set(self.units) - set(names)}"
        self.config = config
        present = {module_name(config, unit) for unit in self.units}
        depths = [depth for depth in config.mtp.modules if f"mtp.{depth}" in present]
        embeds = "embedding" in present or (config.mtp.shares_embedding and bool(depths))
        self.embedding = Embedding(config) if embeds else None
        self.blocks = nn.ModuleDict(
            {
                str(layer): build_block(config, layer, attention_backend)
                for layer in range(config.layers)
                if f"blocks.{layer}" in present
            }
        )
        wants_norm = block_class(config.block).final_norm
        has_norm = "final_norm" in present and wants_norm
        self.final_norm = build_last_norm(config) if has_norm else None
        self.mtp = nn.ModuleDict(
            {str(depth): build_mtp(config, depth, attention_backend) for depth in depths}
        )
        self.mtp_norms = nn.ModuleDict(
            {
                str(depth): build_last_norm(config, config.layers + depth)
                for depth in config.mtp.modules
                if f"mtp_norms.{depth}" in present and wants_norm
            }
        )
        self.shared = shared_modules(self)
        tied = self.embedding if config.tie_embeddings else None
        self.head = Head(config, tied) if "head" in present else None

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Token ids [B, S] (or hidden [B, S, D] when the embedding is elsewhere) through every
        unit that next-token prediction needs, but the head: hidden [B, S, D]."""
        if self.embedding is not None and "embedding" in self.units:
            x = self.embedding(x, context.mixture)
        for block in self.blocks.values():
            x = block(x, context)
        return normed(self.final_norm, x, context)

    def run_unit(
        self, name: str, x: Tensor | None, ids: Tensor, context: SequenceContext
    ) -> Tensor:
        """One unit but the head.

        x: [B, S, D] (this rank's positions under sequence parallelism), the output of the unit that
        this one reads; None for the embedding.  ids: int64 [B, S], the tokens of the sequences.
        """
        assert name in self.units, f"unit {name} is not here"
        if name == "embedding":
            assert self.embedding is not None
            out: Tensor = self.embedding(ids, context.mixture)
            return out
        assert x is not None, f"unit {name} reads a hidden state"
        part, _, index = module_name(self.config, name).partition(".")
        if part == "final_norm":
            return normed(self.final_norm, x, context)
        modules: nn.ModuleDict = getattr(self, part)
        if part == "mtp_norms":
            return normed(modules[index], x, context) if index in modules else x
        module = modules[index]
        if not isinstance(module, MTPBlock):
            return module(x, context)
        tokens = tokens_ahead(ids, int(name.partition(".")[2]))
        if module.embedding is None:
            assert self.embedding is not None
            tokens = self.embedding(tokens)
        return module(x, tokens, context)

    def depth_outputs(self, ids: Tensor, context: SequenceContext) -> list[Tensor]:
        """What the head reads at every depth, each [B, S, D], of a whole model."""
        inputs = unit_inputs(self.config)
        readers = Counter(inputs.values())
        values: dict[str, Iterator[Tensor]] = {}
        outputs = []
        for name in unit_names(self.config)[:-1]:
            x = next(values[inputs[name]]) if name in inputs else None
            out = self.run_unit(name, x, ids, context)
            is_norm = name == "final_norm" or name.startswith("mtp_norms.")
            values[name] = iter(fork(out, readers[name] + is_norm))
            if is_norm:
                outputs.append(next(values[name]))
        return outputs

    def logits(self, ids: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Token ids [B, S] to logits [B, S, vocab_size] in at least fp32."""
        assert self.head is not None
        context = context or SequenceContext(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head.logits(self(ids, context))
        return logits


def logical_name(name: str, config: ModelConfig) -> str:
    """The parameter that ``name`` stands for: a tied head is the embedding, wherever it lives."""
    return "embedding.weight" if config.tie_embeddings and name == "head.weight" else name
