"""One query through the core by hand: events in, actions out. No server, no model, no clock."""

from cotenant.core.engine import Engine
from cotenant.core.events import LaunchEnded, QueryArrived
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Query, Tenant
from cotenant.work import Machine, Share

MS = 1_000_000

# A slow model that can be left after each of its four units, and a fast one with a tight target.
vision = Tenant("vision", slo_ns=200 * MS, cuts=(0, 1, 2, 3, 4))
keyword = Tenant("keyword", slo_ns=20 * MS)
beliefs = TablePredictor(
    {
        "vision": LatencyTable((LatencyRow(shape=0, items=1, cores=1, latency_ns=80 * MS),), unit_weights=(1, 1, 1, 1)),
        "keyword": LatencyTable((LatencyRow(shape=0, items=1, cores=1, latency_ns=5 * MS),)),
    }
)
engine = Engine((vision, keyword), Edf(lanes=(Share((0,)),), slack_share=0.0), beliefs, Machine.cpu((0,)))


def show(time_ms, event):
    print(f"{time_ms:3d} ms  {type(event).__name__}")
    for action in engine.handle(event, time_ms * MS):
        match type(action).__name__:
            case "Launch":
                print(f"        -> launch units {action.work.start}..{action.work.end} of {action.work.tenant}")
            case "Respond":
                print(f"        -> respond to query {action.query}: {action.outcome}")
            case "SetTimer":
                print(f"        -> wake me at {action.at_ns // MS} ms")


show(0, QueryArrived(Query(0, "vision", arrival_ns=0, deadline_ns=200 * MS)))
show(10, QueryArrived(Query(1, "keyword", arrival_ns=10 * MS, deadline_ns=30 * MS)))
show(20, LaunchEnded(launch=0))  # the boundary after unit 1: the tight query goes first
show(25, LaunchEnded(launch=1))  # answered in time, and the slow one goes on where it stopped
show(45, LaunchEnded(launch=2))
show(65, LaunchEnded(launch=3))
show(85, LaunchEnded(launch=4))
