"""Samples of the diffusion study: how good they are for how many forward passes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.study import Options, Study
from models.ancestral import Ancestral, PredictorCorrector
from models.blockwise import Blocks
from models.decoding import Sampling, generate
from models.denoising import Report
from models.ordered import Eso
from models.samplers import denoiser_of, sample
from models.soar import SOAR, PositionBeam
from models.transformer import Transformer
from models.unmasking import FirstHitting, Remasking, Threshold
from pretrain.config import DataConfig, SourceConfig
from pretrain.data import build_blend
from pretrain.sample_quality import unigram_entropy
from pretrain.trained import build_model, open_trained

STEPS = (4, 8, 16, 32, 64)
MASKED: dict[str, list[Any]] = {
    "ancestral": [Ancestral.Config(steps) for steps in STEPS],
    "corrector": [PredictorCorrector.Config(steps, eta=0.1) for steps in STEPS[2:]],
    "first hitting": [FirstHitting.Config()],
    "remasking": [Remasking.Config(steps) for steps in STEPS],
    "threshold": [Threshold.Config(tau) for tau in (0.2, 0.4, 0.6, 0.8, 0.95)],
    "position beam": [PositionBeam.Config()],
    "SOAR": [SOAR.Config(threshold=tau) for tau in (0.4, 0.6, 0.8)],
}
SAMPLED: dict[str, dict[str, list[Any]]] = {
    "masked-flat": MASKED,
    "uniform": {"ancestral": MASKED["ancestral"], "corrector": MASKED["corrector"]},
    "block": {"blocks": [Blocks.Config(inner=Ancestral.Config(n)) for n in (1, 2, 4, 8, 16)]},
    "eso": {"eso": [Eso.Config(steps) for steps in STEPS]},
}
"""Objective, sampler and its settings, from fast to slow."""


def settings_of(config: Any) -> str:
    """What is told apart in the table."""
    inner = getattr(config, "inner", config)
    for name in ("steps", "threshold"):
        value = getattr(inner, name, None)
        if value is not None:
            return f"{name} {value}"
    return "one token per step"


def passes_of(report: Report, unmasks: bool) -> float:
    """Forward passes of one sequence, the mean.  unmasks: it is asked for as long as it gets tokens
    and no longer, while others of the batch go on."""
    if unmasks:
        steps = [sum(count > 0 for count in row) for row in report.committed]
        return sum(steps) / len(steps)
    return report.sequences / len(report.committed)


def nats(judge: Transformer, prompts: Tensor, texts: Tensor) -> float:
    """Mean over tokens int64 [B, n] of −log p(text | prompt)."""
    both = torch.cat([prompts, texts], 1)
    with torch.inference_mode():
        chances = judge.logits(both[:, :-1]).double().log_softmax(-1)
    picked = chances.gather(2, both[:, 1:, None])[..., 0]
    return -float(picked[:, prompts.shape[1] - 1 :].mean())


class Judged:
    """Texts of all objectives behind the same prompts, judged by one model."""

    def __init__(self, judge: Path, data: str, options: Options) -> None:
        trained = open_trained(judge)
        self.judge, self.quick = build_model(trained), options.quick
        count, known = (2, 8) if options.quick else (32, 32)
        self.tokens = trained.sequence_length - known
        source = (SourceConfig(f"{data}/validation"),)
        blend = build_blend(DataConfig(), source, trained.sequence_length, 0, None)
        # windows from the end of the permuted stream: none that a sampler's setting was chosen on
        rows = [blend.sample(blend.num_samples - 1 - i).tokens for i in range(count)]
        windows = torch.tensor([row.tolist() for row in rows])
        self.prompts, self.real = windows[:, :known], windows[:, known : known + self.tokens]

    def add(
        self, result: Study, objective: str, name: str, setting: str, texts: Tensor, passes: float
    ) -> None:
        loss = nats(self.judge, self.prompts, texts)
        entropy = sum(map(unigram_entropy, texts.tolist())) / len(texts) / math.log(2)
        perplexity = math.exp(loss)
        result.rows.append([
            "samples", objective, f"{name}, {setting}" if setting else name,
            f"perplexity {perplexity:.2f}, entropy {entropy:.2f} bits",
            f"{passes:.1f} forward passes" if passes else "",
        ])  # fmt: skip
        if passes:
            data = result.data.setdefault(f"samples, {objective}, {name}", [])
            data.append([passes, perplexity, entropy])
        print(f"sampled: {objective}, {name} {setting}", file=sys.stderr, flush=True)


def add(
    result: Study, folders: Mapping[str, Path], judge: Path, data: str, options: Options
) -> None:
    """Sample each objective that was trained into ``folders``."""
    judged = Judged(judge, data, options)
    prompts, tokens = judged.prompts.tolist(), judged.tokens
    judged.add(result, "the text itself", "", "", judged.real, 0)
    model = build_model(open_trained(folders["causal"]))
    texts = torch.tensor(generate(model, prompts, tokens, Sampling(1.0)))
    judged.add(result, "causal", "left to right", "", texts, tokens)
    for objective, samplers in SAMPLED.items():
        if objective not in folders:
            continue
        trained = open_trained(folders[objective])
        denoiser = denoiser_of(build_model(trained), trained.objective)
        for name, configs in samplers.items():
            for config in configs[:1] if options.quick else configs:
                found, report = sample(denoiser, prompts, tokens, config)
                passes = passes_of(report, isinstance(config, (Ancestral.Config, Threshold.Config))
                                   and denoiser.family == "masked")  # fmt: skip
                judged.add(result, objective, name, settings_of(config), torch.tensor(found),
                           passes)  # fmt: skip
    if not options.quick:
        claims(result)


def claims(result: Study) -> None:
    """What is said of samplers, at this size."""

    def points(objective: str, name: str) -> list[list[float]]:
        found: list[list[float]] = result.data[f"samples, {objective}, {name}"]
        return found

    ancestral = points("masked-flat", "ancestral")
    result.check(
        "more steps of ancestral sampling make better text", f"{ancestral[0][1]:.2f} to "
        f"{ancestral[-1][1]:.2f}", ancestral[-1][1] < ancestral[0][1],
    )  # fmt: skip
    threshold, one = points("masked-flat", "threshold"), points("masked-flat", "position beam")[0]
    fewest, tokens = threshold[0][0], points("masked-flat", "first hitting")[0][0]
    result.check("a threshold of 0.2 saves forward passes", f"{fewest:.1f} for {tokens:.0f} tokens",
                 fewest < tokens)  # fmt: skip
    soar = points("masked-flat", "SOAR")
    result.check("SOAR takes fewer forward passes than position beam search",
                 f"{max(s[0] for s in soar):.1f} and {one[0]:.1f}",
                 max(s[0] for s in soar) < one[0])  # fmt: skip
