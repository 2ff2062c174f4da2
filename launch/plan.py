"""Say what a run will need before it starts: parameters, memory per rank, FLOPs, pipeline timeline.

Nothing is trained and no process is started, so a laptop can plan a run on any number of ranks.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json

from launch._command import Parser, recipes_and_overrides, report

EXAMPLES = """\
examples:
  python launch/plan.py recipes/austen-3m.yaml
  python launch/plan.py recipes/austen-3m.yaml parallel.pp=4 --world-size 8 --svg timeline.svg
  python launch/plan.py recipes/austen-3m.yaml --flops-per-second 5e10

exit code: 0, or 2 when the config or the layout is wrong
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="plan.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="FILE.yaml|key=value", help="recipes and overrides")
    add(
        "--world-size", type=int, metavar="N",
        help="number of ranks; default: the product of the parallel degrees",
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead")
    add("--svg", metavar="FILE", help="also draw the pipeline timeline of one step")
    add(
        "--flops-per-second", type=float, metavar="X",
        help="FLOP/s that one rank achieves; default: 40 %% of metrics.peak_tflops",
    )  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    try:
        options = parser().parse_intermixed_args(argv)
        print(answer(options), end="")
    except (ValueError, OSError) as error:
        return report(error)
    return 0


def answer(options: argparse.Namespace) -> str:
    """What is printed; the drawing is written once everything else has succeeded."""
    files, overrides = recipes_and_overrides(options.settings)
    if options.world_size is not None and options.world_size < 1:
        raise ValueError(f"--world-size must be positive, got {options.world_size}")
    speed = options.flops_per_second
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--flops-per-second must be positive, got {speed:g}")
    if options.svg and not Path(options.svg).parent.is_dir():
        raise ValueError(f"--svg {options.svg}: there is no folder {Path(options.svg).parent}")

    from pretrain.config import load_run_config
    from pretrain.plan import make_plan, plan_json, plan_svg, plan_text
    from pretrain.run_folder import write_atomic

    config = load_run_config(files, overrides, None)
    parallel = config.parallel
    world_size = options.world_size or (parallel.dp or 1) * parallel.model_parallel
    config = load_run_config(files, overrides, world_size)
    plan = make_plan(config, world_size, speed)
    text = json.dumps(plan_json(plan), indent=2) + "\n" if options.json else plan_text(plan)
    if options.svg:
        try:
            write_atomic(Path(options.svg), plan_svg(plan))
        except OSError as error:
            raise ValueError(f"--svg {options.svg}: {error.strerror}") from None
    return text


if __name__ == "__main__":
    raise SystemExit(main())
