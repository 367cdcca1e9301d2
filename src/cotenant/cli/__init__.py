"""The command line: one module a command."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import NamedTemporaryFile

from cotenant.errors import CotenantError

EXIT_USER_ERROR = 2
EXIT_INTERNAL_ERROR = 70
EXIT_BROKEN_PIPE = 1
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Every error ends with one sentence and a status other than 0, never with a traceback."""
    import signal

    from cotenant.cli.signals import end_at_once, ending_at_once

    is_server = sys.argv[1:2] == ["serve"]  # which takes the signals over itself
    with nullcontext(end_at_once()) if is_server else ending_at_once():
        if is_server:  # it is not ended by a terminal that is closed, or by a reload too early
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _open_streams()
        from cotenant.cli.app import app
    status = status_of(app)
    end_at_once()  # the interpreter's own end takes time, too
    sys.exit(status)


def status_of(command: Callable[[], object]) -> int:
    """Run a command and give the exit status of the process. What ended the command early is one line on stderr."""
    try:
        try:
            command()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else EXIT_USER_ERROR
        sys.stdout.flush()
    except CotenantError as error:
        return _told(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return _told("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        reason = error.strerror or str(error) or type(error).__name__
        place = "standard output, a file or a connection" if error.filename is None else os.fsdecode(error.filename)
        return _told(f"{place}: {reason}", EXIT_USER_ERROR)
    except Exception as error:
        return _told(_kept(error), EXIT_INTERNAL_ERROR)
    return status


def _told(sentence: str, status: int) -> int:
    try:
        print(f"cotenant: {sentence}", file=sys.stderr, flush=True)
    except OSError:  # the reader is gone, or the disk is full
        pass
    return status


def _kept(error: Exception) -> str:
    """Write the traceback of an error that is not meant for users into the temporary folder, and say where it is."""
    from cotenant import __version__

    name = type(error).__name__
    told = [f"cotenant {__version__}\n", f"{sys.argv!r}\n", *traceback.format_exception(error)]
    try:
        with NamedTemporaryFile("w", prefix="cotenant-error-", suffix=".txt", delete=False, encoding="utf-8",
                                errors="backslashreplace") as file:  # fmt: skip
            file.writelines(told)
    except OSError as found:
        return f"internal error ({name}: {error}); the traceback could not be written ({found.strerror})"
    return f"internal error ({name}); the traceback is in {file.name}: add it to a report of the error"


def _open_streams() -> None:
    """Make the standard streams usable: characters that the encoding lacks become '?', closed descriptors are null.

    A closed standard output ends the process with a sentence, as what was asked for could not be told.
    """
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"[1-9][0-9]{0,3}", os.environ.get(name, "1")):
            del os.environ[name]  # rich would not say what is wrong with it
    is_closed = sys.stdout is None
    for number in (0, 1, 2):  # before a file gets the number of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if is_closed:
        sys.exit(_told("standard output is closed, expected a terminal, a pipe or a file", EXIT_USER_ERROR))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def _drop_output() -> None:
    """Let the interpreter's end not fail again at what could not be written."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # standard output is no file here
        pass
