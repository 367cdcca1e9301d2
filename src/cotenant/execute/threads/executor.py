"""The executor on CPU cores: runs launches on threads of this process, with onnxruntime, or torch for `.pt2`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from typing_extensions import override

from cotenant.config import DeviceSection
from cotenant.core.actions import Launch
from cotenant.execute.base import BaseExecutor
from cotenant.execute.launch_runner import LaunchRunner
from cotenant.execute.protocol import Loaded, LoadSpec, ModelExecutor, ModelSource, OnEnd, OnExpanded
from cotenant.execute.runner import Runner
from cotenant.execute.source import opened_by
from cotenant.execute.threads.lanes import Lane
from cotenant.execute.warm import warm_up
from cotenant.work import Share


class ThreadExecutor(BaseExecutor):
    """Runs launches on pinned lanes; tensors of a batch stay in this process between its segments.

    A launch that raises fails alone, with the reason. A batch may run as several tasks, and launches may be expanded.
    """

    has_tasks = True

    def __init__(self, lane_nice: int = 0) -> None:
        super().__init__()
        self._lane_nice = lane_nice
        self._models: dict[str, Runner] = {}
        self._lanes: dict[Share, Lane] = {}
        self._launches = LaunchRunner(self._batches)

    def load(self, tenant: str, model: Runner | ModelSource, spec: LoadSpec) -> Loaded:
        """Open the model and prepare its sessions. Its memory is not limited."""
        runner = opened_by(model)
        try:
            for threads, ranges in spec.sessions:
                runner.prepare(ranges, threads)
        except Exception:
            runner.close()
            raise
        return runner

    def prepare(self, model: Loaded, spec: LoadSpec) -> None:
        """Prepare the sessions of `spec`, and run each once."""
        runner = cast(Runner, model)
        for threads, ranges in spec.sessions:
            runner.prepare(ranges, threads)
            warm_up(runner, ranges, threads, spec.shapes[0])

    def keep(self, model: Loaded, spec: LoadSpec) -> None:
        """Unload sessions for other threads than those of `spec`."""
        cast(Runner, model).keep([threads for threads, _ in spec.sessions])

    def add_model(self, tenant: str, model: Loaded) -> None:
        """Let launches of the tenant run this model. `urgent` has no effect on cores: the policy decides the order."""
        with self._lock:
            self._models[tenant] = cast(Runner, model)  # the result of `load`

    def remove_model(self, tenant: str) -> None:
        """Forget the model of a tenant."""
        with self._lock:
            self._models.pop(tenant, None)

    def _start(self, launch: Launch, on_end: OnEnd) -> None:
        with self._lock:
            lane = self._lanes.get(launch.share)
            if lane is None:
                lane = self._lanes[launch.share] = Lane(launch.share, self._lane_nice)
            model = self._models.get(launch.work.tenant)
        batch = self._batches.try_begin(launch)
        lane.put(partial(self._launches.run, launch, launch.share, model, batch, self._batches.finish, on_end))

    @override
    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        return self._launches.expand(launch, share, on_expanded)

    @override
    def close(self, until_s: float | None = None) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close(until_s)
        super().close(until_s)


def open_threads(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    """An executor on threads of this process; launches may name any cores."""
    return ThreadExecutor(lane_nice)
