"""When a node counts as lost. Pure: time comes in as `now_ns`."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """A node is lost after `misses` heartbeats in a row that did not come, one each `interval_ns`.

    One whose connections were refused or broke is lost after one.

    Raises InvalidValueError when a value is out of its range.
    """

    interval_ns: int = 500_000_000
    misses: int = 10

    def __post_init__(self) -> None:
        if self.interval_ns < 1:
            raise InvalidValueError("failure detector", "interval_ns", self.interval_ns, "a positive interval")
        if self.misses < 1:
            raise InvalidValueError("failure detector", "misses", self.misses, "at least 1")


class Detector:
    """Follows the heartbeats of nodes."""

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self._settings = settings or DetectorSettings()
        self._heard: dict[str, int] = {}
        self._suspected: dict[str, int] = {}
        self._dead: dict[str, str] = {}

    @property
    def watched(self) -> tuple[str, ...]:
        """The nodes that are followed."""
        return tuple(self._heard)

    def heard(self, node: str, now_ns: int) -> None:
        """A heartbeat came: the agent and its server are well. Also begins to watch a node."""
        self._heard[node] = now_ns
        self._suspected.pop(node, None)

    def suspect(self, node: str, now_ns: int) -> None:
        """A connection to a node was refused or broke; the next heartbeat clears it."""
        if node in self._heard:
            self._suspected.setdefault(node, now_ns)

    def died(self, node: str, reason: str) -> None:
        """It is known that the node is gone: its agent or its server ended."""
        if node in self._heard:
            self._dead.setdefault(node, reason)

    def forget(self, node: str) -> None:
        """Stop watching a node."""
        self._heard.pop(node, None)
        self._suspected.pop(node, None)
        self._dead.pop(node, None)

    def lost(self, now_ns: int) -> dict[str, str]:
        """The watched nodes that count as lost, with the reason."""
        found = {}
        silence_ns = self._settings.interval_ns * self._settings.misses
        for node, heard_ns in self._heard.items():
            if node in self._dead:
                found[node] = self._dead[node]
            elif now_ns - heard_ns > silence_ns:
                found[node] = f"no heartbeat for {(now_ns - heard_ns) / 1e9:.1f} s"
            elif node in self._suspected and now_ns - self._suspected[node] > self._settings.interval_ns:
                found[node] = "connections to it fail, and no heartbeat came since"
        return found
