"""What a node's front-ends say of queries that they do not answer, as the gateway's links to the node read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cotenant.cluster.forward import NotRunError
from cotenant.cluster.links import GrpcReply, HttpReply, NodeLink
from cotenant.cluster.types import Address
from cotenant.load.clients import model_path
from cotenant.types import Cause, Outcome
from cotenant.wire.api import InferRequest, ServeError, Status
from cotenant.wire.codec import WireRequest, less_spent
from cotenant.wire.encode import grpc_request, http_request
from cotenant.wire.ending import FAILURE, OUTCOME_KEY, Ending, read_ending
from cotenant.wire.oip import MESSAGES, QUERY_KEY, SERVICE
from fake_backend import FakeBackend, serving
from load_fakes import in_loop, split_body

X = {"x": np.ones((1, 4), np.float32)}
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[FakeBackend, Address]]:
    backend = FakeBackend()
    try:
        with serving(backend) as ports:
            yield backend, Address("127.0.0.1", ports.http, ports.grpc)
    finally:
        backend.close()


async def ask(
    protocol: str, address: Address, model: str, *, spent_ns: int = 0, x: Any = X, **parameters: int
) -> tuple[HttpReply | GrpcReply, dict[str, str]]:
    """The node's reply, and its headers or trailing metadata."""
    link = NodeLink("n", address)
    try:
        if protocol == "http":
            body, headers = http_request(x, parameters)
            if model == "nan":
                head, buffers = split_body(body, dict(headers))
                head["parameters"]["binary_data_output"] = False
                text = json.dumps(head).encode()
                body, headers = text + buffers, {**headers, "Inference-Header-Content-Length": str(len(text))}
            path = f"{model_path('identity_fp32' if model == 'nan' else model)}/infer"
            over_http = await link.http("POST", path, list(headers.items()), body, spent_ns)
            return over_http, {name.lower(): value for name, value in over_http.headers}
        data = grpc_request(model, x, parameters)
        over_grpc = await link.grpc(f"/{SERVICE}/ModelInfer", data, 30.0, spent_ns)
        return over_grpc, {key: str(value) for key, value in over_grpc.trailing}
    finally:
        await link.close()


@PROTOCOLS
@pytest.mark.parametrize(
    ("model", "outcome"), [("fail", Outcome.FAILED), ("drop", Outcome.DROPPED), ("reject", Outcome.REJECTED)]
)
@in_loop
async def test_a_query_without_an_answer_carries_its_outcome(
    node: tuple[FakeBackend, Address], protocol: str, model: str, outcome: Outcome
) -> None:
    reply, said = await ask(protocol, node[1], model)
    assert reply.ending == read_ending(said) == Ending(outcome)
    assert said[QUERY_KEY].isdecimal()


@PROTOCOLS
@in_loop
async def test_an_answer_and_a_wrong_request_carry_theirs(node: tuple[FakeBackend, Address], protocol: str) -> None:
    reply, said = await ask(protocol, node[1], "identity_fp32")
    assert reply.ending == Ending(Outcome.ANSWERED)
    if isinstance(reply, HttpReply):
        assert said[OUTCOME_KEY] == "answered"
    else:
        parameters = MESSAGES["ModelInferResponse"].FromString(reply.data).parameters
        assert parameters[OUTCOME_KEY].string_param == "answered"
    reply, said = await ask(protocol, node[1], "identity_fp32", x={"wrong": X["x"]})
    assert reply.ending == read_ending(said) == FAILURE


@in_loop
async def test_an_answer_that_cannot_be_written_has_run(node: tuple[FakeBackend, Address]) -> None:
    reply, said = await ask("http", node[1], "nan", x={"x": np.full((1, 4), np.nan, np.float32)})
    assert isinstance(reply, HttpReply)
    assert reply.status == 400
    assert said[QUERY_KEY].isdecimal()
    assert reply.ending == read_ending(said) == FAILURE


@PROTOCOLS
@in_loop
async def test_a_server_that_takes_no_such_query_says_that_it_has_not_run(
    node: tuple[FakeBackend, Address], protocol: str
) -> None:
    backend, address = node
    with pytest.raises(NotRunError) as unknown:
        await ask(protocol, address, "no_such_model")
    backend.unload("add_sub")
    try:
        with pytest.raises(NotRunError) as unloaded:
            await ask(protocol, address, "add_sub")
    finally:
        backend.load("add_sub")
    backend.accepting = False  # as while it stops
    try:
        with pytest.raises(NotRunError) as stopping:
            await ask(protocol, address, "reject")
        _, said = await ask(protocol, address, "drop")  # this one was inside
        assert read_ending(said) == Ending(Outcome.DROPPED)
    finally:
        backend.accepting = True
    for error, outcome in ((unknown, Outcome.FAILED), (unloaded, Outcome.REJECTED), (stopping, Outcome.REJECTED)):
        assert not error.value.gone
        pairs = error.value.reply.headers if protocol == "http" else error.value.reply.trailing
        told = read_ending({key.lower(): str(value) for key, value in pairs})
        assert error.value.reply.ending == told == Ending(outcome, Cause.UNSERVED)


@PROTOCOLS
@in_loop
async def test_what_has_passed_of_a_time_out_is_taken_off(node: tuple[FakeBackend, Address], protocol: str) -> None:
    backend, address = node
    for spent_ns, left_ns in ((0, 9_000_000_000), (2_000_000_000, 7_000_000_000), (10_000_000_000, 1)):
        await ask(protocol, address, "identity_fp32", spent_ns=spent_ns, timeout=9_000_000)
        assert backend.requests[-1].timeout_ns == left_ns
    await ask("http", address, "identity_fp32", spent_ns=1_000_000)
    assert backend.requests[-1].timeout_ns is None
    await ask("grpc", address, "identity_fp32", spent_ns=29_000_000_000)
    assert 0 < (backend.requests[-1].timeout_ns or 0) < 2_000_000_000  # the deadline of the call


@pytest.mark.parametrize("spent_us", ["", "x", "-5", "1.5", " 3"])
def test_what_is_no_time_takes_nothing_off(spent_us: str) -> None:
    wire = WireRequest(InferRequest("m", {}, timeout_ns=5000))
    assert less_spent(wire, spent_us) is wire


def test_what_says_that_a_server_does_not_take_a_query() -> None:
    unserved = {status for status in Status if ServeError(status, "").ending.cause is Cause.UNSERVED}
    assert unserved == {Status.NOT_FOUND, Status.UNAVAILABLE}
    assert ServeError(Status.UNAVAILABLE, "", FAILURE).ending == FAILURE  # what may have run
