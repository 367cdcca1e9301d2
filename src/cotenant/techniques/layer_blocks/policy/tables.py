"""What the rules of blocks look up, by model: made once from what is believed, and kept in a policy's memory.

A *model* here is a tenant at one shape and number of rows; its units are the pieces between two cuts, and its cores are
lanes, of one size each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cotenant.core.predictor import BlockPredictor, Predictor, Spans
from cotenant.errors import CotenantError
from cotenant.techniques.layer_blocks.policy.rules import fill_averages, fill_tight
from cotenant.techniques.layer_blocks.policy.rules_slack import fill_plans
from cotenant.types import Tenant
from cotenant.work import Share

PRICES = (0.0, 2.0, 5.0, 10.0, 16.0, 24.0, 40.0, 80.0, 200.0, 1000.0)
"""Prices of time, in cores, for which slack_blocks makes plans."""
SWITCH_NS = 30_000
"""What a change of the number of cores within a query is taken to cost: a decision and the hand-over of a launch."""
_MOST_CHOICES = 24
_MOST_MODELS = 256
"""Models whose tables are kept; beyond that they are made anew."""


def choices_of(cores: int) -> tuple[int, ...]:
    """The numbers of cores that plans may use: all of few, and of many some, each at most a quarter more than the one
    before."""
    made = [1]
    while made[-1] < cores:
        last = made[-1]
        made.append(min(cores, last + max(1, last // 4 if cores > _MOST_CHOICES else 1)))
    return tuple(made)


def believed_spans(predictor: Predictor, tenant: Tenant, shape: int, items: int, size: int, lanes: int) -> Spans:
    """What is believed of a tenant's model, by pieces between its cuts and by lanes of `size` cores.

    A predictor that knows blocks is asked for them; of another one each piece is asked for, and then there is one
    version and nothing is known of pressure.
    """
    cuts = tenant.cuts
    ask = getattr(predictor, "spans", None)
    if ask is not None:
        known: Spans = ask(tenant.name, shape, items)
        if known.units == len(cuts) - 1 and size == 1 and known.cores == lanes:
            return known
        ns: list[int] = []
        moved: list[int] = []
        row = known.units + 1
        for part in range(known.versions * known.levels):
            for lane in range(1, lanes + 1):
                at = (part * known.cores + min(lane * size, known.cores) - 1) * row
                ns += [known.ns[at + cut] for cut in cuts]
        for version in range(known.versions):
            for lane in range(1, lanes + 1):
                at = (version * known.cores + min(lane * size, known.cores) - 1) * row
                moved += [known.moved[at + cut] for cut in cuts]
        return Spans(len(cuts) - 1, known.versions, known.levels, lanes, ns, moved)
    work, ns = tenant.work(shape, items), []
    best: list[int] = []
    for lane in range(1, lanes + 1):
        sums = [0, *(predictor.latency_ns(work.until(cut), lane * size) for cut in cuts[1:])]
        takes = [sums[at + 1] - sums[at] for at in range(len(cuts) - 1)]
        best = takes if not best else [min(each) for each in zip(best, takes, strict=True)]
        ns.append(0)
        for each in best:
            ns.append(ns[-1] + each)
    return Spans(len(cuts) - 1, 1, 1, lanes, ns, [0] * len(ns))


class ModelTables:
    """The tables of the models that a policy has met, in parallel lists by the number of the model, as the rules take
    them. Never wrong, only forgotten: it is made anew for other beliefs, so a decision depends on its snapshot alone.

    `adapts`: versions are chosen by pressure. `target`: share of the SLO that is planned for. `plans`: make those of
    slack_blocks, else what the other rules need; `memory` is what a byte costs these: see SlackBlocks.
    """

    __slots__ = (
        "_known",
        "_lanes",
        "_options",
        "_predictor",
        "_size",
        "averages",
        "bandwidth",
        "beside",
        "dims",
        "ends",
        "lefts",
        "mask",
        "moved",
        "places",
        "preferred",
        "rows",
        "shares",
        "spans",
        "tight",
        "widths",
        "works",
    )

    def __init__(
        self, shares: Sequence[Share], *, adapts: bool, target: float, plans: bool, memory: float = 0.0
    ) -> None:
        self._lanes, self._size = len(shares), shares[0].size
        self.mask = sum([share.mask for share in shares])
        """All slots of the lanes."""
        self._options = adapts, target, plans, memory
        self._predictor: Predictor | None = None
        self.bandwidth = self.beside = 0.0
        """Of the memory in bytes per ns, 0 where it is not known, and the pressure that is measured from outside."""
        self.shares: dict[int, Share] = {}
        """Unions of lanes by their masks."""
        self._clear()

    def __eq__(self, other: object) -> bool:
        """What is looked up is the same whatever has been looked up before."""
        mine = self._lanes, self._size, self._options
        return isinstance(other, ModelTables) and mine == (other._lanes, other._size, other._options)

    __hash__ = None  # type: ignore[assignment]

    def _clear(self) -> None:
        self._known: dict[tuple[str, int, int], tuple[int, Tenant]] = {}
        self.rows: dict[int, Any] = {}
        """The rows of launches under way by their numbers, and of queries that wait by the complement of theirs, each
        with what it was made of."""
        self.dims: list[int] = []
        self.spans: list[Sequence[int]] = []
        self.moved: list[Sequence[int]] = []
        self.tight: list[Sequence[float]] = []
        self.averages: list[Sequence[int]] = []
        self.ends: list[Sequence[int]] = []
        self.widths: list[Sequence[int]] = []
        self.lefts: list[Sequence[int]] = []
        self.works: list[Sequence[int]] = []
        self.preferred: list[Sequence[int]] = []
        self.places: list[dict[int, int]] = []
        """The pieces by the unit with which each begins, and their number at the last."""

    def use(self, predictor: Predictor) -> None:
        """Believe this from now on. What is made of the same beliefs stays: making plans takes long, and predictors are
        replaced, too, for a margin or the pressure from outside, which nothing here depends on."""
        if predictor is not self._predictor or len(self._known) > _MOST_MODELS:
            if len(self._known) > _MOST_MODELS or not self._believes_the_same(predictor):
                self._clear()
            self._predictor = predictor
            self.bandwidth, self.beside = bandwidth_of(predictor)

    def _believes_the_same(self, predictor: Predictor) -> bool:
        """Whether it knows all models by the same spans as the one before."""
        before, now = getattr(self._predictor, "spans", None), getattr(predictor, "spans", None)
        if self._predictor is None or before is None or now is None:
            return False
        if bandwidth_of(predictor)[0] != bandwidth_of(self._predictor)[0]:
            return False
        try:
            return all(now(*model) is before(*model) for model in self._known)
        except CotenantError:  # it knows nothing of a model that may have gone
            return False

    def number_of(self, tenant: Tenant, shape: int, items: int) -> int:
        """The number of a model."""
        found = self._known.get((tenant.name, shape, items))
        if found is None or found[1] is not tenant:
            found = self._known[tenant.name, shape, items] = len(self.spans), tenant
            self._add(tenant, shape, items)
        return found[0]

    def _add(self, tenant: Tenant, shape: int, items: int) -> None:
        lanes, (adapts, target, plans, memory) = self._lanes, self._options
        predictor = cast(Predictor, self._predictor)
        spans = believed_spans(predictor, tenant, shape, items, self._size, lanes)
        model, units, levels = len(self.spans), spans.units, spans.levels
        self.dims += spans[:4]
        self.spans.append(spans.ns)
        self.moved.append(spans.moved)
        self.places.append({cut: at for at, cut in enumerate(tenant.cuts)})
        if not plans:
            tight, averages = [0.0] * (levels * lanes * units), [0] * levels
            fill_tight(self.dims, spans.ns, model, adapts, lanes, tight)
            fill_averages(self.dims, spans.ns, model, adapts, lanes, target * tenant.slo_ns, averages)
            self.tight.append(tight)
            self.averages.append(averages)
            return
        bandwidth, _ = bandwidth_of(predictor)
        byte_cost = memory * lanes / bandwidth if bandwidth > 0 else 0.0
        choices = choices_of(lanes)
        count, rows = len(choices), levels * len(PRICES)
        ends, widths = [0] * (rows * units), [0] * (rows * units)
        lefts, works, preferred = [0] * (rows * (units + 1)), [0] * (rows * (units + 1)), [0] * levels
        fill_plans(
            self.dims,
            spans.ns,
            spans.moved,
            model,
            PRICES,
            SWITCH_NS,
            byte_cost,
            choices,
            target * tenant.slo_ns,
            [0.0] * count,
            [0] * count,
            [0] * count,
            [0] * count,
            ends,
            widths,
            lefts,
            works,
            preferred,
        )
        self.ends.append(ends)
        self.widths.append(widths)
        self.lefts.append(lefts)
        self.works.append(works)
        self.preferred.append(preferred)


def bandwidth_of(predictor: Predictor) -> tuple[float, float]:
    """Bandwidth of the memory in bytes per ns, and the pressure that is measured from outside."""
    if not hasattr(predictor, "beside"):
        return 0.0, 0.0
    known = cast(BlockPredictor, predictor)
    return known.bandwidth_bytes_per_s / 1e9, known.beside
