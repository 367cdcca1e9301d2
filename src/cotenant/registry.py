"""Sockets: the named places where packages add to the base. The only file of the base that names a technique.

Another package joins a socket by an entry point of the socket's group. The techniques of this distribution join by
`BUILT_IN`, which has the same form, as a source checkout has no entry points: group, name, "MODULE:ATTRIBUTE". A
technique is left out where its package is not there, or that of one that it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
NEEDS: dict[str, tuple[str, ...]] = {
    _OVERLAP: (),
    _PARTITIONS: (_OVERLAP,),
    _LAYER_BLOCKS: (),
    _PLACEMENT: (),
    _GRANULARITY: (_PLACEMENT,),
    _CLUSTER: (_PARTITIONS,),
}
"""The techniques of this distribution, and which others each imports: it is missing where one of them is."""

POLICIES = "cotenant.policies"
"""Socket: the class of a policy by its name; see `policies.registry`."""
POLICY_OF_PLANS = "duty_cycle"
"""The policy of a server that runs a plan, unless another one is named."""
COMMANDS = "cotenant.commands"
"""Socket: a function or a `typer.Typer` by the name of the command."""
CAMPAIGNS = "cotenant.campaigns"
"""Socket: a subclass of `cli.campaigns.ProfileCampaign`: options of `cotenant profile`, and what they measure."""
SERVICES = "cotenant.services"
"""Socket: a subclass of `serve.services.Service`."""
PLAN_FILES = "cotenant.plan_files"
"""Socket: a `serve.services.PlanFiles`; one at most."""
GROUP_MODELS = "cotenant.group_models"
"""Socket: a `measure.group_models.GroupModels`; one at most."""
WORLDS = "cotenant.worlds"
"""Socket: a function of latency tables by tenant and a seed that gives a `world.simulated.World`, or None."""
KEPT_PLANS = "cotenant.kept_plans"
"""Socket: by the field of the policies that follow them, a function of repository, profile and lanes that gives the
plans that are kept."""
RUN_STRATEGIES = "cotenant.run_strategies"
"""Socket: a subclass of `execute.strategy.RunStrategy`. Models are opened by their engine, then by each strategy in the
order of `BUILT_IN`, then by those of other packages."""
PLAN_SECTIONS = "cotenant.plan_sections"
"""Socket: a subclass of `plan_file.FileSection` by the name of the section."""
PLANNERS = "cotenant.planners"
"""Socket: a function that makes a planner of tenants from a headroom and an effort, by the name of the planner."""
PLAN_TENANTS = "cotenant.plan_tenants"
"""Socket: an `api.planning.PlanTenants`, the function behind `cotenant.plan`; one at most."""

BUILT_IN: dict[str, dict[str, str]] = {
    POLICIES: {
        "overlap": f"{_OVERLAP}.policy.headroom_control:Overlap",
        "duty_cycle": f"{_PARTITIONS}.policy.duty_cycle:DutyCycle",
        "clustered": f"{_GRANULARITY}.policy.clustered:Clustered",
        "layer_block": f"{_LAYER_BLOCKS}.policy.published:LayerBlock",
        "slack_blocks": f"{_LAYER_BLOCKS}.policy.slack_blocks:SlackBlocks",
    },
    SERVICES: {
        "joint-plans": f"{_GRANULARITY}.serve.together:TogetherPlans",
        "groups": f"{_OVERLAP}.serve:Groups",
        "pressure": f"{_LAYER_BLOCKS}.serve:Pressure",
    },
    CAMPAIGNS: {
        "groups": f"{_OVERLAP}.cli:GroupCampaign",
        "co-runs": f"{_PARTITIONS}.cli.profile_corun:CoRunCampaign",
    },
    PLAN_FILES: {"partitions": f"{_PARTITIONS}.serve.replan:PLAN_FILES"},
    GROUP_MODELS: {"overlap": f"{_OVERLAP}.measure.overlap_models:MODELS"},
    WORLDS: {"many cores": f"{_LAYER_BLOCKS}.world.many_core:world_of"},
    KEPT_PLANS: {"joint_plans": f"{_GRANULARITY}.plan.kept:usable_plans"},
    RUN_STRATEGIES: {
        "kernels": f"{_LAYER_BLOCKS}.execute.kernel_strategy:KernelRunStrategy",
        "placement": f"{_PLACEMENT}.execute.placement_strategy:PlacementRunStrategy",
    },
    COMMANDS: {
        "compile": f"{_LAYER_BLOCKS}.cli:compile_",
        "plan": f"{_PARTITIONS}.cli.plan:plan",
        "place": f"{_PLACEMENT}.cli:place",
        "co-schedule": f"{_GRANULARITY}.cli:co_schedule",
        "cluster": f"{_CLUSTER}.cli:cluster",
    },
    PLAN_SECTIONS: {
        "tenants": f"{_PARTITIONS}.plan.file:TenantsSection",
        "placement": f"{_PLACEMENT}.plan_section:PlacementSection",
        "together": f"{_GRANULARITY}.plan_section:TogetherSection",
    },
    PLAN_TENANTS: {"partitions": f"{_PARTITIONS}.plan.answer:plan_tenants"},
    PLANNERS: {
        "ours": f"{_PARTITIONS}.plan.planners:ours",
        "elastic_int": f"{_PARTITIONS}.plan.planners:elastic_int",
        "elastic": f"{_PARTITIONS}.plan.planners:elastic",
    },
}
"""What the techniques of this distribution add, by socket and name."""


def _is_there(package: str) -> bool:
    return find_spec(package) is not None and all(map(_is_there, NEEDS[package]))


@cache
def built_in(socket: str) -> dict[str, str]:
    """References "MODULE:ATTRIBUTE" by name, of the techniques that are installed."""
    there = tuple(f"{package}." for package in NEEDS if _is_there(package))
    return {name: found for name, found in BUILT_IN.get(socket, {}).items() if found.startswith(there)}


def _entry_points(socket: str) -> Sequence[EntryPoint]:
    return _on_path(socket, tuple(sys.path))


@cache
def _on_path(socket: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of the packages on this path; to read the metadata of all of them takes milliseconds."""
    from importlib.metadata import entry_points  # which loads much, and few need it

    return tuple(entry_points(group=socket))


def registered(socket: str) -> dict[str, str]:
    """The same, then those of other packages. A name of this distribution stays its own."""
    others = {found.name: found.value for found in _entry_points(socket)}
    return built_in(socket) | others | built_in(socket)


def load(socket: str, name: str) -> Any:
    """What is registered under a name; None where nothing is. Raises what importing the module raises."""
    if (found := built_in(socket).get(name)) is not None:  # without a look at the metadata of all packages
        return resolve_name(found)
    return next((point.load() for point in _entry_points(socket) if point.name == name), None)


def load_all(socket: str) -> dict[str, Any]:
    """Everything that is registered, by name."""
    return {name: load(socket, name) for name in registered(socket)}
