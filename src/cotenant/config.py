"""Configuration files: TOML to immutable structures. An error names the file, the key and the expected value.

A model repository holds `MODEL/config.toml` and `MODEL/VERSION/model.onnx`, and optionally `cotenant.toml` for the
server as a whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from cotenant.errors import ConfigError, expected_one_of
from cotenant.files import convert, read_toml, to_table
from cotenant.policies.registry import RENAMED_OPTIONS, options_of, policy_class, typed_options

NS_PER_MS = 1_000_000
_log = logging.getLogger("cotenant.config")
Positive = Annotated[float, Meta(gt=0, le=1e9)]
PositiveInt = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: an unknown key is an error."""


class TenantSection(_Section, frozen=True):
    """`[tenant]`: the owner of the model, with its SLO and guarantees. `slo_ms` is required.

    `share` is the guaranteed part of device time; without it the tenant gets a part of the rest, by weight. `rate` is
    the guaranteed number of queries a second, even above the share; `max_rate` is the most that is admitted.
    `memory_limit_mib` bounds the resident memory of the tenant's worker process.
    """

    slo_ms: Annotated[float, Meta(gt=0, le=3_600_000)]
    name: str | None = None
    weight: Positive = 1.0
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    rate: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    max_rate: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    priority: Annotated[int, Meta(ge=0, le=65535)] = 0
    max_queue: PositiveInt = 256
    memory_limit_mib: Positive | None = None


class ModelSection(_Section, frozen=True):
    """`[model]`: `max_batch` is the most rows of a batch (1: no merging); `shapes` are the shapes to profile.

    `batching` is the condition of merging: "proven" by the graph or a trial at loading, "exact" by a trial with
    bitwise equal results alone and merged, "trust" without a condition.

    `precision` is the arithmetic of FP32 operators of torch models: "fp32" exactly, "tf32" with TF32 products where the
    device has them, "fp16" or "bf16" with products and results in that type. `channels_last` is the memory layout of
    images for convolutions; default: only with "fp16" and "bf16".

    `placement` "auto" runs launches on several cores by the plan of `cotenant place`, where that is faster.
    """

    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    batching: Literal["proven", "exact", "trust"] = "proven"
    shapes: tuple[dict[str, tuple[PositiveInt, ...]], ...] = ()
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "tf32"
    channels_last: bool | None = None
    placement: Literal["none", "auto"] = "none"


class SegmentsSection(_Section, frozen=True):
    """`[segments]`: `max_ms` is the longest time between two points at which the model can be left.

    By default 10 ms, and on a GPU a tenth of the SLO where that is less.
    """

    max_ms: Annotated[float, Meta(gt=0, le=3_600_000)] | None = None


class SampleSection(_Section, frozen=True):
    """`[samples.INPUT]`: source of the values of an input when the model is tested and measured.

    Exactly one key is set. `file` (.npy or .json, relative to the model's directory) and `values` are used in order and
    repeated. `integers` and `uniform` are the inclusive bounds of a range to draw from.
    """

    file: Annotated[str, Meta(min_length=1)] | None = None
    values: Annotated[tuple[bool | int | float | str, ...], Meta(min_length=1)] | None = None
    integers: tuple[int, int] | None = None
    uniform: tuple[float, float] | None = None


class ModelConfig(_Section, frozen=True):
    """One model's `config.toml`. `samples` is by input."""

    tenant: TenantSection
    model: ModelSection = ModelSection()
    segments: SegmentsSection = SegmentsSection()
    samples: dict[str, SampleSection] = {}


NO_CONFIG = ModelConfig(tenant=TenantSection(slo_ms=3_600_000))
"""Of a model without a readable one, for further checks."""
_STAND_IN_SLO_MS = 1000
"""SLO of a model without a valid one, for further checks."""


class StageSection(_Section, frozen=True):
    """`[[application.stage]]`: a model of the repository, and the source of each of its inputs.

    A source is the name of an input of the application, or `STAGE.OUTPUT`.
    """

    name: Annotated[str, Meta(min_length=1)]
    model: Annotated[str, Meta(min_length=1)]
    inputs: Annotated[dict[str, Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class ApplicationSection(_Section, frozen=True):
    """`[application]`: several models with one SLO, from the arrival of a query to its last result.

    `outputs` maps each output of the application to a `STAGE.OUTPUT`.
    """

    slo_ms: Annotated[float, Meta(gt=0, le=3_600_000)]
    stage: Annotated[tuple[StageSection, ...], Meta(min_length=1, max_length=64)]
    outputs: Annotated[dict[str, str], Meta(min_length=1)]
    priority: Annotated[int, Meta(ge=0, le=65535)] = 0


class ApplicationConfig(_Section, frozen=True):
    """The `config.toml` of an application."""

    application: ApplicationSection


_Owner = TypeVar("_Owner", TenantSection, ApplicationSection)
_NOT_SIMULATED = ("name", "memory_limit_mib", "stage", "outputs")
"""Keys that say which measurements and which models belong to a tenant, or have no effect on a simulation."""


def with_keys(section: _Owner, keys: Mapping[str, object], name: str) -> _Owner:
    """The section of a tenant or application with other values of some keys, read as those of its file.

    `name` is that of the tenant, for errors. Raises ConfigError for an unknown key or a value outside its range.
    """
    known = [each for each in section.__struct_fields__ if each not in _NOT_SIMULATED]
    for key in keys:
        if key not in known:
            raise ConfigError(f"command line: tenant.{name} has no key {key!r}, {expected_one_of(key, known)}")
    return convert({**to_table(section), **keys}, type(section), "command line", ConfigError, f"tenant.{name}")


class ServerSection(_Section, frozen=True):
    """`[server]`: addresses and limits. `http_port` or `grpc_port` 0 selects any free port.

    `admin_port` serves the whole HTTP interface, including metrics and loading, at `admin_host` (default: `host`).
    Without it, metrics and loading are served at `http_port` and `grpc_port` only if `host` is a loopback address.
    `max_answer_mib` bounds the outputs of one launch: a query that exceeds it alone fails. `load_limit_s` bounds each
    step of loading, testing and measuring a model in the child process. `frontends` is the number of front-end
    processes; with 0 the engine's process serves clients. With `replace`, a server takes the place of the one that runs
    at its addresses.
    """

    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    admin_port: Port | None = None
    admin_host: str | None = None
    max_body_mib: Annotated[float, Meta(gt=0, le=2047)] = 64.0
    max_answer_mib: Annotated[float, Meta(gt=0, le=2047)] = 256.0
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    load_limit_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    frontends: Annotated[int, Meta(ge=0, le=64)] = 1
    replace: bool = False

    @property
    def max_answer_bytes(self) -> int:
        """`max_answer_mib` in bytes."""
        return int(self.max_answer_mib * (1 << 20))


class IntegritySection(_Section, frozen=True):
    """`[integrity]`: one of `sample` merged results of a tenant is computed again alone and compared; 0: none."""

    sample: Annotated[int, Meta(ge=0)] = 10_000


class DeviceSection(_Section, frozen=True):
    """`[device]`: `cores` to use (default: all cores of the process), and their division into lanes.

    `lanes` is "single" (one core each), "all" (one lane of all cores), or a list of lists of core numbers.

    `kind` "cuda" runs models on the GPU number `index`. Its lanes are `shares`, in percent of its SMs (none: one lane
    of the whole GPU); `sharing` is the mechanism: "green" contexts, or plain "streams".

    `isolation` "process" gives every tenant a worker process, "thread" runs all models in the server; other packages
    may have more: see `execute.registry`.
    """

    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    lanes: str | tuple[tuple[Annotated[int, Meta(ge=0)], ...], ...] = "single"
    kind: Literal["cpu", "cuda"] = "cpu"
    index: Annotated[int, Meta(ge=0, le=1023)] = 0
    sharing: Literal["green", "streams"] = "green"
    shares: tuple[Annotated[float, Meta(gt=0, le=100)], ...] = ()
    isolation: str = "process"

    @property
    def gpu(self) -> DeviceSection | None:
        """This section where it is of a GPU; None for cores."""
        return None if self.kind == "cpu" else self


class PolicySection(_Section, frozen=True):
    """`[policy]`: the policy's name and its options, which are keys of the same table; see `policies.registry`."""

    name: str = "shares"
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def over(self, name: str | None, chosen: Mapping[str, object], where: str) -> PolicySection:
        """The section with the policy and options of a command line in place of its own.

        Another policy keeps the options that it has as well. Raises ConfigError for an option that the policy lacks.
        """
        name = _present_name(name or self.name, where)
        known = options_of(policy_class(name, where))
        kept = {key: value for key, value in self.options.items() if key in known}
        return PolicySection(name, kept | typed_options(name, chosen, where))


def _present_name(name: str, where: str) -> str:
    """The name under which a policy is registered. Logs one deprecation line for a former name.

    Raises ConfigError for an unknown name.
    """
    present: str = policy_class(name, where).name
    if present != name:
        _log.warning("%s: policy name %r is deprecated and will end with 0.3; write %r", where, name, present)
    return present


class PredictSection(_Section, frozen=True):
    """`[predict]`: the quantile of measured latency that decisions use until calibration."""

    quantile: Literal["p50", "p90", "p95", "p99"] = "p50"


class PlanSection(_Section, frozen=True):
    """`[plan]`: the plan file to serve, and whether to follow the load.

    `device` is the number of this server's device in the plan. Every `period_s` (0: never) the observed rates are
    compared with the planned ones. If they differ too much, `planner` makes a new plan, with `headroom` added to each
    rate: see `plan.tracking`.
    """

    file: str | None = None
    device: Annotated[int, Meta(ge=0, le=65535)] = 0
    period_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    planner: str = "ours"
    headroom: Annotated[float, Meta(ge=0, le=10)] = 0.1


class ServerConfig(_Section, frozen=True):
    """The repository's `cotenant.toml`."""

    server: ServerSection = ServerSection()
    device: DeviceSection = DeviceSection()
    policy: PolicySection = PolicySection()
    predict: PredictSection = PredictSection()
    plan: PlanSection = PlanSection()
    integrity: IntegritySection = IntegritySection()


def load_model_config(path: Path, faults: list[str] | None = None) -> ModelConfig:
    """Read a model's `config.toml`. Raises ConfigError with all problems.

    With `faults`, the valid keys are returned, and `faults` gets a sentence for each other key; a model without an SLO
    has `_STAND_IN_SLO_MS` then. ConfigError is raised only for a file that cannot be read.
    """
    table, found = read_toml(path, ConfigError), list[str]()
    tenant = table.get("tenant")
    if not isinstance(tenant, dict) or "slo_ms" not in tenant:
        found.append(
            f"{path}: tenant.slo_ms is missing; every tenant needs a latency target: "
            "add a line like 'slo_ms = 100' below [tenant]"
        )
    if not isinstance(tenant, dict):
        table["tenant"] = tenant = {}
    samples = table.get("samples")
    if isinstance(samples, dict):
        for name, entry in list(samples.items()):  # one at a time, so that an error names the input
            try:
                _check_sample(entry, f"samples.{name}", str(path))
            except ConfigError as error:
                found += error.problems
                del samples[name]
    try:
        convert(tenant, TenantSection, str(path), ConfigError, "tenant", found)
    except ConfigError:  # its SLO is missing or was removed: named already
        tenant["slo_ms"] = _STAND_IN_SLO_MS
    config = convert(table, ModelConfig, str(path), ConfigError, faults=found)
    if found and faults is None:
        raise ConfigError(*found)
    if faults is not None:
        faults += found
    return config


def _check_sample(entry: object, key: str, where: str) -> None:
    found = convert(entry, SampleSection, where, ConfigError, key)
    given = [name for name in found.__struct_fields__ if getattr(found, name) is not None]
    if len(given) != 1:
        known = ", ".join(found.__struct_fields__)
        found_keys = " and ".join(given) if given else "nothing"
        raise ConfigError(f"{where}: {key} has {found_keys}, expected exactly one of {known}")
    low, high = found.integers or found.uniform or (0, 0)
    if not -math.inf < low <= high < math.inf:
        raise ConfigError(f"{where}: {key}.{given[0]} is [{low}, {high}], expected two numbers [least, most]")


def load_application_config(path: Path) -> ApplicationSection:
    """Read an application's `config.toml`. Raises ConfigError."""
    table = read_toml(path, ConfigError)
    section = table.get("application")
    if isinstance(section, dict) and "slo_ms" not in section:
        raise ConfigError(
            f"{path}: application.slo_ms is missing; every application needs a latency target for the whole: "
            "add a line like 'slo_ms = 500' below [application]"
        )
    return convert(table, ApplicationConfig, str(path), ConfigError).application


def load_server_config(path: Path | None, over: Mapping[str, object] = MappingProxyType({})) -> ServerConfig:
    """Read the repository's `cotenant.toml`; defaults when there is no such file, and for None.

    `over` has values of the command line by SECTION.KEY, which replace those of the file. Another policy keeps the
    options of the file that it has as well. Raises ConfigError.
    """
    table = read_toml(path, ConfigError) if path is not None and path.exists() else {}
    given = table.get("policy")
    if isinstance(given, dict):
        name = given.pop("name", PolicySection().name)
        if isinstance(name, str):
            name = _present_name(name, f"{path}: policy")
            _warn_of_old_names(given, f"{path}: policy")
            given = typed_options(name, given, f"{path}: policy")
        table["policy"] = {"name": name, "options": given}
    settings = convert(table, ServerConfig, str(path), ConfigError)
    if not over:
        return settings
    chosen: dict[str, Any] = {}
    for key, value in over.items():
        section, _, name = key.partition(".")
        if section == "policy":
            chosen[name] = value
        else:
            table.setdefault(section, {})[name] = value
    _warn_of_old_names(chosen, "command line")
    policy = settings.policy.over(chosen.pop("name", None), chosen, "command line")
    table["policy"] = {"name": policy.name, "options": policy.options}
    return convert(table, ServerConfig, "command line", ConfigError)


def _warn_of_old_names(options: Mapping[str, object], where: str) -> None:
    for old in options.keys() & RENAMED_OPTIONS.keys():
        _warn_of_old_name(old, where)


@cache
def _warn_of_old_name(old: str, where: str) -> None:
    """One line in the log for each option and file: files are read more than once."""
    _log.warning("%s.%s is deprecated and ends with version 0.3: use %r instead", where, old, RENAMED_OPTIONS[old])
