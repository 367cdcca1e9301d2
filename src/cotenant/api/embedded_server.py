"""`cotenant.Server`: a server in the process of the program that uses it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from cotenant.errors import CotenantError
from cotenant.linux import require
from cotenant.repository.server_settings import settings_of
from cotenant.serve.frontend.front_ends import front_ends, stop_front_ends
from cotenant.serve.frontend.grpc_server import GrpcServer
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.serving import Serving
from cotenant.wire.api import Array, InferRequest, InferResult, not_answered
from cotenant.wire.client import InferReply


class EmbeddedServer:
    """Serves a repository from this process, over HTTP and gRPC and to `infer`. It serves as long as `with` lasts.

    `settings` are keys of `cotenant.toml`, as {"policy.name": "edf"}. Port 0 takes any free port, None the port of
    the settings. With `trace` events are recorded for `cotenant explain`. `stale` accepts a profile of models that
    changed since. Models run in worker processes, or with {"device.isolation": "thread"} in this process.

    >>> with cotenant.Server("models/") as server:  # doctest: +SKIP
    ...     reply = server.infer("resnet", {"image": image})
    ...     print(server.url, reply.outputs["scores"].argmax(), reply.took_s)

    Raises ConfigError or PlanError where the repository, the settings or the plan cannot be served.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        settings: Mapping[str, object] = MappingProxyType({}),
        http_port: int | None = 0,
        grpc_port: int | None = 0,
        trace: bool = False,
        stale: bool = False,
    ) -> None:
        from cotenant.execute.gpu.hardware_queues import use_all_queues

        require("cotenant.Server")
        use_all_queues(os.environ)
        self._root = Path(repository)
        ports = {"server.http_port": http_port, "server.grpc_port": grpc_port}
        self.settings = settings_of(
            self._root, {**settings, **{key: port for key, port in ports.items() if port is not None}}
        )
        self._records, self._stale = trace, stale
        self._serving: Serving | None = None
        self._ports: dict[str, int] = {}
        self._front_ends: list[HttpServer | GrpcServer] = []
        self._is_stopped = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<cotenant.Server of {str(self._root)!r}, {'ready' if self.ready else 'not ready'}>"

    def start(self) -> None:
        """Load the models, and accept queries. `with` does it. A server starts once.

        A model that cannot be loaded is left out: `models` says so, and the log why. Raises CotenantError for a port
        that is not free, and for a second start.
        """
        if self._serving is not None:
            raise CotenantError("the server was started before: make another cotenant.Server")
        self._serving = serving = Serving(self._root, self.settings, stale=self._stale)
        try:
            servers = front_ends(serving.server, self.settings.server, serving.loop)
            for name, each in servers.items():
                self._ports[name] = each.start()
                self._front_ends.append(each)
            serving.start(records=self._records)
            serving.follow_plan()
        except BaseException:
            self.stop()
            raise

    def stop(self, drain_s: float | None = None) -> None:
        """Answer the queries that are inside, for `drain_s` seconds at most, and stop; by default as the settings say.

        A second call does nothing.
        """
        if self._serving is None or self._is_stopped:
            return
        self._is_stopped, self._ports = True, {}
        until_s = time.monotonic() + (self.settings.server.drain_s if drain_s is None else drain_s)
        self._serving.stop(until_s)
        stop_front_ends(self._front_ends, until_s)
        self._serving.close()

    @property
    def url(self) -> str:
        """The address of HTTP, for `cotenant.Client`. Raises CotenantError where the server does not run."""
        return f"http://{self.settings.server.host}:{self._port('http_port')}"

    @property
    def grpc_address(self) -> str:
        """The address of gRPC, as HOST:PORT. Raises CotenantError where the server does not run."""
        return f"{self.settings.server.host}:{self._port('grpc_port')}"

    @property
    def ready(self) -> bool:
        """Whether the server accepts queries."""
        return bool(self._ports) and self._running.server.ready()

    @property
    def models(self) -> dict[str, str]:
        """The state of each model and application: READY or UNAVAILABLE."""
        index = self._running.server.index(ready_only=False)  # a model is ready where one of its versions is
        ready = {entry.name for entry in index if entry.state == "READY"}
        return {entry.name: "READY" if entry.name in ready else entry.state for entry in index}

    def outcomes(self, model: str) -> dict[str, int]:
        """How many queries of a model or application ended in each way, such as "answered" or "late"."""
        server = self._running.server
        counted = server.counters.by_tenant.get(server.names.find(model, "").counted_as)
        return {} if counted is None else {each.value: count for each, count in counted.outcomes.items() if count}

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> InferReply:
        """Send one query without a connection, and wait for its outputs.

        The query is scheduled like queries of the network, under the SLO of its tenant. `inputs` are arrays of the
        declared types and shapes; texts are object arrays of `bytes`. Any thread may call this. Raises ServeError where
        the query is refused, dropped or fails, with the reason.
        """
        server = self._running.server
        found: list[InferResult] = []
        ended = threading.Event()

        def done(result: InferResult) -> None:
            found.append(result)
            ended.set()

        arrays = {name: np.array(array) for name, array in inputs.items()}  # copies: merged queries are checked later
        timeout_ns = None if timeout_s is None else round(timeout_s * 1e9)
        begin = time.monotonic()
        server.submit(InferRequest(model, arrays, version, priority=priority, timeout_ns=timeout_ns), done)
        ended.wait()
        took_s = time.monotonic() - begin
        [result] = found
        if result.status is not None:
            raise not_answered(result, ready=server.ready())
        return InferReply({name: np.array(array) for name, array in result.outputs.items()}, result.query, took_s)

    @property
    def _running(self) -> Serving:
        if self._serving is None:
            raise CotenantError("the server does not run: use 'with cotenant.Server(...) as server'")
        return self._serving

    def _port(self, name: str) -> int:
        if name not in self._ports:
            raise CotenantError("the server does not run: use 'with cotenant.Server(...) as server'")
        return self._ports[name]
