"""What to do about a NaN, an infinity or a loss spike, decided before the optimizer step.

Every rank reaches the same decision: local findings are reduced with MAX first, and all further
bookkeeping follows from the reduced finding. The state is small, and exact in a checkpoint, so a
resumed run decides as the undisturbed one would have.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain.run_folder import RunFolder, append_jsonl, heal_jsonl, read_jsonl

Policy = Literal["stop", "skip", "warn"]
Action = Literal["proceed", "warn", "skip", "stop"]
_FINE, _SPIKE, _NON_FINITE = 0, 1, 2


@dataclass(frozen=True)
class HealthConfig:
    """Policies for non-finite values and loss spikes."""

    nan: Policy = field(
        default="stop", metadata={"help": "on a NaN or infinite loss or gradient norm"}
    )
    spike: Policy = field(default="warn", metadata={"help": "on a loss spike"})
    spike_sigma: float = field(
        default=6.0, metadata={"help": "a spike is a loss above mean + this many std deviations"}
    )
    window: int = field(
        default=128, metadata={"help": "accepted steps over which mean and deviation are taken"}
    )
    spike_warmup: int = field(
        default=32, metadata={"help": "accepted steps before the first spike can be called"}
    )
    max_consecutive_skips: int = field(
        default=10, metadata={"help": "the run stops at this many skipped steps in a row"}
    )
    skip_steps: tuple[int, ...] = field(
        default=(), metadata={"help": "steps to skip on purpose, for batches known to be bad"}
    )

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if not self.spike_sigma > 0:
            found.append(("spike_sigma", f"given {self.spike_sigma}; expected above 0"))
        if self.window < 2:
            found.append(("window", f"given {self.window}; expected 2 or more"))
        if not 2 <= self.spike_warmup <= max(self.window, 2):
            expected = f"expected 2 to the window of {self.window}"
            found.append(("spike_warmup", f"given {self.spike_warmup}; {expected}"))
        if self.max_consecutive_skips < 1:
            found.append(
                ("max_consecutive_skips", f"given {self.max_consecutive_skips}; expected 1 or more")
            )
        if any(step < 1 for step in self.skip_steps):
            found.append(("skip_steps", f"given {self.skip_steps}; steps count from 1"))
        return found


@dataclass(frozen=True)
class Decision:
    """What every rank does with this step, and why (empty reason: nothing was found)."""

    action: Action
    reason: str = ""

    @property
    def takes_step(self) -> bool:
        """Whether the optimizer may apply this step's gradients."""
        return self.action in ("proceed", "warn")


class HealthMonitor:
    """Judges each step's loss and gradient norm. Same calls on all ranks, same answer on all.

    `all_reduce_max` maps this rank's number to the maximum over all ranks. It is called exactly
    once per `check`, with a finite number.
    """

    def __init__(
        self,
        config: HealthConfig,
        all_reduce_max: Callable[[float], float] = lambda value: value,
    ) -> None:
        self.config = config
        self.all_reduce_max = all_reduce_max
        self.accepted: deque[float] = deque(maxlen=config.window)
        self.consecutive_skips = 0
        self.total_skips = 0

    def check(self, step: int, loss: float, grad_norm: float) -> Decision:
        """Judge step `step` (1 is the first) before its update.

        `loss` (nats per token) and `grad_norm` should be the reduced figures, the same on every
        rank; where one rank sees a problem that the others do not, all follow it.
        """
        finding = int(self.all_reduce_max(float(self._finding(loss, grad_norm))))
        decision = self._decide(step, finding, loss, grad_norm)
        if decision.action == "skip":
            self.total_skips += 1
            if step not in self.config.skip_steps:
                self.consecutive_skips += 1
                decision = self._limit(decision)
        elif decision.takes_step:
            self.consecutive_skips = 0
            if finding != _NON_FINITE:
                self.accepted.append(loss)
        return decision

    def _finding(self, loss: float, grad_norm: float) -> int:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return _NON_FINITE
        return _SPIKE if loss > self.spike_threshold() else _FINE

    def spike_threshold(self) -> float:
        """mean + sigma * population standard deviation of the window; infinite in warm-up."""
        count = len(self.accepted)
        if count < self.config.spike_warmup:
            return math.inf
        mean = math.fsum(self.accepted) / count
        variance = math.fsum((loss - mean) ** 2 for loss in self.accepted) / count
        return mean + self.config.spike_sigma * math.sqrt(variance)

    def _decide(self, step: int, finding: int, loss: float, grad_norm: float) -> Decision:
        if step in self.config.skip_steps:
            return Decision("skip", f"step {step}: skipped on purpose (skip_steps)")
        if finding == _NON_FINITE:
            what = f"loss {loss:g}, gradient norm {grad_norm:g}"
            if math.isfinite(loss) and math.isfinite(grad_norm):
                what += " here, not finite on another rank"
            return Decision(self.config.nan, f"step {step}: not finite: {what}")
        if finding == _SPIKE:
            threshold = self.spike_threshold()
            what = f": {loss:.4f} above {threshold:.4f}" if loss > threshold else " on another rank"
            return Decision(
                self.config.spike,
                f"step {step}: loss spike{what} (mean + {self.config.spike_sigma:g} sigma of the "
                f"last {len(self.accepted)} steps)",
            )
        return Decision("proceed")

    def _limit(self, decision: Decision) -> Decision:
        if self.consecutive_skips < self.config.max_consecutive_skips:
            return decision
        return Decision(
            "stop", f"{decision.reason}; {self.consecutive_skips} steps in a row were skipped"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that give the same decisions after `load_state_dict`, bit for bit."""
        return {
            "accepted": list(self.accepted),
            "consecutive_skips": self.consecutive_skips,
            "total_skips": self.total_skips,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accepted = deque(state["accepted"], maxlen=self.config.window)
        self.consecutive_skips = state["consecutive_skips"]
        self.total_skips = state["total_skips"]


class HealthLog:
    """Main rank: one line in `health.jsonl` for each step with a finding, with its batch."""

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.health
        heal_jsonl(self.path)

    def record(
        self,
        step: int,
        decision: Decision,
        *,
        loss: float,
        grad_norm: float,
        first_sample: int,
        last_sample: int,
    ) -> dict[str, float]:
        """Write the line; returns the figures for `metrics.jsonl` (samples are inclusive)."""
        samples = {"health/first_sample": first_sample, "health/last_sample": last_sample}
        append_jsonl(
            self.path,
            {
                "step": step,
                "action": decision.action,
                "reason": decision.reason,
                "loss": loss,
                "grad_norm": grad_norm,
                "first_sample": first_sample,
                "last_sample": last_sample,
            },
        )
        return {**samples, "health/skipped": float(decision.action == "skip")}


def not_finite_since(folder: RunFolder, last: int) -> int:
    """The step whose update made the weights non-finite, given that they are so after ``last``:
    the first of the findings in a row that reach it."""
    found = {
        row["step"]
        for row in (read_jsonl(folder.health) if folder.health.exists() else ())
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
    }
    while last - 1 in found:
        last -= 1
    return last
