"""How the core of gRPC reads sockets: to be set before the package is imported."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

_VARIABLE = "GRPC_EXPERIMENTS"
_OFF = "-event_engine_listener"
_LAST = (1, 85)
"""The last version that was seen to have the switch; one without it complains in the log."""


def read_in_place(environment: MutableMapping[str, str], version: str) -> bool:
    """Have the server's own thread read its sockets; say whether that was set in the environment.

    The core of newer versions has threads for it, each of which wakes the server's thread and takes turns with it:
    measured on one core with 8 clients, two wake-ups and 10 % of the processor time of a small request. `version` is
    that of grpcio. What the user has set stays as it is.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if _VARIABLE in environment or found is None or (int(found[1]), int(found[2])) > _LAST:
        return False
    environment[_VARIABLE] = _OFF
    return True
