"""Python that can use transformers but neither this checkout nor the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PRELUDE = """
import importlib.abc, json, socket, sys

OURS = ("models", "parallel", "pretrain", "data_tools", "launch", "tests")

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OURS:
            raise ImportError("the checkout must not be needed: " + name)

def no_network(*arguments):
    raise OSError("the network must not be needed")

sys.meta_path.insert(0, Refuse())
socket.socket.connect = no_network
"""


def run_clean(code: str, folder: Path, *arguments: str | Path) -> None:
    """Run ``code`` in a process of its own, in ``folder``; AssertionError shows what went wrong."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_TOKEN")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + code, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
