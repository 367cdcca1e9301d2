"""The gateway in front of nodes that do as a test tells them: where queries go, when they are sent again, and how they
end; and real clients of the protocol through it.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from cotenant.cluster import links
from cotenant.cluster.forward import BrokenError, Forwarder, NotRunError
from cotenant.cluster.gateway import Gateway, metrics_page
from cotenant.cluster.gateway_grpc import GrpcGateway
from cotenant.cluster.links import GrpcReply
from cotenant.cluster.types import Address, ClusterError, Counts, Route, RoutingTable
from cotenant.load.http import HttpPool
from cotenant.types import ANSWERS, Cause, Outcome
from cotenant.wire.api import ServeError
from cotenant.wire.codec import Limits
from cotenant.wire.ending import FAILURE, Ending, read_ending
from cotenant.wire.oip import MESSAGES, SERVICE, SPENT_KEY
from load_fakes import Answer, FakeServer, in_loop, ok, serving

SLO_NS = 1_000_000_000
UNAVAILABLE = 14
"""Of gRPC."""
A, B = Address("a", 1, 1), Address("b", 2, 2)


def table(version: int = 1, slo_ns: int = SLO_NS, **shares: float) -> RoutingTable:
    addresses = {"a": A, "b": B}
    return RoutingTable(
        version, (Route("t", "m", slo_ns, tuple(shares.items())),), {node: addresses[node] for node in shares}
    )


class InferReply:
    def __init__(self, ending: Ending = Ending(Outcome.ANSWERED), text: str = "") -> None:
        self.ending = ending
        self.text = text


class FakeLink:
    """What queries sent to a node meet, in turn; the last one stays."""

    def __init__(self, *script: Exception | InferReply) -> None:
        self.script = list(script)
        self.sent = 0
        self.closed = asyncio.Event()

    async def send(self) -> InferReply:
        self.sent += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step

    async def close(self) -> None:
        self.closed.set()


class Rig:
    """A forwarder over fake links, with a clock that a test moves."""

    def __init__(self, **links: FakeLink) -> None:
        self.links = links
        self.now_ns = 0
        self.forwarder = Forwarder(lambda node, _: self.links[node], lambda: self.now_ns)

    async def infer(self) -> InferReply:
        return await self.forwarder.infer("m", lambda link, _: link.send())

    @property
    def counts(self) -> Counts:
        return self.forwarder.report().counts["t"]


def gone() -> NotRunError:
    return NotRunError("refused", gone=True)


@in_loop
async def test_a_query_that_has_not_run_goes_to_another_node() -> None:
    rig = Rig(a=FakeLink(gone()), b=FakeLink(InferReply()))
    rig.forwarder.set_table(table(a=1.0, b=1.0))
    for _ in range(4):
        assert (await rig.infer()).ending.outcome is Outcome.ANSWERED
    assert rig.links["a"].sent == 1  # passed over for a while
    assert rig.forwarder.report().suspects == ("a",)
    assert rig.forwarder.report().suspects == ()
    assert rig.counts == Counts(offered=4, in_time=4, retried=1)
    rig.now_ns += 600_000_000
    for _ in range(2):
        await rig.infer()
    assert rig.links["a"].sent == 2


@in_loop
async def test_a_broken_connection_is_tried_once_more_within_the_slo() -> None:
    rig = Rig(a=FakeLink(BrokenError("reset")), b=FakeLink(InferReply()))
    rig.forwarder.set_table(table(a=9.0, b=1.0))
    assert (await rig.infer()).ending.outcome is Outcome.ANSWERED
    assert rig.counts == Counts(offered=1, in_time=1, retried=1, repeated=1)


@in_loop
async def test_twice_broken_is_a_failure() -> None:
    rig = Rig(a=FakeLink(BrokenError("reset")), b=FakeLink(BrokenError("reset")))
    rig.forwarder.set_table(table(a=1.0, b=1.0))
    with pytest.raises(ServeError, match="the node was lost while the query ran"):
        await rig.infer()
    assert rig.counts == Counts(offered=1, failed=1, retried=1, repeated=1)


@in_loop
async def test_what_broke_after_the_slo_is_not_run_again() -> None:
    rig = Rig(a=FakeLink(BrokenError("reset")), b=FakeLink(InferReply()))
    rig.forwarder.set_table(table(slo_ns=5, a=9.0, b=1.0))

    async def slow(link: FakeLink, _: int) -> InferReply:
        rig.now_ns += 6
        return await link.send()

    with pytest.raises(ServeError, match="the node was lost"):
        await rig.forwarder.infer("m", slow)
    assert rig.links["b"].sent == 0
    rig.forwarder.set_table(table(2, slo_ns=5, b=1.0))
    assert (await rig.forwarder.infer("m", slow)).ending.outcome is Outcome.ANSWERED
    assert rig.counts == Counts(offered=2, late=1, failed=1)


@in_loop
async def test_without_a_node_a_query_is_rejected_and_an_unknown_model_is_not_found() -> None:
    rig = Rig(a=FakeLink(gone()))
    rig.forwarder.set_table(table(a=1.0))
    with pytest.raises(ServeError, match=r"no node serves model 'm' now \(refused\)"):
        await rig.infer()
    rig.forwarder.set_table(RoutingTable(2, (Route("t", "m", SLO_NS, ()),), {}))
    with pytest.raises(ServeError, match=r"no node serves model 'm' now$"):
        await rig.infer()
    with pytest.raises(ServeError, match="'other' is not in the plan"):
        await rig.forwarder.infer("other", lambda link, _: link.send())
    assert rig.counts == Counts(offered=2, refused=2)


@in_loop
async def test_what_every_node_says_is_passed_on() -> None:
    said = InferReply(Ending(Outcome.FAILED, Cause.UNSERVED), "no such version")
    rig = Rig(a=FakeLink(NotRunError("404", gone=False, reply=said)))
    rig.forwarder.set_table(table(a=1.0))
    assert await rig.infer() is said
    assert rig.counts == Counts(offered=1, failed=1)


@in_loop
async def test_a_withdrawn_query_is_counted_as_that() -> None:
    rig = Rig(a=FakeLink(InferReply()))
    rig.forwarder.set_table(table(a=1.0))
    started = asyncio.Event()

    async def never(link: FakeLink, _: int) -> InferReply:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(rig.forwarder.infer("m", never))
    await started.wait()
    assert rig.forwarder.report().outstanding == {("a", "m"): 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.counts == Counts(offered=1, cancelled=1)
    assert rig.forwarder.report().outstanding == {}


@in_loop
async def test_a_node_that_leaves_answers_what_it_has_and_a_lost_one_is_cut() -> None:
    rig = Rig(a=FakeLink(InferReply()), b=FakeLink(InferReply()))
    rig.forwarder.set_table(table(a=1.0, b=1.0))
    go, started = asyncio.Event(), asyncio.Event()

    async def wait(link: FakeLink, _: int) -> InferReply:
        started.set()
        await go.wait()
        return await link.send()

    task = asyncio.create_task(rig.forwarder.infer("m", wait))
    await started.wait()
    rig.forwarder.set_table(table(2, b=1.0))
    assert not rig.links["a"].closed.is_set()
    rig.forwarder.set_table(table(1, a=1.0))  # older than what is known: ignored
    assert (await rig.infer()).ending.outcome is Outcome.ANSWERED
    assert rig.links["b"].sent == 1
    go.set()
    assert (await task).ending.outcome is Outcome.ANSWERED
    await rig.links["a"].closed.wait()
    rig.forwarder.set_table(table(3, b=1.0).without(("b",)), lost=("b",))
    await rig.links["b"].closed.wait()
    assert rig.forwarder.models == {"m": False}


# --- over the wire ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def gateway_over(
    *answers: Callable[[int], Awaitable[Answer]],
) -> AsyncIterator[tuple[Gateway, Address, list[Any]]]:
    """A gateway before one fake node per answer, all with the same share of model 'm'."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(serving(answer)) for answer in answers]
        gateway = Gateway()
        address = await asyncio.to_thread(gateway.start, "127.0.0.1", 0, 0)
        stack.push_async_callback(asyncio.to_thread, gateway.stop)
        names = [f"n{number}" for number in range(len(fakes))]
        addresses = {name: node_address(fake) for name, fake in zip(names, fakes, strict=True)}
        route = Route("t", "m", 60 * SLO_NS, tuple((name, 1.0) for name in names))
        await asyncio.to_thread(gateway.set_table, RoutingTable(1, (route,), addresses))
        yield gateway, address, fakes


def node_address(fake: FakeServer) -> Address:
    return Address("127.0.0.1", int(fake.http_url.rpartition(":")[2]), int(fake.grpc_url.rpartition(":")[2]))


async def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def post(
    address: Address, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, bytes, Any]:
    def ask() -> tuple[int, bytes, Any]:
        request = urllib.request.Request(f"http://{address.host}:{address.http_port}{path}", body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    return await asyncio.to_thread(ask)


@in_loop
async def test_http_bytes_and_headers_pass_and_nodes_take_turns() -> None:
    async with gateway_over(ok, ok) as (gateway, address, fakes):
        tensors = bytes(range(256)) * 300
        body = gzip.compress(tensors)  # the gateway leaves it so; the node unpacks it
        headers = {"Inference-Header-Content-Length": "7", "Content-Encoding": "gzip", "Content-Type": "x/y"}
        seen = []
        for _ in range(4):
            status, content, answered = await post(address, "/v2/models/m/infer", body, headers)
            assert status == 200
            assert json.loads(content)["model_name"] == "m"
            seen.append(answered["x-cotenant-node"])
        assert seen == ["n0", "n1"] * 2
        sent = fakes[0].headers[0]
        assert {key: sent[key] for key in headers} == headers
        assert sent["Content-Length"] == str(len(body))
        assert fakes[0].bodies == [tensors] * 2
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=4, in_time=4)


@in_loop
async def test_overload_is_final_but_a_server_that_stops_is_not() -> None:
    async def stopping(number: int) -> Answer:
        return 503, "model 'm': the server is starting or stopping; try again later", UNSERVED

    async def full(number: int) -> Answer:
        return 503, "the queue of 't' is full (256 waiting)", Ending(Outcome.REJECTED)

    async with gateway_over(stopping, full) as (gateway, address, fakes):
        for _ in range(2):
            status, content, _ = await post(address, "/v2/models/m/infer", b"{}")
            assert (status, json.loads(content)["error"]) == (503, "the queue of 't' is full (256 waiting)")
        assert [len(fake.bodies) for fake in fakes] == [1, 2]
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=2, refused=2, retried=1)


@in_loop
async def test_a_lost_node_breaks_what_it_has_and_the_other_one_answers() -> None:
    started, end = asyncio.Event(), asyncio.Event()

    async def never(number: int) -> Answer:
        started.set()
        await end.wait()
        return 500, "too late"

    async with gateway_over(never, ok) as (gateway, address, fakes):
        over_http = asyncio.create_task(post(address, "/v2/models/m/infer", b"{}"))
        await started.wait()
        route = Route("t", "m", 60 * SLO_NS, (("n1", 1.0),))
        await asyncio.to_thread(gateway.set_table, RoutingTable(2, (route,), {"n1": node_address(fakes[1])}), ("n0",))
        status, _, answered = await over_http
        assert (status, answered["x-cotenant-node"]) == (200, "n1")
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=1, in_time=1, retried=1, repeated=1)
        end.set()


@in_loop
async def test_grpc_passes_bytes_and_breaks_as_http_does() -> None:
    started, end = asyncio.Event(), asyncio.Event()

    async def never(number: int) -> Answer:
        started.set()
        await end.wait()
        return 500, "too late"

    message = MESSAGES["ModelInferRequest"](model_name="m", id="9").SerializeToString()
    async with gateway_over(never, ok) as (gateway, address, fakes):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            first = infer(message, timeout=30)
            await started.wait()
            route = Route("t", "m", 60 * SLO_NS, (("n1", 1.0),))
            await asyncio.to_thread(
                gateway.set_table, RoutingTable(2, (route,), {"n1": node_address(fakes[1])}), ("n0",)
            )
            answer = MESSAGES["ModelInferResponse"].FromString(await first)
            assert answer.model_name == "m"
            assert dict(await first.trailing_metadata())["x-cotenant-node"] == "n1"
            assert fakes[1].bodies == [message]
            for data, code in ((b"\x0a", grpc.StatusCode.INVALID_ARGUMENT), (b"\x0a\x01x", grpc.StatusCode.NOT_FOUND)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await infer(data)
                assert refused.value.code() is code
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=1, in_time=1, retried=1, repeated=1)
        end.set()


def asked(protocol: str, address: Address, timeout_s: float | None = 30) -> Any:
    """A query of model 'm' as (status, sentence); status 200 or OK for an answer."""

    async def over_grpc() -> tuple[Any, str]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            try:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\x0a\x01m", timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

    async def over_http() -> tuple[Any, str]:
        status, content, _ = await post(address, "/v2/models/m/infer", b"{}")
        return status, json.loads(content).get("error", "")

    return over_grpc() if protocol == "grpc" else over_http()


UNSERVED = Ending(Outcome.REJECTED, Cause.UNSERVED)
WORDS = ("", "model 'm': the server is shutting down", "tenant 'm' is not served", "failed to connect to all")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_a_query_has_not_run_only_where_the_node_says_so(protocol: str) -> None:
    """Whatever the words: without the mark nobody knows, and what may have run is not run as if it had not."""
    said: list[Answer] = []

    async def says(number: int) -> Answer:
        return said[0]

    async with gateway_over(says, says, says, says) as (gateway, address, fakes):

        async def sent(answer: Answer) -> tuple[Any, Counts]:
            said[:] = [answer]
            before = sum(len(fake.bodies) for fake in fakes)
            counts = (await asyncio.to_thread(gateway.report)).counts["t"]
            await asked(protocol, address)
            after = (await asyncio.to_thread(gateway.report)).counts["t"]
            assert after.offered - counts.offered == 1
            assert after.ended - counts.ended == 1
            assert sum(len(fake.bodies) for fake in fakes) - before == after.retried - counts.retried + 1
            return after.retried - counts.retried, after.repeated - counts.repeated

        code = 503 if protocol == "http" else UNAVAILABLE
        for words in WORDS:
            for outcome in set(Outcome) - set(ANSWERS):
                assert await sent((code, words, Ending(outcome))) == (0, 0)
            assert await sent((code, words, UNSERVED)) == (3, 0)
            # over gRPC an UNAVAILABLE of nobody's is a connection that broke: once more, and that is counted
            assert await sent((code, words)) == ((0, 0) if protocol == "http" else (1, 1))


async def told(protocol: str, address: Address, model: str = "m") -> Ending | None:
    """How a query ended that has no answer, as its client is told."""
    if protocol == "http":
        status, _, headers = await post(address, f"/v2/models/{model}/infer", b"{}")
        assert status >= 400
        return read_ending({key.lower(): value for key, value in headers.items()})
    message = MESSAGES["ModelInferRequest"](model_name=model).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message, timeout=30)
        return read_ending({key: str(value) for key, value in refused.value.trailing_metadata() or ()})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_the_client_is_told_how_its_query_ended_by_the_node_or_else_by_the_gateway(protocol: str) -> None:
    endings = [Ending(outcome, cause) for outcome in Outcome for cause in (None, *Cause) if outcome not in ANSWERS]
    said: list[Ending] = []

    async def says(number: int) -> Answer:
        return 503 if protocol == "http" else UNAVAILABLE, "no", said[0]

    async with gateway_over(says) as (gateway, address, _):
        for ending in endings:
            said[:] = [ending]
            assert await told(protocol, address) == ending
        assert await told(protocol, address, "unknown") == Ending(Outcome.FAILED, Cause.UNSERVED)
        dead = {"n0": Address("127.0.0.1", await closed_port(), await closed_port())}
        route = Route("t", "m", 60 * SLO_NS, (("n0", 1.0),))
        await asyncio.to_thread(gateway.set_table, RoutingTable(2, (route,), dead))
        assert await told(protocol, address) == UNSERVED
        breaks = FakeLink(BrokenError("reset"))
        breaks.http = breaks.grpc = lambda *_: breaks.send()  # type: ignore[attr-defined]
        gateway._forwarder._links["n0"] = Address("", 0, 0), breaks
        gateway._forwarder._paused.clear()
        assert await told(protocol, address) == FAILURE  # it may have run
        gateway._forwarder._links["n0"] = Address("", 0, 0), None
        assert await told(protocol, address) == FAILURE  # a fault of the gateway
        gateway._forwarder._links["n0"] = Address("", 0, 0), breaks


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_a_query_that_is_sent_again_keeps_its_time_out(protocol: str) -> None:
    went = asyncio.Event()

    async def late(number: int) -> Answer:
        await went.wait()
        return 503 if protocol == "http" else UNAVAILABLE, "no", UNSERVED

    async with gateway_over(late, ok) as (gateway, address, fakes):
        now_ns = [0]
        gateway._forwarder._now_ns = lambda: now_ns[0]
        query = asyncio.create_task(asked(protocol, address))
        while not fakes[0].bodies:
            await asyncio.sleep(0)
        now_ns[0] = 7_000_000
        went.set()
        assert (await query)[0] in (200, grpc.StatusCode.OK)
        spent = [{key.lower(): value for key, value in fake.headers[0].items()}.get(SPENT_KEY) for fake in fakes]
        assert spent == [None, "7000"]


@in_loop
async def test_a_node_that_does_not_speak_has_not_run_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_CONNECT_LIMIT_S", 0.05)
    mute = await asyncio.start_server(lambda *_: asyncio.sleep(0), "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    async with gateway_over(ok) as (gateway, address, fakes):
        route = Route("t", "m", 60 * SLO_NS, (("mute", 1.0), ("n0", 1.0)))
        nodes = {"mute": Address("127.0.0.1", port, port), "n0": node_address(fakes[0])}
        await asyncio.to_thread(gateway.set_table, RoutingTable(2, (route,), nodes))
        assert await asked("grpc", address) == (grpc.StatusCode.OK, "")
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=1, in_time=1, retried=1)
        # and one that is lost while it is connected to
        monkeypatch.setattr(links, "_CONNECT_LIMIT_S", 60.0)
        await asyncio.to_thread(gateway.set_table, RoutingTable(3, (Route("t", "m", 60 * SLO_NS, ()),), {}))
        only = Route("t", "m", 60 * SLO_NS, (("mute", 1.0),))
        await asyncio.to_thread(gateway.set_table, RoutingTable(4, (only,), {"mute": nodes["mute"]}))
        query = asyncio.create_task(asked("grpc", address))
        while not (await asyncio.to_thread(gateway.report)).outstanding:
            await asyncio.sleep(0)
        await asyncio.to_thread(gateway.set_table, RoutingTable(5, (Route("t", "m", 60 * SLO_NS, ()),), {}), ("mute",))
        status, sentence = await query
        assert status is grpc.StatusCode.UNAVAILABLE, sentence
    mute.close()


@in_loop
async def test_grpc_connections_that_are_refused_go_elsewhere_and_refusals_are_passed_on() -> None:
    async def full(number: int) -> Answer:
        return UNAVAILABLE, "the queue of 't' is full (256 waiting)", Ending(Outcome.REJECTED)

    async with gateway_over(full) as (gateway, address, fakes):
        dead = Address("127.0.0.1", await closed_port(), await closed_port())
        route = Route("t", "m", 60 * SLO_NS, (("dead", 1.0), ("n0", 1.0)))
        await asyncio.to_thread(
            gateway.set_table, RoutingTable(2, (route,), {"dead": dead, "n0": node_address(fakes[0])})
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\x0a\x01m", timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.value.details() == "the queue of 't' is full (256 waiting)"
        report = await asyncio.to_thread(gateway.report)
        assert report.suspects == ("dead",)
        assert report.counts["t"] == Counts(offered=1, refused=1, retried=1)


@in_loop
async def test_a_stream_is_many_queries() -> None:
    async def odd(number: int) -> Answer:
        return (13, "the model raised", FAILURE) if number % 2 else (200, "")

    async with gateway_over(odd) as (gateway, address, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
            requests = [MESSAGES["ModelInferRequest"](model_name="m", id=str(at)) for at in range(6)]
            requests.append(MESSAGES["ModelInferRequest"](model_name="unknown", id="x"))
            answers = [
                MESSAGES["ModelStreamInferResponse"].FromString(data)
                async for data in call(iter([each.SerializeToString() for each in requests]))
            ]
        assert sorted(a.error_message for a in answers) == [
            *[""] * 3,
            "model 'unknown' is not in the plan of this cluster",
            *["the model raised"] * 3,
        ]
        for answer in answers:
            parameters = answer.infer_response.parameters
            told = read_ending({key: value.string_param for key, value in parameters.items()})
            unknown = Ending(Outcome.FAILED, Cause.UNSERVED)
            assert told == (unknown if answer.infer_response.id == "x" else FAILURE if answer.error_message else None)
        assert {a.infer_response.id for a in answers if a.error_message} >= {"x"}
        report = await asyncio.to_thread(gateway.report)
        assert report.counts["t"] == Counts(offered=6, in_time=3, failed=3)


class BytesLink:
    """A node that answers every query with so many bytes."""

    def __init__(self, size: int = 0) -> None:
        self.reply = GrpcReply(bytes(size), grpc.StatusCode.OK, "", (), Ending(Outcome.ANSWERED), "n")
        self.sent = 0

    async def grpc(self, method: str, data: bytes, timeout_s: float | None, spent_ns: int) -> GrpcReply:
        self.sent += 1
        await asyncio.sleep(0)
        return self.reply

    async def close(self) -> None:
        pass


class EndedCall:
    """The context of a call; once it has `ended`, no status can be sent any more."""

    def __init__(self, *, ended: bool = False) -> None:
        self.ended = ended
        self.aborts: list[Any] = []

    def time_remaining(self) -> float | None:
        return -0.01 if self.ended else None

    def set_trailing_metadata(self, trailing: Any) -> None:
        pass

    async def abort(self, code: Any, details: str, trailing: Any) -> None:
        self.aborts.append(code)
        if len(self.aborts) > 1:
            raise grpc.aio.UsageError("Abort already called!")
        if self.ended:
            raise RuntimeError("execute_batch failed")
        raise grpc.aio.AbortError


async def settle() -> None:
    """Let everything on this loop go as far as it gets."""
    for _ in range(1000):
        await asyncio.sleep(0)


@in_loop
async def test_a_client_that_does_not_read_its_stream_holds_back_that_stream_alone() -> None:
    limit = 5
    link = BytesLink(1000)
    forwarder = Forwarder(lambda node, _: link)
    forwarder.set_table(table(a=1.0))
    front = GrpcGateway(forwarder, {}, Limits(max_stream_in_flight=limit))  # type: ignore[arg-type]
    taken = 0

    async def requests() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield b"\x0a\x01m"

    slow = front._stream(requests(), EndedCall())
    await anext(slow)
    await settle()
    assert link.sent == limit  # the one that is being written holds its place
    assert taken == limit + 1
    async for _ in front._stream(requests(), EndedCall()):
        pass
    assert link.sent == limit + 50
    assert len([answer async for answer in slow]) == 49
    assert link.sent == 100


CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)


@pytest.mark.parametrize("code", CODES)
@in_loop
async def test_a_call_that_has_ended_meanwhile_is_no_fault(code: Any, caplog: pytest.LogCaptureFixture) -> None:
    link = BytesLink()
    link.reply = GrpcReply(b"", code, "no", (), FAILURE, "n")
    forwarder = Forwarder(lambda node, _: link)
    forwarder.set_table(table(a=1.0))
    front = GrpcGateway(forwarder, {}, Limits())  # type: ignore[arg-type]
    call = EndedCall(ended=True)
    for method in (front._infer, functools.partial(front._ask, "ModelMetadata")):
        call.aborts.clear()
        assert await front._guarded(method)(b"\x0a\x01m", call) == b""  # which nobody gets: grpc knows of the abort
        assert call.aborts == [code]
    assert not caplog.records


@in_loop
async def test_deadlines_that_pass_are_withdrawn_queries(caplog: pytest.LogCaptureFixture) -> None:
    end = asyncio.Event()

    async def never(number: int) -> Answer:
        await end.wait()
        return 13, "too late"

    limits_s = (0.02, 0.01, 0.005, 0.002)
    async with gateway_over(never, never) as (gateway, address, _):
        for limit_s in limits_s * 5:
            assert (await asked("grpc", address, limit_s))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        while (await asyncio.to_thread(gateway.report)).outstanding:
            await asyncio.sleep(0)
        counts = (await asyncio.to_thread(gateway.report)).counts["t"]
        assert counts == Counts(offered=counts.offered, cancelled=counts.offered)
        end.set()
    assert not [record for record in caplog.records if record.exc_info]


@in_loop
async def test_what_the_gateway_answers_itself() -> None:
    async with gateway_over(ok) as (gateway, address, _):
        pool = HttpPool(f"http://127.0.0.1:{address.http_port}")

        async def get(path: str, method: str = "GET") -> tuple[int, Any]:
            status, content, _ = await pool.request(pool.prepare(method, path), 30)
            return status, content if path == "/metrics" else json.loads(content)

        status, answer = await get("/v2/cotenant/cluster")
        assert (status, "no status of the cluster yet" in answer["error"]) == (503, True)
        await asyncio.to_thread(gateway.set_status, b'{"nodes": 1}')
        assert await get("/v2/cotenant/cluster") == (200, {"nodes": 1})
        assert await get("/v2/health/live") == (200, {"live": True})
        assert await get("/v2/health/ready") == (200, {"ready": True})
        assert (await get("/v2"))[1]["name"] == "cotenant"
        assert (await get("/v2/models/m"))[1]["name"] == "m"
        index = [{"name": "m", "version": "", "state": "READY", "reason": ""}]
        assert await get("/v2/repository/index", "POST") == (200, index)
        assert (await get("/v2/repository/models/m/load", "POST"))[0] == 501
        assert (await get("/v2/models/stats"))[0] == 501
        assert (await get("/v2/models/m/infer"))[0] == 405
        assert (await get("/v2/nothing"))[0] == 404
        assert b'cotenant_gateway_queries_total{outcome="in_time",tenant="t"} 0.0' in (await get("/metrics"))[1]
        await asyncio.to_thread(gateway.set_table, RoutingTable(2, (Route("t", "m", SLO_NS, ()),), {}))
        assert (await get("/v2/health/ready"))[0] == 503
        assert (await get("/v2/models/m"))[0] == 503
        pool.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            ready = await channel.unary_unary(f"/{SERVICE}/ServerReady")(b"")
            assert MESSAGES["ServerReadyResponse"].FromString(ready).ready is False
            found = MESSAGES["RepositoryIndexResponse"].FromString(
                await channel.unary_unary(f"/{SERVICE}/RepositoryIndex")(b"")
            )
            assert [(model.name, model.state) for model in found.models] == [("m", "UNAVAILABLE")]
            with pytest.raises(grpc.aio.AioRpcError, match="the cluster loads the models of its plan"):
                await channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")(b"")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@in_loop
async def test_a_gateway_without_a_table_refuses_and_does_not_say_that_models_are_unknown(protocol: str) -> None:
    async def code(address: Address, method: str, path: str) -> tuple[Any, str]:
        if protocol == "http":
            status, content, _ = await post(address, f"/v2/models/m{path}", b"{}") if path else await get(address)
            return status, json.loads(content)["error"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{address.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{SERVICE}/{method}")(b"\x0a\x01m", timeout=30)
            return refused.value.code(), refused.value.details() or ""

    async def get(address: Address) -> tuple[int, bytes, Any]:
        pool = HttpPool(f"http://127.0.0.1:{address.http_port}")
        status, content, _ = await pool.request(pool.prepare("GET", "/v2/models/m"), 30)
        pool.close()
        return status, content, {}

    empty = RoutingTable(1, (Route("t", "m", SLO_NS, ()),), {})
    for given, sentence in ((None, "has no routing table yet"), (empty, "no node serves model 'm'")):
        gateway = Gateway()
        address = await asyncio.to_thread(gateway.start, "127.0.0.1", 0, 0, given)
        try:
            for method, path in (("ModelInfer", "/infer"), ("ModelMetadata", "")):
                status, said = await code(address, method, path)
                assert status in (503, grpc.StatusCode.UNAVAILABLE)
                assert sentence in said
        finally:
            await asyncio.to_thread(gateway.stop)


@in_loop
async def test_a_body_beyond_the_limit_is_refused() -> None:
    gateway = Gateway(max_body_bytes=1000)
    address = await asyncio.to_thread(gateway.start, "127.0.0.1", 0, 0)
    try:
        await asyncio.to_thread(gateway.set_table, RoutingTable(1, (Route("t", "m", SLO_NS, ()),), {}))
        status, content, _ = await post(address, "/v2/models/m/infer", bytes(2000))
        assert (status, json.loads(content)["error"]) == (413, "the body has more than 1000 bytes, the limit")
    finally:
        await asyncio.to_thread(gateway.stop)
        await asyncio.to_thread(gateway.stop)


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = Gateway()
        with pytest.raises(ClusterError, match=r"gateway, HTTP: cannot listen on 127\.0\.0\.1 port"):
            gateway.start("127.0.0.1", taken.getsockname()[1], 0)
        gateway.stop()
    with pytest.raises(ClusterError, match="is not started"):
        Gateway().report()


def test_the_metrics_page_counts_outcomes() -> None:
    page = metrics_page({"t": Counts(offered=3, in_time=2, refused=1, retried=4, repeated=2)}).decode()
    assert 'cotenant_gateway_offered_total{tenant="t"} 3.0' in page
    assert 'cotenant_gateway_repeats_total{tenant="t"} 2.0' in page
    assert 'cotenant_gateway_queries_total{outcome="refused",tenant="t"} 1.0' in page
    assert 'cotenant_gateway_retries_total{tenant="t"} 4.0' in page
