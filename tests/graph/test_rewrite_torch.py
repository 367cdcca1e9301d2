"""Which units of programs of torch treat rows by themselves: chunks of the rows against the module on all rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402
from torch.nn import functional  # noqa: E402

from bench.zoo import examples, make  # noqa: E402
from cotenant.execute.torch.segment import TorchCutter  # noqa: E402
from cotenant.graph.rewrite.torch_rows import row_graph_of_program  # noqa: E402
from cotenant.graph.torch import dfg_of_graph, named_graph  # noqa: E402
from cotenant.graph.torch_lower import lower  # noqa: E402
from torch_samples import exported  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")
Tensor = torch.Tensor


class Operators(nn.Module):
    """Each operator on the same rows, and what it gives as an output of its own."""

    def __init__(self, operators: dict[str, Callable[[nn.Module, Tensor], Tensor]]) -> None:
        super().__init__()
        self.operators = operators
        self.linear = nn.Linear(6, 5)
        self.conv = nn.Conv1d(4, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.steps = nn.LSTM(6, 5)
        self.words = nn.Embedding(9, 5)
        self.bags = nn.EmbeddingBag(9, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: make(self, x) for name, make in self.operators.items()}


def _words(x: Tensor) -> Tensor:
    return (x.abs() * 3).to(torch.int64).clamp(max=8)


FINE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(x),
    "conv": lambda m, x: m.conv(x),
    "batch_norm": lambda m, x: m.norm(x),
    "layer_norm": lambda m, x: functional.layer_norm(x, (6,)),
    "group_norm": lambda m, x: functional.group_norm(x, 2),
    "instance_norm": lambda m, x: functional.instance_norm(x),
    "lstm": lambda m, x: m.lstm(x)[0],
    "lstm_turned": lambda m, x: m.steps(x.transpose(0, 1))[0].transpose(0, 1),
    "softmax": lambda m, x: x.softmax(-1),
    "mean": lambda m, x: x.mean((1, 2)),
    "amax": lambda m, x: x.amax(1, keepdim=True),
    "sort": lambda m, x: x.sort(dim=2)[0],
    "topk": lambda m, x: x.topk(2, dim=1)[0],
    "cumsum": lambda m, x: x.cumsum(-1),
    "flat": lambda m, x: x.flatten(1),
    "steps": lambda m, x: (x.reshape(-1, 6) @ m.linear.weight.T).reshape(-1, 4, 5),
    "heads": lambda m, x: x.view(x.shape[0], 4, 2, 3).transpose(1, 2).reshape(x.shape[0], 2, 12),
    "attention": lambda m, x: functional.scaled_dot_product_attention(x, x, x),
    "product": lambda m, x: torch.bmm(x, x.transpose(1, 2)),
    "equation": lambda m, x: torch.einsum("bij,bkj->bik", x, x),
    "select": lambda m, x: x[:, 2],
    "columns": lambda m, x: x[:, [2, 0]],
    "slice": lambda m, x: x[:, 1:3],
    "all_rows": lambda m, x: x[:].relu(),
    "cat": lambda m, x: torch.cat([x, x], 1),
    "stack": lambda m, x: torch.stack([x, x], 1),
    "split": lambda m, x: x.split(2, dim=1)[1],
    "unbind": lambda m, x: x.unbind(1)[3],
    "embedding": lambda m, x: m.words(_words(x)),
    "where": lambda m, x: torch.where(x > 0, x, torch.zeros_like(x)),
    "state": lambda m, x: x + torch.zeros(x.shape[0], 4, 6),
    "table": lambda m, x: x + m.linear.bias[0].expand(x.shape[0], 4, 6),
    "pad": lambda m, x: functional.pad(x, (1, 1)),
    "flip": lambda m, x: x.flip(2),
    "pool": lambda m, x: functional.max_pool1d(x, 2),
    "prelu": lambda m, x: functional.prelu(x, m.norm.weight),
    "gelu": lambda m, x: functional.gelu(x),
    "hardswish": lambda m, x: functional.hardswish(x),
    "tril": lambda m, x: x.tril(),
    "larger": lambda m, x: torch.maximum(x, -x),
}
MIXED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "softmax": (lambda m, x: x.softmax(0), "works over axis 0"),
    "mean": (lambda m, x: x.mean(), "works over axis 0"),
    "centred": (lambda m, x: x - x.mean(0, keepdim=True), "works over axis 0"),
    "sort": (lambda m, x: x.sort(dim=0)[0], "works over axis 0"),
    "topk": (lambda m, x: x.topk(1, dim=0)[0], "works over axis 0"),
    "cumsum": (lambda m, x: x.cumsum(0), "works over axis 0"),
    "flip": (lambda m, x: x.flip(0), "works over axis 0"),
    "roll": (lambda m, x: x.roll(1), "not known"),
    "first": (lambda m, x: x[0], "works over axis 0"),
    "others": (lambda m, x: x - x[:1], "works over axis 0"),
    "twice": (lambda m, x: torch.cat([x, x], 0), "works over axis 0"),
    "gram": (lambda m, x: x.flatten(1) @ x.flatten(1).T, "together with others"),
    "turned": (lambda m, x: x.transpose(0, 1).relu(), "along axis 1"),
    "together": (lambda m, x: x.transpose(0, 1).reshape(-1, 6), "takes axes together"),
    "several": (lambda m, x: x.reshape(-1, 6), "several rows"),
    "divided": (lambda m, x: x / x.shape[0], "computes with the number of rows"),
    "numbered": (lambda m, x: torch.arange(x.shape[0]), "computes with the number of rows"),
    "filled": (lambda m, x: x * torch.full((x.shape[0], 4, 6), x.shape[0]), "computed"),
    "nonzero": (lambda m, x: x.nonzero(), "as many as it finds"),
    "unique": (lambda m, x: x.unique(), "as many as it finds"),
    "random": (lambda m, x: x + torch.rand_like(x), "random"),
    "bags": (
        lambda m, x: m.bags(_words(x).reshape(-1), torch.arange(0, x.shape[0] * 24, 24)),
        "bags with offsets|number of rows",
    ),
    "masked": (lambda m, x: x[x > 0], "by a mask"),
}


class Cut:
    """A program whose units can be run by themselves, and what is known of its rows. `shapes` are of its inputs."""

    def __init__(self, program: torch.export.ExportedProgram, *shapes: tuple[int, ...]) -> None:
        lowered = lower(program)
        names = [node.name for node in lowered.inputs]
        self._state = {**program.state_dict, **program.constants}
        self._graph = named_graph(lowered, names, [f"output_{at}" for at in range(len(lowered.outputs))])
        given = dict(zip(names, shapes, strict=True))
        dfg = dfg_of_graph(self._graph, "sample", given)
        self._cutter = TorchCutter(self._graph, dfg, dict(program.graph_module.named_children()))
        self.rows = row_graph_of_program(self._graph, dfg, given)
        self.count = len(dfg.units)

    def in_chunks(self, start: int, end: int, rows: Sequence[int], *inputs: Tensor) -> list[Tensor]:
        """The outputs where units [start, end) run for chunks of so many rows, and the others for all rows."""
        assert self.rows.why_not(start, end) == ""
        tensors = dict(zip(self._graph.inputs, inputs, strict=True))
        tensors |= self._run(0, start, tensors)
        pieces = []
        for low, high in pairwise(accumulate(rows, initial=0)):
            taken = {
                name: value[low:high] if value.ndim and len(value) == sum(rows) else value
                for name, value in tensors.items()
            }
            pieces.append(self._run(start, end, taken))
        tensors |= {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        tensors |= self._run(end, self.count, tensors)
        return [tensors[name] for name in self._graph.outputs]

    def _run(self, start: int, end: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if start == end:
            return {}
        segment = self._cutter.segment(start, end, torch.device("cpu"))
        weights = [self._state[name] for name in segment.weights]
        made = segment.function(*[tensors[name] for name in segment.inputs], *weights)
        return dict(zip(segment.outputs, made, strict=True))


def program_of(
    operators: dict[str, Callable[[nn.Module, Tensor], Tensor]],
) -> tuple[nn.Module, torch.export.ExportedProgram]:
    module = Operators(operators).eval()
    return module, torch.export.export(
        module, (torch.randn(5, 4, 6),), dynamic_shapes={"x": {0: Dim("rows", min=1, max=64)}}
    )


@pytest.mark.parametrize("name", FINE)
def test_operators_that_keep_rows_apart_are_let_through_and_run_in_chunks(name: str) -> None:
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        module, program = program_of({name: FINE[name]})
        cut = Cut(program, (1, 4, 6))
        for rows in ((2, 3), (1, 1, 1, 2)):
            [got] = cut.in_chunks(0, cut.count, rows, x)
            torch.testing.assert_close(got, module(x)[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_operators_that_mix_rows_are_refused_with_the_reason(name: str) -> None:
    make_output, why = MIXED[name]
    with torch.no_grad():
        _, program = program_of({name: make_output})
    cut = Cut(program, (1, 4, 6))
    assert re.search(why, cut.rows.why_not(0, cut.count))


@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_samples_run_in_chunks_wherever_that_is_let_through(name: str) -> None:
    module, program = exported(name)
    inputs = {key: value[:1].repeat(5, *[1] * (value.ndim - 1)) for key, value in program.example_inputs[1].items()}
    assert inputs or program.example_inputs[0]
    given = list(inputs.values()) or [each[:1].repeat(5, *[1] * (each.ndim - 1)) for each in program.example_inputs[0]]
    cut = Cut(program, *[(1, *each.shape[1:]) for each in given])
    with torch.no_grad():
        expected = module(*given)
        expected = list(expected.values()) if isinstance(expected, dict) else list(expected)
        ranges = [(a, b) for a in range(cut.count) for b in (a + 1, cut.count) if not cut.rows.why_not(a, b)]
        assert ranges
        for start, end in ranges[:: max(1, len(ranges) // 4)]:
            for a, b in zip(cut.in_chunks(start, end, (2, 3), *given), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_models_of_the_zoo_split_as_a_whole_and_run_in_chunks() -> None:
    for name in ("lenet", "bst"):
        model = make(name)
        inputs = examples(model, 5)
        dims = {key: {0: Dim("rows", min=1, max=64)} for key in inputs}
        with torch.no_grad():
            program = torch.export.export(model.module, (), dict(inputs), dynamic_shapes=dims)
            cut = Cut(program, *[(1, *each.shape[1:]) for each in inputs.values()])
            assert cut.rows.splits == (True,) * cut.count
            got = cut.in_chunks(0, cut.count, (3, 2), *inputs.values())
            expected = model.module(**inputs)
        expected = [expected] if isinstance(expected, Tensor) else list(expected)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
