"""Results of loads that the next engine uses: as long as nothing that they depend on has changed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cotenant.config import DeviceSection
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.measure.loader import load
from cotenant.repository import find_versions, profile_path
from cotenant.serve.models import stored_loads
from cotenant.serve.models.stored_loads import StoredLoads, stamps_of
from cotenant.work import Share
from repositories import config, scaled, write_model


class Kept:
    """A version, its report, and the stored loads of engines that follow each other."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "models", folder / "loads"
        write_model(self.root, "two", config(), {1: lambda: scaled(2.0)})
        (found,) = find_versions(self.root, "two", {})
        self.spec = VersionSpec(str(self.root), replace(found, is_default=True), (Share((0,)),))
        self.report = load(structs.replace(self.spec, shares=()))

    def keep(self, report: LoadReport | None = None) -> None:
        StoredLoads(self.folder).keep(self.spec, stamps_of(self.spec), report or self.report)

    def find(self, **changes: Any) -> tuple[LoadReport | None, bool]:
        return StoredLoads(self.folder).find(structs.replace(self.spec, **changes))

    @property
    def file(self) -> Path:
        return self.spec.found.path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(stored_loads, "_SETTLED_NS", -(10**18))  # however shortly ago files were written
    return Kept(tmp_path)


def test_a_load_is_used_once_by_the_next_engine(kept: Kept) -> None:
    assert kept.find() is None
    kept.keep()
    engine = StoredLoads(kept.folder)
    assert engine.find(kept.spec) == kept.report
    assert engine.find(kept.spec) is None  # a client that loads it means it
    assert kept.find() == kept.report


def test_whatever_a_load_depends_on_is_looked_at(kept: Kept, tmp_path: Path) -> None:
    kept.keep()
    facts = os.stat(kept.file)
    content = kept.file.read_bytes()
    kept.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(kept.file, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # the same size and time: ctime is another
    assert kept.find() is None
    kept.keep()
    assert kept.find() == kept.report
    assert kept.find(shares=(Share((0,)), Share((0, 1)))) is None
    other = structs.replace(kept.spec.found.config.tenant, slo_ms=77.0)
    changed = structs.replace(kept.spec.found.config, tenant=other)
    assert kept.find(found=replace(kept.spec.found, config=changed)) is None
    weights = kept.file.with_name("weights.bin")
    weights.write_bytes(b"1")
    assert kept.find() is None
    weights.unlink()
    profile_path(kept.root).parent.mkdir(exist_ok=True)
    profile_path(kept.root).write_text("{}")
    assert kept.find() is None
    kept.keep()
    assert kept.find() == kept.report
    (kept.file.parent / "more").symlink_to(tmp_path)  # files of other folders are not looked at
    kept.keep()
    assert kept.find() is None


def test_files_that_may_still_change_are_read_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_loads, "_SETTLED_NS", 10**18)
    kept.keep()
    assert kept.find() is None


def test_loads_for_a_gpu_and_those_with_measured_strategies_are_made_again(kept: Kept) -> None:
    device = DeviceSection(kind="cuda")
    kept.spec = structs.replace(kept.spec, device=device)
    kept.keep()
    assert kept.find() is None
    model = structs.replace(kept.spec.found.config.model, placement="auto")
    placed = replace(kept.spec.found, config=structs.replace(kept.spec.found.config, model=model))
    kept.spec = structs.replace(kept.spec, device=None, found=placed)
    kept.keep()
    assert kept.find() is None


def test_assumed_profiles_and_damaged_files_are_not_used(kept: Kept) -> None:
    kept.keep()
    kept.keep(structs.replace(kept.report, warning="it cannot be run on sample values"))
    assert kept.find() is None
    kept.keep()
    (file,) = kept.folder.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert kept.find() is None
