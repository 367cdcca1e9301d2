"""Tasks on real executors: parts of a batch, branches side by side, launches that wait, and launches that expand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cotenant.core.actions import Action, Expand, Launch, Release, Respond
from cotenant.core.events import Event, LaunchExpanded, QueryCancelled
from cotenant.core.snapshot import Policy
from cotenant.execute.batch_tasks import BatchTasks
from cotenant.execute.errors import RowsError
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.open_model import open_model
from cotenant.execute.protocol import LoadSpec, ModelExecutor
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.source import open_source
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.worker import worker
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import RealClock
from cotenant.serve.engine.driver import Driver
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from here_workers import HereWorker, here_workers
from strict_engine import StrictEngine as Engine
from task_policies import Branches, Expanding, Halves, Middle, Pointers

WAIT_S = 20.0
TWO_LANES = (Share((0,)), Share((1,)))
WIDTH = 8


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Two products of matrices, a normalisation of each row, and what lives across them."""
    torch = pytest.importorskip("torch")
    from torch_samples import saved

    class Deep(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(5))
            self.norm = torch.nn.LayerNorm(WIDTH)

        def forward(self, x: Any) -> dict[str, Any]:
            first = self.layers[0](x)
            made = self.norm(self.layers[2](torch.relu(self.layers[1](first))))
            return {"y": self.layers[4](self.layers[3](made) + first)}

    path = tmp_path_factory.mktemp("tasks") / "deep.pt2"
    saved(Deep().eval(), {"x": torch.ones(2, WIDTH)}, path, {"x": {0: torch.export.Dim("rows", min=1, max=64)}})
    with open_model(path, cache_dir=path.parent / "cache") as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SegmentedModel]:
    """Two branches of the input that meet; then two more units. Which branch is first, onnxruntime says."""
    rng = np.random.default_rng(3)
    names = [f"w{at}" for at in range(10)]
    weights = [helper.make_tensor(n, TensorProto.FLOAT, (WIDTH, WIDTH), rng.normal(size=WIDTH**2)) for n in names]
    nodes, last = [], {"l": "x", "r": "x"}
    for side in "lr":
        for step in range(4):
            made = f"{side}{step}"
            nodes.append(helper.make_node("MatMul", [last[side], names[4 * (side == "r") + step]], [made]))
            last[side] = made
    nodes += [
        helper.make_node("Add", [last["l"], last["r"]], ["sum"]),
        helper.make_node("MatMul", ["sum", "w8"], ["t"]),
        helper.make_node("MatMul", ["t", "w9"], ["y"]),
    ]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("rows", WIDTH)) for n in "xy"]
    path = tmp_path_factory.mktemp("tasks") / "wide.onnx"
    graph = helper.make_graph(nodes, "wide", value[:1], value[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with SegmentedModel.open(path, cache_dir=path.parent / "cache") as opened:
        yield opened


Executors = Callable[[Callable[[Any], Any]], ModelExecutor]


@pytest.fixture(params=["threads", "workers"])
def executors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executors]:
    """Makes executors that run models as something changes them."""

    def make(change: Callable[[Any], Any]) -> ModelExecutor:
        if request.param == "threads":
            executor = ThreadExecutor()
            load = executor.load
            monkeypatch.setattr(executor, "load", lambda name, model, *rest: load(name, change(model), *rest))
            return executor
        monkeypatch.setattr(worker, "open_source", lambda source: change(open_source(source)))
        return ProcessExecutor()

    with here_workers(monkeypatch):
        yield make


class Served:
    """A driver with a real executor, and what happened."""

    def __init__(
        self,
        executors: Executors,
        model: Runner,
        policy: Policy,
        cuts: tuple[int, ...],
        max_batch: int = 8,
        change: Callable[[Any], Any] = lambda model: model,
    ) -> None:
        splits = model.row_graph({"x": (1, WIDTH)}).runs
        self.tenant = Tenant("wide", 10**11, cuts=cuts, max_batch=max_batch, splits=splits)
        table = LatencyTable((LatencyRow(0, 1, 1, 10**6),), (1.0,) * cuts[-1])
        engine = Engine((self.tenant,), policy, TablePredictor({"wide": table}), Machine.cpu((0, 1)))
        self.executor = executors(change)
        self.model = open_model(model.path, cache_dir=model.path.parent / "cache")
        self.loaded = self.executor.load("wide", self.model, LoadSpec((Share((0,)), Share((0, 1))), cuts))
        self.executor.add_model("wide", self.loaded)
        self.clock = RealClock()
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.driver = Driver(engine, self.executor, self.clock, (self._watch,))

    def _watch(self, now: int, event: Event, actions: list[Action], timing: Any) -> None:
        self.events.append(event)
        self.actions += actions

    def ask(self, *inputs: Any) -> list[tuple[Respond, Any]]:
        """Send all at once; the answers in their order."""
        return self.send(*inputs)()

    def send(self, *inputs: Any) -> Callable[[], list[tuple[Respond, Any]]]:
        """Send all at once; what is given waits for the answers."""
        answers: dict[int, tuple[Respond, Any]] = {}
        all_there = threading.Event()

        def done(respond: Respond, outputs: Any) -> None:
            answers[respond.query] = respond, None if outputs is None else outputs["y"]
            if len(answers) == len(inputs):
                all_there.set()

        for x in inputs:
            self.driver.submit(
                lambda number, now, rows=len(x): Query(number, "wide", now, now + 10**11, items=rows), {"x": x}, done
            )

        def wait() -> list[tuple[Respond, Any]]:
            assert all_there.wait(WAIT_S)
            assert self.driver.wait_idle(WAIT_S)
            return [answers[number] for number in sorted(answers)]

        return wait

    def close(self) -> None:
        self.loaded.close()
        self.executor.close()
        self.clock.close()
        assert self.executor.kept == 0  # type: ignore[attr-defined]

    @property
    def launches(self) -> list[Launch]:
        return [action for action in self.actions if isinstance(action, Launch)]


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def whole(model: SegmentedModel, x: Any) -> Any:
    return np.asarray(model.run(0, model.unit_count, {"x": x})["y"])


def same(got: Any, expected: Any) -> bool:
    return bool(np.allclose(got, expected, rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_halves_of_the_rows_run_side_by_side_and_are_put_together(
    executors: Executors, model: SegmentedModel, count: int
) -> None:
    served = Served(executors, model, Halves(TWO_LANES), (0, 4, 8, model.unit_count))
    x = rows(count)
    [(respond, y)] = served.ask(x)
    assert respond.outcome is Outcome.ANSWERED
    assert same(y, whole(model, x))
    parts = [launch for launch in served.launches if launch.work.rows]
    assert [launch.work.rows for launch in parts] == ([] if count == 1 else [(0, count // 2), (count // 2, count)])
    assert len({launch.share for launch in parts}) == len(parts)
    served.close()


def test_rows_of_several_queries_go_back_to_whom_they_belong(executors: Executors, model: SegmentedModel) -> None:
    served = Served(executors, model, Halves(TWO_LANES), (0, 4, model.unit_count))
    asked = [rows(count, count) for count in (1, 3, 2, 1, 4)]
    for x, (respond, y) in zip(asked, served.ask(*asked), strict=True):
        assert respond.outcome is Outcome.ANSWERED
        assert same(y, whole(model, x))
    assert any(len(launch.queries) > 1 and launch.part for launch in served.launches)
    served.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_run_in_the_middle_runs_in_chunks_between_whole_launches(
    executors: Executors, model: SegmentedModel, count: int
) -> None:
    """What lives across the chunks without being read by them stays as it was."""
    cuts = (0, 3, 6, model.unit_count)
    assert set(model.dfg.live(3)) & set(model.dfg.live(6)), "something lives across"
    served = Served(executors, model, Middle(TWO_LANES), cuts)
    x = rows(count)
    [(respond, y)] = served.ask(x)
    assert respond.outcome is Outcome.ANSWERED, respond.reason
    assert same(y, whole(model, x))
    if count > 1:
        before, left, right, behind = served.launches
        assert (left.work.rows, right.work.rows) == ((0, count // 2), (count // 2, count))
        assert (left.work.start, left.work.end) == (3, 6) == (right.work.start, right.work.end)
        assert left.after == right.after == (before.id,)
        assert behind.after == (left.id, right.id)
    served.close()


def test_a_run_of_a_torch_model_runs_in_chunks(executors: Executors, torch_model: Runner) -> None:
    count = torch_model.unit_count
    served = Served(executors, torch_model, Middle(TWO_LANES), (0, 1, count - 1, count))
    asked = [rows(each, each) for each in (2, 5, 3)]
    for x, (respond, y) in zip(asked, served.ask(*asked), strict=True):
        assert respond.outcome is Outcome.ANSWERED, respond.reason
        assert same(y, to_numpy(torch_model.run(0, count, {"x": x}))["y"])
    assert {launch.work.rows for launch in served.launches} > {(0, 1), (1, 2)}
    served.close()


def test_a_run_of_a_torch_model_runs_in_chunks_on_streams(torch_model: Runner) -> None:
    """Of cores, as those of a GPU are asked: decided at once, each submitted behind what it waits for."""
    from cotenant.execute.gpu.streams import CpuStreams
    from cotenant.execute.torch.executor import TorchExecutor

    count = torch_model.unit_count
    cuts = (0, 1, count - 1, count)
    served = Served(lambda _: TorchExecutor(CpuStreams()), torch_model, Middle(TWO_LANES), cuts)
    asked = [rows(each, each) for each in (2, 5, 3, 1, 4)]
    for x, (respond, y) in zip(asked, served.ask(*asked), strict=True):
        assert respond.outcome is Outcome.ANSWERED, respond.reason
        assert same(y, to_numpy(torch_model.run(0, count, {"x": x}))["y"])
    assert any(launch.work.rows and launch.after for launch in served.launches)
    served.close()


def test_chunks_run_beside_those_of_other_queries_and_rows_stay_apart(
    executors: Executors, model: SegmentedModel
) -> None:
    served = Served(executors, model, Middle(TWO_LANES), (0, 3, 6, model.unit_count))
    asked = [rows(count, count) for count in (2, 3, 1, 4, 2, 5)]
    for x, (respond, y) in zip(asked, served.ask(*asked), strict=True):
        assert respond.outcome is Outcome.ANSWERED
        assert same(y, whole(model, x))
    served.close()


def test_branches_run_beside_each_other_and_meet(executors: Executors, model: SegmentedModel) -> None:
    """Neither branch has the tensors of the other one; who joins them has both."""
    sides = [unit.outputs[0][0] for unit in model.dfg.units]
    first, second = sides.index("l"), sides.index("r")
    cuts = (0, max(first, second), sides.index("s"), model.unit_count)
    assert set(sides[: cuts[1]]) | set(sides[cuts[1] : cuts[2]]) == {"l", "r"}
    served = Served(executors, model, Branches(TWO_LANES), cuts)
    x = rows(3)
    [(respond, y)] = served.ask(x)
    assert respond.outcome is Outcome.ANSWERED
    assert same(y, whole(model, x))
    left, right, join = served.launches
    assert (left.share, right.share) == TWO_LANES
    assert join.after == (left.id, right.id)
    served.close()


def test_a_launch_waits_for_what_a_pointer_names(executors: Executors, model: SegmentedModel) -> None:
    served = Served(executors, model, Pointers(TWO_LANES), (0, 4, 8, model.unit_count), max_batch=1)
    asked = [rows(1, seed) for seed in range(12)]
    for x, (respond, y) in zip(asked, served.ask(*asked), strict=True):
        assert respond.outcome is Outcome.ANSWERED
        assert same(y, whole(model, x))
    started = [launch.id for launch in served.launches]
    waited = [launch for launch in served.launches if launch.after]
    assert waited
    assert all(started.index(other) < started.index(launch.id) for launch in waited for other in launch.after)
    served.close()


class Slowed:
    """A model each of whose runs waits until it may."""

    _model: Any

    def __init__(self, *, joins: bool = False) -> None:
        self.joins = joins
        self.may_run = threading.Semaphore(0)
        self.threads: list[object] = []

    def __call__(self, model: Any) -> Any:
        self._model = model
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    def run(self, start: int, end: int, tensors: Any, threads: Any = 1) -> Any:
        assert self.may_run.acquire(timeout=WAIT_S)
        if self.joins:
            threads = threads.cores
        self.threads.append((start, end, threads))
        return self._model.run(start, end, tensors, threads)


def test_a_launch_takes_in_a_core_that_comes_free_at_its_next_cut(executors: Executors, model: SegmentedModel) -> None:
    slowed = Slowed()
    served = Served(executors, model, Expanding(TWO_LANES), (0, 4, 8, model.unit_count), change=slowed)
    x = rows(2)
    answer = served.send(x)
    served.driver.post(QueryCancelled(99))  # whatever happens: the policy is asked again, and nobody waits
    while not all(
        each.worker._launches._expanding for each in HereWorker.made
    ):  # it comes by another way than launches
        time.sleep(0.001)
    for _ in range(3):
        slowed.may_run.release()
    [(respond, y)] = answer()
    assert respond.outcome is Outcome.ANSWERED
    assert same(y, whole(model, x))
    [launch] = served.launches
    [expand] = [action for action in served.actions if isinstance(action, Expand)]
    assert (launch.share.cores, launch.stops) == ((0,), (4, 8))
    assert (expand.launch, expand.share.cores) == (launch.id, (0, 1))
    assert [event for event in served.events if isinstance(event, LaunchExpanded)] == [LaunchExpanded(launch.id)]
    assert slowed.threads == [(0, 4, 1), (4, 8, (0, 1)), (8, model.unit_count, (0, 1))]
    served.close()


def test_a_launch_takes_in_a_core_at_once_where_cores_may_join(executors: Executors, model: SegmentedModel) -> None:
    slowed = Slowed(joins=True)
    served = Served(executors, model, Expanding(TWO_LANES), (0, 4, 8, model.unit_count), change=slowed)
    x = rows(2)
    answer = served.send(x)
    served.driver.post(QueryCancelled(99))  # whatever happens: the policy is asked again, and nobody waits
    while not any(isinstance(event, LaunchExpanded) for event in served.events):  # a worker says it from its own thread
        time.sleep(0.001)
    slowed.may_run.release()
    [(respond, y)] = answer()
    assert respond.outcome is Outcome.ANSWERED
    assert same(y, whole(model, x))
    assert slowed.threads == [(0, model.unit_count, (0, 1))], "one run, without a stop, on both cores"
    served.close()


def test_a_part_that_fails_fails_its_batch_and_nothing_is_left(executors: Executors, model: SegmentedModel) -> None:
    class Broken(Slowed):
        def run(self, start: int, end: int, tensors: Any, threads: Any = 1) -> Any:
            if len(tensors["x"]) == 2 if "x" in tensors else False:
                raise RuntimeError("it broke")
            return self._model.run(start, end, tensors, threads)

    served = Served(executors, model, Halves(TWO_LANES), (0, 4, model.unit_count), change=Broken())
    [(respond, _)] = served.ask(rows(3))  # of which one half is two rows
    assert (respond.outcome, respond.reason) == (Outcome.FAILED, "it broke")
    assert sum(isinstance(action, Release) for action in served.actions) == 1
    served.close()


def test_tensors_without_rows_cannot_be_taken_apart() -> None:
    parts = BatchTasks(4, {"x": np.zeros((4, 2)), "n": np.float32(3)}, 0)
    found = parts.rows(Work("a", 0, 2, 1, 2, rows=(2, 4))).tensors()
    assert (found["x"].shape, found["n"]) == ((2, 2), 3)
    parts = BatchTasks(4, {"x": np.zeros((3, 2))}, 1)
    with pytest.raises(RowsError, match=r"tensor 'x' has shape \(3, 2\), expected 4 rows"):
        parts.rows(Work("a", 0, 2, 1, 2, rows=(2, 4))).tensors()
