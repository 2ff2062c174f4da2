"""Stateless sampling: exact permutations, windows, packing and blends."""

import itertools
import os
import pickle
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_tools.blend import Blend, BlendError, PackedSampler, WindowSampler, permute
from data_tools.indexed import IndexedReader, IndexedWriter
from data_tools.manifest import DatasetError
from data_tools.packing import cut_documents, fill_bins, write_packing


def dataset(prefix: Path, lengths: list[int], dtype: type = np.int32) -> IndexedReader:
    """A stream 0, 1, 2, ... so that a token tells its place."""
    offsets = np.cumsum([0, *lengths])
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_many(np.arange(offsets[-1]), np.array(lengths))
    return IndexedReader(prefix)


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4096, 65_537, 250_000])
def test_permutation_is_a_bijection(n: int) -> None:
    image = permute(np.arange(n), n, (7, n))
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))
    assert [permute(i, n, (7, n)) for i in range(min(n, 300))] == image[:300].tolist()


def test_permutation_looks_random_and_depends_on_every_part_of_the_key() -> None:
    n, place = 10_000, np.arange(10_000)
    images = [permute(place, n, key) for key in [(0, 1), (1, 0), (0, 2), (0, "windows", 1)]]
    for a, b in itertools.combinations([place, *images], 2):
        assert (a == b).sum() < 10  # one fixed point is expected
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
        if a is not place:
            assert abs(np.corrcoef(np.diff(a), np.diff(b))[0, 1]) < 0.05
    # Every position is hit about equally often by each region, over many keys.
    counts = np.zeros((10, 10))
    for key in range(2000):
        image = permute(np.arange(10), 10, (key,))
        counts[np.arange(10), image] += 1
    assert np.abs(counts - 200).max() < 5.5 * 200**0.5


def test_permutation_of_huge_domains() -> None:
    for n in (10**12 + 39, 1 << 62):
        k = np.array([0, 1, 2, n // 2, n - 2, n - 1])
        image = permute(k, n, (3,))
        assert len(set(image.tolist())) == len(k)
        assert ((image >= 0) & (image < n)).all()
        assert [permute(int(i), n, (3,)) for i in k] == image.tolist()
    assert permute(np.arange(6).reshape(2, 3), 6, (1,)).shape == (2, 3)


@pytest.mark.parametrize(
    "lengths, sequence_length", [([7, 1, 30, 2, 60], 9), ([100], 10), ([1] * 41, 8)]
)
def test_each_window_exactly_once_per_epoch(
    tmp_path: Path, lengths: list[int], sequence_length: int
) -> None:
    reader = dataset(tmp_path / "d", lengths)
    sampler = WindowSampler(reader, sequence_length, seed=3)
    n = sampler.num_samples
    assert n == (sum(lengths) - 1) // sequence_length
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for epoch in range(3):
        starts = []
        for k in range(epoch * n, (epoch + 1) * n):
            sample = sampler.sample(k)
            assert sample.tokens.dtype == np.int64
            assert sample.documents.dtype == np.int32
            start = int(sample.tokens[0])
            assert sample.tokens.tolist() == list(range(start, start + sequence_length + 1))
            expected = owner[start : start + sequence_length + 1]
            boundaries = np.diff(expected) != 0
            assert np.array_equal(np.diff(sample.documents) != 0, boundaries)
            assert sample.documents[0] == 0
            assert np.array_equal(sample.label_mask, ~boundaries)
            starts.append(start)
        assert sorted(starts) == [w * sequence_length for w in range(n)]
        assert starts != sorted(starts)
    orders = [[sampler.window(k) for k in range(e * n, (e + 1) * n)] for e in range(2)]
    assert orders[0] != orders[1]


def test_samples_do_not_depend_on_the_reading_order(tmp_path: Path) -> None:
    reader = dataset(tmp_path / "d", [50, 20, 33, 400])
    sources = [WindowSampler(reader, s, seed=1) for s in (5, 7)]
    forward = Blend(sources, [1, 2], seed=5, num_samples=100)
    expected = [forward.sample(k).tokens.tolist() for k in range(100)]
    backward = Blend(sources, [1, 2], seed=5, num_samples=100)
    assert [backward.sample(k).tokens.tolist() for k in reversed(range(100))][::-1] == expected
    late = Blend(sources, [1, 2], seed=5, num_samples=100)
    assert late.sample(77).tokens.tolist() == expected[77]  # a resumed run starts in the middle
    # The number of samples asked for changes nothing but where the blend ends.
    short = Blend(sources, [1, 2], seed=5, num_samples=60)
    assert [short.sample(k).tokens.tolist() for k in range(60)] == expected[:60]


def test_too_short_stream_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BlendError, match=r"6 tokens are too few for one sample of 6 \+ 1"):
        WindowSampler(dataset(tmp_path / "d", [6]), 6, seed=0)
    with pytest.raises(BlendError, match="sequence length 0"):
        WindowSampler(dataset(tmp_path / "e", [6]), 0, seed=0)


def test_billion_windows_need_no_time_and_no_memory(tmp_path: Path) -> None:
    # A sparse file: 32 GB of zeros that take no space, in 8 documents of at most 2^31 - 1 tokens.
    sequence_length, windows = 16, 10**9
    tokens = windows * sequence_length + 1
    lengths = [2**31 - 1] * 7
    lengths.append(tokens - sum(lengths))
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add(np.array([0]))
    with open(tmp_path / "d.bin", "r+b") as file:
        os.truncate(file.fileno(), 2 * tokens)
    header = bytearray((tmp_path / "d.idx").read_bytes()[:34])
    header[18:34] = np.array([8, 9], "<u8").tobytes()
    offsets = np.cumsum([0, *lengths])
    arrays = [np.array(lengths, "<i4"), 2 * offsets[:-1], np.arange(9)]
    (tmp_path / "d.idx").write_bytes(bytes(header) + b"".join(a.tobytes() for a in arrays))

    tracemalloc.start()
    begin = time.perf_counter()
    sampler = WindowSampler(IndexedReader(tmp_path / "d"), sequence_length, seed=0)
    blend = Blend([sampler], seed=0)
    assert blend.num_samples == windows
    blend.sample(0)
    assert time.perf_counter() - begin < 1.0
    for k in np.linspace(0, windows - 1, 2000).astype(int):
        sample = blend.sample(int(k))
        assert len(sample.tokens) == sequence_length + 1
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert len({sampler.window(k) for k in range(10**6, 10**6 + 1000)}) == 1000


class Counted:
    """A source that is only its size: blends work from counts alone."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def sample(self, k: int) -> int:  # type: ignore[override]
        return k


@pytest.mark.parametrize(
    "weights",
    [[1], [0.5, 0.5], [0.7, 0.2, 0.1], [1, 1, 1], [3, 1, 4, 1, 5, 9, 2, 6], [0.99999, 0.00001]],
)
def test_blend_quotas_are_exact(weights: list[float]) -> None:
    blend = Blend([Counted(10**12) for _ in weights], weights, seed=1, num_samples=10**9)
    share = np.array(weights) / sum(weights)
    for blocks in (1, 2, 3, 10, 1000, 100_003):
        slots = blocks * blend.block
        counts = blend.counts(slots)
        assert counts.sum() == slots
        assert np.abs(counts - share * slots).max() < 1 + 1e-6
    shares = np.array([blend.counts(b * blend.block) for b in range(200)])
    assert (np.diff(shares, axis=0) >= 0).all()


def test_blend_gives_each_sample_of_a_source_once_and_mixes_within_a_block() -> None:
    weights = [0.6, 0.3, 0.1]
    blend = Blend([Counted(10**6) for _ in weights], weights, seed=2, num_samples=20_000)
    located = [blend.locate(k) for k in range(20_000)]
    running = np.zeros(3, int)
    for number, (source, _) in enumerate(located):
        running[source] += 1
        if number in (5, 4000, 4096, 9999):
            assert blend.counts(number + 1).tolist() == running.tolist()
    for source in range(3):
        seen = sorted(index for s, index in located if s == source)
        whole = int(blend.counts(4 * 4096)[source])
        assert seen[:whole] == list(range(whole))
        assert len(set(seen)) == len(seen)
        within = [s for s, _ in located[:400]].count(source)
        assert abs(within - 400 * weights[source]) < 40
    other = Blend([Counted(10**6) for _ in weights], weights, seed=3, num_samples=20_000)
    assert [other.locate(k) for k in range(100)] != located[:100]


def test_blend_refuses_more_than_exists() -> None:
    sources = [Counted(1000), Counted(50)]
    with pytest.raises(BlendError) as caught:
        Blend(sources, [0.5, 0.5], seed=0, num_samples=400, names=["web", "books"])
    message = str(caught.value)
    assert "books: 50 samples available per epoch" in message
    assert "at most 1 allowed" in message
    assert "web" not in message
    need = int(message.split(" needed")[0].split()[-1])
    assert f"{need / 50:.2f} epochs" in message
    assert need == Blend(sources, [1, 1], seed=0, num_samples=400, max_epochs=9).counts(400)[1]

    most = Blend(sources, [0.5, 0.5], seed=0).num_samples  # all that one epoch allows
    counts = Blend(sources, [0.5, 0.5], seed=0).counts
    assert counts(most)[1] == 50
    assert counts(most + 1)[1] == 51
    assert Blend(sources, [0.5, 0.5], seed=0, max_epochs=[1, 4]).counts(4 * most).max() < 300
    assert Blend(sources, [0.5, 0.5], seed=0, max_epochs=[1, 4]).num_samples > 3 * most
    with pytest.raises(BlendError, match=r"outside the blend"):
        Blend(sources, [0.5, 0.5], seed=0, num_samples=10).sample(10)


def test_blend_of_one_source_runs_through_it_once() -> None:
    blend = Blend([Counted(10_001)], seed=4)
    assert blend.num_samples == 10_001
    seen = {blend.locate(k)[1] for k in range(8192)}
    assert seen == set(range(8192))  # complete blocks
    with pytest.raises(BlendError, match=r"1\.00 epochs"):
        Blend([Counted(10_001)], seed=4, num_samples=10_002)


@pytest.mark.parametrize(
    "weights, options, message",
    [
        ([1, 0], {}, "weight 0"),
        ([1, -1], {}, "weight -1"),
        ([1, float("nan")], {}, "weight nan"),
        ([1], {}, "1 weights"),
        ([1, 1], {"max_epochs": 0}, "max_epochs 0"),
        ([1, 1], {"max_epochs": [1]}, "1 epoch limits"),
        ([1, 1], {"num_samples": 0}, "0 samples"),
        ([1, 1], {"max_epochs": float("inf")}, "set num_samples"),
    ],
)
def test_impossible_blend_is_an_error(weights: list[float], options: dict, message: str) -> None:
    with pytest.raises(BlendError, match=message):
        Blend([Counted(10), Counted(10)], weights, seed=0, **options)


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 16, 64, 500])
def test_packing_keeps_every_label_once(tmp_path: Path, sequence_length: int) -> None:
    lengths = np.random.default_rng(0).geometric(0.05, 300).tolist() + [1, 1, 2, 65, 66, 129]
    reader = dataset(tmp_path / "d", lengths)
    described = write_packing(tmp_path / "d", sequence_length)
    sampler = PackedSampler(reader, sequence_length, seed=1)
    assert sampler.num_samples == described["samples"]
    labels: list[int] = []
    filled = 0
    for k in range(sampler.num_samples):
        sample = sampler.sample(k)
        used = sample.documents >= 0
        filled += int((~used).sum())
        assert (sample.tokens[~used] == 0).all()
        steps = sample.tokens[1:] - sample.tokens[:-1]
        assert (steps[sample.label_mask] == 1).all()  # never across pieces
        labels += sample.tokens[1:][sample.label_mask].tolist()
    firsts = set(np.cumsum([0, *lengths])[:-1].tolist())
    assert sorted(labels) == [t for t in range(sum(lengths)) if t not in firsts]
    assert filled == described["padding"]


def test_samplers_can_be_sent_to_worker_processes(tmp_path: Path) -> None:
    reader = dataset(tmp_path / "d", [3, 1000, 5])
    write_packing(tmp_path / "d", 8)
    sources = [WindowSampler(reader, 8, seed=1), PackedSampler(reader, 8, seed=1)]
    blend = Blend(sources, [1, 1], seed=0)
    data = pickle.dumps(blend)
    assert len(data) < 2000  # paths and counts, not the mapped data
    copy = pickle.loads(data)
    for k in range(0, blend.num_samples, 7):
        assert np.array_equal(copy.sample(k).tokens, blend.sample(k).tokens)


def test_packing_is_tight_and_equal_to_best_fit_decreasing() -> None:
    rng = np.random.default_rng(1)
    for capacity in (10, 33, 257):
        lengths = np.minimum(rng.geometric(4 / capacity, 2000), capacity)
        order, counts = fill_bins(lengths, capacity)
        assert np.array_equal(np.sort(order), np.arange(len(lengths)))
        ends = np.cumsum(counts)
        sums = np.add.reduceat(lengths[order], ends - counts)
        assert sums.max() <= capacity
        spaces: list[int] = []  # the textbook algorithm
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [space for space in spaces if space >= length]
            if fitting:
                spaces.remove(min(fitting))
                spaces.append(min(fitting) - length)
            else:
                spaces.append(capacity - length)
        assert len(counts) == len(spaces)
        assert sorted((capacity - sums).tolist()) == sorted(spaces)


def test_cut_documents() -> None:
    pieces = cut_documents(np.cumsum([0, 1, 2, 5, 6, 9, 10]), 4)
    assert pieces.tolist() == [
        (1, 2),
        (3, 5),
        (8, 5),
        (12, 2),
        (14, 5),
        (18, 5),
        (23, 5),
        (27, 5),
        (31, 2),
    ]


def test_stale_packing_index_is_refused(tmp_path: Path) -> None:
    reader = dataset(tmp_path / "d", [5, 6, 7])
    with pytest.raises(DatasetError, match="--pack 4"):
        PackedSampler(reader, 4, seed=0)
    write_packing(tmp_path / "d", 4)
    assert PackedSampler(reader, 4, seed=0).num_samples > 0
    with pytest.raises(DatasetError, match=r"another version of d\.idx"):
        PackedSampler(dataset(tmp_path / "d", [5, 7, 6]), 4, seed=0)
    (tmp_path / "d.pack4.json").write_text("{")
    with pytest.raises(DatasetError, match="cannot be read"):
        PackedSampler(reader, 4, seed=0)
    with pytest.raises(DatasetError, match="nothing to pack"):
        write_packing(dataset(tmp_path / "e", [1, 1]).prefix, 4)
