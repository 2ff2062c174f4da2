"""The manifest beside a tokenised dataset, and files that appear whole or not at all."""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

MANIFEST_FORMAT = 1


class DatasetError(ValueError):
    """A dataset on disk that is damaged, incomplete or not what was asked for."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a `.bin`/`.idx` pair holds and where it came from (`PREFIX.manifest.json`)."""

    documents: int
    tokens: int
    text_bytes: int  # UTF-8 bytes of all documents before tokenisation
    dtype: str
    append_eos: bool
    tokenizer: dict[str, Any]  # name, sha256, vocab_size, eos_id
    files: dict[str, dict[str, Any]]  # suffix -> bytes, sha256
    sources: list[dict[str, Any]]  # path, bytes, sha256
    split: dict[str, Any]  # name, fraction, seed
    reference_bits_per_byte: dict[str, float] | None = None
    format: int = MANIFEST_FORMAT

    @property
    def fingerprint(self) -> str:
        """One hash of the token stream and its document boundaries."""
        parts = self.files[".bin"]["sha256"] + self.files[".idx"]["sha256"]
        return hashlib.sha256(parts.encode()).hexdigest()

    def save(self, prefix: str | Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomic(with_suffix(prefix, ".manifest.json"), text.encode())

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        """Raises: DatasetError if there is no manifest or it is not one that we can read."""
        path = with_suffix(prefix, ".manifest.json")
        try:
            fields = json.loads(path.read_bytes())
            if fields["format"] != MANIFEST_FORMAT:
                raise DatasetError(f"{path}: format {fields['format']}, expected {MANIFEST_FORMAT}")
            manifest = cls(**fields)
            _ = manifest.fingerprint, [manifest.files[s]["bytes"] for s in (".bin", ".idx")]
            _ = [manifest.tokenizer[key] for key in ("name", "sha256", "vocab_size")]
            return manifest
        except FileNotFoundError:
            raise DatasetError(f"{path}: no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise DatasetError(f"{path}: not a dataset manifest: {error}") from None


def text_bytes(prefix: str | Path) -> np.ndarray:
    """UTF-8 bytes of each document's original text, int64 [documents], memory mapped."""
    path = with_suffix(prefix, ".bytes.npy")
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None


def with_suffix(prefix: str | Path, suffix: str) -> Path:
    """`PREFIX` + suffix; unlike Path.with_suffix a dot in the prefix survives."""
    return Path(f"{prefix}{suffix}")


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees all of it or none."""
    temporary = with_suffix(path, ".partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class HashingFile:
    """A new file under a temporary name, hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, with_suffix(path, ".partial")
        self.bytes = 0
        self.hash = hashlib.sha256()
        self.file: BinaryIO = open(self.temporary, "wb")  # noqa: SIM115 - closed by publish/discard

    def write(self, array: np.ndarray | bytes) -> None:
        data = array if isinstance(array, bytes) else np.ascontiguousarray(array).data.cast("B")
        self.file.write(data)
        self.hash.update(data)
        self.bytes += len(data)

    def publish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        return {"bytes": self.bytes, "sha256": self.hash.hexdigest()}

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def write_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Write a `.npy` file atomically; returns its size and hash as a manifest lists them."""
    file = HashingFile(path)
    try:
        np.save(file, array)  # it needs write() alone
        return file.publish()
    except BaseException:
        file.discard()
        raise
