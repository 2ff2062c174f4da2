"""launch/compare.py: what differs between two runs, and the proof that nothing else does."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.compare import main
from pretrain.config import RunConfig
from pretrain.decode import decode, dump_yaml
from pretrain.metrics import MetricLogger, MetricsConfig
from pretrain.run_folder import RunFolder, write_json
from pretrain.yaml_text import merge

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "name": "a",
    "seed": 1,
    "model": {"norm": {"type": "rms", "eps": 1e-6}, "layers": 4},
    "data": {"path": "data/austen", "tokenizer": "bpe-8k"},
    "parallel": {"tp": 1, "pp": 1},
    "metrics": {"every": 10},
}
ENVIRONMENT: dict[str, Any] = {
    "source_hash": "c0de",
    "python": "3.11.9",
    "packages": {"torch": "2.13.0", "matplotlib": "3.11"},
    "git": {"commit": "abc", "dirty": False},
    "hosts": ["node1"],
}
PRINTS = {"init_hash": "aaaa", "data_hash": "dddd", "parameters": 1000, "tokenizer_hash": "7777"}


def make_run(
    path: Path,
    config: dict[str, Any] | None = None,
    *,
    prints: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    offset: float = 0.0,
    steps: int = 30,
    loss_is_bound: bool = False,
) -> str:
    run = RunFolder(path)
    run.create()
    run.config.write_text(dump_yaml(merge(CONFIG, config or {})))
    write_json(run.fingerprints, {**PRINTS, **(prints or {})})
    write_json(run.environment, merge(ENVIRONMENT, environment or {}))
    log = MetricLogger(
        run,
        MetricsConfig(every=1, trackers=()),
        is_main_rank=True,
        total_steps=steps,
        loss_is_bound=loss_is_bound,
        stream=io.StringIO(),
    )
    for step in range(10, steps + 1, 10):
        log.log_step(step, {"loss/train": 3 + 1 / step + offset * step})
    log.log_evaluation(steps, {"eval/loss": 3.5 + offset, "eval/bits_per_byte": 1.25 + offset})
    log.close()
    run.write_status("finished")
    return str(path)


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, printed.out


def test_equal_runs(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", {"name": "b", "metrics": {"every": 5}})
    code, out = compare(capsys, a, b)
    assert code == 0
    assert out.endswith("\nno difference that can change training\n")
    assert "bitwise equal at all 3 common logged steps" in out
    equal = "data_hash, init_hash, parameters, tokenizer_hash, code (source_hash)"
    assert f"Equal: {equal}, python 3.11.9, torch 2.13.0\n" in out
    assert "metrics.every" in out


def test_one_factor_with_its_consequences(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(
        tmp_path / "b",
        {"name": "b", "model": {"norm": {"type": "dyt", "alpha": 0.5}}},
        prints={"init_hash": "bbbb", "parameters": 1001},
        environment={"hosts": ["node2"], "git": {"commit": "def"}},
        offset=0.01,
    )
    code, out = compare(capsys, a, b)
    assert code == 0
    assert out.endswith("\none factor: model.norm\n")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["model.norm.type"].split() == ["model.norm.type", "rms", "dyt"]
    assert lines["model.norm.eps"].split() == ["model.norm.eps", "1e-06", "-"]
    assert lines["init_hash"].split() == [
        "init_hash",
        "aaaa",
        "bbbb",
        "follows",
        "from",
        "model.norm",
    ]
    assert "where and how it ran" in lines["environment.hosts"]
    assert lines["loss/train"].split()[2:] == ["30", "3.03333", "3.33333", "+0.3"]
    assert lines["eval/bits_per_byte"].split()[2:] == ["30", "1.25", "1.26", "+0.01"]
    assert "Largest gap of loss/train over 3 common logged steps: 0.3 (step 30)" in out
    assert compare(capsys, a, b, "--expect", "model.norm")[0] == 0
    assert compare(capsys, a, b, "--expect", "model")[0] == 0
    assert main([a, b, "--expect", "model.nrom"]) == 2
    error = (
        "error: --expect model.nrom: neither side has such a setting; did you mean 'model.norm'?"
    )
    assert capsys.readouterr() == ("", f"{error}\n")
    code, out = compare(capsys, a, b, "--expect", "model.layers")
    assert code == 1
    assert "beyond model.layers, these differ: model.norm.type" in out


@pytest.mark.parametrize(
    "change, factor",
    [
        ({"config": {"parallel": {"tp": 2}}}, "parallel.tp"),
        ({"config": {"seed": 2}}, "seed"),
        ({"prints": {"init_hash": "bbbb"}}, "init_hash"),
        ({"prints": {"data_hash": "eeee"}}, "data_hash"),
        ({"prints": {"tokenizer_hash": "8888"}}, "tokenizer_hash"),
        ({"environment": {"source_hash": "beef"}}, "environment.source_hash"),
        ({"environment": {"packages": {"torch": "2.14"}}}, "environment.packages.torch"),
        ({"environment": {"python": "3.12"}}, "environment.python"),
    ],
)
def test_anything_else_is_another_factor(tmp_path, capsys, change, factor) -> None:
    a = make_run(tmp_path / "a")
    alone = make_run(tmp_path / "alone", **change)
    code, out = compare(capsys, a, alone)
    assert (code, out.splitlines()[-1]) == (0, f"one factor: {factor}")
    change["config"] = merge(change.get("config", {}), {"optimizer": {"lr": 0.1}})
    both = make_run(tmp_path / "both", **change)
    code, out = compare(capsys, a, both)
    assert code == 1
    assert out.splitlines()[-1].startswith("2 factors: ") and factor in out.splitlines()[-1]
    assert compare(capsys, a, both, "--expect", "optimizer.lr")[0] == 1
    assert compare(capsys, a, both, "--expect", "optimizer.lr", "--expect", factor)[0] == 0


def test_a_hash_that_the_factor_cannot_explain_is_found(tmp_path, capsys) -> None:
    """Layout and schedule cannot change weights, nor can the norm change the data."""
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", {"parallel": {"tp": 2}}, prints={"init_hash": "bbbb"})
    assert compare(capsys, a, b, "--expect", "parallel")[0] == 1
    c = make_run(tmp_path / "c", {"model": {"norm": "dyt"}}, prints={"data_hash": "eeee"})
    code, out = compare(capsys, a, c, "--expect", "model.norm")
    assert code == 1
    assert "beyond model.norm, these differ: data_hash" in out
    assert "follows from nothing above" in out


def test_what_cannot_compute_is_no_factor(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", environment={"packages": {"matplotlib": "3.8"}})
    code, out = compare(capsys, a, b)
    assert code == 0 and out.endswith("no difference that can change training\n")
    assert "environment.packages.matplotlib" in out


def test_other_tokenizers_compare_in_bits_per_byte_only(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(
        tmp_path / "b",
        {"data": {"tokenizer": "bytes"}},
        prints={"init_hash": "bbbb", "data_hash": "eeee", "tokenizer_hash": "8888"},
        offset=0.5,
    )
    code, out = compare(capsys, a, b)
    assert code == 0 and out.endswith("one factor: data.tokenizer\n")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for key in ("loss/train", "loss/ema", "eval/loss"):
        assert lines[key].endswith("tokenizers differ")
    assert lines["eval/bits_per_byte"].endswith("+0.5")
    assert "only bits per byte compare" in out


def test_a_run_of_before_tokenizers_were_recorded(tmp_path, capsys) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", {"seed": 2})
    old = RunFolder(tmp_path / "a").fingerprints
    content = json.loads(old.read_text())
    del content["tokenizer_hash"]
    write_json(old, content)
    code, out = compare(capsys, a, b)
    assert (code, out.splitlines()[-1]) == (0, "one factor: seed")
    assert "not recorded by an older version" in out
    assert "tokenizers differ" not in out
    # With both hashes, the place of a tokenizer does not tell.
    moved = make_run(tmp_path / "moved", {"data": {"tokenizer": "copy"}})
    assert "tokenizers differ" not in compare(capsys, b, moved)[1]


def test_runs_of_other_lengths_meet_at_their_last_common_step(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a", steps=50)
    b = make_run(tmp_path / "b", {"train": {"steps": 30}})
    out = compare(capsys, a, b)[1]
    line = next(line for line in out.splitlines() if "loss/train" in line)
    assert line.split()[2:] == ["30", "3.03333", "3.03333", "+0"]
    assert "(finished, step 50)" in out and "(finished, step 30)" in out


def test_bounds_are_called_bounds(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", {"objective": {"type": "masked"}}, loss_is_bound=True)
    out = compare(capsys, a, b)[1]
    assert f"Upper bounds, not values: the losses of {b}." in out
    assert a not in out[out.index("Upper bounds") :]
    assert json.loads(compare(capsys, a, b, "--json")[1])["bounds"] == [str(b)]


def test_json(tmp_path, capsys) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", {"model": {"norm": "dyt"}, "seed": 2}, offset=math.inf)
    code, out = compare(capsys, a, b, "--json")
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == report["exit_code"] == 1
    assert report["factors"] == ["seed", "model.norm"]
    first = report["differences"][0]
    assert first == {"path": "seed", "a": 1, "b": 2, "factor": "seed", "note": ""}
    figure = next(f for f in report["figures"] if f["key"] == "loss/train")
    assert (figure["b"], figure["difference"], figure["step"]) == ("Infinity", "Infinity", 30)


def test_configuration_files_compare_without_a_proof(tmp_path, capsys) -> None:
    """A recipe is resolved first: what it leaves out is no difference from a run's full record."""
    tree = {
        "model": {"vocab_size": 300, "layers": 4},
        "data": {"train": [{"path": "d"}]},
        "training": {"steps": 200},
    }
    run = make_run(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_text(dump_yaml(decode(RunConfig, tree)))
    recipe = tmp_path / "b.yaml"
    recipe.write_text(dump_yaml(merge(tree, {"model": {"layers": 8}, "name": "b"})))
    for first, second in ((run, str(recipe)), (str(recipe), run)):
        code, out = compare(capsys, first, second)
        assert code == 0
        assert "one factor: model.layers (configurations alone" in out
        assert "Figures" not in out and "Equal:" not in out


def broken_cases(tmp_path: Path) -> dict[str, tuple[str, list[str]]]:
    good = make_run(tmp_path / "good")
    unstarted = RunFolder(make_run(tmp_path / "unstarted"))
    unstarted.fingerprints.unlink()
    (tmp_path / "nothing").mkdir()
    damaged = RunFolder(make_run(tmp_path / "damaged"))
    damaged.metrics.write_text('{"step": 1}\nnonsense\n')
    half = RunFolder(make_run(tmp_path / "half"))
    half.environment.write_text("{")
    (tmp_path / "bad.yaml").write_text("model: [1\n")
    return {
        "misspelt": (str(tmp_path / "goood"), ["no such run folder", "did you mean 'good'"]),
        "elsewhere": (str(tmp_path / "x" / "y"), ["no such run folder"]),
        "unstarted": (str(unstarted.path), ["fingerprints.json", "has the run started?"]),
        "no config": (str(tmp_path / "nothing"), ["not a run folder", "config.yaml"]),
        "damaged": (str(damaged.path), ["metrics.jsonl, line 2"]),
        "half": (str(half.path), ["environment.json: not a JSON object"]),
        "bad yaml": (str(tmp_path / "bad.yaml"), ["bad.yaml", "YAML"]),
        "good": (good, []),
    }


@pytest.mark.parametrize(
    "case", ["misspelt", "elsewhere", "unstarted", "no config", "damaged", "half", "bad yaml"]
)
def test_wrong_input_is_one_line_and_code_2(tmp_path, capsys, case) -> None:
    cases = broken_cases(tmp_path)
    wrong, words = cases[case]
    assert main([cases["good"][0], wrong]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words), printed.err


def test_script_by_path_from_elsewhere(tmp_path) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", {"seed": 3, "model": {"layers": 2}})
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "compare.py"), a, b],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("2 factors: seed, model.layers\n")
