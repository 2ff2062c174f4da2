"""What the commands share: a wrong use is one ``error:`` line, and exit code 2."""

import argparse
import os
import signal
import sys
import time
from typing import NoReturn

PATIENCE_SECONDS = 5.0


class Parser(argparse.ArgumentParser):
    """Raises ``ValueError`` where argparse would print its own text and leave."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


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
