from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import uvloop

from cotenant.load import Lag, LiveStats, LoadError, LoadResult, TenantInfo, run_load, run_load_process
from cotenant.load.load_process import _serve
from cotenant.metrics import OutcomeLog, QueryRecord
from cotenant.types import Cause, Outcome
from cotenant.wire.encode import ClientError, grpc_request, http_request
from cotenant.wire.ending import Ending
from cotenant.wire.oip import MESSAGES
from cotenant.workload import TenantLoad, Trace, Uniform, Workload, arrivals
from fake_backend import FakeBackend
from fake_backend import serving as front_ends
from load_fakes import Answer, Gate, in_loop, ok, serving, split_body

MS = 1_000_000
S = 1000 * MS
SAMPLE = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
INPUTS = {"m": [SAMPLE], "n": [SAMPLE]}
SLO_CONFIG = {"parameters": {"slo_ms": {"string_value": "60000"}}}


def burst(count: int, over_ns: int = 0) -> Trace:
    return Trace(tuple(i * over_ns // max(1, count) for i in range(count)))


def tenant(model: str = "m", count: int = 12, over_ns: int = 60 * MS, **other: Any) -> TenantLoad:
    return TenantLoad(**{"name": model, "model": model, "process": burst(count, over_ns), "slo_ns": 60 * S, **other})


def workload(*tenants: TenantLoad, duration_ns: int = 100 * MS, **other: Any) -> Workload:
    return Workload(tenants=tenants or (tenant(),), duration_ns=duration_ns, **other)


def counts(result: LoadResult, name: str) -> Mapping[str, int]:
    line = result.summary.tenant(name)
    return {o.value: n for o in Outcome if (n := getattr(line, o.value))}


HTTP_PLAN: list[Answer] = [
    (200, ""),
    (503, "the queue is full", Ending(Outcome.REJECTED)),
    (503, "rejected: hopeless", Ending(Outcome.DROPPED)),
    (503, "the server is draining", Ending(Outcome.REJECTED, Cause.UNSERVED)),
    (503, "the node was lost", Ending(Outcome.FAILED)),
    (500, "dropped: the model raised", Ending(Outcome.FAILED)),
    (400, "unknown input", Ending(Outcome.FAILED)),
    (499, "by the client", Ending(Outcome.CANCELLED)),
]
GRPC_PLAN: list[Answer] = [
    (200, ""),
    (14, "the queue is full", Ending(Outcome.REJECTED)),
    (14, "rejected: hopeless", Ending(Outcome.DROPPED)),
    (14, "the server is draining", Ending(Outcome.REJECTED, Cause.UNSERVED)),
    (14, "the node was lost", Ending(Outcome.FAILED)),
    (13, "dropped: the model raised", Ending(Outcome.FAILED)),
    (3, "unknown input", Ending(Outcome.FAILED)),
    (1, "by the client", Ending(Outcome.CANCELLED)),
]
EXPECTED = {"answered": 2, "rejected": 4, "dropped": 2, "failed": 6, "cancelled": 2}
FOREIGN_HTTP: list[Answer] = [
    (200, ""),
    (503, "dropped: whatever it says"),
    (429, "slow down"),
    (500, "rejected: whatever it says"),
    (404, "no such model"),
    (400, "unknown input"),
    (499, "failed: whatever it says"),
    (503, ""),
]
FOREIGN_GRPC: list[Answer] = [
    (200, ""),
    (14, "dropped: a connection to a socket, it says"),
    (8, "concurrent calls"),
    (13, "rejected: whatever it says"),
    (5, "no such model"),
    (3, "unknown input"),
    (1, "failed: whatever it says"),
    (14, ""),
]
FOREIGN = {"answered": 2, "rejected": 6, "failed": 6, "cancelled": 2}
"""Of a server that tells a status alone, whatever its words."""


@pytest.mark.parametrize(
    ("protocol", "plan", "expected"),
    [
        ("http", HTTP_PLAN, EXPECTED),
        ("grpc", GRPC_PLAN, EXPECTED),
        ("http", FOREIGN_HTTP, FOREIGN),
        ("grpc", FOREIGN_GRPC, FOREIGN),
    ],
)
@in_loop
async def test_programmed_outcomes_are_counted_exactly(
    protocol: str, plan: list[Answer], expected: dict[str, int]
) -> None:
    async def answer(number: int) -> Answer:
        return plan[number % len(plan)]

    async with serving(answer) as server:
        result = await run_load(
            workload(tenant(count=16, protocol=protocol)),
            http_url=server.http_url,
            grpc_url=server.grpc_url,
            inputs=INPUTS,
        )
    assert counts(result, "m") == expected
    told = {outcome: sum(said.values()) for outcome, said in result.tenants[0].reasons.items()}
    assert told == {outcome: count for outcome, count in expected.items() if outcome != "answered"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_an_answer_that_is_not_the_one_that_was_given_alone_is_a_failure(protocol: str) -> None:
    """Two samples, each asked alone first. Then one gets the other's answer, one a row too many, and one nothing."""

    def outputs(*rows: float) -> str:
        return json.dumps([{"name": "y", "datatype": "FP32", "shape": [len(rows), 1], "data": rows}])

    async def answer(number: int) -> Answer:
        own = 2.0 if np.ones(3, np.float32).tobytes() in server.bodies[number] else 1.0
        odd = {4: outputs(3.0 - own), 7: outputs(own, own), 9: "[]"}
        return 200, odd.get(number, outputs(own + 1e-5 * number))

    async with serving(answer) as server:
        result = await run_load(
            workload(tenant(count=10, protocol=protocol)),
            http_url=server.http_url,
            grpc_url=server.grpc_url,
            inputs={"m": [{"x": np.zeros((1, 3), np.float32)}, {"x": np.ones((1, 3), np.float32)}]},
            check=True,
        )
        unchecked = await run_load(
            workload(tenant(count=2, protocol=protocol)),
            http_url=server.http_url,
            grpc_url=server.grpc_url,
            inputs=INPUTS,
        )
    found = counts(result, "m")
    assert len(server.bodies) == 2 + 10 + 2
    assert (found["answered"], found["failed"], result.wrong_answers) == (7, 3, 3)
    assert all(reason.startswith("wrong answer: output") for reason in result.tenants[0].reasons["failed"])
    assert (unchecked.wrong_answers, counts(unchecked, "m")["answered"]) == (0, 2)


@in_loop
async def test_nothing_is_checked_where_a_sample_fails_alone() -> None:
    async def refuse(_: int) -> Answer:
        return 503, "the queue is full"

    async with serving(refuse) as server:
        with pytest.raises(LoadError, match="a sample failed alone, so responses cannot be checked: the queue"):
            await run_load(workload(tenant(count=1)), http_url=server.http_url, inputs=INPUTS, check=True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_a_stalled_server_does_not_slow_the_sending(protocol: str) -> None:
    """Closed-loop sending would deadlock here: no answer comes before the last query has been sent."""
    count = 200
    async with serving(Gate(count)) as server:
        result = await run_load(
            workload(tenant(count=count, protocol=protocol)),
            http_url=server.http_url,
            grpc_url=server.grpc_url,
            inputs=INPUTS,
        )
    assert counts(result, "m") == {"answered": count}
    assert not result.stopped_early


@in_loop
async def test_latency_counts_from_the_scheduled_time() -> None:
    """All answers come after the last query was sent: the k-th waited at least as long as the schedule says."""
    over_ns = 80 * MS
    async with serving(Gate(8)) as server:
        result = await run_load(workload(tenant(count=8, over_ns=over_ns)), http_url=server.http_url, inputs=INPUTS)
    last_ns = 7 * over_ns // 8
    for record in result.records:
        assert record.latency_ns >= last_ns - record.scheduled_ns
    assert sorted(record.scheduled_ns for record in result.records) == [i * over_ns // 8 for i in range(8)]


@in_loop
async def test_an_answer_after_the_slo_is_late() -> None:
    async with serving(Gate(4)) as server:
        result = await run_load(
            workload(tenant(count=4, over_ns=80 * MS, slo_ns=30 * MS)), http_url=server.http_url, inputs=INPUTS
        )
    # Gate opens at 60 ms: queries due at 0 and 20 ms are certainly late.
    assert counts(result, "m")["late"] >= 2
    assert result.summary.total.offered == 4


@in_loop
async def test_schedule_is_that_of_the_workload_for_every_tenant() -> None:
    load = workload(tenant("m", process=Uniform(100.0)), tenant("n", process=Uniform(150.0), protocol="grpc"), seed=5)
    async with serving(ok) as server:
        result = await run_load(load, http_url=server.http_url, grpc_url=server.grpc_url, inputs=INPUTS)
    wanted = sorted((load.tenants[a.tenant].name, a.time_ns) for a in arrivals(load))
    assert sorted((r.tenant, r.scheduled_ns) for r in result.records) == wanted
    assert result.summary.total.answered == len(wanted)


@in_loop
async def test_warm_up_is_sent_but_not_counted() -> None:
    async with serving(ok) as server:
        result = await run_load(
            workload(tenant(count=10, over_ns=100 * MS), warmup_ns=50 * MS), http_url=server.http_url, inputs=INPUTS
        )
    assert len(result.log) == 10
    assert result.summary.total.offered == 5
    assert result.summary.total.span_ns == 50 * MS


@in_loop
async def test_stop_ends_sending_and_keeps_what_was_measured() -> None:
    stop = asyncio.Event()

    async def answer(number: int) -> Answer:
        if number == 4:
            stop.set()
        return 200, ""

    async with serving(answer) as server:
        result = await run_load(
            workload(tenant(process=Trace((0, 0, 0, 0, 0, 500 * S))), duration_ns=600 * S),
            http_url=server.http_url,
            inputs=INPUTS,
            stop=stop,
        )
    assert result.stopped_early
    assert result.summary.total.answered == 5
    assert any("stopped after" in warning for warning in result.warnings)


@in_loop
async def test_slo_samples_and_shape_come_from_the_server() -> None:
    config = {
        "max_batch_size": 8,
        "parameters": {
            "slo_ms": {"string_value": "250.5"},
            "shapes": {"string_value": '[{"x": [1, 3]}, {"x": [1, 7]}]'},
        },
    }
    async with serving(ok, config) as server:
        result = await run_load(workload(tenant(count=1, slo_ns=None, items=4, shape=1)), http_url=server.http_url)
    assert result.tenants[0].slo_ns == 250_500_000
    head, buffers = split_body(server.bodies[0], server.headers[0])
    assert head["inputs"][0]["shape"] == [4, 7]
    assert len(buffers) == 4 * 7 * 4


@in_loop
async def test_slo_and_samples_come_over_grpc_alone_too() -> None:
    async with serving(ok, SLO_CONFIG) as server:
        result = await run_load(workload(tenant(count=1, slo_ns=None, protocol="grpc")), grpc_url=server.grpc_url)
    assert result.tenants[0].slo_ns == 60 * S
    message = MESSAGES["ModelInferRequest"].FromString(server.bodies[0])
    assert list(message.inputs[0].shape) == [1, 3]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slo_ns": None}, "set slo_ms in the workload"),
        ({"items": 2, "model": "x", "name": "x"}, "takes at most 1 rows"),
        ({"shape": 3, "model": "x", "name": "x"}, "declares 0 shapes"),
        ({"protocol": "grpc"}, "no gRPC address"),
    ],
)
@in_loop
async def test_what_cannot_be_sent_is_said(change: dict[str, Any], text: str) -> None:
    async with serving(ok) as server:
        with pytest.raises(LoadError, match=text):
            await run_load(workload(tenant(**change)), http_url=server.http_url, inputs=INPUTS)


@in_loop
async def test_no_server_is_said_before_anything_is_sent() -> None:
    with pytest.raises(LoadError, match="cotenant serve"):
        await run_load(workload(), http_url="http://127.0.0.1:9", inputs=None)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_a_refused_connection_is_a_failure_not_a_rejection(protocol: str) -> None:
    result = await run_load(
        workload(tenant(count=2, protocol=protocol)),
        http_url="http://127.0.0.1:9",
        grpc_url="127.0.0.1:9",
        inputs=INPUTS,
    )
    assert counts(result, "m") == {"failed": 2}


@in_loop
async def test_a_grpc_server_that_is_lost_under_queries_has_failed_them() -> None:
    """The gRPC library says UNAVAILABLE of that too; nothing but the connection tells it from a server that is full."""
    cut: set[asyncio.StreamWriter] = set()

    async def never(number: int) -> Answer:
        if number == 5:
            for writer in cut:
                writer.transport.abort()
        await asyncio.Event().wait()
        return 200, ""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async with serving(never) as server:
        host, _, port = server.grpc_url.partition(":")

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            proxy.close()  # nobody gets in after the first
            there, back = await asyncio.open_connection(host, int(port))
            cut.update((writer, back))
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer), return_exceptions=True)

        proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
        address = "{}:{}".format(*proxy.sockets[0].getsockname())
        result = await run_load(workload(tenant(count=6, protocol="grpc")), grpc_url=address, inputs=INPUTS)
    assert counts(result, "m") == {"failed": 6}


@in_loop
async def test_ticks_show_the_run_so_far() -> None:
    seen: list[LiveStats] = []
    async with serving(ok) as server:
        await run_load(
            workload(tenant(count=6)), http_url=server.http_url, inputs=INPUTS, on_tick=seen.append, tick_s=0.02
        )
    last = seen[-1]
    assert not last.sending
    assert (last.tenants[0].sent, last.tenants[0].in_flight) == (6, 0)
    assert last.tenants[0].counts[Outcome.ANSWERED] == 6
    assert [stats.elapsed_ns for stats in seen] == sorted(stats.elapsed_ns for stats in seen)


@in_loop
async def test_result_survives_json(tmp_path: Any) -> None:
    async with serving(ok) as server:
        result = await run_load(workload(), http_url=server.http_url, inputs=INPUTS)
    file = tmp_path / "run.json"
    result.save(file)
    again = LoadResult.load(file)
    assert again.to_json() == result.to_json()
    assert again.summary == result.summary


@in_loop
async def test_process_of_its_own_gives_the_same_result() -> None:
    seen: list[LiveStats] = []
    async with serving(ok) as server:
        result = await asyncio.to_thread(
            run_load_process,
            workload(tenant(count=5)),
            http_url=server.http_url,
            inputs=INPUTS,
            on_tick=seen.append,
        )
    assert result.summary.total.answered == 5
    assert seen[-1].tenants[0].sent == 5


@in_loop
async def test_process_of_its_own_reports_errors() -> None:
    with pytest.raises(LoadError, match="cotenant serve"):
        await asyncio.to_thread(run_load_process, workload(), http_url="http://127.0.0.1:9")


def test_http_request_is_what_the_protocol_says() -> None:
    words = np.array([b"a", b"bcd"], object)
    body, headers = http_request({"x": SAMPLE["x"], "w": words}, {"timeout": 5000, "priority": 2})
    head, buffers = split_body(body, headers)
    assert head["parameters"] == {"binary_data_output": True, "timeout": 5000, "priority": 2}
    assert [(i["name"], i["datatype"], i["shape"]) for i in head["inputs"]] == [
        ("x", "FP32", [2, 3]),
        ("w", "BYTES", [2]),
    ]
    assert [i["parameters"]["binary_data_size"] for i in head["inputs"]] == [24, 12]
    assert buffers == SAMPLE["x"].tobytes() + b"\x01\0\0\0a\x03\0\0\0bcd"


def test_grpc_request_reads_back_with_a_client_library() -> None:
    client = pytest.importorskip("tritonclient.grpc")
    message = client.service_pb2.ModelInferRequest.FromString(grpc_request("m", SAMPLE, {"timeout": 5000}))
    assert message.model_name == "m"
    assert message.parameters["timeout"].int64_param == 5000
    assert (message.inputs[0].datatype, list(message.inputs[0].shape)) == ("FP32", [2, 3])
    assert message.raw_input_contents[0] == SAMPLE["x"].tobytes()


def test_a_dtype_without_a_name_on_the_wire_is_refused() -> None:
    with pytest.raises(ClientError, match="complex64"):
        http_request({"z": np.zeros(1, np.complex64)}, {})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_real_front_ends_take_the_requests(protocol: str) -> None:
    backend = FakeBackend()

    async def scenario(http_url: str, grpc_url: str) -> LoadResult:
        load = workload(tenant("tiny", count=6, protocol=protocol, items=4), tenant("fail", count=3, protocol=protocol))
        return await run_load(load, http_url=http_url, grpc_url=grpc_url)

    try:
        with front_ends(backend) as ports:
            result = asyncio.run(scenario(f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"))
    finally:
        backend.close()
    assert counts(result, "tiny") == {"answered": 6}
    assert counts(result, "fail") == {"failed": 3}


def test_waiting_for_orders_leaves_the_pipe_for_results_blocking() -> None:
    """A loop makes descriptors that it waits for non-blocking; a large result needs a blocking one."""
    news, teller = multiprocessing.Pipe(duplex=False)
    orders, commander = multiprocessing.Pipe(duplex=False)
    backend = FakeBackend()
    try:
        with front_ends(backend) as ports:
            arguments = {"http_url": f"http://127.0.0.1:{ports.http}"}
            result = uvloop.run(_serve(teller, orders, workload(tenant("tiny", count=2)), arguments, True))
        assert result.summary.total.answered == 2
        assert os.get_blocking(teller.fileno())
    finally:
        backend.close()
        for pipe in (news, teller, orders, commander):
            pipe.close()


def test_ctrl_c_stops_the_process_and_keeps_what_was_measured() -> None:
    """The first tick with an answer raises KeyboardInterrupt in the parent, as Ctrl-C does."""
    pressed = []

    def press(stats: LiveStats) -> None:
        if not pressed and stats.tenants[0].counts[Outcome.ANSWERED]:
            pressed.append(stats)
            raise KeyboardInterrupt

    backend = FakeBackend()
    try:
        with front_ends(backend) as ports:
            result = run_load_process(
                workload(tenant("tiny", process=Trace((0, 0, 500 * S))), duration_ns=600 * S),
                http_url=f"http://127.0.0.1:{ports.http}",
                on_tick=press,
                tick_s=0.05,
            )
    finally:
        backend.close()
    assert pressed
    assert result.stopped_early
    assert counts(result, "tiny") == {"answered": 2}


def test_doubtful_figures_are_warned_of() -> None:
    info = TenantInfo("m", "m", "http", S, 1.0, reasons={"rejected": {"full": 9}, "failed": {"OSError: gone": 2}})
    log = OutcomeLog.of([QueryRecord("m", 0, 1, Outcome.FAILED)])
    result = LoadResult((info,), log, 2 * S, 0, S, 0, "", Lag(0, 7 * MS, 9 * MS))
    lag, failed, early = result.warnings
    assert "7.0 ms" in lag
    assert "OSError: gone" in failed
    assert "1.0 s of 2.0 s" in early
