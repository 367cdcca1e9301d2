"""The tables of models: made once for what is believed, and anew for other beliefs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.predict.margin import SafetyMargin
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.layer_blocks.policy import block_model
from cotenant.techniques.layer_blocks.policy.block_context import lowest
from cotenant.techniques.layer_blocks.policy.model_tables import ModelTables
from cotenant.techniques.layer_blocks.policy.price_plans import plans_of
from cotenant.types import Tenant
from cotenant.work import Share

MS = 1_000_000
LANES = (Share((0,)), Share((1,)))
TENANT = Tenant("a", 100 * MS, cuts=(0, 1, 2))
TABLE = LatencyTable((LatencyRow(0, 1, 1, 10 * MS), LatencyRow(0, 1, 2, 6 * MS)), (1.0, 1.0))


def test_plans_are_made_again_for_other_latencies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(block_model, "plans_of", lambda *given: (made.append(given), plans_of(*given))[1])
    tables = ModelTables(LANES, adapts=True, target=0.7, plans=True)
    predictor = TablePredictor({"a": TABLE})
    for same in (predictor, predictor.with_beside(0.5), predictor.with_margin(SafetyMargin(reply_ns=MS))):
        tables.use(same)
        assert tables.model_of(TENANT, 0, 1) is tables.model_of(TENANT, 0, 1)
        assert len(made) == 1
    slower = predictor.scaled({"a": 2.0})
    tables.use(slower)
    assert tables.model_of(TENANT, 0, 1).ns[-1] == 12 * MS
    assert len(made) == 2
    tables.use(TablePredictor({"b": TABLE}))
    tables.use(slower)
    tables.model_of(TENANT, 0, 1)
    assert len(made) == 3, "nothing was known of it in between"


@given(st.integers(0, (1 << 80) - 1), st.integers(0, 90))
def test_the_lowest_bits_are_taken_run_by_run(mask: int, count: int) -> None:
    places = [at for at in range(80) if mask >> at & 1][:count]
    assert lowest(mask, count) == sum(1 << at for at in places)
