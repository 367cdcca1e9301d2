"""`cotenant cluster status`, of whatever answers at the address: its text, or one sentence."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from email.message import Message
from typing import Any
from urllib.error import HTTPError

import pytest

from commands import Run, runner

STATUS: dict[str, Any] = {
    "planner": "ours",
    "table": 3,
    "share": 0.62,
    "left_out": ["slow"],
    "breaks": "tenant 'slow' breaks first",
    "nodes": [
        {
            "node": "n0",
            "device": "core",
            "state": "serving",
            "http": "127.0.0.1:8100",
            "partitions": [{"slots": [{"tenant": "fast", "rate": 12.5}]}],
            "guests": ["slow"],
        },
        {"node": "n1", "state": "lost", "reason": "its agent ended"},
    ],
    "tenants": [
        {
            "tenant": "fast",
            "slo_ms": 50.0,
            "declared_rate": 20.0,
            "tracked_rate": None,
            "planned_rate": 12.5,
            "attainment": 0.987,
            "nodes": ["n0"],
        }
    ],
    "applications": [
        {
            "application": "reading",
            "slo_ms": 500.0,
            "stages": [{"stage": "find", "nodes": ["n0"]}],
            "queries": {"offered": 9, "in_time": 8, "late": 1, "refused": 0, "failed": 0, "cancelled": 0},
        }
    ],
    "changes": [{"at": "12:00:00", "reason": "the first plan", "nodes": 1, "took_s": 0.25}],
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capfd)


def answer_with(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    body = json.dumps(found).encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(body))


def damaged(value: Any) -> Iterator[Any]:
    """The same without one of its parts, or with another kind of value there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        if isinstance(value, dict):
            yield {name: each for name, each in value.items() if name != key}
        for part in (*damaged(value[key]), None, [], {}, "text", 7, [7], [[]], {"a": {}}):
            if isinstance(value, dict):
                yield {**value, key: part}
            else:
                yield [*value[:key], part, *value[key + 1 :]]


def test_everything_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, STATUS)
    status, out, err = run("cluster", "status", "--url", "http://x")
    assert (status, err) == (0, "")
    for words in ("fast 12.5/s, slow (backfilled)", "its agent ended", "98.7 %", "find (n0)", "88.9 %"):
        assert words in out
    assert "62 % is planned, without slow. tenant 'slow' breaks first\n12:00:00  the first plan: 1 nodes" in out
    assert "\n\n\n" not in out


def test_what_is_no_status_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    for found in ([], {}, 7, "text", None, [[]], *damaged(STATUS)):
        answer_with(monkeypatch, found)
        status, out, err = run("cluster", "status", "--url", "http://x")
        assert status in (0, 2), (found, err)
        if status:
            refused += 1
            assert out == ""
            assert "http://x is not a cluster gateway" in " ".join(err.split())
    assert refused > 100


def test_a_gateway_without_a_status_yet_says_so_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, timeout: float) -> Any:
        raise HTTPError(url, 503, "Service Unavailable", Message(), io.BytesIO(b'{"error": "no status yet"}'))

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    status, out, err = run("cluster", "status", "--url", "http://x")
    assert (status, out) == (2, "")
    assert "503" in err
    assert "no status yet" in err
