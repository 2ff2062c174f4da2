"""Run the benchmarks one after the other, print their tables and renew docs/benchmarks.md."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import difflib
import json
import subprocess
import time

from benchmarks.measure import ROOT, add_common, common, render

QUESTIONS = {
    "training_throughput": "training speed of one process against transformers and litgpt",
    "mtp_pipeline": "every planner on multi-token prediction, against torch.distributed.pipelining",
    "sleeping_pipeline": "the executor against the simulator on four ranks whose stages sleep",
    "pipeline_executor": "1F1B and interleaved 1F1B against torch.distributed.pipelining",
    "diffusion_throughput": "training speed of diffusion objectives beside next-token prediction",
    "head_memory": "memory and time of the chunked head against plain cross-entropy",
    "prepare_throughput": "tokenisation speed against datasets.map and the tokenizer alone",
    "loader": "start-up and speed of the sampler on a billion windows",
    "gpu": "parity on CUDA, speed and MFU of a 1.3B shape (only when asked for, or with a GPU)",
}
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
DOCS = ROOT / "docs" / "benchmarks.md"


def renew(docs: Path, results: Path) -> None:
    """Put the tables of all result files between the markers of ``docs``."""
    found = [results / f"{name}.json" for name in QUESTIONS]
    tables = [render(json.loads(path.read_text())) for path in found if path.exists()]
    missing = [path.stem for path in found if not path.exists()]
    if missing:
        tables.append(f"Not measured yet: {', '.join(missing)}.\n")
    text = docs.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{docs}: needs one line {BEGIN} and one line {END}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    docs.write_text(f"{before}{BEGIN}\n\n" + "\n".join(tables) + f"\n{END}{after}")


def chosen(names: list[str]) -> list[str]:
    for name in names:
        if name not in QUESTIONS:
            near = difflib.get_close_matches(name, QUESTIONS, 1, 0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"no benchmark {name!r}: there are {', '.join(QUESTIONS)}{hint}")
    if names:
        return names
    import torch

    return [name for name in QUESTIONS if name != "gpu" or torch.cuda.is_available()]


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (all)")
    parser.add_argument("--list", action="store_true", help="say which there are, and stop")
    parser.add_argument("--render", action="store_true", help="only renew docs/benchmarks.md")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    add_common(parser)
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, question in QUESTIONS.items():
            print(f"{name:20} {question}")
        return 0
    options = common(arguments)
    failed = []
    for name in [] if arguments.render else chosen(arguments.names):
        print(f"=== {name}: {QUESTIONS[name]}", flush=True)
        start = time.monotonic()
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]
        command += ["--results", str(options.results), "--threads", str(options.threads)]
        command += ["--repeats", str(options.repeats)]
        command += ["--quick"] if options.quick else []
        command += ["--peers", options.peers] if options.peers else []
        # A process of its own: no benchmark inherits another's memory, threads or caches.
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"=== {name}: {time.monotonic() - start:.0f} s\n", flush=True)
    if not options.quick:  # toy figures never reach the documentation
        renew(arguments.docs, options.results)
    if failed:
        raise ValueError(f"failed: {', '.join(failed)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
