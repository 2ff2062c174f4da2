"""Every study runs at toy size and writes a complete result and picture; a failed check shows."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.studies import study
from benchmarks.studies.study import Options, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = list(study.QUESTIONS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "diffusion" else []) for n in NAMES]
)
def test_runs_at_toy_size(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.studies.{name}")
    picture = tmp_path / "pictures" / "p.png"
    flags = ["--quick", "--results", str(tmp_path / "r"), "--picture", str(picture)]
    assert module.main(flags) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "r" / f"{name}.json").read_text("utf-8"))
    assert result["name"] == name and result["quick"] and result["seeds"] == [0]
    assert result["rows"] and all(len(row) == len(result["columns"]) for row in result["rows"])
    assert result["machine"]["cpu"] and result["versions"]["torch"] and result["data"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"### {name}" in shown and "Toy sizes" in shown


def double(job: int) -> int:
    return 2 * job


def toy(met: bool) -> Any:
    def measure(options: Options) -> Study:
        result = Study("depth", "How?", ["a"], {"k": "v"}, list(range(options.seeds)))
        result.rows = [[str(sum(study.each(double, [1, 2], options.processes)))]]
        result.check("six", "6", met)
        result.data = {"values": [1.0]}
        return result

    return measure


def draw(result: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    return Figure()


@pytest.mark.parametrize(
    "met, flags, code", [(True, [], 0), (False, [], 1), (False, ["--quick"], 0)]
)
def test_a_failed_check_is_the_exit_code(
    met: bool, flags: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--results", str(tmp_path), "--picture", str(tmp_path / "p.png")]
    arguments = [*where, "--processes", "1", "--seeds", "2", *flags]
    assert study.command("depth", toy(met), draw, "doc", arguments) == code
    result = json.loads((tmp_path / "depth.json").read_text("utf-8"))
    assert result["seeds"] == [0, 1] and result["rows"] == [["6"]]
    assert result["checks"] == [{"claim": "six", "measured": "6", "met": met}]
    shown = capsys.readouterr().out
    assert ("**not met**" in shown) is not met
    assert ("![" in shown) is (not flags)


def test_jobs_on_several_processes_keep_their_order() -> None:
    assert study.each(double, [3, 1, 2], 2) == [6, 2, 4]


def test_settings_are_checked_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.command("depth", toy(True), draw, "doc", ["--seeds", "0"]) == 2
    assert "--seeds must be at least 1, got 0" in capsys.readouterr().err


def test_the_page_is_renewed_between_its_markers(tmp_path: Path) -> None:
    docs = tmp_path / "studies.md"
    docs.write_text(f"before\n{study.BEGIN}\nold\n{study.END}\nafter\n", "utf-8")
    where = ["--results", str(tmp_path), "--picture", str(tmp_path / "p.png"), "--processes", "1"]
    assert study.command("depth", toy(False), draw, "doc", where) == 1
    study.renew(docs, tmp_path)
    text = docs.read_text("utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "check six: 6, **not met**" in text and "images/depth_study.png" in text
    assert "Not run yet: stability" in text
    docs.write_text("no markers", "utf-8")
    with pytest.raises(ValueError, match="needs one line"):
        study.renew(docs, tmp_path)


def test_the_page_shows_the_stored_results(tmp_path: Path) -> None:
    docs = tmp_path / "studies.md"
    docs.write_text(study.DOCS.read_text("utf-8"), "utf-8")
    study.renew(docs, study.RESULTS)
    assert docs.read_text("utf-8") == study.DOCS.read_text("utf-8"), (
        "run: python benchmarks/studies/study.py"
    )
    for path in study.RESULTS.glob("*.json"):
        assert not json.loads(path.read_text("utf-8"))["quick"], f"{path} holds toy figures"
        assert (study.IMAGES / f"{path.stem}_study.png").is_file()
