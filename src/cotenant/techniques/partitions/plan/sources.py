"""Costs of planning, from a profiled repository or from a profile file of another device.

'cotenant profile' measures the latencies of a repository. Memory: see `repository_memory_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from msgspec import UNSET

from cotenant.errors import PlanError
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.profile_file import QUANTILES, ModelProfile, load_profile
from cotenant.profiles.server_cost import HTTP, RequestRate, ServerCost, overload
from cotenant.repository import (
    STATE_FOLDER,
    ModelVersion,
    overlap_path,
    profile_path,
    readable_versions,
)
from cotenant.repository.application_spec import readable_applications
from cotenant.repository.measured_content import changes, refuse_changes
from cotenant.techniques.partitions.plan.application import Stage
from cotenant.techniques.partitions.plan.file import KnownApplication, KnownTenant
from cotenant.techniques.partitions.plan.profiled_groups import read_groups
from cotenant.techniques.partitions.plan.table_costs import GroupTimes, Latencies, TableCosts
from cotenant.techniques.partitions.plan.types import NS_PER_MS, DeviceType
from cotenant.techniques.partitions.predict.factors import Interference

QUANTILE = "p95"
"""Quantile of measured latencies that plans use."""
TAIL = "p99"
"""Quantile of measured latencies for the tail slack of reports."""
WORKER_BYTES = 128 << 20
"""Memory of a worker process without weights, in bytes: interpreter, runtime and buffers (docs/planning.md)."""
COPIES = 4
"""Memory of a loaded model over its file size: the runtime keeps prepared weights per lane (docs/planning.md)."""
MOST_BELIEVED = 16
"""Largest ratio of a partition to the largest measured one, of which it then has the latency."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ProfileCosts:
    """Costs from one profile. Sizes are cores of a CPU or percents of a GPU; `notes` are sentences for the user.

    `tails`, `tail_groups`: latencies at the quantile TAIL, if measured. `known`: tenants or models with an SLO. `kind`:
    kind of the device, "" if unknown. `stale`: changes of models of the repository `root` since the measurement.
    `server`: what requests cost, if measured; `row_bytes`: bytes of the largest request of one row, in and out.
    """

    latencies: Latencies
    memory_bytes: Mapping[str, int]
    digest: str
    tails: Latencies | None = None
    interference: Interference | None = None
    known: Mapping[str, KnownTenant] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    applications: Mapping[str, KnownApplication] = field(default_factory=dict)
    groups: GroupTimes | None = None
    tail_groups: GroupTimes | None = None
    kind: str = ""
    root: Path | None = None
    stale: Mapping[str, str] = field(default_factory=dict)
    server: ServerCost | None = None
    row_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def request_ns(self, model: str) -> int:
        """Processor time of a server for a request of one row at the highest measured rate, where capacity ends."""
        if self.server is None:
            return 0
        return self.server.request_ns(HTTP, self.row_bytes.get(model, (0, 0)), self.server.busiest_per_s)

    def overload(self, rates: Mapping[str, float]) -> str:
        """Why a server cannot process so many requests of one row, or "". `rates`: rows a second by model."""
        demands = [RequestRate(HTTP, rate, self.row_bytes.get(model, (0, 0))) for model, rate in rates.items()]
        return "" if self.server is None else overload(self.server, demands)


@dataclass(frozen=True, slots=True)
class CostBasis:
    """Costs of a plan. `devices`: the requested ones, without splits that were not measured.

    `tail`: costs at the quantile TAIL, or None. `fingerprint` changes with the profiles. `servers`: the profiles with
    the cost of requests of CPUs, by name of the device type.
    """

    devices: tuple[DeviceType, ...]
    costs: TableCosts
    tail: TableCosts | None
    fingerprint: str
    notes: tuple[str, ...] = ()
    servers: Mapping[str, ProfileCosts] = field(default_factory=dict)

    def overload(self, rates: Mapping[str, float], devices: Sequence[DeviceType]) -> str:
        """Why the servers of devices cannot process so many requests of one row, or "".

        `rates`: rows a second by model, divided evenly over the devices. A device without a measured server takes any.
        """
        names = {device.name for device in devices}
        if not names <= self.servers.keys():
            return ""
        found = (
            self.servers[name].overload({model: rate / len(devices) for model, rate in rates.items()}) for name in names
        )
        return next(filter(None, found), "")


READERS: dict[str, Callable[[Path], ProfileCosts]] = {}
"""Readers of other files than profiles, by suffix. Empty here: packages with other tables add their readers."""


def read_profile_costs(path: Path, quantile: str = QUANTILE) -> ProfileCosts:
    """Read a profile from a repository's directory, a profile file, or a file of one of READERS.

    Raises PlanError, or what the reader raises for a file that cannot be used.
    """
    if quantile not in QUANTILES:
        raise PlanError(f"quantile is {quantile!r}, expected one of {', '.join(QUANTILES)}")
    reader = READERS.get(path.suffix.lower())
    if reader is not None:
        return reader(path)
    if path.is_dir():
        return _repository_tables(path, profile_path(path), quantile)
    root = path.parent.parent if path.parent.name == STATE_FOLDER else None
    return _repository_tables(root, path, quantile)


def costs_of_repository(
    root: Path,
    devices: Sequence[DeviceType],
    quantile: str = QUANTILE,
    models: Iterable[str] | None = None,
    *,
    stale: bool = False,
) -> CostBasis:
    """Costs for devices from a profiled repository, for `models` or all measured models.

    Raises as `read_profile_costs` and `basis_of`.
    """
    tables = read_profile_costs(root, quantile)
    return basis_of({"": tables}, devices, tables.latencies if models is None else models, stale=stale)


def basis_of(
    tables: Mapping[str, ProfileCosts], devices: Sequence[DeviceType], models: Iterable[str], *, stale: bool = False
) -> CostBasis:
    """Costs for an inventory, from tables by name of device type; the table "" is for all other types.

    Sizes between measured ones are interpolated, and up to MOST_BELIEVED times the largest measured size extrapolated
    (`LatencyModel`). Splits with partitions smaller than measured for one of `models` are left out.

    Raises PlanError for a device type without a table, a table of another kind of device, and a device outside the
    measured sizes. Raises StaleProfileError for one of `models` that changed since the measurement, unless `stale`.
    """
    wanted = list(dict.fromkeys(models))
    kinds: dict[str, DeviceType] = {}
    latencies: dict[str, Latencies] = {}
    tails: dict[str, Latencies] = {}
    sizes: dict[str, Sequence[int]] = {}
    interference: dict[str, Interference] = {}
    groups: dict[str, GroupTimes] = {}
    tail_groups: dict[str, GroupTimes] = {}
    memory: dict[str, int] = {}
    notes: dict[str, None] = {}
    servers: dict[str, ProfileCosts] = {}
    for device in dict.fromkeys(devices):
        table = tables.get(device.name, tables.get(""))
        if table is None:
            raise PlanError(f"device {device.name!r} has no profile, expected --profiles {device.name}=PROFILE")
        _check_kind(device, table, wanted)
        changed = {model: table.stale[model] for model in wanted if model in table.stale}
        if changed and table.root is not None:
            refuse_changes(changed, table.root, stale=stale)
            notes.update(dict.fromkeys(f"stale: {each}" for each in changed.values()))
        kinds[device.name] = kind = _measured(device, table.latencies, wanted)
        notes.update(dict.fromkeys((*table.notes, *_notes(device, kind, table.latencies, wanted))))
        latencies[device.name], sizes[device.name] = table.latencies, kind.sizes
        if table.server is not None and device.kind == "cpu":
            servers[device.name] = table
        if table.tails is not None:
            tails[device.name] = table.tails
        if table.interference is not None:
            interference[device.name] = table.interference
        if table.groups is not None and table.tail_groups is not None:
            groups[device.name], tail_groups[device.name] = table.groups, table.tail_groups
        for model, needed in table.memory_bytes.items():
            memory[model] = max(needed, memory.get(model, 0))

    def overhead(device: str, model: str, batch: int, size: int) -> int:
        """What the server needs for a launch, and for its requests on the cores of the partition."""
        known = servers.get(device)
        if known is None or known.server is None:
            return 0
        return known.server.launch_ns + -(-batch * known.request_ns(model) // size)

    costs, tail = TableCosts(latencies, memory, interference, groups, sizes=sizes, overhead=overhead), None
    if tails and len(tails) == len(latencies):
        tail = TableCosts(tails, memory, interference, tail_groups, sizes=sizes, overhead=overhead)
    digest = sha256("".join(f"{name}={table.digest};" for name, table in tables.items()).encode()).hexdigest()[:16]
    used = tuple(kinds[device.name] for device in devices)
    return CostBasis(used, costs, tail, digest, tuple(notes), servers)


def repository_memory_bytes(version: ModelVersion, measured_bytes: int = 0) -> int:
    """Memory of a model of a repository in bytes: its configured limit, else the measured peak of its worker.

    Without both it is estimated as `WORKER_BYTES + COPIES * size of the version's files`.
    """
    limit = version.config.tenant.memory_limit_mib
    if limit is not None:
        return round(limit * _MIB)
    if measured_bytes:
        return measured_bytes
    files = sum(path.stat().st_size for path in sorted(version.path.parent.rglob("*")) if path.is_file())
    return WORKER_BYTES + COPIES * files


def _repository_tables(root: Path | None, path: Path, quantile: str) -> ProfileCosts:
    if root is not None and not path.exists():
        raise PlanError(f"{root}: has no profile yet: run 'cotenant profile {root}'")
    profile = load_profile(path)
    latencies, tails = (
        {name: LatencyModel(model.table(each)) for name, model in profile.models.items()} for each in (quantile, TAIL)
    )
    notes = [f"latencies: measured, {quantile} of {profile.device.processor}, {profile.created}"]
    memory = dict.fromkeys(profile.models, 0)
    known: dict[str, KnownTenant] = {}
    owners: dict[str, str] = {}
    models: dict[str, str] = {}
    stale: dict[str, str] = {}
    interference, groups, tail_groups = None, None, None
    content = path.read_bytes() + quantile.encode()
    if root is None:
        notes.append("memory: not considered, as the profile lies outside its repository")
    else:
        changed = changes(root, profile.contents)
        for found in readable_versions(root):  # unreadable ones are in no profile
            if found.tenant not in profile.models or models.setdefault(found.tenant, found.model) != found.model:
                continue  # a tenant owns one model, as in a server
            names = (found.tenant, found.model) if found.is_default else (found.tenant,)
            for name in names:
                if name in profile.models and name != found.tenant:
                    continue
                latencies[name], tails[name] = latencies[found.tenant], tails[found.tenant]
                memory[name] = repository_memory_bytes(found, profile.models[found.tenant].memory_bytes)
                owners[name] = found.tenant
                stale |= {name: changed[found.tenant]} if found.tenant in changed else {}
                known[name] = KnownTenant(name, round(found.config.tenant.slo_ms * NS_PER_MS))
        has_all = all(each.memory_bytes for each in profile.models.values())
        basis = "measured peaks of workers" if has_all else "estimated from the size of the model files"
        notes.append(f"memory: {basis} (docs/planning.md), or the tenant's limit")
        from cotenant.repository import coruns_path
        from cotenant.techniques.partitions.measure.corun_interference import corun_interference

        interference = corun_interference(root)
        content += coruns_path(root).read_bytes() if interference else b""
        owners = {name: name for name in profile.models} | owners
        groups, tail_groups = (read_groups(root, profile, each, owners) for each in (quantile, TAIL))
        content += overlap_path(root).read_bytes() if groups else b""
    notes.append(
        "interference: measured beside co-runners"
        if interference
        else "interference: not measured; partitions are assumed not to slow each other down"
    )
    notes.append(
        f"groups: {groups.count} measured; slots of a partition run in groups where that serves more"
        if groups
        else "groups: not measured; the slots of a partition run in turn"
    )
    server = None if profile.server is UNSET or profile.device.kind != "cpu" else profile.server
    rows = {name: _largest(profile.models[owners.get(name, name)]) for name in latencies}
    notes.append(
        "server: not measured; requests are assumed to cost nothing besides their launches"
        if server is None
        else f"server: measured; at {server.busiest_per_s:.0f} requests/s one costs "
        f"{server.request_ns(HTTP, (0, 0), server.busiest_per_s) / 1e3:.0f} us of a core besides its model, and a "
        f"launch {server.launch_ns / 1e3:.0f} us"
    )
    digest = sha256(content).hexdigest()
    return ProfileCosts(
        *(latencies, memory, digest, tails, interference, known, tuple(notes), _applications(root)),
        *(groups, tail_groups, profile.device.kind, root, stale, server, rows),
    )


def _largest(model: ModelProfile) -> tuple[int, int]:
    """Bytes in and out of the largest request of one row; 0 in older profiles."""
    return (0, 0) if model.row_bytes is UNSET else max(model.row_bytes, key=sum)


def _applications(root: Path | None) -> dict[str, KnownApplication]:
    """The readable applications of a repository."""
    found: dict[str, KnownApplication] = {}
    for name, spec in readable_applications(root).items() if root is not None else ():
        names = spec.graph.names
        found[name] = KnownApplication(
            spec.slo_ns,
            tuple(
                Stage(stage.name, stage.model, tuple(names[other] for other in needed))
                for stage, needed in zip(spec.stages, spec.graph.after, strict=True)
            ),
        )
    return found


def _check_kind(device: DeviceType, table: ProfileCosts, models: Sequence[str]) -> None:
    """Raise PlanError if the latencies are of another kind of device: sizes are cores, or percents of a GPU."""
    if table.kind and table.kind != device.kind:
        kind_names = {"cpu": "CPU", "gpu": "GPU"}
        names = ", ".join(map(repr, models))
        raise PlanError(
            f"device {device.name!r} is a {kind_names[device.kind]} (kind = {device.kind!r}), and the profile of "
            f"{names} is of a {kind_names[table.kind]} (kind = {table.kind!r}): measure on a {kind_names[device.kind]} "
            f"with 'cotenant profile {table.root or 'REPOSITORY'}' and give --profiles {device.name}=PROFILE, or plan "
            f"a device of kind = {table.kind!r}"
        )


def _measured(device: DeviceType, latencies: Latencies, models: Sequence[str]) -> DeviceType:
    """The device type without splits that have partitions smaller than the measured ones."""
    least = {model: latencies[model].sizes[0] for model in models if model in latencies}
    if not least:
        return device
    model = max(least, key=lambda name: least[name])
    splits = tuple(split for split in device.splits if min(split) >= least[model])
    if (device.whole,) not in splits:
        raise PlanError(
            f"device {device.name!r} has size {device.whole}, but model {model!r} was measured at "
            f"{', '.join(map(str, latencies[model].sizes))} only: profile it at sizes of the device"
        )
    for name in least:
        believed = MOST_BELIEVED * latencies[name].sizes[-1]
        if device.whole > believed:
            raise PlanError(
                f"device {device.name!r} has size {device.whole}, but model {name!r} was measured at "
                f"{', '.join(map(str, latencies[name].sizes))} only, which says nothing of sizes above {believed}: "
                "profile it at larger ones with 'cotenant profile --partitions'"
            )
    return replace(device, splits=splits)


def _notes(requested: DeviceType, kind: DeviceType, latencies: Latencies, models: Sequence[str]) -> Iterator[str]:
    if len(kind.splits) < len(requested.splits):
        left = len(requested.splits) - len(kind.splits)
        yield f"device {kind.name!r}: {left} splits left out, as their smaller partitions were not measured"
    known = [latencies[model].sizes for model in models if model in latencies]
    beyond = {size for sizes in known for size in kind.sizes if size > sizes[-1]}
    between = {size for sizes in known for size in kind.sizes if size not in sizes} - beyond
    for unmeasured, belief in (
        (between, "its latency is interpolated between measured sizes"),
        (beyond, "it is assumed to be as slow as the largest measured size"),
    ):
        if unmeasured:
            sizes = ", ".join(map(str, sorted(unmeasured)))
            yield f"device {kind.name!r}: size {sizes} was not measured; {belief}"
