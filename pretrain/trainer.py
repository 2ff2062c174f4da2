"""The training loop, and nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from models.flops import training_flops_per_token, unit_sizes
from parallel.apply import BuildOptions, local_tensor, update_state
from parallel.checkpoint import CheckpointManager
from parallel.fingerprint import weights_hash
from parallel.gradients import clip_gradients, gradient_norm
from parallel.mesh import build_mesh

from .config import RunConfig
from .data import (
    Batches,
    Prefetcher,
    build_blend,
    check_vocabulary,
    fingerprints,
    vocabulary_note,
)
from .engine import build_engine
from .evaluate import Evaluator
from .health import Decision, HealthLog, HealthMonitor
from .initial_weights import load_initial_weights
from .metrics import MetricLogger
from .objectives.base import build_objective
from .optimizer import ShardedOptimizer
from .pipeline_meter import PipelineMeter
from .run_folder import RunFolder, write_json
from .schedule import learning_rate_factor
from .state import RunState
from .throughput import Throughput, memory_report

Outcome = Literal["finished", "preempted", "failed"]


class StopRequest:
    """Remembers a signal until the step boundary; all ranks agree on stopping there."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

    def __init__(self) -> None:
        self.received = 0
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step
        self.received = number

    def release(self) -> None:
        """All steps are done and saved: from now on a signal interrupts what follows, and so does
        one that came too late for the loop.  ``KeyboardInterrupt``."""
        for number in self.SIGNALS:
            signal.signal(number, signal.default_int_handler)
        if self.received:
            raise KeyboardInterrupt

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool:
        return all_reduce_max(float(self.received)) > 0


def choose_device(config: RunConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no CUDA device")
    index, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= found:
        raise ValueError(f"process {index} of this machine has no GPU of its own: {found} found")
    if config.deterministic:
        fix_workspace(os.environ)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def fix_workspace(environment: MutableMapping[str, str]) -> None:
    """cuBLAS is deterministic only with a workspace of fixed size, named before CUDA starts.
    ``ValueError`` where the environment names another."""
    given = environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if given not in (":4096:8", ":16:8"):
        raise ValueError(
            "deterministic=true needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 in the environment "
            f"(or none, which means the first), given {given!r}"
        )


class Trainer:
    """One run on this rank.  Building it does everything that can fail for the user's reasons."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.folder = RunFolder(config.folder)
        self.total_steps = config.training.total_steps
        check_vocabulary(config)
        self.objective = build_objective(
            config.objective, config.model, config.seed, config.training.batch
        )
        mesh = build_mesh(config.parallel, device)
        blend = build_blend(
            config.data, config.data.train, config.training.sequence_length, config.seed,
            self.total_steps * config.training.batch,
        )  # fmt: skip
        micro = config.training.micro_batch
        self.batches = Batches(blend, self.objective, micro, mesh.data_rank, mesh.data_size, device)
        options = BuildOptions(
            dtype=config.precision.weight_dtype,
            compute_dtype=config.precision.compute_dtype,
            seed=config.seed,
            attention_backend=config.kernels.attention,
            compile=config.kernels.compile,
        )
        self.engine = build_engine(
            config.model, config.parallel, mesh, options, config.slots,
            micro_batches=config.training.batch // (micro * mesh.data_size),
            micro_batch=config.sequences_at_once,
        )  # fmt: skip
        self.pipeline = PipelineMeter(self.engine, self.folder, self.rank == 0)
        self.model = self.engine.model
        self.evaluator = Evaluator(config, self.engine, self.objective)
        self.optimizer = ShardedOptimizer(self.model, config.optimizer, config.kernels.optimizer)
        self.health = HealthMonitor(config.health, self.all_reduce_max)
        self.stop = StopRequest()
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.checkpoints = CheckpointManager(
            self.folder.checkpoints,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
            process_group=group,
        )
        self.state = RunState(config, fingerprints(config), self.model, self.optimizer)
        self.resume_note = self._start()
        self._write_fingerprints()

    def _start(self) -> str:
        """Resume, or start from other weights, or from the initial ones; says which."""
        latest = self.checkpoints.latest()
        if latest is not None:
            return self.state.resume(self.checkpoints, latest, self.health)
        if self.config.checkpoint.init_from is not None:
            return load_initial_weights(self.config, self.model, self.checkpoints.process_group)
        return "starting from initial weights"

    def all_reduce_max(self, value: float) -> float:
        if not dist.is_initialized():
            return value
        packed = torch.tensor(value, dtype=torch.float64, device=self.model.mesh.device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        return float(packed)

    def _write_fingerprints(self) -> None:
        """What a run started from; kept from the first start on."""
        if self.state.step == 0:
            init_hash = weights_hash(self.model)
            if self.rank == 0:
                sizes = unit_sizes(self.config.model, 1).values()
                content = {
                    "init_hash": init_hash,
                    "data_hash": self.state.fingerprints["data_fingerprint"],
                    "tokenizer_hash": self.state.fingerprints["tokenizer_fingerprint"],
                    "parameters": sum(size.parameters for size in sizes),
                }
                write_json(self.folder.fingerprints, content)

    def run(self) -> Outcome:
        """Train to the end, or to the next step boundary after a signal."""
        self.logger = self._logger()
        self.logger.announce(self.resume_note)
        length = self.config.slots
        config = self.config
        notes = [vocabulary_note(config), *config.model.notes(length), *config.objective.notes()]
        for note in notes:
            if note:
                self.logger.announce(note)
        self.health_log = HealthLog(self.folder) if self.rank == 0 else None
        self.meter = self._throughput()
        batch = self.config.training.batch
        prefetcher = Prefetcher(self.batches, batch)
        outcome: Outcome = "finished"
        while self.state.step < self.total_steps:
            with self.meter.waiting_for_data():
                more = self.state.step + 1 < self.total_steps
                micro_batches = prefetcher.take(self.state.samples, more)
            decision = self._step(micro_batches)
            if decision.action == "stop":
                outcome = "failed"
                break
            stopping = self.stop.agreed(self.all_reduce_max)
            with self.meter.excluded():
                self._evaluate_and_save(stopping)
            if stopping and self.state.step < self.total_steps:
                outcome = "preempted"
                break
        prefetcher.close()
        self.checkpoints.close()
        self.logger.close()
        return outcome

    def weights_are_finite(self) -> bool:
        """Of all ranks: every one calls it."""
        here = all(bool(local_tensor(p).isfinite().all()) for _, p in self.model.named_parameters())
        return self.all_reduce_max(float(not here)) == 0

    def _step(self, micro_batches: list[Any]) -> Decision:
        """Forward, backward, judgement, update; the state moves on by one step."""
        config, state = self.config, self.state
        number = state.step + 1
        measured = self.pipeline.due(number)
        result = self.engine.forward_backward(micro_batches, self.objective, measured)
        norm = gradient_norm(self.model)
        decision = self.health.check(number, result.losses[self.objective.primary], float(norm))
        factor = learning_rate_factor(config.schedule, state.step, self.total_steps)
        lr = config.optimizer.lr * factor
        if decision.takes_step:
            if config.training.clip_norm is not None:
                clip_gradients(self.model, norm, config.training.clip_norm)
            self.optimizer.step(lr)
            update_state(self.model, self.optimizer.steps)
        self.meter.step(tokens=config.training.batch_tokens, samples=config.training.batch)
        figures = {
            "loss/train": result.losses[self.objective.primary],
            **{f"loss/{n}": v for n, v in result.losses.items() if n != self.objective.primary},
            "optim/grad_norm": float(norm),
            "optim/lr": lr,
            **{f"experts/{name}": value for name, value in result.experts.items()},
        }
        if measured:
            with self.meter.excluded():
                figures |= self.pipeline.report(number)
        self._log(number, figures, decision)
        if decision.action != "stop":
            state.step, state.samples = number, state.samples + config.training.batch
        return decision

    def _log(self, number: int, figures: dict[str, float], decision: Decision) -> None:
        if decision.reason and self.health_log is not None:
            first, count = self.state.samples, self.config.training.batch
            figures |= self.health_log.record(
                number, decision, loss=figures["loss/train"], grad_norm=figures["optim/grad_norm"],
                first_sample=first, last_sample=first + count - 1,
            )  # fmt: skip
        if self.logger.due(number) or decision.reason or "pipeline/bubble" in figures:
            figures |= self.meter.report() | memory_report(self.model.mesh.device.type)
            self.logger.log_step(number, figures, note=decision.reason)
            if "pipeline/bubble" in figures and self.pipeline.note:
                self.logger.announce(self.pipeline.note)

    def _evaluate_and_save(self, stopping: bool) -> None:
        step, last = self.state.step, self.state.step == self.total_steps
        every = self.config.evaluation.every
        if last or (every and step % every == 0):
            figures = self.evaluator.run()
            if figures:
                self.logger.log_evaluation(step, figures)
        every = self.config.checkpoint.every
        if last or stopping or (every and step % every == 0):
            self.state.save(self.checkpoints, self.health)

    def _logger(self) -> MetricLogger:
        return MetricLogger(
            self.folder,
            self.config.metrics,
            is_main_rank=self.rank == 0,
            total_steps=self.total_steps,
            rank=self.rank,
            resumed_from=self.state.step,
            loss_is_bound=self.objective.is_bound,
            run_config=self.state.encoded,
        )

    def _throughput(self) -> Throughput:
        config = self.config
        sizes = unit_sizes(config.model, config.training.sequence_length)
        seen = config.objective
        flops = training_flops_per_token(
            config.model, config.training.sequence_length, seen.views, seen.canvas, seen.judged
        )
        inner = sum(s.active for name, s in sizes.items() if name not in ("embedding", "head"))
        return Throughput(
            total_tokens=self.total_steps * config.training.batch_tokens,
            flops_per_token=flops,
            non_embedding_parameters=inner,
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            peak_tflops=config.metrics.peak_tflops,
            tokens=self.state.samples * config.training.sequence_length,
            samples=self.state.samples,
        )
