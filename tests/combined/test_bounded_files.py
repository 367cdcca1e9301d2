"""Files that are read are regular ones of a bounded size; files that are written replace no link and no device."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.errors import ConfigError, CotenantError
from cotenant.files import (
    append_entry,
    decode,
    open_regular,
    parse_toml,
    read_bytes,
    read_entries,
    read_toml,
    write_whole,
)
from cotenant.profiles.profile_file import load_profile
from cotenant.techniques.partitions.plan.file import read_plan, read_request
from cotenant.trace import read
from cotenant.workload import load_workload


def fifo(path: Path) -> None:
    os.mkfifo(path)


PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "fifo": fifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_bytes(b"a = " + b"[" * 100_000),
    "deep json": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "digits": lambda path: path.write_bytes(b"a = " + b"9" * 5000),
    "digits json": lambda path: path.write_bytes(b'{"format": ' + b"9" * 5000 + b"}"),
    "latin-1": lambda path: path.write_bytes("a = 'é'".encode("latin-1")),
    "utf-16": lambda path: path.write_bytes("a = 'é'".encode("utf-16")),
    "null bytes": lambda path: path.write_bytes(bytes(100)),
}
READERS: dict[str, Callable[[Path], object]] = {
    "workload": load_workload,
    "plan": read_plan,
    "tenants": lambda path: read_request(path, {}, {}),
    "profile": load_profile,
    "trace": lambda path: list(read(path)[1]),
    "toml": lambda path: read_toml(path, ConfigError) and pytest.fail("it was read"),
}


@pytest.mark.parametrize("place", sorted(PLACES))
@pytest.mark.parametrize("reader", sorted(READERS))
def test_what_is_no_file_of_ours_is_refused_by_its_name(tmp_path: Path, place: str, reader: str) -> None:
    path = tmp_path / "odd {0} [file]"
    PLACES[place](path)
    if (place, reader) in (("empty", "toml"), ("null", "toml")):
        return
    with pytest.raises(CotenantError, match=r"odd \{0\} \[file\]"):
        READERS[reader](path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"large: cannot be read \(it has 5 bytes, expected 4 at most\); mend it"):
        read_bytes(path, ConfigError, "mend it", 4)
    assert read_bytes(path, ConfigError, "", 5) == b"12345"
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_bytes(Path("/proc/self/status"), ConfigError, "", 10)
    with pytest.raises(ConfigError, match="null"):
        open_regular(Path("a\0b"), ConfigError)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "a = " + "9" * 5000, "a = 1e", "[a]\n[a]", "a = 0x" + "f" * 5000 + "g"]
)
def test_texts_that_no_reader_can_take_are_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="here: is not valid TOML"):
        parse_toml(text, "here", ConfigError)
    with pytest.raises(ConfigError, match="here: is not a dict"):
        decode(text.encode(), dict, "here", ConfigError, "mend it")


def test_lines_that_are_no_json_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "entries"
    append_entry(path, 1)
    path.write_bytes(path.read_bytes() + b"\n".join([b"[" * 100_000, b"9" * 5000, b"\xff", b"{"]) + b"\n")
    append_entry(path, 2)
    assert list(read_entries(path)) == [1, 2]


def test_a_link_is_written_through_and_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to("target")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_link_to_nothing_makes_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_loop_of_links_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"symbolic links.*loop"):
        write_whole(tmp_path / "loop", b"new")
    assert (tmp_path / "loop").is_symlink()


def test_a_fifo_is_written_to(tmp_path: Path) -> None:
    path, found = tmp_path / "fifo", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    write_whole(path, b"new")
    reader.join(60)
    assert found == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_stays_one(tmp_path: Path, device: str) -> None:
    (tmp_path / "device").symlink_to(device)
    if device == "/dev/full":
        with pytest.raises(OSError, match="No space left") as found:
            write_whole(tmp_path / "device", b"new")
        assert (found.value.errno, found.value.filename) == (errno.ENOSPC, str(tmp_path / "device"))
    else:
        write_whole(tmp_path / "device", b"new")
    assert stat.S_ISCHR(Path(device).stat().st_mode)


def test_folders_are_made_for_our_own_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder .*nope does not exist") as found:
        write_whole(tmp_path / "nope" / "plan.toml", b"")
    assert found.value.filename == str(tmp_path / "nope" / "plan.toml")
    assert not (tmp_path / "nope").exists()
    write_whole(tmp_path / ".cotenant" / "deep" / "x", b"1")
    assert (tmp_path / ".cotenant" / "deep" / "x").read_bytes() == b"1"
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"")


def test_writers_at_once_leave_one_of_their_texts_and_nothing_else(tmp_path: Path) -> None:
    path, texts = tmp_path / "shared", [bytes([65 + each]) * 50_000 for each in range(8)]
    writers = [threading.Thread(target=write_whole, args=(path, text)) for text in texts for _ in range(5)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert path.read_bytes() in texts
    assert [each.name for each in tmp_path.iterdir()] == ["shared"]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
