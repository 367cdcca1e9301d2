"""The modules that a query passes, in order: the list in docs/design.md is that of a query that was followed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from client import until
from cotenant.config import DeviceSection, ServerConfig
from cotenant.serve.frontend.http_server import HttpServer
from cotenant.serve.server import Server
from cotenant.wire.client import infer_once
from repositories import write_good

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
HEAD = "```modules\n"
CLIENT = ("cotenant.wire.client", "cotenant.wire.encode", "cotenant.wire.decode")
"""Of the client in this test, not of the server."""
QUERIES = 10
X = {"x": np.ones((1, 8), np.float32)}


class Follower:
    """Notes the modules of ours whose code runs, in the order in which each is met first, in all threads."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = str(frame.f_globals.get("__name__"))
        if event == "call" and name.startswith("cotenant.") and name not in CLIENT:
            self.seen.setdefault(name)


def followed(root: Path, expected: list[str]) -> list[str]:
    """The modules that a query over HTTP passes in the server's process, one that is not the first.

    Of several as expected, if one is so: beside other work, what is left to do for the query before may come between.
    """
    follower = Follower()
    before = sys.getprofile()
    threading.setprofile(follower)
    server = Server(write_good(root, "two"), ServerConfig(device=DeviceSection(lanes="all")))
    http = HttpServer(server, port=0)
    try:
        port = http.start()
        server.start()
        url = f"http://127.0.0.1:{port}"
        infer_once(url, "two", X)
        for _ in range(QUERIES):
            until(lambda: not http._connections, lambda: None)  # the end of the one before is not of this query
            follower.seen.clear()
            infer_once(url, "two", X)
            seen = [name.removeprefix("cotenant.") for name in list(follower.seen)]
            if seen == expected:
                break
    finally:
        threading.setprofile(before)
        http.stop()
        server.stop()
    return seen


@pytest.mark.alone
def test_the_design_names_the_modules_that_a_query_passes(tmp_path: Path, bless: bool) -> None:
    text = DESIGN.read_text(encoding="utf-8")
    start = text.index(HEAD) + len(HEAD)
    end = text.index("```", start)
    expected = text[start:end].split()
    seen = followed(tmp_path, expected)
    if bless:
        DESIGN.write_text(text[:start] + "".join(f"{name}\n" for name in seen) + text[end:], encoding="utf-8")
        return
    assert expected == seen
