"""Cores as a device that has graphs: work, captured or not, runs when it is submitted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cotenant.execute.gpu.streams import CpuStreams, Named, Replay, StreamLane, _CpuLane
from cotenant.work import Share


class PromptStreams(CpuStreams):
    """As `CpuStreams`; a replay writes into the tensors that its capture gave, as on a GPU."""

    why_no_graphs = ""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def lane(self, share: Share) -> StreamLane:
        return _PromptLane(share, self)


class _PromptLane(_CpuLane):
    def __init__(self, share: Share, device: PromptStreams) -> None:
        super().__init__(share, 0)
        self._device = device

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        outputs = {name: value.clone() for name, value in work().items()}

        def replay() -> None:
            self._device.replays += 1
            for name, value in work().items():
                outputs[name].copy_(value)

        return replay, outputs
