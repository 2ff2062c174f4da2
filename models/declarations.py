"""What modules declare about tensors of their own, and the code that reads it.

A module may define

* ``plan: ClassVar[dict[str, str]]``: how each parameter lies under tensor parallelism;
* ``initial(key) -> float | Tensor | None``: the first value of parameter or buffer ``key``: a
  constant, or the whole logical tensor; None for the rule of ``initialize.py``;
* ``wide: ClassVar[tuple[str, ...]]``: parameters that are never cast to the compute dtype;
* ``optimizer_group: ClassVar[dict[str, str]]``: parameters that are trained by rules of their own;
* ``state: ClassVar[tuple[str, ...]]``: persistent buffers that are carried along and saved but not
  trained, whole and equal on every tensor- and data-parallel rank, with

      update_state(step)           after ``step`` updates; 0 = the weights are new
      reads_weights(step) -> bool  whether that call reads parameters (left out: never)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds tensor ``name`` itself, and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def initial_value(model: nn.Module, name: str) -> float | Tensor | None:
    """What the owner of tensor ``name`` declares as its first value."""
    module, key = owner(model, name)
    declared = getattr(module, "initial", None)
    value: float | Tensor | None = None if declared is None else declared(key)
    return value


def wide_parameters(model: nn.Module) -> set[nn.Parameter]:
    return {
        module._parameters[key]  # type: ignore[misc]  # not the local view that a reader sees
        for module in model.modules()
        for key in getattr(module, "wide", ())
        if module._parameters.get(key) is not None
    }


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of everything that is carried along."""
    for prefix, module in model.named_modules():
        for key in getattr(module, "state", ()):
            yield f"{prefix}.{key}" if prefix else key, module.get_buffer(key)
