"""Change of policy and lanes at run time, make before break."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cotenant.core.engine import Engine
from cotenant.core.events import PolicyChanged
from cotenant.core.snapshot import Policy
from cotenant.errors import ConfigError
from cotenant.execute.protocol import LoadSpec, ModelExecutor
from cotenant.predict.online import OnlineModel
from cotenant.serve.engine.driver import Driver
from cotenant.serve.models.served_models import ServedModel
from cotenant.work import Share

_LEAVE_S = 60.0
"""Seconds to wait for launches of the old policy before its sessions are released; later they stay until the next
change."""

_log = logging.getLogger("cotenant.plan")


def spec_of(served: ServedModel, shares: Sequence[Share]) -> LoadSpec:
    """Load specification of a served model for all shares that launches may get."""
    limit_mib = served.facts.found.config.tenant.memory_limit_mib
    return LoadSpec(
        tuple(shares),
        served.tenant.cuts,
        served.facts.shapes,
        served.tenant.max_batch,
        None if limit_mib is None else round(limit_mib * (1 << 20)),
        served.tenant.priority > 0,
    )


def change(
    driver: Driver,
    executor: ModelExecutor,
    beliefs: OnlineModel,
    models: Sequence[ServedModel],
    old: Policy,
    new: Policy,
) -> None:
    """Replace the policy once all models are loaded and warm on its lanes; then release the old sessions.

    Waiting queries get the keys of the new policy. Running launches end first: no core is preempted. Returns when they
    have ended. Raises ConfigError if the lanes of the device are fixed, or if only one of the two policies launches
    groups. Raises ModelError if a model cannot be prepared. After an error nothing has changed.
    """
    if not executor.lanes_change:
        raise ConfigError(
            f"the lanes of device {new.spec.shares[0].device} cannot change at run time: serve it without a plan"
        )
    if old.spec.grouped != new.spec.grouped:
        raise ConfigError(
            f"policy {old.spec.name!r} cannot change to {new.spec.name!r} at run time: only one of them launches "
            "groups; restart the server with the new policy"
        )
    for served in models:
        executor.prepare(served.loaded, spec_of(served, new.spec.shares))

    def widen(_: Engine) -> None:
        beliefs.widest = max(share.size for share in new.spec.shares)

    driver.read(widen)
    driver.post(PolicyChanged(new))
    if not driver.wait_ended(driver.read(lambda engine: engine.launches), _LEAVE_S):
        _log.warning("launches of the old policy have not ended after %g s: their sessions stay loaded", _LEAVE_S)
        return
    for served in models:
        executor.keep(served.loaded, spec_of(served, new.spec.shares))
