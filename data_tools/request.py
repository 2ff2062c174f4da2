"""What `launch/prepare.py` was asked for, and whether a folder already holds it."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from data_tools import tokenizers
from data_tools.corpus import ReadOptions, Source
from data_tools.indexed import IndexedReader, token_dtype
from data_tools.manifest import DatasetError, file_sha256, with_suffix
from data_tools.tokenizers import TextTokenizer

FORMAT = 1
SPLITS = ("train", "validation")


class PrepareError(ValueError):
    """A request that cannot be met; nothing was published."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be prepared: the same request on the same files gives the same bytes."""

    files: tuple[Path, ...]
    read: ReadOptions
    tokenizer: TextTokenizer | int  # loaded, or the size of the vocabulary to train
    append_eos: bool = True
    validation_fraction: float = 0.05
    seed: int = 0
    tokenizer_bytes: int = 512 << 20  # about how much text a new tokenizer is trained on

    def __post_init__(self) -> None:
        if not self.files:
            raise PrepareError("the corpus holds no files")
        if not 0 <= self.validation_fraction < 1:
            raise PrepareError(
                f"validation fraction {self.validation_fraction} must be at least 0 and below 1"
            )
        if self.seed < 0:
            raise PrepareError(f"seed {self.seed} must not be negative")
        if isinstance(self.tokenizer, int):
            tokenizers.check_vocabulary(self.tokenizer)
        else:
            token_dtype(self.tokenizer.vocab_size)
            if self.append_eos and self.tokenizer.eos_id is None:
                raise PrepareError(
                    f"tokenizer {self.tokenizer.name} names no end-of-text token: choose one with "
                    "--eos-token, or store documents without it (--no-append-eos)"
                )

    def identity(self) -> dict[str, Any]:
        """All that decides the output, except the contents of the files."""
        tokenizer: dict[str, Any]
        if isinstance(self.tokenizer, int):
            tokenizer = {"train": self.tokenizer, "bytes": self.tokenizer_bytes}
        else:
            tokenizer = {**self.tokenizer.describe(), "name": None}
        return {
            "files": [str(path.resolve()) for path in self.files],
            "read": dataclasses.asdict(self.read),
            "tokenizer": tokenizer,
            "append_eos": self.append_eos,
            "validation_fraction": self.validation_fraction,
            "seed": self.seed,
        }


@dataclasses.dataclass(frozen=True)
class Job:
    """A request together with what its files held (`prepare.json`)."""

    request: dict[str, Any]
    sources: list[Source]
    format: int = FORMAT

    def encode(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> "Job | None":
        """The job in a file, or None if there is none that this version wrote."""
        try:
            fields = json.loads(path.read_bytes())
            job = cls(fields["request"], [Source(**s) for s in fields["sources"]], fields["format"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return job if job.format == FORMAT else None

    def same_contents(self, other: "Job") -> bool:
        def contents(job: Job) -> list[tuple[str, str]]:
            return [(source.path, source.sha256) for source in job.sources]

        return self.request == other.request and contents(self) == contents(other)


def status(request: Request, out: Path) -> str:
    """`absent`, `current`, `changed` (its sources did), `other` (another request) or `foreign`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return "absent"
    job = Job.load(out / "prepare.json")
    if job is None:
        return "foreign"
    if job.request != request.identity():
        return "other"
    for source in job.sources:
        try:
            stat = os.stat(source.path)
        except FileNotFoundError:
            return "changed"
        if (stat.st_size, stat.st_mtime_ns) == (source.bytes, source.modified_ns):
            continue
        if stat.st_size != source.bytes or file_sha256(source.path) != source.sha256:
            return "changed"
    try:
        for split in SPLITS:
            if with_suffix(out / split, ".manifest.json").exists() or split == "train":
                IndexedReader(out / split)
    except DatasetError:
        return "changed"
    return "current"


def differences(request: Request, out: Path) -> str:
    """How the request that made `out` differs from this one, for people."""
    job = Job.load(out / "prepare.json")
    assert job is not None
    new = request.identity()
    return "; ".join(
        f"{key} was {_short(job.request.get(key))}, now {_short(new[key])}"
        for key in new
        if job.request.get(key) != new[key]
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else text[:150] + " ..."
