"""Plan files: TOML of sections, each read, checked and written by the package that makes it.

A file has the key `format` and the keys of its sections. A section belongs to the package that registers it (the socket
`registry.PLAN_SECTIONS`); a file with an unknown key is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cotenant import registry
from cotenant.errors import PlanError
from cotenant.files import parse_toml, read_toml, toml_text

FORMAT = "cotenant-plan/1"
TENANTS = "tenants"
"""The section that assigns tenants to devices; servers run it."""


class SectionCheck(NamedTuple):
    """Result of a check of a section, as sentences."""

    faults: Sequence[str] = ()
    """Reasons for which the section is invalid."""
    stale: Sequence[str] = ()
    """Valid parts that were made from other measurements."""


class FileSection(ABC):
    """A section of plan files. Its content is a value of the package's own type, false if empty.

    A package joins by an entry point of the group `registry.PLAN_SECTIONS` that names a subclass.
    """

    keys: ClassVar[tuple[str, ...]]
    """The keys of the file that belong to the section."""
    comment: ClassVar[str]
    """Lines at the top of a file that this section begins."""

    @abstractmethod
    def read(self, table: dict[str, Any], where: str) -> Any:
        """Decode the section's part of a file; modifies `table`.

        Raises PlanError with `where`, the key and the expected value.
        """

    @abstractmethod
    def tables(self, content: Any) -> dict[str, Any]:
        """The part of a file that `read` reads as this content."""

    def kept(self, root: Path, models: Collection[str]) -> Sequence[Any]:
        """Contents that a repository stores for these models, to add to a plan of tenants."""
        return ()

    def check(self, content: Any, roots: Sequence[Path], *, stale: bool | None) -> SectionCheck:
        """Check the content against the measurements of repositories.

        A model that changed since it was measured raises StaleProfileError. With `stale` True it is used with a
        warning; with None it counts as not measured.
        """
        return SectionCheck()

    def words(self, content: Any) -> Sequence[str]:
        """Each part of the content in a few words."""
        return ()


@cache
def sections() -> dict[str, FileSection]:
    """One object of every registered section by name, in the order in which files have them."""
    return {name: kind() for name, kind in registry.load_all(registry.PLAN_SECTIONS).items()}


def read_sections(path: Path) -> dict[str, Any]:
    """Read a plan file: the contents of its sections by name, without `FileSection.check`.

    Raises PlanError with the file, the key and the expected value.
    """
    return _contents(read_toml(path, PlanError), str(path))


def parse_sections(text: str, where: str) -> dict[str, Any]:
    """As `read_sections`; `where` is what errors call the text. Raises PlanError."""
    return _contents(parse_toml(text, where, PlanError), where)


def sections_text(contents: Mapping[str, Any]) -> str:
    """The TOML of a plan file: `parse_sections` of it gives the contents again."""
    found = {name: section for name, section in sections().items() if contents.get(name)}
    table: dict[str, Any] = {"format": FORMAT}
    for name, section in found.items():
        table |= section.tables(contents[name])
    return next(iter(found.values())).comment + toml_text(table)


def _contents(table: dict[str, Any], where: str) -> dict[str, Any]:
    given = table.pop("format", None)
    if given != FORMAT:
        raise PlanError(f"{where}: format is {given!r}, expected {FORMAT!r}: is it the output of 'cotenant plan'?")
    keys = [key for section in sections().values() for key in section.keys]
    for key in table:
        if key not in keys:
            expected = ", ".join(("format", *keys))
            raise PlanError(
                f"{where}: Object contains unknown field `{key}`, expected one of {expected}; other sections need the "
                "package that makes them"
            )
    parts = {name: {key: table[key] for key in section.keys if key in table} for name, section in sections().items()}
    if not any(parts.values()):
        raise PlanError(f"{where}: has no section, expected at least one of {', '.join(parts)}")
    return {name: sections()[name].read(part, where) for name, part in parts.items() if part}
