"""Opening a model of the repository for service: its versions that can be loaded, the newest of them as the default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from cotenant.config import ServerConfig
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.errors import WorkerLostError
from cotenant.execute.protocol import ModelExecutor
from cotenant.measure.load_spec import VersionSpec
from cotenant.measure.loader import warning_of
from cotenant.measure.loader_process import LoadCancelledError, Loader, VersionLoadError
from cotenant.measure.opened_model import remember_verdict, verdicts
from cotenant.measure.quick_profiles import QuickProfiles
from cotenant.repository import ModelVersion, check_owners, find_versions, quick_profiles_path, within
from cotenant.serve.engine.reorganise import spec_of
from cotenant.serve.models.name_table import NameEntry
from cotenant.serve.models.served_models import CutsOf, ServedModel, serve_model
from cotenant.serve.models.stored_loads import StoredLoads, stamps_of
from cotenant.wire.api import ServeError, Status

_log = logging.getLogger("cotenant.server")


@dataclass(frozen=True, slots=True)
class OpenedVersions:
    """The versions of a model that are loaded, by their names on the wire, and the default one under "".

    `unserved` holds the reasons why other versions are not. `refusal` is what a client that asked for the load is told
    where the newest version is not one of them. Where `served` is empty, what serves the name goes on.
    """

    served: dict[str, ServedModel]
    unserved: dict[str, str]
    refusal: ServeError | None


class ModelOpener:
    """Opens models as a server needs them.

    `cuts_of` gives the units at which a version may be left, from those of its profile; `check_tenants` refuses tenants
    that a model cannot have. While a child process loads a version, in `aside`, other things happen to the server.
    """

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        executor: ModelExecutor,
        cuts_of: CutsOf,
        check_tenants: Callable[[list[str], str], None],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.root = root
        self.loader = Loader(settings.server.load_limit_s)
        self._device = settings.device
        self._executor = executor
        self._cuts_of = cuts_of
        self._check_tenants = check_tenants
        self._aside = aside
        self._quick = QuickProfiles(quick_profiles_path(root) if settings.device.kind == "cpu" else None)
        self.stored: StoredLoads | None = None
        """Results of loads of an earlier engine, where there may be one."""

    def open(self, model: str, policy: Policy, owners: Mapping[str, str], entry: NameEntry) -> OpenedVersions:
        """Load the versions of a model, the newest first. `owners` gives the models that are served by tenant.

        Where something serves the name already, as its `entry` says, nothing is loaded unless the newest version can
        be. Raises ServeError when the server stops, and what `find_versions` and `check_owners` do. No version stays
        loaded then.
        """
        unreadable: dict[str, str] = {}
        found = find_versions(self.root, model, unreadable)
        self.check(found, owners)
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
                except Exception as error:  # whatever a library makes of a strange file, the others are served
                    _log.exception("loading model %r failed", model)
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
        left = {str(each.version) for each in found} - {*errors, *served}  # not looked at
        unserved = {name: entry.unserved[name] for name in entry.unserved if name in left}
        unserved |= {name: within(self.root, error) for name, error in errors.items()}
        if served or entry.versions:
            for name, reason in errors.items():
                _log.error("model %r: version %s is not loaded, others are served: %s", model, name, reason)
        if not served:
            worst = newest or next(iter(errors.values()))
            return OpenedVersions({}, unserved, ServeError(_status_of(worst), str(worst)))
        names = tuple(name for name in served if name)
        for each_served in served.values():
            each_served.metadata = replace(each_served.metadata, versions=names)
        if newest is None:
            return OpenedVersions(served, unserved, None)
        text = f"{within(self.root, newest)}; version {served[''].version} is served in its place"
        return OpenedVersions(served, unserved, ServeError(_status_of(newest), text))

    def check(self, found: Sequence[ModelVersion], owners: Mapping[str, str]) -> None:
        """See to it that the tenants of versions of a model are of no other one. Raises ConfigError."""
        check_owners(found, owners)
        self._check_tenants([each.tenant for each in found], found[0].model)

    def close_all(self, served: Mapping[str, ServedModel]) -> None:
        """Let go of versions that are loaded and will not be served."""
        for each in {id(each): each for each in served.values()}.values():
            each.loaded.close()

    def _load(self, found: ModelVersion, policy: Policy) -> ServedModel:
        device = None if self._device.kind == "cpu" else self._device
        spec = VersionSpec(str(self.root), found, policy.spec.shares, device=device)
        report = None if self.stored is None else self.stored.find(spec)
        if report is None:
            files = stamps_of(spec)
            with self._aside():
                report = self.loader.load(structs.replace(spec, known=self._quick.known, verdicts=verdicts()))
            if self.stored is not None:
                self.stored.keep(spec, files, report)
        facts, profile = report.facts, report.profile
        if report.warning:
            _log.warning("%s", warning_of(found, report.warning))
        else:
            self._quick.add(profile)
            if found.config.model.max_batch > 1:
                remember_verdict(facts.digest, facts.merging)
        served = serve_model(facts, profile, preempt=policy.spec.preempt, cuts_of=self._cuts_of)
        if self.loader.is_cancelled:
            raise LoadCancelledError(f"model {found.model!r} is not loaded: the server is stopping")
        served.loaded = self._executor.load(served.tenant.name, facts.source, spec_of(served, policy.spec.shares))
        return served


def refused(root: Path, model: str, error: CotenantError | OSError) -> ServeError:
    """What a client is told of a load that has failed. A repository that is away is no fault of the request."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, OSError) or not root.is_dir():
        where = error.filename if isinstance(error, OSError) and error.filename else root
        text = f"model {model!r}: {where} cannot be read; bring the repository back and load the model again"
        return ServeError(Status.UNAVAILABLE, text)
    return ServeError(Status.INVALID_ARGUMENT, str(error))


def _status_of(error: CotenantError) -> Status:
    if isinstance(error, WorkerLostError) or (isinstance(error, VersionLoadError) and error.is_killed):
        return Status.UNAVAILABLE
    is_internal = isinstance(error, VersionLoadError) and error.is_internal
    return Status.INTERNAL if is_internal else Status.INVALID_ARGUMENT
