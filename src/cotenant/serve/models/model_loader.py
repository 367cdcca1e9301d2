"""Model loader: loads the versions of a model for service; the newest version that loads is the default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from cotenant.config import ServerConfig
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.errors import WorkerLostError
from cotenant.execute.protocol import ModelExecutor
from cotenant.measure.load_spec import LoadReport, VersionSpec
from cotenant.measure.loader import warning_of
from cotenant.measure.loader_process import LoadCancelledError, Loader, VersionLoadError
from cotenant.measure.opened_model import remember_verdict, verdicts
from cotenant.measure.quick_profiles import QuickProfiles
from cotenant.measure.verdict import judge
from cotenant.repository import (
    ModelVersion,
    UnknownModelError,
    check_owners,
    find_versions,
    quick_profiles_path,
    within,
)
from cotenant.serve.engine.reorganise import spec_of
from cotenant.serve.models.name_table import NameEntry
from cotenant.serve.models.served_models import CutsOf, ServedModel, serve_model
from cotenant.serve.models.stored_loads import StoredLoads, stamps_of
from cotenant.wire.api import ServeError, Status

_log = logging.getLogger("cotenant.server")


@dataclass(frozen=True, slots=True)
class LoadedVersions:
    """Result of a load: the loaded versions by version on the wire; the default version is also under "".

    `unserved`: reasons for the versions that failed. `refusal`: error for the client if the newest version failed. If
    `served` is empty, the versions served before stay in service.
    """

    served: dict[str, ServedModel]
    unserved: dict[str, str]
    refusal: ServeError | None


class ModelLoader:
    """Loads models for a server. A loader process (`loader_process`) opens, tries and measures each version first.

    `cuts_of` returns the cuts of a version from those of its profile. `check_tenants` raises for a tenant name that is
    in use. `unlocked` releases the server's load lock while the loader process or a model's worker works.
    """

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        executor: ModelExecutor,
        cuts_of: CutsOf,
        check_tenants: Callable[[list[str], str], None],
        unlocked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.root = root
        self.loader_process = Loader(settings.server.load_limit_s)
        self._device = settings.device.gpu
        self._executor = executor
        self._cuts_of = cuts_of
        self._check_tenants = check_tenants
        self._unlocked = unlocked
        self._quick = QuickProfiles(quick_profiles_path(root) if settings.device.kind == "cpu" else None)
        self.stored: StoredLoads | None = None
        """Results of loads of an earlier engine, where there may be one."""

    def load(self, model: str, policy: Policy, owners: Mapping[str, str], entry: NameEntry) -> LoadedVersions:
        """Load the versions of a model, newest first. `owners`: served models by tenant.

        If the name is served already, as `entry` says, the result is empty unless the newest version loads. Raises
        ServeError when the server stops, and as `find_versions` and `check_owners` do; then no version stays loaded.
        """
        unreadable: dict[str, str] = {}
        try:
            found = find_versions(self.root, model, unreadable)
            self.check(found, owners)
        except UnknownModelError:
            raise
        except ConfigError as error:
            raise ConfigError(*self._problems(model, owners) or error.problems) from None
        errors: dict[str, CotenantError] = {name: ConfigError(reason) for name, reason in unreadable.items()}
        served: dict[str, ServedModel] = {}
        with contextlib.ExitStack() as if_one_fails:
            is_behind = any(int(name) > found[-1].version for name in unreadable)
            for each in () if entry.is_served and is_behind else reversed(found):
                try:
                    made = self._load(replace(each, is_default=not served), policy)
                except LoadCancelledError as error:
                    raise ServeError(Status.UNAVAILABLE, str(error)) from None
                except CotenantError as error:
                    errors[str(each.version)] = error
                except Exception as error:  # a library may raise anything for a bad file
                    _log.exception("model %r: loading version %d failed", model, each.version)
                    sentence = f"model {model!r} cannot be loaded: {type(error).__name__}: {error}"
                    errors[str(each.version)] = VersionLoadError(sentence, is_internal=True)
                else:
                    if_one_fails.callback(made.loaded.close)
                    served = {made.version: made, **served}
                    served.setdefault("", made)
                if entry.is_served and not served:
                    break
            if_one_fails.pop_all()
        newest = errors.get(max([*unreadable, str(found[-1].version)], key=int))
        left = {str(each.version) for each in found} - {*errors, *served}  # versions that this load did not try
        unserved = {name: entry.unserved[name] for name in entry.unserved if name in left}
        unserved |= {name: within(self.root, error) for name, error in errors.items()}
        if served or entry.versions:
            for name, reason in errors.items():
                _log.error("model %r: version %s is not loaded, other versions are served: %s", model, name, reason)
        if not served:
            worst = newest or next(iter(errors.values()))
            return LoadedVersions({}, unserved, ServeError(_status_of(worst), str(worst)))
        names = tuple(name for name in served if name)
        for each_served in served.values():
            each_served.metadata = replace(each_served.metadata, versions=names)
        if newest is None:
            return LoadedVersions(served, unserved, None)
        text = f"{within(self.root, newest)}; version {served[''].version} is served instead"
        return LoadedVersions(served, unserved, ServeError(_status_of(newest), text))

    def _problems(self, model: str, owners: Mapping[str, str]) -> tuple[str, ...]:
        """All problems of the newest version of a model that cannot be loaded. Raises ServeError while stopping."""
        try:
            with self._unlocked():
                made = judge(self.root, model, partial(self.check, owners=owners), self._opened)
        except LoadCancelledError as error:
            raise ServeError(Status.UNAVAILABLE, str(error)) from None
        return made[0].problems

    def _opened(self, found: ModelVersion, faults: tuple[str, ...]) -> LoadReport:
        return self.loader_process.load(VersionSpec(str(self.root), found, device=self._device, faults=faults))

    def check(self, found: Sequence[ModelVersion], owners: Mapping[str, str]) -> None:
        """Raise ConfigError if a tenant of these versions belongs to another model or application."""
        check_owners(found, owners)
        self._check_tenants([each.tenant for each in found], found[0].model)

    def close_all(self, served: Mapping[str, ServedModel]) -> None:
        """Release loaded versions that will not be served."""
        for each in {id(each): each for each in served.values()}.values():
            each.loaded.close()

    def _load(self, found: ModelVersion, policy: Policy) -> ServedModel:
        spec = VersionSpec(str(self.root), found, policy.spec.shares, device=self._device)
        report = None if self.stored is None else self.stored.find(spec)
        if report is not None:
            return self._worked(found, policy, report)
        files = stamps_of(spec)
        with self._executor.expecting(found.tenant, found.path.suffix):
            with self._unlocked():
                report = self.loader_process.load(structs.replace(spec, known=self._quick.known, verdicts=verdicts()))
            if self.stored is not None:
                self.stored.keep(spec, files, report)
            return self._worked(found, policy, report)

    def _worked(self, found: ModelVersion, policy: Policy, report: LoadReport) -> ServedModel:
        """Let the executor load a version that the loader process, or that of an earlier engine, has opened."""
        facts, profile = report.facts, report.profile
        if report.warning:
            _log.warning("%s", warning_of(found, report.warning))
        else:
            self._quick.add(profile)
            if found.config.model.max_batch > 1:
                remember_verdict(facts.digest, facts.merging)
        served = serve_model(facts, profile, preempt=policy.spec.preempt, cuts_of=self._cuts_of)
        if self.loader_process.is_cancelled:
            raise LoadCancelledError(f"model {found.model!r} is not loaded: the server is stopping")
        with self._unlocked() if self._executor.has_parallel_loads else nullcontext():
            served.loaded = self._executor.load(served.tenant.name, facts.source, spec_of(served, policy.spec.shares))
        return served


def refused(root: Path, model: str, error: CotenantError | OSError) -> ServeError:
    """Convert the error of a failed load for the client. An unreadable repository is UNAVAILABLE, not invalid."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, OSError) or not root.is_dir():
        where = error.filename if isinstance(error, OSError) and error.filename else root
        text = f"model {model!r}: {where} cannot be read; restore the repository and load the model again"
        return ServeError(Status.UNAVAILABLE, text)
    return ServeError(Status.INVALID_ARGUMENT, str(error))


def _status_of(error: CotenantError) -> Status:
    if isinstance(error, WorkerLostError) or (isinstance(error, VersionLoadError) and error.is_killed):
        return Status.UNAVAILABLE
    is_internal = isinstance(error, VersionLoadError) and error.is_internal
    return Status.INTERNAL if is_internal else Status.INVALID_ARGUMENT
