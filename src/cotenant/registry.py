"""Sockets: the named places where packages add to the base. The only file of the base that names a technique.

Another package joins a socket by an entry point of the socket's group. The techniques of this distribution join by
`BUILT_IN`, which has the same form, as a source checkout has no entry points: group, name, "MODULE:ATTRIBUTE". A
technique whose package, or one that it needs, is not there is left out.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_OVERLAP = "cotenant.techniques.overlap"
_PARTITIONS = "cotenant.techniques.partitions"
_LAYER_BLOCKS = "cotenant.techniques.layer_blocks"
_PLACEMENT = "cotenant.techniques.placement"
_GRANULARITY = "cotenant.techniques.granularity"
_CLUSTER = "cotenant.cluster"
NEEDS = {
    _OVERLAP: (),
    _PARTITIONS: (_GRANULARITY, _OVERLAP, _PLACEMENT),
    _LAYER_BLOCKS: (),
    _PLACEMENT: (_GRANULARITY, _PARTITIONS),
    _GRANULARITY: (_PARTITIONS, _PLACEMENT),
    _CLUSTER: (_PARTITIONS,),
}
"""By technique the others that it imports."""

POLICIES = "cotenant.policies"
"""Socket: the class of a policy by its name; see `policies.registry`."""
POLICY_OF_PLANS = "duty_cycle"
"""The policy of a server that runs a plan, unless another one is named."""
COMMANDS = "cotenant.commands"
"""Socket: a function or a `typer.Typer` by the name of the command."""
SERVICES = "cotenant.services"
"""Socket: a subclass of `serve.services.Service`."""
RUN_STRATEGIES = "cotenant.run_strategies"
"""Socket: a subclass of `execute.strategy.RunStrategy`. Models are opened by their engine, then by each strategy in the
order of `BUILT_IN`, then by those of other packages."""

BUILT_IN: dict[str, dict[str, str]] = {
    POLICIES: {
        "overlap": f"{_OVERLAP}.policy.control:Overlap",
        "duty_cycle": f"{_PARTITIONS}.policy.duty_cycle:DutyCycle",
        "clustered": f"{_GRANULARITY}.policy.clustered:Clustered",
        "model_wise": f"{_LAYER_BLOCKS}.policy.published:ModelWise",
        "layer_wise": f"{_LAYER_BLOCKS}.policy.published:LayerWise",
        "fixed_blocks": f"{_LAYER_BLOCKS}.policy.published:FixedBlocks",
        "prema": f"{_LAYER_BLOCKS}.policy.published:Prema",
        "layer_block": f"{_LAYER_BLOCKS}.policy.published:LayerBlock",
        "slack_blocks": f"{_LAYER_BLOCKS}.policy.slack_blocks:SlackBlocks",
    },
    SERVICES: {
        "joint-plans": f"{_GRANULARITY}.serve.together:TogetherPlans",
        "groups": f"{_OVERLAP}.serve:Groups",
        "pressure": f"{_LAYER_BLOCKS}.serve:Pressure",
    },
    RUN_STRATEGIES: {
        "kernels": f"{_LAYER_BLOCKS}.execute.kernel_strategy:KernelStrategy",
        "placement": f"{_PLACEMENT}.execute.placement_strategy:PlacementStrategy",
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
    there = {package for package in NEEDS if find_spec(package) is not None}
    while lacking := {package for package in there if not there.issuperset(NEEDS[package])}:
        there -= lacking
    roots = tuple(f"{package}." for package in there)
    return {name: found for name, found in BUILT_IN.get(socket, {}).items() if found.startswith(roots)}


def _entry_points(socket: str) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # which loads much, and few need it

    return [*entry_points(group=socket)]


def registered(socket: str) -> dict[str, str]:
    """The same, then those of other packages. A name of this distribution stays its own."""
    others = {found.name: found.value for found in _entry_points(socket)}
    return built_in(socket) | others | built_in(socket)


def load(socket: str, name: str) -> Any:
    """What is registered under a name; None where nothing is. Raises what importing the module raises."""
    found = built_in(socket).get(name)  # without a look at the metadata of all packages, which takes milliseconds
    if found is None:
        return next((point.load() for point in _entry_points(socket) if point.name == name), None)
    return resolve_name(found)


def load_all(socket: str) -> dict[str, Any]:
    """Everything that is registered, by name."""
    return {name: load(socket, name) for name in registered(socket)}
