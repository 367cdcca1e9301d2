"""What a server says of queries before they come, and how it counts those that never did."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from client import WAIT_S, Client, Watch, assert_balanced, sample, started
from cotenant.config import PolicySection
from cotenant.core.events import QueryRefused, TenantResumed, TenantSuspended
from cotenant.core.snapshot import DropRule
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.server import Server
from cotenant.types import LossCause, Outcome
from cotenant.wire.api import ServeError, Status
from cotenant.wire.encode import grpc_request
from cotenant.wire.ending import Ending
from repositories import config, scaled, write_model

X = {"x": np.ones((1, 8), np.float32)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_model(tmp_path, "narrow", config(more="max_queue = 2"), {1: lambda: scaled(2.0)})
    write_model(tmp_path, "rare", config(more="max_rate = 0.001"), {1: lambda: scaled(2.0)})
    made = started(tmp_path, policy=PolicySection("fcfs", {"drop": DropRule.NONE}))
    yield made
    made.stop()


def test_a_full_queue_is_told_before_a_query_and_counted_as_one(server: Server) -> None:
    client = Client(server)
    assert server.refusal("narrow", "") is server.refusal("narrow", "1") is None
    server.driver.post(TenantSuspended("narrow", "for the test"))
    numbers = [client.submit("narrow", X) for _ in range(2)]
    error = server.refusal("narrow", "")
    assert error is not None
    assert (error.status, error.message) == (Status.UNAVAILABLE, "the queue of 'narrow' is full (2 waiting)")
    assert error.is_for_load
    before = server.counters.by_tenant["narrow"].arrived
    server.refused("narrow", 0, error)
    assert server.counters.by_tenant["narrow"].arrived == before + 1
    assert sample(server.metrics().decode(), "cotenant_queries_total", tenant="narrow", outcome="rejected") == 1
    assert sum(server.losses.lost["narrow"].values()) == 1
    server.driver.post(TenantResumed("narrow"))
    assert [each.outcome for each in client.wait(*numbers)] == [Outcome.ANSWERED] * 2
    assert server.refusal("narrow", "") is None
    assert_balanced(server)


@pytest.mark.parametrize(
    ("model", "version", "status", "says"),
    [
        ("nowhere", "", Status.NOT_FOUND, "is unknown"),
        ("narrow", "7", Status.NOT_FOUND, "has no version '7'"),
        ("rare", "", Status.UNAVAILABLE, "is not served: it was unloaded"),
    ],
)
def test_what_is_not_served_is_told(server: Server, model: str, version: str, status: Status, says: str) -> None:
    server.unload("rare")
    error = server.refusal(model, version)
    assert error is not None
    assert error.status is status
    assert says in error.message
    assert error.cause is LossCause.GONE


def test_a_server_that_ends_says_so(server: Server) -> None:
    server.driver.post(TenantSuspended("narrow", "for the test"))
    assert server.refusal("narrow", "") is None  # its worker may come back
    server.stop()
    error = server.refusal("narrow", "")
    assert error is not None
    assert error.status is Status.UNAVAILABLE


def test_beyond_its_rate_a_tenant_is_answered_429_over_http_and_resource_exhausted_over_grpc(server: Server) -> None:
    web, rpc = HttpServer(server, port=0), GrpcServer(server, port=0)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", web.start(), timeout=WAIT_S)
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [0.5] * 8}]})

        def post() -> Any:
            connection.request("POST", "/v2/models/rare/infer", body)
            answer = connection.getresponse()
            return answer, answer.read()

        assert post()[0].status == 200
        answer, text = post()
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert answer.headers["x-cotenant-outcome"] == "rejected"
        assert b"sends more queries a second than its max_rate" in text
        with grpc.insecure_channel(f"127.0.0.1:{rpc.start()}") as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                infer(grpc_request("rare", X, {}), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        server._shut = {}  # as if the table were out of date: the engine judges what it is given
        answer, text = post()
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert server.losses.lost["rare"] == {LossCause.RATE_LIMIT: 3}
        assert sample(server.metrics().decode(), "cotenant_lost_total", tenant="rare", cause="rate_limit") == 3
    finally:
        rpc.stop(0.1)
        web.stop(0.1)


def test_what_no_tenant_can_be_blamed_for_is_not_counted(tmp_path: Path) -> None:
    watch = Watch()
    write_model(tmp_path, "narrow", config(), {1: lambda: scaled(2.0)})
    server = started(tmp_path, watch)
    try:
        error = server.refusal("nowhere", "")
        assert error is not None
        server.refused("nowhere", 5, error)
        server.refused("narrow", 5, ServeError(Status.INVALID_ARGUMENT, "the body is malformed"))
        assert watch.events(QueryRefused) == []
        server.refused(
            "narrow", 5, ServeError(Status.UNAVAILABLE, "no room", Ending(Outcome.REJECTED), LossCause.FRONT_END)
        )
        assert watch.events(QueryRefused) == [QueryRefused("narrow", 5, LossCause.FRONT_END, "no room")]
    finally:
        server.stop()
