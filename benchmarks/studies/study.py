"""What every study shares: its outcome, jobs on all cores, result file, picture, docs page.

A study asks what an architecture does.  It differs from a benchmark in that no time is measured:
its figures depend on seeds, not on the load of the machine, and it fails when a check fails.

Run this file to renew docs/studies.md from the stored results.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.measure import ROOT, cores, machine, table, versions, write_whole
from benchmarks.run import BEGIN, END

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTIONS = {
    "depth": "activations and gradients against depth, for every placement and norm",
    "stability": "which placements learn at a high learning rate without warm-up",
    "position": "what heads need from positions",
    "extension": "longer contexts from a checkpoint, by position and distance",
    "expert": "what routers activate, and what that is worth",
    "diffusion": "diffusion objectives beside autoregression: bounds, time, samples",
}
RESULTS = ROOT / "benchmarks" / "results" / "studies"
IMAGES = ROOT / "docs" / "images"
DOCS = ROOT / "docs" / "studies.md"


@dataclass(frozen=True)
class Options:
    """Command-line settings of every study.  seeds: how many."""

    quick: bool
    seeds: int
    processes: int
    results: Path
    picture: Path


@dataclass(frozen=True)
class Check:
    """One claim and whether this run met it."""

    claim: str
    measured: str
    met: bool


@dataclass
class Study:
    """The outcome of one study.  rows: one list of texts per line of the table.  data: the raw
    figures, as far as JSON can hold them; the picture is drawn from them."""

    name: str
    question: str
    columns: list[str]
    settings: dict[str, Any]
    seeds: list[int]
    rows: list[list[str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def check(self, claim: str, measured: str, met: bool) -> None:
        self.checks.append(Check(claim, measured, bool(met)))


Measure = Callable[[Options], Study]
Draw = Callable[[Mapping[str, Any]], "Figure"]


def _single_thread() -> None:
    import torch

    torch.set_num_threads(1)


def each(
    function: Callable[[Any], Any], jobs: Sequence[Any], processes: int,
    label: Callable[[Any], str] = str,
) -> list[Any]:  # fmt: skip
    """``[function(job) for job in jobs]`` on ``processes`` single-threaded processes, started long
    jobs first if the caller sorts them so.  ``label(job)`` is printed as each one ends.  With one
    process everything runs in this one."""
    total, found = len(jobs), []
    pool = None
    if processes > 1:
        pool = multiprocessing.get_context("spawn").Pool(processes, _single_thread)
    try:
        # One job at a time per process: they are long and of different lengths.
        results = map(function, jobs) if pool is None else pool.imap(function, jobs)
        for number, (job, result) in enumerate(zip(jobs, results, strict=True), 1):
            print(f"[{number}/{total}] {label(job)}", file=sys.stderr, flush=True)
            found.append(result)
    finally:
        if pool is not None:
            pool.terminate()
            pool.join()
    return found


def write(study: Study, options: Options) -> Path:
    """``NAME.json``, whole or not at all."""
    content = {
        **asdict(study),
        "quick": options.quick,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
    }
    return write_whole(options.results / f"{study.name}.json", content)


def render(result: Mapping[str, Any]) -> str:
    """One result file as Markdown."""
    name = result["name"]
    lines = [f"### {name}", "", result["question"], ""]
    if not result["quick"]:
        lines += [f"![{QUESTIONS.get(name, name)}](images/{name}_study.png)", ""]
    lines += [table(result["columns"], result["rows"]), ""]
    for check in result["checks"]:
        verdict = "met" if check["met"] else "**not met**"
        lines.append(f"- check {check['claim']}: {check['measured']}, {verdict}")
    lines += [f"- {note}" for note in result["notes"]]
    settings = "; ".join(f"{key}: {value}" for key, value in result["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if key != "load")
    packages = ", ".join(f"{key} {result['versions'][key]}" for key in ("python", "torch"))
    toy = " **Toy sizes: proves that the code works, nothing else.**" if result["quick"] else ""
    seeds = ", ".join(map(str, result["seeds"]))
    lines += [
        f"- settings: {settings}",
        f"- {result['date']}, seeds {seeds}; {where}; {packages}.{toy}",
    ]
    return "\n".join(lines) + "\n"


def renew(docs: Path, results: Path) -> None:
    """Put all stored results between the markers of ``docs``."""
    found = [results / f"{name}.json" for name in QUESTIONS]
    parts = [render(json.loads(path.read_text("utf-8"))) for path in found if path.exists()]
    missing = [path.stem for path in found if not path.exists()]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.\n")
    text = docs.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{docs}: needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    docs.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}", "utf-8")


def options_of(name: str, arguments: argparse.Namespace, seeds: int) -> Options:
    quick = arguments.quick
    folder = Path(tempfile.gettempdir()) / "midspan-quick-results"
    for flag in ("seeds", "processes"):
        if getattr(arguments, flag) is not None and getattr(arguments, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1, got {getattr(arguments, flag)}")
    return Options(
        quick=quick,
        seeds=arguments.seeds or (1 if quick else seeds),
        processes=arguments.processes or (1 if quick else cores()),
        results=arguments.results or (folder if quick else RESULTS),
        picture=arguments.picture or (folder if quick else IMAGES) / f"{name}_study.png",
    )


def command(
    name: str, measure: Measure, draw: Draw, description: str | None, argv: list[str] | None,
    seeds: int = 3,
) -> int:  # fmt: skip
    """The command line of one study: exit code 1 when a check fails (never with --quick)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="toy sizes: proves that the code works")
    add("--seeds", type=int, metavar="N", help=f"how many seeds ({seeds}; quick: 1)")
    add("--processes", type=int, metavar="N", help="jobs at a time (all cores; quick: 1)")
    add("--results", type=Path, metavar="DIR", help="where NAME.json goes")
    add("--picture", type=Path, metavar="FILE", help="where the picture goes (a PNG file)")
    arguments = parser.parse_args(argv)
    try:
        options = options_of(name, arguments, seeds)
        study = measure(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    assert study.name == name
    path = write(study, options)
    result = json.loads(path.read_text("utf-8"))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(options.picture, dpi=110)
    if options.results == RESULTS:
        renew(DOCS, RESULTS)
    print(render(result))
    print(f"written: {path}, {options.picture}")
    return 1 if not options.quick and not all(check.met for check in study.checks) else 0


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description="Renew docs/studies.md from the results.").parse_args(argv)
    try:
        renew(DOCS, RESULTS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
