"""`cotenant.profile`: measure the models of a repository."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from cotenant.errors import CotenantError
from cotenant.measure.campaign import OnStep
from cotenant.measure.solo import Effort
from cotenant.profiles.profile_file import Profile
from cotenant.repository.server_settings import settings_of

_log = logging.getLogger("cotenant.profile")


def profile(
    repository: str | os.PathLike[str],
    *,
    budget_s: float = 0.5,
    fresh: bool = False,
    settings: Mapping[str, object] = MappingProxyType({}),
    on_step: OnStep | None = None,
    server: bool = True,
) -> Profile:
    """Measure the latency of every model over batch and cores, as `cotenant profile` does, and save the profile.

    Each point takes `budget_s` seconds. Points that the repository has already are not measured again, except with
    `fresh`.

    `settings` are keys of `cotenant.toml`, as {"device.lanes": "all"}. `on_step` is called with the
    number of finished steps, the number of all steps and the name of the last step. A model that cannot be
    measured is left out, with a warning in the log that has all its problems, as `cotenant models` prints them. With
    `server`, what a server needs for a request besides the model is measured too (Linux).

    >>> measured = cotenant.profile("models/", budget_s=0.1)  # doctest: +SKIP
    >>> measured.to_pandas()  # doctest: +SKIP

    Raises CotenantError with the problems of all models where none could be measured, and ConfigError for wrong
    settings.
    """
    from cotenant.execute.gpu.hardware_queues import use_all_queues
    from cotenant.load.server_cost import with_server_cost
    from cotenant.measure.sweep import profile_repository

    use_all_queues(os.environ)
    root = Path(repository)
    chosen = settings_of(root, settings)
    steps = on_step or (lambda done, total, text: None)
    found, errors = profile_repository(root, chosen, Effort(budget_s=budget_s), fresh=fresh, on_step=steps)
    if server:
        found = with_server_cost(root, chosen, found, steps)
    for model, reason in errors.items():
        _log.warning("model %r is not in the profile: %s", model, reason)
    if errors and not found.models:
        problems = [f"model {model!r}: {line}" for model, reason in errors.items() for line in reason.split("\n")]
        raise CotenantError(f"{root}: no model could be measured", *problems)
    return found
