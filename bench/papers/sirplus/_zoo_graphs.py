"""The operators of the zoo's files as tables: input for a placement, without torch and without their weights.

A table has a row for each operator in the file's order. It has its type, the unit that it is fused into
(`graph/units`), multiply-adds, bytes of weights, its inputs and the bytes of its outputs. `reads` names rows of this
table, and the number of the output where it is not the first; inputs of the graph are left out.

`python -m bench.papers.sirplus._zoo_graphs FOLDER` writes the tables again from a repository that
`python -m bench.zoo` made in FOLDER.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cotenant.graph.dfg import Dfg
from cotenant.graph.onnx import load_dfg

FOLDER = Path(__file__).parent / "graphs"
MODELS = ("faster_rcnn_by_class", "mask_rcnn_by_class", "ssd_resnet34_by_class", "resnet50")
VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators that compute nothing: what they make is what they read."""
_COLUMNS = ("operator", "unit", "macs", "weights", "reads", "bytes")


@dataclass(frozen=True, slots=True)
class ZooOperator:
    """A row. `reads` are pairs of a row's number and the number of one of its outputs."""

    kind: str
    unit: int
    macs: int
    weight_bytes: int
    reads: tuple[tuple[int, int], ...]
    output_bytes: tuple[int, ...]


def operators_of(dfg: Dfg) -> list[ZooOperator]:
    """The operators of a graph."""
    home = {index: unit.index for unit in dfg.units for index in unit.operators}
    places = {name: (op.index, number) for op in dfg.operators for number, name in enumerate(op.outputs)}
    return [
        ZooOperator(
            op.op_type,
            home[op.index],
            op.macs,
            op.weight_bytes,
            tuple(places[name] for name in op.inputs if name in places),
            tuple(dfg.tensors[name].size_bytes for name in op.outputs),
        )
        for op in dfg.operators
    ]


def computing(operators: Sequence[ZooOperator]) -> list[ZooOperator]:
    """The operators that compute something of the picture: neither views nor values that are the same for all pictures.

    A reader of a view reads the operator behind it. Values that do not come from the first operator depend on shapes
    alone.
    """
    numbers: dict[int, int] = {}
    shown: dict[tuple[int, int], tuple[int, int]] = {}
    kept: list[ZooOperator] = []
    for number, op in enumerate(operators):
        found = [
            shown.get(read) or (numbers[read[0]], read[1]) for read in op.reads if read in shown or read[0] in numbers
        ]
        if number and not found:
            continue
        if op.kind in VIEWS:
            shown[number, 0] = found[0]
            continue
        numbers[number] = len(kept)
        kept.append(replace(op, reads=tuple(dict.fromkeys(found))))
    return kept


def branches(operators: Sequence[ZooOperator]) -> list[frozenset[int]]:
    """Of the operator that reads most: the rows that work for one of its inputs and for no other.

    In the files by class these are the classes' own.
    """
    before: list[int] = []  # as masks of bits
    for op in operators:
        mask = 0
        for row, _ in op.reads:
            mask |= before[row] | 1 << row
        before.append(mask)
    widest = max(operators, key=lambda op: len(op.reads))
    wholes = [before[row] | 1 << row for row, _ in widest.reads]
    once = twice = 0
    for whole in wholes:
        twice |= once & whole
        once |= whole
    return [frozenset(row for row in range(len(operators)) if (whole & ~twice) >> row & 1) for whole in wholes]


def write_table(path: Path, operators: Iterable[ZooOperator]) -> None:
    """Write a table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for op in operators:
            reads = " ".join(f"{row}.{output}" if output else str(row) for row, output in op.reads)
            writer.writerow((op.kind, op.unit, op.macs, op.weight_bytes, reads, " ".join(map(str, op.output_bytes))))


def read_table(path: Path) -> list[ZooOperator]:
    """Read a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            ZooOperator(
                row["operator"],
                int(row["unit"]),
                int(row["macs"]),
                int(row["weights"]),
                tuple((int(a), int(b or 0)) for a, _, b in (read.partition(".") for read in row["reads"].split())),
                tuple(map(int, row["bytes"].split())),
            )
            for row in csv.DictReader(file)
        ]


@cache
def zoo_operators(model: str) -> tuple[ZooOperator, ...]:
    """The operators of one of `MODELS`, from the repository's own tables."""
    return tuple(read_table(FOLDER / f"{model}.csv"))


if __name__ == "__main__":
    for name in MODELS:
        write_table(FOLDER / f"{name}.csv", operators_of(load_dfg(Path(sys.argv[1]) / name / "1" / "model.onnx")))
