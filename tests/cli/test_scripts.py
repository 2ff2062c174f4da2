"""Every script of launch/ answers --help: by path, as a module, from elsewhere, from a copy.

A script run by path has launch/ first on sys.path, where `import pretrain` would find
launch/pretrain.py; each script therefore repairs sys.path before its other imports. Starting an
interpreter with torch per case would take minutes, so one process loads torch and forks per case.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "parallel", "pretrain", "data_tools", "launch")
SCRIPTS = [p.stem for p in sorted((ROOT / "launch").glob("*.py")) if not p.stem.startswith("_")]
PREAMBLE = """
import sys
from pathlib import Path
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
"""

DRIVER = """
import contextlib, importlib, io, json, os, runpy, sys, traceback

def run_case(root, script, how, cwd):
    os.chdir(cwd)
    sys.argv = [os.path.join(root, "launch", script + ".py"), "--help"]
    if how == "path":
        sys.path[0] = os.path.join(root, "launch")
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path[0] = cwd
        runpy.run_module("launch." + script, run_name="__main__", alter_sys=True)

def report(root, *case):
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run_case(root, *case)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
    files = [getattr(m, "__file__", None) for n, m in list(sys.modules.items())
             if n.split(".")[0] in packages]
    strays = [f for f in files if f and not os.path.realpath(f).startswith(root + os.sep)]
    return {"code": code, "output": out.getvalue(), "strays": strays}

packages = json.loads(sys.argv[2])
if len(sys.argv) > 3:
    importlib.import_module(sys.argv[3])
results = []
for case in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as stream:
            json.dump(report(*case), stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        results.append(json.load(stream))
    os.waitpid(child, 0)
print(json.dumps(results))
"""


def environment() -> dict[str, str]:
    """This process's environment without anything that would put a checkout on sys.path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"COLUMNS": "100"}


def ask_for_help(cases: list[tuple[Path, str, str, Path]], *preload: str) -> list[dict[str, Any]]:
    """Run (checkout, script, "path" or "module", working directory) cases with --help.

    Each gives its exit code (None: it raised or did not exit), output, and the files of our
    packages that came from outside the checkout. ``preload`` is imported before the forks.
    """
    plain = [[str(root), script, how, str(cwd)] for root, script, how, cwd in cases]
    command = [sys.executable, "-c", DRIVER, json.dumps(plain), json.dumps(PACKAGES), *preload]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages alone, copied elsewhere: as a run that must not see later edits has them."""
    folder = tmp_path_factory.mktemp("copy").resolve()
    ignore = shutil.ignore_patterns("__pycache__", "corpora")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    return folder


def check_preamble(source: str) -> bool:
    """Whether the path repair is the first thing that the script does."""
    statements = ast.parse(source).body[1:]  # after the docstring
    if isinstance(statements[0], ast.ImportFrom) and statements[0].module == "__future__":
        statements = statements[1:]
    wanted = [ast.dump(node) for node in ast.parse(PREAMBLE).body]
    return [ast.dump(node) for node in statements[: len(wanted)]] == wanted


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_repairs_its_path_first(script: str) -> None:
    assert check_preamble((ROOT / "launch" / f"{script}.py").read_text())


def test_a_missing_or_late_repair_is_noticed() -> None:
    assert check_preamble(f'"""Doc."""\n{PREAMBLE}\nimport torch')
    assert not check_preamble('"""Doc."""\nimport sys\nimport torch\n')
    assert not check_preamble(f'"""Doc."""\nimport torch\n{PREAMBLE}')


def test_every_script_answers_help_from_everywhere(copy: Path, tmp_path: Path) -> None:
    cases = []
    for script in SCRIPTS:
        for root in (ROOT, copy):
            cases += [(root, script, "path", tmp_path), (root, script, "module", root)]
    wrong = []
    for case, result in zip(cases, ask_for_help(cases, "torch")):
        output = result["output"]
        readable = output.startswith("usage: ") and len(output.splitlines()) >= 5
        if result["code"] != 0 or result["strays"] or not readable:
            wrong.append((case, result))
    assert wrong == []


def test_a_script_without_the_repair_is_noticed(tmp_path: Path) -> None:
    """Negative control: beside launch/pretrain.py, `import pretrain` finds the script."""
    for package in ("launch", "pretrain"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "pretrain" / "decode.py").touch()
    (tmp_path / "launch" / "pretrain.py").touch()
    body = "import pretrain.decode\nprint('usage: good')\nraise SystemExit(0)\n"
    (tmp_path / "launch" / "good.py").write_text(PREAMBLE + body)
    (tmp_path / "launch" / "bad.py").write_text(body)
    root = tmp_path.resolve()
    good, bad = ask_for_help([(root, "good", "path", root), (root, "bad", "path", root)])
    assert good == {"code": 0, "output": "usage: good\n", "strays": []}
    assert bad["code"] is None
    assert "'pretrain' is not a package" in bad["output"]


@pytest.mark.parametrize("how", ["path", "module"])
def test_a_real_interpreter_agrees(how: str, copy: Path, tmp_path: Path) -> None:
    for root, cwd in ((ROOT, tmp_path if how == "path" else ROOT), (copy, copy)):
        target = [str(root / "launch/doctor.py")] if how == "path" else ["-m", "launch.doctor"]
        done = subprocess.run(
            [sys.executable, *target, "--help"],
            cwd=cwd,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: doctor.py")
