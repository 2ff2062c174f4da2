"""Say what differs between two runs, and prove that nothing else does.

A and B are run folders, or configuration files (then only the configurations are compared).
Differences are grouped into factors such as model.norm or parallel.tp. Exit code 0 means that there
is at most one factor; with --expect, that every difference lies in what was expected; 1 means more
than that, 2 an error. Hashes of initial weights and data, and the versions of the code and of the
libraries that compute, count as well, unless they follow from a factor in the configuration.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch._command import Parser
from pretrain.decode import diff, encode
from pretrain.metrics import unit_of
from pretrain.run_folder import RunFolder, json_value, read_jsonl, read_metrics
from pretrain.yaml_text import load_yaml_files, nearest

# Configuration that names, stores or shows a run and cannot change its training.
BOOKKEEPING = (
    "name runs_folder metrics finish evaluation.every checkpoint.every checkpoint.keep_last "
    "checkpoint.keep_every checkpoint.asynchronous checkpoint.allow"
).split()
# Configuration from which another initial weight or batch can follow.
CAUSES = {
    "init_hash": ("model", "objective", "seed", "precision.weights", "checkpoint.init_from"),
    "parameters": ("model", "objective"),
    "tokenizer_hash": ("data.train",),
    "data_hash": ("data.train", "data.samples", "training.sequence_length", "seed"),
}
COMPUTING_PACKAGES = (
    "torch numpy triton tokenizers megatron-core transformer-engine flash-attn apex"
)
EXAMPLES = """\
examples:
  python launch/compare.py runs/austen-3m runs/layernorm --expect model.norm
  python launch/compare.py recipes/austen-3m.yaml mine.yaml
"""
SHOWN_GROUPS = ("loss", "eval", "optim", "throughput", "memory", "data")
TOKENIZER_BOUND_UNITS = ("nats/token",)


@dataclass(frozen=True)
class Run:
    """What one side offers; a configuration file has a configuration and nothing else."""

    path: str
    config: Mapping[str, Any]
    fingerprints: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    status: str = "configuration file"


@dataclass(frozen=True)
class Difference:
    """One place where the two differ; `factor` is empty where that is no factor of its own."""

    path: str
    a: Any
    b: Any
    factor: str
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of both runs at the last step at which both have it."""

    key: str
    unit: str
    step: int
    a: float
    b: float
    note: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.note else self.b - self.a


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="compare.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="run folder or configuration file")
    parser.add_argument("b", metavar="B", help="run folder or configuration file")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="PATH",
        help="the factor that may differ, such as model.norm; can be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    try:
        options = parser.parse_args(argv)
        a, b = load(options.a), load(options.b)
        require_known(options.expect, a, b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = find_differences(a, b)
    figures = compare_figures(a, b, tokenizers_differ(a, b, differences))
    code, verdict = judge(
        differences, options.expect, proven=bool(a.fingerprints and b.fingerprints)
    )
    if options.json:
        print(json.dumps(as_json(a, b, differences, figures, code, verdict), indent=2))
    else:
        print_report(a, b, differences, figures)
        print(f"\n{verdict}")
    return code


def load(given: str) -> Run:
    """Read a run folder or a configuration file. ValueError says what is missing."""
    path = Path(given)
    if path.is_file():
        from pretrain.config import load_run_config  # it loads torch, which run folders do not need

        return Run(given, encode(load_run_config([path], [], None)))
    if not path.is_dir():
        known = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"{given}: no such run folder or file{nearest(path.name, known)}")
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ValueError(f"{given}: not a run folder: it has no {folder.config.name}")
    _require_one_configuration(folder)
    return Run(
        given,
        load_yaml_files([folder.config])[str(folder.config)],
        _read_json(folder.fingerprints),
        _read_json(folder.environment),
        read_metrics(folder.metrics) if folder.metrics.exists() else (),
        folder.read_status() or "not started",
    )


def require_known(expected: Iterable[str], a: Run, b: Run) -> None:
    """ValueError for a name that can be no difference of the two."""
    known: set[str] = set()
    for run in (a, b):
        environment = {"environment": run.environment or {}}
        for tree in (run.config, run.fingerprints or {}, environment):
            known.update(_paths(tree))
    for name in expected:
        if name not in known:
            text = f"--expect {name}: neither side has such a setting{nearest(name, known)}"
            raise ValueError(text)


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every section and every leaf."""
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _require_one_configuration(folder: RunFolder) -> None:
    """ValueError for a run whose settings changed between its starts: ``config.yaml`` holds the
    latest ones, which say nothing about the steps before."""
    for row in read_jsonl(folder.resume_history) if folder.resume_history.exists() else ():
        if row.get("changed"):
            raise ValueError(
                f"{folder.path}: its settings changed after step {row['step']} "
                f"({'; '.join(row['changed'])}), so no one configuration made it and a comparison "
                "would prove nothing"
            )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: it has no {path.name}; has the run started?") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def find_differences(a: Run, b: Run) -> list[Difference]:
    """Every difference, the configuration first, so that consequences can name their cause."""
    found = []
    for path, left, right in _leaves(diff(a.config, b.config)):
        if within(path, BOOKKEEPING):
            found.append(Difference(path, left, right, "", "cannot change training"))
        else:
            found.append(Difference(path, left, right, ".".join(path.split(".")[:2])))
    factors = _factors(found)
    if a.fingerprints is not None and b.fingerprints is not None:
        for key, left, right in diff(a.fingerprints, b.fingerprints):
            found.append(_fingerprint_difference(key, left, right, factors))
    if a.environment is not None and b.environment is not None:
        for path, left, right in diff(a.environment, b.environment):
            factor = _environment_factor(path)
            note = "" if factor else "where and how it ran"
            found.append(Difference(f"environment.{path}", left, right, factor, note))
    return found


def _fingerprint_difference(key: str, a: Any, b: Any, factors: Iterable[str]) -> Difference:
    if a is None or b is None:
        return Difference(key, a, b, "", "not recorded by an older version")
    causes = [factor for factor in factors if _can_cause(factor, key)]
    note = f"follows from {', '.join(causes)}" if causes else "follows from nothing above"
    return Difference(key, a, b, "" if causes else key, note)


def _leaves(found: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """The same differences; a section that one side lacks is listed key by key."""
    for path, a, b in found:
        section = a if b is None else b if a is None else None
        if isinstance(section, Mapping) and section:
            pairs = {k: (v, None) if b is None else (None, v) for k, v in section.items()}
            yield from _leaves((f"{path}.{key}", *pair) for key, pair in pairs.items())
        else:
            yield path, a, b


def within(path: str, sections: Iterable[str]) -> bool:
    """Whether a dotted path is one of ``sections`` or lies below one."""
    return any(f"{path}.".startswith(f"{section}.") for section in sections)


def _can_cause(factor: str, fingerprint: str) -> bool:
    return within(factor, CAUSES.get(fingerprint, ())) or "tokenizer" in factor.split(".")


def _environment_factor(path: str) -> str:
    if path == "source_hash" or path == "python":
        return f"environment.{path}"
    group, _, package = path.partition(".")
    counts = group == "packages" and package in COMPUTING_PACKAGES.split()
    return f"environment.{path}" if counts else ""


def _factors(differences: Iterable[Difference]) -> list[str]:
    return list(dict.fromkeys(d.factor for d in differences if d.factor))


def judge(
    differences: Sequence[Difference], expected: Sequence[str], *, proven: bool
) -> tuple[int, str]:
    """Exit code and the last line of the report."""
    factors = _factors(differences)
    where = "" if proven else " (configurations alone: weights, data and code were not compared)"
    if expected:
        paths = [d.path for d in differences if d.factor]
        beyond = [path for path in paths if not within(path, expected)]
        if beyond:
            return 1, f"beyond {', '.join(expected)}, these differ: {', '.join(beyond)}{where}"
        nothing = "" if factors else ", and not even that"
        return 0, f"nothing but {', '.join(expected)} differs{nothing}{where}"
    if not factors:
        return 0, f"no difference that can change training{where}"
    if len(factors) == 1:
        return 0, f"one factor: {factors[0]}{where}"
    return 1, f"{len(factors)} factors: {', '.join(factors)}{where}"


def tokenizers_differ(a: Run, b: Run, differences: Iterable[Difference]) -> bool:
    """By their hashes; where a run has none, by its settings."""
    hashes = [(run.fingerprints or {}).get("tokenizer_hash") for run in (a, b)]
    if None not in hashes:
        return hashes[0] != hashes[1]
    return any(
        part in ("tokenizer", "vocab_size") for d in differences for part in d.path.split(".")
    )


def compare_figures(a: Run, b: Run, other_tokenizer: bool) -> list[Figure]:
    """Figures of both runs, each at the last step at which both have it."""
    left, right = ({row["step"]: row for row in run.rows} for run in (a, b))
    last: dict[str, int] = {}
    for step in sorted(left.keys() & right.keys()):
        for key in left[step].keys() & right[step].keys():
            if key.partition("/")[0] in SHOWN_GROUPS:
                last[key] = step
    figures = []
    for key in sorted(last, key=lambda key: (SHOWN_GROUPS.index(key.partition("/")[0]), key)):
        step, unit = last[key], unit_of(key) or ""
        depends = unit in TOKENIZER_BOUND_UNITS or key.endswith("perplexity")
        note = "tokenizers differ" if other_tokenizer and depends else ""
        figures.append(Figure(key, unit, step, left[step][key], right[step][key], note))
    return figures


def curve_distance(a: Run, b: Run) -> str:
    """How far apart the two training curves are, in one sentence."""
    left, right = (
        {r["step"]: r["loss/train"] for r in x.rows if "loss/train" in r} for x in (a, b)
    )
    steps = sorted(left.keys() & right.keys())
    if not steps:
        return "The two runs have no logged step in common."
    if all(left[step] == right[step] for step in steps):
        return f"loss/train is bitwise equal at all {len(steps)} common logged steps."
    farthest = max(steps, key=lambda step: abs(left[step] - right[step]))
    gap = abs(left[farthest] - right[farthest])
    common = f"{len(steps)} common logged steps"
    return f"Largest gap of loss/train over {common}: {gap:.4g} (step {farthest})."


def print_report(
    a: Run, b: Run, differences: Sequence[Difference], figures: Sequence[Figure]
) -> None:
    for label, run in (("A", a), ("B", b)):
        reached = f", step {run.rows[-1]['step']}" if run.rows else ""
        print(f"{label}  {run.path}  ({run.status}{reached})")
    print("\nDifferences" if differences else "\nDifferences: none")
    _print_table([(d.path, _show(d.a), _show(d.b), d.note) for d in differences], "<<<<")
    if a.fingerprints is not None and b.fingerprints is not None:
        print(f"Equal: {', '.join(equal_parts(a, b)) or 'no fingerprint'}")
    if not (a.rows and b.rows):
        return
    print("\nFigures, each at the last step that both runs have")
    rows = [("", "unit", "step", "A", "B", "B - A")]
    for f in figures:
        change = f.note if f.difference is None else f"{f.difference:+.5g}"
        rows.append((f.key, f.unit, str(f.step), f"{f.a:.6g}", f"{f.b:.6g}", change))
    _print_table(rows, "<<>>>>")
    if bounds := bounded(a, b):
        print(f"Upper bounds, not values: the losses of {', '.join(bounds)}.")
    if any(f.note for f in figures):
        print("Tokenizers differ: only bits per byte compare.")
    else:
        print(curve_distance(a, b))


def equal_parts(a: Run, b: Run) -> list[str]:
    """Fingerprints, code and libraries that the two runs share, with what is short enough."""
    left, right = a.fingerprints or {}, b.fingerprints or {}
    found = [key for key in left if left[key] == right.get(key)]
    here, there = a.environment or {}, b.environment or {}
    if here.get("source_hash", 0) == there.get("source_hash"):
        found.append("code (source_hash)")
    versions = [
        {"python": environment.get("python"), **environment.get("packages", {})}
        for environment in (here, there)
    ]
    return found + [
        f"{name} {version}"
        for name, version in versions[0].items()
        if version and version == versions[1].get(name)
        if name == "python" or name in COMPUTING_PACKAGES.split()
    ]


def _print_table(rows: Sequence[Sequence[str]], alignment: str) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(alignment))] if rows else []
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths))
        print(("  " + "  ".join(cells)).rstrip())


def _show(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def bounded(*runs: Run) -> list[str]:
    """Which runs have upper bounds for losses."""
    return [run.path for run in runs if run.rows and run.rows[-1].get("loss_is_bound")]


def as_json(
    a: Run,
    b: Run,
    differences: Sequence[Difference],
    figures: Sequence[Figure],
    code: int,
    verdict: str,
) -> dict[str, Any]:
    return {
        "a": a.path,
        "b": b.path,
        "exit_code": code,
        "verdict": verdict,
        "bounds": bounded(a, b),
        "factors": _factors(differences),
        "differences": [asdict(d) for d in differences],
        "figures": [
            {k: json_value(v) for k, v in (asdict(f) | {"difference": f.difference}).items()}
            for f in figures
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
