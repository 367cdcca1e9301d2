"""The pure part: units, boundaries and cuts of hand-made graphs."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.graph.costs import CostedNode, count_macs, rule_name
from cotenant.graph.cuts import suggest_cuts
from cotenant.graph.dfg import Dfg, Operator, Tensor, build_dfg
from cotenant.graph.units import fuse, merge_across


def op(index: int, op_type: str, inputs: Sequence[str], *outputs: str) -> Operator:
    return Operator(
        index, "", op_type, "", tuple(inputs), tuple(outputs or [f"t{index}"]), macs=10 * (op_type == "Conv")
    )


def dfg(operators: Sequence[Operator], outputs: Sequence[str], groups: Sequence[Sequence[int]] | None = None) -> Dfg:
    names = ["x", *(name for o in operators for name in o.outputs)]
    tensors = {name: Tensor(name, "tensor(float)", (4,), 16) for name in names}
    chosen = groups if groups is not None else fuse(operators, outputs)
    return build_dfg("m", operators, chosen, [tensors["x"]], [tensors[name] for name in outputs], tensors)


RESIDUAL = [
    op(0, "Conv", ["x"]),
    op(1, "Relu", ["t0"]),
    op(2, "Conv", ["t1"]),
    op(3, "BatchNormalization", ["t2"]),
    op(4, "Relu", ["t3"]),
    op(5, "Conv", ["t4"]),
    op(6, "Add", ["t5", "t1"]),
    op(7, "Relu", ["t6"]),
    op(8, "Conv", ["t7"]),
]


def test_chains_are_fused_and_residuals_stay_live() -> None:
    graph = dfg(RESIDUAL, ["t8"])
    assert [unit.operators for unit in graph.units] == [(0, 1), (2, 3, 4), (5, 6, 7), (8,)]
    assert [b.live for b in graph.boundaries] == [("x",), ("t1",), ("t1", "t4"), ("t7",), ("t8",)]
    assert [b.live_bytes for b in graph.boundaries] == [16, 16, 32, 16, 16]
    assert graph.cheap_cuts == (1, 3)
    assert graph.segment_io(1, 3) == (("t1",), ("t7",))
    assert graph.segment_io(1, 2) == (("t1",), ("t4",))
    assert graph.macs == 40
    assert (graph.units[2].read_bytes, graph.units[2].write_bytes) == (32, 16)


def test_two_heavy_operators_never_share_a_unit() -> None:
    operators = [op(0, "Conv", ["x"]), op(1, "Conv", ["x"]), op(2, "Add", ["t0", "t1"]), op(3, "Conv", ["t2"])]
    assert fuse(operators, ["t3"]) == [[0], [1, 2], [3]]


def test_light_operators_lead_the_heavy_one_that_alone_uses_them() -> None:
    operators = [op(0, "Transpose", ["x"]), op(1, "Conv", ["x"]), op(2, "MatMul", ["t0", "t1"])]
    assert fuse(operators, ["t2"]) == [[1], [0, 2]]
    graph = dfg(operators, ["t2"])
    assert [o.op_type for o in graph.operators] == ["Conv", "Transpose", "MatMul"]
    assert [o.index for o in graph.operators] == [0, 1, 2]


def test_a_graph_output_ends_its_unit() -> None:
    operators = [op(0, "Conv", ["x"]), op(1, "Relu", ["t0"])]
    assert fuse(operators, ["t1"]) == [[0, 1]]
    assert fuse(operators, ["t0", "t1"]) == [[0], [1]]
    assert dfg(operators, ["t0", "t1"]).live(2) == ("t0", "t1")


def test_an_input_that_is_an_output_lives_all_along() -> None:
    graph = dfg(RESIDUAL, ["t8", "x"])
    assert all("x" in b.live for b in graph.boundaries)


def test_a_graph_without_operators_has_one_empty_unit() -> None:
    graph = dfg([], ["x"])
    assert [unit.operators for unit in graph.units] == [()]
    assert [b.live for b in graph.boundaries] == [("x",), ("x",)]


def test_sealed_tensors_join_units() -> None:
    operators = [op(i, "Conv", [f"t{i - 1}" if i else "x"]) for i in range(6)]
    operators[4] = op(4, "Conv", ["t3", "t1"])
    groups = [[i] for i in range(6)]
    assert merge_across(operators, groups, {"t1"}) == [[0], [1, 2, 3, 4], [5]]
    assert merge_across(operators, groups, {"t0", "t2"}) == [[0, 1], [2, 3], [4], [5]]
    assert merge_across(operators, groups, {"t0", "t1"}) == [[0, 1, 2, 3, 4], [5]]


LIGHT_OR_HEAVY = st.sampled_from(["Conv", "Relu", "Add", "Split", "MatMul", "Reshape"])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Operator], list[str]]:
    names = ["x"]
    operators = []
    for index in range(draw(st.integers(1, 14))):
        inputs = dict.fromkeys(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
        outputs = [f"t{index}"] + ([f"u{index}"] if draw(st.booleans()) else [])
        operators.append(op(index, draw(LIGHT_OR_HEAVY), list(inputs), *outputs))
        names.extend(outputs)
    return operators, draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))


@settings(deadline=None, derandomize=True)
@given(graphs())
def test_every_boundary_is_a_valid_cut(made: tuple[list[Operator], list[str]]) -> None:
    operators, outputs = made
    graph = dfg(operators, outputs)
    assert sorted(o.outputs for o in graph.operators) == sorted(o.outputs for o in operators)
    assert [i for unit in graph.units for i in unit.operators] == list(range(len(operators)))
    for unit in graph.units:
        have = set(graph.live(unit.index))
        assert set(unit.inputs) <= have
        for position in unit.operators:
            assert set(graph.operators[position].inputs) <= have
            have.update(graph.operators[position].outputs)
        assert set(graph.live(unit.index + 1)) <= have
    assert set(graph.live(len(graph.units))) == set(outputs)
    assert sum(u.macs for u in graph.units) == sum(o.macs for o in operators)
    heavy = [sum(graph.operators[i].op_type in ("Conv", "MatMul", "Split") for i in u.operators) for u in graph.units]
    assert max(heavy) <= 1


def cost(graph: Dfg, cuts: Sequence[int]) -> tuple[int, int, int]:
    inner = [graph.boundaries[c] for c in cuts]
    return sum(not b.is_cheap for b in inner), len(inner), sum(b.live_bytes for b in inner)


def fits(weights: Sequence[int], cuts: Sequence[int], limit: int) -> bool:
    return all(b - a == 1 or sum(weights[a:b]) <= limit for a, b in itertools.pairwise([0, *cuts, len(weights)]))


@settings(deadline=None, derandomize=True)
@given(graphs(), st.data())
def test_suggested_cuts_are_the_best_of_all(made: tuple[list[Operator], list[str]], data: st.DataObject) -> None:
    graph = dfg(*made)
    count = min(len(graph.units), 9)
    graph = dfg(made[0], made[1], [[o.index] for o in made[0]]) if count == 1 else graph
    count = len(graph.units)
    weights = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    limit = data.draw(st.integers(1, 12))
    cuts = suggest_cuts(graph, weights, limit)
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert fits(weights, cuts[1:-1], limit)
    if count <= 9:
        choices = (c for k in range(count) for c in itertools.combinations(range(1, count), k))
        assert cost(graph, cuts[1:-1]) == min(cost(graph, c) for c in choices if fits(weights, c, limit))


def test_suggested_cuts_refuse_nonsense() -> None:
    graph = dfg(RESIDUAL, ["t8"])
    with pytest.raises(InvalidValueError, match="number of weights"):
        suggest_cuts(graph, [1.0], 2)
    with pytest.raises(InvalidValueError, match="max_weight"):
        suggest_cuts(graph, [1.0] * 4, 0)
    with pytest.raises(InvalidValueError, match="weights"):
        suggest_cuts(graph, [1.0, -1.0, 1.0, 1.0], 3)


@pytest.mark.parametrize(
    ("op_type", "domain", "attributes", "inputs", "outputs", "macs"),
    [
        ("Conv", "", {}, [(1, 8, 10, 10), (16, 8, 3, 3)], [(1, 16, 8, 8)], 16 * 64 * 72),
        ("Conv", "com.microsoft.nchwc", {}, [(2, 8, 4, 4), (8, 1, 3, 3), None], [(2, 8, 4, 4)], 2 * 8 * 16 * 9),
        ("ConvTranspose", "", {}, [(1, 4, 5, 5), (4, 6, 2, 2)], [(1, 6, 10, 10)], 100 * 24),
        ("Gemm", "", {"transA": 1}, [(5, 3), (5, 7)], [(3, 7)], 105),
        ("MatMul", "", {}, [(2, 3, 4), (4, 5)], [(2, 3, 5)], 120),
        ("FusedMatMul", "com.microsoft", {"transA": 1}, [(2, 4, 3), (2, 4, 5)], [(2, 3, 5)], 120),
        ("QLinearConv", "", {}, [(1, 2, 4, 4), (), (), (3, 2, 1, 1)], [(1, 3, 4, 4)], 96),
        ("LSTM", "", {}, [(6, 2, 5), (1, 12, 5), (1, 12, 3)], [(6, 1, 2, 3)], 12 * (60 + 36)),
        ("GRU", "", {"layout": 1}, [(2, 6, 5), (2, 9, 5), (2, 9, 3)], [(2, 6, 2, 3)], 12 * (90 + 54)),
        ("Attention", "com.microsoft", {}, [(1, 4, 6), (6, 18), (18,)], [(1, 4, 6)], 24 * 18 + 2 * 4 * 4 * 6),
        ("MultiHeadAttention", "com.microsoft", {}, [(1, 4, 6), (1, 9, 6), (1, 9, 6)], [(1, 4, 6)], 2 * 24 * 9),
        ("Einsum", "", {"equation": b"bij, bjk -> bik"}, [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], 120),
        ("Relu", "", {}, [(5,)], [(5,)], 0),
        ("MatMul", "", {}, [None, (4, 5)], [(2, 5)], None),
        ("Conv", "", {}, [(1, 8, 10, 10)], [(1, 16, 8, 8)], None),
    ],
)
def test_macs(op_type, domain, attributes, inputs, outputs, macs) -> None:  # type: ignore[no-untyped-def]
    assert count_macs(CostedNode(rule_name(op_type, domain), attributes, inputs, outputs)) == macs


def test_the_graph_as_data_needs_no_package() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import cotenant.graph.dfg, cotenant.graph.cuts, cotenant.graph.units, cotenant.graph.costs\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "['cotenant']"
