"""Calls and files of one operating system are in `cotenant.linux`, and in the modules that only a Linux server runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cotenant

PACKAGE = Path(cotenant.__file__).parent
HOME = "linux.py"
SERVING = ("cluster", "execute/worker", "serve")
"""Packages of what serves: workers, engine, front-ends and nodes. `linux.require` stands before them."""
NAMES = {
    *("sched_getaffinity", "sched_setaffinity", "getpriority", "setpriority", "sysconf", "getloadavg", "uname"),
    *("getrusage", "getrlimit", "setrlimit", "flock", "memfd_create", "F_ADD_SEALS", "madvise", "MAP_PRIVATE"),
    *("preadv", "prctl", "malloc_trim", "timerfd_create", "syscall", "fork", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"),
    *("fchmod", "SIGKILL", "RLIMIT_NOFILE"),
}
"""Attributes and constants that other systems lack, anywhere but in HOME."""
SERVER_NAMES = {
    *("pidfd_open", "pidfd_send_signal", "posix_fallocate", "AF_UNIX", "SCM_RIGHTS", "sendmsg", "MSG_DONTWAIT"),
    *("getuid", "pwrite", "pread", "SIGHUP", "O_NOFOLLOW"),
}
"""Those that SERVING may use, too."""
ALLOWED = {
    ("cli/__init__.py", "SIGHUP"): "only for `serve`, and there only on Linux",
    ("cli/signals.py", "SIGHUP"): "of `serve`",
    ("execute/worker/kept_workers.py", "SIGKILL"): "sent through a pidfd",
}
MODULES = {"fcntl", "resource", "termios", "pwd", "grp"}
FILES = re.compile(r"/(proc|sys|dev/shm)(/|$)")


def used(module: ast.Module) -> set[str]:
    """Names of attributes, imported modules and files of a system in a module; not those in docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & (NAMES | SERVER_NAMES)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & MODULES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {match.group() for match in [FILES.match(node.value)] if match}
    return found


def test_calls_of_one_system_have_one_home() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in used(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len({name for place, name in found if place == HOME}) > 20
    elsewhere = {
        (place, name)
        for place, name in found
        if place != HOME and not (name in SERVER_NAMES and place.startswith(SERVING))
    }
    assert sorted(elsewhere - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - elsewhere) == []


def test_the_search_finds_them() -> None:
    text = '"/proc is not meant"\nimport fcntl\nimport os\nos.uname()\nopen("/proc/stat")\ns = "/process"\n'
    assert used(ast.parse(text)) == {"fcntl", "uname", "/proc/"}
