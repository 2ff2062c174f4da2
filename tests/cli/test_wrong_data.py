"""Wrong datasets and tokenizers: one clear error before training starts, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools.corpus import ReadOptions
from data_tools.dataset import prepare
from data_tools.packing import write_packing
from data_tools.request import Request
from data_tools.tokenizers import train_tokenizer
from launch import pretrain
from tests.cli.workspace import Workspace, listing, prepared, refused


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(tmp_path, prepared(tmp_path_factory))
    work.change(schedule={"warmup_steps": 1})
    return work


def train_on(work: Workspace, *sources: dict) -> None:
    work.change(data={"train": list(sources)})


def edit_manifest(work: Workspace, **changes: object) -> None:
    path = work.root / "data" / "train.manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def no_data(work: Workspace) -> None:
    train_on(work, {"path": str(work.root / "data" / "trian")})


def no_data_and_no_vocabulary(work: Workspace) -> None:
    no_data(work)
    del work.tree["model"]["vocab_size"]
    work.change()


def truncated_idx(work: Workspace) -> None:
    path = work.root / "data" / "train.idx"
    path.write_bytes(path.read_bytes()[:-9])


def header_alone(work: Workspace) -> None:
    path = work.root / "data" / "train.idx"
    path.write_bytes(path.read_bytes()[:20])


def foreign_idx(work: Workspace) -> None:
    path = work.root / "data" / "train.idx"
    path.write_bytes(b"TNTIDX\x00\x00" + path.read_bytes()[8:])


def truncated_bin(work: Workspace) -> None:
    path = work.root / "data" / "validation.bin"
    path.write_bytes(path.read_bytes()[:-2])


def corrupted_manifest(work: Workspace) -> None:
    (work.root / "data" / "train.manifest.json").write_text('{"format": 1, "documents": ')


def incomplete_manifest(work: Workspace) -> None:
    edit_manifest(work, tokenizer={"name": "x"})


def no_manifest(work: Workspace) -> None:
    (work.root / "data" / "train.manifest.json").unlink()


def empty(work: Workspace) -> None:
    (work.root / "data" / "train.bin").write_bytes(b"")
    (work.root / "data" / "train.idx").write_bytes(b"")


def small_model_vocabulary(work: Workspace) -> None:
    work.change(model={"vocab_size": 256})


def vocabulary_beyond_the_type(work: Workspace) -> None:
    tokenizer = json.loads((work.root / "data" / "train.manifest.json").read_text())["tokenizer"]
    edit_manifest(work, tokenizer={**tokenizer, "vocab_size": 70_000})
    work.change(model={"vocab_size": 70_000})


def too_many_epochs(work: Workspace) -> None:
    train_on(work, {"path": str(work.root / "data" / "train"), "max_epochs": 0.01})


def too_many_epochs_in_a_blend(work: Workspace) -> None:
    for part in ("bin", "idx", "manifest.json", "bytes.npy"):
        shutil.copy(work.root / "data" / f"train.{part}", work.root / "data" / f"other.{part}")
    path = str(work.root / "data" / "train")
    other = str(work.root / "data" / "other")
    train_on(
        work,
        {"path": path, "weight": 0.5},
        {"path": other, "weight": 0.5, "max_epochs": 0.005},
    )


def long_sequences(work: Workspace) -> None:
    work.change(training={"sequence_length": 10**7, "batch_tokens": 2 * 10**7})


def no_packing(work: Workspace) -> None:
    work.change(data={"samples": "packed"}, objective={"type": "causal", "documents": "mask"})


def stale_packing(work: Workspace) -> None:
    no_packing(work)
    for split in ("train", "validation"):
        write_packing(work.root / "data" / split, 32)
    path = work.root / "data" / "train.pack32.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "idx_sha256": "0"}))


def no_tokenizer(work: Workspace) -> None:
    work.change(data={"tokenizer": str(work.root / "nowhere")})


def no_tokenizer_for_the_sample(work: Workspace) -> None:
    (work.root / "data" / "tokenizer.json").unlink()
    work.change(finish={"sample_tokens": 8})


def other_tokenizer(work: Workspace) -> None:
    train_tokenizer(["a cat sat on a cat"] * 9, 259).save(work.root / "words")
    work.change(data={"tokenizer": str(work.root / "words")})


def blend_of_tokenizers(work: Workspace) -> None:
    text = work.root / "more.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"the cat {i} sat " * 40}) + "\n" for i in range(9))
    )
    tokenizer = train_tokenizer(["the cat sat"] * 9, 259)
    request = Request((text,), ReadOptions(), tokenizer, validation_fraction=0.3)
    prepare(request, work.root / "more", workers=1, say=lambda line: None)
    work.change(model={"vocab_size": 300})
    train_on(
        work,
        {"path": str(work.root / "data" / "train")},
        {"path": str(work.root / "more" / "train")},
    )


CASES: dict[Callable[[Workspace], None], list[str]] = {
    no_data: ["data:", "trian.bin: no such file"],
    no_data_and_no_vocabulary: ["data.train[0].path", "trian.manifest.json", "launch/prepare.py"],
    truncated_idx: ["train.idx: truncated", "bytes, expected"],
    header_alone: ["train.idx: truncated: 20 bytes, the header alone has 34"],
    foreign_idx: ["train.idx: not a Megatron index", "TNTIDX"],
    truncated_bin: ["validation.bin: truncated", "validation.idx says"],
    corrupted_manifest: ["train.manifest.json: not a dataset manifest"],
    incomplete_manifest: ["train.manifest.json: not a dataset manifest", "'sha256'"],
    no_manifest: ["train.manifest.json: no such file"],
    empty: ["train.idx: truncated: 0 bytes"],
    small_model_vocabulary: ["a vocabulary of 257, larger than model.vocab_size=256"],
    vocabulary_beyond_the_type: ["a vocabulary of 70,000, which does not fit the uint16"],
    too_many_epochs: ["data.train", "32 needed", "epochs, at most 0.01 allowed", "samples avail"],
    too_many_epochs_in_a_blend: ["data.train", "other: ", "needed", "at most 0.005 allowed"],
    long_sequences: ["too few for one sample of 10,000,000 + 1"],
    no_packing: ["train.pack32.json: no packing index", "prepare.py --pack 32"],
    stale_packing: ["train.pack32.json: computed from another version of train.idx"],
    no_tokenizer: ["data.tokenizer", "nowhere: no such tokenizer file"],
    no_tokenizer_for_the_sample: ["data.tokenizer", "tokenizer.json: no such tokenizer file"],
    other_tokenizer: ["data.tokenizer", "words holds tokenizer", "was made with bytes"],
    blend_of_tokenizers: ["different tokenizers", "257 tokens", "259 tokens"],
}


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_wrong_data(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], damage: Callable[[Workspace], None]
) -> None:
    damage(workspace)
    before = listing(workspace.root)
    refused(capsys, workspace.root, [workspace.recipe], CASES[damage])
    assert listing(workspace.root) == before
    assert not workspace.folder.exists()
    refused(capsys, workspace.root, [workspace.recipe, "--dry-run"], CASES[damage])


def test_a_plan_for_another_machine_needs_no_data(workspace: Workspace, capsys) -> None:
    assert pretrain.main([str(workspace.recipe), "--dry-run"]) == 0
    whole = capsys.readouterr().out
    shutil.move(workspace.root / "data", workspace.root / "elsewhere")
    assert pretrain.main([str(workspace.recipe), "--dry-run"]) == 0
    *plan, note = capsys.readouterr().out.splitlines()
    assert plan == whole.splitlines()
    assert note.startswith("the datasets are not here, so they were not checked: ")
    assert note.endswith("validation")


def test_data_and_kernels_are_reported_together(workspace: Workspace, capsys) -> None:
    truncated_idx(workspace)
    truncated_bin(workspace)
    command = [workspace.recipe, "kernels.attention=flex"]
    words = ["3 problems", "kernels.attention", "train.idx", "validation.bin"]
    refused(capsys, workspace.root, command, words)
