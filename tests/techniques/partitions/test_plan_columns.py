"""What is known of the columns of a device, against trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, SplitTree, device_plan
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import NS_PER_S, CoRunner, Load, Plan
from oracles import Few
from plan_samples import FINE, GIB, GPU, MODELS, costs, latencies, load, some_loads, table_costs

COSTS = costs()


def test_the_tree_of_splits_has_every_beginning_of_each_once() -> None:
    def beginnings(nodes: Sequence[SplitTree]) -> Iterator[tuple[int, ...]]:
        for node in nodes:
            yield (node.size,)
            yield from ((node.size, *rest) for rest in beginnings(node.children))

    found = list(beginnings(ColumnGenerator(RoundCache(COSTS), [load("small", 1, 50)], FINE).tree))
    splits = [tuple(sorted(split, reverse=True)) for split in FINE.splits]
    assert len(found) == len(set(found))
    assert set(found) == {split[:count] for split in splits for count in range(1, len(split) + 1)}


class BySize:
    """The larger the partition beside a batch, the slower it is."""

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = "") -> float:
        return 1.0 + sum(self.adds(model, batch, size, other) for other in others)

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str = "") -> float:
        return other[2] / 100 if other[0] != model else 0.0

    def factor_at(
        self, quantile: float, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str = ""
    ) -> float:
        return self.factor(model, batch, size, others, device)


def test_typical_slowdowns_are_those_beside_single_others_in_the_largest_partition() -> None:
    believed = table_costs({"gpu": latencies(FINE.sizes, 100)}, dict.fromkeys(MODELS, GIB), {"gpu": BySize()})
    loads = [load("small", 1, 500), load("middle", 1, 500), load("heavy", 1, 5)]  # the last one can run nowhere
    typical = ColumnGenerator(RoundCache(believed), loads, FINE).typical
    for size, beside in ((20, 80), (40, 60), (50, 50), (60, 40), (80, 20)):
        assert typical[size].tolist() == pytest.approx([1 + beside / 200] * 2 + [1.0])
    assert typical[100].tolist() == [1.0] * 3
    assert ColumnGenerator(RoundCache(believed), loads, FINE, interference=False).typical[20].tolist() == [1.0] * 3


@given(loads=some_loads(4), memory=st.floats(1.0, 12.0), data=st.data())
@settings(max_examples=40)
def test_the_value_of_a_device_is_reached_where_memory_is_no_bound(
    loads: list[Load], memory: float, data: st.DataObject
) -> None:
    prices = np.array([data.draw(st.floats(0.001, 1.0)) for _ in loads])
    wide = replace(FINE, memory_bytes=1 << 50)
    generator = ColumnGenerator(RoundCache(COSTS), loads, wide)
    best = {size: max(float(r * p) for r, p in zip(generator.best[size], prices, strict=True)) for size in wide.sizes}
    reached = max(sum(best[size] for size in split) for split in wide.splits)
    value, served = generator.value(prices)
    assert value == pytest.approx(reached)
    assert served @ prices == pytest.approx(reached)

    tight = replace(FINE, memory_bytes=int(memory * GIB), partition_bytes=GIB // 8)
    value, _ = ColumnGenerator(RoundCache(COSTS), loads, tight).value(prices)
    assert value <= reached * (1 + 1e-9)
    for split in tight.splits:  # columns of single loads, as many as there is memory for
        for count in range(len(split) + 1):
            if count * (GIB + GIB // 8) <= tight.memory_bytes:
                most = max(sum(best[size] for size in chosen) for chosen in combinations(split, count))
                assert most <= value * (1 + 1e-9)


@given(loads=some_loads(3), size=st.sampled_from(FINE.sizes), free=st.integers(0, 3), data=st.data())
@settings(max_examples=60)
def test_a_proposed_column_is_nearly_the_best_of_all(
    loads: list[Load], size: int, free: int, data: st.DataObject
) -> None:
    few = (1, 4, 7, 13)
    generator = ColumnGenerator(RoundCache(Few(WithoutInterference(COSTS), few)), loads, FINE)  # type: ignore[arg-type]
    wanted = np.array([data.draw(st.sampled_from((0.0, 0.3, 1.0))) * its.rate_per_s for its in loads])
    prices = np.array([data.draw(st.floats(0.1, 1.0)) / its.rate_per_s for its in loads])

    def worth(column: Column) -> float:
        """Of a column that holds and has room; below 0 for any other."""
        made = generator.config((column,))
        if made is None or len(column.slots) > 2 or len(column.slots) > free:
            return -1.0
        return float(np.minimum(wanted, made.served) @ prices)

    best = 0.0
    for batches in product((0, *few), repeat=len(loads)):
        slots = tuple((number, batch) for number, batch in enumerate(batches) if batch)
        if slots:
            best = max(best, worth(Column(size, slots)))
    found = generator.propose(size, wanted, prices, float(free * GIB), 2)
    if found is None:
        assert best == 0
    else:
        assert all(wanted[number] > 0 for number, _ in found.slots)
        assert best * 0.75 <= worth(found) <= best * (1 + 1e-9)


def test_of_columns_that_serve_all_the_shortest_is_proposed() -> None:
    generator = ColumnGenerator(RoundCache(COSTS), [load("small", 1, 50), load("deep", 1, 250)], FINE)
    for number in (0, 1):
        wanted = np.eye(2)[number]
        assert generator.propose(100, wanted, wanted, 8.0 * GIB, 3) == Column(100, ((number, 1),))


@given(loads=some_loads(3), data=st.data())
@settings(max_examples=40)
def test_spare_time_goes_where_slowdowns_are_borne_best(loads: list[Load], data: st.DataObject) -> None:
    generator = ColumnGenerator(RoundCache(COSTS), loads, GPU)
    numbers = data.draw(st.lists(st.integers(0, len(loads) - 1), min_size=1, max_size=3, unique=True))
    config = generator.config((Column(100, tuple((n, data.draw(st.sampled_from((1, 4, 16)))) for n in numbers)),))
    if config is None:
        return
    shares = [data.draw(st.floats(0.05, 1.0)) for _ in loads]
    made = device_plan(generator, config, shares)
    (partition,) = made.partitions
    asked = [replace_rate(loads[n], config.served[n] * shares[n]) for n in numbers]
    assert check_plan(Plan((made,)), asked, [GPU], COSTS) == ()
    took = config.execution_ns[0]

    def bears(duty: float) -> float:
        """The largest slowdown with which the round is kept, and every SLO."""
        return min(duty / sum(took), *((its.slo_ns - duty) / ns for its, ns in zip(asked, took, strict=True)))

    full = min(slot.batch * NS_PER_S / slot.rate_per_s for slot in partition.slots)
    most = max(bears(duty) for duty in np.linspace(sum(took), min(full, min(its.slo_ns for its in asked)), 500))
    assert bears(partition.duty_ns) >= most * (1 - 1e-3)


def replace_rate(one: Load, rate: float) -> Load:
    return load(one.model, rate, one.slo_ns / 1e6, one.tenant)


def test_the_next_smaller_batch_is_a_tenth_smaller_at_least() -> None:
    generator = ColumnGenerator(RoundCache(COSTS), [load("small", 1, 50)], GPU)
    for batch in range(1, 17):
        lower = [each for each in range(1, batch) if each <= 0.92 * batch]
        assert generator.smaller(0, batch) == max(lower, default=1)
