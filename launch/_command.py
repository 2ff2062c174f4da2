"""What the commands share: a wrong use is one ``error:`` line, and exit code 2."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

PATIENCE_SECONDS = 5.0


class Parser(argparse.ArgumentParser):
    """Raises ``ValueError`` where argparse would print its own text and leave."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def recipes_and_overrides(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which arguments name files, and which are ``key=value``.  ValueError without a file."""
    files = [setting for setting in settings if _is_file_name(setting)]
    if not files:
        raise ValueError("give at least one recipe file, for example recipes/austen-3m.yaml")
    return files, [setting for setting in settings if setting not in files]


def _is_file_name(setting: str) -> bool:
    if "=" in setting:  # a path may hold one too, as in runs/lr=1/config.yaml
        return Path(setting).is_file()
    return setting.endswith((".yaml", ".yml")) or Path(setting).exists()


def exit_code_of(command: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Run a command of one process: 0, 2 after its ``error:`` line, 130 after Ctrl-C."""
    try:
        command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0


def report(error: Exception) -> int:
    """Print the error once for all ranks, and return the exit code.

    What every rank found on its own, in a recipe for example, is printed by the main rank:
    torchrun then ends the others while they wait here.  One that is still there found something
    that the main rank did not.
    """
    from parallel.agreement import is_agreed  # loads torch, which --help need not wait for

    rank = int(os.environ.get("RANK", "0"))
    if rank and is_agreed(error):
        return 2
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE_SECONDS)
    where = f"rank {rank}: " if rank else ""
    print(f"error: {where}{error}", file=sys.stderr, flush=True)
    return 2
