"""lm-evaluation-harness on an exported folder that carries its own code, with a task of ours."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.tokenizers import byte_tokenizer
from launch import harness
from models.likelihood import Scoring
from models.transformer import Transformer
from pretrain.export import export_hugging_face
from pretrain.lm_eval_adapter import TextScorer
from pretrain.trained import build_model, open_trained
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
QUESTIONS: list[dict[str, Any]] = [
    {"question": "the cat sat on the", "choices": ["mat", "hill", "?"], "answer": 0},
    {"question": "the dog ran", "choices": ["a", "b", "c"], "answer": 1},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""
CONTINUED = """
task: local_text_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["a"], max_gen_toks: 5}}
metric_list: [{{metric: exact_match}}]
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


def local_tasks(folder: Path) -> Path:
    tasks = folder / "tasks"
    tasks.mkdir()
    rows, questions = folder / "rows.jsonl", folder / "questions.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tasks / "text.yaml").write_text(TASK.format(rows=rows))
    (tasks / "choice.yaml").write_text(CHOICE.format(rows=questions))
    (tasks / "until.yaml").write_text(CONTINUED.format(rows=questions))
    return tasks


def best_choices(run: Path) -> float:
    """Accuracy on QUESTIONS by our own code."""
    trained = open_trained(run)
    scorer = TextScorer(trained, build_model(trained), byte_tokenizer(), Scoring())
    right = 0
    for question in QUESTIONS:
        pairs = [(str(question["question"]), f" {choice}") for choice in question["choices"]]
        scores = [nats for nats, _ in scorer.continuations(pairs)]
        right += scores.index(max(scores)) == question["answer"]
    return right / len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "masked", "uniform"])
def test_our_own_adapter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    require_harness()
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained = save_run(
        tmp_path / "run", tiny_config(mask_token=kind == "masked"), tokenizer=True,
        objective={"type": kind},
    )  # fmt: skip
    tasks = local_tasks(tmp_path)
    names = ["local_text", "local_choice", *(["local_text_until"] if kind == "causal" else [])]
    command = [str(tmp_path / "run"), "--tasks", ",".join(names), "--include-path", str(tasks)]
    assert harness.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == set(names)
    if kind == "causal":
        measured = found["local_text"]["bits_per_byte,none"]
        assert measured == pytest.approx(bits_per_byte(trained), rel=1e-5)
    assert found["local_choice"]["acc,none"] == best_choices(tmp_path / "run")
    assert harness.main([*command, "--limit", "1", "--draws", "2"]) == 0
    assert "local_choice" in capsys.readouterr().out


def test_an_environment_with_the_harness_does_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTRAS", "hf,dev,eval")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError):
        require_harness()
    monkeypatch.setenv("EXTRAS", "hf,dev")
    with pytest.raises(pytest.skip.Exception):
        require_harness()
