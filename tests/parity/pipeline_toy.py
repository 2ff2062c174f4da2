"""A small network for the pipeline tests: one float64 layer per unit, on any placement.

It has multi-token-prediction units and head chunks where the placement asks for them.  A unit's
parameters depend on its name alone, so every placement starts from the same model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.pipeline.units import Placement, Unit, data_flow

ROWS, WIDTH = 8, 6


def layer(unit: Unit) -> nn.Module:
    """The parameters of a unit, a function of its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, unit.kind)) * 1000 + unit.index)
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def features(microbatch: int, salt: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * microbatch + salt)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def chunk_rows(x: Tensor, chunks: Iterable[int], of: int) -> Tensor:
    return torch.cat([x.chunk(of)[c] for c in chunks])


class ToyStage:
    """Any stage of any placement: units run in order on whatever tensors they read."""

    dtype = torch.float64

    def __init__(self, placement: Placement, stage: int, offset: int = 0) -> None:
        self.placement, self.stage, self.offset = placement, stage, offset
        self.flow = data_flow(placement.units, placement.mtp_input)
        self.chunks = sum(unit.kind == "h" and unit.index == 0 for unit in placement.units)
        # All chunks of one head share their parameters on a stage.
        self.layers = {(u.kind, u.index): layer(u) for u in placement.stages[stage]}
        self.losses: dict[tuple[int, str], float] = {}
        self.calls: list[str] = []
        self.graphs: dict[int, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}

    def _shape(self, edges: tuple[Any, ...]) -> Any:
        shapes = [(len(e.chunks or range(self.chunks)) * ROWS // self.chunks, WIDTH) for e in edges]
        return shapes[0] if len(shapes) == 1 else shapes

    def input_shape(self, microbatch: int) -> Any:
        return self._shape(self.placement.inputs[self.stage])

    def output_shape(self, microbatch: int) -> Any:
        return self._shape(self.placement.outputs[self.stage])

    def head_loss(self, unit: Unit, y: Tensor, microbatch: int) -> Tensor:
        target = features(microbatch + self.offset, 50 + unit.index).chunk(self.chunks)[unit.chunk]
        loss = (self.layers["h", unit.index](y) - target).square().sum() * (1 + unit.index)
        self.losses[microbatch, str(unit)] = loss.item()
        return loss

    def unit_output(self, unit: Unit, x: Tensor | None, microbatch: int) -> Tensor:
        layer = self.layers[unit.kind, unit.index]
        if unit.kind == "E":
            return layer(features(microbatch + self.offset, 0))
        return nn.functional.gelu(layer(x))

    def forward(self, microbatch: int, x: Any) -> Any:
        edges = self.placement.inputs[self.stage]
        inputs = [] if x is None else [x] if isinstance(x, Tensor) else list(x)
        if torch.is_grad_enabled():
            for tensor in inputs:
                tensor.requires_grad_()
        have: dict[Unit, Tensor] = {}
        rows: dict[tuple[Unit, int], Tensor] = {}
        for edge, tensor in zip(edges, inputs):
            if edge.chunks:
                pieces = tensor.chunk(len(edge.chunks))
                rows.update({(edge.producer, c): p for c, p in zip(edge.chunks, pieces)})
            else:
                have[edge.producer] = tensor
        losses = []
        for unit in self.placement.stages[self.stage]:
            source = self.flow[unit]
            if unit.kind != "h":
                x = None if source is None else have[source]
                have[unit] = self.unit_output(unit, x, microbatch)
            else:
                assert source is not None
                y = rows.get((source, unit.chunk))
                if y is None:
                    y = have[source].chunk(self.chunks)[unit.chunk]
                losses.append(self.head_loss(unit, y, microbatch))
        outputs = [
            chunk_rows(have[e.producer], e.chunks, self.chunks) if e.chunks else have[e.producer]
            for e in self.placement.outputs[self.stage]
        ]
        if torch.is_grad_enabled():
            self.graphs[microbatch] = (inputs, outputs, losses)
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.layers.values() for p in module.parameters()]

    def _gradients(self, microbatch: int, grad_output: Any, wrt: list[Any], keep: bool) -> Any:
        _, outputs, losses = self.graphs[microbatch]
        given = [grad_output] if isinstance(grad_output, Tensor) else list(grad_output or ())
        ones = [torch.ones_like(loss) for loss in losses]
        return torch.autograd.grad(outputs + losses, wrt, given + ones, retain_graph=keep)

    def _add(self, gradients: Iterable[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters(), gradients):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        inputs = self.graphs[microbatch][0]
        result = self._gradients(microbatch, grad_output, inputs + self.parameters(), False)
        self._add(result[len(inputs) :])
        del self.graphs[microbatch]
        return result[0] if len(inputs) == 1 else result[: len(inputs)] or None

    def backward_input(self, microbatch: int, grad_output: Any) -> Any:
        inputs = self.graphs[microbatch][0]
        self.late = getattr(self, "late", {})
        self.late[microbatch] = grad_output
        if not inputs:
            return None
        result = self._gradients(microbatch, grad_output, inputs, True)
        return result[0] if len(inputs) == 1 else result

    def backward_weight(self, microbatch: int) -> None:
        grad_output = self.late.pop(microbatch)
        self._add(self._gradients(microbatch, grad_output, self.parameters(), False))
        del self.graphs[microbatch]

    def head(self, microbatch: int, x: Any) -> Any:
        self.forward(microbatch, x)
        return self.backward_input(microbatch, None)

    head_weight = backward_weight

    def unshard(self) -> None:
        self.calls.append("unshard")

    def reshard(self) -> None:
        self.calls.append("reshard")

    def reduce_gradients(self) -> None:
        self.calls.append("reduce")


@dataclass(frozen=True)
class Outcome:
    """Losses by (micro-batch, head) and gradients by layer, from one rank or from all."""

    losses: dict[tuple[int, str], float]
    gradients: dict[tuple[str, int], list[Tensor]]

    @staticmethod
    def of(stages: Iterable[ToyStage]) -> Outcome:
        total = Outcome({}, {})
        for stage in stages:
            total.add(
                Outcome(
                    stage.losses,
                    {
                        name: [p.grad.clone() for p in module.parameters() if p.grad is not None]
                        for name, module in stage.layers.items()
                    },
                )
            )
        return total

    def add(self, other: Outcome) -> None:
        """Join two parts of a model; copies of one head add up."""
        self.losses.update(other.losses)
        for name, gradients in other.gradients.items():
            if name in self.gradients:
                gradients = [a + b for a, b in zip(self.gradients[name], gradients)]
            self.gradients[name] = gradients


def reference(units: Iterable[Unit], count: int, offset: int = 0, order: str = "block") -> Outcome:
    """The plain run: one stage, one process, one micro-batch after the other."""
    units = tuple(units)
    stage = ToyStage(Placement(units, (units,), (0,), order), 0, offset)
    for microbatch in range(count):
        stage.forward(microbatch, None)
        stage.backward(microbatch, None)
    return Outcome.of([stage])


def error(found: Outcome, expected: Outcome) -> float:
    """The largest relative error of the loss table and of any gradient."""
    assert found.losses.keys() == expected.losses.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    losses = torch.tensor([[found.losses[k], expected.losses[k]] for k in expected.losses])
    errors = [float((losses[:, 0] - losses[:, 1]).norm() / losses[:, 1].norm())]
    for name, wanted in expected.gradients.items():
        got = found.gradients[name]
        assert len(got) == len(wanted)
        errors += [float((g - w).norm() / w.norm()) for g, w in zip(got, wanted)]
    return max(errors)


def joined(parts: list[Outcome]) -> Outcome:
    total = Outcome({}, {})
    for part in parts:
        total.add(part)
    return total
