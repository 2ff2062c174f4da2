"""launch/plan.py: what it prints, its JSON and SVG, and how it refuses."""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from launch.plan import main
from pretrain.config import load_run_config
from pretrain.plan import describe_plan, make_plan

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
name: planned
model: {size: 1m, vocab_size: 300}
data: {train: [{path: nowhere}]}
training: {sequence_length: 64, batch_tokens: 4096, micro_batch: 2, steps: 100}
schedule: {warmup_steps: 10}
"""
LARGE = """\
name: large
model: {size: 70b, vocab_size: 128256}
data: {train: [{path: nowhere}]}
training: {sequence_length: 8192, batch_tokens: 8388608, micro_batch: 1, tokens: 1.4e12}
precision: {compute: bfloat16}
metrics: {peak_tflops: 989}
parallel:
  tp: 8
  sp: true
  pp: 16
  recompute: selective
  pipeline: {schedule: interleaved, virtual_stages: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def value(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label + "  ")]
    return line.strip().removeprefix(label).strip()


def test_one_rank(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, recipe)
    assert (code, err) == (0, "")
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == [
        "model", "layout", "memory per rank", "work", "pipeline", "assumptions",
    ]  # fmt: skip
    assert value(out, "total") == "815,232"
    assert value(out, "blocks.0-3").split() == ["4", "184,576", "738,304", "90.6%"]
    assert value(out, "tokens per step") == "4,096"
    assert value(out, "tokens") == "409,600"
    # 409,600 tokens on 738,432 parameters beside embedding and head, of which 20 tokens each
    assert value(out, "Chinchilla multiple") == "0.0277"
    assert value(out, "FLOPs per token, forward") == "1,682,432"
    assert value(out, "FLOPs per token, backward") == "3,364,864"
    assert value(out, "FLOPs of the run") == "2.067e+12"
    assert value(out, "time") == "unknown: set metrics.peak_tflops"
    assert "micro-batches per step and data rank: 32 of 2 × 64 tokens" in out
    assert all(len(line) <= 130 for line in out.splitlines())


def test_dry_run_prints_the_same(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, recipe, "parallel.pp=2")
    config = load_run_config([recipe], ["parallel.pp=2"], 2)
    assert describe_plan(config, 2) == out


def test_a_pipeline(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [recipe, "parallel.pp=4", "parallel.tp=2", "--world-size", "16"]
    found = plan(capsys, *arguments)
    assert found["layout"] == {
        "pp": 4, "dp": 2, "fsdp": 1, "ep": 1, "tp": 2, "sp": False, "recompute": "none",
    }  # fmt: skip
    assert found["work"]["micro_batches"] == 16
    placed = [unit for stage in found["pipeline"]["stages"] for unit in stage["units"]]
    assert placed == ["embedding", *(f"blocks.{i}" for i in range(4)), "final_norm", "head"]
    assert sum(found["parameters"]["by_pipeline_rank"]) == found["parameters"]["total"]
    assert [m["in_flight"] for m in found["memory"]] == [4, 3, 2, 1]
    assert 0 < found["pipeline"]["bubble_fraction"] < 1
    peaks = [m["peak"] for m in found["memory"]]
    assert peaks[found["largest_pp_rank"]] == max(peaks)

    _, out, _ = run(capsys, *arguments)
    rank = found["largest_pp_rank"]
    assert f"largest: pipeline rank {rank} (ranks {4 * rank}-{4 * rank + 3})" in out
    assert out.count("  rank ") == 4
    assert f"bubble {found['pipeline']['bubble_fraction']:.1%} of all rank time" in out


def test_a_tied_matrix_counts_on_both_of_its_hosts(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, recipe, "parallel.pp=2", "model.tie_embeddings=true")
    by_rank, total = found["parameters"]["by_pipeline_rank"], found["parameters"]["total"]
    assert sum(by_rank) == total + 300 * 128
    assert [m["reduction"] for m in found["memory"]] == [384 * 128 * 4] * 2


def test_world_size_defaults_to_the_degrees(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(capsys, recipe)["world_size"] == 1
    assert plan(capsys, recipe, "parallel.fsdp=2", "parallel.dp=2")["world_size"] == 4


def test_time_at_a_given_speed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    work = plan(capsys, recipe, "--world-size", "2", "--flops-per-second", "1e9")["work"]
    assert work["seconds"] == pytest.approx(work["flops"] / 2e9)
    work = plan(capsys, recipe, "metrics.peak_tflops=2")["work"]
    assert work["flops_per_second"] == 0.4 * 2e12
    _, out, _ = run(capsys, recipe, "metrics.peak_tflops=2")
    assert value(out, "time") == "2.6 s at 0.8 TFLOP/s per rank"


def test_bubble_of_equal_stages(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """(P − 1) / (m + P − 1) where the head costs almost nothing."""
    found = plan(
        capsys, recipe, "parallel.pp=2", "model.vocab_size=1", "model.layers=16",
        "parallel.pipeline.planner=uniform",
    )  # fmt: skip
    assert found["pipeline"]["bubble_fraction"] == pytest.approx(1 / 33, rel=0.02)


def test_svg(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "timeline.svg"
    code, _, _ = run(capsys, recipe, "parallel.pp=2", "--svg", str(target))
    assert code == 0
    root = ET.parse(target).getroot()
    boxes = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(boxes) == 2 * 2 * 32  # ranks × directions × micro-batches
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "timeline.svg"}


MTP = ["parallel.pp=2", "model.layers=6", "model.mtp.depth=2", "--micro-batches", "6"]


def test_all_planners(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, recipe, *MTP, "--planners", "--half-blocks")
    assert found["work"]["micro_batches"] == 6
    table = found["planners"]
    entries = table["entries"]
    names = ["uniform", "balanced", "standalone", "split", "vocab", "adahc", "adahc half"]
    assert list(entries) == names and table["refused"] == {}
    assert [name for name in names if not entries[name]["runs"]] == ["vocab", "adahc half"]
    best = entries["adahc"]
    assert best["times_adahc"] == 1
    for name in names[:5]:
        entry = entries[name]
        assert entry["times_adahc"] == pytest.approx(entry["step"] / best["step"])
        assert entry["times_adahc"] > 0.995
        assert entry["load"] == max(entry["loads"]) >= table["bound"] - 1e-6
        assert len(entry["peak_bytes"]) == len(entry["in_flight"]) == 2
    assert sum(best["loads"]) == pytest.approx(2 * table["bound"])
    assert entries["uniform"]["layout"] == "Et*3|t*3m*2L"
    assert entries["uniform"]["hosts"] == 1 and entries["vocab"]["hosts"] == 2
    assert best["tokens_per_second"] is None  # no speed is known

    _, out, _ = run(capsys, recipe, *MTP, "--planners", "metrics.peak_tflops=2")
    section = out[out.index("\nplanners\n") :]
    rows = {line.split()[0]: line.split() for line in section.splitlines()[3:9]}
    assert list(rows) == names[:-1]
    assert rows["adahc"][-1] == "×1.000"
    tokens = float(rows["adahc"][-2].replace(",", ""))
    assert tokens == pytest.approx(6 * 2 * 64 / float(rows["adahc"][-3]), rel=1e-3)
    assert "planners" not in run(capsys, recipe, *MTP)[1]


def test_the_plan_of_divided_heads(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    free = "flops_per_byte: 0"  # as if dividing cost nothing
    pipeline = f"parallel.pipeline={{planner: adahc, schedule: adahc, head_chunks: 8, {free}}}"
    large = ["model.vocab_size=2000", "parallel.pp=3", "model.layers=5"]
    found = plan(capsys, recipe, *MTP, *large, pipeline)
    units = [unit for stage in found["pipeline"]["stages"] for unit in stage["units"]]
    heads = [unit for unit in units if unit.startswith("head")]
    assert sorted(heads) == sorted(f"head.{k}.{c}" for k in range(3) for c in range(8))
    hosts = {
        stage["pp_rank"] for stage in found["pipeline"]["stages"] if stage["units"][0] in heads
    }
    assert len(hosts) > 1
    _, out, _ = run(capsys, recipe, *MTP, *large, pipeline)
    assert "head 2 (" in out and "/8)" in out and "# H" in out


def test_costs_from_a_file(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("units: {t: 0.1, m: 0.2, h: 0.3, n: 0.0}\nlatency: 0.001\n")
    found = plan(capsys, recipe, *MTP, "--planners", "--costs", str(costs))
    table = found["planners"]
    assert table["unit"] == "s"
    assert table["bound"] == pytest.approx(3 * (6 * 0.1 + 2 * 0.2 + 3 * 0.3) / 2)
    uniform = table["entries"]["uniform"]
    assert uniform["loads"] == pytest.approx([0.9, 0.9 + 1.2 + 2.7])
    assert uniform["tokens_per_second"] == pytest.approx(6 * 2 * 64 / uniform["step"])
    # The last rank is busy from the first forward pass to the last, twice a transfer beside it.
    assert uniform["step"] == pytest.approx(0.9 + 6 * 4.8 + 2 * 0.001)

    text = "units: {t: 0.1, m: 0.2, h: {forward: 0.3, fixed: 0.3}}\n"
    costs.write_text(text + "exchange: {vocabulary: 0.5, embedding: 0.5}\n")
    table = plan(capsys, recipe, *MTP, "--planners", "--costs", str(costs))["planners"]
    assert table["bound"] == pytest.approx(3 * (6 * 0.1 + 2 * 0.2 + 3 * 0.4) / 2)
    # Embedding on the first rank, blocks that read it on the last: one copy to add up.
    assert table["entries"]["uniform"]["step"] == pytest.approx(0.9 + 6 * (2.1 + 3.6) + 0.5)

    costs.write_text("units: {t: 0.1, m: 0.2}\n")
    code, out, err = run(capsys, recipe, *MTP, "--costs", str(costs))
    assert (code, out) == (2, "")
    assert "costs.yaml: the cost table has no entry for unit h0,0: give 'h'" in err


def test_png(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "timeline.png"
    assert run(capsys, recipe, *MTP, "--png", str(target))[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no recipe": ([], ["give at least one recipe file"]),
    "tp and pp": (
        ["parallel.tp=3", "parallel.pp=9"],
        ["parallel.tp", "3 does not divide", "parallel.pp", "9 stages cannot be filled"],
    ),
    "world": (["parallel.tp=2", "--world-size", "3"], ["but 3 processes were started"]),
    "zero ranks": (["--world-size", "0"], ["--world-size must be positive, got 0"]),
    "batch": (["training.micro_batch=3"], ["training.batch_tokens", "micro_batch·dp·fsdp = 3"]),
    "unknown key": (["parallel.ttp=2"], ["ttp", "did you mean"]),
    "layout": (
        ["parallel.pp=2", "parallel.pipeline={planner: explicit, layout: 'Et|tL'}"],
        ["layout 'Et|tL' has 2 t"],
    ),
    "speed": (["--flops-per-second", "-1"], ["--flops-per-second must be positive, got -1"]),
    "a block twice": (
        [*MTP, "parallel.pipeline={planner: explicit, layout: 'Etttt|ttttmmL'}"],
        ["has 8 t and 2 m; the model has 6 and 2"],
    ),
    "a prediction block missing": (
        [*MTP, "parallel.pipeline={planner: explicit, layout: 'Ettt|tttmL'}"],
        ["has 6 t and 1 m; the model has 6 and 2"],
    ),
    "chunks": (
        [*MTP, "parallel.pipeline={planner: adahc, schedule: adahc, head_chunks: 7}"],
        ["parallel.pipeline.head_chunks", "7 does not divide the 64 positions"],
    ),
    "hosts": (
        [*MTP, "parallel.pipeline={planner: adahc, schedule: adahc, max_hosts: 0}"],
        ["max_hosts", "must be positive, got 0"],
    ),
    "more stages than layers": (
        ["parallel.pp=7", "parallel.pipeline.planner=uniform"],
        ["a block for each of 7 stages, the model has 4"],
    ),
    "little memory": (
        [*MTP, "parallel.pipeline={planner: adahc, schedule: adahc, max_memory_gib: 0.001}"],
        ["parallel.pipeline.planner", "bytes for one micro-batch, more than 1.074e+06"],
    ),
    "planners of one rank": (["--planners"], ["there is one pipeline rank"]),
    "half blocks alone": (["--half-blocks"], ["only goes with --planners"]),
    "no micro-batch": (["--micro-batches", "0"], ["--micro-batches must be positive, got 0"]),
    "no cost file": (["parallel.pp=2", "--costs", "none.yaml"], ["none.yaml"]),
    "svg folder": (["--svg", "no/such/folder/x.svg"], ["there is no folder no/such/folder"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals(case: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, parts = WRONG[case]
    code, out, err = run(capsys, *([recipe] if arguments else []), *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def test_svg_into_a_folder(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, recipe, "--svg", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --svg {tmp_path}: ")
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_seventy_billion_on_512_ranks_is_planned_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text(LARGE)
    config = load_run_config([tmp_path / "large.yaml"], [], 512)
    describe_plan(config, 512)  # imports
    start = time.process_time()
    out = describe_plan(config, 512)
    assert time.process_time() - start < 8  # one to two seconds on a machine that is not busy
    assert value(out, "total") == "70,553,706,496"
    assert value(out, "ranks") == "512"
    assert "time in seconds of one rank; interleaved" in out


@pytest.mark.slow
def test_sixty_four_ranks_are_compared_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text(LARGE)
    overrides = ["parallel.pp=64", "model.mtp.depth=1", "training.batch_tokens=4194304"]
    overrides += ["parallel.pipeline={schedule: 1f1b, virtual_stages: 1}"]
    config = load_run_config([tmp_path / "large.yaml"], overrides, 512)
    start = time.process_time()
    table = make_plan(config, 512, compare=True).planners
    assert time.process_time() - start < 60  # about fifteen seconds if the machine is not busy
    assert table is not None and table.comparison.request.microbatches == 512
    best = table.comparison.entry("adahc")
    assert best is not None
    for entry in table.comparison.entries:
        assert entry.step >= best.step * 0.99


def test_the_script_by_path(recipe: str, tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "plan.py")
    done = subprocess.run(
        [sys.executable, script, recipe, "parallel.tp=3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
