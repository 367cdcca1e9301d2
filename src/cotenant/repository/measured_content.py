"""Whether measurements are of the models that a repository holds now: digests of files and configurations.

No model is opened to tell. The server, which opens models, compares more: see `measure.loader`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from cotenant.profile.profile_file import ModelContent, Profile, ProfileError, load_profile
from cotenant.repository.model_versions import ModelVersion, readable_versions
from cotenant.repository.paths import CONFIG_FILE, profile_path

_log = logging.getLogger("cotenant.profile")


class StaleProfileError(ProfileError):
    """A profile is of other models than the repository holds: names them and the command that measures them anew."""


def content_of(found: ModelVersion, *, placed: bool = True) -> ModelContent:
    """The digests of a version; that of its files is "" where one of them cannot be read.

    Files are those of the version's directory, hidden ones left out, and the files of its samples. Of `config.toml`
    count the sections that a latency depends on, not who owns the model and what was promised. Unless `placed`, that is
    the latency without placements.
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
    """What changed since it was `measured`, as a sentence by tenant; of all tenants, or of `tenants`.

    Tenants without a model in the repository, or without measurements, are left out. `placed`: see `content_of`.
    """
    found: dict[str, str] = {}
    for version in readable_versions(root):
        name = version.tenant
        if name not in measured or (tenants is not None and name not in tenants):
            continue
        config, then = f"{version.model}/{CONFIG_FILE}", measured[name]
        if then is UNSET:
            found[name] = f"{name!r}: the profile does not say of which files and configuration it is"
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
    """The profile of a repository, which is of its models as they are now; of `tenants`, where these are given.

    With `stale` it is given whatever changed, with a warning in the log. Raises ProfileError where there is none, and
    StaleProfileError.
    """
    profile = load_profile(profile_path(root))
    refuse_changes(changes(root, profile.contents, tenants), root, stale=stale)
    return profile


def refuse_changes(found: Mapping[str, str], root: Path, *, stale: bool, command: str = "") -> None:
    """Raise StaleProfileError for changed models; with `stale` they are told to the log.

    `command` measures anew; it is `cotenant profile` where none is given.
    """
    changed, command = "; ".join(found.values()), command or f"cotenant profile {root}"
    if found and stale:
        _log.warning("%s: stale measurements are used: %s; '%s' makes others", root, changed, command)
    elif found:
        raise StaleProfileError(f"the profile of {root} is stale: {changed}. Run '{command}', or go on with --stale")
