"""Listening sockets of a server. The next server takes them over without a refused connection (decision 0078)."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import struct
import threading

from cotenant.config import ServerSection
from cotenant.errors import CotenantError
from cotenant.serve.listening import BACKLOG, listen

_ANSWER_S = 5.0
"""Seconds in which a running server has to pass its sockets on."""
_MOST_BYTES = 4096
_READY = b"ready"
_SPEAKS = {"http_port": "HTTP", "grpc_port": "gRPC", "admin_port": "administration"}
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger("cotenant.server")


class ClientSockets:
    """Listening sockets of a server, and the way by which another server of the same user takes them over.

    With `server.replace`, sockets at equal addresses come from the running server, which accepts until `take_over`. The
    keys of `all` and `ports` are names of port settings. Each server listens at an abstract Unix socket, named after
    its user and HTTP address. Raises CotenantError when an address cannot be listened on.
    """

    def __init__(self, section: ServerSection) -> None:
        wanted = {"http_port": (section.host, section.http_port), "grpc_port": (section.host, section.grpc_port)}
        if section.admin_port is not None:
            wanted["admin_port"] = section.admin_host or section.host, section.admin_port
        self.all: dict[str, socket.socket] = {}
        self.ports: dict[str, int] = {}
        self._given: dict[str, socket.socket] = {}
        self._asking: socket.socket | None = None
        self._before: socket.socket | None = None
        """Connection to the server that is replaced."""
        self._taker: socket.socket | None = None
        """Connection to the server that has got the sockets."""
        self._thread: threading.Thread | None = None
        self._ended, self._ending = socket.socketpair()
        try:
            if section.replace:
                self._ask(_address_of(*wanted["http_port"]))
            for name, (host, port) in wanted.items():
                known = self._given.pop(_address_of(host, port), None)
                self.all[name] = bound = known or self._bound(host, port, _SPEAKS[name])
                self.ports[name] = bound.getsockname()[1]
            self._asking = self._given.pop("", None) or _asking_at(_address(self.all["http_port"].getsockname()))
        except BaseException:
            self.close()
            raise
        finally:
            for left in self._given.values():
                left.close()

    @property
    def replaces(self) -> bool:
        """Whether a running server has passed its sockets on."""
        return self._before is not None

    @property
    def is_taken(self) -> bool:
        """Whether another server has the sockets: connections that this server does not accept are not lost."""
        return self._taker is not None

    def take_over(self) -> None:
        """Let the running server accept no further connections and stop, and wait to be replaced in turn. Call once
        this server answers."""
        if self._before is not None:
            try:
                self._before.send(_READY)
            except OSError:
                _log.warning("the server to replace has ended meanwhile")
        if self._asking is not None:
            self._thread = threading.Thread(target=self._serve, args=(self._asking,), name="cotenant-replacement")
            self._thread.daemon = True
            self._thread.start()

    def close(self) -> None:
        """Close all sockets. Connections that no server has accepted are lost, unless another one has the sockets."""
        self._ending.close()
        if self._thread is not None:
            self._thread.join()
        for each in (*self.all.values(), self._asking, self._before, self._taker, self._ended):
            if each is not None:
                each.close()

    # --- the server that replaces another -------------------------------------------------------------------------

    def _ask(self, address: str) -> None:
        """Get the sockets of the server that runs at an HTTP address; none if no server of this user runs there."""
        before = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before.settimeout(_ANSWER_S)
        try:
            before.connect(_name_at(address))
            data, descriptors, _, _ = socket.recv_fds(before, _MOST_BYTES, len(_SPEAKS) + 1)
        except ConnectionRefusedError:
            before.close()
            _log.info("no server of this user runs at %s: none is replaced", address)
            return
        except OSError as error:
            before.close()
            text = "it hangs, or another server is about to replace it" if isinstance(error, TimeoutError) else error
            raise CotenantError(f"the server at {address} does not pass its sockets on: {text}") from None
        sockets = [socket.socket(fileno=each) for each in descriptors]
        self._before = before
        if not _is_ours(before) or not data:
            for each in sockets:
                each.close()
            raise CotenantError(f"the server at {address} does not pass its sockets on; stop it, and start this one")
        self._given = dict(zip(json.loads(data), sockets, strict=True))

    def _bound(self, host: str, port: int, what: str) -> socket.socket:
        try:
            return listen(host, port, what)
        except CotenantError as error:
            if self._before is None and (address := _address_of(host, port)) and _is_served(address):
                text = f"{what}: a cotenant server of this user runs at {address}; to replace it without refusing a "
                raise CotenantError(
                    f"{text}request, add --set server.replace=true; else stop it, or choose another port"
                ) from error
            raise

    # --- the server that is replaced ------------------------------------------------------------------------------

    def _serve(self, asking: socket.socket) -> None:
        """Pass the sockets on to servers that ask for them, until one of them is ready: then SIGTERM stops this one."""
        names = [*(_address(each.getsockname()) for each in self.all.values()), ""]
        sockets = [each.fileno() for each in (*self.all.values(), asking)]
        while self._is_readable(asking):
            try:
                taker, _ = asking.accept()
            except OSError:  # it has gone again
                continue
            if not _is_ours(taker):
                taker.close()
                continue
            self._taker = taker
            try:
                socket.send_fds(taker, [json.dumps(names).encode()], sockets)
                is_ready = self._is_readable(taker) and bool(taker.recv(len(_READY)))
            except OSError:
                is_ready = False
            if is_ready:
                _log.info("another server takes the place of this one, which answers what it has and stops")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._ended.fileno() < 0 or select.select([self._ended], [], [], 0)[0]:
                return
            self._taker = None
            taker.close()
            _log.info("the server that was to replace this one has ended: this one goes on")

    def _is_readable(self, awaited: socket.socket) -> bool:
        """Wait until a socket can be read; False if the server ends first."""
        return self._ended not in select.select([awaited, self._ended], [], [])[0]


def _address_of(host: str, port: int) -> str:
    """Address that `listen` binds; empty if it has none or is to take any free port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError):
        return ""
    return _address(found[0][4]) if port else ""


def _address(found: tuple[object, ...]) -> str:
    return f"{found[0]}:{found[1]}"


def _name_at(address: str) -> str:
    """Name of the Unix socket: abstract, so it belongs to the network namespace, as ports do, and ends with them."""
    return f"\0cotenant-{os.geteuid()}-{address}"


def _asking_at(address: str) -> socket.socket | None:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        asking.bind(_name_at(address))
        asking.listen(BACKLOG)
    except OSError as error:
        asking.close()
        _log.warning("no other server can replace this one: %s", error.strerror)
        return None
    return asking


def _is_served(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(_name_at(address)) == 0


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()
