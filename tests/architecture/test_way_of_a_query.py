"""The modules that a query passes, in order: the list in docs/design.md is that of a query that was followed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from cotenant.config import DeviceSection, ServerConfig
from cotenant.serve.door.http_server import HttpServer
from cotenant.serve.server import Server
from cotenant.wire.client import infer_once
from repositories import write_good

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
HEAD = "```modules\n"
CLIENT = ("cotenant.wire.client", "cotenant.wire.encode", "cotenant.wire.decode")
"""Of the client in this test, not of the server."""
X = {"x": np.ones((1, 8), np.float32)}


class Follower:
    """Notes the modules of ours whose code runs, in the order in which each is met first, in all threads."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = str(frame.f_globals.get("__name__"))
        if event == "call" and name.startswith("cotenant.") and name not in CLIENT:
            self.seen.setdefault(name)


def followed(root: Path) -> list[str]:
    """The modules that the second of two queries over HTTP passes in the server's process."""
    follower = Follower()
    before = sys.getprofile()
    threading.setprofile(follower)
    server = Server(write_good(root, "two"), ServerConfig(device=DeviceSection(lanes="all")))
    http = HttpServer(server, port=0)
    try:
        port = http.start()
        server.start()
        url = f"http://127.0.0.1:{port}"
        for _ in range(2):
            follower.seen.clear()
            infer_once(url, "two", X)
            seen = list(follower.seen)
    finally:
        threading.setprofile(before)
        http.stop()
        server.stop()
    return [name.removeprefix("cotenant.") for name in seen]


@pytest.mark.alone
def test_the_design_names_the_modules_that_a_query_passes(tmp_path: Path, bless: bool) -> None:
    seen = followed(tmp_path)
    text = DESIGN.read_text(encoding="utf-8")
    start = text.index(HEAD) + len(HEAD)
    end = text.index("```", start)
    if bless:
        DESIGN.write_text(text[:start] + "".join(f"{name}\n" for name in seen) + text[end:], encoding="utf-8")
        return
    assert text[start:end].split() == seen
