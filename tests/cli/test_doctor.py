"""doctor.py finds what works, what is missing, and the packages installed by mistake."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch import doctor
from parallel import selftest
from tests.distributed import run_ranks


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts real (tiny) packages on sys.path: {"apex/__init__.py": source}."""
    before = set(sys.modules)

    def install(files: dict[str, str]) -> None:
        for name, source in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "transformer_engine"):
            del sys.modules[name]


def by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {f"{check.section}/{check.name}": check for check in checks}


def test_this_machine_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-collectives"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "usable: training can run here"
    assert f"torch                  {torch.__version__}" in out
    assert "attention: sdpa        forward and backward on" in out


def test_json_is_one_object_with_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-collectives", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is True
    found = {(check["section"], check["name"]): check for check in report["checks"]}
    assert found["kernels", "attention: sdpa"]["status"] == "ok"
    assert found["packages", "torch"]["needed"] is True
    assert {check["status"] for check in report["checks"]} <= {"ok", "absent", "broken", "note"}


# --- collectives ------------------------------------------------------------------------------


def test_collectives_of_two_processes_give_the_right_values() -> None:
    (check,) = doctor.check_collectives()
    assert check.status == "ok", check.detail
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send and receive"):
        assert name in check.detail


def wrong_collectives(rank: int, world_size: int) -> list[str]:
    """Names of the cases whose values are found wrong when every collective does nothing."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    patched: dict[str, Any] = dict.fromkeys(
        ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
        nothing,
    )
    patched["batch_isend_irecv"] = lambda operations: []
    for name, function in patched.items():
        setattr(dist, name, function)
    return [name for name, got, expected in selftest.collective_cases(rank) if got != expected]


def test_a_collective_that_does_nothing_is_noticed() -> None:
    everything = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send and receive"]
    assert run_ranks(2, wrong_collectives) == [everything, everything]


def test_processes_that_die_make_the_machine_unusable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "_worker", sys.exit)  # fails: it takes one argument
    monkeypatch.setattr(doctor, "run_checks", lambda collectives: doctor.check_collectives())
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "no answer from 2 of 2 processes (exit codes 1, 1)" in out
    assert out.splitlines()[-1].startswith("not usable: gloo, 2 processes must work")


# --- kernels ----------------------------------------------------------------------------------


def test_wrong_attention_values_or_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.scaled_dot_product_attention
    assert doctor.attempt("sdpa", lambda: doctor.try_sdpa("cpu")).status == "ok"

    def not_causal(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return real(q, k, v)

    def half_the_gradient(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        out = real(q, k, v, is_causal=is_causal)
        return (out + out.detach()) / 2

    for broken, message in ((not_causal, "wrong values"), (half_the_gradient, "wrong gradient")):
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
        check = doctor.attempt("sdpa", lambda: doctor.try_sdpa("cpu"), needed=True)
        assert check.status == "broken"
        assert message in check.detail


def test_flex_runs_forward_and_says_what_it_cannot_do_on_a_cpu() -> None:
    check = doctor.attempt("flex", lambda: doctor.try_flex("cpu"))
    assert check.status == "ok", check.detail
    assert "no backward on a CPU" in check.detail


def test_without_torch_nothing_is_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main([]) == 1
    assert "not usable: torch must work" in capsys.readouterr().out


# --- packages installed by mistake ------------------------------------------------------------


def test_the_web_toolkit_called_apex_is_told_from_nvidias(package: Any) -> None:
    package({"apex/__init__.py": "from pyramid.config import Configurator\n"})
    check = doctor.check_apex("cpu")
    assert check.status == "broken"
    assert not check.needed
    assert "is the wrong one" in check.detail
    assert "pip uninstall apex" in check.detail


def test_nvidias_apex_is_recognised(package: Any) -> None:
    source = "class FusedAdam:\n    pass\n"
    package({"apex/__init__.py": "", "apex/optimizers/__init__.py": source})
    check = doctor.check_apex("cpu")
    assert check.status == "ok"
    assert "needs a GPU" in check.detail


def test_a_broken_build_of_nvidias_apex_is_not_called_the_wrong_one(package: Any) -> None:
    source = "raise ImportError('undefined symbol: amp_C')\n"
    package({"apex/__init__.py": "", "apex/optimizers/__init__.py": source})
    check = doctor.check_apex("cpu")
    assert check.status == "broken"
    assert "undefined symbol" in check.detail
    assert "wrong one" not in check.detail


def test_the_bare_transformer_engine_package_is_explained(package: Any) -> None:
    package({"transformer_engine/__init__.py": "raise RuntimeError('empty meta package')\n"})
    check = doctor.check_transformer_engine()
    assert check.status == "broken"
    assert "pip uninstall transformer-engine" in check.detail


# --- requirements and space -------------------------------------------------------------------


@pytest.mark.parametrize(
    "requirement, extra, status",
    [
        ("torch>=2.11", "", "ok"),
        ("torch>=999.1", "", "broken"),
        ("torch>=1,<2", "", "broken"),
        ("no-such-distribution-here", "", "broken"),
        ("no-such-distribution-here[a,b]>=1", "x", "absent"),
        ('torch>=2; python_version >= "3.11"', "x", "ok"),
        ('torch>=999; python_version >= "3.11"', "x", "broken"),
        ('torch>=999; python_version < "3.11"', "x", None),
    ],
)
def test_requirements_are_compared(requirement: str, extra: str, status: str | None) -> None:
    check = doctor.check_requirement(requirement, extra)
    assert (check.status if check else None) == status
    assert check is None or check.needed == (not extra)


def test_too_little_space_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_space("disk", tmp_path, 0.0, "").status == "ok"
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    check = doctor.check_space("disk", tmp_path, 0.5, "make room")
    assert check.status == "broken"
    assert check.needed
    assert check.detail.endswith("less than 0.5 GiB: make room")
