"""Registry of executors: chooses one by the kind of device and the isolation of tenants.

Another package adds an executor by `register`, or by an entry point of the group `GROUP`. A configuration can then name
its `isolation` in `[device]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name

from cotenant import registry
from cotenant.config import DeviceSection
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute.protocol import MOST_ANSWER_BYTES, Layout, ModelExecutor
from cotenant.work import CPU, Share

GROUP = "cotenant.executors"
LANE_NICE = 5
"""Nice value of threads that run models: front ends, which share the cores, run before them. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class ExecutorKind:
    """An executor for devices of `kind` under one of these values of `isolation`.

    `factory` ("MODULE:ATTRIBUTE") makes the executor from the section `[device]`, the partitions of its lanes and their
    nice value. It raises ConfigError when the device is missing. `layout` names the `Layout` of the device in the same
    way.
    """

    name: str
    kind: str
    isolation: tuple[str, ...]
    factory: str
    layout: str = "cotenant.execute.layout:CORES"

    def runs(self, section: DeviceSection) -> bool:
        """Whether a configuration selects this executor."""
        return self.kind == section.kind and section.isolation in self.isolation


EXECUTORS: dict[str, ExecutorKind] = {
    each.name: each
    for each in (
        ExecutorKind("workers", CPU, ("process",), "cotenant.execute.worker.executor:open_workers"),
        ExecutorKind("threads", CPU, ("thread",), "cotenant.execute.threads.executor:open_threads"),
        ExecutorKind(
            "streams",
            "cuda",
            ("process", "thread"),
            "cotenant.execute.gpu.configured:open_executor",
            "cotenant.execute.gpu.configured:SMS",
        ),
    )
}
"""By name. The first one that fits a configuration is used."""


def register(new: ExecutorKind) -> None:
    """Add an executor. Raises InvalidValueError when another one has its name."""
    if EXECUTORS.setdefault(new.name, new) != new:
        raise InvalidValueError(f"executor of {new.factory}", "name", new.name, "one that no other executor has")


@cache
def _join() -> None:
    for found in registry.load_all(GROUP).values():
        register(found)


def executor_kind(section: DeviceSection, where: str = "[device]") -> ExecutorKind:
    """The executor of a configuration. Raises ConfigError when none fits."""
    _join()
    for each in EXECUTORS.values():
        if each.runs(section):
            return each
    known = ", ".join(" or ".join(each.isolation) for each in EXECUTORS.values() if each.kind == section.kind)
    raise ConfigError(f"{where}: isolation is {section.isolation!r}, expected one of {known}")


def layout_of(section: DeviceSection, where: str = "[device]") -> Layout:
    """The layout of the device of a configuration. Raises ConfigError when no executor fits."""
    found: Layout = resolve_name(executor_kind(section, where).layout)
    return found


def open_executor(
    section: DeviceSection, partitions: Sequence[Share] = (), max_answer_bytes: int = MOST_ANSWER_BYTES
) -> ModelExecutor:
    """Make the executor of a configuration. The device is divided into `partitions`, by default as the section says.

    A launch with outputs of more than `max_answer_bytes` fails. Raises ConfigError when no executor fits, or the device
    is missing.
    """
    made: ModelExecutor = resolve_name(executor_kind(section).factory)(section, partitions, LANE_NICE)
    made.max_answer_bytes = max_answer_bytes
    return made
