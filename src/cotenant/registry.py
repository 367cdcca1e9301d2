"""Sockets: the named places where packages add to the base. The only file of the base that names a technique.

Another package joins a socket by an entry point of the socket's group. The techniques of this distribution join by
`BUILT_IN`, which has the same form, as a source checkout has no entry points: group, name, "MODULE:ATTRIBUTE". A
technique whose package is not there is left out.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

_OVERLAP = "cotenant.techniques.overlap"
_PARTITIONS = "cotenant.techniques.partitions"
_LAYER_BLOCKS = "cotenant.techniques.layer_blocks"
_PLACEMENT = "cotenant.techniques.placement"
_GRANULARITY = "cotenant.techniques.granularity"
_CLUSTER = "cotenant.cluster"
_PACKAGES = (_OVERLAP, _PARTITIONS, _LAYER_BLOCKS, _PLACEMENT, _GRANULARITY, _CLUSTER)

POLICIES = "cotenant.policies"
"""Socket: the class of a policy by its name; see `policies.registry`."""
POLICY_OF_PLANS = "duty_cycle"
"""The policy of a server that runs a plan, unless another one is named."""
COMMANDS = "cotenant.commands"
"""Socket: a function or a `typer.Typer` by the name of the command."""

BUILT_IN: dict[str, dict[str, str]] = {
    POLICIES: {
        "overlap": f"{_OVERLAP}.policy.control:Overlap",
        "duty_cycle": f"{_PARTITIONS}.policy.duty_cycle:DutyCycle",
        "clustered": f"{_GRANULARITY}.policy.clustered:Clustered",
        "layer_block": f"{_LAYER_BLOCKS}.policy.published:LayerBlock",
        "slack_blocks": f"{_LAYER_BLOCKS}.policy.slack_blocks:SlackBlocks",
    },
    COMMANDS: {
        "compile": f"{_LAYER_BLOCKS}.cli:compile_",
        "plan": f"{_PARTITIONS}.cli.plan:plan",
        "cluster": f"{_CLUSTER}.cli:cluster",
    },
}
"""What the techniques of this distribution add, by socket and name."""


@cache
def built_in(socket: str) -> dict[str, str]:
    """References "MODULE:ATTRIBUTE" by name, of the techniques that are installed."""
    there = tuple(f"{package}." for package in _PACKAGES if find_spec(package) is not None)
    return {name: found for name, found in BUILT_IN.get(socket, {}).items() if found.startswith(there)}


def registered(socket: str) -> dict[str, str]:
    """The same, with those of other packages. A name of this distribution stays its own."""
    others = {found.name: found.value for found in entry_points(group=socket)}
    return others | built_in(socket)


def load(socket: str, name: str) -> Any:
    """What is registered under a name; None where nothing is. Raises what importing the module raises."""
    found = built_in(socket).get(name)  # without a look at the metadata of all packages, which takes milliseconds
    if found is None:
        for point in entry_points(group=socket, name=name):
            return point.load()
        return None
    return resolve_name(found)


def load_all(socket: str) -> dict[str, Any]:
    """Everything that is registered, by name."""
    return {name: load(socket, name) for name in registered(socket)}
