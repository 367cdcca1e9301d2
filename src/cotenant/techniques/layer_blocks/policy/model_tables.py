"""The models of a block policy, built once from the predictor and cached in the policy's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cotenant.core.predictor import BlockPredictor, Predictor, Spans
from cotenant.core.snapshot import Running
from cotenant.errors import CotenantError
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockJob, RunningBlock
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.price_plans import choices_of
from cotenant.types import Tenant
from cotenant.work import Share

_MOST_MODELS = 256
"""Models that are kept; beyond that they are made anew."""


def believed_spans(predictor: Predictor, tenant: Tenant, shape: int, items: int, size: int, lanes: int) -> Spans:
    """Predicted times and traffic of a tenant's model, by units between its cuts and by lanes of `size` cores.

    A BlockPredictor has them. Another predictor is queried for each unit: one version, without pressure.
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
    """The models that a policy has met, with the tables of its rules; and jobs that have not changed since.

    A cache: it is made anew for another belief, so a decision depends on its snapshot alone. `adapts`: versions are
    chosen by pressure. `target`: the part of the SLO that is planned for. `plans`: make the plans of `slack_blocks`,
    else the tables of `layer_block`. `memory`: the price of traffic in plans, see SlackBlocks.
    """

    __slots__ = (
        "_known",
        "_lanes",
        "_options",
        "_predictor",
        "_size",
        "bandwidth",
        "beside",
        "blocks",
        "jobs",
        "mask",
        "shares",
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
        """Memory bandwidth in bytes per ns, 0 if unknown, and the measured pressure of other processes."""
        self.shares: dict[int, Share] = {}
        """Unions of lanes by their masks."""
        self._clear()

    def __eq__(self, other: object) -> bool:
        """Caches of the same options are equal, whatever is in them: they give the same answers."""
        mine = self._lanes, self._size, self._options
        return isinstance(other, ModelTables) and mine == (other._lanes, other._size, other._options)

    __hash__ = None  # type: ignore[assignment]

    def _clear(self) -> None:
        self._known: dict[tuple[str, int, int], BlockModel] = {}
        self.blocks: dict[int, tuple[Running, RunningBlock]] = {}
        """Blocks under way by the numbers of their launches."""
        self.jobs: dict[int, BlockJob] = {}
        """Jobs of single waiting queries by the numbers of these."""

    def use(self, predictor: Predictor) -> None:
        """Use this predictor from now on. Models stay if it predicts the same latencies for them.

        Plans are slow to make, and predictors are also replaced for another margin or pressure, which do not matter
        here.
        """
        if predictor is not self._predictor or len(self._known) > _MOST_MODELS:
            if len(self._known) > _MOST_MODELS or not self._believes_the_same(predictor):
                self._clear()
            self._predictor = predictor
            self.bandwidth, self.beside = bandwidth_of(predictor)

    def _believes_the_same(self, predictor: Predictor) -> bool:
        """Whether the predictor has the same spans for all models as the one before."""
        before, now = getattr(self._predictor, "spans", None), getattr(predictor, "spans", None)
        if self._predictor is None or before is None or now is None:
            return False
        if bandwidth_of(predictor)[0] != bandwidth_of(self._predictor)[0]:
            return False
        try:
            return all(now(*model) is before(*model) for model in self._known)
        except CotenantError:  # a model that it does not know may have been unloaded
            return False

    def model_of(self, tenant: Tenant, shape: int, items: int) -> BlockModel:
        """The model of a tenant at one shape and number of rows."""
        model = self._known.get((tenant.name, shape, items))
        if model is None or model.tenant is not tenant:
            model = self._known[tenant.name, shape, items] = self._made(tenant, shape, items)
        return model

    def _made(self, tenant: Tenant, shape: int, items: int) -> BlockModel:
        lanes, (adapts, target, plans, memory) = self._lanes, self._options
        predictor = cast(Predictor, self._predictor)
        spans = believed_spans(predictor, tenant, shape, items, self._size, lanes)
        model, budget_ns = BlockModel(tenant, shape, items, spans), target * tenant.slo_ns
        if plans:
            bandwidth, _ = bandwidth_of(predictor)
            byte_cost = memory * lanes / bandwidth if bandwidth > 0 else 0.0
            model.add_plans(choices_of(lanes), byte_cost, budget_ns)
        else:
            model.add_pivots(adapts, budget_ns)
        return model


def bandwidth_of(predictor: Predictor) -> tuple[float, float]:
    """Memory bandwidth in bytes per ns, and the measured pressure of other processes; 0 if the predictor has none."""
    if not hasattr(predictor, "beside"):
        return 0.0, 0.0
    known = cast(BlockPredictor, predictor)
    return known.bandwidth_bytes_per_s / 1e9, known.beside
