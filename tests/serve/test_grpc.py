"""The gRPC front-end over real channels, and the protocol file against the public one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc  # noqa: F401  (registers the protocol's names in the default pool, as a client in-process does)
from google.protobuf import descriptor_pool
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from cotenant.errors import CotenantError
from cotenant.serve.frontend.grpc_admission import GrpcAdmission
from cotenant.serve.frontend.grpc_frames import MessageReader, prefix_of
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.grpc_stream import StreamCall
from cotenant.serve.frontend.pending_bytes import PendingBytes
from cotenant.types import Cause, Outcome
from cotenant.wire import codec_grpc
from cotenant.wire.api import InferRequest, InferResult
from cotenant.wire.codec import Limits
from cotenant.wire.ending import FAILURE, Ending, read_ending
from cotenant.wire.oip import MESSAGES
from fake_backend import CountingBackend, FakeBackend, sample, serving

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(max_malformed=1 << 30, max_body_bytes=1 << 20, max_concurrent_rpcs=4, max_stream_in_flight=3)
VECTOR = np.array([[1, 2, 3, 4]], np.float32)
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def backend() -> Iterator[CountingBackend]:
    inner = FakeBackend()
    yield CountingBackend(inner)
    inner.close()


@pytest.fixture(scope="module")
def channel(backend: CountingBackend) -> Iterator[grpc.Channel]:
    with serving(backend, LIMITS) as ports, grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer_request(model: str, array: Any = VECTOR, datatype: str = "FP32", **fields: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()], **fields)
    request.inputs.add(name="x", datatype=datatype, shape=array.shape)
    return request


def refused(call: Any, code: Code, *fragments: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code
    details: str = caught.value.details()
    for fragment in fragments:
        assert fragment in details
    return details


def test_infer_and_its_raw_output(stub: Any) -> None:
    answer = stub.ModelInfer(infer_request("identity_fp32", id="q-7"))
    assert (answer.model_name, answer.model_version, answer.id) == ("identity_fp32", "1", "q-7")
    assert (answer.outputs[0].name, answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("y", "FP32", [1, 4])
    assert list(answer.raw_output_contents) == [VECTOR.tobytes()]
    assert answer.parameters["x-cotenant-query"].int64_param > 0
    assert stub.ModelInfer(infer_request("inline")).raw_output_contents[0] == VECTOR.tobytes()


def test_large_tensors(stub: Any) -> None:
    array = sample("FP32", (4000, 16))
    assert stub.ModelInfer(infer_request("identity_fp32", array)).raw_output_contents[0] == array.tobytes()
    big = np.zeros((1000, 600), np.float32)
    refused(lambda: stub.ModelInfer(infer_request("identity_fp32", big)), Code.RESOURCE_EXHAUSTED, "expected at most")


def test_parameters_and_deadline_reach_the_backend(backend: CountingBackend, stub: Any) -> None:
    inner: Any = backend._backend

    def submitted(request: Any, timeout: float | None = None) -> Any:
        stub.ModelInfer(request, timeout=timeout)
        return inner.requests[-1]

    request = infer_request("inline", model_version="1", id="a")
    assert submitted(request).timeout_ns is None
    assert 0 < submitted(request, 30).timeout_ns < 31_000_000_000
    assert submitted(request, 200_000).timeout_ns is None
    request.parameters["timeout"].int64_param = 2_000_000
    request.parameters["priority"].uint64_param = 3
    request.parameters["sequence_id"].int64_param = 5
    seen = submitted(request, 30)
    assert (seen.timeout_ns, seen.priority, seen.version, seen.id) == (2_000_000_000, 3, "1", "a")


@pytest.mark.parametrize("name", ["sequence_start", "sequence_end"])
def test_a_sequence_is_refused_where_it_would_begin_or_end(stub: Any, name: str) -> None:
    request = infer_request("tiny", np.eye(2, 16, dtype=np.float32))
    request.parameters[name].bool_param = False
    assert stub.ModelInfer(request).model_name == "tiny"
    request.parameters[name].bool_param = True
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "served models keep no state" in caught.value.details()


def test_classification(stub: Any) -> None:
    request = infer_request("tiny", np.eye(2, 16, dtype=np.float32))
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    answer = stub.ModelInfer(request)
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [2, 1])
    assert answer.raw_output_contents[0] == b"\x0a\0\0\x001.000000:0\x0a\0\0\x001.000000:1"


@pytest.mark.parametrize(
    ("model", "code", "fragment"),
    [
        ("fail", Code.INTERNAL, "division by zero"),
        ("drop", Code.UNAVAILABLE, "deadline passed"),
        ("reject", Code.UNAVAILABLE, "queue of the tenant is full"),
        ("unknown", Code.NOT_FOUND, "'unknown'"),
        ("add_sub", Code.INVALID_ARGUMENT, "'a' is missing"),
        ("identity_int8", Code.INVALID_ARGUMENT, "expected INT8"),
        ("", Code.NOT_FOUND, "unknown"),
    ],
)
def test_refusals(stub: Any, model: str, code: Code, fragment: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(infer_request(model))
    assert caught.value.code() is code
    assert fragment in caught.value.details()
    submitted = model in ("fail", "drop", "reject")
    assert ("x-cotenant-query" in dict(caught.value.trailing_metadata())) == submitted


def test_a_bug_is_logged_and_not_shown(stub: Any, caplog: pytest.LogCaptureFixture) -> None:
    details = refused(lambda: stub.ModelInfer(infer_request("crash")), Code.INTERNAL, "log")
    assert "secret" not in details
    assert "secret detail" in caplog.text


def test_long_and_odd_messages_fit_into_trailing_metadata(stub: Any) -> None:
    details = refused(lambda: stub.ModelInfer(infer_request("ü\n" * 4000)), Code.NOT_FOUND, "unknown")
    assert len(details) <= 1000


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    refused(lambda: call(b"\xff\xff\xff"), Code.INVALID_ARGUMENT, "ModelInferRequest")


@pytest.mark.parametrize(
    "method",
    [
        "SystemSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ],
)
def test_extensions_not_served_say_so(channel: grpc.Channel, method: str) -> None:
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    refused(lambda: call(b""), Code.UNIMPLEMENTED, "not supported")


def test_an_unknown_method(channel: grpc.Channel) -> None:
    refused(lambda: channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b""), Code.UNIMPLEMENTED)


def test_control(stub: Any) -> None:
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
    assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert stub.ModelReady(service_pb2.ModelReadyRequest(name="tiny")).ready
    assert stub.ServerMetadata(service_pb2.ServerMetadataRequest()).name == "cotenant"
    metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="add_sub"))
    assert [(spec.name, spec.datatype, list(spec.shape)) for spec in metadata.outputs] == [
        ("sum", "INT32", [-1, 4]),
        ("difference", "INT32", [-1, 4]),
    ]
    config = stub.ModelConfig(service_pb2.ModelConfigRequest(name="add_sub")).config
    assert (config.name, config.max_batch_size, list(config.input[0].dims)) == ("add_sub", 8, [4])
    assert config.input[0].data_type == model_config_pb2.TYPE_INT32
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    stats = stub.ModelStatistics(service_pb2.ModelStatisticsRequest()).model_stats
    assert {entry.name for entry in stats} >= {"tiny", "add_sub"}
    index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()).models
    assert ("broken", "UNAVAILABLE") in {(entry.name, entry.state) for entry in index}
    ready = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True)).models
    assert {entry.state for entry in ready} == {"READY"}
    refused(lambda: stub.ModelReady(service_pb2.ModelReadyRequest(name="nope")), Code.NOT_FOUND, "nope")
    index_elsewhere = service_pb2.RepositoryIndexRequest(repository_name="other")
    refused(lambda: stub.RepositoryIndex(index_elsewhere), Code.INVALID_ARGUMENT, "repository_name")


def test_load_and_unload(stub: Any) -> None:
    stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="drop"))
    assert not stub.ModelReady(service_pb2.ModelReadyRequest(name="drop")).ready
    load = service_pb2.RepositoryModelLoadRequest(model_name="drop")
    stub.RepositoryModelLoad(load)
    assert stub.ModelReady(service_pb2.ModelReadyRequest(name="drop")).ready
    load.parameters["config"].string_param = "{}"
    refused(lambda: stub.RepositoryModelLoad(load), Code.UNIMPLEMENTED, "model repository")


def test_standard_health_check(backend: CountingBackend, channel: grpc.Channel) -> None:
    # The bytes are those of the public protocol: field 1 is the service asked for and the status answered.
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    serving_, not_serving = b"\x08\x01", b"\x08\x02"
    assert check(b"") == serving_
    service = b"inference.GRPCInferenceService"
    assert check(b"\x0a%c%b" % (len(service), service)) == serving_
    refused(lambda: check(b"\x0a\x01x"), Code.NOT_FOUND, "'x'")
    inner: Any = backend._backend
    inner.accepting = False
    try:
        assert check(b"") == not_serving
    finally:
        inner.accepting = True


def test_a_watch_tells_the_state_now_and_when_it_has_changed(backend: CountingBackend, channel: grpc.Channel) -> None:
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    inner: Any = backend._backend
    states, unknown = watch(b"", timeout=60), watch(b"\x0a\x01x", timeout=60)
    assert next(states) == b"\x08\x01"
    assert next(unknown) == b"\x08\x03"
    inner.accepting = False
    try:
        assert next(states) == b"\x08\x02"
    finally:
        inner.accepting = True
    assert next(states) == b"\x08\x01"
    states.cancel()
    unknown.cancel()
    refused(lambda: list(watch(b"\xff", timeout=60)), Code.INVALID_ARGUMENT, "HealthCheckRequest")


def test_a_watch_ends_with_the_server() -> None:
    inner = FakeBackend()
    server = GrpcServer(inner, port=0)
    with grpc.insecure_channel(f"127.0.0.1:{server.start()}") as channel:
        states = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert next(states) == b"\x08\x01"
        inner.accepting = False
        server.stop()
        assert next(states) == b"\x08\x02"
        refused(lambda: next(states), Code.UNAVAILABLE, "stopping")
    inner.close()


def arrived(backend: CountingBackend) -> int:
    """Wait for the next query of the model `slow`."""
    number: int = backend._backend.slow_arrived.get(timeout=10)  # type: ignore[attr-defined]
    return number


def test_a_cancelled_call_cancels_its_query(backend: CountingBackend, stub: Any) -> None:
    inner: Any = backend._backend
    future = stub.ModelInfer.future(infer_request("slow"))
    number = arrived(backend)
    future.cancel()
    assert inner.cancelled.get(timeout=10) == number
    assert backend.settled()


def test_a_passed_deadline_ends_the_query(backend: CountingBackend, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(infer_request("slow"), timeout=0.05)
    assert caught.value.code() in (Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.CANCELLED)
    arrived(backend)
    assert backend.settled()


def test_calls_beyond_the_limit_are_unavailable_and_health_still_answers(backend: CountingBackend, stub: Any) -> None:
    futures = [stub.ModelInfer.future(infer_request("slow")) for _ in range(LIMITS.max_concurrent_rpcs)]
    for _ in futures:
        arrived(backend)
    try:
        with pytest.raises(grpc.RpcError, match="4 gRPC calls") as full:
            stub.ModelInfer(infer_request("inline"))
        assert read_ending(dict(full.value.trailing_metadata())) == Ending(Outcome.REJECTED)  # final, as overload is
        refused(lambda: list(stub.ModelStreamInfer(iter([]))), Code.UNAVAILABLE, "4 gRPC calls")
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
    finally:
        backend._backend.release()  # type: ignore[attr-defined]
    assert all(future.result().raw_output_contents for future in futures)
    assert stub.ModelInfer(infer_request("inline")).model_name == "inline"


class Requests:
    """An iterator of requests for a stream that a test feeds as it goes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)

    def put(self, *requests: Any) -> None:
        for request in requests:
            self._queue.put(request)

    def close(self) -> None:
        self._queue.put(None)


def test_stream_answers_as_they_get_ready_and_survives_errors(backend: CountingBackend, stub: Any) -> None:
    requests = Requests()
    answers = stub.ModelStreamInfer(iter(requests))
    requests.put(
        infer_request("slow", id="late"), infer_request("fail", id="broken"), infer_request("inline", id="soon")
    )
    arrived(backend)
    first, second = next(answers), next(answers)
    by_id = {answer.infer_response.id: answer.error_message for answer in (first, second)}
    assert by_id == {"broken": "the model raised: division by zero", "soon": ""}
    requests.put(infer_request("identity_int8", id="wrong"), infer_request("crash", id="bug"))
    wrong, bug = next(answers), next(answers)
    assert (wrong.infer_response.id, "expected INT8" in wrong.error_message) == ("wrong", True)
    assert (bug.infer_response.id, "secret" in bug.error_message) == ("bug", False)
    backend._backend.release()  # type: ignore[attr-defined]
    last = next(answers)
    assert (last.infer_response.id, last.infer_response.raw_output_contents[0]) == ("late", VECTOR.tobytes())
    final = infer_request("inline", id="final")
    final.parameters["triton_enable_empty_final_response"].bool_param = True
    requests.put(final)
    assert next(answers).infer_response.parameters["triton_final_response"].bool_param
    requests.close()
    assert list(answers) == []
    assert backend.settled()


def test_each_answer_of_a_stream_tells_how_its_query_ended(stub: Any) -> None:
    models = ("inline", "fail", "drop", "reject", "identity_int8", "crash", "unknown")
    answers = stub.ModelStreamInfer(iter([infer_request(model, id=model) for model in models]))
    told = {
        answer.infer_response.id: read_ending(
            {key: value.string_param for key, value in answer.infer_response.parameters.items()}
        )
        for answer in answers
    }
    assert told == {
        "inline": Ending(Outcome.ANSWERED),
        "fail": FAILURE,
        "drop": Ending(Outcome.DROPPED),
        "reject": Ending(Outcome.REJECTED),
        "identity_int8": FAILURE,
        "crash": FAILURE,
        "unknown": Ending(Outcome.FAILED, Cause.UNSERVED),
    }


def test_the_backend_is_told_of_answers_alone(backend: CountingBackend, stub: Any) -> None:
    before = len(backend.replies)
    stub.ModelInfer(infer_request("identity_fp32"))
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(infer_request("fail"))
    assert len(backend.replies) == before + 1
    list(stub.ModelStreamInfer(iter([infer_request(model) for model in ("identity_fp32", "fail", "inline")])))
    assert len(backend.replies) == before + 3


def test_stream_of_many_more_than_may_be_in_flight(backend: CountingBackend, stub: Any) -> None:
    requests = [infer_request("identity_fp32", id=str(number)) for number in range(500)]
    answers = list(stub.ModelStreamInfer(iter(requests)))
    assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(500))
    assert {answer.error_message for answer in answers} == {""}
    assert backend.settled()


def test_a_cancelled_stream_cancels_its_queries(backend: CountingBackend, stub: Any) -> None:
    inner: Any = backend._backend
    requests = Requests()
    answers = stub.ModelStreamInfer(iter(requests))
    # One more than may be in flight: the reader is held back when the stream ends.
    requests.put(*[infer_request("slow") for _ in range(LIMITS.max_stream_in_flight + 1)])
    expected = {arrived(backend) for _ in range(LIMITS.max_stream_in_flight)}
    answers.cancel()
    requests.close()
    found = set()
    while not expected <= found:
        found.add(inner.cancelled.get(timeout=10))
    assert backend.settled()
    assert stub.ModelInfer(infer_request("inline")).model_name == "inline"


class Reader:
    """The stream below a call whose client reads an answer when it is told to, and the backend that answers when it is
    told to; all requests have come."""

    def __init__(self, limits: Limits, requests: list[Any]) -> None:
        self._held: list[tuple[int, Any, Any]] = []
        self._sent = b""
        self.holds = False
        self.unread = self.most_unread = self.submitted = self.released = 0
        self.trailers: Any = None
        self.pending = PendingBytes()
        self.admission = GrpcAdmission(self, limits, self.pending)  # type: ignore[arg-type]
        self.off_loop = SimpleNamespace(inbox=SimpleNamespace(put=lambda call: call()))
        self.call = StreamCall(self, self, self, {b":path": b"/stream"}, limits)  # type: ignore[arg-type]
        self.call.begin()
        for each in requests:
            data = each.SerializeToString()
            self.call.received(prefix_of(data) + data, False)

    # the backend

    def refusal(self, model: str, version: str) -> None:
        return None

    def replied(self, result: InferResult) -> None:
        pass

    def submit(self, request: InferRequest, done: Any) -> int:
        self.submitted += 1
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        self._held.append((self.submitted, request, done))
        if not self.holds:
            self.answer()
        return self.submitted

    def answer(self) -> None:
        held, self._held = self._held, []
        for number, request, done in held:
            done(InferResult(Outcome.ANSWERED, number, "1", {"y": request.inputs["x"]}))

    # the front-end

    def unpacked(self, call: Any, incoming: Any, is_packed: bool, data: Any, then: Any, failed: Any) -> None:
        then(data)

    def decode(self, call: Any, incoming: Any, message: Any, nbytes: int, then: Any, failed: Any) -> None:
        then(codec_grpc.decode_request(message, Limits()))

    # the stream

    def arrived_ns(self) -> int:
        return 1

    def respond(self, headers: Any) -> None:
        pass

    def release(self) -> None:
        self.released += 1

    expect = settle = watch = lambda *_: None

    def answer_malformed(self, answer: Any) -> None:
        answer()

    def send(self, data: bytes) -> None:
        self._sent += data

    def unsent(self) -> int:
        return len(self._sent)

    def end(self, trailers: Any) -> None:
        self.trailers = trailers

    # the client

    def read(self) -> int:
        """Read what has been sent, which the call is told of; the number of answers."""
        sent, self._sent = self._sent, b""
        found = MessageReader(1 << 20).feed(sent) if sent else []
        for _, data in found:
            assert service_pb2.ModelStreamInferResponse.FromString(data).error_message == ""
        self.unread -= len(found)
        self.call.drained()
        return len(found)

    def rest(self) -> int:
        self.holds = False
        self.answer()
        self.call.received(b"", True)
        count = 0
        while self.trailers is None:
            count += self.read()
        return count + self.read()


ROOM = 10
BIG = np.zeros((64, 256), np.float32)
BIG_LIMITS = Limits(max_stream_in_flight=64, max_stream_bytes=ROOM * 2 * (BIG.nbytes + 200))


@pytest.mark.parametrize("holds", [False, True])
def test_a_stream_that_is_not_read_keeps_a_bounded_number_of_bytes(holds: bool) -> None:
    reader = Reader(BIG_LIMITS, [infer_request("identity_fp32", BIG)] * 100)
    assert (reader.submitted, reader.most_unread) == (ROOM, ROOM)
    released = reader.released
    reader.holds = holds  # what is computed counts as what it will be
    for read in range(1, 21):
        assert reader.read() == 1
        assert reader.submitted == ROOM + read
        reader.answer()
    assert (reader.submitted, reader.most_unread) == (20 + ROOM, ROOM)
    assert reader.released == released  # requests wait: the client's window stays closed
    assert reader.rest() == 100 - 20
    assert reader.released > released


def test_a_stream_takes_few_requests_before_it_knows_how_large_answers_are() -> None:
    reader = Reader(BIG_LIMITS, [])
    reader.holds = True
    data = infer_request("identity_fp32", BIG).SerializeToString()
    for _ in range(40):
        reader.call.received(prefix_of(data) + data, False)
    assert reader.submitted == 16
    assert reader.rest() == 40
    assert reader.most_unread == 16


def test_small_answers_wait_in_a_bounded_number() -> None:
    reader = Reader(BIG_LIMITS, [infer_request("identity_fp32")] * 200)
    assert (reader.submitted, reader.most_unread) == (64, 64)
    assert reader.read() == 64
    assert reader.rest() == 200 - 64
    assert reader.most_unread == 64


def test_a_stream_that_is_not_read_holds_no_other_one_up(backend: CountingBackend, stub: Any) -> None:
    big = np.zeros((100, 600), np.float32)
    lazy = stub.ModelStreamInfer(iter([infer_request("identity_fp32", big)] * 100))
    for _ in range(3):
        assert len(list(stub.ModelStreamInfer(iter([infer_request("inline")] * 20)))) == 20
    assert sum(len(answer.infer_response.raw_output_contents[0]) for answer in lazy) == 100 * big.nbytes
    assert backend.settled()


def test_a_stop_ends_streams_when_what_they_have_taken_is_answered() -> None:
    inner = FakeBackend()
    server = GrpcServer(inner, port=0)
    with grpc.insecure_channel(f"127.0.0.1:{server.start()}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        idle, busy = Requests(), Requests()
        idle_answers, busy_answers = stub.ModelStreamInfer(iter(idle)), stub.ModelStreamInfer(iter(busy))
        idle.put(infer_request("inline"))
        next(idle_answers)
        busy.put(infer_request("slow"))
        inner.slow_arrived.get(timeout=10)
        stopping = threading.Thread(target=server.stop, args=[1000], daemon=True)
        stopping.start()
        refused(lambda: next(idle_answers), Code.UNAVAILABLE, "the server is stopping")
        assert stopping.is_alive()
        inner.release()
        assert next(busy_answers).error_message == ""
        refused(lambda: next(busy_answers), Code.UNAVAILABLE, "the server is stopping")
        stopping.join(20)
        assert not stopping.is_alive()
        idle.close()
        busy.close()
    inner.close()


def test_garbage_on_a_stream_is_an_error_of_that_request_alone(channel: grpc.Channel) -> None:
    stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    good = infer_request("inline", id="good").SerializeToString()
    answers = [service_pb2.ModelStreamInferResponse.FromString(data) for data in stream(iter([b"\xff\xff", good]))]
    assert "ModelInferRequest" in answers[0].error_message
    assert (answers[1].infer_response.id, answers[1].error_message) == ("good", "")


def test_a_taken_port_is_named(channel: grpc.Channel) -> None:
    inner = FakeBackend()
    first = GrpcServer(inner, port=0)
    port = first.start()
    try:
        with pytest.raises(CotenantError, match=f"port {port}"):
            GrpcServer(inner, port=port).start()
    finally:
        first.stop(0)
        first.stop(0)
        inner.close()


def test_stop_ends_waiting_calls() -> None:
    inner = FakeBackend()
    backend = CountingBackend(inner)
    server = GrpcServer(backend, port=0)
    port = server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        future = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(infer_request("slow"))
        inner.slow_arrived.get(timeout=10)
        server.stop(0.05)
        assert future.exception(timeout=10) is not None
    assert backend.settled()
    inner.close()


def test_every_query_ended_once(backend: CountingBackend) -> None:
    assert backend.accepted > 500
    assert backend.settled()


def test_the_compiled_protocol_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_proto.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_messages_live_in_a_pool_of_their_own() -> None:
    ours = MESSAGES["ModelInferRequest"].DESCRIPTOR
    default = descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
    assert ours.full_name == default.full_name
    assert ours is not default


def compare(ours: Any, theirs: Any, seen: list[str]) -> None:
    """Check name, number, type, label and oneof of every field of ours, and of the messages inside."""
    for field in ours.fields:
        other = theirs.fields_by_name.get(field.name)
        where = f"{ours.full_name}.{field.name}"
        assert other is not None, where
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), where
        oneof, other_oneof = field.containing_oneof, other.containing_oneof
        assert (oneof and oneof.name) == (other_oneof and other_oneof.name), where
        if field.enum_type:
            values = {value.name: value.number for value in field.enum_type.values}
            assert values.items() <= {value.name: value.number for value in other.enum_type.values}.items(), where
        if field.message_type:
            assert field.message_type.full_name == other.message_type.full_name, where
            if field.message_type.GetOptions().map_entry:
                compare(field.message_type, other.message_type, seen)
        seen.append(where)
    for nested in ours.nested_types:
        compare(nested, theirs.nested_types_by_name[nested.name], seen)


def test_field_names_numbers_and_types_are_those_of_the_public_protocol() -> None:
    seen: list[str] = []
    public = {
        **service_pb2.DESCRIPTOR.message_types_by_name,
        **model_config_pb2.DESCRIPTOR.message_types_by_name,
    }
    for name, message in MESSAGES.items():
        if message.DESCRIPTOR.file.package == "inference":
            compare(message.DESCRIPTOR, public[name], seen)
    assert len(seen) > 150
    methods = {method.name for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    ours = MESSAGES["ServerLiveRequest"].DESCRIPTOR.file.services_by_name["GRPCInferenceService"].methods
    assert {method.name for method in ours} <= methods
    for method in ours:
        other = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method.name]
        assert (method.input_type.full_name, method.output_type.full_name) == (
            other.input_type.full_name,
            other.output_type.full_name,
        )


@pytest.mark.parametrize("package", ["v1", "v1alpha"])
def test_reflection_tells_of_services_and_their_messages(channel: grpc.Channel, package: str) -> None:
    def ask(**question: Any) -> Any:
        data = MESSAGES["ServerReflectionRequest"](**question).SerializeToString()
        call = channel.stream_stream(f"/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo")
        [answer] = call(iter([data]), timeout=20)
        return MESSAGES["ServerReflectionResponse"].FromString(answer)

    services = [each.name for each in ask(list_services="*").list_services_response.service]
    assert services[0] == "inference.GRPCInferenceService"
    pool = descriptor_pool.DescriptorPool()
    for name in {
        ask(file_containing_symbol=each).file_descriptor_response.file_descriptor_proto[0] for each in services
    }:
        pool.AddSerializedFile(name)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert service.methods_by_name["ModelInfer"].input_type.fields_by_name["model_name"].number == 1
    name = service.file.name
    assert ask(file_by_filename=name) == ask(file_by_filename=name)
    assert ask(file_by_filename=name).file_descriptor_response.file_descriptor_proto
    assert ask(all_extension_numbers_of_type="inference.ModelInferRequest").HasField("all_extension_numbers_response")
    for question in ({"file_by_filename": "x"}, {"file_containing_symbol": "inference.X"}, {}):
        assert ask(**question).error_response.error_code == 5
