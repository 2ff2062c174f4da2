"""lm-evaluation-harness on an exported folder that carries its own code, with a task of ours."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_tools.tokenizers import byte_tokenizer
from models.transformer import Transformer
from pretrain.export import export_hugging_face
from tests.trained import LENGTH, save_run, tiny_config

TEXTS = ["It is a truth", "universally acknowledged, that a single man", "é: two bytes"]
TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1}}
"""
LEARNED = {
    "norm": "bhyt",
    "position": "adarope",
    "feedforward": {
        "type": "moe",
        "experts": 4,
        "hidden": 24,
        "router": {"type": "lapsum", "learned": True},
    },
}


def require_harness() -> None:
    """Skip where it is not installed, unless this environment was made with it."""
    if "eval" in os.environ.get("EXTRAS", "").split(","):
        importlib.import_module("lm_eval")
    pytest.importorskip("lm_eval", reason="needs the eval extra")


def bits_per_byte(model: Transformer) -> float:
    """Of TEXTS, each behind an end-of-text token, by our own code."""
    words, bits, length = byte_tokenizer(), 0.0, 0
    assert words.eos_id is not None
    for text in TEXTS:
        ids = torch.tensor([words.eos_id, *words.encode(text)])
        assert len(ids) <= LENGTH
        with torch.no_grad():
            chances = model.logits(ids[None, :-1])[0].double().log_softmax(-1)
        bits -= chances.gather(1, ids[1:, None]).sum().item() / math.log(2)
        length += len(text.encode())
    return bits / length


@pytest.mark.slow
def test_the_harness_measures_what_we_measure(tmp_path: Path) -> None:
    require_harness()
    trained = save_run(tmp_path / "run", tiny_config(**LEARNED), tokenizer=True)
    done = export_hugging_face(tmp_path / "run", tmp_path / "model", check=False)
    assert done.target == "custom"
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tasks.mkdir()
    (tasks / "local.yaml").write_text(TASK.format(rows=rows))
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    command = """-m lm_eval run --model hf --model_args pretrained=model,dtype=float32
    --trust_remote_code --include_path tasks --tasks local_text --device cpu --batch_size 2
    --output_path out""".split()
    ran = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    (result,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(result.read_text())["results"]["local_text"]["bits_per_byte,none"]
    assert found == pytest.approx(bits_per_byte(trained), rel=1e-5)


def test_an_environment_with_the_harness_does_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTRAS", "hf,dev,eval")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError):
        require_harness()
    monkeypatch.setenv("EXTRAS", "hf,dev")
    with pytest.raises(pytest.skip.Exception):
        require_harness()
