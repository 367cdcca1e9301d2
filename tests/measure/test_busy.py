"""What other processes took of the cores: told from the kernel's times and those of this process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.linux import busy_s, run_delay_s
from cotenant.measure import busy
from cotenant.measure.busy import OthersTime, taken_share

TICKS = os.sysconf("SC_CLK_TCK")


def stat(*cores: tuple[int, ...]) -> str:
    lines = [f"cpu{at} {' '.join(map(str, columns))}" for at, columns in enumerate(cores)]
    return "\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 5", "ctxt 7"])


def test_idle_time_and_guests_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    text = stat((1, 2, 3, 100, 100, 4, 5, 6, 50, 50), (7, 0, 0, 9, 9, 0, 0, 0, 0, 0), (1000,) * 10)
    assert busy_s((0, 1), tmp_path) == 0
    (tmp_path / "proc/stat").write_text(text)
    assert busy_s((0, 1), tmp_path) == pytest.approx(28 / TICKS)
    assert busy_s((1,), tmp_path) == pytest.approx(7 / TICKS)


def test_the_delay_in_run_queues_is_of_a_thread_or_of_all(tmp_path: Path) -> None:
    for thread, text in ((7, "5000000 30000000 9\n"), (8, "1 2000000000 3\n"), (9, "")):
        folder = tmp_path / f"proc/self/task/{thread}"
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(text)
    assert run_delay_s(7, tmp_path) == pytest.approx(0.03)
    assert run_delay_s(None, tmp_path) == pytest.approx(2.03)
    assert run_delay_s(9, tmp_path) == run_delay_s(10, tmp_path) == 0


@pytest.mark.parametrize(
    ("others_s", "delay_s", "preempted_s", "expected"),
    [(0.0, 0.0, 0.0, 0.0), (0.4, 0.1, 0.0, 0.2), (0.1, 0.6, 0.2, 0.3), (0.0, 0.1, 1.0, 0.5), (-1.0, 0.0, 9.0, 1.0)],
)
def test_the_largest_reading_decides(others_s: float, delay_s: float, preempted_s: float, expected: float) -> None:
    assert taken_share(1.0, 2, others_s, delay_s, preempted_s) == pytest.approx(expected)
    assert taken_share(1.0, 0, others_s, delay_s, preempted_s) == 0  # no cores of this machine
    short = taken_share(0.1, 2, others_s, 0.0, 0.0)
    assert short == 0, "ticks of 10 ms say nothing of 0.1 s"


@given(wall_s=st.floats(0.0, 100), own=st.floats(0, 1), others=st.floats(0, 1), count=st.integers(1, 64))
def test_the_share_of_others_is_what_was_busy_without_this_process(
    wall_s: float, own: float, others: float, count: int
) -> None:
    others = min(others, 1 - own)
    now = [(5.0, 3.0, 1.0, 7.0)]
    total = wall_s * count
    now.append((5.0 + wall_s, 3.0 + total * (own + others), 1.0 + total * own, 7.0))
    watch = OthersTime(range(count))
    watch._now = lambda: now.pop(0)  # type: ignore[method-assign]
    with watch:
        pass
    assert watch.share == pytest.approx(others if total >= 0.41 else watch.share, abs=1e-6)
    assert 0 <= watch.share <= 1
    assert watch.is_disturbed == (watch.share > busy.MOST_OTHERS)


def test_without_the_kernels_times_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "time", SimpleNamespace(monotonic=iter((0.0, 9.0)).__next__))
    with OthersTime((0,)) as watch:
        pass
    assert watch.share == 0.0
