"""Command line: one module for each command."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import NamedTemporaryFile

from cotenant.errors import CotenantError
from cotenant.linux import IS_LINUX

EXIT_USER_ERROR = 2
EXIT_INTERNAL_ERROR = 70
EXIT_BROKEN_PIPE = 1
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Each error ends with one sentence and a status other than 0, never with a traceback."""
    import signal

    from cotenant.cli.signals import end_at_once, ending_at_once

    is_server = sys.argv[1:2] == ["serve"] and IS_LINUX  # it handles signals itself
    with nullcontext(end_at_once()) if is_server else ending_at_once():
        if is_server:  # a closed terminal or an early reload must not end it
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _open_streams()
        from cotenant.cli.app import app
    status = status_of(app)
    end_at_once()  # shutdown of the interpreter takes time, too
    sys.exit(status)


def status_of(command: Callable[[], object]) -> int:
    """Run a command; return the exit status of the process. An error is one line on stderr."""
    try:
        try:
            command()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else EXIT_USER_ERROR
        sys.stdout.flush()
    except CotenantError as error:
        return _print_error(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        reason = error.strerror or str(error) or type(error).__name__
        place = "standard output, a file or a connection" if error.filename is None else os.fsdecode(error.filename)
        return _print_error(f"{place}: {reason}", EXIT_USER_ERROR)
    except Exception as error:
        return _print_error(_save_traceback(error), EXIT_INTERNAL_ERROR)
    return status


def _print_error(sentence: str, status: int) -> int:
    try:
        print(f"cotenant: {sentence}", file=sys.stderr, flush=True)
    except OSError:  # the reader is gone, or the disk is full
        pass
    return status


def _save_traceback(error: Exception) -> str:
    """Save the traceback of an internal error in the temporary folder; return a sentence with its path."""
    from cotenant import __version__

    name = type(error).__name__
    lines = [f"cotenant {__version__}\n", f"{sys.argv!r}\n", *traceback.format_exception(error)]
    try:
        with NamedTemporaryFile("w", prefix="cotenant-error-", suffix=".txt", delete=False, encoding="utf-8",
                                errors="backslashreplace") as file:  # fmt: skip
            file.writelines(lines)
    except OSError as found:
        return f"internal error ({name}: {error}); the traceback could not be written ({found.strerror})"
    return f"internal error ({name}); the traceback is in {file.name}: add it to a report of the error"


def _open_streams() -> None:
    """Make the standard streams usable: unknown characters become '?', closed descriptors become the null device.

    A closed standard output ends the process with an error, since its result could not be printed.
    """
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]  # rich would fail without a clear error
    is_closed = sys.stdout is None
    for number in (0, 1, 2):  # before a new file gets the number of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if is_closed:
        sys.exit(_print_error("standard output is closed, expected a terminal, a pipe or a file", EXIT_USER_ERROR))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def _drop_output() -> None:
    """Discard unwritten output, so that shutdown of the interpreter does not fail on it again."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # standard output is not a file here
        pass
