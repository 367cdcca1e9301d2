"""A control program of MPS that writes down what it is told."""

from __future__ import annotations

from pathlib import Path

WAIT_S = 30.0
FAKE = """#!/bin/sh
# Stands for nvidia-cuda-mps-control: in the foreground a daemon with a server, else a client that gives it one command.
told=$(dirname "$0")/told
pipes=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo "start $pipes $CUDA_MPS_LOG_DIRECTORY" >> "$told"
    [ -e "$(dirname "$0")/broken" ] && { echo "no GPU for MPS" >&2; exit 3; }
    sleep 1000 &
    echo "$$ $!" > "$pipes/pids"
    echo 100.0 > "$pipes/default"
    mkfifo "$pipes/control"
    read -r _ < "$pipes/control"
    exit 0
fi
read -r command
[ -p "$pipes/control" ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
echo "$command" >> "$told"
set -- $command
case $1 in
    quit) [ -e "$(dirname "$0")/stubborn" ] || echo > "$pipes/control" ;;
    get_server_list) cut -d ' ' -f 2 "$pipes/pids" ;;
    get_default_active_thread_percentage) cat "$pipes/default" ;;
    set_default_active_thread_percentage) echo "$2" > "$pipes/default" ;;
    set_active_thread_percentage) echo "$3" > "$pipes/server-$2" ;;
    get_active_thread_percentage) cat "$pipes/server-$2" ;;
    *) echo "Unknown command" >&2; exit 1 ;;
esac
"""


def write_control(folder: Path) -> Path:
    """Put the program below a folder; gives its path."""
    path = folder / "bin" / "nvidia-cuda-mps-control"
    path.parent.mkdir()
    path.write_text(FAKE, encoding="utf-8")
    path.chmod(0o755)
    return path


def told(control: Path) -> list[str]:
    return (control.parent / "told").read_text(encoding="utf-8").splitlines()
