"""Applications over several nodes: real ones before real clients, and nodes that fail at will."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from application_clients import CLIENTS, WAIT_S, check_calls_given_up, check_stream, tensors
from application_samples import (
    APPLICATIONS,
    CHAIN,
    DIAMOND,
    chain,
    diamond,
    softsign,
    write_application,
    write_models,
    x_of,
)
from cotenant.cluster.application_backend import ApplicationBackend
from cotenant.cluster.forward import BrokenError, Forwarder, NotRunError
from cotenant.cluster.gateway import Gateway
from cotenant.cluster.head import models_of, planned_applications, read_spec
from cotenant.cluster.links import GrpcReply, HttpReply
from cotenant.cluster.types import Address, Counts, PlannedApplication, Route, RoutingTable
from cotenant.config import ServerConfig
from cotenant.errors import PlanError
from cotenant.repository.application_spec import read_application
from cotenant.serve.server import Server
from cotenant.techniques.partitions.plan.types import Load
from cotenant.types import Cause, Outcome
from cotenant.wire.api import InferRequest, InferResult, ServeError
from cotenant.wire.codec import decode_raw, encode_raw
from cotenant.wire.ending import Ending
from cotenant.wire.oip import MESSAGES
from fake_backend import CountingBackend, serving
from profile_files import write_profile
from repositories import SLO_MS

SLO_NS = round(SLO_MS * 1e6)
NODES = {"n0": ("twice", "half", "chooser"), "n1": ("thrice", "join", "words")}


# --- real nodes, real clients -----------------------------------------------------------------------------------------


@dataclass
class Served:
    gateway: Gateway
    address: Address
    table: RoutingTable
    nodes: Mapping[str, Server]

    def counts(self, name: str) -> Counts:
        return self.gateway.report().counts[name]


def route(model: str, *nodes: str) -> Route:
    return Route(model, model, SLO_NS, tuple((node, 1.0) for node in nodes))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two servers with half of the models each, and a gateway before them that knows the applications."""
    folder = tmp_path_factory.mktemp("cluster")
    root = write_models(folder / "models")
    for name, text in APPLICATIONS.items():
        write_application(root, name, text)
    write_application(root, "hopeless", CHAIN, slo_ms=0.000001)
    write_application(root, "wrong", CHAIN.replace("first.y", "first.zzz"))
    names = (*APPLICATIONS, "hopeless", "wrong")
    with ExitStack() as stack:
        nodes, addresses = {}, {}
        for node, models in NODES.items():
            server = nodes[node] = Server(write_models(folder / node, *models), ServerConfig())
            server.start()
            stack.callback(server.stop)
            backend = CountingBackend(server)
            ports = stack.enter_context(serving(backend))
            addresses[node] = Address("127.0.0.1", ports.http, ports.grpc)
        gateway = Gateway()
        address = gateway.start("127.0.0.1", 0, 0)
        stack.callback(gateway.stop)
        planned = tuple(PlannedApplication(read_application(root, name)) for name in names)
        routes = tuple(route(model, node) for node, models in NODES.items() for model in models)
        table = RoutingTable(1, routes, addresses, planned)
        gateway.set_table(table)
        yield Served(gateway, address, table, nodes)
        report = gateway.report()
        for tenant, counts in report.counts.items():
            ended = counts.in_time + counts.late + counts.refused + counts.failed + counts.cancelled
            assert ended == counts.offered, tenant
        assert not report.outstanding


@pytest.fixture(params=sorted(CLIENTS))
def triton(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


@pytest.fixture
def client(triton: Any, served: Served) -> Iterator[Any]:
    port = served.address.http_port if triton is triton_http else served.address.grpc_port
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as made:
        yield made


def test_stages_run_where_their_models_are(triton: Any, client: Any, served: Served) -> None:
    x = x_of(rows=2)
    before = served.counts("chain")
    result = client.infer("chain", tensors(triton, {"x": x}), request_id="q1", priority=1, timeout=20_000_000)
    np.testing.assert_allclose(result.as_numpy("y"), chain(x)[0], rtol=1e-5)
    np.testing.assert_allclose(result.as_numpy("between"), chain(x)[1], rtol=1e-5)
    wanted = [triton.InferRequestedOutput("total")]
    result = client.infer("diamond", tensors(triton, {"x": x}), model_version="1", outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("total"), diamond(x), rtol=1e-5)
    words = np.array([b"one", b"", "zw\u00f6lf".encode()], np.object_)
    assert client.infer("wording", tensors(triton, {"words": words})).as_numpy("same").tolist() == words.tolist()
    after = served.counts("chain")
    assert (after.offered - before.offered, after.in_time - before.in_time) == (1, 1)


def test_only_the_stages_that_are_needed_run(served: Served) -> None:
    before = served.counts("thrice").offered
    x = x_of(rows=2)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.address.http_port}") as client:
        wanted = [triton_http.InferRequestedOutput("between", binary_data=False)]
        result = client.infer("chain", tensors(triton_http, {"x": x}, binary_data=False), outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("between"), 2 * softsign(x), rtol=1e-5)
    assert served.counts("thrice").offered == before


def test_what_clients_are_told(triton: Any, client: Any) -> None:
    assert client.is_server_ready()
    assert client.is_model_ready("chain")
    options = {"as_json": True} if triton is triton_grpc else {}
    metadata = client.get_model_metadata("diamond", **options)
    assert metadata["platform"] == "ensemble"
    assert [(each["name"], each["datatype"]) for each in metadata["inputs"]] == [("x", "FP32")]
    config = client.get_model_config("diamond", **options)
    config = config.get("config", config)
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["twice", "thrice", "half", "join"]
    assert json.loads(config["parameters"]["shapes"]["string_value"]) == [{"x": [1, 8]}]
    index = client.get_model_repository_index(**options)
    lines = {each["name"]: each for each in (index["models"] if isinstance(index, dict) else index)}
    assert lines["chain"]["state"] == lines["twice"]["state"] == "READY"
    with pytest.raises(InferenceServerException, match="keeps no statistics of applications"):
        client.get_inference_statistics("chain")
    with pytest.raises(InferenceServerException, match="the cluster loads the models of its plan"):
        client.unload_model("chain")


def test_refusals_and_failures_carry_their_sentence(triton: Any, client: Any) -> None:
    for model, arrays, status, sentence in (
        ("chain", {"x": x_of(rows=5)}, ("400", "StatusCode.INVALID_ARGUMENT"), "batch of 5, expected 1 to 4"),
        ("wrong", {"x": x_of()}, ("400", "StatusCode.INVALID_ARGUMENT"), "has no output 'zzz', expected one of 'y'"),
        ("hopeless", {"x": x_of(rows=2)}, ("503", "StatusCode.UNAVAILABLE"), "stage 'first'"),
        ("failing", {"x": x_of(), "index": np.array([77])}, ("500", "StatusCode.INTERNAL"), "stage 'pick'"),
    ):
        with pytest.raises(InferenceServerException, match=sentence) as caught:
            client.infer(model, tensors(triton, arrays))
        assert caught.value.status() in status
    with pytest.raises(InferenceServerException, match="has no version '7'"):
        client.infer("chain", tensors(triton, {"x": x_of(rows=2)}), model_version="7")


def test_a_stream_of_queries(served: Served) -> None:
    check_stream(served.address.grpc_port)


def test_calls_that_clients_give_up_are_withdrawn(served: Served) -> None:
    check_calls_given_up(served.address.grpc_port)


def test_the_page_for_prometheus_has_a_row_of_the_application(served: Served) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.address.http_port}/metrics", timeout=WAIT_S) as page:
        assert 'cotenant_gateway_queries_total{outcome="in_time",tenant="chain"}' in page.read().decode()


def test_a_stage_without_a_node_is_named(served: Served) -> None:
    table = served.table
    routes = tuple(route(model, *(["n0"] if model in NODES["n0"] else [])) for each in NODES.values() for model in each)
    less = RoutingTable(2, routes, {"n0": table.addresses["n0"]}, table.applications)
    served.gateway.set_table(less)
    try:
        with triton_http.InferenceServerClient(f"127.0.0.1:{served.address.http_port}") as client:
            with pytest.raises(
                InferenceServerException, match="stage 'second': no node serves model 'thrice' now"
            ) as no:
                client.infer("chain", tensors(triton_http, {"x": x_of(rows=2)}))
            assert no.value.status() == "503"
            index = {each["name"]: each for each in client.get_model_repository_index()}
            assert index["chain"]["state"] == "UNAVAILABLE"
    finally:
        served.gateway.set_table(RoutingTable(3, table.routes, table.addresses, table.applications))


# --- nodes that do as they are told -----------------------------------------------------------------------------------

METADATA = {
    "versions": ["1"],
    "platform": "fake",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 8]}],
}
JOIN = {
    "inputs": [{"name": name, "datatype": "FP32", "shape": [-1, 8]} for name in ("left", "right")],
    "outputs": [{"name": "total", "datatype": "FP32", "shape": [-1, 8]}],
}
CONFIG = {"max_batch_size": 4, "parameters": {"shapes": {"string_value": "[]"}}}


@dataclass
class FakeNode:
    """Adds one to every tensor, unless its script says otherwise. `asked` are the parameters of each query."""

    name: str
    script: list[str] = field(default_factory=list)
    asked: list[dict[str, int]] = field(default_factory=list)

    async def http(self, method: str, raw_path: str, headers: Any, body: bytes, spent_ns: int = 0) -> HttpReply:
        model = raw_path.split("/")[3]
        told = (
            CONFIG if raw_path.endswith("/config") else {"name": model, **METADATA, **(JOIN if model == "join" else {})}
        )
        return HttpReply(200, [], json.dumps(told).encode(), Ending(Outcome.ANSWERED), self.name)

    async def grpc(self, method: str, data: bytes, timeout_s: float | None, spent_ns: int = 0) -> GrpcReply:
        message = MESSAGES["ModelInferRequest"].FromString(data)
        self.asked.append({key: each.int64_param for key, each in message.parameters.items()})
        await asyncio.sleep(0)
        what = self.script.pop(0) if self.script else "ok"
        if what == "gone":
            raise NotRunError("refused", gone=True)
        if what == "broken":
            raise BrokenError("reset")
        if what != "ok":
            ending, _, sentence = what.partition(":")
            code = grpc.StatusCode.INTERNAL if ending == "failed" else grpc.StatusCode.UNAVAILABLE
            told = Ending(Outcome.REJECTED, Cause.UNSERVED) if ending == "unserved" else Ending(Outcome(ending))
            return GrpcReply(b"", code, sentence.strip(), told.pairs(), told, self.name)
        arrays = [
            decode_raw(each.name, each.datatype, tuple(each.shape), raw)
            for each, raw in zip(message.inputs, message.raw_input_contents, strict=True)
        ]
        made = sum(arrays[1:], arrays[0]) + np.float32(1)
        answer = MESSAGES["ModelInferResponse"](model_name=message.model_name)
        name = "total" if message.model_name == "join" else "y"
        answer.outputs.add(name=name, datatype="FP32", shape=made.shape)
        answer.raw_output_contents.append(encode_raw(made))
        return GrpcReply(answer.SerializeToString(), grpc.StatusCode.OK, "", (), Ending(Outcome.ANSWERED), self.name)

    async def close(self) -> None:
        pass


def spec_of(folder: Path, text: str, name: str = "app") -> Any:
    write_application(folder, name, text)
    return read_application(folder, name)


class Rig:
    """Applications before two fake nodes, each of which serves every model."""

    def __init__(self, planned: PlannedApplication, *scripts: list[str]) -> None:
        self.nodes = {f"n{at}": FakeNode(f"n{at}", script) for at, script in enumerate(scripts or ([],))}
        self.now_ns = 0
        self.forwarder = Forwarder(lambda node, _: self.nodes[node], lambda: self.now_ns)
        self.applications = ApplicationBackend(self.forwarder, lambda: self.now_ns)
        models = dict.fromkeys(stage.model for stage in planned.spec.stages)
        addresses = dict.fromkeys(self.nodes, Address("fake", 1, 1))
        self.forwarder.set_table(
            RoutingTable(1, tuple(route(each, *self.nodes) for each in models), addresses, (planned,))
        )

    async def infer(self, **options: Any) -> InferResult:
        x = np.zeros((1, 8), np.float32)
        return await self.applications.infer(InferRequest("app", {"x": x}, **options))

    @property
    def counts(self) -> Counts:
        return self.forwarder.counts["app"]


def test_each_stage_gets_what_its_share_leaves(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CHAIN)

    async def run() -> None:
        rig = Rig(PlannedApplication(spec, {"first": 4_000_000, "second": 6_000_000}))
        result = await rig.infer()
        assert result.outcome is Outcome.ANSWERED
        np.testing.assert_array_equal(result.outputs["y"], np.full((1, 8), 2, np.float32))
        assert rig.nodes["n0"].asked == [{"timeout": 4_000}, {"timeout": 10_000}]
        await rig.infer(timeout_ns=5_000_000, priority=3)
        assert rig.nodes["n0"].asked[2:] == [{"timeout": 4_000, "priority": 3}, {"timeout": 5_000, "priority": 3}]
        unplanned = Rig(PlannedApplication(spec))
        await unplanned.infer()
        assert unplanned.nodes["n0"].asked == [{"timeout": SLO_NS // 1000}] * 2

    asyncio.run(run())


def test_the_first_stage_without_an_answer_ends_the_whole(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, DIAMOND)

    async def run(*script: str) -> tuple[InferResult, Rig]:
        rig = Rig(PlannedApplication(spec), list(script))
        return await rig.infer(), rig

    async def cases() -> None:
        for script, outcome, reason, counts in (
            (("rejected: full",), Outcome.REJECTED, "stage 'start': full", Counts(1, refused=1)),
            (
                ("ok", "rejected: full"),
                Outcome.DROPPED,
                "stage 'left' was rejected: full",
                Counts(1, refused=1),
            ),
            (("unserved: away",), Outcome.REJECTED, "stage 'start': away", Counts(1, refused=1)),
            (("ok", "ok", "failed: no"), Outcome.FAILED, "stage 'right': no", Counts(1, failed=1)),
            (("gone",), Outcome.REJECTED, "stage 'start': no node serves model 'twice' now (refused)", None),
            (
                ("broken",),
                Outcome.FAILED,
                "stage 'start': model 'twice': the node was lost while the query ran (reset)",
                None,
            ),
        ):
            result, rig = await run(*script)
            assert (result.outcome, result.reason) == (outcome, reason)
            assert counts is None or rig.counts == counts

    asyncio.run(cases())


def test_a_query_that_is_refused_before_it_runs_has_its_outcome_too(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CHAIN)
    wrong = spec_of(tmp_path, CHAIN.replace("first.y", "first.zzz"), "wrong")

    async def refused(rig: Rig, counts: Counts, **options: Any) -> None:
        with pytest.raises(ServeError):
            await rig.infer(**options)
        assert rig.counts == counts

    async def run() -> None:
        rig = Rig(PlannedApplication(spec))
        rig.forwarder.set_table(
            RoutingTable(2, (route("twice", "n0"), route("thrice")), {"n0": Address("fake", 1, 1)}, ())
        )
        rig.forwarder.applications = {"app": PlannedApplication(spec)}
        await refused(rig, Counts(offered=1, refused=1))  # no node has a stage's model
        with pytest.raises(ServeError):
            await rig.applications.prepare("app")  # as for metadata: that is no query
        assert rig.counts.offered == 1
        await refused(
            Rig(PlannedApplication(replace(wrong, name="app"))), Counts(offered=1, failed=1)
        )  # it does not fit its models
        await refused(Rig(PlannedApplication(spec)), Counts(offered=1, failed=1), version="7")
        await refused(Rig(PlannedApplication(spec)), Counts(offered=1, failed=1), outputs=("nothing",))

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_gateway_counts_what_it_refuses_of_an_application(protocol: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CHAIN)
    gateway = Gateway()
    routes = (route("twice"), route("thrice"))
    address = gateway.start("127.0.0.1", 0, 0, RoutingTable(1, routes, {}, (PlannedApplication(spec),)))
    triton = triton_http if protocol == "http" else triton_grpc
    port = address.http_port if protocol == "http" else address.grpc_port
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for _ in range(3):
                with pytest.raises(InferenceServerException, match="no node serves"):
                    client.infer("app", tensors(triton, {"x": x_of(rows=2)}))
            with pytest.raises(InferenceServerException, match="no node serves"):
                client.get_model_metadata("app")
        assert gateway.report().counts["app"] == Counts(offered=3, refused=3)
    finally:
        gateway.stop()


def test_a_query_that_is_given_up_is_withdrawn_from_its_nodes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CHAIN)

    async def run() -> None:
        rig = Rig(PlannedApplication(spec))
        stopped = asyncio.Event()
        begun = asyncio.Event()

        async def never(method: str, data: bytes, timeout_s: float | None, spent_ns: int = 0) -> GrpcReply:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()
            raise AssertionError

        rig.nodes["n0"].grpc = never  # type: ignore[method-assign]
        call = asyncio.create_task(rig.infer())
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await stopped.wait()
        await rig.applications.close()
        assert rig.counts == Counts(offered=1, cancelled=1)
        assert rig.forwarder.counts["twice"] == Counts(offered=1, cancelled=1)

    asyncio.run(run())


WHAT = st.sampled_from(["ok", "ok", "ok", "gone", "broken", "rejected: full", "failed: no"])


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("specs")
    return [spec_of(folder / name, text) for name, text in (("chain", CHAIN), ("diamond", DIAMOND))]


@given(st.integers(0, 1), st.lists(WHAT, max_size=8), st.lists(WHAT, max_size=8), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_whatever_nodes_do_every_query_has_one_outcome(
    specs: list[Any], which: int, left: list[str], right: list[str], count: int
) -> None:
    async def run() -> None:
        rig = Rig(PlannedApplication(specs[which]), left, right)
        results = await asyncio.gather(*[rig.infer() for _ in range(count)], return_exceptions=True)
        for result in results:
            assert isinstance(result, InferResult | ServeError)
            if isinstance(result, InferResult):
                assert (result.outcome is Outcome.ANSWERED) == bool(result.outputs) == (not result.reason)
        counts = rig.counts
        assert counts.offered == len(results)
        assert counts.in_time + counts.refused + counts.failed == counts.offered
        await rig.applications.close()
        for each in rig.forwarder.counts.values():
            assert each.offered == each.in_time + each.late + each.refused + each.failed + each.cancelled
        assert not rig.forwarder.report().outstanding

    asyncio.run(run())


# --- from the tenants' file -------------------------------------------------------------------------------------------


def test_a_stage_without_a_tenant_is_named(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    with pytest.raises(PlanError, match=r"'chain.first' owns no model in .* or the tenant of the stage's model"):
        models_of(root, [Load("chain.first", "twice", 1.0, 10)])
    assert models_of(root, [Load("twice", "twice", 1.0, 10)]) == {"twice": "twice"}


TENANTS = """
[[device]]
name = "core"
cores = 1

[[application]]
name = "chain"
rate = 5.0
slo_ms = 1000.0

[[application.stage]]
name = "first"
model = "twice"

[[application.stage]]
name = "second"
model = "thrice"
after = ["first"]
"""


def test_an_application_is_planned_for_the_tenants_of_its_models(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice", "words", "half")
    for name in ("chain", "wording", "diamond"):
        write_application(root, name, APPLICATIONS[name], 1000.0)
    costs = {model: {1: {rows: 1_000_000 * rows for rows in (1, 2, 4)}} for model in ("twice", "thrice")}
    write_profile(tmp_path / "costs.json", costs)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    work = read_spec(tmp_path / "tenants.toml", root, tmp_path / "costs.json", "elastic_int", 0.0)
    assert work.models == {"twice": "twice", "thrice": "thrice"}
    [planned] = work.applications
    assert planned.spec.name == "chain"
    assert planned.shares_ns == {
        stage: load.slo_ns for stage, load in zip(("first", "second"), work.loads, strict=True)
    }
    assert sum(planned.shares_ns.values()) <= 1_000_000_000
    assert planned_applications(root, {"chain": "words"}, {}) != planned_applications(root, {"wording": "words"}, {})
    assert [each.spec.name for each in planned_applications(root, {"other": "words"}, {})] == ["wording"]
    assert planned_applications(root, {"wording": "words"}, {}) == ()
