"""Watch method of the standard gRPC health service."""

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
"""Maximum bytes of a request, which has only a name. It is read and decompressed on the loop."""


class WatchCall(Call):
    """Stream of the health states of a service: the current state, then each change within a second."""

    def __init__(self, backend: Control, stream: H2Stream, fields: Mapping[bytes, bytes], limits: Limits) -> None:
        super().__init__(stream, fields, replace(limits, max_body_bytes=_MOST_QUESTION_BYTES))
        self._backend = backend
        self._request: Any = None
        self._sent_state: bytes | None = None

    def take(self, messages: list[tuple[bool, Packed]], is_end: bool) -> None:
        """Handle the request message and send the current state."""
        if messages and self._request is not None:
            raise bad("the call has a second message, expected one")
        if messages:
            is_packed, data = messages[0]
            if is_packed:
                data = at_once(unpacking(self.encoding, data, self.limits))
            self._request = parse("HealthCheckRequest", data)
            self.stream.release()
            self.has_begun = True
            self.stream.respond(HEADERS)
            self._send_state()
        elif is_end and self._request is None:
            raise bad("the call has no message, expected one")

    def is_waiting(self) -> bool:
        """Whether the request message is missing."""
        return self._request is None

    def check_timeouts(self, now_s: float) -> None:
        """Enforce time limits, and send the state if it has changed."""
        super().check_timeouts(now_s)
        if not self.is_over and self._request is not None and not self.stream.unsent():
            self._send_state()

    def shut_down(self) -> None:
        """Send the last state and end the stream."""
        if self._request is not None and not self.is_over:
            self._send_state()
        self.fail_with(ServeError(Status.UNAVAILABLE, "the server is stopping"))

    def withdraw(self) -> None:
        """Do nothing: the call has no query."""

    def _send_state(self) -> None:
        try:
            state = health(self._backend, self._request)
        except ServeError:
            response = MESSAGES["HealthCheckResponse"]
            state = response(status=response.SERVICE_UNKNOWN)
        data: bytes = state.SerializeToString()
        if data != self._sent_state:
            self._sent_state = data
            self.send(data)
