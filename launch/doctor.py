"""Say what is installed, which backends really work here, and how to mend what does not.

Runs attention forward and backward, starts two processes that check every collective, and looks
for the two packages that are often installed by mistake. Nothing is changed or downloaded.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import configparser
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

Status = Literal["ok", "absent", "broken", "note"]
MARKS: dict[str, str] = {"ok": "ok", "absent": "--", "broken": "!!", "note": "  "}
GIB = 1024**3
APEX_SOURCE = "NVIDIA apex is built from source (github.com/NVIDIA/apex); PyPI does not have it"


@dataclass(frozen=True)
class Check:
    """One finding. Only a broken check that is ``needed`` makes the machine unusable."""

    section: str
    name: str
    status: Status
    detail: str
    needed: bool = False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python launch/doctor.py --json\n\n"
        "exit code: 0 when training can run here, 1 when something it needs is broken",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--no-collectives", action="store_true", help="leave out the two-process self-test"
    )
    options = parser.parse_args(argv)

    checks: list[Check] = []
    for check in run_checks(collectives=not options.no_collectives):
        if not options.json:
            first = not checks or checks[-1].section != check.section
            print(f"{check.section}\n" if first else "", end="")
            print(f"  {MARKS[check.status]:<2}  {check.name:<22} {check.detail}", flush=True)
        checks.append(check)
    faults = [check.name for check in checks if check.needed and check.status == "broken"]
    if options.json:
        print(json.dumps({"usable": not faults, "checks": [asdict(check) for check in checks]}))
    elif faults:
        print(f"not usable: {', '.join(faults)} must work (see the !! lines above)")
    else:
        print("usable: training can run here")
    return 1 if faults else 0


def run_checks(collectives: bool = True) -> Iterator[Check]:
    """Every check in order, each yielded as soon as it is known."""
    yield from check_machine()
    yield from check_packages()
    try:
        importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        yield Check("kernels", "torch", "broken", f"cannot be imported: {error}", needed=True)
        return
    yield from check_devices()
    yield from check_kernels()
    if collectives:
        yield from check_collectives()


# --- machine and packages ---------------------------------------------------------------------


def check_machine() -> Iterator[Check]:
    section = "machine"
    yield Check(section, "python", "note", f"{platform.python_version()} at {sys.executable}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(section, "cpu", "note", f"{cores} cores usable, {platform.machine()}")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Check(section, "memory", "note", f"{total / GIB:.1f} GiB")
    yield check_space("disk here", Path.cwd(), 1.0, "a run needs room for its checkpoints")
    yield check_space("temporary files", Path(tempfile.gettempdir()), 0.1, "set TMPDIR to another")
    if Path("/dev/shm").is_dir():
        hint = "processes exchange data there; enlarge it (containers: --shm-size=1g or --ipc=host)"
        yield check_space("shared memory", Path("/dev/shm"), 0.25, hint)


def check_space(name: str, folder: Path, least: float, hint: str) -> Check:
    """Free space of ``folder`` against ``least`` GiB."""
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{free:.1f} GiB free in {folder}"
    if free >= least:
        return Check("machine", name, "ok", detail)
    detail += f"; less than {least:g} GiB: {hint}"
    return Check("machine", name, "broken", detail, needed=True)


def check_packages() -> Iterator[Check]:
    """Installed versions against the lower bounds of setup.cfg, extra by extra."""
    setup = Path(__file__).resolve().parent.parent / "setup.cfg"
    config = configparser.ConfigParser()
    if not config.read(setup):
        yield Check("packages", "setup.cfg", "note", "not beside launch/: versions not compared")
        return
    groups = {"": config["options"]["install_requires"]} | dict(config["options.extras_require"])
    for extra, text in groups.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            check = check_requirement(line, extra)
            if check is not None:
                yield check


def check_requirement(requirement: str, extra: str) -> Check | None:
    """One line of setup.cfg; None when its marker is for another Python version."""
    spec, _, marker = (part.strip() for part in requirement.partition(";"))
    if marker:
        bound = re.fullmatch(r'python_version (<|>=) "([\d.]+)"', marker)
        assert bound, f"setup.cfg: the marker {marker!r} is not of the form used here"
        if (sys.version_info[:2] < _numbers(bound[2])) != (bound[1] == "<"):
            return None
    match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?(.*)", spec)
    assert match, f"setup.cfg: {requirement!r} is not a requirement"
    name, bounds = match[1], match[2]
    needed = not extra
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        fix = f'pip install "{spec}"' if needed else f"optional, extra '{extra}'"
        return Check("packages", name, "broken" if needed else "absent", fix, needed)
    for operator, bound_text in re.findall(r"(>=|<)([\d.]+)", bounds):
        if (_numbers(version) < _numbers(bound_text)) != (operator == "<"):
            detail = f"{version} is installed, {spec} is needed"
            return Check("packages", name, "broken", detail, needed)
    return Check("packages", name, "ok", version + (f" (extra '{extra}')" if extra else ""), needed)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


# --- devices and kernels ----------------------------------------------------------------------


def check_devices() -> Iterator[Check]:
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            detail = f"{card.name}, {card.total_memory / GIB:.0f} GiB, sm_{card.major}{card.minor}"
            yield Check("devices", f"cuda:{index}", "ok", detail)
    else:
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but sees no card" if built else "a CPU build"
        yield Check("devices", "cuda", "absent", f"{why}; training runs on the CPU in float32")
    rates = {kind: _matmul_rate(getattr(torch, kind)) for kind in ("float32", "bfloat16")}
    detail = ", ".join(f"{kind} {rate:.3g} GFLOP/s" for kind, rate in rates.items())
    detail += f" on the CPU (torch threads: {torch.get_num_threads()})"
    yield Check("devices", "matrix product", "note", detail)


def _matmul_rate(dtype: Any) -> float:
    """GFLOP/s of a 256 x 256 product on the CPU, best of three."""
    torch = importlib.import_module("torch")
    size, best = 256, float("inf")
    a = torch.ones(size, size, dtype=dtype)
    for _ in range(3):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def check_kernels() -> Iterator[Check]:
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield attempt("attention: sdpa", lambda: try_sdpa(device), needed=True)
    yield attempt("attention: flex", lambda: try_flex(device))
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    compiles = compiler or device == "cuda"
    yield Check(
        "kernels",
        "torch.compile",
        "note" if compiles else "absent",
        f"C++ compiler: {compiler}" if compiles else "needs a C++ compiler on a CPU machine",
    )
    yield check_flash_attention(device)
    yield check_transformer_engine()
    yield check_apex(device)
    if importlib.util.find_spec("megatron") is not None:
        yield attempt("megatron-core", lambda: _import_version("megatron.core", "megatron-core"))


def attempt(name: str, action: Callable[[], str], needed: bool = False) -> Check:
    """The result of really running ``action``; whatever it raises is the finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Check("kernels", name, "ok", action(), needed)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return Check("kernels", name, "broken", f"{type(error).__name__}: {text}", needed)


def _causal_case(device: str) -> tuple[Any, Any, Any, Any]:
    """Random q, k, v [2, 4, 64, 32] in float32 and their causal attention, written out."""
    torch = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 64, 32, generator=generator).to(device).unbind()
    future = torch.ones(64, 64, dtype=torch.bool, device=device).triu(1)
    scores = (q @ k.mT / 32**0.5).masked_fill(future, float("-inf"))
    return q, k, v, scores.softmax(-1) @ v


def _compare(out: Any, expected: Any, tolerance: float) -> str:
    error = float((out.float() - expected).abs().max())
    if not error <= tolerance:
        raise ArithmeticError(f"wrong values: off by {error:.1e}")
    return f"forward off by {error:.0e}"


def try_sdpa(device: str) -> str:
    torch = importlib.import_module("torch")
    q, k, v, expected = _causal_case(device)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    detail = _compare(out, expected, 1e-4)
    probe = torch.randn_like(out)
    grads = torch.autograd.grad((out * probe).sum(), inputs)
    moved = [x.detach() + 1e-6 * g for x, g in zip(inputs, grads)]
    shifted = torch.nn.functional.scaled_dot_product_attention(*moved, is_causal=True)
    rise = float(((shifted - out) * probe).sum()) / 1e-6
    slope = float(sum((g * g).sum() for g in grads))
    if not abs(rise / slope - 1) < 1e-3:
        raise ArithmeticError(f"wrong gradient: slope {slope:.4g}, measured {rise:.4g}")
    return f"forward and backward on {device} ({detail})"


def try_flex(device: str) -> str:
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v, expected = _causal_case(device)

    def causal(score: Any, _b: Any, _h: Any, row: Any, column: Any) -> Any:
        return torch.where(row >= column, score, float("-inf"))

    with torch.no_grad():
        detail = _compare(flex.flex_attention(q, k, v, score_mod=causal), expected, 2e-3)
    try:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        flex.flex_attention(*inputs, score_mod=causal).sum().backward()
    except NotImplementedError:
        if device != "cpu":
            raise
        return f"forward on cpu ({detail}); no backward on a CPU, where training uses sdpa"
    return f"forward and backward on {device} ({detail})"


def check_flash_attention(device: str) -> Check:
    name = "attention: flash"
    if importlib.util.find_spec("flash_attn") is None:
        return Check("kernels", name, "absent", "optional, extra 'flash' (needs a GPU)")
    if device == "cpu":
        return Check("kernels", name, "absent", "flash-attn is installed but needs a GPU")

    def action() -> str:
        torch = importlib.import_module("torch")
        q, k, v, expected = _causal_case(device)
        inputs = [x.transpose(1, 2).to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
        out = importlib.import_module("flash_attn").flash_attn_func(*inputs, causal=True)
        out.float().sum().backward()
        return f"forward and backward ({_compare(out.transpose(1, 2), expected, 5e-2)})"

    return attempt(name, action)


def check_transformer_engine() -> Check:
    """The bare meta package imports with a RuntimeError and breaks megatron-core with it."""
    name = "transformer-engine"
    if importlib.util.find_spec("transformer_engine") is None:
        return Check("kernels", name, "absent", "optional, extra 'te' (needs a GPU)")
    check = attempt(name, lambda: _import_version("transformer_engine.pytorch", name))
    if check.status == "ok" or _is_distribution("transformer-engine-torch"):
        return check
    detail = (
        "only the bare meta package is installed, which cannot be imported and breaks "
        'megatron-core as well: pip uninstall transformer-engine, or pip install ".[te]" '
        "on a GPU machine"
    )
    return Check("kernels", name, "broken", detail)


def check_apex(device: str) -> Check:
    """NVIDIA's apex is told from PyPI's unrelated package of that name by what it offers."""
    name = "NVIDIA apex"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Check("kernels", name, "absent", f"optional; {APEX_SOURCE}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        detail = (
            f"the package 'apex' at {spec.origin} is the wrong one: PyPI's apex is a web toolkit "
            f"that only shares the name. pip uninstall apex; {APEX_SOURCE}"
        )
        return Check("kernels", name, "broken", detail)

    def action() -> str:
        adam = importlib.import_module("apex.optimizers").FusedAdam
        if device == "cpu":
            return "imports; FusedAdam needs a GPU to run"
        torch = importlib.import_module("torch")
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        weight.grad = torch.ones_like(weight)
        adam([weight], lr=0.1, weight_decay=0.0).step()
        return f"FusedAdam step ({_compare(weight.detach(), torch.full_like(weight, 0.9), 1e-4)})"

    return attempt(name, action)


def _is_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _import_version(module: str, distribution: str) -> str:
    importlib.import_module(module)
    return f"{metadata.version(distribution)} imports"


# --- collectives ------------------------------------------------------------------------------


def check_collectives() -> Iterator[Check]:
    """Two gloo processes run each collective and compare every value."""
    selftest = importlib.import_module("parallel.selftest")
    start = time.monotonic()
    names, faults = selftest.check_two_processes()
    name = "gloo, 2 processes"
    if faults:
        detail = "; ".join(faults) + " (can the host resolve its own name? try GLOO_SOCKET_IFNAME)"
        yield Check("collectives", name, "broken", detail, needed=True)
    else:
        took = f"{time.monotonic() - start:.1f} s"
        yield Check("collectives", name, "ok", f"{', '.join(names)}: values right ({took})", True)


if __name__ == "__main__":
    raise SystemExit(main())
