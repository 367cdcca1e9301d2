"""The harness that measures a GPU: journal, budget, steps, tables; and a whole quick run on the cores here."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu import _named, _serving, _sharing, overlap, partition
from bench.gpu.__main__ import main
from bench.gpu._belief import MeasuredGroups, segment_ratio, unit_ns
from bench.gpu._context import Context, Opened, Point, Step, Way, measure_points
from bench.gpu._fingerprint import Fingerprint
from bench.gpu._journal import Budget, Journal, MeasureError
from bench.gpu._models import TINY, Spec, Subject, Subjects, even_cuts
from bench.gpu._page import page
from bench.gpu._profile import TABLES, write_folder
from bench.gpu._rig import CudaRig
from bench.gpu._runner import Effort, Job, Runner
from bench.gpu._session import Request
from bench.gpu._stats import spread
from bench.gpu._steps import STEPS, run_steps
from bench.gpu._tables import to_csv
from cotenant.core.actions import Launch
from cotenant.core.predictor import Member
from cotenant.execute.protocol import OnEnd, Tensors, Timing
from cotenant.graph.dfg import Operator, Tensor, build_dfg
from cotenant.predict.table import TablePredictor
from cotenant.profile.group_samples import load_samples
from cotenant.profile.latency_table import LatencyRow, LatencyTable
from cotenant.profile.profile_file import load_profile
from cotenant.work import Share, Work

ROOT = Path(__file__).resolve().parents[2]
EFFORT = Effort(0.0, 3, 5, 1)
HERE = Share((0,))


class FakeExecutor:
    """Ends launches at once on a thread of its own, and fails as it is told."""

    def __init__(self, error: str | None = None, silent: bool = False) -> None:
        self.inputs: dict[int, Tensors] = {}
        self.started: list[Launch] = []
        self.released: list[int] = []
        self.models: dict[str, Any] = {}
        self._error, self._silent = error, silent

    def add_model(self, tenant: str, model: Any) -> None:
        self.models[tenant] = model

    def announce(self, tenant: str) -> None:
        assert tenant in self.models

    def put(self, query: int, inputs: Tensors) -> None:
        self.inputs[query] = inputs

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        self.started.append(launch)
        if not self._silent:
            threading.Thread(target=on_end, args=(launch.id, self._error, Timing(infer_ns=7)), daemon=True).start()

    def take(self, query: int) -> Mapping[str, Any]:
        inputs = self.inputs.pop(query)
        return {"y": next(iter(inputs.values()))}

    def discard(self, query: int) -> None:
        self.inputs.pop(query, None)

    def release(self, batch: int) -> None:
        self.released.append(batch)


def subject(name: str = "m", units: int = 4) -> Subject:
    return Subject(name, SimpleNamespace(unit_count=units), Spec({"x": ("float32", (1, 2))}, {}, True))


def runner(**options: Any) -> Runner:
    executor = FakeExecutor(**options)
    return Runner(executor, {"m": subject(), "n": subject("n", 2)}, patience_s=0.2 if options.get("silent") else 20.0)


# --- journal, budget, tables --------------------------------------------------------------------------------------


def test_what_is_measured_is_found_again_and_half_a_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    Journal(path).put("latency", "a", [{"p50_ms": 1.5}], 0.25)
    with path.open("a") as file:
        file.write('{"step": "latency", "key": "b", "ro')
    again = Journal(path)
    assert again.get("latency", "a") == [{"p50_ms": 1.5}]
    assert again.has("latency", "a")
    assert not again.has("latency", "b")
    assert again.rows("latency") == [{"p50_ms": 1.5}]
    assert again.rows("corun") == []
    again.put("latency", "b", [{"p50_ms": 2.5}], 0.25)  # half a line costs itself alone
    assert Journal(path).rows("latency") == [{"p50_ms": 1.5}, {"p50_ms": 2.5}]


def test_a_point_that_failed_is_left_alone_until_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.fail("ways", "a", "out of memory")
    assert journal.has("ways", "a")
    assert journal.failures == [{"step": "ways", "point": "a", "reason": "out of memory"}]
    later = Journal(path)
    assert not later.has("ways", "a")
    later.fail("ways", "a", "again")
    assert later.has("ways", "a")
    last = Journal(path)
    last.put("ways", "a", [{"x": 1}], 0.0)
    assert last.failures == []
    assert Journal(path).failures == []


def test_a_part_of_a_budget_ends_with_it() -> None:
    now = [100.0]
    budget = Budget(10.0, lambda: now[0])
    part = budget.part(4.0)
    now[0] = 103.0
    assert (part.left_s, budget.left_s, budget.spent_s) == (1.0, 7.0, 3.0)
    assert budget.part(50.0).left_s == 7.0
    now[0] = 120.0
    assert budget.is_over()
    assert budget.left_s == 0.0


def test_tables_have_every_column_once() -> None:
    lines = list(csv.DictReader(to_csv([{"a": 1, "b_ms": 2.5}, {"b_ms": 3.0, "c": "x,y"}]).splitlines()))
    assert lines == [{"a": "1", "b_ms": "2.5", "c": ""}, {"a": "", "b_ms": "3.0", "c": "x,y"}]


def test_spread_is_in_milliseconds() -> None:
    found = spread([1_000_000, 2_000_000, 3_000_000])
    assert (found["runs"], found["p50_ms"], found["mean_ms"], found["std_ms"]) == (3, 2.0, 2.0, 1.0)
    assert spread([5_000_000])["std_ms"] == 0.0
    with pytest.raises(ValueError, match="empty"):
        spread([])


def test_cuts_part_the_cost_evenly() -> None:
    operators = [
        Operator(i, f"o{i}", "Relu", "", (f"t{i}",), (f"t{i + 1}",), macs=15 * (10**9 if i < 2 else 10**8))
        for i in range(8)
    ]
    tensors = {f"t{i}": Tensor(f"t{i}", "tensor(float)", (1, 4), 16) for i in range(9)}
    dfg = build_dfg("m", operators, [[i] for i in range(8)], [tensors["t0"]], [tensors["t8"]], tensors)
    assert even_cuts(dfg, 1) == (0, 8)
    assert even_cuts(dfg, 2) == (0, 1, 8)
    cuts = even_cuts(dfg, 100)
    assert cuts[0] == 0
    assert cuts[-1] == 8
    assert list(cuts) == sorted(set(cuts))


# --- launches -----------------------------------------------------------------------------------------------------


def test_a_segment_in_the_middle_is_run_up_to_and_released() -> None:
    each = runner()
    ran = each.once(Job("m", 2, 1, 3, HERE))
    executor = each.executor
    assert ran.latency_ns > 0
    assert ran.infer_ns == 7
    assert [(launch.work.start, launch.work.end, launch.last) for launch in executor.started] == [
        (0, 1, False),
        (1, 3, False),
    ]
    assert len({launch.batch for launch in executor.started}) == 1
    assert len({launch.id for launch in executor.started}) == 2
    assert executor.released == [executor.started[0].batch]
    assert executor.inputs == {}


def test_a_chain_goes_through_all_segments_of_one_batch() -> None:
    each = runner()
    took, outputs = each.chain(each.whole("m", 3, HERE), (0, 1, 4))
    assert took > 0
    assert np.shape(outputs["y"]) == (3, 2)
    assert [(launch.work.start, launch.work.end) for launch in each.executor.started] == [(0, 1), (1, 4)]
    assert [launch.last for launch in each.executor.started] == [False, True]


def test_without_pause_every_job_has_its_runs() -> None:
    each = runner()
    found = each.without_pause([each.whole("m", 1, HERE), each.whole("n", 1, Share((1,)))], EFFORT)
    assert [len(runs) >= EFFORT.min_runs for runs in found] == [True, True]
    assert each.executor.inputs == {}


def test_a_point_that_takes_long_is_content_with_two_runs() -> None:
    effort = Effort(0.2, 5, 200, 3, longest_s=4.0)
    assert [effort.is_enough(runs, 0.1) for runs in (4, 5, 200)] == [False, False, True]
    assert [effort.is_enough(runs, 0.3) for runs in (4, 5)] == [False, True]
    assert [effort.is_enough(runs, 4.1) for runs in (1, 2)] == [False, True]


@pytest.mark.parametrize("how", ["once", "without_pause"])
def test_a_launch_that_fails_fails_the_point(how: str) -> None:
    each = runner(error="no memory")
    job = each.whole("m", 1, HERE)
    effort = Effort(0.0, 1, 1, 0)
    work: Callable[[], object] = (
        (lambda: each.once(job)) if how == "once" else lambda: each.without_pause([job], effort)
    )
    with pytest.raises(MeasureError, match="m: no memory"):
        work()


def test_a_launch_that_never_ends_fails_the_point() -> None:
    each = runner(silent=True)
    with pytest.raises(MeasureError, match=r"m: no end after 0\.2 s"):
        each.once(each.whole("m", 1, HERE))


def test_a_model_of_single_rows_says_so() -> None:
    single = Subject("s", None, Spec({"x": ("int64", (1, 3))}, {"x": 5}, False))
    assert single.feeds(1)["x"].max() < 5
    with pytest.raises(MeasureError, match="one row at a time"):
        single.feeds(2)


# --- steps --------------------------------------------------------------------------------------------------------


class FakeRig:
    kind, device, granule, ways = "cuda", "cuda:0", 8, (Way.SHARES, Way.STREAMS)
    graphs = (True, False)

    def __init__(self, total: int = 132, problem: str = "") -> None:
        self.slots = tuple(range(total))
        self.opened: list[tuple[Share, ...]] = []
        self._problem = problem

    @contextmanager
    def open(self, partitions: Sequence[Share], way: Way, graphs: int) -> Iterator[Opened]:
        self.opened.append(tuple(partitions))
        shares: Any = SimpleNamespace(granted={each: each.size for each in partitions})
        yield Opened(FakeExecutor(), shares)

    def problem(self) -> str:
        return self._problem

    def survey(self, shares: Any) -> tuple[int, str] | None:
        return None

    def close(self) -> None: ...


class FakeSubjects:
    names = ("m", "n", "k")

    def get(self, name: str) -> Subject:
        each = subject(name)
        each.model.dfg = SimpleNamespace(
            units=[SimpleNamespace(macs=0, read_bytes=0, write_bytes=0, weight_bytes=0)] * 4, cheap_cuts=()
        )
        return each


def context(tmp_path: Path, **rig: Any) -> Context:
    fake: Any = FakeSubjects()
    return Context(FakeRig(**rig), fake, Journal(tmp_path / "j.jsonl"), EFFORT, quick=True)


def test_shares_are_whole_granules_and_the_whole_is_all(tmp_path: Path) -> None:
    each = context(tmp_path)
    sizes = [each.share(fraction).size for fraction in (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)]
    assert sizes == [132, 96, 64, 48, 32, 16]
    lanes = each.lanes(4)
    assert [lane.size for lane in lanes] == [32] * 4
    assert sum(lane.mask for lane in lanes) == (1 << 128) - 1
    assert [lane.size for lane in context(tmp_path, total=8).lanes(4)] == [8]


def test_other_partitions_make_another_executor_and_equal_ones_do_not(tmp_path: Path) -> None:
    each = context(tmp_path)
    first = each.runner([each.whole])
    assert each.runner([each.whole]) is first
    assert each.runner([each.whole], graphs=False) is not first
    each.warmed.add("x")
    each.runner(each.lanes(2))
    assert not each.warmed
    assert [len(partitions) for partitions in each.rig.opened] == [1, 1, 2]  # type: ignore[attr-defined]


def test_a_step_goes_on_where_it_stopped_and_passes_over_what_fails(tmp_path: Path) -> None:
    calls: list[str] = []

    def point(key: str) -> Point:
        def measure() -> list[dict[str, Any]]:
            calls.append(key)
            if key == "bad":
                raise MeasureError("cannot be")
            return [{"key": key}]

        return Point(key, measure)

    step = Step("s", "", 1.0, lambda _: map(point, ["a", "bad", "b"]))
    said: list[str] = []
    over = iter([False, False, True])
    assert measure_points(context(tmp_path), step, lambda: next(over), said.append) == (1, False)
    assert measure_points(context(tmp_path), step, lambda: False, said.append) == (1, True)
    assert calls == ["a", "bad", "b"]
    assert measure_points(context(tmp_path), step, lambda: False, said.append, retry=True) == (0, True)
    assert calls == ["a", "bad", "b", "bad"]
    assert said == ["s: bad failed: cannot be"] * 2
    with pytest.raises(MeasureError, match="the device is lost: gone"):
        measure_points(context(tmp_path, problem="gone"), step, lambda: False, said.append, retry=True)


def test_a_step_that_uses_up_its_share_leaves_time_for_the_others(tmp_path: Path) -> None:
    now = [0.0]
    order: list[str] = []

    def step(name: str, count: int) -> Step:
        def measure() -> list[dict[str, Any]]:
            now[0] += 1.0
            order.append(name)
            return [{}]

        return Step(name, "", 0.2, lambda _: (Point(str(at), measure) for at in range(count)))

    steps = [step("long", 8), step("short", 2)]
    written: list[int] = []
    is_complete = run_steps(
        context(tmp_path), steps, Budget(10.0, lambda: now[0]), lambda _: None, lambda: written.append(len(order))
    )
    assert is_complete
    assert order == ["long"] * 2 + ["short"] * 2 + ["long"] * 6
    assert written == [2, 4, 10]
    now[0] = 0.0
    assert not run_steps(context(tmp_path / "other"), steps, Budget(3.0, lambda: now[0]), lambda _: None, lambda: None)


def test_what_failed_before_is_tried_after_all_else(tmp_path: Path) -> None:
    order: list[str] = []

    def step(name: str) -> Step:
        def measure() -> list[dict[str, Any]]:
            order.append(name)
            return [{}]

        return Step(name, "", 0.5, lambda _: [Point("old", measure), Point("new", measure)])

    Journal(tmp_path / "j.jsonl").fail("one", "old", "hung")
    steps = [step("one"), step("two")]
    assert run_steps(context(tmp_path), steps, Budget(60.0), lambda _: None, lambda: None)
    assert order == ["one", "two", "two", "one"]


def test_every_step_has_a_table_and_enough_points(tmp_path: Path) -> None:
    each = context(tmp_path)
    each.quick = False
    fake: Any = FakeSubjects()
    fake.names = tuple(f"m{at}" for at in range(12))
    each.subjects = fake
    keys = {step.name: [point.key for point in step.points(each)] for step in STEPS}
    assert set(keys) == set(TABLES)
    for name, found in keys.items():
        assert len(found) == len(set(found)), name
    assert len(keys["latency"]) == 12 * 6 * 6
    assert len(keys["corun"]) >= 60
    assert len(keys["ways"]) == 2 * 3 * 5
    assert sum(step.share for step in STEPS) == pytest.approx(1.0)


class FakeShares:
    def __init__(self, granularity: int) -> None:
        self.total, self.granularity, self.index = 132, granularity, 0
        self.splits: list[tuple[Share, ...]] = []
        self.is_closed = False

    @property
    def granted(self) -> dict[Share, int]:
        return {each: each.size for each in self.splits[-1]}

    def split(self, partitions: Sequence[Share]) -> int:
        self.splits.append(tuple(partitions))
        return 5

    def close(self) -> None:
        self.is_closed = True


def test_shares_of_a_gpu_outlive_the_executors_that_run_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from cotenant.execute.gpu import cuda_streams

    class Streams:
        name, has_graphs = "cuda:0", True

        def __init__(self, index: int, shares: Any) -> None:
            assert (index, shares.total) == (0, 132)
            self.close = shares.close  # as the real ones do

    monkeypatch.setattr(cuda_streams, "CudaStreams", Streams)
    green, plain = FakeShares(8), FakeShares(1)
    rig = CudaRig(0, plain, green)
    assert (len(rig.slots), rig.granule, rig.ways) == (132, 8, (Way.SHARES, Way.STREAMS))
    half = Share(tuple(range(64)), "cuda:0")
    for way in (Way.SHARES, Way.STREAMS):
        with rig.open([half], way, 4) as opened:
            assert opened.shares.granted == {half: 64}
    assert (green.splits, plain.splits) == ([(half,)], [(half,)])
    assert not green.is_closed
    rig.close()
    assert green.is_closed
    assert plain.is_closed


def test_a_gpu_without_green_contexts_has_plain_streams_and_points_of_their_own(tmp_path: Path) -> None:
    rig = CudaRig(0, FakeShares(1), None, "no cuda-bindings")
    assert (rig.granule, rig.ways) == (1, (Way.STREAMS,))
    fake: Any = FakeSubjects()
    each = Context(rig, fake, Journal(tmp_path / "j.jsonl"), EFFORT)
    steps = {step.name: [point.key for point in step.points(each)] for step in STEPS}
    assert steps["resplit"] == []
    assert all(key.endswith("/streams") for name in ("corun", "serving", "groups") for key in steps[name])
    whole = [key for key in steps["latency"] if not key.endswith("/streams")]
    assert all(key.endswith("/size132") for key in whole)


def test_a_machine_without_a_gpu_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("bench/gpu: there is no GPU that torch ")


def test_the_benchmarks_report_what_their_steps_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(request: Request, budget: Budget, tell: Callable[[str], None]) -> tuple[Path, bool]:
        journal = Journal(tmp_path / request.steps[0] / "journal.jsonl")
        if request.steps == ("serving",):
            for row in [served(name, 100.0, 0.5, 1.2) for name in _serving.BASELINES] + [
                served("overlap", 130.0, 0.8, 1.2)
            ]:
                journal.put("serving", str(row["contender"]), [{**row, "p99_ms": 3.0}], 0.0)
        else:
            row = {"resplit_ms": 0.5, "first_launch_ms": 2.0, "granted_sms_total": 128, "seen_sms_total": 128}
            row |= {"problems": "", "shares": 2, "asked_sms": 64, "granted_sms": 64}
            journal.put("resplit", "2/0", [row], 0.0)
        write_folder(tmp_path / request.steps[0], journal, device(), [], request.command, request.created)
        return tmp_path / request.steps[0], False

    monkeypatch.setattr(_named, "why_not", lambda: "")
    monkeypatch.setattr(_named, "measure", measured)
    found: Any = overlap.run(False, None)
    assert found["summary"]["throughput_gain_vs_edf_pct"] == pytest.approx(30.0)
    assert found["summary"]["violation_reduction_pct"] == pytest.approx(60.0)
    assert found["versions"]["gpu"] == "NVIDIA H100 80GB <HBM3>"
    assert len(found["rows"]) == 4
    found = partition.run(False, None)
    expected = {"shares_verified": 1.0, "resplit_ms": 0.5, "resplit_first_launch_ms": 2.0, "granted_sms": 128}
    assert found["summary"] == expected
    assert "not everything is measured yet" in capsys.readouterr().out


# --- beliefs and figures ------------------------------------------------------------------------------------------


def test_a_group_is_believed_to_take_its_slowest_member_slowed_down() -> None:
    tables = {name: LatencyTable((LatencyRow(0, 1, 8, ns),)) for name, ns in (("a", 1000), ("b", 3000))}
    groups = MeasuredGroups(TablePredictor(tables), {("a", "b"): 4.0, ("b", "a"): 1.2})
    a, b = (Member(Work(name, 0, 1, 0, 1), 8) for name in "ab")
    assert groups.group_ns([(a,), (b,), (a, b)]) == [1000, 3000, 4000]


def test_units_and_the_ratio_of_segments_come_from_the_measured_parts() -> None:
    parts = [
        {"start": 2, "end": 3, "p50_ms": 2.0, "whole_p50_ms": 2.5, "units_ns": "2000000"},
        {"start": 0, "end": 2, "p50_ms": 1.0, "whole_p50_ms": 2.5, "units_ns": "300000 700000"},
    ]
    assert unit_ns(parts) == [300000, 700000, 2000000]
    assert segment_ratio(parts) == pytest.approx(1.2)


def served(contender: str, goodput: float, attainment: float, load: float) -> dict[str, Any]:
    return {
        "pair": "a+b",
        "items": 8,
        "load": load,
        "contender": contender,
        "goodput_per_s": goodput,
        "attainment": attainment,
        "offered": 100,
    }


def test_gains_compare_cells_that_all_contenders_have() -> None:
    rows = [served(name, 100.0, 0.5, 1.2) for name in _serving.BASELINES] + [served("overlap", 130.0, 0.8, 1.2)]
    rows += [served(name, 80.0, 0.9, 0.8) for name in _serving.BASELINES] + [served("overlap", 80.0, 1.0, 0.8)]
    rows += [served("overlap", 900.0, 1.0, 1.5)]
    found = _serving.gains(rows)
    assert found["throughput_gain_vs_edf_pct"] == pytest.approx(30.0)
    assert found["violation_reduction_vs_edf_pct"] == pytest.approx(100 * (1 - 20 / 60), rel=1e-4)
    assert found["violation_reduction_vs_edf_halves_pct"] == found["violation_reduction_vs_fcfs_pct"]
    assert _serving.gains(rows[:2]) == {}


def test_arrivals_are_the_same_for_the_same_seed_and_have_the_rate() -> None:
    found = _serving.arrivals({"a": 100.0, "b": 50.0}, 20.0, 1)
    assert found == _serving.arrivals({"a": 100.0, "b": 50.0}, 20.0, 1)
    assert found == sorted(found)
    assert sum(name == "a" for _, name in found) == pytest.approx(2000, rel=0.1)
    assert sum(name == "b" for _, name in found) == pytest.approx(1000, rel=0.1)
    assert found[-1][0] < 20e9


def test_pairs_are_five_and_distinct(tmp_path: Path) -> None:
    each = context(tmp_path)
    fake: Any = FakeSubjects()
    fake.names = tuple("abcdef")
    each.subjects = fake
    pairs = _sharing.pairs_of(each)
    assert pairs == [("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("b", "d")]


def test_shares_count_as_verified_only_when_a_kernel_found_nothing_wrong() -> None:
    row = {"resplit_ms": 0.5, "first_launch_ms": 2.0, "granted_sms_total": 128, "seen_sms_total": "", "problems": ""}
    assert "shares_verified" not in _sharing.resplit_figures([row])
    good, bad = {**row, "seen_sms_total": 128}, {**row, "seen_sms_total": 120, "problems": "both ran on the SMs [3]"}
    found = _sharing.resplit_figures([row, good])
    assert (found["shares_verified"], found["resplit_ms"], found["granted_sms"]) == (1.0, 0.5, 128)
    assert _sharing.resplit_figures([good, bad])["shares_verified"] == 0.0


def device() -> Fingerprint:
    texts = {"driver": "1", "cuda": "13.0", "torch": "2.13.0", "host": "x", "system": "Linux", "python": "3.11"}
    return Fingerprint(
        "cuda", "NVIDIA H100 80GB <HBM3>", 132, "9.0", 1 << 36, host_cores=2, clocks={"clocks.sm": "1980 MHz"}, **texts
    )


def test_a_device_has_a_folder_of_its_own_and_clocks_do_not_change_it() -> None:
    one, other = device(), device()
    other.clocks["clocks.sm"] = "345 MHz"
    assert one.folder == other.folder
    assert one.folder.startswith("nvidia-h100-80gb-hbm3-")


def test_an_empty_run_leaves_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.fail("ways", "a", "no <memory>")
    write_folder(tmp_path, journal, device(), [{"what": "x is left out", "why": "because"}], "run.sh", "now")
    text = (tmp_path / "report.html").read_text()
    assert "Not measured yet: latency by share and batch" in text
    assert "&lt;HBM3&gt;" in text
    assert "no &lt;memory&gt;" in text
    assert "x is left out: because" in text
    assert not (tmp_path / "profile.json").exists()
    assert json.loads((tmp_path / "device.json").read_text())["device"]["units"] == 132
    assert page(journal, device(), json.loads((tmp_path / "device.json").read_text())) == text


def test_without_a_gpu_the_benchmarks_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (overlap, partition):
        assert module.run(True, None) == {"summary": {}, "rows": []}
        assert "there is no GPU to measure: torch" in capsys.readouterr().out


def test_segments_of_an_archive_give_what_the_whole_gives(tmp_path: Path) -> None:
    from bench.torch_segments import _measure

    subjects = Subjects(tmp_path, "cpu", TINY[1:])
    assert subjects.build(1) == {}
    feeds = subjects.get(TINY[1]).feeds(1)
    rows = _measure("cpu", tmp_path / f"{TINY[1]}.pt2", feeds, None, 2)
    assert [row["segments"] for row in rows] == [4, 4, 4]
    assert all(row["max_abs_error"] < 1e-5 and row["pairs"] == 2 and row["ratio"] > 0 for row in rows)
    with pytest.raises(MeasureError, match="nobody could not be built"):
        subjects.get("nobody")
    subjects.close()


# --- a whole run --------------------------------------------------------------------------------------------------

_ONLY_TORCH = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
from bench.gpu.__main__ import main
arguments = {arguments!r}
assert main(arguments) == 0
print("AGAIN")
assert main(arguments) == 0
"""
BLOCKED = (
    *("typer", "rich", "onnx", "onnxruntime", "onnxscript", "grpc", "google", "uvicorn", "uvloop"),
    *("httptools", "prometheus_client", "scipy", "sklearn", "safetensors", "PIL", "pytest", "hypothesis"),
)


def test_a_quick_run_on_cores_with_torch_numpy_and_msgspec_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--models", str(tmp_path / "models")]
    before = sorted((ROOT / "profiles").rglob("*")) if (ROOT / "profiles").exists() else []
    done = subprocess.run(
        [sys.executable, "-c", _ONLY_TORCH.format(blocked=set(BLOCKED), arguments=arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": "src:.", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, again = done.stdout.split("AGAIN")
    assert "failed" not in first, first
    assert "run the same command again" not in first
    for step in STEPS:
        assert f"{step.name}: " in first
        assert f"{step.name}: 0 points measured, all there" in again
    profile = load_profile(out / "profile.json")
    assert set(profile.models) == {"tiny_convolutions", "tiny_perceptron"}
    for name, model in profile.models.items():
        assert len(model.unit_ns) == model.cuts[-1]
        cores = {point.cores for point in model.points}
        predictor = TablePredictor(profile.tables())
        assert all(predictor.latency_ns(Work(name, 0, 1, 0, model.cuts[-1]), each) > 0 for each in cores)
    header, samples = load_samples(out / "groups.jsonl")
    assert header.fingerprint == profile.device.fingerprint
    assert samples
    for name in TABLES:
        if name == "corun" and len(profile.models) and not (out / "corun.csv").exists():
            continue  # one core has no disjoint shares
        assert list(csv.DictReader((out / f"{name}.csv").read_text().splitlines())), name
    errors = [float(row["max_abs_error"]) for row in csv.DictReader((out / "segments.csv").read_text().splitlines())]
    assert max(errors) < 1e-4
    assert "<svg" in (out / "report.html").read_text()
    assert (sorted((ROOT / "profiles").rglob("*")) if (ROOT / "profiles").exists() else []) == before
