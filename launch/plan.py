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
  python launch/plan.py recipes/austen-3m.yaml model.size=7b model.mtp.depth=2 parallel.pp=8 \
      training.micro_batch=1 --micro-batches 64 --planners

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
    add("--png", metavar="FILE", help="the same as a picture")
    add(
        "--planners",
        action="store_true",
        help="also compare all pipeline planners (needs parallel.pp > 1)",
    )
    add(
        "--half-blocks",
        action="store_true",
        help="with --planners: also what blocks cut in the middle would give",
    )
    add(
        "--micro-batches",
        type=int,
        metavar="N",
        help="of a step and data rank; sets training.batch_tokens",
    )
    add(
        "--costs",
        metavar="FILE",
        help="YAML or JSON file with seconds per unit, such as {units: {t: 1, m: 1.1, h: 2}};"
        " sets parallel.pipeline.costs",
    )
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
    """What is printed; the drawings are written once everything else has succeeded."""
    files, overrides = recipes_and_overrides(options.settings)
    for name in ("world_size", "micro_batches"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be positive, got {value}")
    speed = options.flops_per_second
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--flops-per-second must be positive, got {speed:g}")
    for flag, file in (("--svg", options.svg), ("--png", options.png)):
        if file and not Path(file).parent.is_dir():
            raise ValueError(f"{flag} {file}: there is no folder {Path(file).parent}")
    if options.half_blocks and not options.planners:
        raise ValueError("--half-blocks only goes with --planners")

    from pretrain.config import load_run_config
    from pretrain.plan import make_plan, plan_json, plan_png, plan_svg, plan_text
    from pretrain.run_folder import write_atomic

    if options.costs:
        overrides.append(f"parallel.pipeline.costs={options.costs}")
    config = load_run_config(files, overrides, None)
    parallel, training = config.parallel, config.training
    world_size = options.world_size or (parallel.dp or 1) * parallel.model_parallel
    if options.planners and parallel.pp == 1:
        raise ValueError("--planners: there is one pipeline rank; set parallel.pp")
    if options.micro_batches:
        data_ranks = parallel.replicas(world_size) * parallel.fsdp
        sequences = options.micro_batches * training.micro_batch * data_ranks
        overrides.append(f"training.batch_tokens={sequences * training.sequence_length}")
    config = load_run_config(files, overrides, world_size)
    plan = make_plan(config, world_size, speed, options.planners, options.half_blocks)
    text = json.dumps(plan_json(plan), indent=2) + "\n" if options.json else plan_text(plan)
    for flag, file, draw in (("--svg", options.svg, plan_svg), ("--png", options.png, plan_png)):
        if file:
            try:
                write_atomic(Path(file), draw(plan))
            except OSError as error:
                raise ValueError(f"{flag} {file}: {error.strerror}") from None
    return text


if __name__ == "__main__":
    raise SystemExit(main())
