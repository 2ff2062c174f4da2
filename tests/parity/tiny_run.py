"""A dataset and a run that are as small as they can be: whole runs take about a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from data_tools.corpus import ReadOptions
from data_tools.dataset import prepare
from data_tools.request import Request
from data_tools.tokenizers import byte_tokenizer

WORDS = "a the cat dog sat ran on under mat hill and then it was not here but there".split()


def tiny_dataset(folder: Path) -> None:
    """Byte-tokenised nonsense in ``folder``: train and validation, about 100 KB."""
    chance = random.Random(0)
    text = folder.parent / "text"
    text.mkdir(exist_ok=True)
    for number in range(40):
        words = " ".join(chance.choice(WORDS) for _ in range(600))
        (text / f"{number}.txt").write_text(words)
    files = tuple(sorted(text.iterdir()))
    request = Request(files, ReadOptions(), byte_tokenizer(), validation_fraction=0.2)
    prepare(request, folder, workers=1, say=lambda line: None)


def tiny_config(root: Path, steps: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """A config tree for a run below ``root/runs`` on ``root/data``; saves every second step."""
    return {
        "name": "tiny",
        "runs_folder": str(root / "runs"),
        "device": "cpu",
        "model": {
            "vocab_size": 257,
            "hidden": 32,
            "layers": 2,
            "attention": {"heads": 2, "kv_heads": 2, "head_dim": 16},
            "feedforward": {"type": "swiglu", "hidden": 48},
        },
        "data": {
            "train": [{"path": str(root / "data" / "train"), "max_epochs": 100}],
            "validation": [{"path": str(root / "data" / "validation")}],
        },
        "training": {
            "sequence_length": 32,
            "batch_tokens": 256,
            "micro_batch": 2,
            "steps": steps,
            "clip_norm": 0.5,
        },
        "schedule": {"warmup_steps": min(5, steps // 2)},
        "parallel": parallel,
        "evaluation": {"every": 0, "sequences": 8},
        "checkpoint": {"every": 2},
        "metrics": {"every": 10, "trackers": []},
        "finish": {"export": "none", "report": False},
    }
