"""Links between pages: every relative link leads to a file that exists, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "deploy", "docs", "examples", "profiles", "src", "tests")
LEFT_OUT = ROOT / "docs" / "decisions"
"""Decisions are records of their day: what they link to may be gone."""


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    return sorted(page for page in found if LEFT_OUT not in page.parents)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which links can name places of a page: its headings as GitHub writes them, and explicit ones."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def dead(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and is_page and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def test_no_link_is_dead() -> None:
    found = {str(page.relative_to(ROOT)): dead(page, page.read_text(encoding="utf-8")) for page in pages()}
    assert len(found) > 30
    assert {page: links for page, links in found.items() if links} == {}


def test_a_dead_link_is_found() -> None:
    page = ROOT / "docs" / "README.md"
    text = "[a](no.md) [b](design.md#the-way-of-a-query) [c](design.md#no) [d](https://x.y/z) [e](#e-f)\n# `e` f\n"
    assert dead(page, text) == ["no.md", "design.md#no", "#e-f"]
    assert anchors(text) == {"e-f"}
