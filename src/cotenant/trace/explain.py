"""History of one query, read from a trace: its queueing delay, its launches, and their predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import convert
from typing_extensions import override

from cotenant.core.predictor import Member
from cotenant.gantt import Bar, busy_ns, column_ns, label_at
from cotenant.tabular import Tabular
from cotenant.trace import Record, TraceError, basis_of, headroom_ns, in_lines, work_of
from cotenant.trace.basis import GroupFits
from cotenant.work import CPU, TaskTime, lane_name

_DECIDED = ("Launch", "Enqueue")
_NOTES = {
    "PolicyFault": "policy {policy!r} failed in {call!r} ({reason}), deadlines decided",
    "Probe": "it runs as a probe, though the predicted latency of its model, {predicted_ns:,} ns, exceeds the SLO",
}
_COLUMNS = 50
"""Width of a timeline, in characters."""


@dataclass(frozen=True, slots=True)
class LaunchHistory:
    """One launch that carried the query."""

    number: int
    start_ns: int
    end_ns: int
    units: tuple[int, int]
    queries: int
    cores: tuple[int, ...]
    predicted_ns: int
    headroom_ns: int
    error: str | None = None
    rows: tuple[int, ...] = ()
    """Rows of the batch that it ran, as (first, end); empty for all."""
    device: str = CPU
    after: tuple[int, ...] = ()
    """Launches that had to end before it."""
    pointers: tuple[tuple[int, str, tuple[int, int]], ...] = ()
    """Synchronisation pointers of a joint plan: launches in `after` of other batches on other cores, each with its
    number, tenant and units."""
    enqueued_ns: int | None = None
    """Time at which an executor could submit it behind them; None without such a wait."""
    expanded: tuple[tuple[int, int], ...] = ()
    """When it took in more cores, and how many it had then."""
    version: int = 0
    wanted: int = 0
    """Requested cores, where it got fewer; else 0."""
    pressure_pct: int = 0
    """Memory pressure at which its latency was predicted."""
    near: int | None = None
    """Number of measured groups near its group; None without a prediction of a group, -1 if unknown."""
    longest_ns: int = 0
    """Upper bound on the latency of its group, if no group of this size was measured; else 0."""
    beside: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tenants and cores of the other launches of its group."""
    task_times: tuple[TaskTime, ...] = ()
    """Times of its tasks, for a placed launch."""

    def basis(self) -> str:
        """Evidence for the prediction of its group, as the end of a sentence; empty without a group."""
        if self.near is None:
            return ""
        known = f" with {self.near or 'no'} measured group{'' if self.near == 1 else 's'} near it"
        near = known if self.near >= 0 else ""
        bound = f", a size never measured: at most {_ms(self.longest_ns)}, one by one" if self.longest_ns else ""
        others = " and ".join(f"{name!r} on cores {','.join(map(str, cores))}" for name, cores in self.beside)
        beside = f", beside {others}," if others else ""
        return f"; predicted as a group of {len(self.beside) + 1}{beside}{near}{bound}"

    def lanes(self) -> list[str]:
        """Timeline of a placed launch: a line for each core or GPU, with its busy times in equal columns."""
        until = max((task.end_ns for task in self.task_times), default=0)
        lines = []
        on_gpu = {number for task in self.task_times for number in task.cores}
        for number in (range(len(self.cores)) if self.device == CPU else sorted(on_gpu)) if until else ():
            name = lane_name(number, self.cores, self.device)
            mine = [task for task in self.task_times if number in task.cores]
            bars = [Bar(name, "█", task.start_ns, task.end_ns) for task in mine]
            drawn = "".join(label_at(bars, *column) or "·" for column in column_ns(until, _COLUMNS))
            units = sum(task.units for task in mine)
            tasks = f"{len(mine)} task{'' if len(mine) == 1 else 's'}"
            lines.append(f"    {name} │{drawn}│ {_ms(busy_ns(bars))} of {_ms(until)}, {units} units in {tasks}")
        return lines


@dataclass(slots=True)
class StageHistory:
    """One stage of an application's query: itself a query. `outcome` is empty until it has ended."""

    stage: str
    query: int
    tenant: str
    arrival_ns: int
    deadline_ns: int
    ended_ns: int = 0
    outcome: str = ""
    reason: str = ""


@dataclass(slots=True)
class ApplicationHistory(Tabular):
    """History of an application's query, with its stages in the order of their arrivals: its rows."""

    query: int
    application: str
    arrival_ns: int
    deadline_ns: int
    ended_ns: int = 0
    outcome: str = ""
    reason: str = ""
    stages: list[StageHistory] = field(default_factory=list)
    predicted_ns: int = 0
    """Predicted latency of a probe; 0 for other queries."""

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each stage."""
        return [asdict(each) for each in self.stages]

    def sentences(self) -> list[str]:
        """The story in words, the verdict first."""
        total, slo = self.ended_ns - self.arrival_ns, self.deadline_ns - self.arrival_ns
        lines = [
            f"Query {self.query} of the application {self.application!r} was {self.outcome} after {_ms(total)}; its "
            f"deadline was {_ms(slo)}."
        ]
        if self.reason:
            lines.append(f"Reason given to the client: {self.reason}.")
        if self.predicted_ns:
            lines.append(f"It ran as a probe, though its predicted latency of {_ms(self.predicted_ns)} does not fit.")
        for each in self.stages:
            begun, due = each.arrival_ns - self.arrival_ns, each.deadline_ns - self.arrival_ns
            if each.outcome:
                ended = f"{each.outcome} at +{_ms(each.ended_ns - self.arrival_ns)}"
                ended += f" ({each.reason})" if each.reason else ""
            else:
                ended = "cancelled when the query ended"
            name = f"stage {each.stage!r} as query {each.query} of {each.tenant!r}"
            lines.append(f"+{_ms(begun)}: {name}, due at +{_ms(due)}: {ended}")
        lines.append("For details of a stage, run 'cotenant explain' with the number of its query.")
        return lines


@dataclass(slots=True)
class QueryHistory(Tabular):
    """History of one query. Times are those of the trace.

    `beside_ns` is the time of other launches while it was pending, by tenant.
    """

    query: int
    tenant: str
    arrival_ns: int
    deadline_ns: int
    ended_ns: int = 0
    outcome: str = ""
    reason: str = ""
    ahead: int = 0
    """Queries of its tenant that waited when it arrived."""
    stage: str = ""
    part_of: int | None = None
    """Number of the application's query of which it is a stage."""
    launches: list[LaunchHistory] = field(default_factory=list)
    missing: int = 0
    """Number of earlier events that are missing in the trace."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Times and texts of other events while it was pending."""
    beside_ns: dict[str, int] = field(default_factory=dict)

    @override
    def rows(self) -> list[dict[str, Any]]:
        """A row for each launch that carried the query."""
        return [asdict(each) for each in self.launches]

    @property
    def running_ns(self) -> int:
        """Time in which at least one launch ran it."""
        total = until = 0
        for launch in sorted(self.launches, key=lambda each: each.start_ns):
            total += max(0, launch.end_ns - max(until, launch.start_ns))
            until = max(until, launch.end_ns)
        return total

    @property
    def waiting_ns(self) -> int:
        """Queueing delay: time between arrival and end in which no launch ran it."""
        return self.ended_ns - self.arrival_ns - self.running_ns

    def sentences(self) -> list[str]:
        """The story in words, the verdict first."""
        total, slo = self.ended_ns - self.arrival_ns, self.deadline_ns - self.arrival_ns
        lines = [
            f"Query {self.query} of {self.tenant!r} was {self.outcome} after {_ms(total)}; its deadline was {_ms(slo)}."
        ]
        if self.part_of is not None:
            lines.append(f"It is the stage {self.stage!r} of query {self.part_of}, of an application.")
        if self.reason:
            lines.append(f"Reason given to the {'client' if self.part_of is None else 'application'}: {self.reason}.")
        lines.append(
            f"It waited {_ms(self.waiting_ns)} and ran {_ms(self.running_ns)} in {len(self.launches)} launch(es)"
            f"; {self.ahead} queries of its tenant waited before it."
        )
        if self.missing:
            lines.append(
                f"{self.missing} events before it are missing in the trace: earlier queries and launches are not "
                "counted."
            )
        if self.beside_ns:
            others = sorted(self.beside_ns.items(), key=lambda entry: (-entry[1], entry[0]))
            shares = ", ".join(f"{name} {_ms(ns)}" for name, ns in others)
            lines.append(f"Other launches meanwhile: {shares}.")
        lines += [f"+{_ms(time_ns - self.arrival_ns)}: {text}." for time_ns, text in self.notes]
        for launch in self.launches:
            lines += [self._launch_sentence(launch) + launch.basis(), *launch.lanes()]
        return lines

    def _launch_sentence(self, launch: LaunchHistory) -> str:
        begun, took = launch.start_ns - self.arrival_ns, launch.end_ns - launch.start_ns
        cores = ",".join(map(str, launch.cores))
        several = any(each.rows or each.after for each in self.launches)
        number = f"launch {launch.number}, " if several else ""
        rows = " of the chunk of rows {} to {}".format(*launch.rows) if launch.rows else ""
        device = "" if launch.device == CPU else f" of {launch.device}"
        after = f" after launch {' and '.join(map(str, launch.after))}" if launch.after else ""
        if launch.pointers:
            named = (f"units {units[0]} to {units[1]} of {tenant!r}" for _, tenant, units in launch.pointers)
            others = " and ".join(dict.fromkeys(named))
            after += f", a synchronisation pointer to {others}"
        if launch.enqueued_ns is not None:
            after += f" (enqueued at +{_ms(launch.enqueued_ns - self.arrival_ns)})"
        wanted = f" of {launch.wanted} requested" if launch.wanted else ""
        version = f" in version {launch.version}" if launch.version else ""
        under = f" at a pressure of {launch.pressure_pct} %" if launch.pressure_pct else ""
        expanded = "".join(f", on {size} cores from +{_ms(at - self.arrival_ns)} on" for at, size in launch.expanded)
        return (
            f"+{_ms(begun)}: {number}units {launch.units[0]} to {launch.units[1]}{rows} in a batch of {launch.queries}"
            f"{version} on cores {cores}{wanted}{device}{after}{expanded}: took {_ms(took)}, "
            f"predicted {_ms(launch.predicted_ns)}{under}, "
            f"headroom {_ms(launch.headroom_ns)}"
            + (f", failed: {launch.error}" if launch.error else "")
            + (", and it was run again alone" if launch.error and launch is not self.launches[-1] else "")
        )


def explain(records: Iterable[Record], query: int, fits: GroupFits | None = None) -> QueryHistory | ApplicationHistory:
    """Collect the history of a query from a trace; with `fits`, also the evidence for predictions of groups.

    Raises TraceError if the trace does not have the query, or not its end.
    """
    with in_lines(records) as lines:
        return _explain(lines, query, fits)


def _explain(records: Iterable[Record], query: int, fits: GroupFits | None) -> QueryHistory | ApplicationHistory:
    story: QueryHistory | None = None
    whole: ApplicationHistory | None = None
    waiting: dict[str, set[int]] = {}
    tenant_of: dict[int, str] = {}
    running: dict[int, tuple[int, dict[str, Any]]] = {}
    expanding: dict[int, int] = {}
    enqueued: dict[int, int] = {}
    decided: dict[int, dict[str, Any]] = {}
    """Launches that have not ended, by number."""
    deadlines: dict[int, int] = {}
    missing = 0
    for record in records:
        now = record.time_ns
        if fits is not None:
            fits.see(record)
        if record.kind == "EventsMissing":
            missing += record.event["events"]
            if story is not None or whole is not None:
                raise TraceError(f"query {query} had not ended where {record.event['events']} events are missing")
            for known in (waiting, tenant_of, running, expanding, enqueued, decided, deadlines):
                known.clear()
        elif record.kind == "ApplicationArrived" and record.event["query"] == query:
            arrived = record.event
            whole = ApplicationHistory(query, arrived["application"], arrived["arrival_ns"], arrived["deadline_ns"])
            whole.predicted_ns = arrived.get("predicted_ns", 0)
        elif record.kind == "ApplicationEnded" and whole is not None and record.event["query"] == query:
            ended = record.event
            whole.ended_ns, whole.outcome, whole.reason = ended["ended_ns"], ended["outcome"], ended["reason"]
            return whole
        elif record.kind == "QueryArrived":
            arrived = record.event["query"]
            tenant_of[arrived["id"]], deadlines[arrived["id"]] = arrived["tenant"], arrived["deadline_ns"]
            if arrived["id"] == query:
                story = QueryHistory(query, arrived["tenant"], arrived["arrival_ns"], arrived["deadline_ns"])
                story.missing = missing
                story.ahead = len(waiting.get(story.tenant, ()))
                story.stage, story.part_of = arrived.get("stage", ""), arrived.get("part_of")
            elif whole is not None and arrived.get("part_of") == query:
                times = arrived["arrival_ns"], arrived["deadline_ns"]
                whole.stages.append(StageHistory(arrived["stage"], arrived["id"], arrived["tenant"], *times))
            waiting.setdefault(arrived["tenant"], set()).add(arrived["id"])
        elif record.kind == "LaunchExpanded" and record.event["launch"] in running:
            launch = running[record.event["launch"]][1]
            launch.setdefault("expanded", []).append((now, expanding[launch["id"]]))
        elif record.kind == "LaunchEnded" and record.event["launch"] in running:
            start, launch = running.pop(record.event["launch"])
            del decided[record.event["launch"]]
            if story is not None:
                _count(story, launch, start, now, record.event["error"], record.event.get("task_times", ()))
        elif record.kind == "TenantChanged" and story is not None and record.event["tenant"]["name"] == story.tenant:
            story.notes.append((now, "its model was reloaded: a query not in its last launch waits for the new model"))
        elif record.kind == "PolicyChanged" and story is not None:
            story.notes.append((now, f"the plan or the policy changed, to another {record.event['policy']!r}"))
        members = _groups(record)
        for kind, action in record.actions:
            if kind == "Launch":
                kept = decided.get(action["id"]) or _decided(action, (), members, deadlines, now)
                decided[action["id"]] = kept | action | {"enqueued_ns": enqueued.pop(action["id"], None)}
                if fits is not None and query in action["queries"]:
                    decided[action["id"]]["near"] = fits.near(tuple(map(_member, kept["members"].values())))
                running[action["id"]] = (now, decided[action["id"]])
                work = work_of(action)
                if work.start == 0:
                    waiting.get(work.tenant, set()).difference_update(action["queries"])
            elif kind == "Enqueue":
                launch = action["launch"]
                enqueued[launch["id"]] = now
                decided[launch["id"]] = _decided(launch, _pointers(launch, decided), members, deadlines, now)
            elif kind in _NOTES and story is not None and action.get("query", -1) in (-1, query):
                text = _NOTES[kind].format_map(action)
                story.notes.append((now, text + (", and the fallback does" if action.get("falls_back") else "")))
            elif kind == "Expand":
                expanding[action["launch"]] = len(action["share"]["cores"])
            elif kind == "Respond":
                number = action["query"]
                for each in whole.stages if whole is not None else ():
                    if each.query == number:
                        each.ended_ns, each.outcome, each.reason = now, action["outcome"], action["reason"]
                waiting[tenant_of.pop(number)].discard(number)
                del deadlines[number]
                if number == query and story is not None:
                    story.ended_ns, story.outcome, story.reason = now, action["outcome"], action["reason"]
                    for start, launch in running.values():
                        _count(story, launch, start, now, None)
                    return story
    if story is not None or whole is not None:
        raise TraceError(f"query {query} has not ended in this trace")
    gaps = f"{missing} events are missing in it, and " if missing else ""
    raise TraceError(
        f"query {query} is not in this trace; {gaps}answers carry their number in the header 'x-cotenant-query'"
    )


def _decided(
    launch: dict[str, Any],
    pointers: tuple[object, ...],
    members: Mapping[int, object],
    deadlines: Mapping[int, int],
    now_ns: int,
) -> dict[str, Any]:
    """A launch with its pointers, its group and its headroom at the time of the decision."""
    headroom = headroom_ns(launch, deadlines, now_ns)
    return launch | {"pointers": pointers, "members": members[_group(launch)], "headroom_ns": headroom}


def _group(launch: Mapping[str, Any]) -> int:
    """Id of the first launch of its group."""
    return int(basis_of(launch).get("group", launch["id"]))


def _groups(record: Record) -> dict[int, dict[int, dict[str, Any]]]:
    """Launches that a record starts or enqueues, by group and number."""
    made: dict[int, dict[int, dict[str, Any]]] = {}
    for kind, action in record.actions:
        if kind in _DECIDED:
            launch = action["launch"] if kind == "Enqueue" else action
            made.setdefault(_group(launch), {})[launch["id"]] = launch
    return made


def _place(launch: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return work_of(launch).tenant, tuple(launch["share"]["cores"])


def _member(launch: Mapping[str, Any]) -> Member:
    return Member(work_of(launch), len(launch["share"]["cores"]))


def _pointers(
    launch: Mapping[str, Any], decided: Mapping[int, Mapping[str, Any]]
) -> tuple[tuple[int, str, tuple[int, int]], ...]:
    """Launches of other batches on other cores for which a launch waits."""
    share, found = launch["share"], []
    for number in launch.get("after", ()):
        other = decided.get(number)
        if other is None or other["batch"] == launch["batch"]:
            continue
        beside = other["share"]
        if beside["device"] != share["device"] or not set(share["cores"]) & set(beside["cores"]):
            work = work_of(other)
            found.append((number, work.tenant, (work.start, work.end)))
    return tuple(found)


def _count(
    story: QueryHistory, launch: dict[str, Any], start: int, end: int, error: str | None, task_times: Sequence[Any] = ()
) -> None:
    queries = launch["queries"]
    if story.query in queries:
        share, work, basis = launch["share"], work_of(launch), basis_of(launch)
        story.launches.append(
            LaunchHistory(
                number=launch["id"],
                start_ns=start,
                end_ns=end,
                units=(work.start, work.end),
                queries=len(queries),
                cores=tuple(share["cores"]),
                predicted_ns=launch["predicted_ns"],
                headroom_ns=launch["headroom_ns"],
                error=error,
                rows=work.rows,
                device=share["device"],
                after=tuple(launch.get("after", ())),
                pointers=launch["pointers"],
                enqueued_ns=launch["enqueued_ns"],
                expanded=tuple(launch.get("expanded", ())),
                version=work.version,
                wanted=basis.get("wanted", 0),
                pressure_pct=basis.get("pressure_pct", 0),
                near=launch.get("near"),
                longest_ns=basis.get("longest_ns", 0),
                beside=tuple([_place(each) for number, each in launch["members"].items() if number != launch["id"]]),
                task_times=convert(task_times, tuple[TaskTime, ...]),
            )
        )
        return
    overlap = end - max(start, story.arrival_ns)
    if overlap > 0:
        name = work_of(launch).tenant
        story.beside_ns[name] = story.beside_ns.get(name, 0) + overlap


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
