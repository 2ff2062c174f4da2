"""Layouts of small models, for the tests of the memory plan."""

from dataclasses import dataclass, replace
from typing import Any

from models.attention import AttentionConfig
from models.config import ModelConfig
from models.experts import MoE
from models.feedforward import SwiGLU
from models.mtp import MTPConfig
from models.routers import TopK
from parallel.mesh import ParallelConfig, PipelineConfig
from parallel.pipeline.units import Placement
from pretrain.config import DataConfig, PrecisionConfig, RunConfig, SourceConfig, TrainingConfig
from pretrain.objectives.causal import Causal
from pretrain.objectives.perturbed import Perturbed
from pretrain.optimizer_config import OptimizerConfig
from pretrain.placement import plan_pipeline
from tests.parity.placements import scattered

SEQUENCE = 16
MODEL = ModelConfig(
    vocab_size=83,
    vocab_multiple=8,
    hidden=24,
    layers=5,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True),
    feedforward=SwiGLU.Config(hidden=20),
)
TIED = replace(MODEL, tie_embeddings=True)
PLAIN = ParallelConfig()
PIPELINE = PipelineConfig(schedule="interleaved", virtual_stages=2)
UNEVEN = PipelineConfig(planner="explicit", layout="Et*4|tL")
MTP = replace(MODEL, mtp=MTPConfig(depth=2))
MTP_TIED = replace(MTP, tie_embeddings=True)
REPEATED = replace(MODEL, mtp=MTPConfig(depth=3, kind="repeated"))
OWN = replace(MTP, mtp=MTPConfig(depth=2, embedding="own", input="norm"))
PARALLEL = replace(TIED, mtp=MTPConfig(depth=2, kind="parallel"))
LARGE = replace(MTP, vocab_size=4000, layers=2)  # several chunks of logits
MOE = replace(  # with every expert active loads are equal, as the plan assumes
    MODEL, feedforward=MoE.Config(experts=4, hidden=12, router=TopK.Config(k=4), shared_experts=1)
)
DISTILLED = Perturbed.Config(documents="mask", z_loss=1e-3)
TAIL = PipelineConfig(planner="explicit", layout="Et*3|ttmmL")
TAIL_ZB = replace(TAIL, schedule="zb_h1")


@dataclass(frozen=True)
class Layout:
    world: int
    parallel: ParallelConfig
    model: ModelConfig = MODEL
    micro_batches: int = 2
    compute: Any = "float32"
    placed: Placement | None = None  # None: planned
    sequence: int = SEQUENCE
    micro_batch: int = 1
    objective: Any = Causal.Config()
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def placement(self) -> Placement:
        return self.placed or plan_pipeline(self.model, self.parallel, self.sequence).placement

    @property
    def config(self) -> RunConfig:
        return run_config(
            self.model,
            self.parallel,
            batch=self.micro_batches * self.parallel.replicas(self.world) * self.parallel.fsdp,
            micro_batch=self.micro_batch,
            sequence=self.sequence,
            compute=self.compute,
            objective=self.objective,
            optimizer=self.optimizer,
        )


def run_config(
    model: ModelConfig,
    parallel: ParallelConfig = PLAIN,
    batch: int = 1,
    micro_batch: int = 1,
    sequence: int = SEQUENCE,
    **more: Any,
) -> RunConfig:
    compute = more.pop("compute", "float32")
    return RunConfig(
        model=model,
        parallel=parallel,
        data=DataConfig(train=(SourceConfig(path="x"),)),
        device="cpu",
        precision=PrecisionConfig(compute=compute),
        training=TrainingConfig(
            sequence_length=sequence,
            batch_tokens=batch * micro_batch * sequence,
            micro_batch=micro_batch,
            steps=1,
        ),
        **more,
    )


LAYOUTS = {
    "one": Layout(1, ParallelConfig()),
    "tied": Layout(1, ParallelConfig(), TIED),
    "dp2": Layout(2, ParallelConfig(dp=2)),
    "fsdp2": Layout(2, ParallelConfig(fsdp=2)),
    "fsdp2 one micro-batch": Layout(2, ParallelConfig(fsdp=2), micro_batches=1),
    "fsdp2 kept": Layout(2, ParallelConfig(fsdp=2, reshard_after_forward=False)),
    "fsdp2 bf16": Layout(
        2, ParallelConfig(fsdp=2, reshard_after_forward=False), compute="bfloat16"
    ),
    "tp2 sp": Layout(2, ParallelConfig(tp=2, sp=True)),
    "pp2 uneven": Layout(2, ParallelConfig(pp=2, pipeline=UNEVEN)),
    "pp2 tied": Layout(2, ParallelConfig(pp=2), TIED),
    "fsdp4 uneven rows": Layout(4, ParallelConfig(fsdp=4), replace(MODEL, hidden=22)),
    "fsdp4 tied": Layout(4, ParallelConfig(fsdp=4), TIED),
    "fsdp2 tp2": Layout(4, ParallelConfig(fsdp=2, tp=2)),
    "dp2 fsdp2": Layout(4, ParallelConfig(dp=2, fsdp=2)),
    "pp2 fsdp2": Layout(4, ParallelConfig(pp=2, fsdp=2, reshard_after_forward=False)),
    "pp2 tp2 tied": Layout(4, ParallelConfig(pp=2, tp=2), TIED),
    "pp4": Layout(4, ParallelConfig(pp=4)),
    "pp2 interleaved": Layout(2, ParallelConfig(pp=2, pipeline=PIPELINE)),
    "views": Layout(1, ParallelConfig(recompute="full"), TIED, objective=DISTILLED),
    "views large vocabulary": Layout(
        1, ParallelConfig(), LARGE, sequence=64, micro_batch=8, objective=DISTILLED
    ),
    "views pp2": Layout(2, ParallelConfig(pp=2), objective=DISTILLED),
    "muon fsdp2": Layout(2, ParallelConfig(fsdp=2), optimizer=OptimizerConfig(matrices="muon")),
    "zb_h1": Layout(2, ParallelConfig(pp=2, pipeline=PipelineConfig("zb_h1")), micro_batches=4),
    "moe": Layout(1, ParallelConfig(recompute="selective"), replace(MOE, mtp=MTPConfig(depth=1))),
    "moe bf16": Layout(1, ParallelConfig(), MOE, compute="bfloat16"),
    "moe fsdp2": Layout(2, ParallelConfig(fsdp=2), MOE),
    "moe tp2 sp": Layout(2, ParallelConfig(tp=2, sp=True), MOE),
    "moe ep2": Layout(2, ParallelConfig(dp=2, ep=2), MOE),
    "moe dp4 ep2": Layout(4, ParallelConfig(dp=4, ep=2), MOE),
    "moe ep2 tp2": Layout(4, ParallelConfig(dp=2, ep=2, tp=2), MOE),
    "mtp": Layout(1, ParallelConfig(), MTP),
    "mtp tied": Layout(1, ParallelConfig(), MTP_TIED, micro_batches=1),
    "mtp repeated": Layout(1, ParallelConfig(), REPEATED),
    "mtp own": Layout(1, ParallelConfig(recompute="selective"), OWN, compute="bfloat16"),
    "mtp parallel": Layout(1, ParallelConfig(recompute="full"), PARALLEL),
    "mtp fsdp2": Layout(2, ParallelConfig(fsdp=2), MTP),
    "mtp fsdp2 repeated": Layout(2, ParallelConfig(fsdp=2), replace(REPEATED, tie_embeddings=True)),
    "mtp fsdp2 own": Layout(
        2, ParallelConfig(fsdp=2, reshard_after_forward=False), OWN, compute="bfloat16"
    ),
    "mtp tp2 sp": Layout(2, ParallelConfig(tp=2, sp=True), MTP),
    "mtp pp2 tail": Layout(2, ParallelConfig(pp=2, pipeline=TAIL), MTP),
    "mtp pp2 tail tied": Layout(2, ParallelConfig(pp=2, pipeline=TAIL), MTP_TIED),
    "mtp zb_h1": Layout(2, ParallelConfig(pp=2, pipeline=TAIL_ZB), MTP, 4),
    "mtp zb_h1 full": Layout(
        2, ParallelConfig(pp=2, pipeline=TAIL_ZB, recompute="full"), MTP_TIED, 4
    ),
    "mtp pp2 fsdp2": Layout(
        4, ParallelConfig(pp=2, fsdp=2, reshard_after_forward=False, pipeline=TAIL), MTP_TIED
    ),
    **{
        f"star {schedule} {name}": Layout(
            3, ParallelConfig(pp=3, pipeline=PipelineConfig(schedule)), model, 3,
            placed=scattered(model, 3, 4, 5),
        )
        for schedule, name, model in (
            ("gpipe", "repeated", REPEATED),
            ("adahc", "untied", MTP),
            ("adahc_zb", "untied", MTP),
            ("adahc_zb", "tied", MTP_TIED),
            ("adahc_zb", "repeated", REPEATED),
        )
    },
    "star bf16": Layout(
        3, ParallelConfig(pp=3, pipeline=PipelineConfig("adahc_zb")), OWN, 3, "bfloat16",
        scattered(OWN, 3, 4, 1),
    ),
    "star tp2 sp": Layout(
        4, ParallelConfig(pp=2, tp=2, sp=True, pipeline=PipelineConfig("adahc_zb")), MTP, 3,
        placed=scattered(MTP, 2, 4, 2),
    ),
    **{
        f"star {schedule} large vocabulary": Layout(
            2, ParallelConfig(pp=2, pipeline=PipelineConfig(schedule)), LARGE, 2,
            placed=scattered(LARGE, 2, 2, 3), sequence=64, micro_batch=32,
        )
        for schedule in ("adahc", "adahc_zb")
    },
    "star fsdp2": Layout(
        4,
        ParallelConfig(
            pp=2, fsdp=2, reshard_after_forward=False, pipeline=PipelineConfig("adahc_zb")
        ),
        REPEATED,
        3,
        placed=scattered(REPEATED, 2, 4, 2),
    ),
}  # fmt: skip
