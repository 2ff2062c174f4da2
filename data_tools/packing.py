"""Whole documents packed into fixed-length samples, by an index written once, offline.

`PREFIX.packS.pieces.npy` lists stretches of the token stream, `PREFIX.packS.bins.npy` (int64
[samples + 1]) says which of them make up a sample, and `PREFIX.packS.json` ties both to the
dataset they were computed from.
"""

import bisect
import json
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.indexed import IndexedReader
from data_tools.manifest import (
    DatasetError,
    file_sha256,
    with_suffix,
    write_array,
    write_atomic,
)

PIECE = np.dtype([("start", "<i8"), ("length", "<i4")])


def write_packing(prefix: str | Path, sequence_length: int) -> dict[str, Any]:
    """Pack the documents of a dataset into samples of `sequence_length` + 1 tokens.

    Returns what `PREFIX.packS.json` says: samples, pieces, tokens, padding (tokens of filling).

    Raises:
        DatasetError: a bad dataset or sequence length, or no document of two tokens or more.
    """
    if not 1 <= sequence_length < np.iinfo(np.int32).max:
        raise DatasetError(f"sequence length {sequence_length} must be between 1 and 2^31 - 2")
    pieces = cut_documents(IndexedReader(prefix).document_offsets, sequence_length)
    if not len(pieces):
        raise DatasetError(f"{prefix}: no document has two tokens or more: nothing to pack")
    capacity = sequence_length + 1
    order, counts = fill_bins(pieces["length"], capacity)
    bins = np.concatenate([[0], np.cumsum(counts)])
    tokens = int(pieces["length"].sum(dtype=np.int64))
    write_array(packing_path(prefix, sequence_length, ".pieces.npy"), pieces[order])
    write_array(packing_path(prefix, sequence_length, ".bins.npy"), bins)
    description = {
        "sequence_length": sequence_length,
        "samples": len(counts),
        "pieces": len(pieces),
        "tokens": tokens,
        "padding": len(counts) * capacity - tokens,
        "idx_sha256": file_sha256(with_suffix(prefix, ".idx")),
    }
    # Last: an index without its description does not count.
    text = json.dumps(description, indent=2) + "\n"
    write_atomic(packing_path(prefix, sequence_length, ".json"), text.encode())
    return description


def packing_path(prefix: str | Path, sequence_length: int, suffix: str) -> Path:
    return with_suffix(prefix, f".pack{sequence_length}{suffix}")


def load_packing(reader: IndexedReader, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The mapped (pieces, bins) of a dataset.

    Raises:
        DatasetError: no such index, or one that was computed from other documents.
    """
    path = packing_path(reader.prefix, sequence_length, ".json")
    try:
        description = json.loads(path.read_bytes())
        arrays = [
            np.load(packing_path(reader.prefix, sequence_length, suffix), mmap_mode="r")
            for suffix in (".pieces.npy", ".bins.npy")
        ]
        known = description["idx_sha256"]
    except FileNotFoundError as error:
        raise DatasetError(
            f"{error.filename}: no packing index for sequence length {sequence_length}; "
            f"make one with launch/prepare.py --pack {sequence_length}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path}: the packing index cannot be read: {error}") from None
    manifest = reader.manifest
    index = with_suffix(reader.prefix, ".idx")
    if known != (manifest.files[".idx"]["sha256"] if manifest else file_sha256(index)):
        raise DatasetError(f"{path}: computed from another version of {index.name}: pack it again")
    return arrays[0], arrays[1]


def cut_documents(offsets: np.ndarray, sequence_length: int) -> np.ndarray:
    """Pieces of at most sequence_length + 1 tokens that hold every label exactly once.

    Consecutive pieces of a long document share one token, which is a label in the first and an
    input in the second. A document of one token has no label and gives no piece.

    Args:
        offsets: first token of each document and the total, int64 [documents + 1].
    """
    lengths = np.diff(offsets)
    counts = -(-(lengths - 1) // sequence_length)
    owner = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * sequence_length
    pieces = np.empty(len(owner), PIECE)
    pieces["start"] = offsets[owner] + begin
    pieces["length"] = np.minimum(lengths[owner] - begin, sequence_length + 1)
    return pieces


def plan_bins(histogram: np.ndarray, capacity: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Best-fit decreasing on a histogram of lengths, so that its cost does not grow with the data.

    Args:
        histogram: how many pieces have each length, [capacity + 1].

    Returns:
        (number of bins, [(length, pieces of that length in each such bin), ...]) per kind of bin.
    """
    open_bins: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}  # by space that is left
    spaces: list[int] = []  # the keys of open_bins, sorted

    def put(space: int, bins: int, pattern: list[tuple[int, int]]) -> None:
        if space not in open_bins:
            open_bins[space] = []
            bisect.insort(spaces, space)
        open_bins[space].append((bins, pattern))

    for length in range(capacity, 0, -1):
        left = int(histogram[length])
        while left:
            at = bisect.bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                bins, pattern = open_bins[space].pop()
                if not open_bins[space]:
                    del open_bins[space], spaces[at]
            else:
                space, bins, pattern = capacity, left, []
            each = min(space // length, left)
            used = min(bins, left // each)
            left -= used * each
            put(space - each * length, used, [*pattern, (length, each)])
            if pattern and bins > used:
                put(space, bins - used, pattern)
    return [kind for space in spaces for kind in open_bins[space]]


def fill_bins(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces to bins of `capacity` tokens.

    Returns:
        (indices of the pieces, bin after bin; number of pieces in each bin), int64.
    """
    histogram = np.bincount(lengths, minlength=capacity + 1)
    by_length = np.argsort(lengths, kind="stable")
    taken = np.cumsum(histogram) - histogram  # next unused piece of each length in by_length
    order, counts = [], []
    for bins, pattern in plan_bins(histogram, capacity):
        columns = []
        for length, each in pattern:
            first = taken[length]
            taken[length] += bins * each
            columns.append(by_length[first : taken[length]].reshape(bins, each))
        filled = np.concatenate(columns, axis=1)
        order.append(filled.reshape(-1))
        counts.append(np.full(bins, filled.shape[1]))
    return np.concatenate(order), np.concatenate(counts)
