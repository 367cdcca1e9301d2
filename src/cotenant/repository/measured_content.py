"""Staleness check of measurements: digests of the files and configurations of the models in a repository.

The check loads no model. The server, which loads models, compares more (`measure.loader`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from cotenant.profiles.profile_file import ModelContent, Profile, ProfileError, load_profile
from cotenant.repository.model_versions import ModelVersion, readable_versions
from cotenant.repository.paths import CONFIG_FILE, profile_path

_log = logging.getLogger("cotenant.profile")


class StaleProfileError(ProfileError):
    """A profile is not of the models in the repository. The text has the models and the command to repeat it."""


def content_of(found: ModelVersion, *, placed: bool = True) -> ModelContent:
    """Digests of the files and of the configuration of a version; "" for its files if one cannot be read.

    Files are those in the directory of the version, without hidden ones, and its sample files. The configuration
    consists of the sections of `config.toml` on which latencies depend; without `placed`, on which latencies without a
    placement depend.
    """
    folder = found.path.parent
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    names = {path: str(path.relative_to(folder)) for path in files}
    samples = sorted({section.file for section in found.config.samples.values() if section.file})
    names |= {path: f"../{file}" for file in samples if (path := folder.parent / file).is_file()}
    config = found.config
    model = config.model if placed else msgspec.structs.replace(config.model, placement="none")
    parts = msgspec.json.encode((model, config.segments, config.samples), order="sorted")
    return ModelContent(_files_digest(names), hashlib.sha256(parts).hexdigest()[:16])


def _files_digest(names: Mapping[Path, str]) -> str:
    content = hashlib.sha256()
    try:
        for path, name in names.items():
            with path.open("rb") as file:
                content.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError:
        return ""
    return content.hexdigest()[:16]


def changes(
    root: Path,
    measured: Mapping[str, ModelContent | UnsetType],
    tenants: Collection[str] | None = None,
    *,
    placed: bool = True,
) -> dict[str, str]:
    """Changes since the measurements `measured`: a sentence for each changed tenant, of all or of `tenants`.

    Tenants without a model in the repository, or without measurements, are left out. `placed` is as in `content_of`.
    """
    found: dict[str, str] = {}
    for version in readable_versions(root):
        name = version.tenant
        if name not in measured or (tenants is not None and name not in tenants):
            continue
        config, then = f"{version.model}/{CONFIG_FILE}", measured[name]
        if then is UNSET:
            found[name] = f"{name!r}: the profile has no digests of its files and configuration"
            continue
        now = content_of(version, placed=placed)
        changed = [
            what
            for what, is_changed in (
                (f"files in {version.model}/{version.path.parent.name}", then.files != now.files or not now.files),
                (config, then.config != now.config),
            )
            if is_changed
        ]
        if changed:
            found[name] = f"{name!r}: {' and '.join(changed)} changed since it was measured"
    return found


def valid_profile(root: Path, tenants: Collection[str] | None = None, *, stale: bool = False) -> Profile:
    """The profile of a repository, checked against its present models, or those of `tenants`.

    With `stale`, a stale profile is returned with a warning in the log. Raises ProfileError if there is none, and
    StaleProfileError.
    """
    profile = load_profile(profile_path(root))
    refuse_changes(changes(root, profile.contents, tenants), root, stale=stale)
    return profile


def refuse_changes(found: Mapping[str, str], root: Path, *, stale: bool, command: str = "") -> None:
    """Raise StaleProfileError for changed models; with `stale`, log a warning instead.

    `command` repeats the measurement, `cotenant profile` by default.
    """
    changed, command = "; ".join(found.values()), command or f"cotenant profile {root}"
    if found and stale:
        _log.warning("%s: stale measurements are used: %s; repeat them with '%s'", root, changed, command)
    elif found:
        raise StaleProfileError(f"the profile of {root} is stale: {changed}. Run '{command}', or use it with --stale")
