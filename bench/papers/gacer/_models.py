"""Latencies of kernels alone, by roofline, for every number of rows: tables of the models on a GPU in a drawn world.

A product of `height` x rows by `width` by `depth` is cut into tiles, a block each. The tiles are those that the world
prefers. Where that makes fewer blocks than half of the card's SMs, they are smaller (to 64 x 64). Thin products, of up
to 32 positions, are cut along their depth too. Blocks of a full wave share the throughput of products, `product` of the
card's peak. On an SM that has fewer blocks than it has room for, each is quicker, by `fill`. 3x3 taps take `winograd`
times fewer operations, one block of 64 x 64 an SM, where that is drawn. A product takes the longer of its waves and its
bytes at the card's bandwidth, and `ramp` before. Each step of a recurrence does so by itself. Other kernels have 256
threads a block and four elements a thread (more where they read more). They take their bytes, or for a depthwise
convolution its operations.

Measured kernels look like that (Orion's V100, ResNet-50 with 4 rows). Their products are of 128 x 64 or 64 x 64, 4
blocks an SM, 0.09 to 0.6 of the card for most. With a part p of the card's blocks they reach 0.67 p ** 0.45 of its
peak, less below p = 0.2. Tiles that are tuned for each kernel would fill the card better, and leave less to gain.

Shares of operations and bandwidth are of the card's throughput for several kernels, `mixed` times that for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.papers.gacer._gpus import Gpu
from bench.papers.gacer._worlds import TILES, Drawn
from bench.papers.gacer._zoo_kernels import ZooKernel, zoo_kernels
from cotenant.techniques.granularity.kernel_table import Column, KernelTable

_THIN, _THIN_ROOM, _THIN_HEIGHT = (8, 64), 8, 32
_SPLITS = (1, 2, 4, 8)
"""Parts of the depth of a thin product; what they make is written and read once more."""
_LEAST_DEPTH = 128
"""Of a part."""
_BLOCKS_OF_OTHERS = 8
_ELEMENTS_OF_BLOCK = 1024
_READ_FOR_ONE = 8
"""Elements that a thread of a reduction reads for each that others write."""
_BYTES = 4


def model_table(model: str, batch: int, gpu: Gpu, drawn: Drawn) -> KernelTable:
    """One of our zoo's models, for 1 to `batch` rows."""
    return table_of(model, zoo_kernels(model), batch, gpu, drawn)


def table_of(model: str, kernels: Sequence[ZooKernel], batch: int, gpu: Gpu, drawn: Drawn) -> KernelTable:
    """Kernels as units of a model."""
    rows = np.arange(1, batch + 1)
    columns = [_columns(kernel, rows, gpu, drawn) for kernel in kernels]
    duration_ns, need, compute, bandwidth = [np.array(each) for each in zip(*columns, strict=True)]
    moved = np.array([2.0 * kernel.writes * batch for kernel in kernels])
    join_ns = 1000 * drawn.ramp_us + moved / (gpu.gbps * drawn.memory)
    if not drawn.copies:
        join_ns = np.zeros(len(kernels))
    names = tuple(kernel.kernel for kernel in kernels)
    return KernelTable(
        model, batch, names, duration_ns, need, compute, bandwidth, join_ns, (tuple(range(len(kernels) + 1)),)
    )


def _columns(kernel: ZooKernel, rows: Column, gpu: Gpu, drawn: Drawn) -> tuple[Column, Column, Column, Column]:
    """Duration in ns, need, and shares of operations and bandwidth, by rows."""
    if kernel.kind in ("product", "recurrent"):
        tried = [_product(kernel, rows, gpu, drawn, tile, room) for tile, room in TILES[drawn.tile :]]
        few = [
            each[1] * gpu.sms * room < gpu.sms / 2 for each, (_, room) in zip(tried, TILES[drawn.tile :], strict=True)
        ]
        chosen = np.minimum(np.cumprod(few, axis=0).sum(axis=0), len(tried) - 1)
        if kernel.winograd and drawn.winograd > 1:
            tried, chosen = [_product(kernel, rows, gpu, drawn, TILES[-1][0], 1)], np.zeros_like(chosen)
        if kernel.groups == 1:
            thin = [
                _product(kernel, rows, gpu, drawn, _THIN, _THIN_ROOM, parts)
                for parts in _SPLITS
                if parts == 1 or kernel.depth >= parts * _LEAST_DEPTH
            ]
            quickest = len(tried) + np.argmin([each[0] for each in thin], axis=0)
            chosen = np.where(kernel.height * rows <= _THIN_HEIGHT, quickest, chosen)
            tried += thin
        ns, need, compute, bandwidth = (np.choose(chosen, column) for column in zip(*tried, strict=True))
        return ns, need, compute, bandwidth
    moved = (kernel.reads + kernel.writes) * rows + kernel.weights
    elements = max(kernel.writes, kernel.reads / _READ_FOR_ONE) / _BYTES * rows
    need = np.ceil(elements / _ELEMENTS_OF_BLOCK) / (gpu.sms * _BLOCKS_OF_OTHERS)
    drawn_part = np.minimum(1.0, need / drawn.enough)
    bytes_ns = moved / (gpu.gbps * drawn.memory * drawn_part)
    operations = 2.0 * kernel.height * kernel.width * kernel.depth * rows
    work_ns = operations / (gpu.tflops * 1000 * drawn.depthwise * drawn_part)
    ns = 1000 * drawn.ramp_us + np.maximum(bytes_ns, work_ns)
    # A depthwise convolution keeps the units busy that it uses so badly.
    compute = operations / (ns * gpu.tflops * 1000 * drawn.depthwise * drawn.mixed)
    return ns, need, np.minimum(1.0, compute), np.minimum(1.0, moved / (ns * gpu.gbps * drawn.memory * drawn.mixed))


def _product(
    kernel: ZooKernel, rows: Column, gpu: Gpu, drawn: Drawn, tile: tuple[int, int], room: int, parts: int = 1
) -> tuple[Column, Column, Column, Column]:
    high, wide = tile
    slots = gpu.sms * room
    blocks = np.ceil(kernel.height * rows / high) * np.ceil(kernel.width / wide) * kernel.groups * parts
    need = blocks / slots
    reach = gpu.tflops * 1000 * drawn.product * (drawn.winograd if kernel.winograd else 1.0)  # operations a ns
    operations = 2.0 * high * wide * kernel.depth / parts  # of a block, its edges outside of the product too
    wave_ns = operations * slots / reach
    waves = np.ceil(need) if drawn.waves else np.maximum(1.0, need)
    waves = np.where(need < 1, np.maximum(need, 1 / room) ** drawn.fill, waves)
    moved = (kernel.reads + kernel.writes) * rows + kernel.weights
    if parts > 1:
        moved = moved + 2 * parts * kernel.height * kernel.width * kernel.groups * _BYTES * rows
    bytes_ns = moved / (gpu.gbps * drawn.memory * np.minimum(1.0, need / drawn.enough))
    ns = kernel.steps * (1000 * drawn.ramp_us + np.maximum(waves * wave_ns, bytes_ns))
    compute = kernel.steps * operations * blocks / (ns * reach * drawn.mixed)
    bandwidth = kernel.steps * moved / (ns * gpu.gbps * drawn.memory * drawn.mixed)
    return ns, need, np.minimum(1.0, compute), np.minimum(1.0, bandwidth)
