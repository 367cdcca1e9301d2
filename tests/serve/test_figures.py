"""Figures that cannot flatter: from when time counts, whose misses count, what loads leave of them, what is logged."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tritonclient.grpc import InferenceServerClient as GrpcTriton
from tritonclient.grpc import InferInput as GrpcInput
from tritonclient.http import InferenceServerClient as HttpTriton
from tritonclient.http import InferInput as HttpInput
from tritonclient.utils import InferenceServerException

from client import Client, LoaderHere, Watch, assert_balanced, feeds, sample, started, until
from cotenant.config import DeviceSection
from cotenant.core.actions import Respond
from cotenant.core.events import AnswerLate, ApplicationEnded, QueryArrived, QueryCancelled, QueryRefused, TenantRemoved
from cotenant.measure import loader
from cotenant.metrics import is_excluded
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.counters import Counters, TenantCounters
from cotenant.serve.engine.slo_watch import SloChange, SloWatch, log_slo_change, slo_change_text
from cotenant.serve.frontend.open_connections import readable_since
from cotenant.serve.server import Server
from cotenant.types import LossCause, Outcome, Query
from cotenant.wire.api import InferResult
from cotenant.wire.client import infer_once
from cotenant.wire.encode import ClientError
from fake_backend import FakeBackend, serving
from repositories import SLO_MS, write_good

MS = 1_000_000
SLO_NS = 100 * MS
IN_THREADS = {"device": DeviceSection(isolation="thread")}
X = {"x": np.ones((1, 4), np.float32)}


def ended(counters: Counters, number: int, outcome: Outcome, now_ms: float, tenant: str = "a", **more: Any) -> None:
    """A query that came at 0, and how it ended."""
    query = Query(number, tenant, 0, more.get("limit_ns", SLO_NS))
    counters(0, QueryArrived(query), [], None)
    counters(round(now_ms * MS), QueryCancelled(-1), [Respond(number, outcome)], None)


# --- whose misses count -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "latency_ms", "limit_ms", "apart"),
    [
        (Outcome.ANSWERED, 50, None, False),
        (Outcome.ANSWERED, 50, 100, False),
        (Outcome.DROPPED, 96, 96, False),  # a deadline set to the SLO that lost some on its way
        (Outcome.DROPPED, 2, 2, True),
        (Outcome.ANSWERED, 40, 50, True),  # else the impatient would be counted by their hits alone
        (Outcome.CANCELLED, 99, None, True),
        (Outcome.CANCELLED, 101, None, False),  # it waited for the whole SLO and then left
        (Outcome.FAILED, 1, 500, False),
    ],
)
def test_who_is_counted_apart(outcome: Outcome, latency_ms: int, limit_ms: int | None, apart: bool) -> None:
    limit_ns = None if limit_ms is None else limit_ms * MS
    assert is_excluded(outcome, latency_ms * MS, SLO_NS, limit_ns) is apart


def test_what_never_was_answered_is_in_the_last_bucket_alone() -> None:
    counted = TenantCounters(SLO_NS)
    assert counted.attainment is None
    counted.end(Outcome.ANSWERED, 15 * MS, 1)
    counted.end(Outcome.LATE, 150 * MS, 1)
    for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED):
        counted.end(outcome, MS, 1)
    counted.end(Outcome.CANCELLED, MS, 1)
    counted.end(Outcome.DROPPED, 2 * MS, 1, limit_ns=2 * MS)
    assert sum(counted.latency_buckets) == 5
    assert counted.latency_buckets[-1] == 3
    assert counted.latency_ns == 165 * MS
    assert counted.attainment == 0.2
    assert {outcome: count for outcome, count in counted.excluded.items() if count} == {
        Outcome.DROPPED: 1,
        Outcome.CANCELLED: 1,
    }


def test_impatient_clients_and_those_that_leave_do_not_ruin_the_record(tmp_path: Path) -> None:
    """Real clients: 50 queries with a time-out of 2 ms beside eleven patient ones, one of which allows just the SLO."""
    server = started(write_good(tmp_path / "models", "two"), **IN_THREADS)
    try:
        with serving(server) as ports:
            url = f"http://127.0.0.1:{ports.http}"
            for seed in range(10):
                infer_once(url, "two", feeds("two", seed))
            triton = GrpcTriton(f"127.0.0.1:{ports.grpc}")
            given_input = GrpcInput("x", [1, 8], "FP32")
            given_input.set_data_from_numpy(feeds("two")["x"])
            triton.infer("two", [given_input], client_timeout=SLO_MS / 1000)
            impatient = HttpTriton(f"127.0.0.1:{ports.http}", concurrency=10)
            http_input = HttpInput("x", [1, 8], "FP32")
            http_input.set_data_from_numpy(feeds("two")["x"])
            asked = [impatient.async_infer("two", [http_input], timeout=2000) for _ in range(50)]  # microseconds
            for each in asked:
                with suppress(InferenceServerException):
                    each.get_result()
            until(lambda: server.driver.wait_idle(0), lambda: server.driver.wait_idle(0.1))
            [counted] = [each for name, each in server.counters.by_tenant.items() if ":" not in name]
            assert sum(counted.excluded.values()) == 50
            assert counted.attainment == 1.0
            assert len(counted.recent) == 11
            page = server.metrics().decode()
            apart = [line for line in page.splitlines() if line.startswith("cotenant_apart_queries_total{")]
            assert sum(float(line.rsplit(" ", 1)[1]) for line in apart) == 50
            assert sample(page, "cotenant_latency_seconds_count", tenant="Owner of two") == 11
            triton.close()
            impatient.close()
        assert_balanced(server)
    finally:
        server.stop()


def test_a_request_that_never_became_a_query_is_a_miss_too() -> None:
    counters = Counters()
    counters.add("a", SLO_NS)
    counted = counters.by_tenant["a"]
    ended(counters, 1, Outcome.ANSWERED, 10)
    counters(20 * MS, QueryRefused("a", 15 * MS, LossCause.GONE, "it is being reloaded"), [], None)
    counters(20 * MS, QueryRefused("never served", 15 * MS, LossCause.GONE, "it is not there"), [], None)
    counters(20 * MS, TenantRemoved("a", "it is being reloaded"), [], None)
    counters(20 * MS, QueryRefused("a", 15 * MS, LossCause.GONE, "it is being reloaded"), [], None)
    assert (counted.arrived, counted.outcomes[Outcome.REJECTED], counted.attainment) == (3, 2, 1 / 3)


# --- from when to when time counts ------------------------------------------------------------------------------------


def test_where_the_kernel_does_not_say_since_when_bytes_could_be_read_it_is_now() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for descriptor in (ours.fileno(), -1, 1 << 20):  # no TCP, and no descriptors
            before = time.monotonic_ns()
            assert before <= readable_since(descriptor) <= time.monotonic_ns()
        ours.sendall(b"still open")


def test_the_kernel_says_it_of_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sent:
        received, _ = listening.accept()
        with received:
            sent.sendall(b"POST")
            begun = time.monotonic_ns()
            while time.monotonic_ns() - begun < 30 * MS:
                pass
            waited = time.monotonic_ns() - readable_since(received.fileno())
            assert 15 * MS < waited < 10_000 * MS


def test_front_ends_say_when_requests_came_and_tell_of_each_answer_once() -> None:
    backend = FakeBackend()
    told: list[InferResult] = []
    backend.replied = told.append  # type: ignore[method-assign]
    before = time.monotonic_ns()
    array = np.ones((1, 16), np.float32)
    try:
        with serving(backend) as ports:
            infer_once(f"http://127.0.0.1:{ports.http}", "tiny", {"x": array})
            triton = GrpcTriton(f"127.0.0.1:{ports.grpc}")
            given_input = GrpcInput("x", [1, 16], "FP32")
            given_input.set_data_from_numpy(array)
            triton.infer("tiny", [given_input])
            answers: list[Any] = []
            triton.start_stream(lambda result, error: answers.append(error or result))
            triton.async_stream_infer("tiny", [given_input])
            until(lambda: bool(answers), lambda: time.sleep(0.001))
            triton.stop_stream()
            with pytest.raises(ClientError, match="division by zero"):
                infer_once(f"http://127.0.0.1:{ports.http}", "fail", X)
            triton.close()
    finally:
        backend.close()
    assert [before - 10 * MS <= each.arrival_ns <= time.monotonic_ns() for each in backend.requests] == [True] * 4
    assert len({result.query for result in told}) == len(told) == 3


def test_an_answer_that_is_written_late_is_late_and_told_of(tmp_path: Path) -> None:
    watch = Watch()
    server = started(write_good(tmp_path / "models", "two"), watch, **IN_THREADS)
    client = Client(server)
    try:
        came = server.clock.now_ns()
        [late, early, left] = client.wait(*(client.submit("two", feeds("two"), arrival_ns=came) for _ in range(3)))
        counted = server.counters.by_tenant["Owner of two"]
        assert counted.outcomes[Outcome.ANSWERED] == 0  # none is written yet
        server.replied(early)
        server.cancel(left.query)  # its client went away when it was answered already
        assert counted.outcomes[Outcome.ANSWERED] == 2
        server.counters._unwritten[late.query] = (
            structs.replace(server.counters._unwritten[late.query][0], deadline_ns=came + 1),
            Outcome.ANSWERED,
        )
        server.replied(late)
        server.replied(late)  # once is all
        [event] = watch.events(AnswerLate)
        assert (event.query, event.tenant, event.arrival_ns) == (late.query, "Owner of two", came)
        assert counted.outcomes[Outcome.LATE] == 1
        assert counted.attainment is not None
        assert_balanced(server)
        assert server.counters._unwritten == {}
    finally:
        server.stop()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["arrive", "end", "write", "leave", "remove", "add"]), st.integers(0, 9)), max_size=60
    )
)
def test_whatever_the_order_each_query_is_counted_once(steps: list[tuple[str, int]]) -> None:
    counters, inside, unwritten, last, ended_count = Counters(), [], [], 0, 0
    ends: Counter[Outcome] = Counter()
    held: dict[int, Outcome] = {}
    counters.add("a", SLO_NS)
    counted = counters.by_tenant["a"]
    for at, (step, pick) in enumerate(steps):
        now = at * 30 * MS
        if step == "arrive" and "a" in counters.by_tenant:
            last += 1
            counters(now, QueryArrived(Query(last, "a", now, now + (SLO_NS, 2 * MS)[pick % 2])), [], None)
            if pick < 5:
                counters.expect_reply(last)
            inside.append(last)
        elif step == "end" and inside:
            number, outcome = inside.pop(pick % len(inside)), list(Outcome)[pick % len(Outcome)]
            later = number in counters._awaiting_reply and outcome in (Outcome.ANSWERED, Outcome.LATE)
            counters(now, QueryCancelled(-1), [Respond(number, outcome)], None)
            unwritten += [number] * later
            ended_count += not later
            if later:
                held[number] = outcome
            else:
                ends[outcome] += 1
        elif step in ("write", "leave") and unwritten:
            number = unwritten.pop(pick % len(unwritten))
            if step == "write":
                is_told = counters.replied(number, now) is not None
            else:
                told = counters(now, QueryCancelled(number), [], None)
                is_told = isinstance(told, AnswerLate) and told.query == number
            ends[Outcome.LATE if is_told else held[number]] += 1  # so that the causes add up to the losses
            ended_count += 1
        elif step == "remove" and "a" in counters.by_tenant:
            counters(now, TenantRemoved("a", "gone"), [], None)
        elif step == "add":
            counters.add("a", SLO_NS)
        apart = sum(counted.excluded.values())
        assert counted.outcomes == {outcome: ends[outcome] for outcome in counted.outcomes}
        assert sum(counted.outcomes.values()) == ended_count == counted.arrived - len(inside) - len(unwritten)
        assert sum(counted.latency_buckets) == len(counted.recent) == ended_count - apart
    counters.add("a", SLO_NS)
    assert counters.by_tenant == {"a": counted}
    assert counters._awaiting_reply <= set(inside)


def test_an_application_is_counted_by_what_is_told_of_it() -> None:
    counters = Counters()
    counters.add("app", SLO_NS)
    counters.arrive(Query(1, "app", 0, SLO_NS, items=3))
    counters.expect_reply(1)
    counters(10 * MS, ApplicationEnded(1, Outcome.ANSWERED, "", 10 * MS), [], None)
    assert counters.by_tenant["app"].rows == 0
    asked = counters.replied(1, 200 * MS)
    assert asked is not None
    assert (asked.tenant, asked.arrival_ns) == ("app", 0)
    assert (counters.by_tenant["app"].rows, counters.by_tenant["app"].outcomes[Outcome.LATE]) == (3, 1)


# --- what a load leaves -----------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are measured, in order."""
    names: list[str] = []
    measure = loader.measure_model

    def noted(runner: Any, *rest: Any) -> Any:
        names.append(runner.name)
        return measure(runner, *rest)

    monkeypatch.setattr(loader, "measure_model", noted)
    return names


def series(server: Server) -> set[str]:
    page = server.metrics().decode().splitlines()
    return {line.rsplit(" ", 1)[0] for line in page if line[:1] != "#" and "tenant=" in line}


def test_a_load_resets_nothing_and_measures_no_file_again(tmp_path: Path, measured: list[str]) -> None:
    root = write_good(tmp_path / "models", "cnn")
    server = started(root, loader=LoaderHere(1.0), **IN_THREADS)
    client = Client(server)
    try:
        before = series(server)
        assert not any(line.startswith(("cotenant_slo_attainment", "cotenant_headroom")) for line in before)
        client.ask("cnn", feeds("cnn"))
        for _ in range(2):
            server.load("cnn")
            client.ask("cnn", feeds("cnn"))
        assert sample(server.metrics().decode(), "cotenant_queries_total", tenant="cnn", outcome="answered") == 3
        assert measured == ["cnn"]
        shutil.copytree(root / "cnn" / "1", root / "cnn" / "2")  # an identical file is another version of it
        server.load("cnn")
        client.ask("cnn", feeds("cnn"), version="1")
        assert measured == ["cnn"]
        page = server.metrics().decode()
        assert sample(page, "cotenant_queries_total", tenant="cnn", outcome="answered") == 3
        assert sample(page, "cotenant_queries_total", tenant="cnn:1", outcome="answered") == 1
        shutil.rmtree(root / "cnn" / "1")
        server.load("cnn")
        assert not any('tenant="cnn:1"' in line for line in series(server))
        server.unload("cnn")
        assert series(server) == set()
        server.load("cnn")
        assert sample(server.metrics().decode(), "cotenant_queries_total", tenant="cnn", outcome="answered") == 3
        assert measured == ["cnn"]
    finally:
        server.stop()


# --- the log ----------------------------------------------------------------------------------------------------------


def test_a_tenant_begins_and_ceases_to_miss_its_slo_once() -> None:
    watch, now, turns = SloWatch(), 0, []
    for in_time in [True] * 50 + [False] * 30 + [True] * 300:
        now += 100 * MS
        change = watch.ended(in_time, now)
        if change is not None:
            turns.append((now // (100 * MS), change))
    assert [(at, change.begins, change.missed, change.window) for at, change in turns] == [
        (56, True, 6, 56),
        (179, False, 1, 100),
    ]
    assert turns[1][1].missed_since == 24
    assert turns[1][1].since_ns == 12_300 * MS


@given(ends=st.lists(st.booleans(), max_size=400), every_ms=st.integers(1, 200))
def test_turns_alternate_and_are_far_apart(ends: list[bool], every_ms: int) -> None:
    watch, turns = SloWatch(), []
    for at, in_time in enumerate(ends):
        change = watch.ended(in_time, at * every_ms * MS)
        if change is not None:
            turns.append((at * every_ms, change.begins))
            recent = ends[max(0, at - 99) : at + 1]
            assert change.missed == recent.count(False)
            assert change.missed > 5 if change.begins else change.missed < 2
    assert [begins for _, begins in turns] == [at % 2 == 0 for at in range(len(turns))]
    assert all(after - before >= 10_000 for (before, _), (after, _) in pairwise(turns))


def test_a_miss_of_the_slo_is_one_line_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cotenant.slo")
    clock = VirtualClock()
    counters = Counters(lambda *change: log_slo_change(clock, *change))
    counters.leading_cause = {"a": "neighbour"}.get
    counters.add("a", SLO_NS)
    counters.add("b", SLO_NS)
    for number in range(40):
        ended(counters, number, Outcome.DROPPED, 100)
        ended(counters, 100 + number, Outcome.CANCELLED, 1, "b")
        ended(counters, 200 + number, Outcome.DROPPED, 1, "b", limit_ns=MS)
    assert caplog.messages == []  # not on the way of queries
    clock.run()
    assert caplog.messages == [
        "tenant 'a' begins to miss its SLO of 100 ms: 6 of its last 6 queries (main cause: other tenants)"
    ]
    text = slo_change_text("a", SLO_NS, SloChange(False, 1, 100, 34, 12_300 * MS))
    assert text == "tenant 'a' meets its SLO of 100 ms again: 34 queries missed it in 12.3 s"
