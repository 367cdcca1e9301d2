"""Sockets: named extension points of the base. The only file of the base that names a technique.

Other packages join a socket by an entry point of the socket's group. The techniques of this distribution are in
`BUILT_IN`, in the same form (group, name, "MODULE:ATTRIBUTE"), since a source checkout has no entry points. A technique
is left out if its package, or a package that it needs, is not installed.
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
"""The techniques of this distribution, each with the techniques that it imports."""

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
"""Socket: an `api.planning.PlanTenants`, behind `cotenant.plan` and `cotenant.check_plan`; one at most."""

BUILT_IN: dict[str, dict[str, str]] = {
    POLICIES: {
        "overlap": f"{_OVERLAP}.policy.headroom_control:Overlap",
        "duty_cycle": f"{_PARTITIONS}.policy.duty_cycle:DutyCycle",
        "joint": f"{_GRANULARITY}.policy.joint_schedule:JointSchedule",
        "layer_block": f"{_LAYER_BLOCKS}.policy.published:LayerBlock",
        "slack_blocks": f"{_LAYER_BLOCKS}.policy.slack_blocks:SlackBlocks",
    },
    SERVICES: {
        "joint-plans": f"{_GRANULARITY}.serve.joint_plans:JointPlanService",
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
        "together": f"{_GRANULARITY}.plan_section:JointPlanSection",
    },
    PLAN_TENANTS: {"partitions": f"{_PARTITIONS}.plan.answer"},
    PLANNERS: {
        "ours": f"{_PARTITIONS}.plan.planners:ours",
        "elastic_int": f"{_PARTITIONS}.plan.planners:elastic_int",
        "elastic": f"{_PARTITIONS}.plan.planners:elastic",
    },
}
"""What the techniques of this distribution add, by socket and name."""
FORMER_NAMES: dict[str, dict[str, str]] = {POLICIES: {"clustered": "joint"}}
"""Names that were in use before a rename, with the present ones, by socket. They are accepted until 0.3."""


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
    """Entry points of the packages on this path; cached, since reading all metadata takes milliseconds."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return tuple(entry_points(group=socket))


def registered(socket: str) -> dict[str, str]:
    """References "MODULE:ATTRIBUTE" by name, of this distribution and then of others, which cannot override a name."""
    others = {found.name: found.value for found in _entry_points(socket)}
    return built_in(socket) | others | built_in(socket)


def load(socket: str, name: str) -> Any:
    """The object registered under a name; None if there is none. Raises the errors of importing its module."""
    if (found := built_in(socket).get(name)) is not None:  # without reading the metadata of all packages
        return resolve_name(found)
    return next((point.load() for point in _entry_points(socket) if point.name == name), None)


def load_all(socket: str) -> dict[str, Any]:
    """All registered objects, by name."""
    return {name: load(socket, name) for name in registered(socket)}
