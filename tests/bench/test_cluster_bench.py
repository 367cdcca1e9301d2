"""How the benchmark of the cluster counts queries. Figures are not asserted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench._cluster_counts import lost_queries, read_counts, settled
from bench._cluster_faults import longest_gap_s
from cotenant.cluster.gateway import metrics_page
from cotenant.cluster.types import Counts
from cotenant.types import Outcome

SENT = {"a": 10, "b": 3}
ALL = {"a": Counts(offered=10, in_time=6, late=1, refused=1, failed=1, cancelled=1), "b": Counts(offered=3, in_time=3)}


def test_counts_are_read_off_the_gateway_s_page() -> None:
    counts = {**ALL, "an application": Counts(1, 2, 3, 4, 5, 6, 7, 8)}
    assert read_counts(metrics_page(counts).decode()) == counts
    assert lost_queries(SENT, counts) == 0


@pytest.mark.parametrize(
    ("counts", "lost"),
    [
        ({"a": ALL["a"]}, 3),  # never came
        ({**ALL, "b": Counts(offered=3, in_time=2)}, 1),  # came and did not end
        ({**ALL, "b": Counts(offered=3, in_time=3, failed=1)}, 1),  # ended twice
        ({**ALL, "b": Counts(offered=4, in_time=4)}, 1),  # came twice
        ({**ALL, "a": Counts(offered=9, in_time=8)}, 2),  # one never came, another did not end
    ],
)
def test_a_query_without_exactly_one_outcome_is_lost(counts: dict[str, Counts], lost: int) -> None:
    assert lost_queries(SENT, counts) == lost
    assert settled(lambda: counts, SENT, 0.0) == counts


def test_what_has_come_is_waited_for_until_it_has_ended() -> None:
    looks = [{}, {**ALL, "a": Counts(offered=10, in_time=8)}, {**ALL, "a": Counts(offered=10, in_time=9)}, ALL, {}]
    assert settled(lambda: looks.pop(0), SENT, 60.0) == ALL
    assert looks == [{}]


@pytest.mark.parametrize(
    ("outcomes", "gap_s"),
    [
        ("....", 0.0),
        (".x..", 1.0),
        (".xx.", 2.0),
        ("x.x.", 1.0),
        ("..xx", 2.0),  # to the end
        ("xxxx", 4.0),
    ],
)
def test_a_gap_runs_from_a_query_without_an_answer_to_the_next_with_one(outcomes: str, gap_s: float) -> None:
    queries = [
        SimpleNamespace(tenant="a", scheduled_ns=at * 10**9, outcome=Outcome.LATE if said == "." else Outcome.FAILED)
        for at, said in enumerate(outcomes)
    ]
    others = [SimpleNamespace(tenant="b", scheduled_ns=5 * 10**8, outcome=Outcome.ANSWERED)]
    assert longest_gap_s((*queries, *others), 0, 4 * 10**9) == gap_s
    assert longest_gap_s(queries, 4 * 10**9, 5 * 10**9) == 0.0
