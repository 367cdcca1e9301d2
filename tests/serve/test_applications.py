"""Applications in a real server: what clients are told of them, what they answer, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from application_samples import APPLICATIONS, CHAIN, DIAMOND, chain, diamond, write_application, write_models, x_of
from client import Client, Watch
from cotenant.config import DeviceSection, ServerConfig
from cotenant.core.actions import Respond
from cotenant.core.events import ApplicationArrived, ApplicationEnded, PredictorChanged, QueryArrived
from cotenant.serve.server import Server
from cotenant.types import Outcome, StageQuery, priority_rank
from cotenant.wire.api import InferRequest, ServeError, Status
from repositories import SLO_MS, chooser, config, scaled, write_model

THREADS = {"device": DeviceSection(isolation="thread")}


def started(root: Path, watch: Watch | None = None, **sections: Any) -> Server:
    server = Server(root, ServerConfig(**{**THREADS, **sections}))
    server.start(*([watch] if watch else []))
    return server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_models(tmp_path_factory.mktemp("applications") / "models")
    for name, text in APPLICATIONS.items():
        write_application(root, name, text)
    return root


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def server(root: Path, watch: Watch) -> Iterator[Server]:
    made = started(root, watch)
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    yield made
    assert made.twice == 0
    assert server._flows.under_way == 0


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_and_a_diamond_give_what_their_models_give(client: Client, rows: int) -> None:
    x = x_of(rows, rows)
    answer = client.ask("chain", {"x": x})
    assert (answer.outcome, answer.model_version, answer.reason) == (Outcome.ANSWERED, "1", "")
    assert list(answer.outputs) == ["y", "between"]
    y, between = chain(x)
    np.testing.assert_allclose(answer.outputs["y"], y, rtol=1e-5)
    np.testing.assert_allclose(answer.outputs["between"], between, rtol=1e-5)
    np.testing.assert_allclose(client.ask("diamond", {"x": x}).outputs["total"], diamond(x), rtol=1e-5)


def test_texts_go_through_two_stages_of_one_model(client: Client) -> None:
    words = np.array([b"one", "zw\u00f6lf".encode(), b""], np.object_)
    assert client.ask("wording", {"words": words}).outputs["same"].tolist() == words.tolist()


def test_only_what_was_asked_for_is_computed_and_sent(client: Client, server: Server, watch: Watch) -> None:
    before = len(watch.events(QueryArrived))
    answer = client.ask("chain", {"x": x_of()}, outputs=("between",))
    assert list(answer.outputs) == ["between"]
    stages = [event.query.stage for event in watch.events(QueryArrived)[before:]]
    assert stages == ["first"]


def test_stages_are_queries_of_their_models_tenants(client: Client, watch: Watch, server: Server) -> None:
    before, began = len(watch.events(QueryArrived)), server.counters.by_tenant["twice"].arrived
    answer = client.ask("diamond", {"x": x_of(1, 2)}, priority=5, timeout_ns=10_000_000_000)
    queries = [event.query for event in watch.events(QueryArrived)[before:]]
    assert [(each.stage, each.tenant, each.items) for each in queries[:1]] == [("start", "twice", 2)]
    assert sorted(each.tenant for each in queries) == ["Owner of half", "join", "thrice", "twice"]
    assert {each.part_of for each in queries} == {answer.query}
    assert {each.rank for each in queries} == {priority_rank(5)}
    [arrived] = [event for event in watch.events(ApplicationArrived) if event.query == answer.query]
    assert arrived.deadline_ns - arrived.arrival_ns == 10_000_000_000
    assert all(each.deadline_ns <= arrived.deadline_ns == (each.expiry_ns or 0) for each in queries)
    assert server.counters.by_tenant["twice"].arrived == began + 1
    client.ask("diamond", {"x": x_of()})
    assert watch.events(QueryArrived)[-1].query.rank == priority_rank(2)  # of the application's own file


def test_clients_side_by_side_get_their_own_rows(client: Client) -> None:
    barrier = threading.Barrier(8)
    numbers: dict[int, int] = {}

    def send(seed: int) -> None:
        barrier.wait(30)
        for step in range(4):
            numbers[seed * 4 + step] = client.submit("diamond", {"x": x_of(seed * 4 + step)})

    threads = [threading.Thread(target=send, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for seed, number in numbers.items():
        [answer] = client.wait(number)
        np.testing.assert_allclose(answer.outputs["total"], diamond(x_of(seed)), rtol=1e-5)
    assert len(numbers) == 32


# --- what clients are told --------------------------------------------------------------------------------------------


def test_to_clients_an_application_is_a_model(server: Server) -> None:
    meta = server.metadata("chain", "")
    assert (meta.name, meta.versions, meta.platform, meta.max_batch_size) == ("chain", ("1",), "ensemble", 4)
    assert [(each.name, each.datatype, each.shape) for each in meta.inputs] == [("x", "FP32", (-1, 8))]
    assert [(each.name, each.datatype, each.shape) for each in meta.outputs] == [
        ("y", "FP32", (-1, 8)),
        ("between", "FP32", (-1, 8)),
    ]
    assert server.metadata("chain", "1") == meta
    with pytest.raises(ServeError, match="no version '2'; it has 1") as caught:
        server.metadata("chain", "2")
    assert caught.value.status is Status.NOT_FOUND
    assert server.model_ready("chain", "")
    lines = {entry.name: (entry.version, entry.state) for entry in server.index(ready_only=True)}
    assert lines["chain"] == lines["diamond"] == ("1", "READY")
    assert "join" in lines


def test_its_configuration_is_that_of_an_ensemble(server: Server) -> None:
    config = server.config("diamond", "")
    assert (config["platform"], config["max_batch_size"]) == ("ensemble", 4)
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": (8,)}]
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["twice", "thrice", "half", "join"]
    last = config["ensemble_scheduling"]["step"][-1]
    assert last["input_map"] == {"left": "left.y", "right": "right.y"}
    assert last["output_map"] == {"total": "total"}
    assert config["parameters"]["slo_ms"]["string_value"] == str(SLO_MS)
    assert server.config("wording", "")["max_batch_size"] == 0


def test_its_statistics_are_its_own(server: Server, client: Client) -> None:
    [before] = server.statistics("chain", "")
    client.ask("chain", {"x": x_of(0, 3)})
    [after] = server.statistics("chain", "")
    assert (after.name, after.version) == ("chain", "1")
    assert after.success.count - before.success.count == 1
    assert after.inference_count - before.inference_count == 3
    assert after.success.ns > before.success.ns
    names = [entry.name for entry in server.statistics("", "")]
    assert names == sorted(names)
    assert {"chain", "diamond", "twice"} <= {*names}
    page = server.metrics().decode()
    assert 'cotenant_queries_total{outcome="answered",tenant="chain"}' in page
    assert 'cotenant_slo_attainment_ratio{tenant="chain"} 1.0' in page
    assert f'cotenant_slo_seconds{{tenant="chain"}} {SLO_MS / 1000}' in page


# --- what is refused, and what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        ("chain", {}, "model 'chain': input 'x' is missing"),
        ("chain", {"x": np.zeros((1, 8), np.float64)}, "expected FP32"),
        ("chain", {"x": np.zeros((1, 7), np.float32)}, r"expected \[-1, 8\]"),
        ("chain", {"x": np.zeros((5, 8), np.float32)}, "batch of 5, expected 1 to 4"),
        ("chain", {"x": np.zeros((1, 8), np.float32), "z": np.zeros(1)}, "'z' is unknown"),
        ("failing", {"x": np.zeros((9, 8), np.float32), "index": np.array([1])}, "batch of 9, expected 1 to 4"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_they_count(
    server: Server, model: str, inputs: dict[str, Any], sentence: str
) -> None:
    arrived = server.counters.by_tenant[model].arrived
    with pytest.raises(ServeError, match=sentence) as caught:
        server.submit(InferRequest(model, inputs), lambda _: pytest.fail("done was called"))
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert server.counters.by_tenant[model].arrived == arrived
    assert server._flows.under_way == 0


def test_an_output_that_is_not_there_is_refused(server: Server) -> None:
    with pytest.raises(ServeError, match="output 'zzz' is unknown, expected some of 'y', 'between'"):
        server.submit(InferRequest("chain", {"x": x_of()}, outputs=("zzz",)), lambda _: None)


def test_a_stage_that_fails_fails_the_whole_and_nothing_is_left(client: Client, server: Server, watch: Watch) -> None:
    before = server.counters.by_tenant["failing"].outcomes[Outcome.FAILED]
    failed = client.ask("failing", {"index": np.array([99]), "x": x_of()})
    assert (failed.outcome, failed.status, failed.outputs) == (Outcome.FAILED, Status.INTERNAL, {})
    assert failed.reason.startswith("stage 'pick': ")
    assert "indices element out of data bounds" in failed.reason
    good = client.ask("failing", {"index": np.array([4]), "x": x_of()})
    np.testing.assert_array_equal(good.outputs["picked"], [[8.0, 9.0]])
    assert server.counters.by_tenant["failing"].outcomes[Outcome.FAILED] == before + 1
    assert server.driver.wait_idle(30)
    stages = [event.query.id for event in watch.events(QueryArrived) if event.query.part_of == failed.query]
    ends = [action.query for action in watch.actions(Respond) if action.query in stages]
    assert sorted(ends) == sorted(stages)
    [ended] = [event for event in watch.events(ApplicationEnded) if event.query == failed.query]
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, failed.reason)


def test_an_slo_that_cannot_be_met_is_refused_at_arrival(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN, slo_ms=0.000001)
    server = started(root)
    try:
        answer = Client(server).ask("chain", {"x": x_of()})
        assert (answer.outcome, answer.status) == (Outcome.REJECTED, Status.UNAVAILABLE)
        assert answer.reason.startswith("stage 'first': ")
    finally:
        server.stop()


def test_a_wrong_profile_of_a_stage_is_corrected_by_probes(tmp_path: Path) -> None:
    """The second stage is believed to take 500 s. The first one is refused for that, so a whole query is the probe."""
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN, slo_ms=20_000)
    watch = Watch()
    server = started(root, watch)
    client = Client(server)
    try:
        server.beliefs.predictor = server.beliefs.predictor.scaled({"thrice": 5e11 / server.beliefs.alone_ns("thrice")})
        server.driver.post(PredictorChanged(server.beliefs.predictor))
        assert client.ask("chain", {"x": x_of()}).outcome is Outcome.REJECTED
        assert client.ask("chain", {"x": x_of()}).outcome is Outcome.ANSWERED
        assert server.counters.by_tenant["chain"].probes == 1
        plain, probe = watch.events(ApplicationArrived)
        assert plain.predicted_ns is UNSET
        assert probe.predicted_ns > 400 * 10**9
        late_ns = [event.query.deadline_ns for event in watch.events(QueryArrived)][1:]
        assert len(late_ns) == 2
        assert min(late_ns) > probe.deadline_ns
        expiry_ns = {event.query.expiry_ns for event in watch.events(QueryArrived)[1:]}
        assert expiry_ns == {probe.deadline_ns}
    finally:
        server.stop()


# --- loading ----------------------------------------------------------------------------------------------------------


def reason_of(server: Server, name: str) -> str:
    [entry] = [entry for entry in server.index(ready_only=False) if entry.name == name]
    assert entry.state == "UNAVAILABLE"
    return entry.reason


def test_an_application_follows_its_models(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice")
    write_application(root, "chain", CHAIN)
    server = started(root)
    try:
        client = Client(server)
        assert reason_of(server, "chain") == (
            "application 'chain': stage 'second': model 'thrice' is not served: the repository has no such "
            "model, or it was not loaded"
        )
        assert server.model_ready("chain", "") is False
        with pytest.raises(ServeError, match="model 'chain' is not served: application 'chain'") as caught:
            client.submit("chain", {"x": x_of()})
        assert caught.value.status is Status.UNAVAILABLE
        write_models(root, "thrice")
        server.load("thrice")
        np.testing.assert_allclose(client.ask("chain", {"x": x_of()}).outputs["y"], chain(x_of())[0], rtol=1e-5)
        write_model(root, "thrice", config(max_batch=2), {1: lambda: scaled(5.0)})
        server.load("thrice")
        assert server.metadata("chain", "").max_batch_size == 2
        changed = client.ask("chain", {"x": x_of()}).outputs["y"]
        np.testing.assert_allclose(changed, chain(x_of())[0] * 5 / 3, rtol=1e-5)
        write_model(root, "thrice", config(), {1: chooser})
        server.load("thrice")
        assert "inputs.x: model 'thrice' has no input 'x', expected 'index'" in reason_of(server, "chain")
        server.unload("thrice")
        assert "it was unloaded" in reason_of(server, "chain")
        assert client.ask("twice", {"x": x_of()}).outcome is Outcome.ANSWERED
    finally:
        server.stop()


def test_an_application_is_loaded_reloaded_and_unloaded_like_a_model(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice", "half", "join")
    server = started(root)
    try:
        client = Client(server)
        with pytest.raises(ServeError, match="unknown") as caught:
            server.metadata("chain", "")
        assert caught.value.status is Status.NOT_FOUND
        write_application(root, "chain", CHAIN)
        server.load("chain")
        assert client.ask("chain", {"x": x_of()}).outcome is Outcome.ANSWERED
        assert server.counters.by_tenant["chain"].arrived == 1
        write_application(root, "chain", CHAIN.replace("second.y", "nobody.y"))
        with pytest.raises(ServeError, match="unknown stage 'nobody'") as caught:
            server.load("chain")
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert client.ask("chain", {"x": x_of()}).outcome is Outcome.ANSWERED  # as it was
        write_application(root, "chain", DIAMOND, slo_ms=1234)
        server.load("chain")
        assert list(client.ask("chain", {"x": x_of()}).outputs) == ["total"]
        assert server.config("chain", "")["parameters"]["slo_ms"]["string_value"] == "1234"
        server.unload("chain")
        assert reason_of(server, "chain") == "it was unloaded"
        with pytest.raises(ServeError, match="it was unloaded"):
            client.submit("chain", {"x": x_of()})
        server.load("chain")
        assert server.model_ready("chain", "")
    finally:
        server.stop()


def test_names_are_taken_once(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_model(root, "other", config("chain"), {1: chooser})
    write_application(root, "chain", CHAIN)
    server = started(root)
    try:
        assert "application 'chain' has the same name as the tenant of model 'other'" in reason_of(server, "chain")
        server.unload("other")
        server.load("chain")
        with pytest.raises(ServeError, match="tenant 'chain' has the same name as an application") as caught:
            server.load("other")
        assert caught.value.status is Status.INVALID_ARGUMENT
    finally:
        server.stop()


def test_a_server_of_processes_drains_what_is_between_two_stages(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    server = Server(root, ServerConfig())
    server.start()
    client = Client(server)
    numbers = [client.submit("chain", {"x": x_of(seed)}) for seed in range(20)]
    server.stop()
    for seed, answer in enumerate(client.wait(*numbers)):
        assert answer.outcome is Outcome.ANSWERED
        np.testing.assert_allclose(answer.outputs["y"], chain(x_of(seed))[0], rtol=1e-5)
    with pytest.raises(ServeError, match="shutting down"):
        client.submit("chain", {"x": x_of()})


def test_whatever_is_loaded_and_unloaded_meanwhile_every_query_has_one_end(tmp_path: Path) -> None:
    """Clients and cancels on threads of their own, while models and applications come and go."""
    root = write_models(tmp_path / "models", "twice", "thrice", "half", "join")
    write_application(root, "chain", CHAIN)
    write_application(root, "diamond", DIAMOND)
    watch = Watch()
    server = started(root, watch)
    clients = [Client(server) for _ in range(4)]
    numbers: list[list[int]] = [[] for _ in clients]
    refused: list[Status] = []
    go, stop = threading.Barrier(len(clients) + 1), threading.Event()

    def send(which: int) -> None:
        rng = np.random.default_rng(which)
        go.wait(30)
        while not stop.is_set():
            name = ("chain", "diamond", "twice")[int(rng.integers(3))]
            try:
                number = clients[which].submit(name, {"x": x_of(which)})
            except ServeError as error:
                refused.append(error.status)
                continue
            numbers[which].append(number)
            if rng.random() < 0.2:
                server.cancel(number)
            if len(numbers[which]) % 16 == 0:
                clients[which].wait(*numbers[which])

    threads = [threading.Thread(target=send, args=(which,), daemon=True) for which in range(len(clients))]
    for thread in threads:
        thread.start()
    go.wait(30)
    for _ in range(3):
        for act, name in (
            (server.load, "thrice"),
            (server.unload, "diamond"),
            (server.unload, "half"),
            (server.load, "chain"),
            (server.load, "half"),
            (server.load, "diamond"),
        ):
            act(name)
    stop.set()
    for thread in threads:
        thread.join(30)
    for client, sent in zip(clients, numbers, strict=True):
        results = client.wait(*sent)
        assert client.twice == 0
        assert all((result.status is None) == bool(result.outputs) for result in results)
    assert server._flows.wait_idle(30)
    assert server.driver.wait_idle(30)
    server.stop()
    assert server._executor.kept == 0
    begun = [event.query for event in watch.events(ApplicationArrived)]
    ended = [event.query for event in watch.events(ApplicationEnded)]
    assert sorted(begun) == sorted(ended)
    arrived = [event.query.id for event in watch.events(QueryArrived)]
    assert sorted(action.query for action in watch.actions(Respond)) == sorted(arrived)
    alone = [event for event in watch.events(QueryArrived) if not isinstance(event.query, StageQuery)]
    assert sum(map(len, numbers)) == len(begun) + len(alone)
    assert all(status is Status.UNAVAILABLE for status in refused)
