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

    def problems(self, total_steps: int | None = None) -> list[tuple[str, str]]:
        """(field, message) for all that is wrong, in a run of `total_steps` updates if given."""
        found = []
        if self.warmup_steps < 0:
            found.append(("warmup_steps", f"given {self.warmup_steps}; expected 0 or more"))
        if not 0 <= self.min_ratio <= 1:
            found.append(("min_ratio", f"given {self.min_ratio}; expected 0 to 1"))
        if not 0 < self.decay_fraction <= 1:
            found.append(("decay_fraction", f"given {self.decay_fraction}; expected 0 to 1, not 0"))
        default = type(self)()
        unused = ["decay_fraction", "decay_shape"] if self.kind != "wsd" else []
        unused += ["min_ratio"] if self.kind == "constant" else []
        for name in unused:
            if not found and getattr(self, name) != getattr(default, name):
                found.append((name, f"is set but kind={self.kind}: it would be ignored"))
        if found or total_steps is None:
            return found
        if total_steps < 1:
            return [("", f"given a run of {total_steps} steps; expected 1 or more")]
        start = _decay_start(self, total_steps)
        if self.warmup_steps >= total_steps:
            expected = f"expected 0 to {total_steps - 1}, as the run has {total_steps} steps"
            found.append(("warmup_steps", f"given {self.warmup_steps}; {expected}"))
        elif self.warmup_steps > start:
            expected = f"expected 0 to {start}, where the decay_fraction of {self.decay_fraction}"
            message = f"given {self.warmup_steps}; {expected} of {total_steps} steps begins"
            found.append(("warmup_steps", message))
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
