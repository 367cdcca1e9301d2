"""The kernels of the paper's ten models, from the operators of our zoo's files: operations and bytes of each for a row.

A kernel is a heavy operator with the light ones of its unit (`graph/units`) behind it, as libraries fuse them. Light
operators before it, or that make more than it does, are a kernel of their own; views are none. A table has a row for
each in the order of the file:

* `product`: a convolution or matrix product. `height` (output positions of one row of the batch), `width` (output
  channels) and `depth` are those of the product, of which there are `groups`.
* `depthwise`: a convolution in which a channel reads itself alone.
* `memory`: all that computes little: pooling, concatenation, normalisation that could not be folded, embeddings.
* `recurrent`: `steps` steps of an LSTM, each a product of `height` 1 by row that waits for the one before. The product
  with the layer's input, of all steps at once, is a kernel before them.

`winograd` tells which convolutions have 3x3 taps and stride 1. `reads` and `writes` are bytes of tensors by row,
`weights` are bytes whatever the rows. All are in fp32 and treat rows by themselves.

The paper leaves some shapes open. Pictures are of 224 x 224 here. The LSTM is our classifier of texts of 64 tokens (two
layers of 512, embedding 256). BST is the paper's of that name with 20 clicks before the target, width 64 and one block
of 8 heads. Its MLP has 1024, 512 and 256.

`python -m bench.papers.gacer._zoo_kernels FOLDER` writes the tables again from `python -m bench.zoo`'s files in FOLDER.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from pathlib import Path

import onnx

from bench._registry import BenchError
from cotenant.graph.dfg import Dfg, Operator
from cotenant.graph.onnx import dfg_of, read_model
from cotenant.graph.units import LIGHT

FOLDER = Path(__file__).parent / "kernels"
PAPER_NAMES = {
    "ALEX": "alexnet",
    "V16": "vgg16",
    "R18": "resnet18",
    "R34": "resnet34",
    "R50": "resnet50",
    "R101": "resnet101",
    "M3": "mobilenet_v3_large",
    "D121": "densenet121",
    "LSTM": "lstm_classifier",
    "BST": "bst",
}
"""Names of the paper's tables, and of our zoo."""
STEPS = 8
"""Steps of a recurrence in a kernel."""
_BYTES = 4
_SIZES = ("Shape", "Size")
_VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))


@dataclass(frozen=True, slots=True)
class ZooKernel:
    """A row of a table: see the module."""

    kernel: str
    kind: str
    height: int = 0
    width: int = 0
    depth: int = 0
    groups: int = 1
    winograd: int = 0
    steps: int = 1
    reads: int = 0
    writes: int = 0
    weights: int = 0


def kernels_of(model: onnx.ModelProto) -> list[ZooKernel]:
    """The kernels of a file with the batch as the first dimension of its inputs.

    Raises BenchError where nothing is known of an operator."""
    dfg = dfg_of(model, name=model.graph.name)
    nodes = {name: node for node in model.graph.node for name in node.output if name}
    shapes = {each.name: tuple(each.dims) for each in model.graph.initializer}
    found: list[ZooKernel] = []
    fixed: dict[str, None] = {}  # tensors that are the same for all inputs
    for operator in dfg.operators:
        if operator.op_type in _SIZES or all(name in fixed for name in operator.inputs):
            fixed |= dict.fromkeys(operator.outputs)
    for unit in dfg.units:
        group: list[Operator] = []
        for operator in (
            dfg.operators[index] for index in unit.operators if dfg.operators[index].outputs[0] not in fixed
        ):
            widens = bool(group) and group[0].macs and _written(dfg, operator) > _written(dfg, group[0])
            if operator.op_type not in LIGHT or widens:
                found += _kernel(dfg, group, nodes, shapes, fixed)
                group = []
            group.append(operator)
        found += _kernel(dfg, group, nodes, shapes, fixed)
    return found


def _written(dfg: Dfg, operator: Operator) -> int:
    return sum(dfg.tensors[name].size_bytes for name in operator.outputs)


def _kernel(
    dfg: Dfg,
    group: Sequence[Operator],
    nodes: Mapping[str, onnx.NodeProto],
    shapes: Mapping[str, tuple[int, ...]],
    fixed: Collection[str],
) -> list[ZooKernel]:
    """What a heavy operator with light ones behind it, or light ones alone, are."""
    made = {name for operator in group for name in operator.outputs}
    inner = {name for operator in group for name in operator.inputs if name in made}
    read = dict.fromkeys(
        name for operator in group for name in operator.inputs if name not in made and name not in fixed
    )
    reads = sum(dfg.tensors[name].size_bytes for name in read)
    writes = sum(dfg.tensors[name].size_bytes for name in made if name not in inner)
    looks_up = bool(group) and group[0].op_type == "Gather"  # of its weights it moves the rows that it writes
    weights = 0 if looks_up else sum(operator.weight_bytes for operator in group)
    if not reads or all(operator.op_type in _VIEWS for operator in group):
        return []
    first = group[0]
    name = f"{first.op_type}_{first.index}"
    moved = {"reads": reads, "writes": writes, "weights": weights}
    if not first.macs:
        return [ZooKernel(name, "memory", **moved)]
    node, out = nodes[first.outputs[0]], _static(dfg, first.outputs[0])
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    match first.op_type:
        case "Conv":
            _, per_group, *taps = shapes[node.input[1]]
            groups = int(attributes.get("group", 1))
            if per_group == 1 and groups > 1:
                return [ZooKernel(name, "depthwise", prod(out[2:]), out[1], prod(taps), **moved)]
            winograd = int(taps == [3, 3] and set(attributes.get("strides", [1])) == {1})
            width, depth = out[1] // groups, per_group * prod(taps)
            return [ZooKernel(name, "product", prod(out[2:]), width, depth, groups, winograd, **moved)]
        case "Gemm" | "MatMul":
            inside = 1 if first.constants else prod(out[:-2])  # a product of two tensors is one for each head
            height = prod(out[:-1]) // inside
            depth = first.macs // (inside * height * out[-1])
            return [ZooKernel(name, "product", height, out[-1], depth, inside, **moved)]
        case "LSTM":
            _, gates, width = _static(dfg, node.input[1]) or shapes[node.input[1]]
            steps = _static(dfg, first.inputs[0])[0]
            states = gates * _BYTES
            taken = ZooKernel(
                name, "product", steps, gates, width, 1, 0, 1, reads, steps * states, gates * width * _BYTES
            )
            held = gates * (gates // 4) * _BYTES
            return [
                taken,
                *(
                    ZooKernel(
                        f"{name}_{start}",
                        "recurrent",
                        1,
                        gates,
                        gates // 4,
                        1,
                        0,
                        min(STEPS, steps - start),
                        states,
                        states // 4,
                        held,
                    )
                    for start in range(0, steps, STEPS)
                ),
            ]
        case _:
            raise BenchError(f"{name}: nothing is known of operators {first.op_type}, expected products or an LSTM")


def _static(dfg: Dfg, name: str) -> tuple[int, ...]:
    shape = (dfg.tensors[name].shape if name in dfg.tensors else None) or ()
    return tuple(size if isinstance(size, int) else 1 for size in shape)


def write_table(path: Path, kernels: Iterable[ZooKernel]) -> None:
    """Write a table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(each.name for each in fields(ZooKernel))
        writer.writerows(asdict(kernel).values() for kernel in kernels)


def read_table(path: Path) -> tuple[ZooKernel, ...]:
    """Read a table."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        ZooKernel(row["kernel"], row["kind"], *(int(row[each.name]) for each in fields(ZooKernel)[2:])) for row in rows
    )


@cache
def zoo_kernels(model: str) -> tuple[ZooKernel, ...]:
    """The kernels of one of the ten models, by the zoo's name, from the repository's own tables."""
    return read_table(FOLDER / f"{model}.csv")


if __name__ == "__main__":
    for each in PAPER_NAMES.values():
        write_table(FOLDER / f"{each}.csv", kernels_of(read_model(Path(sys.argv[1]) / each / "1" / "model.onnx")))
