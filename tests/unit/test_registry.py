"""Registries: registering, finding, building, and the errors that name what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest

from models.blocks import BLOCKS
from models.denoising import SAMPLERS
from models.feedforward import FEEDFORWARDS
from models.norms import NORMS, RMSNorm
from models.positions import POSITIONS
from models.registry import Registry
from models.samplers import sample as sample  # registers them all
from pretrain.objectives.base import OBJECTIVES

REGISTRIES = {r.kind: r for r in (BLOCKS, FEEDFORWARDS, NORMS, POSITIONS, OBJECTIVES, SAMPLERS)}


def _registry() -> tuple[Registry, Any]:
    registry = Registry("shape")

    @registry.register("circle")
    class Circle:
        @dataclass(frozen=True)
        class Config:
            radius: float = 1.0

        def __init__(self, config: Config, scale: float, *, unit: str) -> None:
            self.area = config.radius * scale
            self.unit = unit

    return registry, Circle


def test_build_finds_the_component_of_a_config() -> None:
    registry, circle = _registry()
    built: Any = registry.build(circle.Config(3.0), 2.0, unit="m")
    assert type(built) is circle
    assert (built.area, built.unit) == (6.0, "m")
    assert registry.names() == ("circle",)
    assert registry.component("circle") is circle
    assert registry.config_class("circle") is circle.Config
    assert registry.name_of(circle.Config) == "circle"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    registry, _ = _registry()
    with pytest.raises(ValueError, match=r"unknown shape 'circel': .*'circle'.* mean 'circle'\?"):
        registry.component("circel")
    with pytest.raises(ValueError) as caught:
        registry.component("xyz")
    assert "mean" not in str(caught.value)


def test_a_config_of_another_registry_is_refused() -> None:
    with pytest.raises(ValueError, match="not the config of any registered norm"):
        NORMS.build(POSITIONS.config_class("rope")(), 8)

    class Derived(RMSNorm.Config):  # only the exact class counts: a subclass is another component
        pass

    with pytest.raises(ValueError, match="Derived"):
        NORMS.name_of(Derived)


def test_registration_mistakes_are_our_own() -> None:
    registry, circle = _registry()
    with pytest.raises(AssertionError, match="'circle' is registered twice"):
        registry.register("circle")(circle)
    with pytest.raises(AssertionError, match="needs its own Config"):
        registry.register("derived")(type("Derived", (circle,), {}))  # an inherited one is not
    with pytest.raises(AssertionError, match="needs its own Config"):
        registry.register("bare")(type("Bare", (), {"Config": dict}))


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_config_is_frozen_hashable_and_explains_its_fields(kind: str) -> None:
    registry = REGISTRIES[kind]
    assert registry.names()
    for name in registry.names():
        config: Any = registry.config_class(name)()
        assert is_dataclass(config)
        assert hash(config) == hash(registry.config_class(name)())
        assert registry.name_of(type(config)) == name
        for entry in fields(config):
            assert entry.metadata.get("help"), f"{kind} {name}: {entry.name} has no help text"
            with pytest.raises(AttributeError):
                setattr(config, entry.name, None)
        assert not getattr(config, "problems", list)()
