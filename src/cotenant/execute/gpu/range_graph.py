"""A captured range of units, with the tensors that it reads and writes at every replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cotenant.execute.gpu.streams import Captured, Named, StreamLane


class RangeGraph:
    """Copies values in, replays, and gives tensors that later replays do not touch."""

    def __init__(self, inputs: Named, captured: Captured) -> None:
        self._inputs = inputs
        self._captured = captured

    @classmethod
    def of(cls, lane: StreamLane, values: Named, owner: int, run: Callable[[Named], Named]) -> RangeGraph:
        """Capture `run` on the current stream, at the shapes of `values`, which lie on the device or on the host.

        Raises what `StreamLane.capture` raises.
        """
        inputs = {name: lane.upload(value).clone() for name, value in values.items()}
        return cls(inputs, lane.capture(lambda: run(inputs), owner))

    def fill(self, values: Named) -> None:
        """Submit the copies of what the next replay reads."""
        for name, tensor in self._inputs.items():
            tensor.copy_(values[name], non_blocking=True)

    def replay(self) -> dict[str, torch.Tensor]:
        """Submit the range. A paused batch outlives the next replay, so its tensors are copies."""
        self._captured.replay()
        return {name: tensor.clone() for name, tensor in self._captured.outputs.items()}
