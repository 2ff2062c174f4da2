"""From a run of masked diffusion to a folder that transformers loads, and back: the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from launch import convert, generate
from tests.cli.workspace import Workspace, prepared, refused


def test_a_run_ends_with_a_folder_and_a_sample(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(tmp_path, prepared(tmp_path_factory))
    workspace.change(
        objective="masked", model={"vocab_size": 258, "mask_token": True},
        finish={"export": "auto", "sample_tokens": 8, "prompt": "a cat"},
    )  # fmt: skip
    workspace.train()
    printed = capsys.readouterr().out
    assert "exported as custom: verified" in printed and "objective=masked" in printed
    folder, text = workspace.folder / "huggingface", (workspace.folder / "sample.txt").read_text()
    assert text.startswith("a cat") and "<|mask|>" not in text
    content = json.loads((folder / "config.json").read_text())
    assert content["architectures"] == ["MidspanForDiffusion"] and not content["is_causal"]
    assert (content["mask_token_id"], content["use_cache"]) == (257, False)
    assert content["objective"]["type"] == "masked"

    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    words = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert (words.mask_token_id, len(words)) == (257, 258)
    prompt = torch.tensor([words("a cat")["input_ids"]])
    ids = model.generate(prompt, max_new_tokens=8, seed=3)[0, prompt.shape[1] :].tolist()
    ids = ids[: ids.index(words.eos_token_id)] if words.eos_token_id in ids else ids

    def sampled(source: Path) -> str:
        capsys.readouterr()
        command = [str(source), "--prompt", "a cat", "--tokens", "8", "--seed", "3"]
        assert generate.main(command) == 0
        return capsys.readouterr().out

    assert sampled(folder) == sampled(workspace.folder) == f"a cat{words.decode(ids)}\n"

    back = tmp_path / "back"
    assert convert.main(["from-hf", str(folder), str(back)]) == 0
    assert sampled(back) == sampled(folder)
    assert "type: masked" in (back / "model.yaml").read_text()
    assert convert.main(["to-hf", str(back), str(tmp_path / "again")]) == 0
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file
    # it starts the next run, with the objective that it was trained for
    (tmp_path / "runs").rename(tmp_path / "before")
    workspace.recipe.write_text(workspace.recipe.read_text().replace("objective: masked\n", ""))
    workspace.train(str(back / "model.yaml"), f"checkpoint.init_from={back}")
    assert "type: masked" in (workspace.folder / "config.yaml").read_text()

    command = ["to-hf", back, tmp_path / "llama", "--target", "llama"]
    words_of_error = ["llama cannot represent", "objective=masked", "mask_token=true", "custom"]
    refused(capsys, tmp_path, command, words_of_error, convert.main)
