"""`cotenant.Server` and `cotenant.Client`: one process that serves, and asks itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cotenant
from cotenant.errors import CotenantError
from cotenant.repository import trace_path
from cotenant.wire.api import ServeError
from cotenant.wire.encode import ClientError
from repositories import X, write_good

IN_THREADS = {"device.isolation": "thread"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good(tmp_path_factory.mktemp("embedded") / "models", "chooser", "two")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[cotenant.Server]:
    with cotenant.Server(root, settings=IN_THREADS) as server:
        yield server


def test_a_client_is_answered_over_one_connection(server: cotenant.Server) -> None:
    assert server.ready
    assert server.models == {"chooser": "READY", "two": "READY"}
    with cotenant.Client(server.url) as client:
        assert client.ready()
        port = client._connection.sock.getsockname()
        replies = [client.infer("two", X) for _ in range(2)]
        assert client._connection.sock.getsockname() == port
        assert client.metadata("two")["inputs"][0]["name"] == "x"
    assert replies[0].query < replies[1].query
    assert replies[0].took_s > 0
    assert server.outcomes("two")["answered"] >= 2
    assert server.outcomes("chooser").get("answered", 0) == 0
    assert np.array_equal(replies[0].outputs["y"], server.infer("two", X).outputs["y"])


def test_versions_and_threads_in_process(server: cotenant.Server) -> None:
    found: dict[str, np.ndarray] = {}

    def ask(version: str) -> None:
        found[version] = server.infer("two", X, version=version, timeout_s=20.0).outputs["y"]

    threads = [threading.Thread(target=ask, args=(version,)) for version in ("1", "2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.allclose(found["2"], 2 * found["1"])


def test_errors_are_the_servers_own_sentences(server: cotenant.Server) -> None:
    with pytest.raises(ServeError, match="'three'"):
        server.infer("three", X)
    with pytest.raises(ServeError, match="out of data bounds"):
        server.infer("chooser", {"index": np.array([12])})  # fails as it runs
    with cotenant.Client(server.url) as client, pytest.raises(ClientError, match="'three'"):
        client.infer("three", X)


def test_a_client_connects_again(server: cotenant.Server) -> None:
    client = cotenant.Client(server.url)
    assert client.ready()
    client._connection.sock.shutdown(2)  # as if the server had closed the idle connection
    assert client.infer("two", X).outputs["y"].shape == (1, 8)
    client.close()
    assert client.ready()
    client.close()


def test_before_and_after_it_serves(root: Path) -> None:
    server = cotenant.Server(root, settings=IN_THREADS, trace=True)
    assert not server.ready
    with pytest.raises(CotenantError, match="does not run"):
        server.infer("two", X)
    with pytest.raises(CotenantError, match="does not run"):
        _ = server.url
    with server:
        url = server.url
        assert server.grpc_address.startswith("127.0.0.1:")
        assert server.infer("two", X).query == 0
    assert not server.ready
    server.stop()
    assert trace_path(root).exists()
    with pytest.raises(CotenantError, match="was started before"):
        server.start()
    client = cotenant.Client(url)
    assert not client.ready()
    with pytest.raises(ClientError, match="is the server running"):
        client.infer("two", X)


def test_a_port_that_is_taken(root: Path, server: cotenant.Server) -> None:
    taken = int(server.url.rpartition(":")[2])
    other = cotenant.Server(root, settings=IN_THREADS, http_port=taken)
    with pytest.raises(CotenantError, match="cannot listen"):
        other.start()
    assert not other.ready
