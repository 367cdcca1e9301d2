"""Trace: the append-only log of events and the actions that they caused. Writes, reads and replays it.

One JSON line for each record. The first is a header with all that a replay needs: format, versions, policy, tenants,
latency tables and machine. Each further line is `[time_ns, kind, event, [[kind, action], ...]]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import convert, structs

from cotenant.core import events as core_events
from cotenant.core.actions import Action, PolicyFault
from cotenant.core.engine import Engine
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.errors import CotenantError
from cotenant.files import UNREADABLE, decode, open_regular
from cotenant.policies.registry import RENAMED_OPTIONS
from cotenant.predict.grouped import FittedGroups, GroupedPredictor
from cotenant.predict.margin import NO_MARGIN, SafetyMargin
from cotenant.predict.scales import Scales
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyTable
from cotenant.trace.record_check import EventsMissing, OthersTook, RecordCheck
from cotenant.trace.recorded_policy import RecordedPolicy
from cotenant.types import StageQuery, Tenant
from cotenant.work import Machine, Share, Work

FORMAT = "cotenant-trace/3"
_MOST_LINE_BYTES = 256 << 20
_MOST_RECORDS = 1 << 12
"""Records that a writer keeps in memory before it writes them."""

_Mark = TypeVar("_Mark", EventsMissing, OthersTook)
_MARKS: Mapping[str, type[EventsMissing | OthersTook]] = {each.__name__: each for each in (EventsMissing, OthersTook)}
"""Records in place of events, by kind."""
_RENAMED_KINDS = {"Grow": "Expand", "LaunchGrew": "LaunchExpanded"}
"""Kinds of events and actions that older traces name otherwise, by their old name."""


class TraceError(CotenantError):
    """A trace cannot be used. The text names the file, the line and the expected content."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of a trace: the state at its start. `machine` has the slots of each device.

    `groups`, `quantile` and `factor` are those of a GroupedPredictor.
    """

    format: str
    created: str
    policy: str
    policy_options: dict[str, Any]
    machine: dict[str, tuple[int, ...]]
    tenants: tuple[Tenant, ...]
    tables: dict[str, LatencyTable]
    scales: Scales
    about: dict[str, str]
    groups: str | None = None
    quantile: float = 0.5
    factor: float | None = None
    margin: SafetyMargin = NO_MARGIN
    beside: float | None = None
    firsts: dict[str, int] = {}
    """Number of the first slot of each device, where slots are not numbered consecutively."""
    launch_ns: int = 0
    """What a launch costs a server besides the model, as measured; 0 if unknown."""

    @property
    def whole(self) -> Machine:
        """The machine, with the slot numbers of the run. Raises InvalidValueError."""
        known = Machine.of(self.machine)
        if not self.firsts:
            return known
        return Machine(
            tuple(Share(each.cores, each.device, self.firsts.get(each.device, each.first)) for each in known.devices)
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One line: an event and its actions, as plain data. `where` names the file and the line, for errors."""

    time_ns: int
    kind: str
    event: dict[str, Any]
    actions: list[tuple[str, dict[str, Any]]]
    where: str = field(default="the record", compare=False)


def header(
    policy: Policy,
    predictor: TablePredictor,
    tenants: Iterable[Tenant],
    machine: Machine,
    *,
    created: str,
    launch_ns: int = 0,
    **about: str,
) -> Header:
    """Header of a new trace. `created` is a date; empty where the trace must not depend on it."""
    plain = _PlainPredictor.of(predictor)
    devices = {each.device: each.cores for each in machine.devices}
    return Header(
        FORMAT,
        created,
        policy.spec.name,
        _options(policy),
        devices,
        tuple(tenants),
        plain.tables,
        plain.scales,
        about,
        plain.groups,
        plain.quantile,
        plain.factor,
        plain.margin,
        plain.beside,
        {} if machine == Machine.of(devices) else {each.device: each.first for each in machine.devices},
        launch_ns,
    )


def _options(policy: Policy) -> dict[str, Any]:
    """Constructor arguments of a policy."""
    if not is_dataclass(policy):
        return {}
    return {each.name: getattr(policy, each.name) for each in fields(policy) if each.init}


class _PlainPolicy(msgspec.Struct):
    """A policy in an event, in the form of the header."""

    policy: str
    policy_options: dict[str, Any]


class _PlainPredictor(msgspec.Struct, omit_defaults=True):
    tables: dict[str, LatencyTable]
    scales: Scales
    groups: str | None = None
    quantile: float = 0.5
    factor: float | None = None
    margin: SafetyMargin = NO_MARGIN
    beside: float | None = None

    @classmethod
    def of(cls, predictor: TablePredictor) -> _PlainPredictor:
        beside = predictor.beside or None  # defaults are not written
        if not isinstance(predictor, GroupedPredictor):
            return cls(predictor.tables, predictor.scales, margin=predictor.margin, beside=beside)
        fitted = predictor.fitted
        key, quantile = (None, 0.5) if fitted is None else (fitted.key, fitted.quantile)
        return cls(predictor.tables, predictor.scales, key, quantile, predictor.factor, predictor.margin, beside)


FindGroups = Callable[[str, float], FittedGroups]
"""Finds the fitted predictor of groups with this key, at this quantile. Raises TraceError if there is none."""


def _plain(value: object) -> object:
    if isinstance(value, TablePredictor):
        return _PlainPredictor.of(value)
    return type(value).__name__


def _no_groups(key: str, quantile: float) -> FittedGroups:
    raise TraceError(f"the trace needs the fitted predictor of groups {key}, which is not here")


MakePolicy = Callable[[str, dict[str, Any]], Policy]
"""Builds the policy of this name with these options."""


def _no_policy(name: str, options: dict[str, Any]) -> Policy:
    raise TraceError(f"a record changes to the policy {name!r}, and no builder of policies was given")


def _predictor_of(plain: _PlainPredictor, find_groups: FindGroups) -> TablePredictor:
    if plain.factor is None:
        made = TablePredictor(plain.tables, plain.scales)
    else:
        fitted = None if plain.groups is None else find_groups(plain.groups, plain.quantile)
        made = GroupedPredictor(plain.tables, plain.scales, fitted, plain.factor)
    return made.with_margin(plain.margin).with_beside(plain.beside or 0.0)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_RECORD = msgspec.json.Decoder(tuple[int, str, dict[str, Any], list[tuple[str, dict[str, Any]]]])


def encode(time_ns: int, event: Event | EventsMissing | OthersTook, actions: Sequence[Action]) -> bytes:
    """One record as a line, without the line end."""
    plain: object = event
    if type(event) is core_events.PolicyChanged:  # a dataclass, so the encoder would write its fields
        plain = _PlainPolicy(event.policy.spec.name, _options(event.policy))
    return _ENCODER.encode(
        (time_ns, type(event).__name__, plain, [(type(action).__name__, action) for action in actions])
    )


def same_decisions(record: Record, line: bytes) -> bool:
    """Whether a line has the event and the actions of a record, apart from the wording of reasons."""
    *head, actions = _RECORD.decode(line)
    return head == [record.time_ns, record.kind, record.event] and _unworded(actions) == _unworded(record.actions)


def _unworded(actions: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(kind, {key: value for key, value in action.items() if key != "reason"}) for kind, action in actions]


class TraceWriter:
    """Writes a trace. Records are encoded at `flush`, so that appending is cheap.

    Events and actions are frozen, and a list of actions does not change after the engine returned it. At `limit_bytes`
    recording stops, with a last record `LogFull`.
    """

    def __init__(self, file: BinaryIO, head: Header, *, limit_bytes: int | None = None) -> None:
        self._file = file
        self._left = limit_bytes
        self._records: list[tuple[int, Event, list[Action]]] = []
        file.write(_ENCODER.encode(head) + b"\n")
        file.flush()

    def __call__(self, time_ns: int, event: Event, actions: list[Action]) -> None:
        """Append one record."""
        self._records.append((time_ns, event, actions))
        if len(self._records) >= _MOST_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write all kept records to the file."""
        records, self._records = self._records, []
        self.write(records)

    def write(self, records: Iterable[tuple[int, Event | EventsMissing | OthersTook, list[Action]]]) -> None:
        """Encode records and write them to the file."""
        for time_ns, event, actions in records:
            if self._left is not None and self._left <= 0:
                break
            line = encode(time_ns, event, actions) + b"\n"
            self._file.write(line)
            if self._left is not None:
                self._left -= len(line)
                if self._left <= 0:
                    self._file.write(_ENCODER.encode((time_ns, "LogFull", {}, [])) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        self._file.close()


OnRead = Callable[[int, int], None]
"""Called with the bytes read and the size of the file."""
_LINES_A_STEP = 4096


def read(path: Path, on_read: OnRead = lambda done, total: None) -> tuple[Header, Iterator[Record]]:
    """Open a trace. A last line cut short by a crash ends the records; any other damage raises TraceError.

    A line that does not follow from those before it is damage (`record_check`). After a gap, actions on earlier queries
    and launches are left out. `on_read` is called now and then.
    """
    file = open_regular(path, TraceError)
    try:
        hint = "is it the trace of 'cotenant serve' or 'cotenant simulate', of this version?"
        head = decode(_line(file, path), Header, f"{path}: line 1", TraceError, hint, FORMAT)
    except TraceError:
        file.close()
        raise
    return structs.replace(head, policy_options=_current_options(head.policy_options)), _records(path, file, on_read)


def _line(file: BinaryIO, path: Path) -> bytes:
    try:
        line = file.readline(_MOST_LINE_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: line 1 or a later one cannot be read ({error.strerror})") from None
    if len(line) == _MOST_LINE_BYTES:
        raise TraceError(f"{path}: a line has {_MOST_LINE_BYTES} bytes or more, expected less")
    return line


def _records(path: Path, file: BinaryIO, on_read: OnRead) -> Iterator[Record]:
    check, size = RecordCheck(), path.stat().st_size
    with file:
        for number, line in enumerate(iter(partial(_line, file, path), b""), start=2):
            if number % _LINES_A_STEP == 0:
                on_read(file.tell(), size)
            where = f"{path}: line {number}"
            if not line.endswith(b"\n"):
                return
            try:
                record = Record(*_with_current_names(*_RECORD.decode(line)), where)
            except UNREADABLE as error:
                raise TraceError(f"{where} is not a record ({error})") from None
            try:
                known = check(record.time_ns, _plain_event(record.kind, record.event), record.actions)
            except (CotenantError, *UNREADABLE) as error:
                raise TraceError(f"{where} does not follow from those before it ({error})") from None
            yield record if len(known) == len(record.actions) else replace(record, actions=known)


_OLD_FIELDS: Mapping[str, Mapping[str, str]] = {
    "LaunchEnded": {"stolen_ns": "steal_ns", "pieces": "task_times"},
    "Respond": {"whom": "culprit"},
}
"""Old and current names of fields, by event or action. Traces with the old names are read until 0.3."""
_OLD_CAUSES = {"stolen": "steal_time", "door": "front_end"}
"""Old and current values of the field `cause`."""


def _with_current_names(
    time_ns: int, kind: str, event: dict[str, Any], actions: list[tuple[str, dict[str, Any]]]
) -> tuple[int, str, dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Parts of a record, with the names that earlier versions wrote replaced in place by the current ones."""
    for at, (name, action) in enumerate(actions):
        if name in _RENAMED_KINDS:
            actions[at] = _RENAMED_KINDS[name], action
    kind = _RENAMED_KINDS.get(kind, kind)
    if kind == "PolicyChanged" and isinstance(options := event.get("policy_options"), dict):
        event["policy_options"] = _current_options(options)
    for name, fields_of in ((kind, event), *actions):
        for old, new in _OLD_FIELDS.get(name, {}).items():
            if old in fields_of:
                fields_of[new] = fields_of.pop(old)
        if isinstance(cause := fields_of.get("cause"), str) and cause in _OLD_CAUSES:
            fields_of["cause"] = _OLD_CAUSES[cause]
    return time_ns, kind, event, actions


def _current_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED_OPTIONS.get(key, key): value for key, value in options.items()}


def missing_events(path: Path) -> int:
    """Number of events missing in the gaps of a trace. Raises TraceError."""
    return sum([each.events for each in _marks(path, EventsMissing)])


def others_share(path: Path) -> float | None:
    """Part (0 to 1) of the cores' time that other processes took while the trace has events; None where it has no
    records of it. Raises TraceError."""
    found = _marks(path, OthersTook)
    cores_ns = sum([each.cores_ns for each in found])
    return min(1.0, sum([each.others_ns for each in found]) / cores_ns) if cores_ns > 0 else None


def _marks(path: Path, kind: type[_Mark]) -> list[_Mark]:
    """The records of this kind in a trace, in place of events. Raises TraceError."""
    name = f'"{kind.__name__}",'.encode()
    with open_regular(path, TraceError) as file:
        lines = iter(partial(_line, file, path), b"")
        found = [line for line in lines if line[:64].partition(b",")[2].startswith(name) and line.endswith(b"\n")]
    try:
        return [msgspec.convert(_RECORD.decode(line)[2], kind) for line in found]
    except UNREADABLE as error:
        raise TraceError(f"{path}: a line is not a record ({error})") from None


@contextmanager
def in_lines(records: Iterable[Record]) -> Iterator[Iterator[Record]]:
    """Iterate over records; an exception of the caller over their content becomes a TraceError with the line."""
    where = "line 1"

    def tracked() -> Iterator[Record]:
        nonlocal where
        for record in records:
            where = record.where
            yield record

    try:
        yield tracked()
    except TraceError:
        raise
    except (CotenantError, msgspec.MsgspecError, LookupError, ArithmeticError) as error:
        reason = str(error) if isinstance(error, CotenantError) else f"{type(error).__name__}: {error}"
        raise TraceError(f"the trace is inconsistent up to {where} ({reason})") from error


def _plain_event(kind: str, event: Mapping[str, Any]) -> object:
    """The event of a record, with plain data for a policy or a predictor. Raises as `decode_event`."""
    if kind == "PredictorChanged":
        return msgspec.convert(event.get("predictor"), _PlainPredictor, str_keys=True)
    if kind == "PolicyChanged":
        return msgspec.convert(event, _PlainPolicy)
    if kind in _MARKS:
        return msgspec.convert(event, _MARKS[kind])
    return None if kind == "LogFull" else decode_event(kind, event)


def work_of(launch: Mapping[str, Any]) -> Work:
    """The work of a Launch action of a record."""
    return msgspec.convert(launch["work"], Work)


def basis_of(launch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the basis of a Launch action of a record; empty without a basis."""
    found = launch.get("basis")
    return found if isinstance(found, dict) else {}


def headroom_ns(launch: Mapping[str, Any], deadlines: Mapping[int, int], decided_ns: int) -> int:
    """Predicted headroom of a launch at its decision: earliest deadline - decision - predicted latency, in ns.

    0 for a launch without queries: they came before a gap of the trace.
    """
    predicted_ns = int(launch["predicted_ns"])
    due_ns = min((deadlines[query] for query in launch["queries"]), default=decided_ns + predicted_ns)
    return due_ns - decided_ns - predicted_ns


def decode_event(
    kind: str, event: Mapping[str, Any], find_groups: FindGroups = _no_groups, make_policy: MakePolicy = _no_policy
) -> Event:
    """The event of a record as the core's type. Raises TraceError for an unknown kind or wrong fields."""
    cls = getattr(core_events, kind, None)
    if cls not in core_events.Event.__args__:
        raise TraceError(f"a record is of the unknown kind {kind!r}")
    try:
        if cls is core_events.PredictorChanged:
            plain = msgspec.convert(event["predictor"], _PlainPredictor, str_keys=True)
            return core_events.PredictorChanged(_predictor_of(plain, find_groups))
        if cls is core_events.PolicyChanged:
            found = msgspec.convert(event, _PlainPolicy)
            return core_events.PolicyChanged(make_policy(found.policy, found.policy_options))
        if cls is core_events.QueryArrived and "part_of" in (event["query"] or ()):
            query = msgspec.convert(event["query"], StageQuery)
            return core_events.QueryArrived(query, event.get("more", False))
        return msgspec.convert(event, cls)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise TraceError(f"a record of kind {kind!r} has wrong fields ({error})") from None


def replay(
    head: Header, records: Iterable[Record], make_policy: MakePolicy, find_groups: FindGroups = _no_groups
) -> Iterator[tuple[Record, bytes]]:
    """Feed the events of a trace, up to its first gap, to a new engine.

    Yields each record with the line that this version writes for it. If `same_decisions` holds for all, the decisions
    have not changed. `make_policy(name, options)` builds the policy, `find_groups` finds fitted predictors of groups.
    """
    with in_lines(records) as lines:
        policy = RecordedPolicy(make_policy(head.policy, head.policy_options))
        predictor = _predictor_of(msgspec.convert(head, _PlainPredictor, from_attributes=True), find_groups)
        engine = Engine(head.tenants, policy, predictor, head.whole)
        for record in lines:
            if record.kind in ("LogFull", "EventsMissing"):
                return
            if record.kind == "OthersTook":
                continue
            fed = event = decode_event(record.kind, record.event, find_groups, make_policy)
            if isinstance(event, core_events.PolicyChanged):
                policy = RecordedPolicy(event.policy)
                fed = core_events.PolicyChanged(policy)
            policy.faults = [convert(each, PolicyFault) for kind, each in record.actions if kind == "PolicyFault"]
            yield record, encode(record.time_ns, event, engine.handle(fed, record.time_ns))
