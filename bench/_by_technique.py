"""Models of a repository made to run by a technique, whether or not that pays: kernels, a placement, chunks.

What `cotenant compile`, `place` and `co-schedule` find is left aside where onnxruntime is faster without it. Here
answers are asked for, not speed: every unit runs on kernels that can, and plans are followed.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
from msgspec import json, structs
from onnx import helper

from bench._askers import Target
from bench._carry import MOST_ROWS, SLO_MS, Arrays, ask_carry, carry, write_model
from cotenant.execute.onnx.segment_store import content_of
from cotenant.measure.inputs import check_shapes
from cotenant.measure.opened_model import open_version
from cotenant.repository import STATE_FOLDER, ModelVersion, find_versions, graphs_path, placement_path
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, StoredJointPlan, Wait
from cotenant.techniques.granularity.plan.kept import store_joint_plan
from cotenant.techniques.layer_blocks.compile.ckernel.backend import CKernel
from cotenant.techniques.layer_blocks.compile.effort import SearchEffort
from cotenant.techniques.layer_blocks.compile.search import search
from cotenant.techniques.layer_blocks.compile.toolchain import find_compiler
from cotenant.techniques.layer_blocks.execute.choice import (
    FORMAT,
    ChosenKernels,
    KernelChoice,
    choice_path,
    save_choice,
)
from cotenant.techniques.layer_blocks.execute.compiled_model import CompiledModel
from cotenant.techniques.layer_blocks.execute.loaded_kernels import store_of
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.measure.placed import PlacementCheck, check_path
from cotenant.techniques.placement.unit_placement import UnitPlacement, runs_of, save_placement
from cotenant.trace import Record, work_of

PAIR_ROWS = 2
"""Rows of each query that the joint plan is for."""


def prepare(part: Path, by: str, asked: list[Target]) -> tuple[list[Target], int]:
    """Have models of a linked repository run by a technique. Returns the models to query and their units on kernels."""
    state = (part / STATE_FOLDER).resolve()
    (part / STATE_FOLDER).unlink()
    shutil.copytree(state, part / STATE_FOLDER)
    if by == "kernels":
        names = [each.model for each in asked if (part / each.model / "1" / "model.onnx").exists()]
        return asked, compile_all(part, names)
    if by == "placement":
        write_placed(part, "branches")
        place(part, "branches")
        return [*asked, Target("branches", ask_carry, 6.0)], 0
    join(part, ("carry", "other"))
    write_pair(part, "pair", ("carry", "other"))
    return [*asked, Target("pair", ask_pair, 12.0, PAIR_ROWS)], 0


def ask_pair(query: int, rows: int) -> tuple[Arrays, Any]:
    """Of `pair`: as many rows as its plan is for, three times in four."""
    return ask_carry(query, rows if query % 4 == 0 else PAIR_ROWS)


def compile_all(root: Path, names: Sequence[str]) -> int:
    """Have the models with layers for kernels run on those, one candidate a layer; gives how many units do.

    Raises CompileError where there is no compiler.
    """
    cache = graphs_path(root)
    store, backend = store_of(cache), CKernel(find_compiler())
    units = 0
    for name in names:
        found = _found(root, name)
        with CompiledModel.open(found.path, cache_dir=cache, name=name) as model:
            problems = {}
            for shape in check_shapes(name, model.inputs, found.config.model.shapes) if not model.uncut_reason else ():
                asked = model.planner(shape, store.target.lanes).problems()
                problems |= dict.fromkeys(problem for unit in asked.values() for problem in unit)
                units += len(asked)
            if not problems:
                continue
            kernels = [
                ChosenKernels(problem, (search(problem, store, backend, SearchEffort(1))[0].name,))
                for problem in problems
            ]
            choice = KernelChoice(FORMAT, model.unit_count, tuple(kernels))
        save_choice(choice_path(cache, content_of(found.path)), choice)
    return units


def two_ways() -> onnx.ModelProto:
    """Two models as `carry` on the same rows, and the mean of both: those rows. FP32 [batch, 16] both ways."""
    left, right = carry(2).graph, carry(3).graph
    nodes, weights = [], []
    for side, graph in (("l", left), ("r", right)):
        names = {name: f"{side}_{name}" for node in graph.node for name in (*node.input, *node.output) if name != "x"}
        for node in graph.node:
            inputs, outputs = ([names.get(name, name) for name in each] for each in (node.input, node.output))
            nodes.append(helper.make_node(node.op_type, inputs, outputs))
        for weight in graph.initializer:
            weight.name = names[weight.name]
            weights.append(weight)
    nodes.append(helper.make_node("Mean", ["l_y", "r_y"], ["y"]))
    made = helper.make_graph(nodes, "two ways", left.input, left.output, weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def write_placed(root: Path, name: str) -> None:
    """Put `two_ways` into a repository. `place` it once the repository is linked."""
    write_model(root, name, two_ways(), MOST_ROWS)
    path = root / name / "config.toml"
    path.write_text(path.read_text().replace("[model]\n", '[model]\nplacement = "auto"\n'), encoding="utf-8")


def place(root: Path, name: str) -> None:
    """Have a `two_ways` run with a branch on each of two cores where it has both."""
    found, cache = _found(root, name), graphs_path(root)
    with open_version(root, found, placed=False).runner as model:
        assert isinstance(model, PlacedModel)
        units = [
            (unit, "cpu:0" if any(each.startswith("l_") for each in model.dfg.units[at].outputs) else "cpu:1")
            for at, unit in enumerate(model.dfg.unit_names)
        ]
        made = UnitPlacement(name, model.graph_path.parent.name, 2, 0, 0, 0, runs_of(units))
    save_placement(placement_path(cache, made.graph, 2), made)
    with open_version(root, found).runner:  # measures what it comes to, and keeps that
        pass
    path = check_path(cache, made)
    path.write_bytes(
        json.encode(structs.replace(json.decode(path.read_bytes(), type=PlacementCheck), ratio=0.5, others=0.0))
    )


def join(root: Path, names: tuple[str, str]) -> None:
    """Have two models that start together with `PAIR_ROWS` rows each run by a plan.

    The plan runs segments of the first model row by row, and the end of the second model after them.
    """
    members = []
    for name in names:
        opened = open_version(root, _found(root, name))
        with opened.runner as model:
            members.append(JointMember(name, PAIR_ROWS, model.unit_count, graph=opened.digest))
    first, last = (member.units for member in members)
    chunks = (Chunk(0, 1, first // 2, (1,) * PAIR_ROWS), Chunk(0, first // 2, first, (1,) * PAIR_ROWS))
    waits = (Wait(1, last - 1, 0, first // 2),)
    plan = StoredJointPlan(
        tuple(members), (), waits, chunks, lanes=2, makespan_ns=1, streams_ns=2, sequential_ns=3, bound_ns=1
    )
    store_joint_plan(root, plan, plan.key)


def write_pair(root: Path, name: str, models: tuple[str, str]) -> None:
    """Put an application into a repository: two models on the same rows at once. Its outputs are "y" and "z"."""
    (root / name).mkdir(parents=True, exist_ok=True)
    stages = "".join(
        f'[[application.stage]]\nname = "{stage}"\nmodel = "{model}"\ninputs = {{ x = "x" }}\n\n'
        for stage, model in zip(("one", "two"), models, strict=True)
    )
    text = f'[application]\nslo_ms = {SLO_MS}\n\n{stages}[application.outputs]\ny = "one.y"\nz = "two.y"\n'
    (root / name / "config.toml").write_text(text, encoding="utf-8")


def chunk_launches(records: Iterable[Record]) -> int:
    """Launches of some rows of a batch."""
    actions = (action for record in records for kind, action in record.actions if kind == "Launch")
    return sum(bool(work_of(action).rows) for action in actions)


def placed_launches(url: str) -> int:
    """Launches that ran by a placement, as the server counts them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return round(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("cotenant_placed_launches_total"))
    )


def _found(root: Path, name: str) -> ModelVersion:
    return find_versions(root, name)[0]
