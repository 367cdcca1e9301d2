"""Server of one node: a `cotenant serve` process with only this node's part of the plan.

Its repository is a folder of links to the models of the part, so that it loads no other model. Independent of Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from msgspec.structs import replace

from cotenant.cluster.node_home import NodeHome, remove_orphans
from cotenant.cluster.types import Address, ClusterError, NodePlan, NodeReport, Served
from cotenant.config import load_server_config
from cotenant.files import toml_text, write_whole
from cotenant.repository import MEASURED, SERVER_FILE, STATE_FOLDER
from cotenant.serve.server_process import StartError, await_ready, spawn, stop_process
from cotenant.techniques.partitions.plan.file import PlanFile, Request, plan_text
from cotenant.techniques.partitions.plan.types import Plan
from cotenant.techniques.partitions.serve.plan_lanes import DIVIDED
from cotenant.techniques.partitions.serve.plan_names import slos_of

LOAD_LIMIT_S = 300.0
_CHANGE_LIMIT_S = 120.0
_ADMIN_HOST = "127.0.0.1"
"""Address for loads and unloads: only the agent on the same machine may use it."""
_PROBE_S = 2.0
STOP_MARGIN_S = 15.0
"""Seconds that a server may need to stop beyond its `drain_s`."""
_POLL_S = 0.05
PLAN_FILE = "plan.toml"


class NodeServer:
    """Manager of a node's server process. Changes are serialised; `report` and `stop` are not blocked by them.
    `repository`: the complete model repository, present on every node. `cores`: cores of the node."""

    def __init__(self, repository: Path, cores: Sequence[int], host: str) -> None:
        self._repository = repository.resolve()
        self._cores = tuple(cores)
        self._host = host
        remove_orphans()
        self._folder = NodeHome()
        self._home = self._folder.path
        self._models = self._home / "models"
        self._models.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None
        self._admin_port: int | None = None
        self._loaded: tuple[str, ...] = ()
        self._stop_s = STOP_MARGIN_S
        self._changing = threading.Lock()
        self._starter = ThreadPoolExecutor(1, "cotenant-starter")
        """Its thread starts servers. A server ends with that thread, which lives as long as this object."""

    def prepare(self, part: NodePlan) -> Address:
        """Load the models of a part in addition to the served models; start the server if necessary.

        Raises ClusterError with the reason if the server does not start or a model cannot be loaded.
        """
        with self._changing:
            if self._address is None:
                return self._start(part)
            for model in part.models:
                if model not in self._loaded:
                    self._link(model)
                    self._post(f"/v2/repository/models/{quote(model, safe='')}/load", LOAD_LIMIT_S)
                    self._loaded = (*self._loaded, model)
            return self._address

    def apply(self, part: NodePlan) -> None:
        """Serve by the plan of a prepared part. Returns when the server reports this plan.

        Raises ClusterError if it does not within the time limit.
        """
        with self._changing:
            if self._runs(part):
                return
            process = self._process
            if process is None:
                raise ClusterError("the server is not running")
            self._write(part)
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + _CHANGE_LIMIT_S
            while not self._runs(part):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise ClusterError(f"the server did not run its new plan; its log is {self._log}")
                time.sleep(_POLL_S)

    def release(self, part: NodePlan) -> None:
        """Unload all models outside the part. No query for them may be outstanding."""
        with self._changing:
            self._loaded = tuple(model for model in self._loaded if model in part.models)
            for link in sorted(self._models.iterdir()):  # a linked model may be loaded even after an error
                if link.is_symlink() and link.name not in part.models:
                    self._post(f"/v2/repository/models/{quote(link.name, safe='')}/unload", LOAD_LIMIT_S)
                    link.unlink()

    def report(self) -> NodeReport:
        """State and counters of the server."""
        process, address = self._process, self._address
        if process is None or address is None:
            return NodeReport(None, agent_pid=os.getpid())
        status = process.poll()
        if status is not None:
            return NodeReport(None, f"its server ended with status {status}; the log is {self._log}", ended=True)
        try:
            statistics = json.loads(self._get("/v2/models/stats", _PROBE_S))
            plan = self._plan()
        except OSError as error:
            return NodeReport(None, f"its server does not answer: {error}")
        served: dict[str, Served] = {}
        for entry in statistics["model_stats"]:
            known = served.get(entry["name"], Served(0, 0))
            queries = entry["inference_stats"]["success"]["count"]
            served[entry["name"]] = Served(known.rows + entry["inference_count"], known.queries + queries)
        return NodeReport(address, "", False, served, process.pid, os.getpid(), plan)

    def stop(self) -> None:
        """Drain and stop the server, even during a change, and remove all files. Safe to repeat."""
        self._end()
        self._starter.shutdown()
        self._folder.remove()

    def pause(self) -> None:
        """Drain and stop the server; `prepare` starts it again."""
        with self._changing:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._address, self._loaded = None, ()
        if process is not None:
            stop_process(process, self._stop_s)
        for link in self._models.iterdir():
            if link.is_symlink():
                link.unlink()

    @property
    def _log(self) -> Path:
        return self._home / "server.log"

    def _start(self, part: NodePlan) -> Address:
        (self._models / STATE_FOLDER).mkdir(exist_ok=True)
        if (self._repository / SERVER_FILE).exists():
            text = node_config((self._repository / SERVER_FILE).read_text(encoding="utf-8"))
            (self._models / SERVER_FILE).write_text(text, encoding="utf-8")
        self._stop_s = load_server_config(self._models / SERVER_FILE).server.drain_s + STOP_MARGIN_S
        for path_of in MEASURED:
            source, link = path_of(self._repository), path_of(self._models)
            if source.exists() and not link.exists():
                link.symlink_to(source)
        for model in part.models:
            self._link(model)
        self._write(part)
        words = ["serve", str(self._models), "--no-trace", "--host", self._host]
        words += ["--plan", str(self._home / PLAN_FILE), "--cores", ",".join(map(str, self._cores))]
        words += ["--frontends", "0", "--admin-port", "0", "--set", f"server.admin_host={_ADMIN_HOST}"]
        words += ["--stale"]  # the head has already checked for stale profiles
        try:
            server = await_ready(self._starter.submit(spawn, *words, log=self._log).result(), self._log)
        except (StartError, OSError) as error:
            raise ClusterError(str(error)) from None
        failed = sorted(name for name, state in server.models.items() if state != "READY")
        if failed:
            stop_process(server.process, self._stop_s)
            raise ClusterError(f"model {failed[0]!r} cannot be served; the log is {self._log}")
        self._process = server.process
        self._address = Address(self._host, server.http_port, server.grpc_port)
        self._admin_port = server.admin_port
        self._loaded = part.models
        return self._address

    def _link(self, model: str) -> None:
        link = self._models / model
        if not link.is_symlink():
            link.symlink_to(self._repository / model, target_is_directory=True)

    def _write(self, part: NodePlan) -> None:
        """Write the plan file of this node: its device, the rates of its part, and the SLOs of its server.

        The gateway enforces the budgets of stages.
        """
        slos = slos_of(self._repository)
        loads = tuple(replace(load, slo_ns=slos.get(load.tenant, load.slo_ns)) for load in part.loads)
        file = PlanFile(Request(loads, (part.kind,)), Plan((part.plan,), DIVIDED), headroom=0.0)
        write_whole(self._home / PLAN_FILE, plan_text(file).encode())

    def _plan(self) -> str:
        """Digest of the plan that the server reports. Raises OSError if it does not answer in time."""
        return str(json.loads(self._get("/v2/cotenant/plan", _PROBE_S))["digest"])

    def _runs(self, part: NodePlan) -> bool:
        try:
            return self._plan() == part.plan.digest
        except OSError:  # a server may be slow during a change: unknown, try again
            return False

    def _get(self, path: str, timeout_s: float) -> bytes:
        return self._ask(path, None, timeout_s)

    def _post(self, path: str, timeout_s: float) -> None:
        try:
            self._ask(path, b"{}", timeout_s)
        except urllib.error.HTTPError as error:
            raise ClusterError(f"{path}: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise ClusterError(f"{path}: the server does not answer ({error})") from None

    def _ask(self, path: str, body: bytes | None, timeout_s: float) -> bytes:
        if self._address is None:
            raise ClusterError("the server is not running")
        url = f"http://{_ADMIN_HOST}:{self._admin_port}{path}"
        with _direct().open(urllib.request.Request(url, data=body), timeout=timeout_s) as answer:
            content: bytes = answer.read()
            return content


def node_config(text: str) -> str:
    """Return the repository's `cotenant.toml` without the keys that the cluster sets: addresses, cores, plan."""
    table = tomllib.loads(text)
    table.pop("plan", None)
    decided = {"server": ("host", "http_port", "grpc_port", "admin_port", "admin_host"), "device": ("cores", "lanes")}
    for section, keys in decided.items():
        for key in keys:
            table.get(section, {}).pop(key, None)
    return toml_text(table)


def _direct() -> urllib.request.OpenerDirector:
    """URL client without a proxy: nodes are connected directly."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
