"""Models whose weights lie on a device, or gave way there to others and wait in the host's memory.

What a launch needs beyond the free memory is taken from models that have no launch under way.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cotenant.execute.gpu.streams import StreamDevice

_log = logging.getLogger("cotenant.torch")
MIB = 1 << 20


class DeviceFullError(RuntimeError):
    """A launch, or a model, does not fit into the memory of its device."""


class StreamModel(Protocol):
    """What the executor needs of a `TorchModel`."""

    path: Path
    name: str
    device: str

    @property
    def weight_bytes(self) -> int:
        """Size of the weights."""

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ready to run ranges of units."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        """Submit units [start, end) to the calling thread's stream."""

    def move(self, device: str) -> None:
        """Take the weights to another device."""

    def close(self) -> None:
        """Let go of it."""


class Resident:
    """A model in the hands of an executor. It is closed, or leaves the device, when no launch is under way.

    `number` is its own, also among models of one tenant. Implements `Loaded`.
    """

    def __init__(self, number: int, model: StreamModel, on_close: Callable[[Resident], None]) -> None:
        self.number = number
        self.model = model
        self.used = 0
        """Rises with every use of any model: the smallest was used least recently."""
        self.urgent = False
        self._on_close = on_close
        self._launches = 0
        self._closing = self._is_closed = self._leaving = False
        self._lock = threading.Lock()  # held for moments: `begin` is called where nothing may block
        self._moving = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether no launch is under way."""
        return self._launches == 0

    def begin(self) -> bool:
        """A launch is on its way; never blocks. False when the model is closed."""
        with self._lock:
            if self._closing:
                return False
            self._launches += 1
            return True

    def end(self) -> None:
        """A launch has ended."""
        with self._lock:
            self._launches -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Take no more launches; let go of the model when those under way have ended."""
        with self._lock:
            self._closing = True
        self._close_if_idle()

    def bring(self, device: str, synchronize: Callable[[], None]) -> None:
        """Have the weights on the device. Only for who has begun a launch, or before there are any."""
        with self._lock:
            if not self._leaving and self.model.device == device:
                return
        with self._moving:
            if self.model.device != device:
                self.model.move(device)
                synchronize()  # launches on other streams may follow at once

    def evict(self, drop_graphs: Callable[[int], bool]) -> bool:
        """Give up graphs, which hold addresses of weights, and take the weights to the host, unless launches are under
        way. Gives whether anything was there.
        """
        if not self.is_idle:
            return False
        with self._moving:
            with self._lock:
                if self._launches or self._closing:
                    return False
                self._leaving = True  # a launch that begins now waits in `bring`
            try:
                has_freed = drop_graphs(self.number)
                if self.model.device != "cpu":
                    self.model.move("cpu")
                    has_freed = True
                return has_freed
            finally:
                self._leaving = False

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._launches or not self._closing or self._is_closed:
                return
            self._is_closed = True
        self._on_close(self)
        with self._moving:
            self.model.close()


class Residents:
    """The models that share the memory of a device. Thread-safe.

    `drop_graphs` gives up what was captured of the model of that number, and says whether there was something.
    """

    def __init__(self, device: StreamDevice, drop_graphs: Callable[[int], bool]) -> None:
        self._device = device
        self._drop_graphs = drop_graphs
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        self._all: dict[int, Resident] = {}
        self._lock = threading.Lock()

    def add(self, model: StreamModel) -> Resident:
        """Take a model in; its weights stay where they are."""
        with self._lock:
            resident = Resident(next(self._numbers), model, self.leave)
            self._all[resident.number] = resident
            return resident

    def leave(self, resident: Resident) -> None:
        """The model does not come back."""
        with self._lock:
            self._all.pop(resident.number, None)
        self._drop_graphs(resident.number)

    def bring(self, resident: Resident) -> None:
        """Have its weights on the device; it counts as used now."""
        resident.used = next(self._uses)
        resident.bring(self._device.name, self._device.synchronize)

    def with_room(self, resident: Resident, work: Callable[[], None], need: Callable[[], str]) -> None:
        """Do work for a model. While memory is short, an idle model gives its own, and the work is done again.

        Raises DeviceFullError when no other model has anything to give; `need` says what for.
        """
        gone: list[Resident] = []
        while not self._fits(work):
            if not self._evict_one(resident, gone):
                names = ", ".join(each.model.name for each in gone) or "none"
                raise DeviceFullError(
                    f"out of memory on {self._device.name}: no room for {need()} of model {resident.model.name!r}, "
                    f"which has {resident.model.weight_bytes / MIB:.1f} MiB of weights; idle models evicted: {names}"
                )

    def _fits(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            return False  # the tensors in the error's frames live as long as it does: it must go before the next try
        return True

    def _evict_one(self, resident: Resident, gone: list[Resident]) -> bool:
        """Take graphs and weights from the idle model that was not used for longest."""
        with self._lock:
            idle = [each for each in self._all.values() if each.is_idle and each is not resident and each not in gone]
        for each in sorted(idle, key=lambda one: one.used):
            if each.evict(self._drop_graphs):
                gone.append(each)
                _log.info(
                    "%s is full: model %r gives way to %r", self._device.name, each.model.name, resident.model.name
                )
                return True
        return False
