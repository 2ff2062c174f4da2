"""What objectives reach on the same text with the same model, steps and initial weights.

Trains the recipes of recipes/diffusion, an autoregressive model and the diffusion objectives beside
it, evaluates them on the same validation text, and samples each at several speeds.  Runs lie in
runs/diffusion: what is finished is not trained again, what was interrupted goes on.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.diffusion_throughput import Training
from benchmarks.measure import ROOT, interleaved
from benchmarks.studies import sampled
from benchmarks.studies.study import Options, Study, command, each
from pretrain.config import load_run_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = (
    "What do diffusion objectives reach beside an autoregressive one, with the same data, model, "
    "initial weights and steps? Bits per byte of validation text, for all but `causal` an upper "
    "bound (mean over seeds and their standard deviation; ± the standard error of the noise); "
    "time per step relative to `causal`. Samples of 96 bytes behind 32: perplexity per byte under "
    "an autoregressive model of another seed, and unigram entropy (repetition lowers both), for "
    "the number of forward passes per sequence."
)
COLUMNS = ["question", "objective", "case", "found", "beside"]

RECIPES = ROOT / "recipes" / "diffusion"
ARMS = ("causal", "masked-flat", "masked", "uniform", "uniform-clip", "block", "eso")
DRAWS = 8  # of noise per validation sequence, in the end
TOY = (
    "model.layers=1", "model.hidden=32", "model.attention={heads: 2, kv_heads: 2, head_dim: 16}",
    "model.feedforward={type: swiglu, hidden: 32}", "training.sequence_length=32",
    "training.batch_tokens=128", "training.micro_batch=4", "training.steps=4",
    "schedule.warmup_steps=1", "evaluation={every: 2, sequences: 4}", "checkpoint.every=4",
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One run.  data: folder of the tokenised text."""

    objective: str
    seed: int
    runs: str
    data: str
    quick: bool

    @property
    def folder(self) -> Path:
        return Path(self.runs) / f"{self.objective}-{self.seed}"

    @property
    def settings(self) -> tuple[list[str], list[str]]:
        """Recipes, and what is set besides."""
        own = [
            f"name={self.folder.name}", f"runs_folder={self.runs}", f"seed={self.seed}",
            f"data.train=[{{path: {self.data}/train, max_epochs: 2}}]",
            f"data.validation=[{{path: {self.data}/validation}}]", "finish.export=none",
        ]  # fmt: skip
        if self.quick:
            own += [*TOY, *(["objective.block_size=8"] if self.objective == "block" else [])]
        return [str(RECIPES / f"{name}.yaml") for name in ("base", self.objective)], own


def make_data(folder: Path, quick: bool) -> str:
    """The bundled novels as bytes, unless they are there; or one of them."""
    from launch import prepare

    corpus = ROOT / "data_tools" / "corpora" / "austen"
    source = ["--corpus", "austen"]
    if quick:
        source = ["--corpus", str(corpus / "persuasion.txt"), "--document-start", "Chapter .*"]
    with contextlib.redirect_stdout(sys.stderr):
        if prepare.main([*source, "--tokenizer", "bytes", "--workers", "1", "--out", str(folder)]):
            raise ValueError("the text for the study could not be prepared")
    return str(folder)


def launch(script: str, arguments: list[str]) -> str:
    """Standard output of a script of ``launch/`` on one thread; its error if it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *arguments], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"launch/{script} {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout


def train(arm: Arm) -> dict[str, Any]:
    """Train one arm and evaluate it with more noise: the figures of both."""
    recipes, own = arm.settings
    launch("pretrain.py", [*recipes, *own])
    draws = 1 if arm.objective == "causal" else 2 if arm.quick else DRAWS
    flags = [] if draws == 1 else ["--draws", str(draws)]
    sequences = ["--sequences", "4" if arm.quick else "256"]
    final = json.loads(launch("evaluate.py", [str(arm.folder), "--json", *sequences, *flags]))
    lines = (arm.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/bits_per_byte" in row]
    curve = {row["step"]: row["eval/bits_per_byte"] for row in rows}  # after a resume the last
    return {"curve": sorted(curve.items()), **final}


def step_seconds(names: Sequence[str], data: str, quick: bool) -> dict[str, list[float]]:
    """Seconds per training step of each objective, in turn, on one thread: the runs themselves
    share the machine with each other."""
    torch.set_num_threads(1)
    runs = {}
    for name in names:
        arm = Arm(name, 0, "runs", data, quick)
        config = load_run_config(*arm.settings, 1)
        length = config.training.sequence_length
        tokens = torch.randint(0, 256, (config.training.batch, length + 1))
        runs[name] = Training(config, tokens).step
    return interleaved(runs, 1 if quick else 5)


def bounds(
    result: Study, found: Mapping[Arm, dict[str, Any]], seconds: Mapping[str, list[float]]
) -> None:
    """Rows, curves and orderings of the validation bounds."""
    bits: dict[str, list[float]] = {}
    pace = {name: statistics.median(took) for name, took in seconds.items()}
    for arm, figures in found.items():
        bits.setdefault(arm.objective, []).append(figures["bits_per_byte"])
        result.data[f"curve, {arm.objective}, seed {arm.seed}"] = [
            [step, step * pace[arm.objective], bound] for step, bound in figures["curve"]
        ]
    for name, values in bits.items():
        errors = [f["standard_error"] / f["loss"] * f["bits_per_byte"]
                  for a, f in found.items() if a.objective == name]  # fmt: skip
        spread = f", sd {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        result.rows.append([
            "validation", name, "exact" if name == "causal" else "upper bound",
            f"{statistics.mean(values):.3f} bits per byte{spread} ± {max(errors):.3f}",
            f"time per step {pace[name] / pace['causal']:.2f} of causal",
        ])  # fmt: skip

    def ordered(better: str, worse: str, published: str) -> None:
        if not {better, worse} <= set(bits):
            return
        apart = [b - a for a, b in zip(bits[better], bits[worse], strict=True)]
        result.check(f"{better} is below {worse} in every seed ({published})",
                     " ".join(f"{x:+.3f}" for x in apart), min(apart) > 0)  # fmt: skip

    ordered("causal", "masked", "every diffusion bound is above autoregression")
    ordered("masked-flat", "masked", "flat weights train to a better bound, arXiv 2602.15014")
    ordered("masked-flat", "uniform", "masked before uniform at equal compute, arXiv 2602.15014")
    ordered("uniform-clip", "uniform", "ours: rare tokens that cost most are noise")
    ordered("masked-flat", "eso", "full attention before causal in random order, the same")
    ordered("block", "masked", "blocks are between masked diffusion and autoregression, BD3-LM")


def study(options: Options) -> Study:
    with contextlib.ExitStack() as stack:
        if options.quick:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            data, runs = place / "text", place / "runs"
        else:
            data, runs = ROOT / "data" / "austen-bytes", ROOT / "runs" / "diffusion"
        result = Study(
            "diffusion", QUESTION, COLUMNS, settings(options.quick), list(range(options.seeds))
        )
        text = make_data(data, options.quick)
        # the judge of samples is an autoregressive model that no arm is made of
        judge = Arm("causal", 0 if options.quick else options.seeds, str(runs), text, options.quick)
        arms = [
            Arm(name, seed, str(runs), text, options.quick)
            for seed in result.seeds for name in (ARMS[:2] if options.quick else ARMS)
        ]  # fmt: skip
        jobs = arms if judge in arms else [*arms, judge]
        trained = each(train, jobs, options.processes,
                       lambda arm: f"{arm.objective}, seed {arm.seed}")  # fmt: skip
        names = ARMS[:2] if options.quick else ARMS
        bounds(result, dict(zip(arms, trained)), step_seconds(names, text, options.quick))
        first = {arm.objective: arm.folder for arm in arms if arm.seed == 0}
        sampled.add(result, first, judge.folder, text, options)
    return result


def settings(quick: bool) -> dict[str, Any]:
    import yaml

    base = yaml.safe_load((RECIPES / "base.yaml").read_text("utf-8"))
    own = {name: yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8")) for name in ARMS}
    return {
        "all": "toy" if quick else json.dumps({**base, "data": "the bundled novels"}),
        **{name: json.dumps(tree["objective"]) for name, tree in own.items()},
        "draws": DRAWS,
    }


def draw(result: Mapping[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colors = {name: f"C{index}" for index, name in enumerate(ARMS)}
    for name, values in result["data"].items():
        part, objective, rest = name.split(", ")
        color = colors[objective]
        if part == "curve":
            steps, seconds, bits = zip(*values, strict=True)
            label = objective if rest == "seed 0" else None
            left.plot(steps, bits, color=color, label=label)
            middle.plot(seconds, bits, color=color, label=label)
        elif part == "samples":
            values = sorted(values)
            right.loglog([v[0] for v in values], [v[1] for v in values], "o-", color=color,
                         alpha=0.7, markersize=4)  # fmt: skip
            right.annotate(rest, values[0][:2], fontsize=6, color=color)
    left.set_title("validation, bits per byte (bounds but for causal)")
    left.set_xlabel("step: one forward and backward pass of 4,096 tokens")
    left.legend(fontsize=8)
    middle.set_title("the same against time")
    middle.set_xlabel("seconds of training, one core")
    right.set_title("samples: perplexity under another model")
    right.set_xlabel("forward passes per sequence")
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> int:
    return command("diffusion", study, draw, __doc__, argv, seeds=1)


if __name__ == "__main__":
    raise SystemExit(main())
