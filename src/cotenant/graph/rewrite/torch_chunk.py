"""A program of torch in which a run of units works on chunks of the rows, which are put together behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from cotenant.graph.errors import MixedRowsError
from cotenant.graph.rewrite.chunks import check_chunks
from cotenant.graph.rewrite.rows import Shapes
from cotenant.graph.rewrite.torch_rows import row_graph_of_program
from cotenant.graph.torch import dfg_of_graph, is_size, named_graph
from cotenant.graph.torch_lower import lower
from cotenant.graph.torch_sizes import expression_of


def chunk_program(
    program: torch.export.ExportedProgram, unit: int | tuple[int, int], rows: Sequence[int], shapes: Shapes
) -> fx.GraphModule:
    """A module that computes what `program` does, in which a unit, or units [start, end), run for parts of the rows. It
    takes the same inputs in their order, and gives a tuple.

    Units are those of `graph.torch.dfg_of_graph`, inputs are called as the program calls them. `rows` are those of each
    chunk, two of them at least; the module takes batches of their sum alone. Chunks are views of their inputs. `shapes`
    are of all inputs, of which the first dimension counts for nothing.

    Raises MixedRowsError when the units mix rows, InvalidValueError for units or rows that are none, GraphError as
    `lower` does.
    Source: GACER (2023), section 4.2: chunk and concat.
    """
    lowered = lower(program)
    names = [node.name for node in lowered.inputs]
    graph = named_graph(lowered, names, [f"output_{at}" for at in range(len(lowered.outputs))])
    dfg = dfg_of_graph(graph, "program", shapes)
    start, end = check_chunks(row_graph_of_program(graph, dfg, shapes), unit, rows)
    entering, leaving = dfg.segment_io(start, end)
    by_operator = {node.name: node for node in graph.nodes}
    inside = [by_operator[dfg.operators[at].name] for each in dfg.units[start:end] for at in each.operators]
    behind = [by_operator[dfg.operators[at].name] for each in dfg.units[end:] for at in each.operators]
    symbols = {
        symbol
        for node in lowered.inputs
        for symbol in getattr(expression_of(node.meta["val"].shape[0]), "free_symbols", ())
        if node.meta["val"].ndim
    }
    new = fx.Graph()
    env: dict[fx.Node, Any] = {}
    state = {**program.state_dict, **program.constants}
    attributes: dict[str, Any] = {}
    for node in lowered.graph.nodes:
        if node.op == "placeholder":
            if node in lowered.weights:
                attributes[f"weight_{len(attributes)}"] = state[lowered.weights[node]]
                env[node] = new.get_attr(f"weight_{len(attributes) - 1}")
            elif node in lowered.inputs:
                env[node] = new.placeholder(node.name)
        elif node.op == "get_attr":
            raise MixedRowsError("the program has control flow, whose graphs are not taken along")

    members = {part for node in inside for part in (node, *graph.made[node])}

    def add(node: fx.Node, own: dict[fx.Node, Any], count: int) -> Any:
        """What stands for a node among the copies for so many rows; made when it is first asked for."""
        if node not in own:
            number = _of_rows(node, symbols, count) if is_size(graph, node) else None
            if number is not None:
                own[node] = number
            elif own is not env and node not in members and not is_size(graph, node):
                return env[node]
            else:
                own[node] = new.node_copy(node, lambda each: add(each, own, count))
        return own[node]

    later = {part for node in (*inside, *behind) for part in (node, *graph.made[node])}
    for node in lowered.graph.nodes:
        if node.op == "call_function" and node not in later and not is_size(graph, node):
            add(node, env, sum(rows))
    named = graph.by_name
    pieces: dict[str, list[Any]] = {name: [] for name in leaving}
    for low, count in zip(accumulate((0, *rows[:-1])), rows, strict=True):
        own: dict[fx.Node, Any] = {
            named[name]: new.call_function(torch.ops.aten.narrow.default, (env[named[name]], 0, low, count))
            for name in entering
        }
        for node in inside:
            for part in (node, *graph.made[node]):
                add(part, own, count)
        for name in leaving:
            pieces[name].append(own[named[name]])
    for name, each in pieces.items():
        env[named[name]] = new.call_function(torch.ops.aten.cat.default, (each, 0))
    for node in behind:
        for part in (node, *graph.made[node]):
            add(part, env, sum(rows))
    new.output(tuple(env[node] for node in lowered.outputs))
    new.eliminate_dead_code()
    return fx.GraphModule(attributes, new)


def _of_rows(node: fx.Node, symbols: set[Any], count: int) -> int | None:
    """A size that goes by the number of rows, for so many of them; None for one that does not.

    Raises MixedRowsError for one that goes by more than that.
    """
    expression = expression_of(node.meta["val"])
    if not symbols & getattr(expression, "free_symbols", set()):
        return None
    found = expression.xreplace(dict.fromkeys(symbols, count))
    if not getattr(found, "is_number", isinstance(found, int)):
        raise MixedRowsError(f"size {node.name!r} goes by the number of rows and by other sizes: export them as fixed")
    return int(found)
