"""Configuration files: TOML to frozen structures. An error names the file, the key and what was expected.

A model repository holds `MODEL/config.toml` and `MODEL/VERSION/model.onnx`, and optionally `cotenant.toml` for the
server as a whole.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError, CotenantError, InvalidValueError
from cotenant.execute.gpu.sm_ladder import SmGrid, shares_of, whole
from cotenant.policies import POLICIES, AnyPolicy
from cotenant.policies.duty_cycle import DutyCycle
from cotenant.policies.lane_rounds import LaneRound
from cotenant.policies.overlap import Overlap
from cotenant.types import Partition

NS_PER_MS = 1_000_000
Positive = Annotated[float, Meta(gt=0, le=1e9)]
PositiveInt = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
T = TypeVar("T", bound=Struct)


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: an unknown key is an error."""


class TenantSection(_Section, frozen=True):
    """`[tenant]`: who owns the model and what was promised. `slo_ms` is required.

    `memory_limit_mib` bounds the resident memory of the tenant's worker process.
    """

    slo_ms: Annotated[float, Meta(gt=0, le=3_600_000)]
    name: str | None = None
    weight: Positive = 1.0
    priority: Annotated[int, Meta(ge=0, le=65535)] = 0
    max_queue: PositiveInt = 256
    memory_limit_mib: Positive | None = None


class ModelSection(_Section, frozen=True):
    """`[model]`: `max_batch` rows are merged at most (1: never); `shapes` are those that are profiled."""

    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    shapes: tuple[dict[str, tuple[PositiveInt, ...]], ...] = ()


class SegmentsSection(_Section, frozen=True):
    """`[segments]`: `max_ms` is the longest stretch between two points where the model can be left."""

    max_ms: Annotated[float, Meta(gt=0, le=3_600_000)] = 10.0


class ModelConfig(_Section, frozen=True):
    """One model's `config.toml`."""

    tenant: TenantSection
    model: ModelSection = ModelSection()
    segments: SegmentsSection = SegmentsSection()


class StageSection(_Section, frozen=True):
    """`[[application.stage]]`: a model of the repository, and where each of its inputs comes from.

    A source is the name of an input of the application, or `STAGE.OUTPUT`.
    """

    name: Annotated[str, Meta(min_length=1)]
    model: Annotated[str, Meta(min_length=1)]
    inputs: Annotated[dict[str, Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class ApplicationSection(_Section, frozen=True):
    """`[application]`: several models with one SLO for the whole, from the arrival of a query to its last answer.

    `outputs` gives the `STAGE.OUTPUT` that each output of the application is.
    """

    slo_ms: Annotated[float, Meta(gt=0, le=3_600_000)]
    stage: Annotated[tuple[StageSection, ...], Meta(min_length=1, max_length=64)]
    outputs: Annotated[dict[str, str], Meta(min_length=1)]
    priority: Annotated[int, Meta(ge=0, le=65535)] = 0


class ApplicationConfig(_Section, frozen=True):
    """The `config.toml` of an application."""

    application: ApplicationSection


class ServerSection(_Section, frozen=True):
    """`[server]`: where to listen and how much to take. `http_port` or `grpc_port` 0 takes any free port."""

    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    max_body_mib: Annotated[float, Meta(gt=0, le=2047)] = 64.0
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0


class DeviceSection(_Section, frozen=True):
    """`[device]`: `cores` to use (default: all that the process may use), and how they are divided into lanes.

    `lanes` is "single" (one core each), "all" (one lane of all cores), or a list of lists of core numbers. `lane_nice`
    is the nice value of the lanes' threads: front-ends share the cores with them, and go first. Cores are kept from
    falling asleep while queries come, and for `awake_ms` after the last, where the system allows it; 0 lets them.

    `kind` "cuda" runs models on the GPU number `index`. Its lanes are `shares`, in percent of its SMs (none: one lane
    of the whole GPU), and `sharing` says by what means: "green" contexts, plain "streams", or "mps".

    `isolation` "process" gives every tenant a worker process, "thread" runs all models in the server. A worker hangs
    when a launch has not ended after `hang_factor` times its predicted latency, and `hang_floor_s` at least; it may
    take `load_limit_s` to load its model.
    """

    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    lanes: str | tuple[tuple[Annotated[int, Meta(ge=0)], ...], ...] = "single"
    kind: Literal["cpu", "cuda"] = "cpu"
    index: Annotated[int, Meta(ge=0, le=1023)] = 0
    sharing: Literal["green", "streams", "mps"] = "green"
    shares: tuple[Annotated[float, Meta(gt=0, le=100)], ...] = ()
    lane_nice: Annotated[int, Meta(ge=0, le=19)] = 5
    awake_ms: Annotated[float, Meta(ge=0, le=60_000)] = 100.0
    isolation: Literal["process", "thread"] = "process"
    hang_factor: Annotated[float, Meta(ge=1, le=1e6)] = 20.0
    hang_floor_s: Annotated[float, Meta(gt=0, le=86_400)] = 10.0
    load_limit_s: Annotated[float, Meta(gt=0, le=86_400)] = 300.0


class PolicySection(_Section, frozen=True):
    """`[policy]`: see `cotenant.policies`. `preempt` defaults to the policy's own.

    `lend` is of duty_cycle; `ways`, `members`, `repeat` and `barrier` are of overlap. `stretch` defaults to the
    policy's own, and `barrier` to whether measured groups slow each other down. `cautious` is of all but duty_cycle.
    """

    name: str = "edf"
    drop: DropRule = DropRule.HOPELESS
    preempt: bool | None = None
    stretch: Annotated[float, Meta(ge=0, le=1)] | None = None
    ways: Annotated[int, Meta(ge=1, le=64)] = 4
    members: Annotated[int, Meta(ge=0, le=64)] = 0
    repeat: bool = True
    barrier: bool | None = None
    cautious: bool | None = None
    lend: bool = True


class PredictSection(_Section, frozen=True):
    """`[predict]`: the quantile of measured latency that decisions believe, and whether it follows what is observed.

    `group_quantile` is that of the latency of a group under which the policy overlap calls it feasible, and of what a
    launch and its answer take under which cautious policies call a query sure.
    """

    quantile: Literal["p50", "p90", "p95", "p99"] = "p50"
    group_quantile: Annotated[float, Meta(ge=0.5, lt=1)] = 0.95
    adapt: bool = True


class PlanSection(_Section, frozen=True):
    """`[plan]`: the plan file to serve, and whether to follow the load.

    `device` numbers the device of the plan that this server is. Every `period_s` (0: never) the rates that were seen
    are compared with those that the plan serves, and `planner` makes a new plan, with `headroom` added to each rate,
    when one is `hysteresis` above, or one has been that much below for `patience` periods.
    """

    file: str | None = None
    device: Annotated[int, Meta(ge=0, le=65535)] = 0
    period_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    planner: str = "ours"
    headroom: Annotated[float, Meta(ge=0, le=10)] = 0.1
    hysteresis: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    patience: Annotated[int, Meta(ge=1, le=1000)] = 3


class ServerConfig(_Section, frozen=True):
    """The repository's `cotenant.toml`."""

    server: ServerSection = ServerSection()
    device: DeviceSection = DeviceSection()
    policy: PolicySection = PolicySection()
    predict: PredictSection = PredictSection()
    plan: PlanSection = PlanSection()


def load_model_config(path: Path) -> ModelConfig:
    """Read a model's `config.toml`. Raises ConfigError."""
    table = _read(path)
    tenant = table.get("tenant")
    if not isinstance(tenant, dict) or "slo_ms" not in tenant:
        raise ConfigError(
            f"{path}: tenant.slo_ms is missing; every tenant needs a latency target: "
            "add a line like 'slo_ms = 100' below [tenant]"
        )
    return _convert(table, ModelConfig, path)


def load_application_config(path: Path) -> ApplicationSection:
    """Read an application's `config.toml`. Raises ConfigError."""
    table = _read(path)
    section = table.get("application")
    if isinstance(section, dict) and "slo_ms" not in section:
        raise ConfigError(
            f"{path}: application.slo_ms is missing; every application needs a latency target for the whole: "
            "add a line like 'slo_ms = 500' below [application]"
        )
    return _convert(table, ApplicationConfig, path).application


def load_server_config(path: Path) -> ServerConfig:
    """Read the repository's `cotenant.toml`; defaults when there is no such file. Raises ConfigError."""
    return _convert(_read(path), ServerConfig, path) if path.exists() else ServerConfig()


def device_cores(section: DeviceSection, where: str = "[device]") -> tuple[int, ...]:
    """The cores to use. Raises ConfigError when one is not available to this process."""
    available = tuple(sorted(os.sched_getaffinity(0)))
    missing = [core for core in section.cores if core not in available]
    if missing:
        raise ConfigError(f"{where}: cores names {missing}, but this process may use only {list(available)}")
    if len(set(section.cores)) != len(section.cores):
        raise ConfigError(f"{where}: cores is {list(section.cores)}, expected each core once")
    return section.cores or available


def lanes_of(
    section: DeviceSection, cores: tuple[int, ...], where: str = "[device]", grid: SmGrid | None = None
) -> tuple[Partition, ...]:
    """The partitions that the cores, or the SMs of the GPU, are divided into. Raises ConfigError.

    `grid` says how the SMs of the GPU can be divided; left out, its driver is asked.
    """
    if section.kind == "cuda":
        return _gpu_lanes(section, where, grid)
    if section.shares:
        raise ConfigError(f"{where}: shares divides a GPU; set kind = 'cuda', or name cores in lanes")
    if section.lanes == "single":
        return tuple(Partition((core,)) for core in cores)
    if section.lanes == "all":
        return (Partition(cores),)
    if isinstance(section.lanes, str):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}, expected 'single', 'all' or lists of core numbers")
    try:
        lanes = tuple(Partition(tuple(lane)) for lane in section.lanes)
    except InvalidValueError as error:
        raise ConfigError(f"{where}: lanes: {error}") from None
    used = [core for lane in lanes for core in lane.cores]
    if not lanes or len(set(used)) != len(used) or not set(used) <= set(cores):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}, expected disjoint lists of the cores {list(cores)}")
    return lanes


def _gpu_lanes(section: DeviceSection, where: str, grid: SmGrid | None) -> tuple[Partition, ...]:
    if section.lanes not in ("single", "all"):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}: lists of cores divide a CPU, shares = [50, 50] a GPU")
    if section.lanes == "all" and section.shares:
        raise ConfigError(f"{where}: lanes is 'all' and shares is {list(section.shares)}, expected one of them")
    if section.sharing == "mps" and section.isolation != "process":
        raise ConfigError(f"{where}: sharing is 'mps', which divides a GPU among processes; set isolation = 'process'")
    if section.sharing == "mps" and len(set(section.shares)) > 1:
        text = "sharing is 'mps', where a worker has the same share in every lane"
        raise ConfigError(f"{where}: shares is {list(section.shares)}, expected equal ones: {text}")
    if grid is None:
        grid = _ask_driver(section, where)
    try:
        if section.shares:
            return shares_of(section.shares, grid, section.index, where)
    except InvalidValueError as error:
        raise ConfigError(str(error)) from None
    return (whole(grid, section.index),)


def _ask_driver(section: DeviceSection, where: str) -> SmGrid:
    from cotenant.execute.gpu.sm_groups import ask_grid

    try:
        return ask_grid(section.index, section.sharing)
    except CotenantError as error:
        raise ConfigError(f"{where}: kind is 'cuda', but {error}") from None


def make_policy(
    section: PolicySection, lanes: tuple[Partition, ...], where: str = "[policy]", rounds: tuple[LaneRound, ...] = ()
) -> AnyPolicy:
    """Build the policy; `rounds` are for duty_cycle, one a lane.

    Raises ConfigError for an unknown name or a value that the lanes do not allow.
    """
    cls = POLICIES.get(section.name)
    if cls is None:
        raise ConfigError(f"{where}: name is {section.name!r}, expected one of {', '.join(sorted(POLICIES))}")
    policy: AnyPolicy
    if issubclass(cls, Overlap):
        try:
            policy = cls(
                lanes,
                drop=section.drop,
                ways=section.ways,
                members=section.members,
                repeat=section.repeat,
                barrier=section.barrier is not False,
            )
        except InvalidValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    elif issubclass(cls, DutyCycle):
        try:
            policy = cls(lanes, drop=section.drop, rounds=rounds, lend=section.lend)
        except InvalidValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    else:
        policy = cls(lanes, drop=section.drop)
    if section.stretch is not None:
        policy = replace(policy, stretch=section.stretch)
    if section.cautious is not None and not isinstance(policy, DutyCycle):
        policy = replace(policy, cautious=section.cautious)
    return policy if section.preempt is None else replace(policy, preempt=section.preempt)


_OWN_OPTIONS = ("stretch", "ways", "members", "repeat", "barrier", "cautious", "lend")


def rebuild_policy(name: str, options: dict[str, Any]) -> AnyPolicy:
    """Build the policy that a trace's header describes, for a replay. Raises ConfigError for an unknown name."""
    try:
        lanes = tuple(Partition(tuple(lane["cores"]), lane["device"]) for lane in options["lanes"])
        own = {key: options[key] for key in _OWN_OPTIONS if key in options}
        section = PolicySection(name=name, drop=DropRule(options["drop"]), preempt=options["preempt"], **own)
        rounds = msgspec.convert(options.get("rounds", ()), tuple[LaneRound, ...])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"trace header: policy_options cannot be used ({error!r}): was the file changed?") from None
    return make_policy(section, lanes, "trace header", rounds)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _convert(table: dict[str, Any], into: type[T], path: Path) -> T:
    try:
        return msgspec.convert(table, into, strict=True)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".")
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{sentence}") from None
