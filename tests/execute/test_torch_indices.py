"""No query leads a kernel outside a table: indices are checked on the host, or clamped by the program.

On a CPU an index outside its table raises. So a program, with its clamps and behind its check, must not raise there,
whatever the values; and it must not change or refuse what the plain program answers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cotenant.execute.errors import ModelError, TensorError
from cotenant.execute.torch.index_bounds import bound_indices
from cotenant.execute.torch.input_check import InputCheck
from cotenant.execute.torch.model import TorchModel
from cotenant.graph.torch_lower import lower

TABLE, WIDTH, LENGTH = 11, 3, 5


class Indexed(nn.Module):
    """A program that reads tables by its inputs, in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.arange(TABLE * WIDTH, dtype=torch.float32).reshape(TABLE, WIDTH))
        self.register_buffer("places", torch.arange(LENGTH).expand(1, -1))

    def forward(self, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        table: Any = self.table
        rows, many = torch.arange(ids.shape[0]), ids.float() + other
        how = {
            "embedding": lambda: nn.functional.embedding(ids, table),
            "embedding of a view": lambda: nn.functional.embedding(ids.transpose(0, 1).reshape(-1), table),
            "embedding of a sum": lambda: nn.functional.embedding(ids + 2, table),
            "embedding of a cast": lambda: nn.functional.embedding(ids.to(torch.int32).to(torch.int64), table),
            "embedding of a part": lambda: nn.functional.embedding(ids[:, 1:3], table),
            "embedding of both": lambda: nn.functional.embedding(torch.cat((ids, other), 1), table),
            "embedding of a product": lambda: nn.functional.embedding(ids * other, table),
            "embedding of a running sum": lambda: nn.functional.embedding(other.cumsum(1), table),
            "embedding of places": lambda: nn.functional.embedding(self.places[:, :4], table) + many.mean(),  # type: ignore[index]
            "embedding of a choice": lambda: nn.functional.embedding(torch.where(ids > 3, ids, other), table),
            "embedding of a remainder": lambda: nn.functional.embedding(ids.remainder(TABLE), table),
            "embedding of real numbers": lambda: nn.functional.embedding((many / 2).long(), table),
            "index": lambda: table[ids],
            "index of two": lambda: table[ids, other],
            "index_select": lambda: torch.index_select(table, 0, ids[:, 0]),
            "index_select of all": lambda: torch.index_select(table, 0, ids.reshape(-1)),
            "gather": lambda: torch.gather(many, 1, other),
            "take_along_dim": lambda: torch.take_along_dim(many, other, 1),
            "scatter": lambda: torch.zeros(ids.shape[0], TABLE).scatter(1, ids, 1.0),
            "scatter_add": lambda: torch.zeros(ids.shape[0], TABLE).scatter_add(1, ids, many),
            "row of each": lambda: many[rows, other.argmax(1)],
            "row of each by a sum": lambda: many[rows, other.sum(1)],
            "places of the largest": lambda: torch.gather(many, 1, many.topk(2, 1).indices),
            "rows by values": lambda: many[other[:, 0]],
            "put": lambda: torch.zeros(TABLE, WIDTH).index_put((ids[:, 0],), torch.ones(())) + many.mean(),
            "one_hot": lambda: nn.functional.one_hot(ids, TABLE).float(),
        }  # fmt: skip
        return how[self.how]()  # type: ignore[no-untyped-call, no-any-return]


WAYS = [
    *("embedding", "embedding of a view", "embedding of a sum", "embedding of a cast", "embedding of a part"),
    *("embedding of both", "embedding of a product", "embedding of a running sum", "embedding of places"),
    *("embedding of a choice", "embedding of a remainder", "embedding of real numbers", "index", "index of two"),
    *("index_select", "index_select of all", "gather", "take_along_dim", "scatter", "scatter_add", "row of each"),
    *("row of each by a sum", "places of the largest", "rows by values", "put", "one_hot"),
]
FIXED = {"take_along_dim"}
"""Export makes a constant of the number of rows."""
CLAMPED = {
    *("embedding of a part", "embedding of a product", "embedding of a running sum", "embedding of a choice"),
    *(
        "embedding of a cast",
        "embedding of real numbers",
        "index_select",
        "row of each by a sum",
        "rows by values",
        "put",
    ),
}


def saved(how: str, folder: Path) -> Path:
    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    dims = {0: torch.export.Dim("batch", min=1, max=64)}
    shapes = None if how in FIXED else {"ids": dims, "other": dims}
    program = torch.export.export(Indexed(how).eval(), (ids, ids.clone()), dynamic_shapes=shapes)
    path = folder / "model.pt2"
    torch.export.save(program, path)
    return path


def values(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    """Mostly good ones, and now and then one that is just outside, far outside or at a limit of its type."""
    found = {}
    for name, end in (("ids", TABLE), ("other", WIDTH)):
        drawn = rng.integers(0, end, (rows, LENGTH))
        if rng.random() < 0.4:
            bad = rng.choice([-1, -2, end, end + 1, -end - 1, 10**9, -(2**63), 2**63 - 1])
            drawn[rng.integers(rows), rng.integers(LENGTH)] = bad
        found[name] = drawn
    return found


def refusal(model: TorchModel, given: dict[str, Any]) -> str:
    try:
        model.check_values(given)
    except TensorError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", WAYS)
def test_no_value_leads_outside_a_table_and_no_good_one_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(how, tmp_path)
    plain = TorchModel.open(path, name="plain")
    monkeypatch.setattr(
        "cotenant.execute.torch.model.bound_indices", lambda *given, clamps: bound_indices(*given, clamps=True)
    )
    held = TorchModel.open(path, name="held")  # as on a GPU
    rng, seen = np.random.default_rng(len(how)), Counter[str]()
    for _ in range(120):
        given = values(rng, 2 if how in FIXED else int(rng.integers(1, 4)))
        try:
            expected = plain.run(0, plain.unit_count, given)
        except ModelError:
            expected = None
        refused = refusal(held, given)
        if refused:
            assert expected is None, f"a good query is refused: {refused}"
            seen["refused"] += 1
            continue
        found = held.run(0, held.unit_count, given)  # raises where an index is outside its table
        if expected is None:
            seen["clamped"] += 1
        else:
            seen["same"] += 1
            for name, tensor in expected.items():
                assert torch.equal(tensor, found[name])
    assert seen["same"] > 10
    if how in CLAMPED:
        assert seen["clamped"] > 0, seen
    else:
        assert seen["clamped"] == 0, seen
    clamps = sum("clamp" in str(each.target) for each in held._graph.nodes)
    assert clamps == (how in CLAMPED)
    assert not any("clamp" in str(each.target) for each in plain._graph.nodes)


def test_the_check_names_the_input_the_value_and_the_limits(tmp_path: Path) -> None:
    model = TorchModel.open(saved("embedding of a sum", tmp_path), name="words")
    good = np.zeros((1, LENGTH), np.int64)
    model.check_values({"ids": good - 2, "other": good})
    with pytest.raises(TensorError) as caught:
        model.check_values({"ids": good + 9, "other": good})
    assert str(caught.value) == "model 'words': input 'ids' has the value 9, expected an index from -2 to 8"


def test_limits_of_several_tables_meet() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(100, 2), nn.Embedding(7, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.large(ids) + self.small(ids - 1)  # type: ignore[no-any-return]

    program = torch.export.export(Two().eval(), (torch.ones(1, 3, dtype=torch.int64),))
    lowered = lower(program)
    weights = dict(program.state_dict)
    assert bound_indices(lowered, weights, clamps=True) == {"ids": (1, 7)}
    check = InputCheck("m", (), (), {}, {"ids": (1, 7)})
    check.check_values({"ids": np.empty((0, 3), np.int64)})
