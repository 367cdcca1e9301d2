"""The papers' headline figures beside ours: runs every experiment that has some, or takes the results that are kept."""

from __future__ import annotations

import importlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench._data import Headline
from bench._record import RESULTS
from bench._registry import BenchError, Benchmark, benchmarks
from cotenant.errors import CotenantError

PAPERS = "papers"
_WIDTH = 170
Figures = Mapping[str, float | None]


def reproduce(data_dir: Path, quick: bool = False, committed: bool = False, results: Path = RESULTS) -> None:
    """Run the experiments of the papers in turn and print one table.

    What fails or is interrupted stands in the table with its reason. Raises KeyboardInterrupt after the table.
    """
    console = Console(width=max(_WIDTH, Console().width))
    papers = [each for each in benchmarks().values() if each.file.parts[0] == PAPERS]
    experiments = [(each, found, reason) for each in papers for found, reason in [_headlines(each)] if found or reason]
    table = _table("quick" if quick and not committed else "full", with_kept=not committed)
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for number, (experiment, headlines, reason) in enumerate(experiments, 1):
            figures: Figures = {}
            kept = _kept(experiment, results)
            began = time.monotonic()
            try:
                if committed:
                    figures, reason = kept, "" if kept else f"no result is kept in {results}"
                elif interrupted:
                    reason = "interrupted before"
                elif not reason:
                    console.rule(f"{number} of {len(experiments)}: {experiment.name}")
                    figures = _run(experiment, quick, data_dir)
                    console.print(f"{experiment.name} took {time.monotonic() - began:.0f} s")
                    if interrupted:  # some libraries end a fit early and go on, as if nothing had happened
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                interrupted, figures, reason = True, {}, "interrupted"
            except Exception as error:  # one that fails must not keep the others from their figures
                reason = _reason(error)
            if reason:
                console.print(f"{experiment.name}: {reason}", markup=False)
            for cells in _lines(experiment, headlines, figures, kept, reason):
                table.add_row(*map(escape, cells if not committed else cells[:6] + cells[7:]))
            table.add_section()
    finally:
        signal.signal(signal.SIGINT, before)
    console.print(table)
    if quick and not committed:
        console.print("quick: fewer runs, seeds, mixes and pairs; figures may be far from those of a full run")
    if interrupted:
        raise KeyboardInterrupt


def _headlines(experiment: Benchmark) -> tuple[tuple[Headline, ...], str]:
    """The headlines of an experiment; or why it cannot be loaded."""
    try:
        return getattr(importlib.import_module(experiment.module), "HEADLINES", ()), ""
    except Exception as error:
        return (), _reason(error)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CotenantError) else f"{type(error).__name__}: {error}"


def _run(experiment: Benchmark, quick: bool, data_dir: Path) -> Figures:
    summary: Figures = experiment.load()(quick, data_dir)["summary"]
    if not summary:
        raise BenchError("it gave no figures: its output says why")
    return summary


def _kept(experiment: Benchmark, results: Path) -> Figures:
    """What a full run gave; nothing where no result is kept."""
    path = results / f"{experiment.name}.json"
    if not path.exists():
        return {}
    summary: Figures = json.loads(path.read_text(encoding="utf-8"))["summary"]
    return summary


def _table(form: str, with_kept: bool) -> Table:
    table = Table(title="The papers' figures and ours")
    for head in ("experiment", "paper", "where", "what"):
        table.add_column(head)
    for head in ("paper's", f"ours, {form} run", *(["full run, kept"] if with_kept else []), "bound"):
        table.add_column(head, justify="right")
    table.add_column("ours was, or differs in")
    return table


def _lines(
    experiment: Benchmark, headlines: tuple[Headline, ...], figures: Figures, kept: Figures, reason: str
) -> Iterator[tuple[str, ...]]:
    """The cells of an experiment, in the order of the columns, with the kept result."""
    if not headlines:
        yield (experiment.name, *["-"] * 7, reason)
    for each in headlines:
        paper, where, said = "-", "-", "-"
        if each.paper is not None:
            paper, where, said = each.paper.paper, each.paper.where, each.paper.text
            if (each.paper.unit, each.unit) == ("%", "x"):  # a gain
                said += f" ({1 + float(each.paper.value) / 100:.3g} x)"
        ours, full = _text(each, each.ours, figures), _text(each, each.ours, kept)
        note = reason or (each.note if each.ours in figures else f"{each.note}; in full runs only")
        yield (experiment.name, paper, where, each.what, said, ours, full, _text(each, each.bound, figures), note)


def _text(headline: Headline, metric: str, figures: Figures) -> str:
    value, whole = figures.get(metric), figures.get(headline.of, 1.0)
    if value is None or not whole:
        return "-"
    return f"{100 * value / whole if headline.of else value:.3g} {headline.unit}".strip()
