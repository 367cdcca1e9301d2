"""The command line: one module a command."""

from __future__ import annotations

import sys

from cotenant.errors import CotenantError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Errors meant for the user end with status 2 and one sentence, never a traceback."""
    import signal

    from cotenant.cli.signals import ending_at_once

    with ending_at_once():
        if sys.argv[1:2] == ["serve"]:  # a server is not ended by a terminal that is closed, or by a reload too early
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from cotenant.cli.app import app

    try:
        app()
    except CotenantError as error:
        print(f"cotenant: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("cotenant: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"cotenant: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
