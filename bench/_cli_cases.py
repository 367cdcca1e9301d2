"""Command lines with something wrong in them, and the interpreter that runs them one after the other: see `cli_fuzz`.

`python -m bench._cli_cases FOLDER` reads numbers of cases from standard input and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import typer
from onnx import TensorProto, helper

REPOSITORY, WORKLOAD, TENANTS, PLAN, TRACE = "models", "workload.toml", "tenants.toml", "plan.toml", "trace.jsonl"
LINES: tuple[tuple[int, str], ...] = (
    (1, "devices"),
    (2, "models models"),
    (6, "simulate workload.toml models"),
    (3, "simulate workload.toml models --bound --trace out"),
    (2, "simulate workload.toml models --policy edf --world table --noise 0.1 --seeds 2"),
    (2, "simulate workload.toml models --plan plan.toml"),
    (5, "plan tenants.toml --profiles models --quick --out out"),
    (2, "plan tenants.toml --profiles models --quick --svg out --headroom 0.2 --devices 1"),
    (3, "plan --check plan.toml --profiles models"),
    (3, "plan tenants.toml --profiles models --quick --running plan.toml"),
    (4, "explain 3 trace.jsonl"),
    (4, "explain --lost trace.jsonl"),
    (4, "bound trace.jsonl"),
    (4, "replay trace.jsonl --perfetto out"),
    (3, "load workload.toml --http http://127.0.0.1:9 --grpc 127.0.0.1:9 --out out"),
    (2, "cluster status --url http://127.0.0.1:9"),
    (1, "cluster up tenants.toml nowhere"),
    (2, "serve models --host 192.0.2.1 --http-port 0 --grpc-port 0 --isolation thread --no-trace"),
    (1, "serve models --host 192.0.2.1 --plan plan.toml --http-port 0"),
    (1, "profile nowhere --budget 0.01"),
    (1, "compile nowhere --candidates 1"),
    (1, "place nowhere add --budget-s 0.1"),
    (1, "co-schedule nowhere add two --batch add=2"),
    (1, "demo --seconds nan --dir demo"),
)
"""Weights, and commands that end by themselves: those that measure, build or serve get something that they refuse."""
REFUSED = ("load", "cluster", "serve", "profile", "compile", "demo", "place", "co-schedule")
"""Lines that begin so cannot end well."""
ODD = (
    *("", " ", "nan", "inf", "-inf", "-1", "0", "1e30", "1e-300", "9" * 5000, "1" * 19, "\u0661\u0662", "0x10", "1_0"),
    *("[/x]", "[bold]a", "a\nb", "\udcff", "[" * 3000, "../..", "x" * 300, "x" * 5000, "=", ",", "a=", "=1", "1,,2"),
    *("all", "none", "None", "true", "{}", "[]", '"', "'", "\\", "%s", "{0}", "\x1b[31m", "-", "--", "a.b=1"),
)
BAD_NUMBERS = ("nan", "-inf", "9" * 5000, "1e30", "-1e30")
"""What no option of a number takes."""
ODD_SETS = (
    "a.b=1",
    "server.http_port=" + "9" * 5000,
    "policy.name=[[[[",
    "device.lanes=" + "[" * 3000,
    "server.=1",
    "=",
)
FILES = (WORKLOAD, TENANTS, PLAN, TRACE)
STREAMS = ("plain", "plain", "plain", "latin-1", "ascii", "full", "narrow", "wide", "small files")
_LONG = {"--build"}
"""Options that make a command work for longer than LIMIT_S."""
LIMIT_S = 20.0
"""Of one case."""
_PASSED = (
    "[tenant]\nslo_ms = 50\n[model]\nmax_batch = 4\n",
    '[tenant]\nslo_ms = 20\nname = "[b]two[/b]"\nweight = 2\n',
)


@dataclass(frozen=True, slots=True)
class Case:
    """A command line in a folder of its own. `fails` says that it cannot do what it was asked for."""

    number: int
    arguments: tuple[str, ...]
    stream: str
    what: str
    fails: bool


def make_folder(folder: Path) -> None:
    """What commands are given: a profiled repository of two small models, a workload, tenants, a plan, a trace."""
    for name, config in zip(("add", "two"), _PASSED, strict=True):
        (folder / REPOSITORY / name / "1").mkdir(parents=True)
        (folder / REPOSITORY / name / "config.toml").write_text(config, encoding="utf-8")
        shape = ["rows", 4]
        ends = [helper.make_tensor_value_info(each, TensorProto.FLOAT, shape) for each in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], name, ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, str(folder / REPOSITORY / name / "1" / "model.onnx"))
    loads = "".join(f'[[tenant]]\nname = "{name}"\nmodel = "{model}"\nrate = 40\n' for name, model in _TENANTS)
    (folder / WORKLOAD).write_text(f"seed = 1\nduration_s = 1.0\n{loads}", encoding="utf-8")
    device = '[[device]]\nname = "cpu"\ncount = 2\ncores = 2\n'
    (folder / TENANTS).write_text(device + loads, encoding="utf-8")
    for line in (
        "profile models --budget 0.01 --json",
        "plan tenants.toml --profiles models --quick --out plan.toml --json",
        "simulate workload.toml models --trace trace.jsonl --json",
    ):
        status, _, err = run_line(folder, line.split(), "plain")
        if status:
            raise RuntimeError(f"{line}: {err}")


_TENANTS = (("add", "add"), ("[b]two[/b]", "two"))


def case_of(number: int, seed: int) -> tuple[Case, Callable[[Path], None]]:
    """A case, and the change to make to the folder first. Equal numbers and seeds give equal cases."""
    rng = random.Random(f"{seed} {number}")
    weights, lines = zip(*LINES, strict=True)
    line = rng.choices(lines, weights)[0]
    arguments = line.split()
    fails = line.startswith(REFUSED)
    stream = rng.choice(STREAMS)
    prepare: Callable[[Path], None] = _untouched
    how = rng.choice(("option", "option", "set", "argument", "file", "file", "file", "output", "repository", "number"))
    what = how
    known = _options(arguments)
    inputs = [at for at, each in enumerate(arguments) if each in FILES]
    if how == "option":
        name = rng.choice(sorted(known.keys() - _LONG))
        value = rng.choice(ODD)
        arguments += [name] if known[name] == "flag" else [name, value]
    elif how == "number":
        numbers = sorted(name for name, kind in known.items() if kind == "number")
        if numbers:
            arguments += [rng.choice(numbers), rng.choice(BAD_NUMBERS)]
            fails = True
    elif how == "set":
        if "--set" in known:
            arguments += ["--set", rng.choice(ODD_SETS)]
            fails = True
    elif how == "argument":
        at = rng.randrange(1, len(arguments)) if len(arguments) > 1 else 0
        arguments[at] = rng.choice(ODD)
    elif how == "file" and inputs:
        at = rng.choice(inputs)
        place, fails_so = _odd_file(rng, arguments[at])
        prepare, what = place, f"file {arguments[at]}"
        fails = fails or fails_so
    elif how == "repository":
        prepare = _odd_repository(rng)
    elif how == "output" and "out" in arguments:
        at = arguments.index("out")
        bad = rng.choice(("/dev/full", "no/such/out", ".", "x" * 300, "loop", "out", "link"))
        arguments[at], what = bad, f"output {bad[:20]}"
        fails = fails or bad not in ("out", "link")
        prepare = _links
    if rng.random() < 0.3 and "--json" in known:
        arguments.append("--json")
    if stream == "full":  # nothing can be said
        fails = True
    return Case(number, tuple(arguments), stream, what, fails), prepare


def _untouched(folder: Path) -> None:
    """Change nothing."""


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """The options of a command, and whether each is a flag, a number or another value."""
    from cotenant.cli.app import app

    command: Any = typer.main.get_command(app)
    for name in arguments:
        if name not in getattr(command, "commands", {}):
            break
        command = command.commands[name]
    found = {"--help": "flag"}
    for each in command.params:
        if each.param_type_name == "option" and each.name != "help":
            name = max(each.opts, key=len)
            is_number = "float" in str(each.type_descriptor.annotation) or "int" in str(each.type_descriptor.annotation)
            found[name] = "flag" if each.is_flag else "number" if is_number else "value"
    return found


def _links(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("target")


def _odd_file(rng: random.Random, name: str) -> tuple[Callable[[Path], None], bool]:
    """Put something odd in the place of a file; whether no command can do without the file."""
    kind = rng.choice(("gone", "folder", "fifo", "/dev/zero", "/dev/null", "/proc/self/mem", "loop", *["text"] * 9))
    seed = rng.random()

    def place(folder: Path) -> None:
        path = folder / name
        text = path.read_bytes()
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(name)
        elif kind.startswith("/"):
            path.symlink_to(kind)
        elif kind == "text":
            path.write_bytes(damaged(text, random.Random(seed)))

    return place, kind != "text"


def damaged(text: bytes, rng: random.Random) -> bytes:
    """A text with one thing wrong."""
    lines = text.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    kind = rng.randrange(12)
    if kind == 0:
        return text[: rng.randrange(len(text) + 1)]
    if kind == 1:
        where = rng.randrange(len(text) + 1)
        return text[:where] + bytes([rng.randrange(256)]) + text[where + 1 :]
    if kind == 2:
        del lines[at]
    elif kind == 3:
        lines.insert(at, lines[at])
    elif kind == 4:
        return b"\xef\xbb\xbf" + text
    elif kind == 5:
        return text.decode().encode("utf-16")
    elif kind == 6:
        return b"a = " + b"[" * 100_000 + text
    elif kind == 7:
        return b""
    elif kind == 8:
        return text + bytes(rng.randrange(256) for _ in range(40))
    else:
        words = [at for at, byte in enumerate(text) if chr(byte) in "0123456789" and not text[at - 1 : at].isalnum()]
        where = rng.choice(words) if words else 0
        end = where
        while end < len(text) and chr(text[end]) in "0123456789.":
            end += 1
        odd = (
            "-1",
            "0",
            "nan",
            "inf",
            "1e300",
            "1e-300",
            "9" * 5000,
            "1e19",
            '"x"',
            "[]",
            "{}",
            "true",
            "null",
            "[" * 2000,
        )
        return text[:where] + rng.choice(odd).encode() + text[end:]
    return b"".join(lines)


def _odd_repository(rng: random.Random) -> Callable[[Path], None]:
    """Change one file of the repository, or add one."""
    seed = rng.random()

    def place(folder: Path) -> None:
        inner = random.Random(seed)
        root = folder / REPOSITORY
        files = sorted(
            path for path in root.rglob("*") if path.is_file() and path.suffix in (".toml", ".json", ".onnx")
        )
        path, kind = inner.choice(files), inner.randrange(6)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            path.unlink()
            os.mkfifo(path)
        elif kind == 2:
            (root / "cotenant.toml").write_text(f"[server]\nhttp_port = {inner.choice(ODD[:14])}\n", errors="replace")
        elif kind == 3:
            (Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe"))).mkdir()
        else:
            path.write_bytes(damaged(path.read_bytes(), inner))

    return place


def run_line(folder: Path, arguments: Sequence[str], stream: str) -> tuple[int, str, str]:
    """Run a command line in this process and in this folder; its status and what it printed."""
    from cotenant.cli import status_of
    from cotenant.cli.app import app

    encoding = stream if stream in ("latin-1", "ascii") else "utf-8"
    out: Any = open("/dev/full", "w", encoding=encoding) if stream == "full" else _text(encoding)  # noqa: SIM115
    err = _text("utf-8")
    before, limits = os.getcwd(), resource.getrlimit(resource.RLIMIT_FSIZE)
    os.chdir(folder)
    sys.argv = ["cotenant", *arguments]
    for name, columns in (("narrow", "20"), ("wide", "1000")):
        if stream == name:
            os.environ["COLUMNS"] = columns
    if stream == "small files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = status_of(app)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.environ.pop("COLUMNS", None)
        os.chdir(before)
    told = "" if stream == "full" else _value(out)
    with contextlib.suppress(OSError):
        out.close()
    return status, told, _value(err)


def _text(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", write_through=True)


def _value(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding, "replace")


@contextlib.contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """A copy of the folder that a case may spoil."""
    made = folder.with_name(f"case-{os.getpid()}-{threading.get_ident()}")
    shutil.copytree(folder, made, symlinks=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def judged(case: Case, status: int, out: str, err: str) -> dict[str, Any]:
    """A row: what a case came to. Of a traceback in a file, its end."""
    kept = re.search(r"the traceback is in (\S+): ", err)
    if kept:
        err = Path(kept[1]).read_text(encoding="utf-8", errors="replace")
    return {
        "case": case.number,
        "line": " ".join(each if len(each) < 40 else f"{each[:20]}...({len(each)})" for each in case.arguments),
        "what": case.what,
        "stream": case.stream,
        "status": status,
        "traceback": "Traceback" in out + err or status == 70,
        "hang": False,
        "well_in_vain": status == 0 and case.fails and "--help" not in case.arguments,
        "said": err.strip()[-300:],
    }


def main(folder: Path) -> None:
    """Answer the numbers of cases on standard input, as `SEED NUMBER`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        seed, number = map(int, line.split())
        case, prepare = case_of(number, seed)
        began = time.monotonic()
        with copy_of(folder) as made:
            prepare(made)
            row = judged(case, *run_line(made, case.arguments, case.stream))
        answers.write(json.dumps({**row, "took_s": round(time.monotonic() - began, 3)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
