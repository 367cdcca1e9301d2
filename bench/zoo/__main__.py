"""`python -m bench.zoo NAMES... DIR`: the networks of the papers as a model repository."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench._registry import BenchError
from bench.zoo import NAMES
from bench.zoo.repository import FORMATS, Format, build_repository
from cotenant.errors import CotenantError

ALL = "all"
_MOST_SEED = 2**32 - 1


def main(arguments: Sequence[str]) -> int:
    """Run the command line; give the exit status."""
    chosen = _parser().parse_intermixed_args(arguments)
    roots: dict[Format, Path] = (
        {form: chosen.directory / form for form in FORMATS}
        if chosen.format == "both"
        else {chosen.format: chosen.directory}
    )
    try:
        names = _names(chosen.names)
        tell = None if chosen.json else lambda name, what: print(f"{name}: {what}", flush=True)
        written = build_repository(roots, names, seed=chosen.seed, progress=tell)
    except CotenantError as error:
        print(f"bench.zoo: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps({"models": names, "written": written, "repositories": {k: str(v) for k, v in roots.items()}}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.zoo",
        description="Write networks of the papers, with seeded weights, into a model repository (needs torch). "
        "Models that are there and up to date are left alone.",
    )
    parser.add_argument("names", nargs="+", metavar="NAMES", help=f"models, with spaces or commas, or {ALL!r}")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the model repository to make or complete")
    about = "'both' makes two repositories, DIR/onnx and DIR/pt2 (default: %(default)s)"
    parser.add_argument("--format", choices=(*FORMATS, "both"), default="onnx", help=about)
    parser.add_argument("--seed", type=_seed, default=0, help="the weights belong to it (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed <= _MOST_SEED:
        raise argparse.ArgumentTypeError(f"{seed} is not from 0 to {_MOST_SEED}")
    return seed


def _names(texts: Sequence[str]) -> list[str]:
    """The models that are asked for, each once. Raises BenchError for no name and for an unknown one."""
    asked = [name for text in texts for name in text.replace(",", " ").split()]
    expected = f"expected one of: {', '.join(NAMES)}, or {ALL!r}"
    if not asked:
        raise BenchError(f"no model is named, {expected}")
    unknown = [name for name in asked if name not in (ALL, *NAMES)]
    if unknown:
        raise BenchError(f"model {unknown[0]!r} is not in the zoo; {expected}")
    return list(NAMES) if ALL in asked else list(dict.fromkeys(asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
