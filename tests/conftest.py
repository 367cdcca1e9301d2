"""Options of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from commands import Run, runner

settings.register_profile("cotenant", deadline=None)  # tests assert behaviour, never times
settings.load_profile("cotenant")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bless", action="store_true", help="write the golden traces anew; read the difference before commit"
    )


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    return runner(monkeypatch, capfd)


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Small work, and other tests beside it: more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
