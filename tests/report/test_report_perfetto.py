from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.gantt import Bar
from cotenant.report.perfetto import Counter, Instant, write_perfetto


def written(tmp_path: Path, *arguments: Any) -> list[dict[str, Any]]:
    file = tmp_path / "trace.json"
    write_perfetto(file, *arguments)
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], kind: str) -> dict[int, str]:
    key = "pid" if kind == "process_name" else "tid"
    return {event[key]: event["args"]["name"] for event in events if event["name"] == kind}


def test_events_are_complete_named_and_in_order_of_time(tmp_path: Path) -> None:
    events = written(
        tmp_path,
        [
            Bar("partitions/core 0", "resnet50 [0, 4)", 2_000, 5_001, {"query": 7}),
            Bar("partitions/core 1", "minilm", 500, 900),
            Bar("tenants/resnet50", "query 7", 0, 6_000),
        ],
        [Instant("tenants/resnet50", "dropped", 4_000, {"reason": "hopeless"})],
        [Counter("tenants/queued", 100, {"resnet50": 3})],
    )
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == [0.0, 0.1, 0.5, 2.0, 4.0]
    assert [event["ph"] for event in timed] == ["X", "C", "X", "X", "i"]
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    span = timed[3]
    assert (processes[span["pid"]], threads[span["tid"]]) == ("partitions", "core 0")
    assert (span["dur"], span["args"]) == (3.001, {"query": 7})
    assert threads[timed[4]["tid"]] == "resnet50"
    assert timed[4]["tid"] == timed[0]["tid"]
    assert processes[timed[1]["pid"]] == "tenants"
    assert (timed[1]["name"], timed[1]["args"]) == ("queued", {"resnet50": 3})


@given(
    bars=st.lists(
        st.builds(
            lambda track, start, length: Bar(track, "q", start, start + length),
            st.sampled_from(["a/x", "a/y", "b"]),
            st.integers(0, 50),
            st.integers(0, 20),
        ),
        max_size=40,
    )
)
def test_bars_of_one_thread_never_overlap(bars: list[Bar], tmp_path_factory: pytest.TempPathFactory) -> None:
    events = [event for event in written(tmp_path_factory.mktemp("t"), bars) if event["ph"] == "X"]
    assert len(events) == len(bars)
    ends: dict[int, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"])):
        assert event["ts"] * 1000 >= ends.get(event["tid"], 0) - 1e-6
        ends[event["tid"]] = (event["ts"] + event["dur"]) * 1000


def test_overlapping_bars_share_a_name_and_stay_together(tmp_path: Path) -> None:
    events = written(tmp_path, [Bar("t/a", "1", 0, 10), Bar("t/b", "2", 0, 10), Bar("t/a", "3", 5, 15)])
    ranks = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    ordered = [names(events, "thread_name")[tid] for tid in sorted(ranks, key=lambda tid: ranks[tid])]
    assert ordered == ["a", "a (2)", "b"]


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="end_ns"):
        Bar("a/b", "x", 5, 4)
