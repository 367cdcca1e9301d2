"""Admission of gRPC requests before their tensors are decoded: memory budget and gates."""

from __future__ import annotations

from cotenant.serve.frontend.grpc_frames import START_BYTES
from cotenant.serve.frontend.pending_bytes import COUNTED_FROM_BYTES, Held, PendingBytes
from cotenant.wire.api import Infer, ServeError
from cotenant.wire.codec import Limits
from cotenant.wire.codec_http import inflated_start
from cotenant.wire.skim import model_of


class Incoming:
    """Request being received: its model, once known, and its counted bytes, if any."""

    __slots__ = ("arrival_ns", "held", "name")

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.held: Held | None = None
        self.name: tuple[str, str] | None = None
        """Model and version; None while unknown."""

    @property
    def model(self) -> str:
        """Model name; "" while unknown."""
        return self.name[0] if self.name is not None else ""

    def release(self) -> None:
        """Release the counted bytes, as the request is over."""
        held, self.held = self.held, None
        if held is not None:
            held.release()


class GrpcAdmission:
    """Admission control: counts bytes of requests, and refuses requests at a shut gate."""

    def __init__(self, backend: Infer, limits: Limits, pending: PendingBytes) -> None:
        self._backend = backend
        self._budget = limits.pending_bytes
        self._pending = pending

    def count(self, incoming: Incoming, nbytes: int) -> None:
        """Count received or announced bytes of a request. Raises ServeError (UNAVAILABLE) if there is no room."""
        try:
            if incoming.held is not None:
                incoming.held.grow(nbytes)
            elif nbytes >= COUNTED_FROM_BYTES:
                incoming.held = self._pending.hold(incoming.model, nbytes, self._budget)
        except ServeError as error:
            self._backend.refused(incoming.model, incoming.arrival_ns, error)
            raise

    def start(self, incoming: Incoming, encoding: bytes | None, start: bytes) -> None:
        """Find the model in the first bytes of a large or incomplete message, and admit the request. `encoding`:
        compression of the message, if any. Raises ServeError as `admit` does."""
        if incoming.name is None:
            if encoding is not None:
                start = inflated_start(encoding, start, START_BYTES)
            name = model_of(start)
            if name is not None:
                self.admit(incoming, *name)

    def admit(self, incoming: Incoming, model: str, version: str) -> None:
        """Admit a request of a known model. Raises ServeError if its gate is shut or there is no room."""
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
