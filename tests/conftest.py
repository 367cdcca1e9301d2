"""Options of the test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commands import Run

for name in (
    "COLUMNS",
    "LINES",
):  # those of a terminal, or of a process of xdist, are not what commands are tested with
    os.environ.pop(name, None)
SUPPORT = Path(__file__).parent / "support"
pytest.register_assert_rewrite(*sorted(path.stem for path in SUPPORT.glob("*.py")))

with suppress(ImportError):  # tests on a GPU need torch, numpy and msgspec alone
    from hypothesis import Phase, settings

    settings.register_profile("cotenant", deadline=None)  # tests assert behaviour, never times
    settings.load_profile("cotenant")
    settings.register_profile(  # of `make mutants`: that an example fails is enough, the smallest is not looked for
        "mutants", deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bless", action="store_true", help="write the golden files anew; read the difference before commit"
    )


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    from commands import runner

    return runner(monkeypatch, capfd)


@pytest.fixture(scope="session", autouse=True)
def quiet_machine() -> Iterator[None]:
    """The machine counts as quiet: what other processes take, as other tests do, changes no test's outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotenant.linux.busy_s", lambda cores: 0.0)
        patch.setattr("cotenant.linux.run_delay_s", lambda thread: 0.0)
        with suppress(ImportError):  # a worker for each profiled model takes a second to start
            from client import LoaderHere

            patch.setattr("cotenant.measure.loader.worker_peak_bytes", lambda *_: 0)
            patch.setattr("cotenant.measure.sweep.Loader", LoaderHere)  # in a process of its own all this is not so
        patch.setattr("cotenant.measure.busy.MOST_OTHERS", 1.0)  # preemption of the measuring thread
        yield


@pytest.fixture
def measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are measured in a process of their own, as users have it: for models that end it."""
    from cotenant.measure.loader_process import Loader

    monkeypatch.setattr("cotenant.measure.sweep.Loader", Loader)


@pytest.fixture(scope="session", autouse=True)
def no_server_cost() -> Iterator[None]:
    """Profiles lack the cost of requests, which takes 10 s; tests of that cost call `measure_server_cost`."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):  # tests on a GPU lack the packages
            patch.setattr(
                "cotenant.load.server_cost.with_server_cost", lambda root, settings, profile, on_step: profile
            )
        yield


@pytest.fixture(scope="session")
def papers_data() -> Path:
    """The papers' tables that benchmarks read: those of the repository, unless a variable names others."""
    return Path(os.environ.get("COTENANT_DATA") or Path(__file__).resolve().parent.parent / "bench" / "data")


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Small work, and other tests beside it: more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
