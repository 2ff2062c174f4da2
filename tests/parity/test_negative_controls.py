"""Break a layout on purpose: the parity comparison must object.

Each control is a mistake that a parallel codebase has shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from models.adarope import LearnedTable
from models.collectives import axis, bound
from models.conditioned import Modulation
from models.norms import AttentionVariance, ProjectionRMSNorm, RMSNorm
from models.positions import AdaRoPE, LeRoPE
from parallel import gradients
from parallel.apply import local_tensor
from parallel.mesh import ParallelConfig
from parallel.stage import ShardedWeights
from pretrain.engine import Engine
from tests.components import chosen
from tests.parity.harness import SMALL, Case, assert_parity
from tests.parity.test_components import component_cases

pytestmark = pytest.mark.parity

TIED = replace(SMALL, tie_embeddings=True)
ADAROPE = replace(SMALL, position=AdaRoPE.Config())
LEROPE = replace(SMALL, position=LeRoPE.Config())
LNS = chosen(SMALL, block="lns")
ADALN = chosen(SMALL, block="adaln")
OLMO2, STRONG_BHYT = component_cases()["olmo2"], component_cases()["bhyt-strong"]
DP2 = Case(world=2, micro_batches=2, parallel=ParallelConfig(dp=2))
FSDP2 = Case(world=2, micro_batches=2, parallel=ParallelConfig(fsdp=2))
FSDP2_KEEP = replace(FSDP2, parallel=ParallelConfig(fsdp=2, reshard_after_forward=False))
TP2_SP = Case(world=2, parallel=ParallelConfig(tp=2, sp=True))
PP2 = Case(world=2, micro_batches=3, parallel=ParallelConfig(pp=2))
PP2_TIED = replace(PP2, model=TIED)


def drop_data_reduction(engine: Engine) -> None:
    original = gradients._gradients_over
    gradients._gradients_over = lambda model, axis: [] if axis == "data" else original(model, axis)


def drop_partial_reduction(engine: Engine) -> None:
    """Norm gains under sequence parallelism keep only this rank's positions."""
    original = gradients._gradients_over
    gradients._gradients_over = lambda model, axis: [] if axis == "tp" else original(model, axis)


def count_tokens_locally(engine: Engine) -> None:
    engine.global_counts = lambda counts: counts  # type: ignore[method-assign]


def average_micro_batch_means(engine: Engine) -> None:
    """A mean of means: each micro-batch divided by its own token count."""
    for stage in engine.stages.values():
        inner = stage.forward

        def forward(index: int, x: torch.Tensor | None, stage=stage, inner=inner):  # type: ignore[no-untyped-def]
            labels = stage.micro_batches[index].fields["labels"]
            count = float(max(int((labels != -100).sum()), 1)) * len(stage.micro_batches)
            stage.terms = [replace(term, normalizer=count) for term in stage.terms]  # type: ignore[type-var]
            return inner(index, x)

        stage.forward = forward  # type: ignore[method-assign]


def keep_shared_gradient_apart(engine: Engine) -> None:
    """The tied embedding's two hosts never add their gradients."""
    engine.model.hosts = {}


def count_shared_weight_twice(engine: Engine) -> None:
    """Every host counts the tied embedding in the norm."""
    original = gradients.counted_here

    def counted(model, name, parameter):  # type: ignore[no-untyped-def]
        return name == "embedding.weight" or original(model, name, parameter)

    gradients.counted_here = counted


def initialise_shards_alike(engine: Engine) -> None:
    """What a plain normal_() on sharded storage gives: the same values on every rank."""
    for _, parameter in engine.model.named_parameters():
        torch.manual_seed(0)
        if parameter.dim() > 1:
            local_tensor(parameter).normal_(std=0.1)


def drop_a_block(engine: Engine) -> None:
    """A layout that silently loses a layer."""
    run = engine.model.part.run_unit

    def run_unit(name, x, ids, context):  # type: ignore[no-untyped-def]
        return x if name == "blocks.2" else run(name, x, ids, context)

    engine.model.part.run_unit = run_unit  # type: ignore[method-assign]


def skip_last_synchronisation(engine: Engine) -> None:
    """fully_shard never told that the last backward pass has come."""
    (weights,) = {stage.weights for stage in engine.stages.values()}

    def expect(roots: list[Any], number: int, count: int) -> None:
        ShardedWeights.expect(weights, roots, number, count + 1)

    weights.expect = expect  # type: ignore[method-assign]


def detach_frequencies(engine: Engine) -> None:
    """Tables from a copy of what is learned: the loss is right and nothing ever learns."""
    for module in engine.model.part.modules():
        if isinstance(module, LearnedTable):
            inner = module.frequencies
            module.frequencies = lambda *args, inner=inner: inner(*args).detach()  # type: ignore[method-assign, misc]


def keep_shared_table_apart(engine: Engine) -> None:
    """Each stage trains its own copy of the table that all layers share."""
    del engine.model.hosts["shared.position.log_scale"]


def count_layers_by_stage(engine: Engine) -> None:
    """A block knows its place on this stage, and takes it for its place in the model."""
    for number, block in enumerate(engine.model.part.blocks.values()):
        block.layer = number  # type: ignore[assignment]


def norm_own_heads(engine: Engine) -> None:
    """The norm of a whole projection takes the heads of its rank for all."""
    for module in engine.model.part.modules():
        if isinstance(module, ProjectionRMSNorm):
            module.forward = partial(RMSNorm.forward, module)  # type: ignore[method-assign]


def measure_one_shard(engine: Engine) -> None:
    """BHyT's c from the heads of one rank."""
    for module in engine.model.part.modules():
        if isinstance(module, AttentionVariance):
            whole = module.measured()
            with bound({}):
                module.c.mul_(module.measured() / whole)


def hear_the_first_positions(engine: Engine) -> None:
    """Every rank of a sequence takes the noise of the first one's positions."""
    for module in engine.model.part.modules():
        if isinstance(module, Modulation):
            inner = module.forward

            def forward(x: Any, context: Any, inner=inner):  # type: ignore[no-untyped-def]
                noise = context.noise[:, : x.shape[1]].repeat(1, axis("sp").size)
                return inner(x, replace(context, noise=noise))

            module.forward = forward  # type: ignore[method-assign]


def keep_noise_embedding_apart(engine: Engine) -> None:
    """Each stage trains its own copy of what embeds the noise."""
    del engine.model.hosts["shared.noise.second"]


CONTROLS: dict[str, tuple[Case, Callable[[Engine], None]]] = {
    "dropped-data-reduction": (DP2, drop_data_reduction),
    "dropped-sequence-reduction": (TP2_SP, drop_partial_reduction),
    "local-token-count-dp": (DP2, count_tokens_locally),
    "local-token-count-fsdp": (FSDP2, count_tokens_locally),
    "mean-of-means": (replace(PP2, micro_batches=3), average_micro_batch_means),
    "unshared-tied-gradient": (PP2_TIED, keep_shared_gradient_apart),
    "tied-weight-counted-twice": (PP2_TIED, count_shared_weight_twice),
    "identical-shards": (TP2_SP, initialise_shards_alike),
    "dropped-block": (PP2, drop_a_block),
    "detached-frequencies": (replace(DP2, model=ADAROPE), detach_frequencies),
    "unshared-table": (replace(PP2, model=LEROPE), keep_shared_table_apart),
    "stage-local-layer": (replace(PP2, model=LNS), count_layers_by_stage),
    "own-heads-normed": (replace(TP2_SP, model=OLMO2), norm_own_heads),
    "one-shard-measured": (replace(TP2_SP, model=STRONG_BHYT), measure_one_shard),
    "first-positions-heard": (replace(TP2_SP, model=ADALN, noise=True), hear_the_first_positions),
    "unshared-noise-embedding": (
        replace(PP2, model=ADALN, noise=True),
        keep_noise_embedding_apart,
    ),
    "never-synchronised": (FSDP2_KEEP, skip_last_synchronisation),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_sabotage_is_noticed(name: str) -> None:
    case, sabotage = CONTROLS[name]
    assert_parity(case)  # intact, it passes
    with pytest.raises(AssertionError):
        assert_parity(replace(case, sabotage=sabotage))
