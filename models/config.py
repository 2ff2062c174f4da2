"""ModelConfig and the size ladder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .attention import AttentionConfig
from .blocks import BLOCKS, PreNormBlock
from .experts import MoE as MoE  # registers itself
from .feedforward import FEEDFORWARDS, SwiGLU
from .mtp import MTPConfig
from .norms import NORMS, RMSNorm
from .positions import POSITIONS, RoPE


@dataclass(frozen=True)
class InitConfig:
    """Initial weights: zero-mean normal, norm gains one, biases zero."""

    std: float = field(default=0.02, metadata={"help": "standard deviation of every matrix"})
    scale_outputs: bool = field(
        default=True,
        metadata={"help": "divide the std of o_proj and down_proj by sqrt(2 · layers)"},
    )

    def problems(self) -> list[tuple[str, str]]:
        return [] if self.std > 0 else [("std", f"must be positive, got {self.std}")]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.  ``vocab_size`` is the tokenizer's true size; storage is padded
    to ``vocab_multiple`` and the padding takes part in no softmax."""

    vocab_size: int = field(default=256, metadata={"help": "true vocabulary size"})
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
    vocab_multiple: int = field(
        default=128, metadata={"help": "pad the stored vocabulary to this multiple"}
    )
    logit_softcap: float | None = field(
        default=None, metadata={"help": "c in c·tanh(logits / c); null for none"}
    )
    residual_dtype: Literal["compute", "float32"] = field(
        default="compute", metadata={"help": "dtype of the residual stream (at least)"}
    )
    mtp: MTPConfig = MTPConfig()
    init: InitConfig = InitConfig()

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def problems(self) -> list[tuple[str, str]]:
        found = [
            (name, f"must be positive, got {getattr(self, name)}")
            for name in ("vocab_size", "hidden", "layers", "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            found.append(("logit_softcap", f"must be positive, got {self.logit_softcap}"))
        if self.mtp.depth and self.mtp.kind == "parallel" and self.layers == 1:
            found.append(("mtp.kind", "parallel needs a trunk below the last block: layers >= 2"))
        block = BLOCKS.name_of(type(self.block))
        if self.mtp.input == "norm" and not BLOCKS.component(block).final_norm:  # type: ignore[attr-defined]
            text = f"norm is set but block={block} has no final norm: it would be ignored"
            found.append(("mtp.input", text))
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
