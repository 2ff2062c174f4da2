"""Filling text block by block, from left to right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .decoding import Sampling
from .denoising import SAMPLERS, Canvas, Denoiser, RowNoise, Sampler
from .families import Family
from .unmasking import Remasking

DEFAULT_SIZE = 32  # of blocks, where the model has none of its own


@SAMPLERS.register("blocks")
class Blocks(Sampler):
    """Fills one block after another, each with the sampler ``inner``: what block diffusion is made
    for (Arriola et al. 2025, arXiv 2503.09573), and a choice for masked diffusion (semi-
    autoregressive sampling: Nie et al. 2025, arXiv 2502.09992), whose blocks begin behind the
    prompt.  ``inner.steps`` counts the steps of one block.  It ends when every text has ended.
    """

    @dataclass(frozen=True)
    class Config:
        block_size: int | None = field(
            default=None, metadata={"help": "tokens in a block; null: the model's, or 32"}
        )
        inner: Any = field(
            default=Remasking.Config(),
            metadata={"registry": SAMPLERS, "help": "how a block is filled"},
        )

        def problems(self) -> list[tuple[str, str]]:
            found = []
            if self.block_size is not None and self.block_size < 1:
                found.append(("block_size", f"must be positive, got {self.block_size}"))
            name = SAMPLERS.name_of(type(self.inner))
            fits = SAMPLERS.component(name).families  # type: ignore[attr-defined]
            if isinstance(self.inner, Blocks.Config) or "masked" not in fits:
                found.append(("inner", f"must be a sampler of masked tokens, got {name}"))
            return found

    families: ClassVar[tuple[Family, ...]] = ("masked", "block")

    def __init__(self, config: Any, sampling: Sampling | None = None) -> None:
        self.inner: Sampler = SAMPLERS.build(config.inner, sampling)
        super().__init__(config, self.inner.sampling)

    def check_settings(self, denoiser: Denoiser) -> None:
        size = self.config.block_size
        if denoiser.family == "block" and size not in (None, denoiser.block_size):
            raise ValueError(
                f"sampler=blocks: block_size={size}, but the model was trained on blocks of "
                f"{denoiser.block_size}"
            )
        self.inner.check_settings(denoiser)

    def fill(
        self, denoiser: Denoiser, canvas: Canvas, noise: RowNoise, committed: list[list[int]]
    ) -> None:
        own = denoiser.family == "block"
        size = denoiser.block_size if own else self.config.block_size or DEFAULT_SIZE
        begin = canvas.begin
        while begin < canvas.end:
            end = min(begin - (begin % size if own else 0) + size, canvas.end)
            self.inner.fill(denoiser, canvas.part(begin, end), noise, committed)
            begin = end
            written = canvas.ids[:, canvas.prompt : end]
            if canvas.eos is not None and (written == canvas.eos).any(1).all():
                break
