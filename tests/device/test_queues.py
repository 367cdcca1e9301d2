"""Streams of a GPU and the queues of CUDA that they share: how many there are, and who asks for more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError
from cotenant.execute.gpu import sm_shares
from cotenant.execute.gpu.configured import SWITCH_S, open_executor, open_streams, sm_lanes
from cotenant.execute.gpu.hardware_queues import VARIABLE, queue_count, use_all_queues
from cotenant.execute.gpu.sm_ladder import SmGrid
from cotenant.execute.gpu.sm_shares import GreenShares, PlainShares
from cotenant.policies.registry import make_policy
from fake_cuda import FakeCuda

QUARTERS = (25.0, 25.0, 25.0, 25.0)
GRID = SmGrid(128, 8)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU whose shares are divided as configured, and the interpreter's interval as it was."""
    driver = FakeCuda(128)

    def opened(index: int, sharing: str) -> GreenShares | PlainShares:
        return GreenShares.open(index, driver) if sharing == "green" else PlainShares(index, GRID, lambda *_: None)

    monkeypatch.setattr(sm_shares, "open_shares", opened)
    before = sys.getswitchinterval()
    yield driver
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("text", "count"), [(None, 8), ("32", 32), ("4", 4), ("64", 32), ("0", 8), ("many", 8), ("", 8)]
)
def test_how_many_queues_there_are(text: str | None, count: int) -> None:
    assert queue_count({} if text is None else {VARIABLE: text}) == count


def test_all_queues_are_used_unless_the_user_has_said_how_many() -> None:
    for before, after in ((None, "32"), ("8", "8")):
        environment = {} if before is None else {VARIABLE: before}
        use_all_queues(environment)
        assert environment == {VARIABLE: after}


@pytest.mark.parametrize("command", ["serve", "profile"])
def test_commands_ask_for_them_before_torch_is_there(command: str) -> None:
    code = (
        "import os, sys\n"
        "from cotenant.cli import main\n"
        f"sys.argv = ['cotenant', {command!r}, '/nowhere']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code\n"
        f"print(os.environ[{VARIABLE!r}], 'torch' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["32", "False"]


@pytest.mark.parametrize(
    ("sharing", "policy", "shares", "queues", "streams"),
    [
        ("green", "edf", QUARTERS, 4, 4),
        ("streams", "edf", QUARTERS, 4, 8),
        ("green", "overlap", (50.0, 50.0), 2, 3),
        ("green", "overlap", QUARTERS, 8, 10),
        ("green", "overlap", QUARTERS, 32, 10),
        ("streams", "overlap", QUARTERS, 32, 20),
    ],
)
def test_more_streams_than_queues_are_refused(
    sharing: str,
    policy: str,
    shares: tuple[float, ...],
    queues: int,
    streams: int,
    gpu: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, str(queues))
    section = DeviceSection(kind="cuda", shares=shares, sharing=sharing)  # type: ignore[arg-type]
    asked = make_policy(policy, {}, sm_lanes(section, grid=GRID)).spec.shares
    if streams > queues:
        text = rf"the {len(asked)} shares that launches may get need {streams} streams, more than the {queues} queues"
        with pytest.raises(ConfigError, match=rf"cuda:0 cannot be divided: {text}"):
            open_streams(section, asked)
        assert (gpu.contexts, gpu.streams, gpu.primary) == ({}, {}, 0)
    else:
        open_streams(section, asked).close()


def test_an_executor_has_threads_take_turns_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.setswitchinterval(5e-3)
    open_executor(DeviceSection(kind="cuda", shares=(50.0, 50.0)), (), 0).close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
