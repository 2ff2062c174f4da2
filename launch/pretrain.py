"""Train a model, evaluate, export and sample it: one run, described by recipes and overrides."""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import signal
from typing import Any

from launch._command import Parser, recipes_and_overrides, report

EXAMPLES = """\
examples:
  # one process; two that share each batch; four that share each matrix and the layers
  python launch/pretrain.py recipes/austen-3m.yaml
  torchrun --standalone --nproc-per-node 2 launch/pretrain.py recipes/austen-3m.yaml
  torchrun --standalone --nproc-per-node 4 launch/pretrain.py recipes/austen-3m.yaml \\
      parallel.tp=2 parallel.pp=2
  # another run that differs in one thing
  python launch/pretrain.py recipes/austen-3m.yaml name=layernorm model.norm=layer
  # what it would need; every setting there is
  python launch/pretrain.py recipes/austen-3m.yaml parallel.pp=4 --dry-run --world-size 4
  python launch/pretrain.py --keys

Several files and overrides are merged left to right.  The same command continues a run that was
interrupted at any point.  A finished run is not trained again: its export, sample and report are
made again, more training.steps continue it, and another name=... begins a new one.
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pretrain.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="FILE.yaml|key=value", help="recipes and overrides")
    add("--dry-run", action="store_true", help="validate, print the plan, and stop")
    add("--print-config", action="store_true", help="print the resolved config, and stop")
    add("--keys", action="store_true", help="list every setting with default and meaning")
    add("--world-size", type=int, metavar="N", help="processes to plan for (with --dry-run)")
    return parser


def main(argv: list[str] | None = None) -> int:
    try:
        options = parser().parse_intermixed_args(argv)
        if options.keys:
            return print_keys(options)
        return start(options, argv)
    except (ValueError, OSError) as error:
        return report(error)
    except KeyboardInterrupt:
        say_interrupted()
        return 130


def print_keys(options: argparse.Namespace) -> int:
    if options.settings:
        raise ValueError(f"--keys takes no recipe or setting, given {options.settings[0]!r}")

    from pretrain.config import RunConfig
    from pretrain.describe import describe

    print(describe(RunConfig), end="")
    return 0


def start(options: argparse.Namespace, argv: list[str] | None) -> int:
    if options.world_size is not None and not options.dry_run:
        raise ValueError("--world-size only goes with --dry-run; torchrun sets it for a run")
    if options.dry_run and options.print_config:
        raise ValueError("give one of --dry-run and --print-config")
    if options.world_size is not None and options.world_size < 1:
        raise ValueError(f"--world-size must be at least 1, given {options.world_size}")
    files, overrides = recipes_and_overrides(options.settings)

    from pretrain.config import load_run_config
    from pretrain.decode import dump_yaml

    world_size = options.world_size or int(os.environ.get("WORLD_SIZE", "1"))
    config = load_run_config(files, overrides, None if options.print_config else world_size)
    if options.print_config:
        print(dump_yaml(config), end="")
        return 0
    if options.dry_run:
        from pretrain.plan import describe_plan
        from pretrain.preflight import check_data, check_initial_weights

        more = check_data(config) + check_initial_weights(config)
        more += "".join(f"{note}\n" for note in config.model.notes(config.slots))
        print(describe_plan(config, world_size) + more, end="")
        return 0

    from pretrain.run import run

    return run(config, argv if argv is not None else sys.argv[1:])


def leave(number: int, frame: Any) -> None:
    """End here: before the training loop takes signals over there is nothing to save, and some
    libraries drop an exception that is raised while they are imported."""
    say_interrupted()
    os._exit(130)


def say_interrupted() -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted; the same command goes on from the last checkpoint\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, leave)
    raise SystemExit(main())
