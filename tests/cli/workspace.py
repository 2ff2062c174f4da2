"""A folder with a tiny dataset and a recipe for it, and what a refused command must look like."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch import pretrain
from pretrain.trainer import StopRequest
from pretrain.yaml_text import dump_tree, merge
from tests.parity.tiny_run import tiny_config, tiny_dataset

Main = Callable[[list[str]], int]
_made: dict[str, Path] = {}


def prepared(factory: pytest.TempPathFactory) -> Path:
    """The tiny dataset, made once per session: train and validation, byte tokenizer."""
    if "data" not in _made:
        folder = factory.mktemp("tiny")
        tiny_dataset(folder / "data")
        _made["data"] = folder / "data"
    return _made["data"]


class Workspace:
    """``root`` holds ``data`` (a copy, so that a test may damage it) and ``tiny.yaml``."""

    def __init__(self, root: Path, data: Path, steps: int = 4) -> None:
        self.root = root
        shutil.copytree(data, root / "data")
        self.tree: dict[str, Any] = tiny_config(root, steps, {})
        self.recipe = self.write("tiny.yaml", self.tree)
        self.folder = root / "runs" / "tiny"

    def write(self, name: str, tree: dict[str, Any]) -> Path:
        path = self.root / name
        path.write_text(dump_tree(tree))
        return path

    def change(self, **changes: Any) -> None:
        """Rewrite the recipe with these sections laid over it."""
        self.tree = merge(self.tree, changes)
        self.write("tiny.yaml", self.tree)

    def train(self, *overrides: str) -> None:
        with signals_restored():
            assert pretrain.main([str(self.recipe), *overrides]) == 0


@contextmanager
def signals_restored() -> Iterator[None]:
    """A run in this process takes over signals; give them back to the test runner."""
    before = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listing(root: Path) -> dict[str, bytes | None]:
    """Every file with its content and every folder, except who holds a lock and logs."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if path.name not in ("lock", ".lock") and path.parent.name != "logs"
    }


def refused(
    capsys: pytest.CaptureFixture[str],
    root: Path,
    command: Sequence[object],
    words: Sequence[str],
    main: Main = pretrain.main,
) -> str:
    """Run a command that must fail with one clear error and leave ``root`` as it is."""
    before = listing(root)
    capsys.readouterr()
    with signals_restored():
        code = main([str(argument) for argument in command])
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("error:") == 1
    assert "Traceback" not in printed.err
    missing = [word for word in words if word not in printed.err]
    assert not missing, f"{missing} not in: {printed.err}"
    assert listing(root) == before
    return printed.err
