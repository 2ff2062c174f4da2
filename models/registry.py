"""Component registries: the class is the entry, its nested ``Config`` is the schema.

A component joins a registry by decorating one class::

    @NORMS.register("rms")
    class RMSNorm(nn.Module):
        @dataclass(frozen=True)
        class Config:
            eps: float = 1e-5

From then on ``norm: {type: rms, eps: 1e-6}`` (or just ``norm: rms``) selects it in a config
file, and every test that loops over the registry covers it.  Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class Registry:
    """Named component classes of one kind (``norm``, ``block``, ...)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._components: dict[str, type] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator; the class must carry a frozen dataclass named ``Config``."""

        def add(component: C) -> C:
            config = component.__dict__.get("Config")
            assert dataclasses.is_dataclass(config), f"{component.__name__} needs its own Config"
            assert name not in self._components, f"{self.kind} {name!r} is registered twice"
            self._components[name] = component
            return component

        return add

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._components))

    def component(self, name: str) -> type:
        """The class registered under ``name``; ``ValueError`` names the nearest one."""
        if name not in self._components:
            near = difflib.get_close_matches(name, self._components, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown {self.kind} {name!r}: allowed are {self.names()}{hint}")
        return self._components[name]

    def config_class(self, name: str) -> type:
        return self.component(name).Config  # type: ignore[attr-defined]

    def name_of(self, config_class: type) -> str:
        """The registered name whose component has exactly this ``Config`` class."""
        for name, component in self._components.items():
            if component.Config is config_class:  # type: ignore[attr-defined]
                return name
        raise ValueError(f"{config_class!r} is not the config of any registered {self.kind}")

    def build(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Instantiate the component that ``config`` belongs to: ``component(config, ...)``."""
        return self.component(self.name_of(type(config)))(config, *args, **kwargs)
