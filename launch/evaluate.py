"""Loss, perplexity and bits per byte of a run or checkpoint on its validation data.

Those of a diffusion model are upper bounds, and are marked so.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import os
from collections.abc import Mapping

from launch._command import Parser, report

EXAMPLES = """\
examples:
  python launch/evaluate.py runs/austen-3m
  python launch/evaluate.py runs/austen-3m/checkpoints/step_00000250 --sequences 64
  torchrun --standalone --nproc-per-node 2 launch/evaluate.py runs/austen-3m parallel.tp=2
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="evaluate.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN|CHECKPOINT", help="a run folder, or a step_* folder")
    add("overrides", nargs="*", metavar="key=value", help="settings changed for the evaluation")
    add("--sequences", type=int, metavar="N", help="validation sequences (default: all)")
    add("--draws", type=int, metavar="N", help="of noise per sequence, diffusion only (the run's)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    try:
        options = parser().parse_intermixed_args(argv)
        figures = evaluate(options)
    except (ValueError, OSError) as error:
        return report(error)
    if int(os.environ.get("RANK", "0")) == 0:
        if options.json:
            print(json.dumps(figures))
        else:
            print_figures(figures)
    return 0


def print_figures(figures: Mapping[str, float | int]) -> None:
    from pretrain.metrics import follows_bound

    for name, value in figures.items():
        if name == "bound":
            continue
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        most = "at most " if figures["bound"] and follows_bound(f"eval/{name}") else ""
        print(f"{name:<20} {most}{shown}")


def evaluate(options: argparse.Namespace) -> dict[str, float | int]:
    import torch
    import torch.distributed as dist

    from parallel.apply import BuildOptions
    from parallel.checkpoint import load_checkpoint
    from parallel.mesh import build_mesh, initialize_process_group
    from pretrain.engine import build_engine
    from pretrain.evaluate import Evaluator
    from pretrain.objectives.base import build_objective
    from pretrain.preflight import check_evaluation
    from pretrain.state import checkpoint_config, weights
    from pretrain.trained import find_checkpoint
    from pretrain.trainer import choose_device

    for name in ("sequences", "draws"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ValueError(f"--{name} must be at least 1, given {given}")
    path = find_checkpoint(options.source)
    limits = {"sequences": options.sequences or 10**12}
    if options.draws is not None:
        limits["draws"] = options.draws
    config = checkpoint_config(path, options.overrides, evaluation=limits)
    if not config.data.validation:
        raise ValueError(f"{path}: its run has no data.validation; give one as an override")
    device = choose_device(config)
    check_evaluation(config, device, path)
    initialize_process_group(device, config.parallel.timeout_minutes)
    try:
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        choice = BuildOptions(
            dtype=config.precision.weight_dtype,
            compute_dtype=config.precision.compute_dtype,
            attention_backend=config.kernels.attention,
            initialize=False,
        )
        length = config.training.sequence_length
        mesh = build_mesh(config.parallel, device)
        engine = build_engine(config.model, config.parallel, mesh, choice, config.slots)
        load_checkpoint(path, weights(engine.model), group)
        with torch.no_grad():
            objective = build_objective(config.objective, config.model)
            evaluator = Evaluator(config, engine, objective)
            figures = evaluator.run()
        tokens = evaluator.sequences * length
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {name.removeprefix("eval/"): value for name, value in figures.items()} | {
        "tokens": tokens,
        "bound": objective.is_bound,
    }


if __name__ == "__main__":
    raise SystemExit(main())
