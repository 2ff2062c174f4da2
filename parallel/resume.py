"""May a run go on from a checkpoint that was saved under another configuration?

Three answers, by the part of the configuration that differs: parts that define the experiment
(model, data, objective, seed) are refused unless allowed by name; parts that must not change
the result beyond rounding (layout, kernels, logging, where things are stored) are free;
everything else (learning rate, length, batch size) changes the run from here on, and is shown.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from parallel.checkpoint_format import CheckpointError

REFUSED, CHANGES, FREE = "refused", "changes the run from here on", "makes no difference"
ABSENT = "(not set)"

# By dotted key; the longest prefix counts, and CHANGES where none fits.
POLICY = {
    "model": REFUSED,
    "objective": REFUSED,
    "data": REFUSED,
    "data_fingerprint": REFUSED,
    "tokenizer_fingerprint": REFUSED,
    "data.validation": FREE,
    "data.tokenizer": FREE,
    "seed": REFUSED,
    "training": CHANGES,
    "training.micro_batch": FREE,
    "optimizer": CHANGES,
    "schedule": CHANGES,
    "precision": CHANGES,
    "health": CHANGES,
    "parallel": FREE,
    "kernels": FREE,
    "device": FREE,
    "deterministic": FREE,
    "evaluation": FREE,
    "checkpoint": FREE,
    "metrics": FREE,
    "finish": FREE,
    "name": FREE,
    "runs_folder": FREE,
}


@dataclass(frozen=True)
class Difference:
    """One setting with two values, and what its change means (REFUSED, CHANGES or FREE)."""

    key: str
    saved: Any
    current: Any
    effect: str

    @property
    def part(self) -> str:
        """The name that allows it: ``model``, ``data``, ``seed``, ..."""
        return "data" if self.key.endswith("_fingerprint") else self.key.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.key}: {self.saved!r} -> {self.current!r}"


def compare_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Every setting that differs between two nested mappings, by dotted key.

    Where both hold a ``data_fingerprint``, the fingerprint alone tells whether the data are
    the same: files that moved are no difference.
    """
    old, new = _flatten(saved), _flatten(current)
    fingerprint = saved.get("data_fingerprint")
    same_data = fingerprint is not None and fingerprint == current.get("data_fingerprint")
    differences = []
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key, ABSENT), new.get(key, ABSENT)
        # After JSON a tuple is a list, and 1 and 1.0 are the same setting.
        if before == now:
            continue
        effect = FREE if same_data and key.startswith("data.") else _effect(key)
        differences.append(Difference(key, before, now, effect))
    return differences


def describe_mismatch(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """A readable diff, ``saved -> current``, one setting a line; empty if nothing differs."""
    differences = compare_configs(saved, current)
    blocks = []
    for effect in (REFUSED, CHANGES, FREE):
        lines = [f"  {difference}" for difference in differences if difference.effect == effect]
        if lines:
            blocks.append("\n".join([f"{effect}:", *lines]))
    return "\n".join(blocks)


def require_compatible(
    saved: Mapping[str, Any], current: Mapping[str, Any], allow: Collection[str] = ()
) -> str:
    """The diff for the log, or CheckpointError if a refused part differs and its name
    (``model``, ``data``, ``objective``, ``seed``) is not in ``allow``."""
    refused = sorted(
        {d.part for d in compare_configs(saved, current) if d.effect == REFUSED} - set(allow)
    )
    text = describe_mismatch(saved, current)
    if refused:
        both = ",".join(sorted({*refused, *allow}))
        raise CheckpointError(
            f"this run's {', '.join(refused)} differ{'s' * (len(refused) == 1)} from the "
            f"checkpoint's (saved -> current):\n"
            f"{text}\nGo back to the saved settings, give a new experiment another name, or go on "
            f"regardless with checkpoint.allow=[{both}]"
        )
    return text


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _listed(value)
    return flat


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _effect(key: str) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        effect = POLICY.get(".".join(parts[:length]))
        if effect is not None:
            return effect
    return CHANGES
