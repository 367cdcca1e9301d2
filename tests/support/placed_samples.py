"""Random graphs of ONNX and of operators, and random placements of their units."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import onnx

from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.graph.dfg import Dfg, Operator, Tensor, build_dfg
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.plan.flat import PlacementProblem
from cotenant.techniques.placement.unit_placement import UnitPlacement, device_names, runs_of
from onnx_samples import Sketch, info

WIDTH = 4


def open_placed(path: Path, **given: Any) -> PlacedModel:
    """A model of ONNX that can be given placements."""
    return PlacedModel(SegmentedModel.open(path, **given))


def random_model(seed: int, size: int) -> onnx.ModelProto:
    """Products with weights, sums and others, each of earlier outputs; an output without a reader is the model's."""
    rng = Random(seed)
    s = Sketch(seed)
    made, read = ["a", "b"], set()
    for at in range(size):
        kind = rng.choice(("MatMul", "MatMul", "Add", "Mul", "Sigmoid", "Concat"))
        names = [rng.choice(made[-8:]) for _ in range(1 if kind in ("MatMul", "Sigmoid") else 2)]
        read.update(names)
        if kind == "MatMul":
            name = s.op(kind, names[0], s.weight(WIDTH, WIDTH))
        elif kind == "Concat":  # and back to the width
            name = s.op("MatMul", s.op(kind, *names, axis=1), s.weight(2 * WIDTH, WIDTH), out=f"c{at}")
        else:
            name = s.op(kind, *names, out=f"e{at}")
        made.append(name)
    outputs = [name for name in made[2:] if name not in read]
    inputs = [info(name, ["rows", WIDTH]) for name in ("a", "b")]
    return s.model(inputs, [info(name, ["rows", WIDTH]) for name in outputs])


def random_placement(model: PlacedModel, seed: int, cores: int) -> UnitPlacement:
    """Any order in which units can run, in streaks on devices."""
    rng = Random(seed)
    dfg = model.dfg
    home = {name: unit.index for unit in dfg.units for name in unit.outputs}
    waiting = {u.index: {home[name] for name in u.inputs if name in home} for u in dfg.units}
    devices = device_names(cores)
    device, order = rng.choice(devices), []
    while waiting:
        ready = sorted(unit for unit, before in waiting.items() if before.isdisjoint(waiting))
        unit = rng.choice(ready)
        del waiting[unit]
        device = rng.choice(devices) if rng.random() < 0.5 else device
        order.append((dfg.unit_names[unit], device))
    return placement(model, order, cores)


def placement(model: PlacedModel, units: list[tuple[str, str]], cores: int = 2) -> UnitPlacement:
    return UnitPlacement(model.name, model.graph_path.parent.name, cores, 0, 0, 0, runs_of(units))


def graph_of(problem: PlacementProblem) -> Dfg:
    """The graph with the tasks of a problem as its units, and their tensors as its own."""
    tensors = problem.graph.tensors
    operators = []
    for at, task in enumerate(problem.graph.tasks):
        reads = tuple(tensors[t].name for t in problem.inputs[at])
        makes = tuple(each.name for each in tensors if each.producer == at) or (f"end{at}",)
        operators.append(Operator(at, task.name, "Conv", "", reads, makes))
    ends = [Tensor(op.outputs[0], "", None) for op in operators if op.outputs[0].startswith("end")]
    names = {name: Tensor(name, "", None) for op in operators for name in op.outputs}
    return build_dfg("random", operators, [[at] for at in range(len(operators))], [], ends, names)
