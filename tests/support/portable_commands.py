"""Runs what works on every system, in one process; prints a line for each step. Arguments: a folder with `models/`."""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import cotenant
from cotenant.cli import status_of

ROOT = Path(sys.argv[1])
TRACE, WORKLOAD, TENANTS, MODELS = (ROOT / name for name in ("trace.jsonl", "workload.toml", "tenants.toml", "models"))
COMMANDS = {
    "models": ("models", MODELS),
    "init": ("init", ROOT / "bare.onnx", "--repository", ROOT / "made"),
    "profile": ("profile", MODELS, "--budget", "0"),
    "simulate": ("simulate", WORKLOAD, MODELS, "--trace", TRACE),
    "explain": ("explain", "0", TRACE),
    "lost": ("explain", "--lost", TRACE),
    "replay": ("replay", TRACE),
    "bound": ("bound", TRACE),
    "plan": ("plan", TENANTS, "--profiles", MODELS, "--quick", "--out", ROOT / "plan.toml"),
    "check": ("plan", "--check", ROOT / "plan.toml", "--profiles", MODELS),
    "devices": ("devices",),
    "doctor": ("doctor", "--json"),
    "infer": ("infer", "--help"),
    "load": ("load", "--help"),
    "serve": ("serve", MODELS),
    "compile": ("compile", MODELS),
    "contention": ("profile", MODELS, "--contention"),
}


def run(*words: object) -> tuple[int, str]:
    """The exit status of a command, and what it said."""
    from cotenant.cli.app import app

    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    sys.argv = ["cotenant", *map(str, words)]
    with redirect_stdout(said), redirect_stderr(said):
        status = status_of(app)
    said.seek(0)
    return status, " ".join(said.read().split())


def main() -> None:
    failed = []
    for found in pkgutil.walk_packages(cotenant.__path__, "cotenant."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except Exception as error:
                failed.append(f"{found.name}: {error!r}")
    print("modules:", *(failed or ["all"]))
    for name, words in COMMANDS.items():
        status, said = run(*words)
        print(f"{name}: {status} {said}")
    run_found = cotenant.simulate(WORKLOAD, cotenant.Repository(MODELS), policy="edf")
    print("api simulate:", run_found.tenant("two").offered > 0)
    print("api plan:", cotenant.plan(TENANTS, MODELS, quick=True).fits)
    print("api models:", *cotenant.Repository(MODELS).models)
    try:
        cotenant.Server(MODELS)
    except cotenant.CotenantError as error:
        print("api server:", error)


if __name__ == "__main__":
    main()
