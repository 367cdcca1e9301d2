"""Metrics and loads: which address serves them, and to requests from where."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest

from cotenant.serve.frontend.admin_access import Access, access_at, admin_refusal, is_local
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_routes import ADMIN, Endpoint, parse_path
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.wire.oip import MESSAGES, SERVICE
from fake_backend import FakeBackend

ASKED = {
    "/metrics": None,
    "/v2/cotenant/plan": None,
    "/v2/repository/models/tiny/load": b"{}",
    "/v2/repository/models/tiny/unload": b"{}",
}
OPEN_TO_ALL = {"/v2": None, "/v2/health/ready": None, "/v2/models/stats": None, "/v2/repository/index": b"{}"}


def ask(port: int, path: str, body: bytes | None, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module", params=list(Access))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Access, int]]:
    backend = FakeBackend()
    server = HttpServer(backend, port=0, access=request.param)
    yield request.param, server.start()
    server.stop(0)
    backend.close()


def test_the_paths_asked_for_here_are_all_there_are() -> None:
    assert {parse_path(path.encode()).endpoint for path in ASKED} == ADMIN
    assert not {parse_path(path.encode()).endpoint for path in OPEN_TO_ALL} & ADMIN
    assert Endpoint.INFER not in ADMIN


def test_a_closed_address_serves_models_alone(served: tuple[Access, int]) -> None:
    access, port = served
    for path, body in ASKED.items():
        status, told = ask(port, path, body)
        assert (status == 403) is (access is Access.CLOSED), (path, status)
        if status == 403:
            assert "--admin-port" in json.loads(told)["error"]
    for path, body in OPEN_TO_ALL.items():
        assert ask(port, path, body)[0] == 200


def test_pages_of_other_sites_administer_nothing(served: tuple[Access, int]) -> None:
    access, port = served
    for path, body in ASKED.items():
        assert ask(port, path, body, Origin="https://attacker.example")[0] == 403
        assert ask(port, path, body, Origin="null")[0] == 403
        same = {"Origin": f"http://127.0.0.1:{port}"}
        assert (ask(port, path, body, **same)[0] == 403) is (access is Access.CLOSED)
        # A name of the attacker's that stands for this machine (DNS rebinding): page and request are of one site.
        rebound = {"Host": f"attacker.example:{port}", "Origin": f"http://attacker.example:{port}"}
        assert (ask(port, path, body, **rebound)[0] == 403) is (access is not Access.OPEN)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("LocalHost", True),
        ("a.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback_addresses_serve_everything_to_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local
    assert access_at(host) is (Access.LOCAL if local else Access.CLOSED)


@pytest.mark.parametrize("host", [b"127.0.0.1:8000", b"localhost", b"[::1]:8000", b"[::1]", b"LOCALHOST:1"])
def test_names_of_this_machine_with_and_without_a_port(host: bytes) -> None:
    assert admin_refusal(Access.LOCAL, ((b"host", host),)) == ""
    assert admin_refusal(Access.LOCAL, ((b"host", host.partition(b":")[0] + b".example:8000"),))


@pytest.mark.parametrize("access", [Access.CLOSED, Access.LOCAL])
def test_grpc_loads_where_the_address_is_not_closed(access: Access) -> None:
    backend = FakeBackend()
    server = GrpcServer(backend, port=0, access=access)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.start()}") as channel:
            for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
                call = channel.unary_unary(f"/{SERVICE}/{method}")
                message = MESSAGES[f"{method}Request"](model_name="tiny").SerializeToString()
                if access is Access.LOCAL:
                    call(message, timeout=20)
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    call(message, timeout=20)
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            channel.unary_unary(f"/{SERVICE}/ModelStatistics")(b"", timeout=20)
    finally:
        server.stop(0)
        backend.close()
