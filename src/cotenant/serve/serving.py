"""A server with its event loop, trace recorder, plan runner and CPU latency request."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from cotenant.config import ServerConfig
from cotenant.execute.layout import cores_alone, device_cores, lanes_of
from cotenant.policies.registry import policy_text
from cotenant.profiles.profile_file import launch_ns_of
from cotenant.repository import model_names, profile_path, trace_path
from cotenant.serve.engine.cpu_latency_qos import open_cpu_latency_qos
from cotenant.serve.engine.loop import ServeLoop
from cotenant.serve.recorder import Recorder
from cotenant.serve.services import OpenedPlan, plan_files

_TRACE_LIMIT_BYTES = 1 << 30
_REPLANNER_S = 1.0
"""Seconds that a stop waits for a running planner."""
_log = logging.getLogger("cotenant.server")


class Serving:
    """A repository in service, from `start` to `stop` and `close`. The caller attaches front-ends.

    Raises ConfigError, PlanError or CotenantError when the repository, its settings or its plan cannot be served.
    """

    def __init__(self, repository: Path, settings: ServerConfig, *, stale: bool) -> None:
        from cotenant.measure.group_models import resolved
        from cotenant.serve.server import Server

        model_names(repository)  # raises for a bad path before any file is written there
        laid = _laid_out(settings, repository, stale=stale)
        lanes = laid.lanes.lanes if laid else lanes_of(settings.device, device_cores(settings.device))
        settings = msgspec.structs.replace(settings, policy=resolved(repository, settings, lanes))
        self.settings = settings
        self.loop = ServeLoop()
        self.loop.start()
        self.server = Server(repository, settings, plan=laid.lanes if laid else None, readers=self.loop)
        self._is_planned = laid is not None
        self._replanner = plan_files().follow(self.server, laid, settings.plan, stale=stale) if laid else None
        self._cpu_latency_qos = open_cpu_latency_qos()
        self._recorder: Recorder | None = None

    def start(self, *, records: bool) -> None:
        """Load the models and accept queries."""
        server = self.server
        if records:
            path = trace_path(server.root)
            self._recorder = Recorder(
                path,
                server.policy,
                server.machine,
                launch_ns=launch_ns_of(profile_path(server.root)),
                limit_bytes=_TRACE_LIMIT_BYTES,
                core_time=server.processor_time.others.read,
            )
        beside = self._recorder, self._replanner, self._cpu_latency_qos
        server.start(*[each for each in beside if each is not None])

    def follow_plan(self) -> None:
        """Start changing over to new plans, if a plan is served."""
        if self._replanner is not None:
            self._replanner.start()

    def report(self) -> dict[str, Any]:
        """Policy, plan and model states for the line that reports the server as ready."""
        found: dict[str, Any] = {"policy": policy_text(self.server.policy)}
        if self._is_planned:
            found["plan"] = {"file": self.settings.plan.file, "device": self.settings.plan.device}
        states: dict[str, str] = {}
        for entry in self.server.index(ready_only=False):  # a model is ready where one of its versions is
            states[entry.name] = entry.state if states.get(entry.name) != "READY" else "READY"
        found["models"] = states
        return found

    def hang_up(self) -> None:
        """Handle SIGHUP: reload the plan file."""
        if self._replanner is not None:
            self._replanner.reload()
            return
        _log.info("SIGHUP ignored: no plan is served, so there is no file to reload; reload models through the API")

    def stop(self, until_s: float) -> bool:
        """Drain the server until `until_s` of the monotonic clock. Returns whether all launches have ended."""
        if self._replanner is not None:
            self._replanner.stop(min(_REPLANNER_S, max(0.0, until_s - time.monotonic())))
        return self.server.stop(until_s)

    def close_trace(self) -> None:
        """Write the remaining events of the trace."""
        if self._recorder is not None:
            self._recorder.close()

    def close(self) -> None:
        """End the loop, the recorder and the CPU latency request. Call when no component needs the loop."""
        self.loop.stop()
        self.close_trace()
        if self._cpu_latency_qos:
            self._cpu_latency_qos.close()


def _laid_out(settings: ServerConfig, repository: Path, *, stale: bool) -> OpenedPlan | None:
    """The part of the plan for this machine, on its cores; None without a plan. Raises ConfigError or PlanError."""
    if settings.plan.file is None:
        return None
    cores = cores_alone(settings.device, "plans are served")
    return plan_files().open(settings.plan, cores, repository, stale=stale)
