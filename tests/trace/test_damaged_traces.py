"""A log that was damaged is refused with its line, or read: by every reader, whatever was dropped, doubled, cut or
changed in it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.policies.registry import rebuild_policy
from cotenant.report.timeline import write_timeline
from cotenant.trace import TraceError, missing_events, read, replay
from cotenant.trace.basis import GroupFits
from cotenant.trace.bound import bound_of
from cotenant.trace.explain import explain
from cotenant.trace.losses import losses_of
from cotenant.trace.trace_log import _no_groups

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("edf", "applications", "tasks-expanding", "overlap-enqueued", "policy-changed", "tenants", "gpu-shares")
TEXTS = {name: (GOLDEN / f"{name}.jsonl").read_bytes().splitlines(keepends=True) for name in NAMES}
WHOLE = ("of the devices", "no lanes", "no query", "not in this trace", "not ended", "which is not here")
KEPT = tuple(f'"{each}"'.encode() for each in ("TenantAdded", "TenantChanged", "TenantRemoved", "PolicyChanged"))
"""What is said of a log as a whole."""
ODD: list[Any] = [None, -1, 0, 1, 2**70, 1.5, "", "zzz", [], {}, True, [[1]], {"a": 1}]


def changed(value: Any, rng: random.Random) -> Any:
    """A value of JSON with one part of it dropped, or replaced by an odd one."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        made = value.copy()
        if rng.random() < 0.2:
            del made[key]
        else:
            made[key] = changed(value[key], rng)
        return made
    return rng.choice(ODD)


def damaged(lines: list[bytes], how: str, at: int, seed: int) -> list[bytes]:
    """The lines with one of them damaged."""
    rng, made = random.Random(seed), lines.copy()
    match how:
        case "drop":
            del made[at : at + rng.randint(1, 3)]
        case "double":
            made.insert(rng.randint(at, len(made)), made[at])
        case "swap":
            other = rng.randrange(len(made))
            made[at], made[other] = made[other], made[at]
        case "cut":
            made[at] = made[at][: rng.randrange(len(made[at]))] + b"\n" * rng.randint(0, 1)
        case "bytes":
            line = bytearray(made[at])
            line[rng.randrange(len(line))] = rng.randrange(256)
            made[at] = bytes(line)
        case "change":
            made[at] = json.dumps(changed(json.loads(made[at]), rng)).encode() + b"\n"
    return made


def draw(path: Path, number: int) -> object:
    return write_timeline(path.with_suffix(".json"), read(path)[1])


def tell(path: Path, number: int) -> object:
    head, records = read(path)
    return explain(records, number, GroupFits(head, rebuild_policy, _no_groups)).sentences()


def replayed(path: Path, number: int) -> object:
    return list(replay(*read(path), rebuild_policy))


READERS: dict[str, Callable[[Path, int], object]] = {
    "replay": replayed,
    "explain": tell,
    "lost": lambda path, number: losses_of(*read(path)),
    "bound": lambda path, number: bound_of(*read(path)),
    "timeline": draw,
}


@pytest.mark.parametrize("reader", sorted(READERS))
@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    how=st.sampled_from(["drop", "double", "swap", "cut", "bytes", "change", "change", "change"]),
    place=st.floats(0, 1, exclude_max=True),
    number=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_damage_is_refused_with_its_line_or_read(
    tmp_path_factory: pytest.TempPathFactory, reader: str, name: str, how: str, place: float, number: int, seed: int
) -> None:
    lines = TEXTS[name]
    path = tmp_path_factory.getbasetemp() / f"damaged-{reader}.jsonl"
    path.write_bytes(b"".join(damaged(lines, how, int(place * len(lines)), seed)))
    reason = ""
    try:
        READERS[reader](path, number)
    except TraceError as error:
        reason = str(error)
    assert not reason or any(re.search(each, reason) for each in (r"line \d+", *WHOLE)), reason


@pytest.mark.parametrize("reader", sorted(READERS))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES),
    place=st.floats(0, 1, exclude_max=True),
    size=st.integers(1, 60),
    number=st.integers(0, 60),
)
def test_a_gap_that_the_log_tells_of_is_read(
    tmp_path_factory: pytest.TempPathFactory, reader: str, name: str, place: float, size: int, number: int
) -> None:
    head, *lines = TEXTS[name]
    at = int(place * len(lines))
    gone = [line for line in lines[at : at + size] if not any(each in line[:64] for each in KEPT)]
    left = [line for line in lines[at : at + size] if line not in gone]
    gap = b'[%d,"EventsMissing",{"events":%d},[]]\n' % (json.loads(lines[at])[0], len(gone))
    path = tmp_path_factory.getbasetemp() / f"gap-{reader}.jsonl"
    path.write_bytes(b"".join([head, *lines[:at], gap, *left, *lines[at + size :]]))
    assert missing_events(path) == len(gone)
    try:
        READERS[reader](path, number)
    except TraceError as error:
        reason = str(error)
        assert any(each in reason for each in (*WHOLE, "expected one of")), reason  # policies that are not here


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.jsonl")))
def test_a_whole_log_is_read_to_its_end(name: str) -> None:
    path = GOLDEN / f"{name}.jsonl"
    _, records = read(path)
    assert sum(1 for _ in records) == path.read_bytes().count(b"\n") - 1


def test_a_gap_is_named_with_its_line(tmp_path: Path) -> None:
    lines = TEXTS["edf"]

    path = tmp_path / "gap.jsonl"
    starts = next(number for number, line in enumerate(lines) if b'"Launch",' in line)
    path.write_bytes(b"".join(lines[:starts] + lines[starts + 1 :]))
    with pytest.raises(TraceError, match=r"gap\.jsonl: line \d+ does not follow .*(launch|query) \d+"):
        list(read(path)[1])
