"""The cost of requests, measured on a real server."""

from __future__ import annotations

import pytest

from cotenant.config import load_server_config
from cotenant.linux import IS_LINUX
from cotenant.load import server_cost
from cotenant.load.server_cost import STEPS, measure_server_cost
from cotenant.profiles.server_cost import PROTOCOLS


@pytest.mark.skipif(not IS_LINUX, reason="servers run on Linux")
def test_requests_of_a_real_server_have_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in {"_REQUESTS": 60, "_ALONE": 10, "_LARGE_REQUESTS": 6, "_WARM_UP": 10}.items():
        monkeypatch.setattr(server_cost, name, count)
    steps: list[tuple[int, int]] = []
    found = measure_server_cost(load_server_config(None, {}), lambda done, total, _: steps.append((done, total)))
    assert steps == [(done, STEPS) for done in range(1, STEPS + 1)]
    assert found.front_ends == 1
    assert set(found.requests) == set(PROTOCOLS)
    for cost in found.requests.values():
        assert cost.front_end.ns > 0
        assert cost.refused_front_end_ns > 0
        assert cost.refused_engine_ns > 0
        assert cost.alone_ns > 0
        assert cost.front_end.ns_per_kib_in > 0
    json, binary = found.requests["json"], found.requests["http"]
    assert json.front_end.of((600_000, 0)) > 3 * binary.front_end.of((600_000, 0))
