"""Opening a model of the repository for service: its versions that can be loaded, the newest of them as the default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cotenant.config import ServerConfig
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.protocol import ModelExecutor
from cotenant.measure.load_spec import VersionFacts, VersionSpec
from cotenant.measure.loader import warning_of
from cotenant.measure.loader_process import LoadCancelledError, Loader, VersionLoadError
from cotenant.measure.opening import remember_verdict, verdicts
from cotenant.profile.joint_plan import JointPlan
from cotenant.profile.profile_file import ModelProfile
from cotenant.repository import ModelVersion, check_owners, find_versions, within
from cotenant.serve.brain.reorganise import spec_of
from cotenant.serve.opener.served_models import ServedModel, serve_model
from cotenant.wire.api import IndexEntry, ServeError, Status

_log = logging.getLogger("cotenant.server")
_MOST_KEPT = 256
"""Quick profiles that a server keeps: clients choose how often files change, and memory is bounded."""


@dataclass(frozen=True, slots=True)
class OpenedVersions:
    """The versions of a model that are loaded, by their names on the wire, and the default one under "".

    `refusal` is what a client that asked for the load is told where the newest version is not one of them.
    """

    served: dict[str, ServedModel]
    refusal: ServeError | None


class ModelOpener:
    """Opens models as a server needs them, and keeps the reasons why versions of served models are not served.

    `plans_of` gives the joint plans that a version is a member of; `check_tenants` refuses tenants that a model cannot
    have.
    """

    def __init__(
        self,
        root: Path,
        settings: ServerConfig,
        executor: ModelExecutor,
        plans_of: Callable[[VersionFacts, Policy], Sequence[JointPlan]],
        check_tenants: Callable[[Sequence[str], str], None],
    ) -> None:
        self.root = root
        self.loader = Loader(settings.server.load_limit_s)
        self._device = settings.device
        self._executor = executor
        self._plans_of = plans_of
        self._check_tenants = check_tenants
        self._measured: dict[str, ModelProfile] = {}
        """Quick profiles by digest, the oldest first."""
        self._unserved: dict[str, Mapping[str, str]] = {}

    def open(self, model: str, policy: Policy, owners: Mapping[str, str], *, is_served: bool) -> OpenedVersions:
        """Load the versions of a model, the newest first. `owners` gives the models that are served by tenant.

        Where the model `is_served` already, none is loaded unless the newest one can be. Raises ServeError when none is
        loaded, and what `find_versions` and `check_owners` do. Nothing stays when this raises.
        """
        unreadable: dict[str, str] = {}
        found = find_versions(self.root, model, unreadable)
        check_owners(found, owners)
        self._check_tenants([each.tenant for each in found], model)
        errors: dict[str, CotenantError] = {name: ConfigError(reason) for name, reason in unreadable.items()}
        served: dict[str, ServedModel] = {}
        with contextlib.ExitStack() as if_one_fails:
            is_behind = any(int(name) > found[-1].version for name in unreadable)
            for each in () if is_served and is_behind else reversed(found):
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
                if is_served and not served:
                    break
            newest = errors.get(max([*unreadable, str(found[-1].version)], key=int))
            known = self._unserved.pop(model, {})
            if is_served or served:
                left = {str(each.version) for each in found} - {*errors, *served}  # not looked at
                self._note(model, {name: known[name] for name in known if name in left}, errors)
            if not served:
                worst = newest or next(iter(errors.values()))
                raise ServeError(_status_of(worst), str(worst))
            if_one_fails.pop_all()
        names = tuple(name for name in served if name)
        for each_served in served.values():
            each_served.metadata = replace(each_served.metadata, versions=names)
        if newest is None:
            return OpenedVersions(served, None)
        text = f"{within(self.root, newest)}; version {served[''].version} is served in its place"
        return OpenedVersions(served, ServeError(_status_of(newest), text))

    def why(self, model: str, version: str) -> str:
        """Why a version of a served model is not served, or ""."""
        return self._unserved.get(model, {}).get(version, "")

    def index(self, served: Mapping[str, Mapping[str, object]]) -> Iterator[IndexEntry]:
        """The versions that are not served of models that are."""
        for model, reasons in list(self._unserved.items()):
            for version, reason in reasons.items():
                if version not in served.get(model, {version: None}):
                    yield IndexEntry(model, version, "UNAVAILABLE", reason)

    def _note(self, model: str, known: Mapping[str, str], errors: Mapping[str, CotenantError]) -> None:
        self._unserved[model] = {**known, **{name: within(self.root, error) for name, error in errors.items()}}
        for name, error in errors.items():
            _log.error("model %r: version %s is not loaded, others are served: %s", model, name, error)

    def _load(self, found: ModelVersion, policy: Policy) -> ServedModel:
        device = None if self._device.kind == "cpu" else self._device
        spec = VersionSpec(str(self.root), found, policy.shares, tuple(self._measured.values()), device, verdicts())
        report = self.loader.load(spec)
        facts, profile = report.facts, report.profile
        if report.warning:
            _log.warning("%s", warning_of(found, report.warning))
        else:
            self._keep(profile)
            if found.config.model.max_batch > 1:
                remember_verdict(facts.digest, facts.merging)
        served = serve_model(facts, profile, preempt=policy.preempt, plans=self._plans_of(facts, policy))
        served.loaded = self._executor.load(served.tenant.name, facts.source, spec_of(served, policy.shares))
        return served

    def _keep(self, profile: ModelProfile) -> None:
        self._measured.pop(profile.digest, None)
        self._measured[profile.digest] = profile
        if len(self._measured) > _MOST_KEPT:
            del self._measured[next(iter(self._measured))]


def _status_of(error: CotenantError) -> Status:
    is_internal = isinstance(error, VersionLoadError) and error.is_internal
    return Status.INTERNAL if is_internal else Status.INVALID_ARGUMENT
