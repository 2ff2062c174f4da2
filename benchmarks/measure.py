"""What every benchmark shares: interleaved repeats, honest figures, result files, tables."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class MissingPeer(ValueError):
    """A peer that is not installed; the text says how to get it."""


@dataclass(frozen=True)
class Options:
    """Command-line settings common to all benchmarks."""

    quick: bool
    repeats: int
    threads: int
    results: Path
    peers: str | None


@dataclass(frozen=True)
class Target:
    """One claim and whether this run met it."""

    claim: str
    measured: str
    met: bool


@dataclass
class Report:
    """The outcome of one benchmark.  settings: the exact settings of every side.  rows: one list
    of texts per line of the table.  samples: the raw figures of every repeat, by variant."""

    name: str
    question: str
    columns: list[str]
    settings: dict[str, Any]
    rows: list[list[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)


Measure = Callable[[Options, argparse.Namespace], Report]


def interleaved(
    variants: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each variant in each of ``repeats`` rounds, run A B C A B C ..., so that a slow
    moment of the machine falls on all of them.  ``warm_up`` more rounds come first, uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-warm_up, repeats):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """above / below, round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """``median unit (min to max)``."""
    middle, low, high = statistics.median(values), min(values), max(values)
    unit = f" {unit}" if unit else ""
    return f"{middle:,.{digits}f}{unit} ({low:,.{digits}f} to {high:,.{digits}f})"


def at_least(claim: str, values: Sequence[float], least: float, digits: int = 2) -> Target:
    """Met when the median reaches ``least``."""
    return Target(claim, spread(values, digits), statistics.median(values) >= least)


def at_most(claim: str, values: Sequence[float], most: float, digits: int = 2) -> Target:
    """Met when the median does not exceed ``most``."""
    return Target(claim, spread(values, digits), statistics.median(values) <= most)


def peak_resident_bytes() -> int:
    """The most memory this process ever held.  Unlike ``ru_maxrss``, VmHWM does not begin with the
    size of the process that started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def resident_bytes() -> int:
    """Memory this process holds now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, str]:
    """What the figures were taken on; the load says whether anything else ran."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        model = names[0] if names else model
    found = {
        "cpu": f"{model}, {cores()} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "tokenizers", "transformers", "litgpt", "datasets", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def import_peer(module: str, package: str, peers: str | None) -> Any:
    """Import a peer, from ``peers`` if it is not installed.  That folder comes last on the path, so
    nothing in it replaces what is installed here.  ``MissingPeer`` when it is in neither."""
    import importlib

    if peers and peers not in sys.path:
        sys.path.append(peers)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeer(
            f"{package} is not available ({error}): pip install --no-deps --target DIR {package} "
            "and what it needs, then give --peers DIR (docs/benchmarks.md)"
        ) from None


# ---------------------------------------------------------------------- several processes


def run_ranks(world: int, body: Callable[..., Any], *args: Any, timeout: float = 900) -> list[Any]:
    """Call ``body(rank, world, *args)`` in ``world`` gloo (or NCCL) processes; results by rank."""
    context = multiprocessing.get_context("forkserver")
    answers: Any = context.SimpleQueue()
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=_rank, args=(rank, world, folder, timeout, answers, body, args), daemon=True
            )
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + timeout
        try:
            while len(results) < world:
                if not answers.empty():
                    rank, error, value = answers.get()
                    if error:
                        raise RuntimeError(f"rank {rank}: {error}")
                    results[rank] = pickle.loads(value)
                    continue
                codes = [worker.exitcode for worker in workers]
                if time.monotonic() > deadline or any(code not in (None, 0) for code in codes):
                    raise RuntimeError(f"a process ended without an answer (exit codes {codes})")
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.join(timeout=5 if len(results) == world else 0)
                worker.kill()
                worker.join()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, folder: str, timeout: float, answers: Any, body: Any, args: Any
) -> None:
    import traceback

    import torch
    import torch.distributed as dist

    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
        if cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        value = body(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        # As bytes: shared memory of a tensor would end with this process.
        answers.put((rank, "", pickle.dumps(value)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), b""))


# ---------------------------------------------------------------------- results and tables


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ["| " + " | ".join(x.ljust(w) for x, w in zip(line, widths)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *padded[1:]])


def write(report: Report, options: Options) -> Path:
    """``RESULTS/NAME.json``, whole or not at all."""
    content = {
        **asdict(report),
        "quick": options.quick,
        "repeats": options.repeats,
        "threads": options.threads,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
    }
    return write_whole(options.results / f"{report.name}.json", content)


def write_whole(path: Path, content: Mapping[str, Any]) -> Path:
    """A JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def render(result: Mapping[str, Any]) -> str:
    """One result file as Markdown."""
    lines = [f"### {result['name']}", "", result["question"], ""]
    lines += [table(result["columns"], result["rows"]), ""]
    for target in result["targets"]:
        verdict = "met" if target["met"] else "**not met**"
        lines.append(f"- target {target['claim']}: {target['measured']}, {verdict}")
    lines += [f"- {note}" for note in result["notes"]]
    settings = "; ".join(f"{key}: {value}" for key, value in result["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    packages = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    toy = " **Toy sizes: proves that the code works, says nothing about speed.**"
    lines += [
        f"- settings: {settings}",
        f"- {result['date']}, {result['repeats']} repeats, {result['threads']} threads; {where}; "
        f"{packages}.{toy if result['quick'] else ''}",
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- command line


def command(
    measure: Measure,
    description: str | None,
    argv: list[str] | None,
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    if extra is not None:
        extra(parser)
    arguments = parser.parse_args(argv)
    options = common(arguments)
    try:
        if options.repeats < 1 or options.threads < 1:
            raise ValueError("--repeats and --threads must be at least 1")
        report = measure(options, arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = write(report, options)
    print(render(json.loads(path.read_text())))
    print(f"written: {path}")
    return 0


def add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="toy sizes: proves that the code works")
    add("--repeats", type=int, metavar="N", help="timed rounds (7; quick: 2)")
    add("--threads", type=int, metavar="N", help="threads of single-process runs (all cores)")
    add("--results", type=Path, metavar="DIR", help="where NAME.json goes (benchmarks/results)")
    add("--peers", metavar="DIR", help="folder with peers: pip install --target DIR ...")


def common(arguments: argparse.Namespace) -> Options:
    quick = arguments.quick
    if quick and arguments.results is None:
        results = Path(tempfile.gettempdir()) / "midspan-quick-results"
    else:
        results = arguments.results or RESULTS
    return Options(
        quick=quick,
        repeats=arguments.repeats if arguments.repeats is not None else (2 if quick else 7),
        threads=arguments.threads if arguments.threads is not None else cores(),
        results=results,
        peers=arguments.peers,
    )
