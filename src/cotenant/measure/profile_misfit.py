"""Why no profile holds for a model that is about to be served, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.measure.opened_model import OpenedModel, has_batches, is_of
from cotenant.profiles.profile_file import load_profile
from cotenant.repository import profile_path
from cotenant.repository.measured_content import changes
from cotenant.work import Share


def profile_misfit(root: Path, opened: OpenedModel, partitions: Sequence[Share]) -> str:
    """Why the repository's profile does not hold for a model in these shares, with the command to run."""
    tenant, plain = opened.found.tenant, f"run 'cotenant profile {root.name}' to measure it"
    if not profile_path(root).exists():
        return f"there is no profile; {plain}"
    try:
        stored = load_profile(profile_path(root))
    except CotenantError as error:
        return str(error)
    known = stored.of_digest(tenant, opened.digest)
    if known is None:
        if tenant not in stored.models:
            return f"the profile does not have it; {plain}"
        changed = changes(root, stored.contents, (tenant,)).get(
            tenant, "its kernels, its placement, or the packages that run it have changed since it was measured"
        )
        return f"{changed}; {plain}"
    if not has_batches(known, opened):
        return f"the profile lacks its largest batch, {opened.found.config.model.max_batch} rows; {plain}"
    if not is_of(known, stored.device, opened):
        return f"the profile is of another machine or engine ({stored.device.processor}); {plain}"
    lacking = sorted({each.size for each in partitions} - {point.cores for point in known.points})
    sizes = ", ".join(map(str, lacking))
    commands = " ".join(f"--partitions {size}" for size in lacking)
    return (
        f"the profile lacks shares of size {sizes}, on which this server's policy launches; "
        f"run 'cotenant profile {root.name} {commands}' to measure them"
    )
