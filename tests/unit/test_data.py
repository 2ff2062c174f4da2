"""Batches as a function of (seed, samples consumed), whatever the layout."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_tools.blend import BlendError
from data_tools.corpus import ReadOptions
from data_tools.dataset import prepare
from data_tools.indexed import IndexedReader
from data_tools.manifest import Manifest
from data_tools.packing import write_packing
from data_tools.request import Request
from data_tools.tokenizers import byte_tokenizer
from models.losses import IGNORE
from parallel.stage import MicroBatch
from pretrain.config import DataConfig, RunConfig, SourceConfig, TrainingConfig
from pretrain.data import (
    Batches,
    Prefetcher,
    build_blend,
    bytes_per_token,
    check_vocabulary,
    data_fingerprint,
)
from pretrain.objectives.base import build_objective
from pretrain.objectives.causal import Causal

CPU = torch.device("cpu")
LENGTH, SEED = 16, 5
MASK = Causal.Config(documents="mask")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two byte-tokenised datasets, ``one/train`` and ``two/train``, packed for LENGTH."""
    root = tmp_path_factory.mktemp("data")
    chance = np.random.default_rng(0)
    for name, documents in (("one", 40), ("two", 25)):
        text = root / f"{name}.jsonl"
        lines = []
        for _ in range(documents):
            letters = chance.integers(97, 123, int(chance.integers(1, 60)))
            lines.append(json.dumps({"text": bytes(letters.tolist()).decode()}))
        text.write_text("\n".join(lines))
        request = Request((text,), ReadOptions(), byte_tokenizer())
        prepare(request, root / name, workers=1, say=lambda line: None)
        write_packing(root / name / "train", LENGTH)
    return root


def sources(folder: Path, weights: tuple[float | None, float | None] = (1.0, 2.0)) -> Any:
    return tuple(
        SourceConfig(str(folder / name / "train"), weight, max_epochs=20)
        for name, weight in zip(("one", "two"), weights)
    )


def batches(
    folder: Path, rank: int = 0, size: int = 1, micro_batch: int = 2, seed: int = SEED,
    samples: str = "windows", objective: Causal.Config = MASK,
) -> Batches:  # fmt: skip
    train = sources(folder)
    data = DataConfig(train, samples=samples)  # type: ignore[arg-type]
    blend = build_blend(data, train, LENGTH, seed, 400)
    return Batches(blend, build_objective(objective), micro_batch, rank, size, CPU)


def flatten(found: list[MicroBatch]) -> dict[str, Tensor]:
    """Every tensor of these micro-batches, joined."""
    joined = {"ids": torch.cat([batch.ids for batch in found])}
    for name in found[0].fields:
        joined[name] = torch.cat([batch.fields[name] for batch in found])
    documents = [batch.documents for batch in found if batch.documents is not None]
    return {**joined, "documents": torch.cat(documents)} if documents else joined


def equal(a: list[MicroBatch], b: list[MicroBatch]) -> bool:
    left, right = flatten(a), flatten(b)
    return set(left) == set(right) and all(left[name].equal(right[name]) for name in left)


@pytest.mark.parametrize("samples", ["windows", "packed"])
def test_ranks_tile_the_global_batch_in_order(folder: Path, samples: str) -> None:
    whole = batches(folder, samples=samples, micro_batch=8).read(24, 8)
    assert len(whole) == 1 and whole[0].ids.shape == (8, LENGTH)
    for size in (1, 2, 4):
        for micro_batch in (1, 2):
            parts = []
            for rank in range(size):
                share = batches(folder, rank, size, micro_batch, samples=samples).read(24, 8)
                assert len(share) == 8 // size // micro_batch
                assert all(len(part.ids) == micro_batch for part in share)
                parts += share
            assert equal(parts, whole), (size, micro_batch)


def test_samples_are_those_of_the_blend(folder: Path) -> None:
    reader = batches(folder, micro_batch=4)
    found = reader.read(0, 20)
    ids, labels = flatten(found)["ids"], flatten(found)["labels"]
    for index in range(20):
        sample = reader.blend.sample(index)
        assert ids[index].tolist() == sample.tokens[:-1].tolist()
        wanted = np.where(sample.label_mask, sample.tokens[1:], IGNORE)
        assert labels[index].tolist() == wanted.tolist()
    assert found[0].documents is not None and found[0].documents.dtype == torch.int64


@pytest.mark.parametrize("first", [0, 8, 24, 104, 392])
def test_resume_at_any_sample(folder: Path, first: int) -> None:
    """A fresh reader that starts there reads what an old one reads on the way, also in steps of
    another size."""
    old = batches(folder)
    passed = [old.read(at, 8) for at in range(0, first + 8, 8)][-1]
    assert equal(batches(folder).read(first, 8), passed)
    halves = batches(folder).read(first, 4) + batches(folder).read(first + 4, 4)
    assert equal(halves, passed)


def test_seeds_and_objectives_decide(folder: Path) -> None:
    base = batches(folder).read(0, 8)
    assert not equal(batches(folder, seed=SEED + 1).read(0, 8), base)
    attend = batches(folder, objective=Causal.Config()).read(0, 8)
    assert flatten(attend)["ids"].equal(flatten(base)["ids"])
    assert (
        (flatten(attend)["labels"] == IGNORE).sum() == 0 < (flatten(base)["labels"] == IGNORE).sum()
    )


def test_an_uneven_share_is_our_own_mistake(folder: Path) -> None:
    with pytest.raises(AssertionError):
        batches(folder, size=3).read(0, 8)
    with pytest.raises(AssertionError):
        batches(folder, micro_batch=3).read(0, 8)


def test_more_samples_than_the_data_gives_is_an_error(folder: Path) -> None:
    train = tuple(replace(source, max_epochs=1.0) for source in sources(folder))
    with pytest.raises(BlendError, match=r"one/train: .* samples available per epoch"):
        build_blend(DataConfig(train), train, LENGTH, SEED, 400)
    both = sources(folder, (None, None))
    blend = build_blend(DataConfig(both), both, LENGTH, SEED, None)
    most = 20 * sum(s.num_samples for s in blend.sources)
    assert 0.99 * most < blend.num_samples <= most  # sources end within a block of each other


@pytest.fixture
def prefetcher(folder: Path) -> Iterator[Prefetcher]:
    made = Prefetcher(batches(folder), 8)
    yield made
    made.close()
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())


def test_prefetching_equals_reading(folder: Path, prefetcher: Prefetcher) -> None:
    direct = batches(folder)
    steps = [0, 8, 16, 16, 200, 208, 0, 392]  # also again, and elsewhere than foreseen
    for at in steps:
        more = at != 392
        assert equal(prefetcher.take(at, more), direct.read(at, 8)), at
        assert (prefetcher._ahead is not None) == more


def test_prefetching_reads_ahead(prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    read = prefetcher.batches.read

    def record(first: int, count: int) -> list[MicroBatch]:
        seen.append((first, threading.current_thread() is threading.main_thread()))
        return read(first, count)

    monkeypatch.setattr(prefetcher.batches, "read", record)
    prefetcher.take(0, True)
    prefetcher.take(8, True)
    prefetcher.take(16, False)
    assert seen == [(0, True), (8, False), (16, False)]


def test_a_failed_read_ahead_is_reported(prefetcher: Prefetcher) -> None:
    prefetcher.take(392, True)  # nothing is there beyond sample 400
    with pytest.raises(BlendError, match="sample 400 is outside"):
        prefetcher.take(400, False)


@pytest.mark.parametrize("documents", ["mask", "attend"])
def test_packed_padding_never_carries_a_loss(folder: Path, documents: Any) -> None:
    objective = Causal.Config(documents=documents)
    reader = batches(folder, micro_batch=1, samples="packed", objective=objective)
    padded = counted = 0
    for index in range(200):
        (batch,) = reader.read(index, 1)
        padding = torch.from_numpy(reader.blend.sample(index).documents[1:] < 0)
        labels = batch.fields["labels"][0]
        assert (labels[padding] == IGNORE).all()
        padded += int(padding.sum())
        counted += reader.objective.counts([batch])["labels"]
        if documents == "mask":
            start = torch.from_numpy(np.diff(reader.blend.sample(index).documents) != 0)
            assert (labels[start] == IGNORE).all()
            assert ((labels == IGNORE) == (padding | start)).all()
    assert padded > 0 and counted > 0


def run_config(folder: Path, **changes: Any) -> RunConfig:
    config = RunConfig(
        data=DataConfig(sources(folder)),
        training=TrainingConfig(sequence_length=LENGTH, batch_tokens=8 * LENGTH, steps=10),
        seed=SEED,
    )
    return replace(config, **changes)


def test_fingerprint(folder: Path, tmp_path: Path) -> None:
    """It names the order of tokens: data, blend, seed and length, but neither batch nor layout
    nor the place on disk."""
    config = run_config(folder)
    base = data_fingerprint(config)
    one, two = config.data.train
    training = config.training
    different = {
        "seed": run_config(folder, seed=SEED + 1),
        "length": run_config(folder, training=replace(training, sequence_length=8)),
        "samples": run_config(folder, data=replace(config.data, samples="packed")),
        "order": run_config(folder, data=DataConfig((two, one))),
        "fewer": run_config(folder, data=DataConfig((replace(one, weight=None),))),
        "weight": run_config(folder, data=DataConfig((replace(one, weight=3.0), two))),
    }
    found = {name: data_fingerprint(other) for name, other in different.items()}
    assert len({base, *found.values()}) == len(found) + 1
    for same in (
        run_config(folder, training=replace(training, batch_tokens=64 * LENGTH, micro_batch=1)),
        run_config(folder, training=replace(training, steps=99)),
        run_config(folder, parallel=replace(config.parallel, tp=2, fsdp=4), name="other"),
        run_config(folder, data=replace(config.data, validation=(one,))),
    ):
        assert data_fingerprint(same) == base
    moved = copied(folder / "one", tmp_path / "elsewhere")
    there = replace(one, path=str(moved / "train"))
    assert data_fingerprint(run_config(folder, data=DataConfig((there, two)))) == base
    changed = Manifest.load(there.path)
    changed.files[".bin"]["sha256"] = "0" * 64
    changed.save(there.path)
    assert data_fingerprint(run_config(folder, data=DataConfig((there, two)))) != base


def test_bytes_per_token(folder: Path) -> None:
    """One token per byte and one that ends each document."""
    readers = [IndexedReader(folder / name / "train") for name in ("one", "two")]
    tokens = sum(reader.num_tokens for reader in readers)
    ends = sum(len(reader.document_offsets) - 1 for reader in readers)
    assert bytes_per_token(sources(folder)) == pytest.approx((tokens - ends) / tokens, abs=1e-15)


def test_vocabulary_must_fit(folder: Path, tmp_path: Path) -> None:
    config = run_config(folder)
    fitting = replace(config, model=replace(config.model, vocab_size=257))
    check_vocabulary(fitting)
    small = replace(config, model=replace(config.model, vocab_size=256))
    with pytest.raises(ValueError, match=r"one/train: made with a vocabulary of 257, larger than"):
        check_vocabulary(small)
    first, second = fitting.data.train
    copy = replace(second, path=str(copied(folder / "two", tmp_path / "copy") / "train"))
    tokenizer = Manifest.load(copy.path).tokenizer
    retokenised(copy.path, {**tokenizer, "sha256": "another"})
    for data in (
        replace(fitting.data, train=(first, copy)),
        replace(fitting.data, validation=(copy,)),
    ):
        with pytest.raises(
            ValueError, match=r"different tokenizers: \S+one/train .* \S+copy/train"
        ):
            check_vocabulary(replace(fitting, data=data))
    retokenised(copy.path, {**tokenizer, "vocab_size": 65_537})
    wide = replace(config.model, vocab_size=70_000)
    with pytest.raises(ValueError, match=r"copy/train: .* 65,537, which does not fit the uint16"):
        check_vocabulary(replace(config, model=wide, data=DataConfig((first, copy))))


def retokenised(prefix: str, tokenizer: dict[str, Any]) -> None:
    replace(Manifest.load(prefix), tokenizer=tokenizer).save(prefix)


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target
