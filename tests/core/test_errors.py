"""Errors cross processes as they are: benchmarks and workers run in pools."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from cotenant.errors import ConfigError, CotenantError, InvalidValueError
from cotenant.execute.errors import ModelError
from cotenant.wire.api import ServeError, Status

ERRORS = [
    ConfigError("cotenant.toml: no"),
    InvalidValueError("partition", "cores", (), "at least one"),
    ModelError(Path("model.onnx"), "it is broken", "Mend it"),
    ServeError(Status.NOT_FOUND, "model 'x' is unknown"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: CotenantError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
