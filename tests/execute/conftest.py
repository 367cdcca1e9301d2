from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.execute.worker.limits import WorkerLimits
from workers import PROMPT, Host, Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Makes hosts of worker processes; they end with the test, however it ends."""
    made: list[Host] = []

    def make(limits: WorkerLimits = PROMPT) -> Host:
        made.append(Host(tmp_path, limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def host(hosts: Hosts) -> Iterator[Host]:
    made = hosts()
    yield made
    made.close()
    assert made.executor.kept == 0
