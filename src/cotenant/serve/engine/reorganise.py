"""From one policy with its lanes to another one, make before break."""

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
"""How long launches of the old policy are waited for before its sessions go; else they stay till the next time."""

_log = logging.getLogger("cotenant.plan")


def spec_of(served: ServedModel, shares: Sequence[Share]) -> LoadSpec:
    """What lanes need of a model, all shares that launches may get included."""
    limit_mib = served.opened.found.config.tenant.memory_limit_mib
    return LoadSpec(
        tuple(shares),
        served.tenant.cuts,
        served.opened.shapes,
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
    """Let another policy decide, when all that its lanes need is loaded and warm; let go of the rest afterwards.

    Queries wait on under the keys of the new policy. Launches under way end, and cores are waited for, not taken. Gives
    back when what was under way has ended. Raises ConfigError for a device whose lanes are fixed and for policies of
    which one alone launches groups, ModelError when a model cannot be made ready; then everything stays as it was.
    """
    if not executor.lanes_change:
        raise ConfigError(
            f"lanes of {new.spec.shares[0].device} cannot be changed while it serves: serve it without a plan"
        )
    if old.spec.grouped != new.spec.grouped:
        raise ConfigError(
            f"policy {old.spec.name!r} cannot be changed to {new.spec.name!r}: one of them alone launches groups"
        )
    for served in models:
        executor.prepare(served.loaded, spec_of(served, new.spec.shares))

    def widen(_: Engine) -> None:
        beliefs.widest = max(share.size for share in new.spec.shares)

    driver.read(widen)
    driver.post(PolicyChanged(new))
    if not driver.wait_ended(driver.read(lambda engine: engine.launches), _LEAVE_S):
        _log.warning("launches of before the change have not ended after %g s: their sessions stay", _LEAVE_S)
        return
    for served in models:
        executor.keep(served.loaded, spec_of(served, new.spec.shares))
