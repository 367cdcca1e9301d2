"""Whether the rates that a repository guarantees its tenants (`tenant.rate`) fit its lanes."""

from __future__ import annotations

from pathlib import Path


def rates_fault(root: Path) -> str | None:
    """What is wrong with the guaranteed rates of a repository, as a sentence: together they take more than its lanes.

    Each takes what the profile says of a row of the first shape, as in the core (`core.accounts`). None where they fit,
    and where nothing is known: no profile, or a stale one, no repository, or lanes on a device that is not here.
    """
    from cotenant.config import load_server_config
    from cotenant.errors import CotenantError
    from cotenant.execute.layout import device_cores, lanes_of
    from cotenant.predict.table import TablePredictor
    from cotenant.profile.profile_file import load_profile
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
        return None  # said elsewhere, by what needs it
    if sum(takes.values()) <= len(lanes):
        return None
    each = ", ".join(f"{tenant!r} {lanes_taken:.2f}" for tenant, lanes_taken in sorted(takes.items()))
    return (
        f"the guaranteed rates (tenant.rate) take {sum(takes.values()):.2f} lanes, and there are {len(lanes)}: {each}; "
        "lower them, or a server keeps each only in part"
    )
