"""Golden loss curves: what four tiny runs cost, step by step.

``python -m tests.golden.curves`` writes them again; do so only for a change that is meant to
change numerics, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from pretrain.config import RunConfig
from pretrain.decode import decode
from pretrain.run import run
from pretrain.run_folder import read_metrics
from pretrain.yaml_text import merge
from tests.parity.tiny_run import tiny_config, tiny_dataset

STORE = Path(__file__).parent / "curves.json"
STEPS = 20
RECIPES: dict[str, dict[str, Any]] = {
    "pre-rms-rope": {},
    "post-layer-partial-gelu": {
        "model": {
            "block": "post",
            "norm": "layer",
            "position": {"type": "partial", "fraction": 0.5},
            "feedforward": {"type": "gelu", "hidden": 64},
            "tie_embeddings": True,
        },
        "schedule": {"kind": "wsd"},
    },
    "documents-yarn-qknorm-softcap": {
        "model": {
            "position": {"type": "yarn", "factor": 2.0, "original_length": 16},
            "attention": {"qk_norm": True, "qkv_bias": True, "kv_heads": 1},
            "logit_softcap": 20.0,
        },
        "objective": {"type": "causal", "documents": "mask", "z_loss": 1e-3},
        "training": {"micro_batch": 4},
    },
    "mtp-own-norm-documents": {
        "model": {"mtp": {"depth": 2, "embedding": "own", "input": "norm"}},
        "objective": {"documents": "mask", "mtp_normalize": "main_valid"},
    },
}


def curve(name: str, root: Path, threads: int) -> list[float]:
    """Training loss of every step and the final validation loss, in nats per token."""
    tree = merge(tiny_config(root, STEPS, {}), RECIPES[name])
    tree |= {"name": f"{name}-{threads}", "precision": {"weights": "float64", "compute": "float64"}}
    tree["metrics"] = {"every": 1, "trackers": []}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert run(decode(RunConfig, tree), ["golden"]) == 0
    finally:
        torch.set_num_threads(before)
    rows = read_metrics(root / "runs" / tree["name"] / "metrics.jsonl")
    return [row["loss/train"] for row in rows] + [rows[-1]["eval/loss"]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tiny_dataset(root / "data")
        curves = {name: curve(name, root, 1) for name in RECIPES}
    STORE.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()
