"""ModelConfig and the size ladder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .attention import AttentionConfig
from .blocks import BLOCKS, MixNormBlock, PreNormBlock, block_class
from .conditioned import AdaLNBlock as AdaLNBlock  # registers itself
from .experts import MoE as MoE  # registers itself
from .feedforward import FEEDFORWARDS, SwiGLU
from .mtp import MTPConfig
from .norms import NORMS, BHyT, BHyTExact, DyT, LayerNorm, RMSNorm, norm_class
from .positions import POSITIONS, AdaRoPE, PartialRoPE, RoPE


@dataclass(frozen=True)
class InitConfig:
    """Initial weights: zero-mean normal, norm gains one, biases zero."""

    std: float = field(default=0.02, metadata={"help": "standard deviation of every matrix"})
    scale_outputs: bool = field(
        default=True, metadata={"help": "shrink some matrices with depth as the block asks"}
    )
    rule: Literal["constant", "fan_in"] = field(
        default="constant",
        metadata={"help": "std as it is, or divided by sqrt(inputs); of all but the embedding"},
    )
    embedding_std: float | None = field(
        default=None, metadata={"help": "standard deviation of the embedding; null for std"}
    )
    output_gain: float | None = field(
        default=None,
        metadata={"help": "factor on the std of o_proj and down_proj; null for the block's own"},
    )
    zero_head: bool = field(
        default=False, metadata={"help": "the output head starts at zero: all ids equally likely"}
    )

    def problems(self) -> list[tuple[str, str]]:
        found = [
            (name, f"must be positive, got {value}")
            for name in ("std", "embedding_std", "output_gain")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.output_gain is not None and not self.scale_outputs:
            found.append(("output_gain", "is set but scale_outputs=false: it would be ignored"))
        return found


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.  ``vocab_size`` is the tokenizer's true size, and one more with a
    mask token; storage is padded to ``vocab_multiple`` and the padding takes part in no softmax."""

    vocab_size: int = field(default=256, metadata={"help": "ids, the mask token included"})
    hidden: int = field(default=128, metadata={"help": "width of the residual stream"})
    layers: int = field(default=2, metadata={"help": "number of blocks"})
    attention: AttentionConfig = AttentionConfig()
    feedforward: Any = field(
        default=SwiGLU.Config(),
        metadata={"registry": FEEDFORWARDS, "help": "feed-forward layer"},
    )
    block: Any = field(
        default=PreNormBlock.Config(),
        metadata={"registry": BLOCKS, "help": "where norms and residuals sit"},
    )
    norm: Any = field(
        default=RMSNorm.Config(), metadata={"registry": NORMS, "help": "normalisation"}
    )
    position: Any = field(
        default=RoPE.Config(), metadata={"registry": POSITIONS, "help": "position encoding"}
    )
    tie_embeddings: bool = field(
        default=False, metadata={"help": "the output head reads the embedding's weight"}
    )
    mask_token: bool = field(
        default=False,
        metadata={"help": "the last id is a mask token: an input that is never predicted"},
    )
    vocab_multiple: int = field(
        default=128, metadata={"help": "pad the stored vocabulary to this multiple"}
    )
    logit_softcap: float | None = field(
        default=None, metadata={"help": "c in c·tanh(logits / c); null for none"}
    )
    residual_dtype: Literal["auto", "compute", "float32"] = field(
        default="auto",
        metadata={"help": "dtype of the residual stream (at least); auto: the block's choice"},
    )
    mtp: MTPConfig = MTPConfig()
    init: InitConfig = InitConfig()

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def predicted_vocab_size(self) -> int:
        """Ids that take part in a softmax, the first ones."""
        return self.vocab_size - self.mask_token

    @property
    def mask_id(self) -> int:
        assert self.mask_token
        return self.vocab_size - 1

    @property
    def wide_residual(self) -> bool:
        """Whether the residual stream is kept in at least float32.  ``auto``: only for deepnorm and
        keel of 64 blocks and more, whose updates bf16 would round away."""
        if self.residual_dtype == "auto":
            wide_from = block_class(self.block).wide_from
            return wide_from is not None and self.layers >= wide_from
        return self.residual_dtype == "float32"

    def problems(self) -> list[tuple[str, str]]:
        found = [
            (name, f"must be positive, got {getattr(self, name)}")
            for name in ("vocab_size", "hidden", "layers", "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if self.mask_token and self.vocab_size == 1:
            found.append(("vocab_size", "1 is a mask token alone: nothing can be predicted"))
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            found.append(("logit_softcap", f"must be positive, got {self.logit_softcap}"))
        if self.init.zero_head and self.tie_embeddings:
            text = "is set but tie_embeddings=true: the embedding must not start at zero"
            found.append(("init.zero_head", text))
        if self.mtp.depth and self.mtp.kind == "parallel" and self.layers == 1:
            found.append(("mtp.kind", "parallel needs a trunk below the last block: layers >= 2"))
        block = BLOCKS.name_of(type(self.block))
        if self.mtp.input == "norm" and not block_class(self.block).final_norm:
            text = f"norm is set but block={block} has no final norm: it would be ignored"
            found.append(("mtp.input", text))
        if isinstance(self.feedforward, MoE.Config):
            wrong = self.feedforward.problems_with(self.layers)
            found += [(f"feedforward.{path}", text) for path, text in wrong]
        return found + self._position_problems() + self._norm_problems(block)

    def _position_problems(self) -> list[tuple[str, str]]:
        """What does not go with the width of the heads."""
        inner, dim = getattr(self.position, "inner", self.position), self.attention.head_dim
        if dim < 2 or not isinstance(inner, PartialRoPE.Config):
            return []
        if not 0 < inner.fraction < 2 / dim:
            return []
        path = "position.fraction" if inner is self.position else "position.inner.fraction"
        text = f"{inner.fraction:g} of head_dim={dim} is no pair: at least {2 / dim:g}"
        return [(path, text)]

    def _norm_problems(self, block: str) -> list[tuple[str, str]]:
        """What does not go together among norm, block and attention."""
        found = []
        norm, allowed = NORMS.name_of(type(self.norm)), norm_class(self.norm).placements
        if allowed and block not in allowed:
            text = f"{norm} goes with block={' or '.join(allowed)}, not with block={block}"
            found.append(("norm", text))
        if isinstance(self.norm, BHyT.Config) and self.attention.qkv_bias:
            text = "bhyt estimates what attention adds without a bias of v: use bhyt_exact"
            found.append(("norm", text))
        if self.attention.qk_norm_span == "projection":
            if isinstance(self.norm, LayerNorm.Config):
                text = "projection is an RMS norm, and the model's is layer: use head"
                found.append(("attention.qk_norm_span", text))
            if block_class(self.block).head_norms:
                text = f"block={block} normalises each head: use head"
                found.append(("attention.qk_norm_span", text))
        return found

    def notes(self, sequence_length: int) -> list[str]:
        """For people: what is legal with sequences this long and yet may not be meant."""
        found, norm = [], self.norm
        if isinstance(norm, BHyTExact.Config) and norm.largest_gain >= self.layers**-0.5:
            found.append(
                f"note: lambda / kappa = {norm.largest_gain:g} of model.norm is not below "
                f"1 / sqrt(layers) = {self.layers**-0.5:.3g}: bhyt's bound on growth does not hold"
            )
        if isinstance(norm, BHyT.Config) and norm.sequence_length != sequence_length:
            found.append(
                f"note: model.norm.sequence_length = {norm.sequence_length} enters bhyt's "
                f"estimate, and sequences have {sequence_length} tokens"
            )
        found += self._idle_notes(sequence_length)
        block = self.block
        on_sums = not block_class(block).final_norm or isinstance(block, MixNormBlock.Config)
        if isinstance(norm, DyT.Config) and on_sums and self.layers >= 16:
            found.append(
                f"note: {NORMS.name_of(type(norm))} squashes the residual stream itself with block="
                f"{BLOCKS.name_of(type(block))}: gradients vanish with depth from the start"
            )
        return found

    def _idle_notes(self, sequence_length: int) -> list[str]:
        """Settings that change nothing in a model this shallow, or with sequences this short."""
        found, block = [], self.block
        if isinstance(block, MixNormBlock.Config) and 0 < block.post_fraction * self.layers < 1:
            found.append(
                f"note: model.block.post_fraction = {block.post_fraction:g} of {self.layers} "
                "blocks is less than one: all of them are pre"
            )
        position = getattr(self.position, "inner", self.position)
        if (
            isinstance(position, AdaRoPE.Config)
            and position.temperature != "none"
            and position.reference_length >= sequence_length
        ):
            found.append(
                f"note: model.position.reference_length = {position.reference_length} is not below "
                f"the {sequence_length} tokens of a sequence: temperatures stay 1"
            )
        return found


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden": hidden,
        "layers": layers,
        "attention": {"heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads},
        "feedforward": {"type": "swiglu", "hidden": ffn},
        "tie_embeddings": tied,
    }


SIZES: dict[str, dict[str, Any]] = {
    "1m": _shape(128, 4, 4, 2, 352),
    "3m": _shape(192, 4, 6, 2, 512),
    "10m": _shape(320, 6, 5, 5, 864),
    "30m": _shape(512, 8, 8, 8, 1376),
    "125m": _shape(768, 12, 12, 12, 2048, tied=True),
    "350m": _shape(1024, 24, 16, 16, 2816, tied=True),
    "1.3b": _shape(2048, 24, 16, 16, 5632),
    "7b": _shape(4096, 32, 32, 32, 11008),
    "70b": _shape(8192, 80, 64, 8, 28672),
}
"""Presets as config trees; ``model.size: 125m`` starts from one and every key may be overridden.
The shapes from 7b up are Llama's (arXiv 2307.09288, 2407.21783); the smaller ones follow the
GPT-3 ladder (arXiv 2005.14165, table 2.1) with SwiGLU at about 8/3 of the width."""
