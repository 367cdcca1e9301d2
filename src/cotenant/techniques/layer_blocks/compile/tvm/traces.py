"""What a trace of TVM's MetaSchedule says of a kernel: tiles, what runs in parallel, what is unrolled. Without TVM.

A trace is a pair of lists: instructions `[name, inputs, attributes, outputs]`, and decisions `[number, value]` of those
that were sampled. The tiling is that of `SSRSRS`: spatial loops in four parts, reductions in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from msgspec import Struct

from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Problem

_FLOAT_BYTES = 4
SPATIAL = 4
"""Parts of a spatial loop: a layer's filters (in blocks), rows, columns, and filters of a block."""


class TracedKnobs(Struct, frozen=True, forbid_unknown_fields=True, tag="tvm"):
    """How TVM made a kernel: the parts of each loop, outermost first, spatial loops before reductions.

    `fused` leading loops (in the order first parts of all spatial loops, second parts, first parts of the reductions)
    run in parallel as one; up to `unroll` steps are written out. `version` and `target` are TVM's.
    """

    tiles: tuple[tuple[int, ...], ...]
    fused: int
    unroll: int
    version: str = ""
    target: str = ""

    @property
    def spatial(self) -> list[tuple[int, ...]]:
        """Parts of the spatial loops."""
        return [each for each in self.tiles if len(each) == SPATIAL]

    @property
    def tasks(self) -> int:
        """The parallel extent."""
        return prod(self._leading())

    @property
    def parallelism(self) -> int:
        """The parallel extent times what may be unrolled."""
        return self.tasks * max(1, self.unroll)

    def task_tile(self) -> list[int]:
        """What one task makes: its extent along each spatial loop."""
        parts = [list(each) for each in self.spatial]
        for at in range(len(self._leading())):
            parts[at % len(parts)][at // len(parts)] = 1
        return [prod(each) for each in parts]

    def _leading(self) -> list[int]:
        """Extents of the loops that are fused."""
        loops = [each[part] for part in (0, 1) for each in self.spatial]
        return loops[: self.fused]


def read_trace(trace: Sequence[Any], version: str = "", target: str = "") -> TracedKnobs:
    """The knobs that a trace stands for. Raises CompileError when it is not of this tiling."""
    try:
        instructions, decisions = trace
        decided = {int(at): value for at, value in decisions}
        tiles, unroll, fused = [], 0, 0
        order: list[str] = []
        loops: list[str] | None = None
        is_after = False
        for at, (name, inputs, attributes, outputs) in enumerate(instructions):
            if name == "SamplePerfectTile" and not is_after:
                tiles.append(tuple(int(each) for each in decided[at]))
            elif name == "SampleCategorical" and not is_after:
                unroll = int(attributes[0][int(decided[at])])
            elif name == "Reorder" and not is_after:
                order = list(inputs)
            elif name == "EnterPostproc":
                is_after = True
            elif name == "GetLoops" and is_after and loops is None and len(outputs) >= len(order):
                loops = list(outputs)
            elif name == "Fuse" and loops and not fused and inputs[0] == loops[0]:
                fused = len(inputs)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CompileError(
            f"a trace of TVM cannot be read: {error!r}; install the version that the extra tvm names"
        ) from error
    if not tiles or not order or sum(map(len, tiles)) != len(order):
        raise CompileError("a trace of TVM has no tiles of SSRSRS; install the version that the extra tvm names")
    return TracedKnobs(tuple(tiles), fused, unroll, version, target)


def task_bytes(problem: Problem, knobs: TracedKnobs, lanes: int) -> int:
    """What a task touches: weights, the input that they are multiplied with, and the output."""
    blocks, rows, columns, part = knobs.task_tile()
    filters = blocks * part
    high, wide = problem.extent
    deep = problem.channels // problem.groups
    read = ((rows - 1) * problem.stride[0] + high) * ((columns - 1) * problem.stride[1] + wide)
    taps = problem.kernel[0] * problem.kernel[1]
    channels = filters if problem.is_depthwise else deep
    return _FLOAT_BYTES * (filters * deep * taps + read * channels + filters * rows * columns)
