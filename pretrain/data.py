"""Batches as a function of (seed, samples consumed)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from data_tools.blend import Blend, PackedSampler, Sample, Sampler, WindowSampler
from data_tools.indexed import IndexedReader
from data_tools.manifest import Manifest
from parallel.stage import MicroBatch

from .config import DataConfig, RunConfig, SourceConfig
from .objectives.base import Objective
from .sequence_losses import SEQUENCE


def _sampler(data: DataConfig, source: SourceConfig, length: int, seed: int) -> Sampler:
    reader = IndexedReader(source.path)
    kind = WindowSampler if data.samples == "windows" else PackedSampler
    return kind(reader, length, seed)


def build_blend(
    data: DataConfig,
    sources: Sequence[SourceConfig],
    length: int,
    seed: int,
    samples: int | None,
) -> Blend:
    """The sample stream of ``sources``; ``ValueError`` when it cannot give ``samples`` of them."""
    weights = [source.weight for source in sources if source.weight is not None]
    return Blend(
        [_sampler(data, source, length, seed) for source in sources],
        weights or None,
        seed=seed,
        num_samples=samples,
        max_epochs=[source.max_epochs for source in sources],
        names=[source.path for source in sources],
    )


class Batches:
    """Micro-batches of one data-parallel rank.

    A step takes the next ``batch`` samples of the blend; rank r of R takes the r-th contiguous
    share of them, in micro-batches.

    With ``sequences`` n: sample i is sequence i mod n of the blend as it is evaluated, i < n ·
    ``draws``, with the noise of number i.  Behind these comes padding without a loss.  The row
    field ``sequence`` tells i mod n, and n on padding.
    """

    def __init__(
        self,
        blend: Blend,
        objective: Objective,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        device: torch.device,
        sequences: int | None = None,
        draws: int = 1,
    ) -> None:
        self.blend = blend
        self.sequences, self.draws = sequences, draws
        self.objective = objective
        self.micro_batch = micro_batch
        self.data_rank, self.data_size = data_rank, data_size
        self.device = device

    def read(self, first: int, count: int) -> list[MicroBatch]:
        """This rank's micro-batches of the global samples [first, first + count)."""
        share = count // self.data_size
        assert share * self.data_size == count and share % self.micro_batch == 0
        begin = first + self.data_rank * share
        return [
            self._micro_batch(range(start, start + self.micro_batch))
            for start in range(begin, begin + share, self.micro_batch)
        ]

    def _micro_batch(self, indices: range) -> MicroBatch:
        numbers = [self._sequence(index) for index in indices]
        samples = [self._sample(number) for number in numbers]
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        documents = torch.from_numpy(np.stack([sample.documents for sample in samples]))
        if self.sequences is None:
            batch = self.objective.micro_batch(tokens, documents.long(), indices)
        else:
            batch = self.objective.evaluation_batch(tokens, documents.long(), indices)
            views = len(batch.ids) // len(indices)
            rows = torch.tensor(numbers).repeat_interleave(views)[:, None]
            batch.fields[SEQUENCE] = rows.repeat(1, batch.ids.shape[1])
        return batch.map(lambda x: x.to(self.device, non_blocking=True))

    def _sequence(self, index: int) -> int:
        """Which sequence of the blend sample ``index`` is; one beyond the last for padding."""
        if self.sequences is None:
            return index
        inside = index < self.sequences * self.draws
        return index % self.sequences if inside else self.sequences

    def _sample(self, number: int) -> Sample:
        if self.sequences is None or number < self.sequences:
            return self.blend.sample(number)
        like = self.blend.sample(0)
        return Sample(np.zeros_like(like.tokens), np.full_like(like.documents, -1))


class Prefetcher:
    """Reads the next step's batches while the current step runs.

    What is read depends on the step alone, so reading ahead (or again) changes nothing.
    """

    def __init__(self, batches: Batches, batch: int) -> None:
        self.batches, self.batch = batches, batch
        self._pool = ThreadPoolExecutor(1, "data")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def take(self, first: int, more: bool) -> list[MicroBatch]:
        """Micro-batches of the step that begins at sample ``first``; with ``more``, starts reading
        those of the step after it."""
        if self._ahead is not None and self._ahead[0] == first:
            found = self._ahead[1].result()
        else:
            found = self.batches.read(first, self.batch)
        self._ahead = None
        if more:
            after = first + self.batch
            self._ahead = (after, self._pool.submit(self.batches.read, after, self.batch))
        return found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def manifests(sources: Sequence[SourceConfig]) -> list[Manifest]:
    return [Manifest.load(source.path) for source in sources]


def bytes_per_token(sources: Sequence[SourceConfig]) -> float:
    """UTF-8 bytes of the original text per token (end-of-text tokens included)."""
    found = manifests(sources)
    return sum(m.text_bytes for m in found) / sum(m.tokens for m in found)


def data_fingerprint(config: RunConfig) -> str:
    """Hash of everything that decides which tokens are seen in which order."""
    content: dict[str, Any] = {
        "sources": [
            {"weight": source.weight, "content": manifest.fingerprint}
            for source, manifest in zip(
                config.data.train, manifests(config.data.train), strict=True
            )
        ],
        "samples": config.data.samples,
        "sequence_length": config.training.sequence_length,
        "seed": config.seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fingerprints(config: RunConfig) -> dict[str, str]:
    """What a checkpoint keeps, to tell whether a run goes on with the same data."""
    tokenizer = manifests(config.data.train[:1])[0].tokenizer
    return {
        "data_fingerprint": data_fingerprint(config),
        "tokenizer_fingerprint": tokenizer["sha256"],
    }


def check_vocabulary(config: RunConfig, sources: Sequence[SourceConfig] | None = None) -> None:
    """``ValueError`` unless every source (or all of ``config``) was made by one tokenizer that
    fits the model."""
    seen: dict[str, str] = {}
    for source in sources or (*config.data.train, *config.data.validation):
        reader = IndexedReader(source.path)
        manifest = reader.manifest or Manifest.load(source.path)
        name, size = manifest.tokenizer["name"], manifest.tokenizer["vocab_size"]
        seen.setdefault(manifest.tokenizer["sha256"], f"{source.path} ({name}, {size:,} tokens)")
        if size - 1 > np.iinfo(reader.dtype).max:
            raise ValueError(
                f"{source.path}: its manifest says a vocabulary of {size:,}, which does not fit "
                f"the {reader.dtype} of its .idx file"
            )
        if size > config.model.predicted_vocab_size:
            mask = ", of which one is the mask token" if config.model.mask_token else ""
            raise ValueError(
                f"{source.path}: made with a vocabulary of {size:,}, larger than "
                f"model.vocab_size={config.model.vocab_size:,}{mask}"
            )
    if len(seen) > 1:
        raise ValueError(
            "the sources were made with different tokenizers: " + " and ".join(seen.values())
        )


def vocabulary_note(config: RunConfig) -> str:
    """For people: that the model knows ids which the data never hold; empty if it does not."""
    tokenizer = manifests(config.data.train[:1])[0].tokenizer
    unused = config.model.predicted_vocab_size - tokenizer["vocab_size"]
    if unused <= 0:
        return ""
    return (
        f"note: {unused:,} of the {config.model.vocab_size:,} ids of model.vocab_size can never "
        f"occur: tokenizer {tokenizer['name']} has {tokenizer['vocab_size']:,}"
    )
