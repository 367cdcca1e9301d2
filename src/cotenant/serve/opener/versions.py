"""Opening a model of the repository for service: all its versions, with their profiles and sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import ModelExecutor
from cotenant.measure.opening import OpenedModel, open_version
from cotenant.profile.joint_plan import JointPlan
from cotenant.profile.profile_file import ModelProfile
from cotenant.repository import ModelVersion
from cotenant.serve.brain.reorganise import spec_of
from cotenant.serve.opener.profiles import stored_or_measured
from cotenant.serve.opener.served_models import ServedModel, serve_model


def open_versions(
    root: Path,
    found: Sequence[ModelVersion],
    executor: ModelExecutor,
    policy: Policy,
    plans_of: Callable[[OpenedModel, Policy], Sequence[JointPlan]],
    measured: MutableMapping[str, ModelProfile],
) -> dict[str, ServedModel]:
    """The versions of a model by their names on the wire, and the default one under "". Nothing stays where one fails.

    `plans_of` gives the joint plans that a version is a member of; `measured`: see `stored_or_measured`. Raises what
    opening, profiling and loading does.
    """
    names = tuple(str(each.version) for each in found)
    versions: dict[str, ServedModel] = {}
    with contextlib.ExitStack() as if_one_fails:
        for each in found:
            opened = open_version(root, each, executor.place, policy.shares)
            if_one_fails.callback(opened.runner.close)
            profile = stored_or_measured(root, each, opened, policy.shares, executor.place, measured)
            plans = plans_of(opened, policy)
            served = serve_model(opened, profile, names, preempt=policy.preempt, plans=plans)
            served.loaded = executor.load(served.tenant.name, opened.runner, spec_of(served, policy.shares))
            if_one_fails.callback(served.loaded.close)
            versions[served.version] = served
            if each.is_default:
                versions[""] = served
        if_one_fails.pop_all()
    return versions
