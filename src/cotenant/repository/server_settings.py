"""The settings of a server: `cotenant.toml`, and the values of a command line or a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from cotenant.config import ServerConfig, load_server_config
from cotenant.errors import ConfigError
from cotenant.registry import POLICY_OF_PLANS
from cotenant.repository import SERVER_FILE


def settings_of(root: Path, chosen: Mapping[str, object] = MappingProxyType({})) -> ServerConfig:
    """The repository's `cotenant.toml`, with `chosen` values, by SECTION.KEY, that replace those of the file.

    With a plan, the policy is duty_cycle unless `chosen` names another, and `plan.file` is relative to the working
    directory. Raises ConfigError.
    """
    chosen = dict(chosen)
    settings = load_server_config(root / SERVER_FILE)
    if "plan.file" not in chosen and settings.plan.file is not None:
        chosen["plan.file"] = str(root / settings.plan.file)
    if "plan.file" in chosen:
        chosen.setdefault("policy.name", POLICY_OF_PLANS)
        if "device.lanes" in chosen:
            lanes = chosen["device.lanes"]
            raise ConfigError(f"device.lanes is {lanes!r}, but the plan {chosen['plan.file']} makes the lanes")
    elif "plan.device" in chosen:
        raise ConfigError(f"plan.device is {chosen['plan.device']!r}, but there is no plan: name one with --plan")
    return load_server_config(root / SERVER_FILE, chosen)
