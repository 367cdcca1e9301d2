"""Figures of the pages, tied to kept results by `docs/claims.toml`, and a finder of figures that are not.

A `[[claim]]` names a page, a result and a fragment of the page. Each figure of the fragment is a placeholder
`{expression:format}`: a Python expression over the summary of the result, and the format by which its value is rounded.
The fragment so made must be in the page. A `[[declared]]` lists fragments whose figures are no claims of ours.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench._record import RESULTS
from bench._registry import FOLDER, BenchError

ROOT = FOLDER.parent
CLAIMS = "docs/claims.toml"
PAGES = ("README.md", "docs/*.md", "src/cotenant/**/README.md")
"""Pages that make claims. Decisions and the changelog are dated records, and are left out."""
KINDS = ("paper", "example", "setting", "goal", "table")
"""What a declared figure can be: of a paper, of a command's output that is shown, a setting or a definition, a goal, or
of a table of measurements below `profiles/` that the page names."""
_NUMBER = r"[+\-\u2212]?\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = r"(?:\s?%|x\b|\s(?:times|ms|us|points?|(?:queries|requests|answers)(?:/s| a second))\b)"
_FOUND = re.compile(
    rf"(?<![\w.\-/#=`]){_NUMBER}(?:(?:,| to| and| /|, and) {_NUMBER})*{_UNIT}|(?<![\w.\-/#=`])0\.\d+(?= of\b)"
)
_GIVEN = re.compile(r"(?:\bat|\bgoal|>=|<=|<|>) $")
_PLACEHOLDER = re.compile(r"\{([^{}]+):([^{}:]*)\}")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_RESULTS = re.compile(r"<!-- results -->.*?<!-- end of results -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Figure:
    """A placeholder of a claim: its expression, its value, and the text that the value gives."""

    expression: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A fragment of a page and the result that it is of. `line` is 0 where the page does not have the fragment."""

    page: str
    result: str
    fragment: str
    line: int = 0
    figures: Sequence[Figure] = ()
    fault: str = ""
    """Why the claim does not hold: empty, or a sentence."""
    has_row: bool = True


@dataclass(slots=True)
class Page:
    """The prose of a page in one line, and which parts of it are tied or declared."""

    name: str
    text: str
    starts: Sequence[int]
    """Position in `text` at which each line begins."""
    spoken_for: list[tuple[int, int]] = field(default_factory=list)

    def line_of(self, at: int) -> int:
        """The line of a position, from 1."""
        return bisect_right(self.starts, at)

    def free_figures(self) -> Iterator[tuple[int, str]]:
        """Line and text of the figures that are neither tied nor declared."""
        for found in _FOUND.finditer(self.text):
            if _GIVEN.search(self.text, max(0, found.start() - 10), found.start()):
                continue
            numbers = [found.start() + each.start() for each in re.finditer(_NUMBER, found.group())]
            if not all(any(start <= at < end for start, end in self.spoken_for) for at in numbers):
                yield self.line_of(found.start()), self.text[max(0, found.start() - 60) : found.end() + 20].strip()


def read_page(path: Path, name: str) -> Page:
    """The page without code blocks, code spans and tables of kept results; runs of white space are one space."""
    source = path.read_text(encoding="utf-8")
    for pattern in (_CODE, _RESULTS):
        source = pattern.sub(lambda found: "\n" * found.group().count("\n"), source)
    parts: list[str] = []
    starts: list[int] = []
    length = 0
    for line in source.splitlines():
        starts.append(length)
        words = " ".join(line.split())
        if words:
            parts.append(words + " ")
            length += len(words) + 1
    return Page(name, "".join(parts), starts)


def pages_of(root: Path = ROOT) -> dict[str, Page]:
    """All pages that make claims, by path from the root."""
    paths = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    names = [path.relative_to(root).as_posix() for path in paths]
    return {name: read_page(path, name) for name, path in zip(names, paths, strict=True)}


def judge(pages: Mapping[str, Page], root: Path = ROOT, results: Path = RESULTS) -> list[Claim]:
    """All claims, each held against its result and its page; marks in `pages` what is tied or declared.

    Raises BenchError for a file of claims that cannot be read so.
    """
    told = tomllib.loads((root / CLAIMS).read_text(encoding="utf-8"))
    made = [_judged(entry, pages, results) for entry in told.get("claim", ())]
    for entry in told.get("declared", ()):
        if entry.get("kind") not in KINDS:
            raise BenchError(f"{CLAIMS}: kind is {entry.get('kind')!r}, expected one of {', '.join(KINDS)}")
        page = _page(pages, entry)
        for text in entry["texts"]:
            spans = [(found.start(), found.end()) for found in re.finditer(re.escape(text), page.text)]
            if not spans:
                made.append(Claim(page.name, "", text, fault="the page does not have this declared text"))
            page.spoken_for += spans
    return made


def _page(pages: Mapping[str, Page], entry: Mapping[str, Any]) -> Page:
    page = pages.get(entry.get("page", ""))
    if page is None:
        raise BenchError(f"{CLAIMS}: there is no page {entry.get('page')!r}, expected one of {', '.join(pages)}")
    return page


def _judged(entry: Mapping[str, Any], pages: Mapping[str, Page], results: Path) -> Claim:
    page, result, fragment = _page(pages, entry), entry["result"], entry["text"]
    figures: list[Figure] = []

    def value(found: re.Match[str]) -> str:
        figures.append(Figure(found[1], *_rounded(record, found[1], found[2])))
        return figures[-1].text

    try:
        record = _record(results / f"{result}.json")
        text = _PLACEHOLDER.sub(value, fragment)
    except Exception as error:  # an expression can raise anything; each is a claim without a row
        return Claim(page.name, result, fragment, fault=f"no row: {error}", has_row=False)
    at = page.text.find(text)
    if at < 0:
        return Claim(page.name, result, text, 0, figures, _difference(fragment, text, page))
    end = at
    for given, literal in zip([*figures, None], _PLACEHOLDER.sub("\0", fragment).split("\0"), strict=True):
        end += len(literal)
        if given is not None:
            page.spoken_for.append((end, end + len(given.text)))
            end += len(given.text)
    return Claim(page.name, result, text, page.line_of(at), figures)


def _difference(fragment: str, text: str, page: Page) -> str:
    pattern = _NUMBER.join(map(re.escape, _PLACEHOLDER.sub("\0", fragment).split("\0")))
    found = re.search(pattern, page.text)
    if found is None:
        return f"the page does not have {text!r}"
    return f"line {page.line_of(found.start())} has {found.group()!r}, the result gives {text!r}"


@cache
def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def record_of(result: str, results: Path = RESULTS) -> dict[str, Any]:
    """A kept result."""
    return _record(results / f"{result}.json")


def _rounded(record: Mapping[str, Any], expression: str, form: str) -> tuple[float, str]:
    """The value of an expression over a result, and its text."""
    rows = record["rows"]

    def pick(key: str, **where: object) -> list[float]:
        """The values of a column in the rows where these columns have these values; `class_` is `class`."""
        wanted = {name.rstrip("_"): value for name, value in where.items()}
        return [row[key] for row in rows if key in row and all(row.get(name) == wanted[name] for name in wanted)]

    def worst(prefix: str, **where: object) -> list[float]:
        """The least of the columns with this prefix in each of these rows."""
        wanted = {name.rstrip("_"): value for name, value in where.items()}
        chosen = [row for row in rows if all(row.get(name) == wanted[name] for name in wanted)]
        return [min(value for name, value in row.items() if name.startswith(prefix)) for row in chosen]

    names = record["summary"] | {
        "pick": pick,
        "worst": worst,
        "rows": rows,
        "median": statistics.median,
        "mean": statistics.fmean,
        "geomean": statistics.geometric_mean,
        "min": min,
        "max": max,
        "len": len,
        "sum": sum,
        "abs": abs,
    }
    value = float(eval(expression, {"__builtins__": {}}, names))
    return value, format(value, form)
