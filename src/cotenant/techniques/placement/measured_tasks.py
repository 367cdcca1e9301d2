"""Profiles of tasks and placements of repositories, without those of models that changed since the measurement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from cotenant.profiles.profile_file import ModelContent
from cotenant.repository import graphs_path, placement_path, tasks_path
from cotenant.repository.measured_content import changes, refuse_changes
from cotenant.techniques.placement.task_profile import ModelTasks, load_tasks
from cotenant.techniques.placement.unit_placement import UnitPlacement, load_placement

Tasks = dict[str, dict[int, ModelTasks]]
"""Tasks by tenant and size of share."""


def read_tasks(roots: Sequence[Path], models: Collection[str] = (), *, stale: bool | None = None) -> Tasks:
    """Measured tasks of repositories; of a tenant in several, those of the last one.

    `stale`: None leaves changed tenants out, True uses changed ones of `models` with a warning, and False raises
    StaleProfileError for them. Raises ProfileError for damaged files.
    """
    found: Tasks = {}
    for root in roots:
        measured = load_tasks(tasks_path(root)).models if tasks_path(root).exists() else {}
        if stale is None:
            gone = _changes(root, measured)
            measured = {tenant: by_size for tenant, by_size in measured.items() if tenant not in gone}
        else:
            of_models = {tenant: by_size for tenant, by_size in measured.items() if tenant in models}
            command = f"cotenant place {root} MODEL"
            refuse_changes(_changes(root, of_models), root, stale=stale, command=command)
        found |= measured
    return found


def read_placements(root: Path) -> tuple[UnitPlacement, ...]:
    """The kept placements of a repository, of unchanged tenants. Raises as `read_tasks`."""
    each = [tasks for by_size in read_tasks([root]).values() for tasks in by_size.values()]
    paths = [placement_path(graphs_path(root), tasks.graph, tasks.cores, tasks.sms) for tasks in each]
    return tuple(load_placement(path) for path in paths if path.exists())


def _changes(root: Path, measured: Mapping[str, Mapping[int, ModelTasks]]) -> dict[str, str]:
    """Changes since tasks were measured, as a sentence by tenant, over all sizes of share."""
    contents: dict[str, ModelContent | UnsetType] = {}
    for tenant, by_size in measured.items():
        each = dict.fromkeys(tasks.content for tasks in by_size.values())
        contents[tenant] = next(iter(each)) if len(each) == 1 else UNSET
    return changes(root, contents, placed=False)
