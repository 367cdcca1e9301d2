"""The gateway's link to Ray over a Ray that only pretends: actors hold ports, end, and are started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.cluster import controller, ray_fleet
from cotenant.cluster.head import ClusterHead, HeadSettings
from cotenant.cluster.interfaces import ClusterSpec, ControllerSettings
from cotenant.cluster.node_server import STOP_MARGIN_S
from cotenant.cluster.ray_fleet import RayGateway
from cotenant.cluster.types import Address, ClusterError, GatewayReport, RoutingTable
from cotenant.techniques.partitions.plan.elastic import Elastic
from plan_samples import table_costs

TABLE = RoutingTable(3, (), {})


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(RayError):
    pass


class GetTimeoutError(RayError, TimeoutError):
    pass


class FakeActor:
    """A gateway: it can be asked for a table once it listens, and listens until it is killed."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray = ray
        self.ended = False
        self.listens = False
        self.tables: list[RoutingTable | None] = []
        self.status = b""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: lambda: self._do(method, arguments))

    def _do(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self.ended:
            raise RayActorError("the actor died")
        if method == "start":
            problem = self._ray.start_problems.pop(0) if self._ray.start_problems else None
            self.listens = problem is None
            if problem is not None:
                raise problem
            assert sum(actor.listens for actor in self._ray.actors) == 1, "the ports are taken"
            self.tables.append(arguments[3])
            self.status = arguments[4]
            return Address("127.0.0.1", 8000, 8001)
        assert self.listens, f"{method} of an actor that was not started"
        if method == "set_table":
            self.tables.append(arguments[0])
        if method == "set_status":
            self.status = arguments[0]
        return GatewayReport({}, {}, (), len(self.tables)) if method == "report" else None

    def end(self) -> None:
        self.ended, self.listens = True, False


class FakeRay:
    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError
    )

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.start_problems: list[Exception | None] = []
        self.hangs = False
        """Actors are stopped, and answer no call."""

    def remote(self, _: type) -> Any:
        def make(*_: Any) -> FakeActor:
            self.actors.append(FakeActor(self))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def get(self, work: Callable[[], Any], timeout: float) -> Any:
        assert timeout > 0
        if self.hangs:
            raise GetTimeoutError("no answer")
        return work()

    def wait(self, calls: list[Callable[[], Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [call for call in calls if not self.hangs]
        for call in done:
            call()
        return done, [call for call in calls if call not in done]

    def kill(self, actor: FakeActor) -> None:
        actor.end()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda **_: None)
    monkeypatch.setattr(ray_fleet.importlib, "import_module", lambda name: strategies)
    return FakeRay()


def made(ray: FakeRay) -> RayGateway:
    return RayGateway(SimpleNamespace(ray=ray), "127.0.0.1", 0, 0, 1 << 20)  # type: ignore[arg-type]


PROBLEMS = (
    RayTaskError(ClusterError("gateway, HTTP: cannot listen on 127.0.0.1 port 8000")),
    RayTaskError(ValueError("something else")),
    RayActorError("it died while it started"),
    GetTimeoutError("too slow"),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_gateway_that_cannot_be_started_again_at_once_is_tried_until_it_can(ray: FakeRay, problem: Exception) -> None:
    gateway = made(ray)
    gateway.set_table(TABLE)
    ray.actors[0].end()
    ray.start_problems = [problem, problem]
    for _ in range(2):
        with pytest.raises(ClusterError):
            gateway.report()
    assert all(actor.ended for actor in ray.actors), "a gateway that does not listen was left"
    assert len(ray.actors) == 3
    assert gateway.report() == GatewayReport({}, {}, (), 1)
    assert ray.actors[-1].tables == [TABLE]  # before it listened
    gateway.report()
    assert len(ray.actors) == 4


def test_a_table_that_comes_while_there_is_no_gateway_is_that_of_the_next_one(ray: FakeRay) -> None:
    gateway = made(ray)
    gateway.set_table(TABLE)
    ray.actors[0].end()
    ray.start_problems = [PROBLEMS[0]]
    later = RoutingTable(4, (), {})
    gateway.set_table(later)
    gateway.set_status(b"{}")
    gateway.report()
    assert ray.actors[-1].tables == [later]


def test_a_gateway_that_ends_again_and_again_is_an_error_and_not_a_loop(ray: FakeRay) -> None:
    gateway = made(ray)
    ray.actors[0].end()
    start = FakeActor._do

    def dies(self: FakeActor, method: str, arguments: tuple[Any, ...]) -> Any:
        found = start(self, method, arguments)
        self.end()
        return found

    FakeActor._do = dies  # type: ignore[method-assign]
    try:
        with pytest.raises(ClusterError, match="the gateway ended"):
            gateway.report()
    finally:
        FakeActor._do = start  # type: ignore[method-assign]
    assert gateway.report().version == 1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_first_gateway_that_cannot_start_leaves_nothing(ray: FakeRay, problem: Exception) -> None:
    ray.start_problems = [problem]
    with pytest.raises(ClusterError):
        made(ray)
    assert ray.actors[0].ended


def test_a_gateway_that_is_gone_can_be_stopped(ray: FakeRay) -> None:
    gateway = made(ray)
    ray.actors[0].end()
    gateway.stop()
    gateway.stop()
    assert len(ray.actors) == 1


@pytest.mark.parametrize(
    ("text", "limit_mib", "drain_s"), [("max_body_mib = 2.5\ndrain_s = 70.0\n", 2.5, 70.0), ("", 64, 10)]
)
def test_the_repository_s_settings_reach_the_gateway_and_the_controller(
    text: str, limit_mib: float, drain_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cotenant.toml").write_text(f"[server]\n{text}")
    seen: dict[str, Any] = {}

    class Seen:
        address = Address("127.0.0.1", 1, 2)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            seen.update(options, last=arguments[-1])

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    for name in ("RaySession", "RayFleet", "RayGateway"):
        monkeypatch.setattr(ray_fleet, name, Seen)
    monkeypatch.setattr(controller, "Controller", Seen)
    work = ClusterSpec((), {}, {}, table_costs({}, {}), Elastic())
    ClusterHead(work, tmp_path, HeadSettings(), ControllerSettings()).close()
    assert seen["max_body_bytes"] == limit_mib * (1 << 20)
    assert seen["last"].stop_s > drain_s + STOP_MARGIN_S


def test_the_first_status_is_there_once_it_is_set_and_the_next_gateway_begins_with_the_last(ray: FakeRay) -> None:
    gateway = made(ray)
    gateway.set_status(b"first")
    assert ray.actors[0].status == b"first"
    gateway.set_status(b"last")
    ray.actors[0].end()
    gateway.report()
    assert ray.actors[1].status == b"last"


def test_a_gateway_that_hangs_is_no_gateway_that_ended(ray: FakeRay) -> None:
    gateway = made(ray)
    ray.hangs = True
    with pytest.raises(TimeoutError, match="did not answer within"):
        gateway.report()
    gateway.set_table(TABLE)
    for _ in range(3):
        gateway.set_status(b"{}")
    assert not ray.actors[0].ended
    gateway.drop()
    assert ray.actors[0].ended
    ray.hangs = False
    gateway.report()
    assert ray.actors[-1].tables == [TABLE]
