"""The standard health service's stream of states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cotenant.serve.frontend.grpc_call import HEADERS, Call, Packed, parse, unpacking
from cotenant.serve.frontend.grpc_control import health
from cotenant.serve.frontend.h2_connection import H2Stream
from cotenant.wire.api import Control, ServeError, Status
from cotenant.wire.codec import Limits, bad
from cotenant.wire.codec_http import at_once
from cotenant.wire.oip import HEALTH_SERVICE, MESSAGES

WATCH = f"/{HEALTH_SERVICE}/Watch".encode()
"""Path of the method."""
_MOST_QUESTION_BYTES = 64 << 10
"""A question is a name. It is read, and inflated, on the loop."""


class WatchCall(Call):
    """One stream of the states of a service: the state at once, and whenever it has changed, to a second."""

    def __init__(self, backend: Control, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        super().__init__(stream, fields, replace(limits, max_body_bytes=_MOST_QUESTION_BYTES))
        self._backend = backend
        self._asked: Any = None
        self._told: bytes | None = None

    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Begin with the only message."""
        if messages and self._asked is not None:
            raise bad("the call has a second message, expected one")
        if messages:
            is_packed, data = messages[0]
            if is_packed:
                data = at_once(unpacking(self.encoding, data, self.limits))
            self._asked = parse("HealthCheckRequest", data)
            self.stream.release()
            self.has_begun = True
            self.stream.respond(HEADERS)
            self._tell()
        elif is_end and self._asked is None:
            raise bad("the call has no message, expected one")

    def is_waiting(self) -> bool:
        """Whether the message has not come."""
        return self._asked is None

    def look(self, now_s: float) -> None:
        """Tell of a change."""
        super().look(now_s)
        if not self.is_over and self._asked is not None and not self.stream.unsent():
            self._tell()

    def shut_down(self) -> None:
        """Tell the last state, and end."""
        if self._asked is not None and not self.is_over:
            self._tell()
        self.fail_with(ServeError(Status.UNAVAILABLE, "the server is stopping"))

    def withdraw(self) -> None:
        """Nothing is in progress."""

    def _tell(self) -> None:
        try:
            state = health(self._backend, self._asked)
        except ServeError:
            response = MESSAGES["HealthCheckResponse"]
            state = response(status=response.SERVICE_UNKNOWN)
        data: bytes = state.SerializeToString()
        if data != self._told:
            self._told = data
            self.send(data)
