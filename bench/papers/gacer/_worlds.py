"""Worlds drawn from seeds: properties of cards, kernels and hosts that the paper leaves open, over plausible ranges.

Of the card and how it runs kernels that meet (`_kernel_world.py`):

* admission: whole, in order, or shared. NVIDIA does not say how blocks of several streams are handed out. "in order" is
  the rule that is commonly observed, "whole" is how the paper draws it (section 4.1).
* waves, yes or no: whether blocks come in waves, of which the last leaves slots free.
* mixed, 1 to 1.3: the throughput of two kernels of different kinds, over that of one alone.
* compute_loss, 0 to 10 %, and bandwidth_loss, 0 to 15 %: what kernels that meet lose in caches and rows of memory.

Of kernels alone (`_models.py`):

* tile, 64x64 to 128x128: the tile of products that is preferred.
* product, 50 to 80 %: the part of the peak that products of full tiles reach; measured kernels reach 67 %.
* winograd, off (one world in three) or 1.3 to 2: how many times fewer operations 3x3 taps take. Measured kernels use
  it, and 2.25 is the bound of tiles of 2x2.
* depthwise, 5 to 20 %: the same part for depthwise convolutions.
* memory, 65 to 90 %: the part of the bandwidth that kernels of full occupation reach.
* fill, 0.4 to 0.8: how elastic a block is. With a part p of an SM's blocks, each runs `1 / p ** fill` times as fast.
  Measured kernels have 0.55 on average.
* enough, 0.2 to 0.6: the part of the slots at which their blocks draw all of the bandwidth.
* ramp, 1 to 4 us: what a kernel takes to begin and drain, whatever it does.
* copies, yes or no: whether rows of chunks are put together by a copy (torch.cat) or written into one buffer.

Of the host (eager launches from Python at one end, C++ at the other; CUDA graphs, 1 to 1.5 us, are below):

* launch, 3 to 40 us (log-uniform), for each kernel and stream; host_loss, 0 to 0.5 for each other thread that issues.
* gap, 0.5 to 3 us between kernels of a stream; sync (T_SW), 10 to 80 us (log-uniform); event, 1.5 to 8 us.

Predicted costs have another rule of admission, drawn for itself. They include measurements of kernels alone and of the
host, and no losses. `robust` predictions are 15 % off in times and 20 % in needs (deviation of the logarithm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.papers.gacer._kernel_world import Admission, KernelDevice

TILES = (((128, 128), 2), ((128, 64), 4), ((64, 64), 4))
"""Height, width, and blocks that an SM has room for: of the last two as measured, of the first by registers."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The free parameters of a world: see the module's table. `tile` is a number of `TILES`."""

    seed: int
    admission: Admission
    believed: int
    waves: bool
    mixed: float
    compute_loss: float
    bandwidth_loss: float
    tile: int
    product: float
    winograd: float
    depthwise: float
    memory: float
    fill: float
    enough: float
    ramp_us: float
    copies: bool
    launch_us: float
    host_loss: float
    gap_us: float
    sync_us: float
    event_us: float

    @property
    def device(self) -> KernelDevice:
        """What the card and its host really are like."""
        return KernelDevice(
            self.admission,
            round(1000 * self.launch_us),
            round(1000 * self.gap_us),
            round(1000 * self.sync_us),
            round(1000 * self.event_us),
            self.waves,
            self.host_loss,
            self.compute_loss,
            self.bandwidth_loss,
        )


def draw(seed: int) -> Drawn:
    """The parameters of a world."""
    drawn = np.random.default_rng((28, seed))

    def between(low: float, high: float) -> float:
        return float(drawn.uniform(low, high))

    def by_factors(low: float, high: float) -> float:
        return float(np.exp(drawn.uniform(np.log(low), np.log(high))))

    return Drawn(
        seed=seed,
        admission=tuple(Admission)[int(drawn.integers(len(Admission)))],
        believed=int(drawn.integers(2)),
        waves=bool(drawn.integers(2)),
        mixed=between(1.0, 1.3),
        compute_loss=between(0.0, 0.10),
        bandwidth_loss=between(0.0, 0.15),
        tile=int(drawn.integers(len(TILES))),
        product=between(0.50, 0.80),
        winograd=between(1.3, 2.0) if drawn.integers(3) else 1.0,
        depthwise=between(0.05, 0.20),
        memory=between(0.65, 0.90),
        fill=between(0.4, 0.8),
        enough=between(0.2, 0.6),
        ramp_us=between(1.0, 4.0),
        copies=bool(drawn.integers(2)),
        launch_us=by_factors(3.0, 40.0),
        host_loss=between(0.0, 0.5),
        gap_us=between(0.5, 3.0),
        sync_us=by_factors(10.0, 80.0),
        event_us=between(1.5, 8.0),
    )
