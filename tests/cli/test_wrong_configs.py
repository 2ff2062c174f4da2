"""Wrong recipes, overrides, options and layouts: one clear error, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import compare, plan
from pretrain.config import RunConfig
from pretrain.decode import fields_of
from tests.cli.workspace import Workspace, prepared, refused

CASES: dict[str, tuple[list[str], list[str]]] = {
    "misspelt section": (["trainig.steps=3"], ["trainig (command line)", "'training'"]),
    "misspelt key": (["optimizer.weight_decy=0"], ["optimizer.weight_decy", "'weight_decay'"]),
    "key of another section": (["lr=1"], ["lr (command line)", "'optimizer.lr'"]),
    "unknown component": (["model.norm=rmz"], ["model.norm", "layer, rms", "'rms'"]),
    "key of another component": (
        ["model.norm={type: rms, bias: true}"],
        ["model.norm.bias", "unknown key of norm 'rms'", "belongs to norm 'layer'"],
    ),
    "text for a number": (["training.steps=many"], ["training.steps", "'many'", "an integer"]),
    "number for a switch": (["parallel.sp=2"], ["parallel.sp", "given 2", "true or false"]),
    "list for a section": (["training=[1]"], ["training", "a mapping with sequence_length"]),
    "not one of the choices": (
        ["schedule.kind=cosinus"],
        ["schedule.kind", "cosine, wsd, linear, constant", "'cosine'"],
    ),
    "misspelt size": (
        ["model.sizze=3m"],
        ["model.sizze", "unknown key; allowed are size, vocab_size", "did you mean 'size'?"],
    ),
    "unknown size": (["model.size=3"], ["model.size (command line)", "1m, 3m", "70b"]),
    "name with a slash": (["name=a/b"], ["name", "plain folder name", "'a/b'"]),
    "unreadable override": (["model.layers=[1"], ["model.layers", "YAML", "'[1'"]),
    "override without =": (["model.layers"], ["'model.layers'", "written key=value"]),
    "steps and tokens": (["training.tokens=1e6"], ["training.steps", "exactly one of steps"]),
    "neither": (["training.steps=null"], ["training.steps", "exactly one of steps and tokens"]),
    "endless": (["training.steps=null", "training.tokens=.inf"], ["training.tokens", "finite"]),
    "batch of half a sequence": (
        ["training.batch_tokens=100"],
        ["training.batch_tokens", "100 is not a multiple of sequence_length=32"],
    ),
    "batch and micro-batch": (
        ["training.micro_batch=3"],
        ["training.batch_tokens", "8 sequences", "micro_batch·dp·fsdp = 3"],
    ),
    "warm-up beyond the end": (
        ["schedule.warmup_steps=4"],
        ["schedule.warmup_steps", "given 4", "0 to 3", "4 steps"],
    ),
    "precision": (
        ["precision.weights=float64"],
        ["precision.compute", "float32 does not go with weights=float64"],
    ),
    "perturbed positions of none": (
        ["objective=perturbed", "model.position=nope"],
        ["objective.type", "perturbed needs rotary positions, not nope"],
    ),
    "perturbed positions of biased scores": (
        ["objective=perturbed", "model.position={type: rnope, inner: alibi}"],
        ["objective.type", "perturbed needs rotary positions, not rnope"],
    ),
    "gap of a cycle": (
        ["objective={type: perturbed, view: cyclic, max_skip: 9}"],
        ["objective.max_skip", "view=cyclic: it would be ignored"],
    ),
    "divergence without a second view": (
        ["objective={type: perturbed, method: pose, distill_weight: 0.5}"],
        ["objective.distill_weight", "method=pose: it would be ignored"],
    ),
    "views of another objective": (
        ["objective.view=skip"],
        ["objective.view", "unknown key of objective 'causal'", "belongs to objective 'perturbed'"],
    ),
    "share of no weighting": (
        ["objective.weighting.alpha=0.3"],
        ["objective.weighting.alpha", "kind=none: it would be ignored"],
    ),
    "weighting": (
        ["objective.weighting={kind: geometrical, alpha: 2}"],
        ["objective.weighting.kind", "'geometric'"],
    ),
    "momentum of no Muon": (
        ["optimizer.muon.momentum=0.9"],
        ["optimizer.muon", "matrices=adamw: it would be ignored"],
    ),
    "momentum": (
        ["optimizer.matrices=muon", "optimizer.muon.momentum=1"],
        ["optimizer.muon.momentum", "must be in [0, 1), got 1"],
    ),
    "learning rate of no parameter": (
        ["optimizer.budget_lr=2"],
        ["optimizer.budget_lr", "the model has no budget parameters: it would be ignored"],
    ),
    "nothing to train": (
        ["optimizer.trainable=positions"],
        ["optimizer.trainable", "the model has no learned position encoding"],
    ),
    "Muon for a frozen model": (
        ["optimizer.trainable=positions", "optimizer.matrices=muon"],
        ["optimizer.matrices", "trainable=positions: it would be ignored"],
    ),
    "heads": (["model.attention.kv_heads=3"], ["kv_heads", "3 does not divide heads=2"]),
    "no data": (["data.train=[]"], ["data.train", "at least one source"]),
    "packed and attending": (["data.samples=packed"], ["objective.documents", "must be mask"]),
    "tracker": (["metrics.trackers=[wandb]"], ["metrics.trackers", "pip install wandb"]),
    "export": (
        ["finish.export=llama", "model.norm=layer"],
        ["finish.export", "llama cannot represent", "norm=layer"],
    ),
    "flash in float32": (["kernels.attention=flash"], ["kernels.attention", "bfloat16 only"]),
    "flash on a CPU": (
        ["kernels.attention=flash", "precision.compute=bfloat16"],
        ["cannot start", "flash does not run on a CPU", "pip install flash-attn"],
    ),
    "flex on a CPU": (["kernels.attention=flex"], ["flex has no backward pass on a CPU", "sdpa"]),
    "apex": (["kernels.optimizer=apex"], ["kernels.optimizer", "NVIDIA apex built from source"]),
    "cuda": (["device=cuda"], ["device=cuda", "no CUDA device"]),
}

# Settings that are legal by themselves but would do nothing.
IGNORED: dict[str, tuple[list[str], str]] = {
    "sp": (["parallel.sp=true"], "parallel.sp"),
    "reshard": (["parallel.reshard_after_forward=false"], "parallel.reshard_after_forward"),
    "pipeline": (["parallel.pipeline.schedule=gpipe"], "parallel.pipeline"),
    "prompt": (["finish.prompt=Once"], "ignored; unset it: finish.prompt=null"),
    "wsd": (["schedule.decay_fraction=0.3"], "schedule.decay_fraction"),
    "wsd shape": (["schedule.decay_shape=linear"], "schedule.decay_shape"),
    "floor": (["schedule.kind=constant", "schedule.min_ratio=0.2"], "schedule.min_ratio"),
    "evaluation": (["data.validation=[]"], "ignored; unset it: evaluation=null"),
    "weight": (["data.train=[{path: x, weight: 2}]"], "data.train[0].weight"),
    "embeddings": (
        ["optimizer.weight_decay=0", "optimizer.decay_embeddings=true"],
        "optimizer.decay_embeddings",
    ),
    "kept": (["checkpoint.every=0", "checkpoint.keep_every=5"], "checkpoint.keep_every"),
    "project": (["metrics.project=norms"], "metrics.project"),
}

LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "processes": (4, ["dp=3"], ["dp·fsdp·tp·pp = 3·1·1·1 = 3", "4 processes were started"]),
    "heads": (3, ["tp=3"], ["parallel.tp", "3 does not divide model.attention.heads = 2"]),
    "kv heads": (2, ["tp=2"], ["2 does not divide model.attention.kv_heads = 1"]),
    "feed-forward": (2, ["tp=2"], ["2 does not divide model.feedforward.hidden = 49"]),
    "vocabulary": (2, ["tp=2"], ["2 does not divide the padded vocabulary = 257"]),
    "sequence": (2, ["tp=2", "sp=true"], ["parallel.sp", "sequence length 33"]),
    "too many stages": (8, ["pp=8"], ["parallel.pp", "8 stages cannot be filled by 2 blocks"]),
    "uniform": (4, ["pp=4", "pipeline.planner=uniform"], ["pipeline.planner", "4 stages"]),
    "dropped block": (
        2,
        ["pp=2", "pipeline={planner: explicit, layout: 'E|tL'}"],
        ["parallel.pipeline.layout", "has 1 t and 0 m; the model has 2 and 0"],
    ),
    "bad character": (
        2,
        ["pp=2", "pipeline={planner: explicit, layout: 'Et|xtL'}"],
        ["parallel.pipeline.layout", "character 4: unexpected 'x'", "\n  Et|xtL\n     ^"],
    ),
    "stages of a layout": (
        2,
        ["pp=2", "pipeline={planner: explicit, layout: 'E|t|t|L'}"],
        ["parallel.pipeline.layout", "4 stages, but pp·virtual_stages = 2"],
    ),
    "layout without planner": (2, ["pp=2", "pipeline.layout=Et|tL"], ["planner=explicit"]),
    "one virtual stage": (
        2,
        ["pp=2", "pipeline.schedule=interleaved"],
        ["parallel.pipeline.schedule", "virtual_stages=1", "at least 2"],
    ),
    "chunks under 1f1b": (
        2,
        ["pp=2", "pipeline.planner=adahc"],
        ["runs no head chunks", "adahc_zb"],
    ),
    "chunks of a row": (
        2,
        ["pp=2", "pipeline={planner: adahc, schedule: adahc, head_chunks: 7}"],
        ["parallel.pipeline.head_chunks", "7 does not divide the 32 positions"],
    ),
    "no hosts": (
        2,
        ["pp=2", "pipeline={planner: adahc, schedule: adahc, max_hosts: 0}"],
        ["parallel.pipeline.max_hosts", "must be positive, got 0"],
    ),
    "chunks without adahc": (
        2,
        ["pp=2", "pipeline.head_chunks=4"],
        ["parallel.pipeline.head_chunks", "would be ignored"],
    ),
    "moving nothing": (
        2,
        ["pp=2", "pipeline.rebalance=true"],
        ["pipeline.rebalance", "needs planner=adahc"],
    ),
    "costs that are not there": (
        2,
        ["pp=2", "pipeline.costs=nowhere.yaml"],
        ["parallel.pipeline", "costs=nowhere.yaml", "No such file"],
    ),
    "gathered again": (4, ["pp=2", "fsdp=2"], ["reshard_after_forward", "must be false"]),
    "batch": (16, [], ["training.batch_tokens", "8 sequences", "micro_batch·dp·fsdp = 32"]),
}
SHAPES = {
    "kv heads": {"model": {"attention": {"kv_heads": 1}}},
    "feed-forward": {"model": {"feedforward": {"hidden": 49}}},
    "vocabulary": {"model": {"vocab_multiple": 1}},
    "sequence": {"training": {"sequence_length": 33, "batch_tokens": 264}},
}


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(tmp_path, prepared(tmp_path_factory))
    work.change(schedule={"warmup_steps": 1})
    return work


@pytest.mark.parametrize("case", CASES)
def test_wrong_setting(workspace: Workspace, capsys, case: str) -> None:
    overrides, words = CASES[case]
    refused(capsys, workspace.root, [workspace.recipe, *overrides], words)


@pytest.mark.parametrize("case", IGNORED)
def test_setting_that_would_be_ignored(workspace: Workspace, capsys, case: str) -> None:
    overrides, path = IGNORED[case]
    text = refused(capsys, workspace.root, [workspace.recipe, *overrides], [path, "ignored"])
    assert text.count("\n") == 1, "one problem, not several"


@pytest.mark.parametrize("case", LAYOUTS)
def test_wrong_layout(workspace: Workspace, capsys, monkeypatch, case: str) -> None:
    processes, overrides, words = LAYOUTS[case]
    workspace.change(**SHAPES.get(case, {}))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    command = [workspace.recipe, *(f"parallel.{text}" for text in overrides)]
    refused(capsys, workspace.root, command, words)


def test_all_problems_are_reported_together(workspace: Workspace, capsys) -> None:
    workspace.change(optimizer={"beta2": 1.5}, evaluation={"sequences": 0}, training={"setps": 3})
    command = [workspace.recipe, "model.position=ropes", "schedule.min_ratio=2", "seed=x"]
    text = refused(
        capsys,
        workspace.root,
        command,
        [
            "6 problems",
            "optimizer.beta2",
            "evaluation.sequences",
            f"training.setps ({workspace.recipe})",
            "model.position (command line)",
            "schedule.min_ratio",
            "seed",
        ],
    )
    assert len(text.splitlines()) == 7


def test_wrong_file_override_and_size_are_reported_together(workspace: Workspace, capsys) -> None:
    words = ["2 problems", "tinny.yaml: no such file; did you mean 'tiny.yaml'?", "given 'x'"]
    refused(capsys, workspace.root, [workspace.root / "tinny.yaml", "x"], words)
    words = ["2 problems", "model.size", "modl (command line)"]
    refused(capsys, workspace.root, [workspace.recipe, "model.size=9m", "modl.hidden=3"], words)


FILES = {
    "empty": ("", ["data.train", "at least one source"]),
    "malformed": ("model:\n  layers: [1, 2\nname: x\n", ["bad.yaml, line 3, column 5", "YAML"]),
    "twice": ("seed: 1\nname: a\nseed: 2\n", ["line 3", "key 'seed' is given twice"]),
    "a list": ("- name: x\n", ["bad.yaml", "'key: value' pairs, not a list"]),
    "a tab": ("model:\n\tlayers: 1\n", ["bad.yaml, line 2", "YAML"]),
    "binary": ("\x00\x01", ["bad.yaml", "YAML"]),
    "data is no section": ("data: 5\n", ["data", "given 5", "a mapping with train"]),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_recipe_file(tmp_path: Path, capsys, case: str) -> None:
    text, words = FILES[case]
    (tmp_path / "bad.yaml").write_text(text)
    refused(capsys, tmp_path, [tmp_path / "bad.yaml"], words)


def test_wrong_options(workspace: Workspace, capsys) -> None:
    recipe = workspace.recipe
    for command, words in (
        ([], ["at least one recipe file"]),
        (["model.layers=3"], ["at least one recipe file"]),
        ([recipe, "--world-size", "2"], ["--world-size only goes with --dry-run"]),
        ([recipe, "--dry-run", "--world-size", "0"], ["at least 1, given 0"]),
        ([recipe, "--dry-run", "--print-config"], ["one of --dry-run and --print-config"]),
        ([recipe, "--keys"], ["--keys takes no recipe"]),
        ([recipe, "--dryrun"], ["unrecognized arguments: --dryrun", "--help"]),
        ([recipe, "--world-size", "two"], ["invalid int value: 'two'"]),
        ([workspace.root], ["is a folder, not a file"]),
    ):
        refused(capsys, workspace.root, command, words)


def test_compare_resolves_recipes_and_refuses_what_is_not_there(
    workspace: Workspace, capsys
) -> None:
    recipe, root = workspace.recipe, workspace.root
    bad = workspace.write("bad.yaml", {"modle": {}})
    for command, words in (
        ([recipe], ["required: B"]),
        ([recipe, root / "tinyy.yaml"], ["no such run folder or file", "'tiny.yaml'"]),
        ([recipe, root / "data"], ["not a run folder: it has no config.yaml"]),
        ([recipe, bad], ["modle", "did you mean 'model'?"]),
    ):
        refused(capsys, root, command, words, compare.main)


def test_wrong_plans(workspace: Workspace, capsys) -> None:
    layout = "parallel.pipeline={planner: explicit, layout: 'E|tL'}"
    for command, words in (
        ([workspace.recipe, "parallel.pp=2", layout], ["layout", "has 1 t", "the model has 2"]),
        ([workspace.recipe, "parallel.tp=3"], ["parallel.tp (command line)", "heads = 2"]),
        ([workspace.recipe, "--world-size", 3], ["training.batch_tokens", "= 6"]),
        ([workspace.recipe, "--wrold-size", 3], ["unrecognized arguments: --wrold-size"]),
        ([], ["at least one recipe file"]),
    ):
        refused(capsys, workspace.root, command, words, plan.main)


def test_causes_and_bookkeeping_of_compare_are_real_settings() -> None:
    def exists(path: str) -> bool:
        cls = RunConfig
        for name in path.split("."):
            if name not in fields_of(cls):
                return False
            cls = fields_of(cls)[name][1]
        return True

    named = [*compare.BOOKKEEPING, *(path for paths in compare.CAUSES.values() for path in paths)]
    assert [path for path in named if not exists(path)] == []
