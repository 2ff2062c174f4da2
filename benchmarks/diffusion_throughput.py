"""Training speed of diffusion objectives beside next-token prediction, and what explains it.

One process trains the same model on the same windows with each objective: noise, forward pass,
backward pass and optimizer.  What an objective should cost at most is its FLOPs per token: block
diffusion shows the model two slots per token, masked diffusion needs the logits of half of them.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Options, Report, Target, command, interleaved, ratios, spread
from models.flops import training_flops_per_token
from parallel.apply import BuildOptions
from parallel.mesh import build_mesh
from pretrain.config import RunConfig, load_run_config
from pretrain.engine import Engine, build_engine
from pretrain.objectives.base import Objective, build_objective
from pretrain.optimizer import ShardedOptimizer

OBJECTIVES = {
    "causal": "causal",
    "masked": "masked",
    "uniform": "uniform",
    "block": "{type: block, block_size: 16}",
    "eso": "{type: eso, variant: B, alpha0: 1.0}",
    "eso, half sequential": "{type: eso, variant: B, alpha0: 0.5}",
}
SHAPES = {"3m, 8 x 256": ("3m", 8, 256), "10m, 4 x 512": ("10m", 4, 512)}
TOY = {"toy": ("1m", 2, 32)}


def config_of(size: str, sequences: int, length: int, objective: str) -> RunConfig:
    return load_run_config(
        [],
        [
            f"model.size={size}", "model.vocab_size=4097", "model.mask_token=true",
            "model.tie_embeddings=false", f"training.sequence_length={length}",
            f"training.batch_tokens={sequences * length}", f"training.micro_batch={sequences}",
            "training.steps=1000", "schedule.warmup_steps=1", f"objective={objective}",
            "data.train=[{path: unused}]",
        ],
        1,
    )  # fmt: skip


class Training:
    """One model under one objective; every step has noise of its own."""

    def __init__(self, config: RunConfig, tokens: Tensor) -> None:
        mesh = build_mesh(config.parallel, torch.device("cpu"))
        self.config, self.tokens, self.samples = config, tokens, 0
        self.engine: Engine = build_engine(
            config.model, config.parallel, mesh, BuildOptions(), config.slots
        )
        self.optimizer = ShardedOptimizer(self.engine.model, config.optimizer, "torch")
        self.objective: Objective = build_objective(
            config.objective, config.model, batch=len(tokens)
        )

    def noise(self) -> Any:
        batch = self.objective.micro_batch(
            self.tokens, None, range(self.samples, self.samples + len(self.tokens))
        )
        self.samples += len(self.tokens)
        return batch

    def step(self) -> None:
        self.engine.forward_backward([self.noise()], self.objective)
        self.optimizer.step(1e-4)

    @property
    def flops(self) -> float:
        """Per token, forward and backward."""
        seen = self.config.objective
        length = self.config.training.sequence_length
        return training_flops_per_token(
            self.config.model, length, seen.views, seen.canvas, seen.judged
        )


def compare(label: str, shape: tuple[str, int, int], options: Options, report: Report) -> None:
    size, sequences, length = shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4096, (sequences, length + 1), generator=generator)
    runs = {
        name: Training(config_of(size, sequences, length, text), tokens)
        for name, text in OBJECTIVES.items()
    }
    steps: dict[str, Callable[[], None]] = {name: run.step for name, run in runs.items()}
    noises = {f"{name} noise": run.noise for name, run in runs.items()}
    seconds = interleaved({**steps, **noises}, options.repeats)
    for name, run in runs.items():
        took = seconds[name]
        bound = runs["causal"].flops / run.flops
        speed = ratios(seconds["causal"], took)
        share = [s / bound for s in speed]
        report.rows.append([
            label, name, spread([tokens.shape[0] * length / s for s in took], 0), spread(speed),
            f"{bound:.2f}", spread(share), spread([1000 * s for s in seconds[f"{name} noise"]], 1),
        ])  # fmt: skip
        report.samples[f"{label} {name}"] = took
        if name != "causal":
            median = sorted(share)[len(share) // 2]
            claim = f"{label}, {name}: at least 0.9 of what FLOPs allow beside causal"
            report.targets.append(Target(claim, spread(share), median >= 0.9))


def measure(options: Options, arguments: argparse.Namespace) -> Report:
    torch.set_num_threads(options.threads)
    report = Report(
        "diffusion_throughput",
        "How fast do diffusion objectives train beside next-token prediction, on the same model "
        "and windows? Speed: tokens of the data per second over causal's; the bound is the inverse "
        "ratio of FLOPs per token, attention scores counted in full for every mask.",
        ["shape", "objective", "tokens/s", "speed / causal", "FLOP bound", "speed / bound",
         "noise ms"],
        {
            "all": "fp32, eager, AdamW, one micro-batch a step, vocabulary 4,096 and a mask token",
            **OBJECTIVES,
        },
    )  # fmt: skip
    for label, shape in (TOY if options.quick else SHAPES).items():
        compare(label, shape, options, report)
    return report


def main(argv: list[str] | None = None) -> int:
    return command(measure, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
