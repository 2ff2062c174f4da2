"""Every benchmark runs at toy size and writes a complete result file; no time is asserted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure, run

NAMES = list(run.QUESTIONS)
EXTRA = {
    "training_throughput": ["--modes", "eager"],
    "gpu": ["--device", "cpu", "--seconds", "0", "--micro-batch", "1"],
    "loader": ["--folder", "{folder}"],
}
# The values of each benchmark that decide whether it compared what it claims to compare.
SAMPLES = {
    "training_throughput": {"toy midspan eager", "toy transformers eager", "toy products"},
    "pipeline_executor": {"toy 1f1b ours", "toy interleaved torch", "toy 1f1b simulated"},
    "mtp_pipeline": {"toy: uniform", "toy: adahc", "toy: torch interleaved"},
    "sleeping_pipeline": {"uniform 1f1b", "adahc adahc", "adahc adahc_zb"},
    "diffusion_throughput": {"toy causal", "toy masked", "toy uniform", "toy block", "toy eso"},
    "head_memory": {"toy plain seconds", "toy uniform-state chunked peak MiB"},
    "prepare_throughput": {"tokenizer alone", "prepare: tokenisation", "prepare: everything"},
    "loader": {"start", "read", "train"},
    "gpu": {"training step"},
}


@pytest.fixture
def single_thread() -> Any:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_runs_at_toy_size(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], single_thread: None
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    common = ["--quick", "--repeats", "1", "--threads", "1", "--results", str(tmp_path / "r")]
    extra = [part.format(folder=tmp_path) for part in EXTRA.get(name, [])]
    assert module.main([*common, *extra]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "r" / f"{name}.json").read_text())
    assert result["quick"] and result["repeats"] == 1 and result["threads"] == 1
    assert result["rows"] and all(len(row) == len(result["columns"]) for row in result["rows"])
    assert result["targets"] and result["machine"]["cpu"] and result["versions"]["torch"]
    assert SAMPLES[name] <= result["samples"].keys()
    assert all(value > 0 for values in result["samples"].values() for value in values)
    shown = capsys.readouterr().out
    assert f"### {name}" in shown and "Toy sizes" in shown


def test_gpu_refuses_a_full_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import gpu

    assert gpu.main(["--device", "cpu"]) == 2
    assert "error: no GPU here" in capsys.readouterr().err


def test_gpu_parity_sees_a_wrong_gradient() -> None:
    import torch

    from benchmarks.gpu import Case, error, step_of

    wanted = step_of(Case("plain"), torch.device("cpu"))
    assert error(step_of(Case("plain", micro_batches=2), torch.device("cpu")), wanted) < 1e-12
    assert wanted["gradients"].keys() >= {"embedding.weight", "head.weight"}
    found = {"loss": wanted["loss"], "gradients": dict(wanted["gradients"])}
    found["gradients"]["head.weight"] = 1.001 * found["gradients"]["head.weight"]
    assert error(found, wanted) == pytest.approx(1e-3, rel=1e-6)


def test_what_does_not_shrink_with_the_rows_of_a_head() -> None:
    from benchmarks.unit_costs import affine

    assert affine([(0.25, 3.0), (0.25, 3.0), (0.5, 5.0), (1.0, 9.0)]) == pytest.approx((1, 8))
    assert affine([(0.25, 1.0), (0.5, 2.5), (1.0, 5.0)])[0] == 0
    fixed, rest = affine([(0.25, 3.1), (0.5, 3.0), (1.0, 2.9)])
    assert (fixed, rest) == (pytest.approx(3.0), 0)


def test_models_that_are_measured_already_are_kept(tmp_path: Path) -> None:
    from benchmarks.mtp_pipeline import SHAPES, kept

    options = measure.Options(False, 7, 2, tmp_path, None)
    first, second, third = list(SHAPES)[:3]
    settings = {"both sides": "x", first: str(SHAPES[first]), second: "of other sizes"}
    result_file(
        tmp_path, "mtp_pipeline", machine=measure.machine(), versions=measure.versions(),
        settings=settings, rows=[[first, "a"], [second, "b"]], notes=[f"{first}: n", "others"],
        targets=[{"claim": f"{first}: c", "measured": "1", "met": True}],
        samples={f"{first}: a": [1.0], f"{second}: a": [2.0]},
    )  # fmt: skip

    def found(wanted: list[str], options: measure.Options = options, sides: str = "x") -> Any:
        report = measure.Report("mtp_pipeline", "", [], {"both sides": sides})
        path = tmp_path / "mtp_pipeline.json"
        return kept(path, {name: SHAPES[name] for name in wanted}, report, options), report

    names, report = found([first, second, third])
    assert names == [first] and report.rows == [[first, "a"]] and report.notes == [f"{first}: n"]
    assert report.samples == {f"{first}: a": [1.0]} and report.targets[0].met
    assert report.settings == {"both sides": "x", first: str(SHAPES[first])}
    assert found([second])[0] == found([first], sides="y")[0] == []
    quick = measure.Options(True, 7, 2, tmp_path, None)
    assert found([first], quick)[0] == []


def test_models_are_chosen_by_number() -> None:
    from benchmarks.mtp_pipeline import PARTS, SHAPES, chosen

    assert chosen(None) == SHAPES and sum(PARTS.values()) == 100
    assert list(chosen([6, 2])) == [list(SHAPES)[5], list(SHAPES)[1]]
    with pytest.raises(ValueError, match="--shapes 7: there are 1 to 6"):
        chosen([7])


def test_a_missing_peer_is_named_with_what_to_do() -> None:
    with pytest.raises(measure.MissingPeer, match=r"pip install .*--target DIR no-such-package"):
        measure.import_peer("no_such_module", "no-such-package", None)


def test_list_and_misspelt_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    assert run.main(["lader"]) == 2
    assert "did you mean loader?" in capsys.readouterr().err
    files = {path.stem for path in Path(run.__file__).parent.glob("*.py")}
    assert files - {"__init__", "run", "measure", "two_ranks", "unit_costs"} == set(NAMES)


def result_file(folder: Path, name: str, **changes: Any) -> None:
    content = {
        "name": name, "question": "How?", "columns": ["a", "b"], "rows": [["1", "2"]],
        "targets": [{"claim": "x", "measured": "1.0", "met": False}], "notes": ["n"],
        "settings": {"k": "v"}, "samples": {}, "quick": False, "repeats": 7, "threads": 2,
        "date": "2026-01-01", "machine": {"cpu": "c"}, "versions": {"torch": "t"}, **changes,
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_docs_are_renewed_between_the_markers(tmp_path: Path) -> None:
    docs = tmp_path / "benchmarks.md"
    docs.write_text(f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n")
    result_file(tmp_path, "loader")
    command = ["--render", "--docs", str(docs), "--results", str(tmp_path)]
    assert run.main(command) == 0
    text = docs.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| 1 | 2 |" in text and "x: 1.0, **not met**" in text
    assert "Not measured yet: training_throughput" in text
    assert run.main(command) == 0 and docs.read_text() == text
    docs.write_text("no markers")
    assert run.main(command) == 2


def test_the_page_shows_the_stored_results(tmp_path: Path) -> None:
    docs = tmp_path / "benchmarks.md"
    docs.write_text(run.DOCS.read_text())
    run.renew(docs, measure.RESULTS)
    assert docs.read_text() == run.DOCS.read_text(), "run: python benchmarks/run.py --render"
    for path in measure.RESULTS.glob("*.json"):
        assert not json.loads(path.read_text())["quick"], f"{path} holds toy figures"


def test_rounds_are_interleaved_and_ratios_paired() -> None:
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name)) for name in "ab"}
    seconds = measure.interleaved(variants, repeats=2, warm_up=1)
    assert order == list("ababab") and [len(values) for values in seconds.values()] == [2, 2]
    assert measure.ratios([2.0, 6.0], [1.0, 2.0]) == [2.0, 3.0]
    assert measure.spread([3.0, 1.0, 2.0], 1, "s") == "2.0 s (1.0 to 3.0)"
    assert measure.at_least("c", [1.0, 1.2, 1.3], 1.15).met
    assert not measure.at_most("c", [1.0, 1.2, 1.3], 1.15).met
