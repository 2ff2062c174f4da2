"""RunConfig: everything that defines a run, from YAML files and ``key=value`` overrides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from data_tools.manifest import Manifest
from models.config import SIZES, ModelConfig
from models.hf_names import NATIVE_TARGETS, obstacles
from models.positions import biases_scores
from parallel.mesh import ParallelConfig, layout_problems

from .decode import decode, read_layers, source_of
from .health import HealthConfig
from .metrics import MetricsConfig
from .objectives.base import OBJECTIVES
from .objectives.causal import Causal
from .optimizer_config import OptimizerConfig
from .placement import placement_problems
from .schedule import ScheduleConfig
from .yaml_text import ConfigError, Problem, Tree, merge, nearest

Problems = list[tuple[str, str]]


def _positive(config: Any, *names: str) -> Problems:
    return [
        (name, f"must be positive and finite, got {getattr(config, name)}")
        for name in names
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf
    ]


@dataclass(frozen=True)
class SourceConfig:
    """One tokenised dataset and its share of a blend."""

    path: str = field(default="", metadata={"help": "prefix of the .bin and .idx files"})
    weight: float | None = field(
        default=None, metadata={"help": "share of the blend; null for all: by size"}
    )
    max_epochs: float = field(
        default=1.0, metadata={"help": "how often the source may be seen; more is an error"}
    )

    def problems(self) -> Problems:
        found = _positive(self, "weight")
        if self.max_epochs <= 0:
            found.append(("max_epochs", f"must be positive, got {self.max_epochs}"))
        return found if self.path else [*found, ("path", "is required")]


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, in which order."""

    train: tuple[SourceConfig, ...] = field(default=(), metadata={"help": "training sources"})
    validation: tuple[SourceConfig, ...] = field(
        default=(), metadata={"help": "validation sources; none = no evaluation"}
    )
    samples: Literal["windows", "packed"] = field(
        default="windows",
        metadata={"help": "fixed windows of the stream, or whole documents (prepare.py --pack)"},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer folder; null = beside the first source"}
    )

    def problems(self) -> Problems:
        found: Problems = []
        if not self.train:
            found.append(("train", "at least one source is required"))
        for name in ("train", "validation"):
            weights = [source.weight for source in getattr(self, name)]
            if any(w is None for w in weights) and any(w is not None for w in weights):
                found.append((name, "give every source a weight, or none"))
            elif len(weights) == 1 and weights[0] is not None:
                found.append((f"{name}[0].weight", "of the only source: it would be ignored"))
        return found

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer) if self.tokenizer else Path(self.train[0].path).parent


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and clipping."""

    sequence_length: int = field(default=256, metadata={"help": "tokens the model sees at once"})
    batch_tokens: int = field(
        default=8192, metadata={"help": "tokens per optimizer step, over all ranks"}
    )
    micro_batch: int = field(
        default=8, metadata={"help": "sequences per forward pass and data-parallel rank"}
    )
    steps: int | None = field(default=None, metadata={"help": "optimizer steps; or give tokens"})
    tokens: float | None = field(default=None, metadata={"help": "tokens in all; or give steps"})
    clip_norm: float | None = field(
        default=1.0, metadata={"help": "largest global gradient norm; null = no clipping"}
    )

    def problems(self) -> Problems:
        names = ("sequence_length", "batch_tokens", "micro_batch", "steps", "tokens", "clip_norm")
        found = _positive(self, *names)
        if (self.steps is None) == (self.tokens is None):
            found.append(("steps", "give exactly one of steps and tokens"))
        if not found and self.batch_tokens % self.sequence_length:
            found.append(
                ("batch_tokens", f"{self.batch_tokens} is not a multiple of sequence_length="
                 f"{self.sequence_length}")
            )  # fmt: skip
        return found

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.batch_tokens // self.sequence_length

    @property
    def total_steps(self) -> int:
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(1, round(self.tokens / self.batch_tokens))


@dataclass(frozen=True)
class PrecisionConfig:
    """Stored weights, gradients and optimizer state; and what matrices are multiplied in."""

    weights: Literal["float32", "float64"] = field(
        default="float32", metadata={"help": "master weights, gradient reduction, AdamW state"}
    )
    compute: Literal["float32", "float64", "bfloat16"] = field(
        default="float32", metadata={"help": "matrix products and attention"}
    )

    def problems(self) -> Problems:
        allowed = {"float32": ("float32", "bfloat16"), "float64": ("float64",)}
        if self.compute not in allowed[self.weights]:
            return [("compute", f"{self.compute} does not go with weights={self.weights}")]
        return []

    @property
    def weight_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.weights)
        return dtype

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """None when it is the weights' own."""
        same = self.compute == self.weights
        return None if same else getattr(torch, self.compute)


@dataclass(frozen=True)
class KernelsConfig:
    """Which library computes what; ``launch/doctor.py`` tells what works here."""

    attention: Literal["auto", "sdpa", "flex", "flash"] = field(
        default="auto", metadata={"help": "auto: sdpa, and flex for documents on a GPU"}
    )
    optimizer: Literal["torch", "apex"] = field(
        default="torch", metadata={"help": "AdamW of torch, or NVIDIA apex's FusedAdam"}
    )
    compile: bool = field(default=False, metadata={"help": "torch.compile every block"})


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation during training."""

    every: int = field(default=100, metadata={"help": "steps between evaluations; 0 = at the end"})
    sequences: int = field(
        default=256, metadata={"help": "validation sequences; fewer where the set is smaller"}
    )
    draws: int = field(
        default=1, metadata={"help": "of noise per validation sequence of a diffusion model"}
    )

    def problems(self) -> Problems:
        found = _positive(self, "sequences", "draws")
        return found if self.every >= 0 else [*found, ("every", f"is negative: {self.every}")]


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is saved, and where its weights come from."""

    every: int = field(default=100, metadata={"help": "steps between checkpoints; 0 = at the end"})
    keep_last: int = field(default=2, metadata={"help": "newest checkpoints kept"})
    keep_every: int | None = field(
        default=None, metadata={"help": "steps divisible by this are kept for good"}
    )
    asynchronous: bool = field(default=True, metadata={"help": "write while training goes on"})
    init_from: str | None = field(
        default=None,
        metadata={"help": "start from the weights of a run, checkpoint or Hugging Face folder"},
    )
    allow: tuple[Literal["model", "objective", "data", "seed"], ...] = field(
        default=(), metadata={"help": "resume although these parts changed"}
    )

    def problems(self) -> Problems:
        found = _positive(self, "keep_last", "keep_every")
        if self.keep_every is not None and self.every == 0:
            found.append(("keep_every", "is set but every=0: it would be ignored"))
        return found if self.every >= 0 else [*found, ("every", f"is negative: {self.every}")]


@dataclass(frozen=True)
class FinishConfig:
    """What is made of a finished run."""

    export: Literal[
        "auto", "custom", "none", "llama", "qwen2", "qwen3", "olmo2", "smollm3", "gemma2",
        "gemma3_text", "mixtral", "qwen3_moe", "glm4_moe", "mellum",
    ] = field(
        default="auto", metadata={"help": "Hugging Face folder: auto = native where exact"}
    )  # fmt: skip
    prompt: str | None = field(default=None, metadata={"help": "beginning of the text sample"})
    sample_tokens: int = field(default=0, metadata={"help": "length of the text sample; 0 = none"})
    report: bool = field(default=True, metadata={"help": "draw loss_curve.png and report.html"})

    def problems(self) -> Problems:
        if self.sample_tokens < 0:
            return [("sample_tokens", f"must not be negative, got {self.sample_tokens}")]
        if self.prompt and not self.sample_tokens:
            text = "is set but sample_tokens=0: it would be ignored; unset it: finish.prompt=null"
            return [("prompt", text)]
        return []


@dataclass(frozen=True)
class RunConfig:
    """One run."""

    shorthands: ClassVar[dict[str, str]] = {
        "model.size": f"preset that the other keys of model override (one of {', '.join(SIZES)})"
    }

    name: str = field(default="run", metadata={"help": "folder of the run below runs_folder"})
    runs_folder: str = field(default="runs", metadata={"help": "where run folders are made"})
    seed: int = field(default=0, metadata={"help": "initial weights, data order, noise"})
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata={"help": "auto: cuda where there is one"}
    )
    deterministic: bool = field(
        default=False, metadata={"help": "refuse kernels whose results vary from run to run"}
    )
    model: ModelConfig = ModelConfig()
    objective: Any = field(
        default=Causal.Config(), metadata={"registry": OBJECTIVES, "help": "what is learned"}
    )
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelsConfig = KernelsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    health: HealthConfig = HealthConfig()
    finish: FinishConfig = FinishConfig()

    def problems(self) -> Problems:
        found: Problems = []
        if not self.name or "/" in self.name or self.name.startswith("."):
            found.append(("name", f"must be a plain folder name, got {self.name!r}"))
        if not (self.training.problems() or self.schedule.problems()):
            for path, message in self.schedule.problems(self.training.total_steps):
                found.append((f"schedule.{path}", message))
            last = self.training.total_steps
            beyond = [step for step in self.health.skip_steps if step > last]
            if beyond:
                text = f"{beyond} lie beyond the last step {last}: they would be ignored"
                found.append(("health.skip_steps", text))
        if not self.data.validation and self.evaluation != EvaluationConfig():
            text = "is set but data.validation is empty: it would be ignored"
            text += "; unset it: evaluation=null"
            found.append(("evaluation", text))
        if self.evaluation.draws != 1 and not self.objective.draws_noise:
            text = f"must be 1, got {self.evaluation.draws}: this objective draws no noise"
            found.append(("evaluation.draws", text))
        if self.data.samples == "packed" and self.objective.documents == "attend":
            found.append(
                ("objective.documents", "must be mask with data.samples=packed: packed documents"
                 " are unrelated")
            )  # fmt: skip
        unfit = self.objective.model_problems(self.model)
        if not self.training.problems():
            unfit += self.objective.training_problems(
                self.training.sequence_length, self.training.batch
            )
        for path, message in unfit:
            found.append((f"objective.{path}", message))
        length = self.training.sequence_length
        if 0 < length <= self.model.mtp.depth:
            text = f"{self.model.mtp.depth} needs sequences longer than {length} tokens"
            found.append(("model.mtp.depth", text))
        if self.kernels.compile and self.parallel.pipeline.splits_weight_gradients:
            name = self.parallel.pipeline.schedule
            text = f"does not go with pipeline.schedule={name}, which splits backward passes"
            found.append(("kernels.compile", text))
        if self.kernels.attention == "flash":
            if self.objective.draws_noise:
                text = "flash hides no padding, as diffusion needs: use flex or sdpa"
                found.append(("kernels.attention", text))
            elif self.objective.documents == "mask":
                found.append(("kernels.attention", "flash has no document mask: use flex or sdpa"))
            if biases_scores(self.model.position):
                found.append(("kernels.attention", "flash has no position bias: use flex or sdpa"))
            if self.precision.compute != "bfloat16":
                text = f"flash computes in bfloat16 only, not {self.precision.compute}"
                found.append(("kernels.attention", text))
        if self.finish.export in NATIVE_TARGETS:
            reasons = obstacles(self.model, self.finish.export)
            if reasons:
                text = f"{self.finish.export} cannot represent this model: {'; '.join(reasons)}"
                found.append(("finish.export", text))
        return found

    @property
    def folder(self) -> Path:
        return Path(self.runs_folder) / self.name

    @property
    def slots(self) -> int:
        """Length of a sequence as the model sees it in training."""
        canvas: int = self.objective.canvas
        return self.training.sequence_length * canvas

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one forward pass in training: of a micro-batch, in all its views."""
        views: int = self.objective.views
        return self.training.micro_batch * views

    def run_problems(self, world_size: int) -> Problems:
        """What is wrong about this config on ``world_size`` processes."""
        training, parallel = self.training, self.parallel
        found = layout_problems(parallel, self.model, world_size, self.slots)
        for path, message in self.optimizer.model_problems(self.model):
            found.append((f"optimizer.{path}", message))
        share = parallel.replicas(world_size) * parallel.fsdp * training.micro_batch
        if training.batch % share:
            found.append(
                ("training.batch_tokens", f"{training.batch_tokens} tokens are {training.batch}"
                 f" sequences, not a multiple of micro_batch·dp·fsdp = {share}")
            )  # fmt: skip
        if parallel.pp > 1 and not any(path.startswith("parallel.p") for path, _ in found):
            length, micro = self.slots, self.sequences_at_once
            count = max(training.batch // share, 1)
            found += placement_problems(self.model, parallel, length, count, micro)
        return found


def expand_size(tree: Tree, problems: Problems) -> Tree:
    """Replace ``model.size`` by the preset's keys, under everything else that is given."""
    model = tree.get("model")
    if not isinstance(model, dict) or "size" not in model:
        return tree
    rest = {key: value for key, value in model.items() if key != "size"}
    if model["size"] is None:  # unset, on the command line for example
        return {**tree, "model": rest}
    size = str(model["size"]).lower()
    if size not in SIZES:
        hint = nearest(size, SIZES)
        text = f"given {model['size']!r}; allowed are {', '.join(SIZES)}{hint}"
        problems.append(("model.size", text))
    preset = SIZES.get(size, {})
    merged = merge(preset, rest)
    if size in SIZES:  # another kind of feed-forward layer keeps the preset's width
        chosen = merged["feedforward"]
        if isinstance(chosen, str):
            chosen = {"type": chosen}
        if isinstance(chosen, dict):
            merged["feedforward"] = {"hidden": preset["feedforward"]["hidden"], **chosen}
    return {**tree, "model": merged}


def fill_vocabulary(tree: Tree, problems: Problems) -> Tree:
    """``model.vocab_size`` left out: the tokenizer's, as the first training source records it, and
    the mask token if there is one."""
    model = tree.get("model") or {}
    match tree.get("data"):
        case {"train": [{"path": str(path)}, *_]} if path:
            pass
        case _:
            return tree
    if not isinstance(model, dict) or "vocab_size" in model:
        return tree
    try:
        size = Manifest.load(path).tokenizer["vocab_size"]
    except ValueError as error:
        problems.append(("data.train[0].path", f"{error}; make it with launch/prepare.py"))
        return tree
    return {**tree, "model": {**model, "vocab_size": size + (model.get("mask_token") is True)}}


def load_run_config(
    paths: Iterable[str | Path], overrides: Iterable[str], world_size: int | None
) -> RunConfig:
    """The run that files and overrides describe, checked against ``world_size`` processes (None:
    not checked).  ``ConfigError`` lists every problem."""
    tree, sources = read_layers(paths, overrides)
    found: Problems = []
    tree = fill_vocabulary(expand_size(tree, found), found)
    problems = [Problem(path, text, source_of(path, sources)) for path, text in found]
    try:
        config = decode(RunConfig, tree, sources=sources)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if world_size is not None:
        check_run(config, world_size, sources)
    return config


def check_run(config: RunConfig, world_size: int, sources: Mapping[str, str]) -> None:
    """``ConfigError`` lists what is wrong about ``config`` on ``world_size`` processes."""
    problems = config.run_problems(world_size)
    if problems:
        raise ConfigError(
            [Problem(path, message, source_of(path, sources)) for path, message in problems]
        )
