"""convert.py as a person uses it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data_tools.tokenizers import train_tokenizer
from launch import convert, pretrain
from models.transformer import Transformer
from pretrain import export, export_weights
from tests.cli.workspace import Workspace, prepared, signals_restored
from tests.trained import LENGTH, save_run, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native and a custom run, and the first exported; nobody changes them."""
    folder = tmp_path_factory.mktemp("made")
    save_run(folder / "run", tiny_config(), steps=(3, 20), tokenizer=True)
    save_run(folder / "post", tiny_config(block="post", norm="layer"))
    assert convert.main(["to-hf", str(folder / "run"), str(folder / "model"), "--no-verify"]) == 0
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_to_hf_prints_what_it_made(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main(["to-hf", str(made / "run"), str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'out'}: llama model, 21 tensors, 0.1 MB in 1 file(s)"
    assert lines[1].startswith("verified: transformers ")
    assert "largest difference 0.0e+00" in lines[1] and len(lines) == 2
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = content(tmp_path / "out" / "config.json")
    assert config["vocab_size"] == 301 and config["max_position_embeddings"] == LENGTH
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        None, 0, None,
    )  # fmt: skip
    assert content(tmp_path / "out" / "generation_config.json")["pad_token_id"] == 0
    words = content(tmp_path / "out" / "tokenizer_config.json")
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert words["model_max_length"] == LENGTH
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape == (301, 32)


def test_a_custom_folder_holds_exactly_the_code_it_needs(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main(["to-hf", str(made / "post"), str(tmp_path / "out"), "--no-verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "note: no native class is exact: block=post (llama has pre or lns); "
    )
    assert lines[1].endswith("AutoModelForCausalLM loads it with trust_remote_code=True")
    assert lines[2].startswith("note: no tokenizer was found")
    assert lines[-1] == "not verified"
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    assert {"modeling_midspan.py", "configuration_midspan.py", "transformer.py"} <= code
    assert code.isdisjoint({"__init__.py", "flops.py", "initialize.py"})
    for name in code:
        text = (ROOT / "models" / name).read_text()
        copy = (tmp_path / "out" / name).read_text()
        if name in ("modeling_midspan.py", "configuration_midspan.py"):
            assert copy.startswith(text + "\n\n# For loaders") and "\nif False:\n" in copy
        else:
            assert copy == text
    assert content(tmp_path / "out" / "config.json")["auto_map"]["AutoModelForCausalLM"]
    # each file is needed: without it, the import of the whole fails
    needed = {
        m
        for name in code
        for m in export._RELATIVE_IMPORT.findall((tmp_path / "out" / name).read_text())
    }
    assert {f"{module}.py" for module in needed} | {"modeling_midspan.py"} == code


def test_the_step_is_chosen(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config()
    newer = tiny_model(config, seed=2)
    save_run(run, config, newer, steps=(3, 20))
    save_run(tmp_path / "older", config, tiny_model(config, seed=1), steps=(3,))
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    (tmp_path / "older" / "checkpoints" / "step_00000003").rename(
        run / "checkpoints" / "step_00000003"
    )
    for extra, source in [
        (["--step", "3"], run),
        ([], run / "checkpoints" / "step_00000003"),
    ]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert (
            convert.main(["to-hf", str(source), str(tmp_path / "out"), "--no-verify", *extra]) == 0
        )
        assert same_embedding(tmp_path / "out", tiny_model(config, seed=1))
    for source in (run, run / "checkpoints"):
        shutil.rmtree(tmp_path / "out")
        assert convert.main(["to-hf", str(source), str(tmp_path / "out"), "--no-verify"]) == 0
        assert same_embedding(tmp_path / "out", newer)


def same_embedding(folder: Path, model: Transformer) -> bool:
    assert model.embedding is not None
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    return torch.equal(stored, model.embedding.weight[:301])


def test_from_hf_prints_how_to_go_on(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["from-hf", str(made / "model"), str(tmp_path / "start"), "--vocab-multiple", "64"]
    assert convert.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "21 tensors as step 0" in lines[0] and "checkpoint.init_from=" in lines[0]
    assert lines[1].startswith("verified: ")
    assert names(tmp_path) == ["start"]
    assert names(tmp_path / "start") == [
        "checkpoints",
        "model.yaml",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "vocab_multiple: 64" in (tmp_path / "start" / "model.yaml").read_text()
    assert convert.main(["to-hf", str(tmp_path / "start"), str(tmp_path / "again")]) == 0
    first, second = (
        load_file(d / "model.safetensors") for d in (made / "model", tmp_path / "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_force_replaces_a_model_and_nothing_else(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["to-hf", str(made / "post"), str(out), "--no-verify"]
    shutil.copytree(made / "model", out)
    assert convert.main(arguments) == 2
    assert content(out / "config.json")["model_type"] == "llama"
    assert convert.main([*arguments, "--force"]) == 0
    assert content(out / "config.json")["model_type"] == "midspan"
    assert not (out / "tokenizer.json").exists()
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("important")
    assert convert.main([*arguments, "--force"]) == 2
    assert names(out) == ["thesis.txt"]
    (out / "thesis.txt").unlink()
    assert convert.main(arguments) == 0  # an empty folder is free
    assert names(tmp_path) == ["out"]


def test_a_failed_replacement_keeps_the_old_model(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made / "model", out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "out" and target == out:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    arguments = ["to-hf", made / "post", out, "--no-verify", "--force"]
    refuse(arguments, capsys, tmp_path, "Input/output error")
    assert content(out / "config.json")["model_type"] == "llama"


# ---------------------------------------------------------------------------- wrong inputs


def refuse(
    arguments: list[Any], capsys: pytest.CaptureFixture[str], watched: Path, *expected: str
) -> None:
    """One error line with every expected part, exit code 2, and nothing new in ``watched``."""
    before = names(watched)
    code = convert.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1, captured.err
    for part in expected:
        assert part in captured.err, captured.err
    assert names(watched) == before


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["to-hf", "{made}/absent", "{out}"], ["absent: no such folder"]),
        (["to-hf", "{made}", "{out}"], ["complete checkpoint"]),
        (["to-hf", "{made}/run", "{out}", "--step", "4"], ["no complete step 4", "3, 20"]),
        (["to-hf", "{made}/run", "{out}", "--target", "lama"], ["'lama'", "did you mean 'llama'"]),
        (["to-hf", "{made}/run", "{out}", "--target", "qwen3"], ["qk_norm=False (qwen3: always)"]),
        (["to-hf", "{made}/post", "{out}", "--target", "llama"], ["block=post", "norm=layer"]),
        (["to-hf", "{made}/run", "{out}", "--dtype", "bf16"], ["'bf16'", "bfloat16"]),
        (["to-hf", "{made}/run", "{out}", "--max-shard-size", "5GiB"], ["'5GiB'"]),
        (["to-hf", "{made}/run", "{out}", "--max-shard-size", "0"], ["'0'", "positive"]),
        (["to-hf", "{made}/run", "{out}", "--max-shard-size=-5MB"], ["'-5MB'"]),
        (["to-hf", "{made}/run", "{made}/model"], ["model exists", "--force"]),
        (["to-hf", "{made}/run", "{out}", "--tokenizer", "{made}/post"], ["no such tokenizer"]),
        (["to-hf", "{made}/run", "{out}", "--drop-mtp"], ["has no multi-token prediction"]),
        (["to-hf", "{made}/run"], ["required: OUT"]),
        (["to-hf", "{made}/run", "{out}", "--shards", "3"], ["unrecognized arguments"]),
        (["to-hfx", "a", "b"], ["invalid choice"]),
        (["from-hf", "{made}/run", "{out}"], ["not a Hugging Face folder"]),
        (["from-hf", "{made}/absent", "{out}"], ["no such folder"]),
        (["from-hf", "{made}/model", "{out}", "--dtype", "int8"], ["'int8'"]),
        (["from-hf", "{made}/model", "{out}", "--vocab-multiple", "0"], ["vocab_multiple"]),
        (["from-hf", "{made}/model", "{made}/run"], ["run exists"]),
    ],
)  # fmt: skip
def test_wrong_arguments(
    arguments: list[str],
    expected: list[str],
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [text.format(made=made, out=tmp_path / "out") for text in arguments]
    refuse(filled, capsys, tmp_path, *expected)
    assert names(made) == ["model", "post", "run"]


def test_another_models_tokenizer(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(
        ["the of and to in a is that"] * 9, 320, ("<eos>", *map("<{}>".format, range(60)))
    ).save(tmp_path / "words")
    arguments = ["to-hf", made / "run", tmp_path / "out", "--tokenizer", tmp_path / "words"]
    refuse(arguments, capsys, tmp_path, "another model's tokenizer", "301")


def test_a_damaged_checkpoint(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    data = next((tmp_path / "run" / "checkpoints" / "step_00000020").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    refuse(["to-hf", tmp_path / "run", tmp_path / "out"], capsys, tmp_path, "wrong checksum")


def test_a_checkpoint_that_does_not_fit_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", tiny_config(layers=3), tiny_model(tiny_config()))
    refuse(
        ["to-hf", tmp_path / "run", tmp_path / "out"], capsys, tmp_path, "missing (9): blocks.2."
    )
    save_run(tmp_path / "wide", tiny_config(vocab_size=200), tiny_model(tiny_config()))
    refuse(
        ["to-hf", tmp_path / "wide", tmp_path / "out"], capsys, tmp_path, "[384, 32], not [256, 32]"
    )


def test_a_full_disk(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_weights, "save_file", full)
    refuse(["to-hf", made / "run", tmp_path / "out"], capsys, tmp_path, "No space left on device")


def test_without_transformers(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command, source in (("to-hf", "run"), ("from-hf", "model")):
        arguments = [command, made / source, tmp_path / "out"]
        refuse(arguments, capsys, tmp_path, "needs transformers", "--no-verify")
        assert convert.main([*map(str, arguments), "--no-verify"]) == 0
        shutil.rmtree(tmp_path / "out")


def change_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**content(path), **changes}))


WHOLE = "model.safetensors"
NORM = "model.layers.0.input_layernorm.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda f: change_weights(f, lambda t: t.pop(NORM)), "missing (1): blocks.0.atten"),
    "extra": (
        lambda f: change_weights(f, lambda t: t.update({"model.layers.0.bias": t[NORM].clone()})),
        "not in the model (1): model.layers.0.bias",
    ),
    "more layers": (lambda f: change_config(f, num_hidden_layers=1), "not in the model (9)"),
    "shape": (lambda f: change_config(f, intermediate_size=41), "has shape [32, 40], not [32, 41]"),
    "tied": (lambda f: change_config(f, tie_word_embeddings=True), "but they differ"),
    "no weights": (lambda f: (f / WHOLE).rename(f / "pytorch_model.bin"), "no model.safetensors"),
    "truncated": (
        lambda f: (f / WHOLE).write_bytes((f / WHOLE).read_bytes()[:999]),
        "cannot be read",
    ),
    "lost shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {NORM: "model-00001-of-00002.safetensors"}})
        ),
        "cannot be read",
    ),
    "not json": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "another kind": (lambda f: change_config(f, model_type="gpt2"), "'gpt2' is not supported"),
    "bias": (lambda f: change_config(f, attention_bias=True), "attention_bias=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder(
    case: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, expected = BROKEN[case]
    shutil.copytree(made / "model", tmp_path / "model")
    damage(tmp_path / "model")
    refuse(["from-hf", tmp_path / "model", tmp_path / "out"], capsys, tmp_path, expected)


def test_a_failed_verification_leaves_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export.write_configs

    def wrong_base(trained: Any, target: Any, shards: Any, words: Any, folder: Path) -> None:
        write(trained, target, shards, words, folder)
        rope = {"rope_type": "default", "rope_theta": 100.0}
        change_config(folder, rope_parameters=rope, rope_theta=100.0)

    monkeypatch.setattr(export, "write_configs", wrong_base)
    where = "the first output that differs is that of blocks.0.attention.o_proj"
    refuse(["to-hf", made / "run", tmp_path / "out"], capsys, tmp_path, where)


def test_a_real_process(made: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "launch" / "convert.py")]
    done = subprocess.run(
        [*script, "to-hf", str(made / "run"), "out", "--no-verify"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("out: llama model")
    assert names(tmp_path) == ["out"]


GOES_ON = {
    "Llama": ["model.position.type=adarope", "model.position.start.base=500000"],
    "Qwen3": ["objective=perturbed"],
    "Mixtral": [],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", GOES_ON)
def test_a_model_that_others_trained_goes_on_here(
    kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From transformers, through a run with other positions or another objective, and out again."""
    workspace = Workspace(tmp_path, prepared(tmp_path_factory))
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    transformers.AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path / "theirs")
    assert convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "start")]) == 0
    command = [str(workspace.recipe), str(tmp_path / "start" / "model.yaml"), "name=next"]
    command += [f"checkpoint.init_from={tmp_path / 'start'}", "training.steps=3", *GOES_ON[kind]]
    with signals_restored():
        assert pretrain.main(command) == 0
    run, out = workspace.folder.parent / "next", tmp_path / "out"
    assert convert.main(["to-hf", str(run), str(out)]) == 0
    wanted = "midspan" if kind == "Llama" else theirs.model_type
    assert content(out / "config.json")["model_type"] == wanted
