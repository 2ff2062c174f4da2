"""launch/prepare.py: the bundled corpus, wrong inputs, kills and full disks."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_tools import indexed, tokenize
from data_tools.blend import PackedSampler
from data_tools.indexed import IndexedReader
from data_tools.manifest import Manifest
from launch import prepare

ROOT = Path(__file__).resolve().parents[2]


def corpus_file(folder: Path, name: str = "a.jsonl", documents: int = 60) -> Path:
    path = folder / name
    rows = [json.dumps({"text": f"document {i} " + "word " * i}) + "\n" for i in range(documents)]
    path.write_text("".join(rows))
    return path


def run(*arguments: object) -> int:
    return prepare.main([str(argument) for argument in arguments])


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_bundled_corpus_is_prepared_and_then_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--corpus", "austen", "--train-tokenizer", 4096, "--out", tmp_path / "austen")
    assert run(*command, "--verify", "--pack", 256, "--workers", 1) == 0
    output = capsys.readouterr()
    assert "vocabulary 4,096" in output.out
    assert "order-2 byte model" in output.out
    assert "Traceback" not in output.err
    totals = {"documents": 0, "text_bytes": 0}
    for split in ("train", "validation"):
        manifest = Manifest.load(tmp_path / "austen" / split)
        for key in totals:
            totals[key] += getattr(manifest, key)
        assert manifest.text_bytes / manifest.tokens > 3.5
        reader = IndexedReader(tmp_path / "austen" / split)
        assert PackedSampler(reader, 256, seed=0).num_samples > 200
    assert totals == {"documents": 269, "text_bytes": 4_024_596}
    costs = Manifest.load(tmp_path / "austen" / "validation").reference_bits_per_byte
    assert costs is not None
    assert set(costs) == {"order2", "gzip", "xz"}
    assert all(2 < cost < 3.5 for cost in costs.values())

    before = listing(tmp_path)
    begin = time.perf_counter()
    assert run(*command) == 0
    assert time.perf_counter() - begin < 5
    assert "is up to date" in capsys.readouterr().out
    assert listing(tmp_path) == before


def test_help_and_dry_run_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--corpus", "--append-eos", "examples:", "austen"):
        assert word in text
    path = corpus_file(tmp_path)
    before = listing(tmp_path)
    assert (
        run("--corpus", path, "--train-tokenizer", 300, "--out", tmp_path / "o", "--dry-run") == 0
    )
    text = capsys.readouterr().out
    assert "would be made" in text
    assert "uint16" in text
    assert listing(tmp_path) == before
    assert run("--corpus", path, "--tokenizer", "bytes", "--out", tmp_path, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "was not made by prepare" in text
    assert "corpus: 1 file, " in text and "tokenizer: bytes, vocabulary 257" in text


def test_no_append_eos_says_what_it_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus_file(tmp_path)
    arguments = ("--corpus", path, "--tokenizer", "bytes", "--out", tmp_path / "o")
    assert run(*arguments, "--no-append-eos", "--workers", 1) == 0
    assert "nothing in the token stream marks where documents end" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "o" / "train").append_eos is False


def test_other_request_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus_file(tmp_path)
    arguments = ("--corpus", path, "--out", tmp_path / "o", "--workers", 1)
    assert run(*arguments, "--tokenizer", "bytes") == 0
    before = listing(tmp_path)
    capsys.readouterr()
    assert run(*arguments, "--tokenizer", "bytes", "--seed", 5) == 2
    error = capsys.readouterr().err
    assert "made by another request (seed was 0, now 5)" in error
    assert listing(tmp_path) == before
    assert run(*arguments, "--tokenizer", "bytes", "--seed", 5, "--force") == 0
    assert Manifest.load(tmp_path / "o" / "train").split["seed"] == 5


def big_tokenizer(folder: Path) -> Path:
    """A tokenizer.json whose largest id is beyond 32 bits' positive range."""
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 2**31 + 5}, "unk_token": "a"}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


BYTES = ("--tokenizer", "bytes")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--corpus", "{dir}/good.jsonl"), "give one of --tokenizer PATH and --train-tokenizer"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--train-tokenizer", "300"), "give one of"),
        (("--corpus", "{dir}/good.jsonl", "--tokenizer", "{dir}/none"), "no such tokenizer file"),
        (("--corpus", "{dir}/good.jsonl", "--tokenizer", "{dir}/good.jsonl"), "not a tokenizer"),
        (("--corpus", "{dir}/good.jsonl", "--tokenizer", "{dir}/big"), "does not fit 32-bit"),
        (("--corpus", "{dir}/good.jsonl", "--train-tokenizer", "100"), "at least 257"),
        (("--corpus", "{dir}/good.jsonl", "--train-tokenizer", "x"), "invalid int value"),
        (("--corpus", "{dir}/none.jsonl", *BYTES), "no such file, folder or bundled corpus"),
        (("--corpus", "asten", *BYTES), "did you mean the bundled corpus 'austen'"),
        (("--corpus", "{dir}/empty.jsonl", *BYTES), "the corpus holds no text"),
        (("--corpus", "{dir}/blank.jsonl", *BYTES), "the corpus holds no text (3 empty"),
        (("--corpus", "{dir}/folder", *BYTES), "no text, JSONL or parquet file"),
        (("--corpus", "{dir}/bad.jsonl", *BYTES), "bad.jsonl:2: not JSON"),
        (("--corpus", "{dir}/bad.jsonl", "--train-tokenizer", "300"), "bad.jsonl:2: not JSON"),
        (("--corpus", "{dir}/cut.jsonl.gz", *BYTES), "cut.jsonl.gz: cannot be read"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--text-key", "body"), "no field 'body'"),
        (("--corpus", "{dir}/one.txt", *BYTES), "cannot be split into train and validation"),
        (
            ("--corpus", "{dir}/one.txt", *BYTES, "--document-start", "("),
            "not a regular expression",
        ),
        (("--corpus", "{dir}/one.txt", *BYTES, "--max-document-bytes", "9"), "longer than 9 bytes"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--validation-fraction", "1"), "below 1"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--seed", "-1"), "must not be negative"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--workers", "0"), "--workers 0 must be"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--pack", "0"), "--pack 0 must be"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--frce"), "unrecognized arguments: --frce"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--out", "{dir}/folder2"), "not made by prepare"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--out", "{dir}/one.txt"), "not made by prepare"),
        (("--corpus", "{dir}/good.jsonl", *BYTES, "--out", "{dir}/one.txt/o"), "cannot write"),
        (("--corpus", "{dir}/good.jsonl", "{dir}/good.jsonl", *BYTES), "named more than once"),
    ],
)
def test_wrong_input_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    corpus_file(tmp_path, "good.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": " "}\n{"text": "\\n"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "one.txt").write_text("a single document\n")
    rows = corpus_file(tmp_path, "rows.jsonl").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(rows)[:-20])
    for folder in ("folder", "folder2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keep.csv").write_text("mine")
    big_tokenizer(tmp_path / "big")
    before = listing(tmp_path)
    filled = [argument.format(dir=tmp_path) for argument in arguments]
    out = () if "--out" in filled else ("--out", tmp_path / "out")
    assert run(*filled, *out, *(() if "--workers" in filled else ("--workers", 1))) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert listing(tmp_path) == before
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Files over 100 kB cannot be written: the kernel's refusal, without filling a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("file_size_limit")
def test_write_that_fails_is_reported_and_cleaned_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        corpus_file(tmp_path, f"{number}.jsonl", 150)
    before = listing(tmp_path)
    for workers in (1, 2):  # the limit holds for worker processes too
        arguments = ("--corpus", tmp_path, *BYTES, "--out", tmp_path / "o", "--workers", workers)
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: cannot write {tmp_path / 'o'}: ")
        assert "File too large" in error
        assert listing(tmp_path) == before


def test_full_disk_is_reported_and_cleaned_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus_file(tmp_path)
    arguments = ("--corpus", path, *BYTES, "--out", tmp_path / "o", "--workers", 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "encode_shard", interrupt)
        assert run(*arguments) == 130
    assert "the same command continues" in capsys.readouterr().err
    os.symlink("/dev/full", tmp_path / "o.partial" / "shards" / "0.bin")  # always out of space
    assert run(*arguments) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
    with prepare.show_progress(8_000_000) as advance:
        for _ in range(4):
            advance(2_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["encoded 4.0 of 8.0 MB, 0.3 MB/s", "encoded 8.0 of 8.0 MB, 0.3 MB/s"]

    monkeypatch.undo()
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with prepare.show_progress(8_000_000) as advance:
            advance(8_000_000)
        monkeypatch.undo()
    assert b"100%" in os.read(main, 4096)
    os.close(main)


def descendants(pid: int) -> set[int]:
    """All living processes below one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    while new := {p for p, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_runs_leave_no_process_and_continue_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    source = ROOT / "data_tools" / "corpora" / "austen" / "persuasion.txt"
    path.write_text(source.read_text() * 3)
    arguments = [
        "--corpus",
        str(path),
        "--document-start",
        r"Chapter \d+",
        "--train-tokenizer",
        "400",
    ]
    assert run(*arguments, "--out", tmp_path / "undisturbed", "--workers", 1) == 0

    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), *arguments, "--workers", "2"]
    command += ["--out", str(tmp_path / "out")]
    shards = tmp_path / "out.partial" / "shards"
    for wanted, number in ((1, signal.SIGKILL), (5, signal.SIGTERM), (9, signal.SIGKILL)):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        while process.poll() is None and len(list(shards.glob("*.npy"))) < wanted:
            time.sleep(0.005)
        children = descendants(process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGTERM else -number)
        deadline = time.monotonic() + 20
        while any(map(alive, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(alive, children))
        assert not (tmp_path / "out").exists()
    last = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert last.returncode == 0, last.stderr
    assert "continuing an interrupted run" in last.stdout
    assert listing(tmp_path / "out") == listing(tmp_path / "undisturbed")
    indexed.verify(tmp_path / "out" / "train")
