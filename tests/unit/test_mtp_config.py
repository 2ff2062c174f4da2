"""Settings of multi-token prediction that would be ignored or do not go together are errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models.blocks import PostNormBlock
from models.config import ModelConfig
from models.mtp import MAX_DEPTH, MTPConfig
from pretrain.config import RunConfig
from pretrain.decode import decode, validate
from pretrain.yaml_text import ConfigError


@pytest.mark.parametrize(
    ("mtp", "paths"),
    [
        (MTPConfig(), []),
        (MTPConfig(MAX_DEPTH, "repeated", "own", "norm", "hidden_first"), []),
        (MTPConfig(2, "parallel"), []),
        (MTPConfig(-1), ["depth"]),
        (MTPConfig(MAX_DEPTH + 1), ["depth"]),
        (MTPConfig(0, "parallel", "own", "norm", "hidden_first"),
         ["kind", "embedding", "input", "concat"]),
        (MTPConfig(1, "parallel", "own", "norm", "hidden_first"), ["embedding", "input", "concat"]),
    ],
    ids=str,
)  # fmt: skip
def test_problems(mtp: MTPConfig, paths: list[str]) -> None:
    assert [path for path, _ in mtp.problems()] == paths


def test_wiring_and_modules() -> None:
    kinds = [MTPConfig(3), MTPConfig(3, input="norm"), MTPConfig(3, "parallel"),
             MTPConfig(3, "repeated", "own")]  # fmt: skip
    assert [m.wiring for m in kinds] == ["block", "norm", "trunk", "block"]
    assert [list(m.modules) for m in kinds] == [[1, 2, 3]] * 3 + [[1]]
    assert not MTPConfig().modules and not MTPConfig(0, "repeated").modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 1, "mtp": MTPConfig(1, "parallel")}, "mtp.kind: parallel needs a trunk"),
        (
            {"block": PostNormBlock.Config(), "mtp": MTPConfig(1, input="norm")},
            "mtp.input: norm is set but block=post has no final norm",
        ),
        ({"mtp": MTPConfig(7)}, "mtp.depth: must be 0 to 4, got 7"),
    ],
)
def test_models_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(replace(ModelConfig(), **changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tree", "messages"),
    [
        (
            {"objective": {"mtp_weight": 0.1, "mtp_normalize": "seq_len"}},
            ["objective.mtp_weight: is set but model.mtp.depth=0",
             "objective.mtp_normalize: is set but model.mtp.depth=0"],
        ),
        (
            {"model": {"mtp": {"depth": 2}}, "objective": {"mtp_weight": 0.0}},
            ["objective.mtp_weight: must be positive and finite, got 0.0"],
        ),
        (
            {"model": {"mtp": {"depth": 4}},
             "training": {"sequence_length": 4, "batch_tokens": 8, "steps": 1}},
            ["model.mtp.depth: 4 needs sequences longer than 4 tokens"],
        ),
        ({"model": {"mtp": {"kind": "paralel"}}}, ["model.mtp.kind", "did you mean 'parallel'"]),
        (
            {"model": {"mtp": {"depth": 1}}, "finish": {"export": "llama"}},
            ["finish.export: llama cannot represent this model: mtp.depth=1 (llama has none)"],
        ),
    ],
    ids=["without-mtp", "weight", "short", "typo", "export"],
)  # fmt: skip
def test_runs_that_do_not_go_together(tree: dict[str, Any], messages: list[str]) -> None:
    base = {"data": {"train": [{"path": "x"}]}, "training": {"steps": 1}}
    with pytest.raises(ConfigError) as error:
        decode(RunConfig, {**base, **tree})
    for message in messages:
        assert message in str(error.value)
