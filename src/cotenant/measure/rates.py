"""Feasibility check of the guaranteed rates of a repository (`tenant.rate`) on its lanes."""

from __future__ import annotations

from pathlib import Path


def rates_fault(root: Path) -> str | None:
    """A sentence if the guaranteed rates of a repository need more than its lanes, else None.

    A query takes the latency of a row of the first shape by the profile, as in the core (`core.fair_queues`). None
    also if the load is unknown: no repository, no profile or a stale one, or lanes of another machine.
    """
    from cotenant.config import load_server_config
    from cotenant.errors import CotenantError
    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.predict.table import TablePredictor
    from cotenant.profiles.profile_file import load_profile
    from cotenant.repository import SERVER_FILE, default_version, model_names, profile_path
    from cotenant.repository.measured_content import changes
    from cotenant.work import Work

    path = profile_path(root)
    if not path.exists():
        return None
    takes: dict[str, float] = {}
    try:
        settings, profile = load_server_config(root / SERVER_FILE), load_profile(path)
        lanes = lanes_of(settings.device, device_cores(settings.device))
        for model in model_names(root):
            found = default_version(root, model)
            rate, measured = found.config.tenant.rate, profile.models.get(found.tenant)
            if rate and measured is not None:
                predictor = TablePredictor({found.tenant: measured.table(settings.predict.quantile)})
                row = Work(found.tenant, 0, 1, 0, predictor.unit_count(found.tenant))
                takes[found.tenant] = rate * predictor.latency_ns(row, lanes[0].size) / 1e9
        for tenant in changes(root, profile.contents, list(takes)) if takes else ():
            del takes[tenant]
    except CotenantError:
        return None  # reported by the code that needs it
    if sum(takes.values()) <= len(lanes):
        return None
    each = ", ".join(f"{tenant!r} {lanes_taken:.2f}" for tenant, lanes_taken in sorted(takes.items()))
    return (
        f"the guaranteed rates (tenant.rate) need {sum(takes.values()):.2f} lanes of {len(lanes)}: {each}; lower them, "
        "else a server keeps each only in part"
    )
