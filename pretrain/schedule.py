"""Learning-rate schedules: linear warm-up, then cosine, WSD, linear or constant.

A schedule is a pure function of the update index, so a resumed run needs no schedule state.
"""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate of update i, as a factor of the peak learning rate."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = field(
        default="cosine", metadata={"help": "curve after the warm-up"}
    )
    warmup_steps: int = field(
        default=100, metadata={"help": "updates of linear warm-up below the peak"}
    )
    min_ratio: float = field(
        default=0.1, metadata={"help": "end of the curve as a fraction of the peak"}
    )
    decay_fraction: float = field(
        default=0.2, metadata={"help": "wsd: share of the whole run that decays, at its end"}
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = field(
        default="sqrt", metadata={"help": "wsd: curve of the decay (sqrt is 1 - sqrt(progress))"}
    )

    def problems(self, total_steps: int | None = None) -> list[str]:
        """Everything wrong with this schedule, for a run of `total_steps` updates if given."""
        found = []
        if self.warmup_steps < 0:
            found.append(f"warmup_steps: {self.warmup_steps} given, allowed: 0 or more")
        if not 0 <= self.min_ratio <= 1:
            found.append(f"min_ratio: {self.min_ratio} given, allowed: 0 to 1")
        if not 0 < self.decay_fraction <= 1:
            found.append(f"decay_fraction: {self.decay_fraction} given, allowed: above 0, up to 1")
        if found or total_steps is None:
            return found
        if total_steps < 1:
            return [f"total steps: {total_steps} given, allowed: 1 or more"]
        if self.warmup_steps >= total_steps:
            found.append(
                f"warmup_steps: {self.warmup_steps} given, but the run has {total_steps} steps; "
                f"allowed: 0 to {total_steps - 1}"
            )
        elif self.warmup_steps > (start := _decay_start(self, total_steps)):
            found.append(
                f"warmup_steps: {self.warmup_steps} given, but a wsd decay_fraction of "
                f"{self.decay_fraction} starts the decay at step {start} of {total_steps}"
            )
        return found


def learning_rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor of the peak learning rate for update `step` (0 is the first of `total_steps`).

    Warm-up of W updates: (step + 1) / (W + 1), so update W is the first one at the peak. The
    curve then runs to `min_ratio`, which it reaches at index `total_steps`, one past the last
    update: no update is spent at a learning rate of zero. Beyond the end it stays there.
    """
    assert step >= 0 and total_steps >= 1
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    start = _decay_start(config, total_steps)
    progress = min(max(step - start, 0) / max(total_steps - start, 1), 1.0)
    shape = config.decay_shape if config.kind == "wsd" else config.kind
    if shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        remaining = 1 - progress
    return config.min_ratio + (1 - config.min_ratio) * remaining


def _decay_start(config: ScheduleConfig, total_steps: int) -> int:
    """The last update index at the peak: the decay runs from there to `total_steps`."""
    if config.kind != "wsd":
        return config.warmup_steps
    return total_steps - max(round(config.decay_fraction * total_steps), 1)
