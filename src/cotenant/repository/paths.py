"""Where everything lies in a model repository."""

from __future__ import annotations

from pathlib import Path

from cotenant.files import STATE_FOLDER

CONFIG_FILE = "config.toml"


SERVER_FILE = "cotenant.toml"


def profile_path(root: Path) -> Path:
    """Where the profile of a repository lies."""
    return root / STATE_FOLDER / "profile.json"


def quick_profiles_path(root: Path) -> Path:
    """Where profiles lie that a server measured quickly, for want of others."""
    return root / STATE_FOLDER / "quick.json"


def trace_path(root: Path) -> Path:
    """Where the server that serves a repository writes its trace."""
    return root / STATE_FOLDER / "trace.jsonl"


def coruns_path(root: Path) -> Path:
    """Where the co-runs of a repository lie."""
    return root / STATE_FOLDER / "coruns.json"


def contention_path(root: Path) -> Path:
    """Where the contention of a repository's models lies."""
    return root / STATE_FOLDER / "contention.json"


def groups_path(root: Path) -> Path:
    """Where the measured groups of a repository lie."""
    return root / STATE_FOLDER / "groups.jsonl"


def overlap_path(root: Path) -> Path:
    """Where the predictor fitted to them lies."""
    return root / STATE_FOLDER / "overlap.npz"


def tasks_path(root: Path) -> Path:
    """Where the profile of tasks of a repository's models lies."""
    return root / STATE_FOLDER / "tasks.json"


def graphs_path(root: Path) -> Path:
    """Where copies of the models, and their optimised graphs, lie: what `execute.runner` calls its cache."""
    return root / STATE_FOLDER / "graphs"


def placement_path(graphs: Path, graph: str, cores: int, sms: int = 0) -> Path:
    """Where the placement of an optimised graph in a share of so many cores, or SMs of a GPU and cores beside them,
    lies; `graph` is its folder's name."""
    return graphs / "placements" / f"{graph}-{f'{sms}sms' if sms else cores}.json"


def together_path(root: Path) -> Path:
    """Where the plans of models that are there together lie, as a plan file."""
    return root / STATE_FOLDER / "together.toml"


MEASURED = (profile_path, graphs_path, groups_path, overlap_path, coruns_path, tasks_path, together_path)
"""What was measured of the models and what was planned from that: all that a server reads there. Placements lie beside
the graphs."""
