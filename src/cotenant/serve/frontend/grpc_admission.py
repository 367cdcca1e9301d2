"""Whether a request over gRPC is taken, as far as that is known before its tensors are decoded."""

from __future__ import annotations

from cotenant.serve.frontend.grpc_frames import START_BYTES
from cotenant.serve.frontend.pending_bytes import COUNTED_FROM_BYTES, Held, PendingBytes
from cotenant.wire.api import Infer, ServeError
from cotenant.wire.codec import Limits
from cotenant.wire.codec_http import inflated_start
from cotenant.wire.skim import model_of


class Incoming:
    """One request: the model that it names, once that is known, and the count of its bytes, if they are counted."""

    __slots__ = ("arrival_ns", "held", "name")

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.held: Held | None = None
        self.name: tuple[str, str] | None = None
        """Model and version."""

    @property
    def model(self) -> str:
        """The model, "" while it is not known."""
        return self.name[0] if self.name is not None else ""

    def let_go(self) -> None:
        """The request is over."""
        held, self.held = self.held, None
        if held is not None:
            held.let_go()


class GrpcAdmission:
    """Counts the bytes of requests, and refuses those that the backend would refuse whatever is in them."""

    def __init__(self, backend: Infer, limits: Limits, pending: PendingBytes) -> None:
        self._backend = backend
        self._budget = limits.pending_bytes
        self._pending = pending

    def count(self, incoming: Incoming, nbytes: int) -> None:
        """Count bytes of a request that have come, or are to come. Raises ServeError where there is no room."""
        try:
            if incoming.held is not None:
                incoming.held.grow(nbytes)
            elif nbytes >= COUNTED_FROM_BYTES:
                incoming.held = self._pending.hold(incoming.model, nbytes, self._budget)
        except ServeError as error:
            self._backend.refused(incoming.model, incoming.arrival_ns, error)
            raise

    def start(self, incoming: Incoming, encoding: bytes | None, start: bytes) -> None:
        """Look for the model at the start of a message that is large, or has not come whole; `encoding` is that of a
        compressed one. Raises ServeError as `admit` does."""
        if incoming.name is None:
            if encoding is not None:
                start = inflated_start(encoding, start, START_BYTES)
            name = model_of(start)
            if name is not None:
                self.admit(incoming, *name)

    def admit(self, incoming: Incoming, model: str, version: str) -> None:
        """The request names its model. Raises ServeError where that takes none now, or has no room for its bytes."""
        if incoming.name == (model, version):
            return
        incoming.name = model, version
        try:
            refused = self._backend.refusal(model, version)
            if refused is not None:
                raise refused
            if incoming.held is not None:
                incoming.held.move(model)
        except ServeError as error:
            self._backend.refused(model, incoming.arrival_ns, error)
            raise
