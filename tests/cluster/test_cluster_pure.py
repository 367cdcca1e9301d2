"""The parts of a cluster that need no Ray: assignment, routes, turns, the failure detector, what is planned anew."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cluster.balance import Balancer
from cotenant.cluster.detector import Detector, DetectorSettings
from cotenant.cluster.head import models_of
from cotenant.cluster.load_monitor import LoadMonitor
from cotenant.cluster.node_home import NodeHome, remove_orphans
from cotenant.cluster.node_plans import (
    assign,
    has_higher_rates,
    inventory_of,
    node_plans_of,
    place_backfilled,
    routing_table_of,
)
from cotenant.cluster.node_server import node_config
from cotenant.cluster.note import Note, read_note
from cotenant.cluster.ray_fleet import need_ray, node_of
from cotenant.cluster.types import Address, ClusterError, Counts, GatewayReport, Node, NodePlan, NodeReport, Served
from cotenant.errors import InvalidValueError, PlanError
from cotenant.linux import start_time
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.follow import FollowSettings, PlanFollower, Reason
from cotenant.techniques.partitions.plan.scaling import ScalingSettings
from cotenant.techniques.partitions.plan.tracking import TrackingSettings
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from cotenant.wire.oip import MESSAGES
from cotenant.wire.skim import WireError, length_field, string_field
from plan_samples import table_costs
from repositories import write_good

MS = 1_000_000
CORE = DeviceType("core", ((1,),), 1 << 40)
KINDS = {"core": CORE}
NODES = tuple(Node(f"node-{number}", "core") for number in range(3))
COSTS = table_costs({"core": {name: {1: {1: 10 * MS}} for name in "abc"}}, dict.fromkeys("abc", 0))
"""10 ms a row, never batched: a core serves 100 rows a second."""
PLANNER = Elastic()
FOLLOW = FollowSettings(TrackingSettings(headroom=0.0, patience=2), ScalingSettings(margin=0.0))


def device(*tenants: str, rate: float = 10.0, kind: str = "core") -> DevicePlan:
    return DevicePlan(kind, (PartitionPlan(1, 50 * MS, tuple(Slot(name, 1, rate) for name in tenants)),))


def loads(**rates: float) -> tuple[Load, ...]:
    return tuple(Load(name, name, rate, 200 * MS) for name, rate in rates.items())


# --- who runs where ---------------------------------------------------------------------------------------------------


def test_devices_stay_where_their_tenants_run() -> None:
    running = {"node-1": device("a", "b"), "node-2": device("c")}
    placed = assign(Plan((device("c", "d"), device("b"))), NODES, running)
    assert placed == {"node-1": device("b"), "node-2": device("c", "d")}


def test_a_node_that_runs_something_goes_before_an_idle_one() -> None:
    assert list(assign(Plan((device("z"),)), NODES, {"node-2": device("a")})) == ["node-2"]


def test_more_devices_than_nodes_of_their_type_are_an_error() -> None:
    with pytest.raises(PlanError, match="1 devices of type 'gpu', expected at most 0 nodes"):
        assign(Plan((device("a", kind="gpu"),)), NODES, {})


def test_routes_have_the_planned_rates_as_weights() -> None:
    placed = {"node-0": device("a", "b", rate=30.0), "node-1": device("a", rate=10.0)}
    asked = loads(a=40.0, b=30.0, c=1.0)
    parts = node_plans_of(placed, asked, KINDS, {"a": "A", "b": "B", "c": "C"})
    assert parts["node-0"].models == ("A", "B")
    assert [(load.tenant, load.rate_per_s) for load in parts["node-1"].loads] == [("a", 10.0)]
    addresses = {node: Address("h", number, 0) for number, node in enumerate(placed)}
    table = routing_table_of(3, parts, asked, {"a": "A", "b": "B", "c": "C"}, addresses)
    assert {route.model: route.shares for route in table.routes} == {
        "A": (("node-0", 30.0), ("node-1", 10.0)),
        "B": (("node-0", 30.0),),
        "C": (),
    }
    cut = table.without(("node-0",))
    assert cut.version == 4
    assert list(cut.addresses) == ["node-1"]
    assert [route.shares for route in cut.routes] == [(("node-1", 10.0),), (), ()]
    assert Plan(tuple(placed.values())).rates_per_s == {"a": 40.0, "b": 30.0}


def test_a_node_that_only_loses_takes_its_part_after_the_table() -> None:
    def part(*tenants: str, rate: float = 10.0) -> NodePlan:
        return NodePlan(device(*tenants, rate=rate), CORE, (), ())

    assert has_higher_rates(part("a"), None)
    assert has_higher_rates(part("a", "b"), part("a"))
    assert has_higher_rates(part("a", rate=11.0), part("a"))
    assert not has_higher_rates(part("a"), part("a", "b"))


# --- turns ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_turns_follow_the_weights_exactly(weights: list[int]) -> None:
    balancer = Balancer([(str(number), float(weight)) for number, weight in enumerate(weights)])
    taken = Counter(balancer.choose({}) for _ in range(3 * sum(weights)))
    assert taken == {str(number): 3 * weight for number, weight in enumerate(weights)}


def test_turns_are_smooth_and_equal_ones_go_to_the_node_with_least_under_way() -> None:
    balancer = Balancer([("a", 2.0), ("b", 1.0)])
    assert [balancer.choose({}) for _ in range(6)] == ["a", "b", "a"] * 2
    equal = Balancer([("a", 1.0), ("b", 1.0)])
    assert equal.choose({"a": 5, "b": 1}) == "b"
    assert Balancer([("a", 1.0), ("b", 9.0)]).choose({}, without=["b"]) == "a"
    assert equal.choose({}, without=["a", "b"]) is None


# --- the failure detector ---------------------------------------------------------------------------------------------


def test_silence_death_and_suspicion() -> None:
    detector = Detector(10)
    nodes = ("quiet", "dead", "suspect", "cleared", "well")
    for node in nodes:
        detector.watch(node, 4, 2)
    detector.died("dead", "killed")
    for node in ("suspect", "cleared", "unknown"):
        detector.suspect(node)
    detector.tick(0, nodes)  # the first interval has no known length
    assert detector.lost() == {"dead": "killed"}
    detector.tick(10, ["quiet", "suspect", "cleared"])
    detector.heard("cleared")
    detector.tick(20, ["quiet", "suspect", "cleared"])
    assert set(detector.lost()) == {"dead", "suspect"}
    detector.tick(30, ["quiet", "cleared"])
    detector.tick(51, ["quiet", "cleared"])  # the watcher was late
    assert set(detector.lost()) == {"dead", "suspect"}
    detector.tick(61, ["quiet", "cleared"])
    assert detector.lost()["quiet"] == "4 heartbeats in a row were not answered"
    for node in ("quiet", "dead", "suspect"):
        detector.forget(node)
    assert detector.lost() == {}
    assert detector.watched == ("cleared", "well")


@pytest.mark.parametrize("name", ["interval_ns", "misses", "suspect_misses", "gateway_misses"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{name} is 0"):
        DetectorSettings(**{name: 0})


# --- what is planned anew ---------------------------------------------------------------------------------------------


def test_a_tenant_that_leaves_no_room_for_any_share_is_left_out_and_served_in_what_is_left() -> None:
    urgent = Load("a", "a", 10.0, 25 * MS)  # a round of 10 ms and 10 ms of work: nothing else fits beside it
    asked = (urgent, *loads(b=40.0, c=40.0))
    step = PlanFollower(PLANNER, [CORE] * 2, COSTS, FOLLOW).next_step(asked, None)
    assert step.held is not None
    assert step.held.whole
    lost = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step(asked, step.held, lost=True)
    assert lost.held is not None
    assert lost.held.left_out == ("a",)
    assert not lost.held.whole
    assert lost.breaks is not None
    kept = PlanFollower(PLANNER, [CORE], COSTS, FOLLOW).next_step(asked, lost.held)
    assert kept.reason is Reason.KEEP
    more = PlanFollower(PLANNER, [CORE] * 2, COSTS, FOLLOW).next_step(asked, lost.held)
    assert more.reason is Reason.MORE
    assert more.held is not None
    assert more.held.whole

    placed = assign(lost.held.plan, NODES[:1], {})
    guests = place_backfilled(lost.held.left_out, placed, {})
    names = {"a": "A", "b": "B", "c": "C"}
    parts = node_plans_of(placed, asked, KINDS, names, guests)
    assert (parts["node-0"].tenants, parts["node-0"].backfilled) == (("b", "c"), ("a",))
    assert parts["node-0"].models == ("A", "B", "C")
    routes = routing_table_of(1, parts, asked, names, {"node-0": Address("h", 1, 2)}).routes
    assert {route.tenant: [node for node, _ in route.shares] for route in routes} == {key: ["node-0"] for key in "abc"}
    whole = node_plans_of(placed, asked, KINDS, names)["node-0"]
    assert has_higher_rates(parts["node-0"], whole)
    assert not has_higher_rates(whole, parts["node-0"])


def test_guests_stay_where_they_run_or_go_where_it_is_least_crowded() -> None:
    placed = {"node-0": device("a", "b"), "node-1": device("c")}
    assert place_backfilled(["x", "y"], placed, {}) == {"x": "node-1", "y": "node-0"}
    runs = node_plans_of({"node-0": device("x")}, loads(x=1.0), KINDS, {"x": "X"})
    assert place_backfilled(["x"], placed, runs) == {"x": "node-0"}


def test_scaling_down_keeps_the_nodes_that_run_something() -> None:
    nodes = (*NODES, Node("strange", "gpu"))
    assert [node.name for node in inventory_of(nodes, {"node-2": 1}, KINDS)] == ["node-2", "node-0", "node-1"]


# --- what is known of the load ----------------------------------------------------------------------------------------


def test_rates_count_rows_and_refused_queries() -> None:
    monitor = LoadMonitor(loads(a=1.0), {"a": "A"}, TrackingSettings(alpha=1.0, windows=1))
    nodes = {"n": NodeReport(None, served={"A": Served(rows=60, queries=20)})}

    def look(counts: Counts, at_s: float) -> None:
        monitor.observe(GatewayReport({"a": counts}, {}, (), 1), nodes)
        monitor.close_window(round(at_s * 1e9))

    look(Counts(offered=10, in_time=10), 0.0)
    assert monitor.demand() == {}
    look(Counts(offered=50, in_time=40, refused=10), 2.0)
    assert monitor.demand() == {"a": 60.0}  # 40 queries of 3 rows in 2 s
    assert monitor.attainment == {"a": 0.75}
    look(Counts(offered=51, in_time=41, refused=10), 2.5)
    assert monitor.demand() == {"a": 60.0}  # half a second after a loss says nothing
    look(Counts(offered=51, in_time=41, refused=10), 12.5)
    assert monitor.attainment == {"a": 1.0}


@pytest.mark.parametrize("first", [5, 100, 400])
def test_a_gateway_that_is_started_anew_goes_on_where_the_old_one_ended(first: int) -> None:
    """However much it has counted by the first look at it: less than the old one, as much, or more."""
    monitor = LoadMonitor(loads(a=1.0, b=1.0), {"a": "A", "b": "B"}, TrackingSettings(alpha=1.0, windows=1))
    monitor.observe(GatewayReport({"a": Counts(offered=90, in_time=90), "b": Counts(4, 4)}, {}, (), 1, "old"), {})
    monitor.close_window(0)
    monitor.observe(GatewayReport({"a": Counts(offered=100, in_time=98), "b": Counts(4, 4)}, {}, (), 1, "old"), {})
    monitor.observe(GatewayReport({"a": Counts(offered=first, in_time=first)}, {}, (), 1, "new"), {})
    monitor.close_window(10_000_000_000)
    assert monitor.demand() == {"a": (10 + first) / 10, "b": 0.0}
    assert monitor.counts == {"a": Counts(offered=100 + first, in_time=98 + first, failed=2), "b": Counts(4, 4)}
    assert monitor.attainment == {"a": (8 + first) / (10 + first), "b": None}
    monitor.observe(GatewayReport({"a": Counts(offered=first + 10, in_time=first, refused=10)}, {}, (), 1, "new"), {})
    monitor.close_window(20_000_000_000)
    assert monitor.demand() == {"a": 1.0, "b": 0.0}
    assert monitor.attainment == {"a": 0.0, "b": None}


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_names_are_read_without_decoding() -> None:
    message = MESSAGES["ModelInferRequest"](model_name="mödel", id="7")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 1000])
    message.raw_input_contents.append(b"\xff" * 4000)
    data = message.SerializeToString()
    assert string_field(data, 1) == "mödel"
    assert string_field(data, 3) == "7"
    assert string_field(data, 2) == ""
    assert string_field(b"", 1) == ""
    mixed = b"\x10\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + length_field(1, b"late")
    assert string_field(mixed, 1) == "late"


@pytest.mark.parametrize("data", [b"\x0a\x05abc", b"\x0a", b"\x0f", b"\xff" * 12, b"\x0a\x01\xff", b"\x19\x00"])
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        string_field(data, 1)


@given(st.binary(max_size=40))
def test_no_bytes_make_the_reader_fail_otherwise(data: bytes) -> None:
    try:
        string_field(data, 1)
    except WireError:
        return


@given(st.binary(max_size=400))
def test_a_field_holds_its_content(content: bytes) -> None:
    found = MESSAGES["ModelStreamInferResponse"].FromString(length_field(1, b"e" * len(content)))
    assert len(found.error_message) == len(content)


# --- odds and ends ----------------------------------------------------------------------------------------------------


def test_a_node_keeps_the_repository_s_settings_but_for_what_the_cluster_decides() -> None:
    text = '[plan]\nfile = "p"\n[server]\nhttp_port = 1\ndrain_s = 2.5\n[device]\ncores = [0]\nlanes = [[0], [1]]\n'
    assert node_config(text) == "[server]\ndrain_s = 2.5\n\n[device]\n"


def test_tenants_are_found_in_the_repository(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = write_good(tmp_path_factory.mktemp("m"), "two", "chooser")
    known = Load("Owner of two", "two", 1.0, 1)
    assert models_of(root, [known]) == {"Owner of two": "two"}
    with pytest.raises(PlanError, match=r"tenant 'x' owns no model in .*, expected one of Owner of two, chooser"):
        models_of(root, [known, Load("x", "two", 1.0, 1)])


def test_a_note_is_held_by_one_process_and_removed_by_it_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("n") / "note.json"
    with pytest.raises(ClusterError, match="no cluster of this user runs"):
        read_note(path)
    note = Note(path)
    with pytest.raises(ClusterError, match="is still starting"):
        read_note(path)
    note.write(Address("127.0.0.1", 7, 8))
    assert read_note(path)["http_port"] == 7
    assert path.stat().st_mode & 0o077 == 0
    for _ in range(2):
        with pytest.raises(
            ClusterError, match=rf"already runs on this machine \(process {os.getpid()}\).*cluster down"
        ):
            Note(path)
        assert read_note(path)["http_port"] == 7
    path.unlink()  # by hand: the next one is no business of the first
    second = Note(path)
    note.remove()
    note.remove()
    assert path.exists()
    second.remove()
    assert not path.exists()


def test_a_note_of_a_process_that_has_ended_is_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("n") / "note.json"
    code = "import sys, os; from pathlib import Path; from cotenant.cluster.note import Note; "
    code += "from cotenant.cluster.types import Address; Note(Path(sys.argv[1])).write(Address('h', 7, 8)); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert path.exists()
    with pytest.raises(ClusterError, match="cotenant cluster up"):
        read_note(path)
    Note(path).write(Address("127.0.0.1", 70, 8))  # taken over
    assert read_note(path)["http_port"] == 70
    assert start_time(1 << 30) == ""


def test_folders_of_agents_that_ended_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os; from cotenant.cluster.node_home import NodeHome; print(NodeHome().path, flush=True); os._exit(1)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, env=environment)
    foreign = tmp_path / "cotenant-node-of-before"
    foreign.mkdir()
    mine = NodeHome()
    assert len(list(tmp_path.iterdir())) == 3
    remove_orphans()
    assert set(tmp_path.iterdir()) == {foreign, mine.path}
    mine.remove()
    mine.remove()
    assert set(tmp_path.iterdir()) == {foreign}


def test_without_ray_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    need_ray()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"pip install 'cotenant\[cluster\]'"):
        need_ray()


def test_nodes_are_told_apart_by_their_labels() -> None:
    entry = {"NodeID": "abcdef0123", "NodeManagerHostname": "host", "Labels": {}}
    assert node_of(entry, KINDS) == Node("host-abcdef", "core", "abcdef0123")
    labels = {"cotenant-node": "first", "cotenant-device": "big"}
    two = {**KINDS, "big": CORE}
    assert node_of({**entry, "Labels": labels}, two) == Node("first", "big", "abcdef0123")
    with pytest.raises(
        ClusterError, match="node 'host-abcdef' has no label 'cotenant-device', expected one of core, big"
    ):
        node_of(entry, two)
