"""Options of the test run."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("cotenant", deadline=None)  # tests assert behaviour, never times
settings.load_profile("cotenant")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bless", action="store_true", help="write the golden traces anew; read the difference before commit"
    )


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--bless"))
