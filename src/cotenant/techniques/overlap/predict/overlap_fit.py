"""The fit of the overlap-aware predictor: weights by gradient descent, margins from held-out groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import cos, pi

import numpy as np

from cotenant.core.predictor import Group
from cotenant.errors import InvalidValueError
from cotenant.predict.conformal import Margins, make_margins
from cotenant.techniques.overlap.group_samples import GroupSample
from cotenant.techniques.overlap.predict.measured import MeasuredGroups
from cotenant.techniques.overlap.predict.overlap import OverlapModel, OverlapPredictor
from cotenant.techniques.overlap.predict.overlap_features import WIDTH, Floats, MemberFeatures, TenantFacts, scale_of
from cotenant.techniques.overlap.predict.overlap_net import (
    NORMS,
    UNKNOWN,
    GroupArrays,
    Monotone,
    Net,
    Weights,
    place_thresholds,
)

FEWEST_SAMPLES = 10
_TENANT_WEIGHTS = ("w1", "b1", "w2", "b2")


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Settings of the fit: `steps` of up to `batch` groups, and at most `passes` over the samples.

    `width` is that of the layers (even). The loss is the absolute error of log latency, quadratic within `smooth`
    (Huber). `held_out` is the share of groups for the margins only.
    """

    width: int = 48
    steps: int = 10_000
    passes: int = 400
    batch: int = 256
    rate: float = 0.006
    smooth: float = 0.02
    held_out: float = 0.15
    hidden_steps: int = 1_500
    monotone: Monotone = Monotone.ALL


def fit_overlap(
    samples: Sequence[GroupSample],
    facts: Sequence[TenantFacts],
    *,
    seed: int = 0,
    quantile: float = 0.5,
    settings: FitSettings = FitSettings(),
    on_step: Callable[[int, int], None] | None = None,
    fingerprint: str = "",
    created: str = "",
    command: str = "",
    digests: tuple[tuple[str, str], ...] = (),
) -> OverlapPredictor:
    """Fit a predictor; equal arguments give equal predictors. `facts` may name tenants that no sample has.

    `on_step` receives (steps done, steps in all). Raises InvalidValueError for fewer than FEWEST_SAMPLES samples,
    CotenantError for a sample of a tenant without facts.
    """
    if len(samples) < FEWEST_SAMPLES:
        raise InvalidValueError("fit of the overlap predictor", "samples", len(samples), f"at least {FEWEST_SAMPLES}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples))
    held = max(1, round(settings.held_out * len(samples)))
    taught = [samples[at] for at in order[held:].tolist()]
    tenants = tuple(sorted({member.work.tenant for sample in samples for member in sample.members}))
    scale_ns = scale_of([sample.median_ns for sample in taught])
    features = MemberFeatures(facts, scale_ns)
    groups = [sample.members for sample in taught]
    batch = to_batch(groups, features, tenants)
    target = np.log([sample.median_ns / scale_ns for sample in taught]).astype(np.float32)
    net = Net.random(len(tenants), settings.width, settings.monotone, rng)
    place_thresholds(net, batch, rng)
    net.weights["b5"][0] = float(np.mean(target - net.forward(batch)))
    per_pass = max(1, len(taught) // _batch_size(settings, len(taught)))
    steps = min(settings.steps, settings.passes * per_pass)
    hidden = min(settings.hidden_steps, steps)
    total = steps + hidden

    def report(done: int) -> None:
        if on_step is not None and (done % 100 == 0 or done == total):
            on_step(done, total)

    _descend(net, batch, target, settings, steps, rng, tuple(net.weights), False, report)
    _start_unknown(net.weights)
    _descend(net, batch, target, settings, hidden, rng, _TENANT_WEIGHTS, True, lambda done: report(steps + done))
    nothing = Margins(0.0, ((0.0,),), (1,))
    measured = MeasuredGroups.of([sample.members for sample in samples], tenants, features)
    model = OverlapModel(
        *(net.weights, net.monotone, scale_ns, tenants, tuple(facts), nothing, measured),
        *(fingerprint, created, command, digests),
    )
    return OverlapPredictor(calibrated(model, [samples[at] for at in order[:held].tolist()]), quantile)


def calibrated(model: OverlapModel, held_out: Sequence[GroupSample]) -> OverlapModel:
    """The model with margins from these groups, which were not used to fit the weights."""
    predicted = OverlapPredictor(replace(model, margins=Margins(0.0, ((0.0,),), (1,)))).group_ns(
        [sample.members for sample in held_out]
    )
    sizes = [len(sample.members) for sample in held_out]
    margins = make_margins(predicted, [sample.runs_ns for sample in held_out], sizes, max(sizes))
    return replace(model, margins=margins)


def to_batch(groups: Sequence[Group], features: MemberFeatures, tenants: Sequence[str]) -> GroupArrays:
    """Groups as arrays for the network; tenants outside `tenants` count as unknown."""
    number = {name: at for at, name in enumerate(tenants, 1)}
    slots = max(len(group) for group in groups)
    x = np.zeros((len(groups), slots, WIDTH), np.float32)
    tenant = np.full((len(groups), slots), -1, np.intp)
    solo = np.zeros((len(groups), slots))
    for line, group in enumerate(groups):
        for slot, member in enumerate(group):
            x[line, slot], solo[line, slot] = features.row(member)
            tenant[line, slot] = number.get(member.work.tenant, UNKNOWN)
    powers = np.array(NORMS)
    norms = np.log((solo[:, :, None] ** powers).sum(1)) / powers
    return GroupArrays(x, tenant, norms.astype(np.float32))


def _batch_size(settings: FitSettings, count: int) -> int:
    return min(settings.batch, max(16, count // 8), count)


def _descend(
    net: Net,
    batch: GroupArrays,
    target: Floats,
    settings: FitSettings,
    steps: int,
    rng: np.random.Generator,
    names: tuple[str, ...],
    hide: bool,
    report: Callable[[int], None],
) -> None:
    """Adam with a cosine learning rate. With `hide` random members lose their tenant, and only the weights of UNKNOWN
    change."""
    count = len(target)
    size = _batch_size(settings, count)
    mean = {name: np.zeros_like(net.weights[name]) for name in names}
    square = {name: np.zeros_like(net.weights[name]) for name in names}
    order, at = rng.permutation(count), 0
    for step in range(1, steps + 1):
        if at + size > count:
            order, at = rng.permutation(count), 0
        rows = order[at : at + size]
        at += size
        drawn = batch.take(rows)
        if hide:
            gone = rng.random(drawn.tenant.shape) < 0.5
            gone[np.arange(size), rng.integers(0, gone.shape[1], size)] = True
            drawn = GroupArrays(drawn.x, np.where(gone & (drawn.tenant >= 0), UNKNOWN, drawn.tenant), drawn.norms)
        goal = target[rows]

        def slope(output: Floats, goal: Floats = goal) -> Floats:
            made: Floats = np.clip((output - goal) / settings.smooth, -1.0, 1.0) / np.float32(size)
            return made

        found = net.gradient(drawn, slope)
        rate = settings.rate * (0.5 * (1.0 + cos(pi * step / steps)) + 1e-3) * min(1.0, step / 100)
        for name in names:
            grad = found[name]
            if hide:
                grad[UNKNOWN + 1 :] = 0.0
            mean[name] += 0.1 * (grad - mean[name])
            square[name] += 0.005 * (grad * grad - square[name])
            scaled = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.995**step)) + 1e-8)
            net.weights[name] -= np.float32(rate) * scaled
        report(step)


def _start_unknown(weights: Weights) -> None:
    """Initialise the weights of unknown tenants by the mean magnitude of the known ones."""
    for name in _TENANT_WEIGHTS:
        known = weights[name][UNKNOWN + 1 :]
        weights[name][UNKNOWN] = np.abs(known).mean(0) if name.startswith("w") else known.mean(0)
