"""One query through the core by hand: events in, actions out. No server, no model, no clock."""

import cotenant

MS = 1_000_000

# A slow model that can be left after each of its four units, and a fast one with a tight target.
models = {
    "vision": cotenant.AssumedModel(slo_ms=200, latency_ms=80, units=4),
    "keyword": cotenant.AssumedModel(slo_ms=20, latency_ms=5),
}
engine = cotenant.engine(models, "edf", cores=[0], options={"slack_share": 0.0})


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


show(0, cotenant.QueryArrived(cotenant.Query(0, "vision", arrival_ns=0, deadline_ns=200 * MS)))
show(10, cotenant.QueryArrived(cotenant.Query(1, "keyword", arrival_ns=10 * MS, deadline_ns=30 * MS)))
show(20, cotenant.LaunchEnded(launch=0))  # the boundary after unit 1: the tight query goes first
show(25, cotenant.LaunchEnded(launch=1))  # answered in time, and the slow one goes on where it stopped
show(45, cotenant.LaunchEnded(launch=2))
show(65, cotenant.LaunchEnded(launch=3))
show(85, cotenant.LaunchEnded(launch=4))
