"""What an exported config.json says for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.export import export_hugging_face
from tests.trained import save_run, tiny_config

MOE = {"type": "moe", "experts": 4, "hidden": 16, "first_dense": 1, "dense_hidden": 24}


def row(step: int, *active: float, **more: Any) -> str:
    names = (f"experts/{layer}/active" for layer in (1, 2))
    return json.dumps({"step": step, **dict(zip(names, active)), **more}) + "\n"


def config_of(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    export_hugging_face(run, out, check=False, **options)
    found: dict[str, Any] = json.loads((out / "config.json").read_text())
    return found


def test_active_experts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """As they were logged last until its step, in attempts that count."""
    router = {"type": "lapsum", "learned": True}
    config = tiny_config(layers=3, feedforward={**MOE, "router": router})
    run = tmp_path / "run"
    save_run(run, config, steps=(3, 5))
    assert "experts_active" not in config_of(run, tmp_path / "unlogged")
    log = row(1, 3.0, 3.0) + row(2, 1.23456, 2.5) + row(4, 9.0, 9.0)
    log += row(4, 1.75, 2.0, resumed_from=3) + row(5) + row(6, 8.0, 8.0)
    (run / "metrics.jsonl").write_text(log)
    found = config_of(run, tmp_path / "last")
    assert found["experts_active"] == [1.75, 2.0]
    assert len(found["expert_budget"]) == 2
    assert config_of(run, tmp_path / "before", step=3)["experts_active"] == [1.2346, 2.5]
    (run / "metrics.jsonl").write_text("not a log")
    assert "experts_active" not in config_of(run, tmp_path / "damaged")


def test_a_model_without_experts_says_nothing_of_them(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_config())
    (tmp_path / "run" / "metrics.jsonl").write_text(row(1, 2.0, 2.0))
    assert "experts_active" not in config_of(tmp_path / "run", tmp_path / "out")
