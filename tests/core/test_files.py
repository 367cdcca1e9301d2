"""Reading and writing of files: what is written is read back, and what cannot be read is said."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from cotenant.errors import ConfigError
from cotenant.files import Milliseconds, Seconds, convert, load, read_toml, save, to_table, toml_text

SCALARS = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=6))
KEYS = st.text(min_size=1, max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(KEYS, below, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_written_as_toml_is_read_back(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    took_ns: Milliseconds = field(name="took_ms")
    pause_ns: Seconds = field(default=0, name="pause_s")
    names: tuple[str, ...] = ()


class Whole(Struct, frozen=True, forbid_unknown_fields=True):
    part: tuple[Part, ...]
    format: str = "whole/1"


WHOLE = Whole((Part(1_500_000), Part(1, 10**9, ("a",))))


def test_a_struct_is_read_back_from_its_table() -> None:
    table = to_table(WHOLE)
    assert table == {"part": [{"took_ms": 1.5}, {"took_ms": 1e-6, "pause_s": 1.0, "names": ["a"]}]}
    assert convert(table, Whole, "here", ConfigError) == WHOLE
    assert convert(tomllib.loads(toml_text(table)), Whole, "here", ConfigError) == WHOLE


@pytest.mark.parametrize("took", [0, -1, 3_600_001, float("nan"), float("inf"), True, "1", None])
def test_a_time_out_of_range_is_named(took: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^here: part\[0\]\.took_ms: Expected milliseconds from a nanosecond to 3\.6e"
    ):
        convert({"part": [{"took_ms": took}]}, Whole, "here", ConfigError)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ConfigError, match=r"file: cannot be read \(No such file or directory\); make it"):
        load(path, Whole, "whole/1", ConfigError, "make it")
    with pytest.raises(ConfigError, match=r"file: cannot be read \(No such file or directory\)"):
        read_toml(path, ConfigError)
    save(path, WHOLE)
    with pytest.raises(ConfigError, match="file: is not valid TOML"):
        read_toml(path, ConfigError)
    with pytest.raises(ConfigError, match=r"file: format is 'whole/1', expected 'whole/2'; remove it and make it"):
        load(path, Whole, "whole/2", ConfigError, "make it")
    for text in (b"", b"[]", b'{"format": "whole/1"}', b'{"format": 1}', b"\xff"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"file: is not a whole/1 file \(.*\); remove it and make it"):
            load(path, Whole, "whole/1", ConfigError, "make it")
