"""Files: TOML and JSON with types, atomic replacement, and append-only files of JSON lines.

Readers raise an error of the caller's type with the file, the key and the expected value.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Struct, inspect

from cotenant.errors import CotenantError
from cotenant.linux import open_flags

T = TypeVar("T")
STATE_FOLDER = ".cotenant"
"""Folder in a repository with its profile, its trace, and copies and optimised graphs of its models.

It may be removed while no server runs."""
MOST_TOML_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""Largest size of a JSON file or table that is read as a whole."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions of readers of TOML and JSON, also for deep nesting, integers with too many digits, and invalid UTF-8."""
_WHOLE_FLOATS = 1e15
"""Whole floats below this are written as integers, which are exact."""
_TABLES_DEEP = 2
"""Depth to which arrays of tables are written as `[[a.b]]`; deeper ones have one inline table per line."""


class _Stored(type):
    """Metaclass of fields that are integers in nanoseconds here, and numbers in units of `unit_ns` in files."""

    unit_ns: int
    least_ns: int
    most_ns: int
    unit: str

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def read(cls, value: object) -> int:
        """Convert a number in a file to nanoseconds. Raises ValueError."""
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= cls.most_ns / cls.unit_ns:
            ns = round(value * cls.unit_ns)
            if ns >= cls.least_ns:
                return ns
        least, most = "0" if cls.least_ns == 0 else "a nanosecond", cls.most_ns / cls.unit_ns
        raise ValueError(f"Expected {cls.unit} from {least} to {most:g}, got {value!r}")


if TYPE_CHECKING:
    Milliseconds: TypeAlias = int
    Seconds: TypeAlias = int
else:

    class Milliseconds(metaclass=_Stored):
        """Nanoseconds, from 1 ns to an hour; milliseconds in files."""

        unit_ns, least_ns, most_ns, unit = 1_000_000, 1, 3_600 * 10**9, "milliseconds"

    class Seconds(metaclass=_Stored):
        """Nanoseconds, from 0 to 30 years; seconds in files."""

        unit_ns, least_ns, most_ns, unit = 10**9, 0, 10**18, "seconds"


def read_toml(path: Path, error: type[CotenantError]) -> dict[str, Any]:
    """Read the table of a TOML file."""
    content = read_bytes(path, error, most_bytes=MOST_TOML_BYTES)
    try:
        text = content.decode("utf-8-sig")  # with or without a byte-order mark
    except UnicodeDecodeError as found:
        raise error(f"{path}: is not valid TOML: {found}") from None
    return parse_toml(text, str(path), error)


def parse_toml(text: str, where: str, error: type[CotenantError]) -> dict[str, Any]:
    """Parse a TOML text; `where` names it in errors."""
    try:
        return tomllib.loads(text)
    except UNREADABLE as found:
        raise error(f"{where}: is not valid TOML: {found}") from None


def convert(
    table: object,
    into: type[T],
    where: str,
    error: type[CotenantError],
    at: str = "",
    faults: list[str] | None = None,
) -> T:
    """Convert a table to a type; `at` is the key of the table in its file, if any.

    With `faults`, keys that do not fit are removed from `table`, and `faults` gets a sentence for each; an error is
    raised where the rest does not fit either.
    """
    while True:
        try:
            return msgspec.convert(table, into, strict=True, dec_hook=_read_time)
        except msgspec.ValidationError as found:
            sentence, _, place = str(found).partition(" - at `$")
            place = place.rstrip("`")
            steps, unknown = re.findall(r"\w+", place), re.search("unknown field `(.*)`", sentence)
            if sentence.startswith("Invalid ") or unknown:  # without the expected values
                allowed = dict.fromkeys(_allowed(inspect.type_info(into), steps))
                sentence += f", expected one of {', '.join(map(str, allowed))}" if allowed else ""
            key = (at + place).lstrip(".")
            sentence = f"{where}: {key + ': ' if key else ''}{sentence}"
            if faults is None or not _removed(table, [*steps, unknown[1]] if unknown else steps):
                raise error(sentence) from None
            faults.append(sentence)


def _removed(table: object, steps: list[str]) -> bool:
    """Remove the deepest key on a path; False if the table has none. Steps into arrays are not followed."""
    if not isinstance(table, dict) or not steps or steps[0] not in table:
        return False
    if not _removed(table[steps[0]], steps[1:]):
        del table[steps[0]]
    return True


def _read_time(kind: type, value: object) -> int:
    assert isinstance(kind, _Stored)
    return kind.read(value)


def _allowed(kind: inspect.Type, steps: list[str]) -> Iterator[object]:
    """Allowed values of the literal, enumeration or tag at a path, or the keys of the table."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _allowed(each, steps)
    elif isinstance(kind, inspect.LiteralType):
        yield from kind.values
    elif isinstance(kind, inspect.EnumType):
        yield from (each.value for each in kind.cls)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _allowed(kind.item_type, steps[1:])
    elif isinstance(kind, inspect.StructType):
        if not steps and kind.tag is None:
            yield from (field.encode_name for field in kind.fields)
        elif steps == [kind.tag_field]:
            yield kind.tag
        for field in kind.fields:
            if steps[:1] == [field.encode_name]:
                yield from _allowed(field.type, steps[1:])


def to_table(value: Any) -> Any:
    """Inverse of `convert`: Structs become tables without fields that have their default, tuples become arrays."""
    if isinstance(value, tuple | list):
        return [to_table(each) for each in value]
    if not isinstance(value, Struct):
        return value
    config = value.__struct_config__
    table: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        if held != field.default:
            times = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, _Stored)]
            table[field.encode_name] = held / times[0].unit_ns if times else to_table(held)
    return table


def toml_text(table: Mapping[str, Any]) -> str:
    """A table as TOML text, with the values that `tomllib` reads; whole floats become integers."""
    return "\n".join(_lines(table, ())).lstrip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    below: list[tuple[str, Mapping[str, Any], tuple[str, ...]]] = []
    for key, value in table.items():
        here = (*path, _key(key))
        if isinstance(value, Mapping):
            below.append(("[{}]", value, here))
        elif not (isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value)):
            yield f"{here[-1]} = {_scalar(value)}"
        elif len(here) <= _TABLES_DEEP:
            below += [("[[{}]]", each, here) for each in value]
        else:
            yield f"{here[-1]} = ["
            yield from (f"    {_scalar(each)}," for each in value)
            yield "]"
    for form, each, here in below:
        yield from ("", form.format(".".join(here)))
        yield from _lines(each, here)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _scalar(name)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_FLOATS:
        return str(int(value))
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_scalar(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    return repr(value)


class _Formed(Struct):
    format: str | None = None


def load(path: Path, into: type[T], form: str, error: type[CotenantError], hint: str) -> T:
    """Read a JSON file with `form` as its key `format`. `hint` says how to make a valid one."""
    return decode(read_bytes(path, error, hint), into, str(path), error, f"remove it and {hint}", form)


def open_regular(path: Path, error: type[CotenantError], hint: str = "", most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file of at most `most_bytes` (None: any size) for reading.

    Devices and FIFOs are refused, since they may have no end. The call does not block on them.
    """

    def wrong(reason: object) -> CotenantError:
        return error(f"{path}: cannot be read ({reason}){'; ' if hint else ''}{hint}")

    try:
        file = os.fdopen(os.open(path, open_flags("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY")), "rb")
    except OSError as found:
        raise wrong(found.strerror) from None
    except ValueError as found:  # a null byte in the name
        raise wrong(found) from None
    facts = os.fstat(file.fileno())
    if stat.S_ISREG(facts.st_mode) and (most_bytes is None or facts.st_size <= most_bytes):
        return file
    file.close()
    if not stat.S_ISREG(facts.st_mode):
        raise wrong("it is a directory, a device, a FIFO or a socket, expected a regular file")
    raise wrong(f"it has {facts.st_size} bytes, expected {most_bytes} at most")


def read_bytes(path: Path, error: type[CotenantError], hint: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """Content of a regular file of at most `most_bytes`."""
    try:
        with open_regular(path, error, hint, most_bytes) as file:
            content = file.read(most_bytes + 1)  # files of /proc have no size
    except OSError as found:
        raise error(f"{path}: cannot be read ({found.strerror})") from None
    if len(content) > most_bytes:
        raise error(f"{path}: cannot be read (it has more than {most_bytes} bytes)")
    return content


def decode(content: bytes, into: type[T], where: str, error: type[CotenantError], hint: str, form: str = "") -> T:
    """Decode JSON like `load`; `where` names it in errors. Without `form`, the text has no key `format`."""
    try:
        given = msgspec.json.decode(content, type=_Formed).format if form else form
        if given == form:
            return msgspec.json.decode(content, type=into)
    except UNREADABLE as found:
        raise error(f"{where}: is not a {form + ' file' if form else into.__name__} ({found}); {hint}") from None
    raise error(f"{where}: format is {given!r}, expected {form!r}; {hint}")


def save(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """While active, an OSError without the name of a file, such as that of a full disk, gets this name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content.

    Symbolic links are followed. An existing file that is not regular, such as a device, is written, not replaced.
    Folders are created only below `.cotenant`. Raises OSError with the name of the file.
    """
    target = Path(os.path.realpath(path))
    if STATE_FOLDER in target.parent.parts:
        target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {target.parent} does not exist, make it first", str(path))
    with naming(path):
        try:
            before = os.stat(path)
        except FileNotFoundError:
            before = None
        if before is not None and not stat.S_ISREG(before.st_mode):
            target.write_bytes(content)
            return
        partial = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC")
            with open(os.open(partial, flags, 0o666), "wb") as file:
                if before is not None:
                    os.chmod(partial, stat.S_IMODE(before.st_mode))
                file.write(content)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def append_entry(path: Path, entry: Any) -> None:
    """Append a line of JSON to a file, and flush it to disk; creates the file.

    A truncated last line, from an interruption, remains a separate line. Raises OSError, and ValueError if the entry is
    not JSON.
    """
    line = json.dumps(entry, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_entries(path: Path) -> Iterator[Any]:
    """Entries of a file of JSON lines, without invalid lines; none without a file. Raises CotenantError."""
    if not path.exists():
        return
    for line in read_bytes(path, CotenantError).split(b"\n"):
        try:
            yield json.loads(line)
        except UNREADABLE:
            continue  # truncated by an interruption
