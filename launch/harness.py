"""Run tasks of lm-evaluation-harness on a trained model: a run, a checkpoint or an exported folder.

Log-likelihoods of diffusion models are estimates of a lower bound, from --draws forward passes per
request and the same ones every time; of an answer of few tokens the bound is exact.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from launch._command import Parser, exit_code_of

EXAMPLES = """\
examples:
  python launch/harness.py runs/masked --tasks arc_easy,piqa --limit 100
  python launch/harness.py exported --tasks mine --include-path tasks --draws 32
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="harness.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="RUN_OR_CHECKPOINT_OR_HF_FOLDER")
    add("--tasks", required=True, metavar="A,B", help="names of tasks")
    add("--include-path", metavar="DIR", help="folder with tasks of your own")
    add("--limit", type=int, metavar="N", help="questions per task (all)")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--draws", type=int, default=128, metavar="N", help="of noise per request, even (128)")
    add("--guidance", type=float, default=0.0, metavar="W", help="masked: classifier-free (0)")
    add("--whole", action="store_true", help="masked, block: score context and answer together")
    add("--truncate", action="store_true", help="cut the beginning of contexts that are too long")
    add("--batch", type=int, default=16, metavar="N", help="sequences per forward pass (16)")
    add("--seed", type=int, default=0, metavar="N", help="of the noise (0)")
    add("--step", type=int, metavar="N", help="which checkpoint of the run (the latest)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (the model's own)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, ... (cpu)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: list[str] | None) -> None:
    options = parser().parse_args(argv)
    results = evaluate(options)
    if options.json:
        print(json.dumps(results))
    else:
        print_results(results)


def evaluate(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Task -> figures, under the names that the harness gives them."""
    from launch.generate import device_of, tokenizer_of
    from models.likelihood import Scoring
    from pretrain.lm_eval_adapter import TextScorer, harness, run_tasks
    from pretrain.trained import build_model, open_trained

    for name in ("limit", "batch"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, given {getattr(options, name)}")
    if not math.isfinite(options.guidance):
        raise ValueError(f"--guidance must be finite, given {options.guidance}")
    scoring = Scoring(
        draws=options.draws, seed=options.seed, batch=options.batch, guidance=options.guidance,
        whole=options.whole, greedy=True,
    )  # fmt: skip
    harness()
    trained, device = open_trained(options.source, options.step), device_of(options.device)
    words = tokenizer_of(trained, options.tokenizer)
    model = build_model(trained, device=device)
    scorer = TextScorer(trained, model, words, scoring, options.truncate)
    names = [name for name in options.tasks.split(",") if name]
    return run_tasks(
        scorer, names, options.include_path, num_fewshot=options.num_fewshot, limit=options.limit
    )


def print_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    for task, figures in results.items():
        for name, value in figures.items():
            metric, _, filtered = name.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            behind = "" if error is None else f" ± {error:.4f}"
            print(f"{task:<30} {metric:<20} {value:.4f}{behind}")


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
