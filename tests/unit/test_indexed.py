"""Megatron `.bin`/`.idx` files: bytes equal to the real package's, and no silent damage."""

import importlib
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from data_tools import indexed
from data_tools.indexed import IndexedReader, IndexedWriter
from data_tools.manifest import DatasetError, Manifest

DOCUMENTS = [[5, 6, 7], [1], [65_535, 2, 3, 4, 9], [8] * 40, [0, 0]]
STREAM = [token for document in DOCUMENTS for token in document]


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document))


def read_with_struct(prefix: Path) -> tuple[int, list[list[int]], tuple[int, ...]]:
    """The format from its description alone: (type code, sequences, document indices)."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    at = 34
    lengths = struct.unpack_from(f"<{sequences}i", raw, at)
    offsets = struct.unpack_from(f"<{sequences}q", raw, at := at + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", raw, at := at + 8 * sequences)
    assert at + 8 * entries == len(raw)
    letter, size = {8: ("H", 2), 4: ("i", 4), 1: ("B", 1), 5: ("q", 8)}[code]
    data = Path(f"{prefix}.bin").read_bytes()
    assert offsets[-1] + lengths[-1] * size == len(data)
    return (
        code,
        [list(struct.unpack_from(f"<{n}{letter}", data, o)) for n, o in zip(lengths, offsets)],
        documents,
    )


MEGATRON = "megatron.core.datasets.indexed_dataset"


def megatron_datasets() -> ModuleType:
    """The real package: it must be there where the installation asked for its extra."""
    if "megatron" in os.environ.get("EXTRAS", "").split(","):
        with warnings.catch_warnings(action="ignore"):  # as importorskip does
            return importlib.import_module(MEGATRON)
    module: ModuleType = pytest.importorskip(MEGATRON, reason="needs the megatron extra")
    return module


def test_the_real_package_is_not_skipped_where_it_was_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, MEGATRON, None)  # as if it were not installed
    monkeypatch.setenv("EXTRAS", "hf,dev,megatron")
    with pytest.raises(ModuleNotFoundError):
        megatron_datasets()
    monkeypatch.setenv("EXTRAS", "hf,dev")
    with pytest.raises(pytest.skip.Exception):
        megatron_datasets()


@pytest.mark.parametrize("dtype, code", [(np.uint16, 8), (np.int32, 4), (np.int64, 5)])
def test_independent_reader_finds_what_was_written(tmp_path: Path, dtype: type, code: int) -> None:
    write(tmp_path / "d", DOCUMENTS, dtype)
    found_code, sequences, documents = read_with_struct(tmp_path / "d")
    assert (found_code, sequences) == (code, DOCUMENTS)
    assert documents == tuple(range(len(DOCUMENTS) + 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_bytes_equal_megatron_core_both_ways(tmp_path: Path, dtype: type) -> None:
    megatron = megatron_datasets()
    import torch

    write(tmp_path / "ours", DOCUMENTS, dtype)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()

    dataset = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset[0].dtype == dtype
    reader = IndexedReader(tmp_path / "theirs")
    assert reader.read(0, reader.num_tokens).tolist() == STREAM
    assert reader.lengths.tolist() == [len(d) for d in DOCUMENTS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
def test_megatron_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    # Sentence-split files have several sequences per document; an empty text leaves a document
    # without any. Boundaries must follow documents, and an empty one must not shift the rest.
    megatron = megatron_datasets()
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3, 4]), [1, 3])
    builder.end_document()  # empty
    builder.add_document(torch.tensor([5, 6]), [2])
    builder.finalize(str(tmp_path / "m.idx"))
    reader = IndexedReader(tmp_path / "m")
    assert reader.document_offsets.tolist() == [0, 4, 6]
    assert reader.document_spans(3, 3)[1].tolist() == [1, 2]


def test_reading_across_documents(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    reader = IndexedReader(tmp_path / "d")
    owner = [i for i, document in enumerate(DOCUMENTS) for _ in document]
    assert (reader.num_documents, reader.num_tokens) == (len(DOCUMENTS), len(STREAM))
    assert reader.document_offsets.dtype == np.int64
    for start in range(len(STREAM)):
        assert reader.document_of(start) == owner[start]
        for count in range(1, len(STREAM) - start + 1):
            assert reader.read(start, count).tolist() == STREAM[start : start + count]
            first, spans = reader.document_spans(start, count)
            spread = np.repeat(first + np.arange(len(spans)), spans)
            assert spread.tolist() == owner[start : start + count]
    for start, count in ((-1, 2), (0, len(STREAM) + 1), (len(STREAM), 1)):
        with pytest.raises(DatasetError, match="outside the stream"):
            reader.read(start, count)
    with pytest.raises(ValueError, match="read-only"):
        reader.read(0, 3)[0] = 1
    assert pickle.loads(pickle.dumps(reader)).read(3, 4).tolist() == STREAM[3:7]


def test_header_not_vocabulary_decides_the_type(tmp_path: Path) -> None:
    # Readers that trust the tokenizer misread files whose vocabulary lies in 65,500 .. 65,536.
    for vocab, dtype in [(65_499, np.uint16), (65_500, np.int32), (65_529, np.int32)]:
        assert indexed.token_dtype(vocab) == dtype
    assert indexed.token_dtype(65_536) == indexed.token_dtype(65_537) == np.int32
    for dtype in (np.uint16, np.int32):  # either type may hold an id of 65,529
        write(tmp_path / "d", [[65_529, 1]], dtype)
        assert IndexedReader(tmp_path / "d").read(0, 2).tolist() == [65_529, 1]
    with pytest.raises(DatasetError, match="does not fit"):
        indexed.token_dtype(2**31)


@pytest.mark.parametrize("bad", [70_000, 65_536, -1])
def test_ids_do_not_wrap_around(tmp_path: Path, bad: int) -> None:
    with pytest.raises(DatasetError, match=f"token id {bad} is outside uint16"):
        write(tmp_path / "d", [[1, 2], [3, bad]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("keep", [0, 1, 8, 33, 34, 40, -1, -7, "longer"])
def test_truncated_file_is_an_error(tmp_path: Path, suffix: str, keep: int | str) -> None:
    write(tmp_path / "d", DOCUMENTS)
    path = tmp_path / f"d{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0" if keep == "longer" else whole[:keep])
    with pytest.raises(DatasetError, match=r"truncated|longer") as caught:
        IndexedReader(tmp_path / "d")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "offset, value, message",
    [
        (0, b"TNTIDX\0\0\0", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2, expected 1"),
        (17, b"\x07", "type code 7 is not an integer"),
        (17, b"\x63", "type code 99"),
        (18, struct.pack("<Q", 0), "holds no documents"),
        (-8, struct.pack("<q", 4), "documents cover sequences 0 to 4, expected 0 to 5"),
    ],
)
def test_foreign_index_is_an_error(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    write(tmp_path / "d", DOCUMENTS)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    offset %= len(raw)
    raw[offset : offset + len(value)] = value
    (tmp_path / "d.idx").write_bytes(raw)
    with pytest.raises(DatasetError, match=message):
        IndexedReader(tmp_path / "d")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"d\.bin: no such file"):
        IndexedReader(tmp_path / "d")
    write(tmp_path / "d", DOCUMENTS)
    (tmp_path / "d.idx").unlink()
    with pytest.raises(DatasetError, match=r"d\.idx: no such file"):
        IndexedReader(tmp_path / "d")


def test_failed_write_leaves_nothing_and_keeps_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "d", DOCUMENTS)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(DatasetError, match="outside"):
        write(tmp_path / "d", [[1, 2], [70_000]])
    with pytest.raises(DatasetError, match="no documents"), IndexedWriter(tmp_path / "d", "u2"):
        pass
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_empty_document_and_wrong_lengths_are_refused(tmp_path: Path) -> None:
    for tokens, lengths in ([[], [0]], [[1, 2], [2, 0]], [[1, 2], [1]], [[1.5], [1]]):
        with pytest.raises(DatasetError), IndexedWriter(tmp_path / "d", np.uint16) as writer:
            writer.add_many(np.array(tokens), np.array(lengths))
    with pytest.raises(DatasetError, match="float32 is not one"):
        IndexedWriter(tmp_path / "d", np.float32)


def with_manifest(prefix: Path) -> Manifest:
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add(np.array(document))
    counts = np.array([len(d) * 3 for d in DOCUMENTS])
    np.save(f"{prefix}.bytes.npy", counts)
    manifest = Manifest(
        documents=len(DOCUMENTS),
        tokens=writer.tokens,
        text_bytes=int(counts.sum()),
        dtype="uint16",
        append_eos=True,
        tokenizer={"name": "t", "sha256": "0", "vocab_size": 300},
        files=writer.files,
        sources=[],
        split={"name": "train"},
    )
    manifest.save(prefix)
    return manifest


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    manifest = with_manifest(tmp_path / "d")
    assert indexed.verify(tmp_path / "d") == manifest == IndexedReader(tmp_path / "d").manifest
    for suffix in (".bin", ".idx"):
        path = tmp_path / f"d{suffix}"
        good = path.read_bytes()
        path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
        with pytest.raises(DatasetError, match="differ from the manifest"):
            indexed.verify(tmp_path / "d")
        path.write_bytes(good)
    np.save(tmp_path / "d.bytes.npy", np.zeros(len(DOCUMENTS), np.int64))
    with pytest.raises(DatasetError, match="not the manifest's"):
        indexed.verify(tmp_path / "d")


def test_replaced_pair_under_an_old_manifest_is_found_on_opening(tmp_path: Path) -> None:
    manifest = with_manifest(tmp_path / "d")
    write(tmp_path / "d", DOCUMENTS[:-1])
    with pytest.raises(DatasetError, match="was replaced or damaged"):
        IndexedReader(tmp_path / "d")
    with_manifest(tmp_path / "e")
    assert Manifest.load(tmp_path / "e").fingerprint == manifest.fingerprint


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 9}', '{"format": 1, "x": 2}', "\xff"]
)
def test_unreadable_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    write(tmp_path / "d", DOCUMENTS)
    (tmp_path / "d.manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(DatasetError, match=r"manifest\.json"):
        IndexedReader(tmp_path / "d")
