"""Paths of the files in a model repository."""

from __future__ import annotations

from pathlib import Path

from cotenant.files import STATE_FOLDER

CONFIG_FILE = "config.toml"


SERVER_FILE = "cotenant.toml"


def profile_path(root: Path) -> Path:
    """Path of the profile of a repository."""
    return root / STATE_FOLDER / "profile.json"


def quick_profiles_path(root: Path) -> Path:
    """Where profiles lie that a server measured quickly, for want of others."""
    return root / STATE_FOLDER / "quick.json"


def learnt_factors_path(root: Path) -> Path:
    """Path of the factors on profiled latencies that a server learnt."""
    return root / STATE_FOLDER / "latency_factors.json"


def trace_path(root: Path) -> Path:
    """Path of the trace of the server of a repository."""
    return root / STATE_FOLDER / "trace.jsonl"


def coruns_path(root: Path) -> Path:
    """Path of the measured co-runs of a repository."""
    return root / STATE_FOLDER / "coruns.json"


def contention_path(root: Path) -> Path:
    """Path of the memory contention of the models of a repository."""
    return root / STATE_FOLDER / "contention.json"


def groups_path(root: Path) -> Path:
    """Path of the measured groups of a repository."""
    return root / STATE_FOLDER / "groups.jsonl"


def overlap_path(root: Path) -> Path:
    """Path of the predictor fitted to the measured groups."""
    return root / STATE_FOLDER / "overlap.npz"


def tasks_path(root: Path) -> Path:
    """Path of the profile of tasks of the models of a repository."""
    return root / STATE_FOLDER / "tasks.json"


def graphs_path(root: Path) -> Path:
    """Folder of copies of the models and of their optimised graphs: the cache of `execute.runner`."""
    return root / STATE_FOLDER / "graphs"


def placement_path(graphs: Path, graph: str, cores: int, sms: int = 0) -> Path:
    """Path of the placement of an optimised graph in a share of `cores` cores, or of `sms` SMs and cores beside them.

    `graph` is the name of the folder of the graph.
    """
    return graphs / "placements" / f"{graph}-{f'{sms}sms' if sms else cores}.json"


def together_path(root: Path) -> Path:
    """Path of the plan file of joint schedules."""
    return root / STATE_FOLDER / "together.toml"


MEASURED = (profile_path, graphs_path, groups_path, overlap_path, coruns_path, tasks_path, together_path)
"""Paths of measurements and of plans made from them, which a server reads. Placements are in the folder of graphs."""
