"""The attackers of the isolation benchmark: each does what it says to a server, which serves on."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest

from bench._attackers import KINDS, Attack, query
from fake_backend import CountingBackend, FakeBackend, serving

ENDS_WITH = {"gzip": "413", "flood": "200", "images": "400", "malformed": "400", "nested": "400", "loads": "200"}
"""The status that most of its requests get, of those who read answers."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_attacker_does_what_it_says_and_the_server_serves_on(kind: str) -> None:
    inner = FakeBackend()
    backend = CountingBackend(inner)

    async def attack(port: int) -> Attack:
        made = Attack("127.0.0.1", port)
        task = asyncio.ensure_future(getattr(made, kind)())
        wanted = 2 if kind in ENDS_WITH else 0
        while made.sent < 4 or sum(made.answers.values()) < wanted:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return made

    with serving(backend) as ports:
        made = asyncio.run(asyncio.wait_for(attack(ports.http), 60))
        if kind in ENDS_WITH:
            assert max(made.answers, key=made.answers.__getitem__) == ENDS_WITH[kind], made.answers
        else:
            assert not made.answers
        with urllib.request.urlopen(f"http://127.0.0.1:{ports.http}/v2/health/ready", timeout=20) as answer:
            assert json.load(answer) == {"ready": True}
    assert backend.settled()
    inner.close()


def test_the_query_of_attackers_is_valid() -> None:
    assert query().startswith(b"POST /v2/models/tiny/infer HTTP/1.1\r\n")
    assert query().endswith(bytes(64))
