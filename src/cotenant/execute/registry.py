"""Executors: which one runs models, by the kind of the device and what keeps tenants apart there, and who makes it.

The one place that chooses. A package of a user joins by `register`, or by an entry point of the group `GROUP`; its
`isolation` is then one that `[device]` can ask for.
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
"""Nice value of the threads that run models: front-ends share the cores with them, and go first. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class ExecutorKind:
    """Who runs models on devices of `kind`, under one of these values of `isolation`.

    `opener` is "MODULE:ATTRIBUTE" of what makes the executor from the section `[device]`, the partitions of its lanes
    and their nice value, and raises ConfigError where there is no such device. `layout` is that of its `Layout`.
    """

    name: str
    kind: str
    isolation: tuple[str, ...]
    opener: str
    layout: str = "cotenant.execute.layout:CORES"

    def runs(self, section: DeviceSection) -> bool:
        """Whether this is what a configuration asks for."""
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
"""By name; the first that fits a configuration is taken."""


def register(new: ExecutorKind) -> None:
    """Let an executor be known. Raises InvalidValueError where another one has its name."""
    if EXECUTORS.setdefault(new.name, new) != new:
        raise InvalidValueError(f"executor of {new.opener}", "name", new.name, "one that no other executor has")


@cache
def _join() -> None:
    for found in registry.load_all(GROUP).values():
        register(found)


def executor_kind(section: DeviceSection, where: str = "[device]") -> ExecutorKind:
    """Who runs models as a configuration asks, of this package or another. Raises ConfigError when nobody does."""
    _join()
    for each in EXECUTORS.values():
        if each.runs(section):
            return each
    known = ", ".join(" or ".join(each.isolation) for each in EXECUTORS.values() if each.kind == section.kind)
    raise ConfigError(f"{where}: isolation is {section.isolation!r}, expected one of {known}")


def layout_of(section: DeviceSection, where: str = "[device]") -> Layout:
    """How the device of a configuration is divided. Raises ConfigError when nobody runs models there."""
    found: Layout = resolve_name(executor_kind(section, where).layout)
    return found


def open_executor(
    section: DeviceSection, partitions: Sequence[Share] = (), max_answer_bytes: int = MOST_ANSWER_BYTES
) -> ModelExecutor:
    """Make the executor of a configuration, its device divided into `partitions`, else as the section says.

    A launch with outputs of more than `max_answer_bytes` fails.

    Raises ConfigError when nobody runs models so, or there is no such device.
    """
    made: ModelExecutor = resolve_name(executor_kind(section).opener)(section, partitions, LANE_NICE)
    made.max_answer_bytes = max_answer_bytes
    return made
