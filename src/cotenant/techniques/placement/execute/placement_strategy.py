"""Run strategy `placement`: a model runs over the cores of a share, or over a stream and cores beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.protocol import Followed
from cotenant.execute.runner import Runner
from cotenant.execute.strategy import ModelFile, RunStrategy, VersionTrial, WholeRun
from cotenant.repository import ModelVersion
from cotenant.work import Share

if TYPE_CHECKING:
    from cotenant.execute.gpu.streams import StreamLane

_log = logging.getLogger("cotenant.placement")


class PlacementRunStrategy(RunStrategy):
    """Lets models of onnxruntime and torch follow placements, with `[model] placement = "auto"`, if they gain.

    Other models, and those on compiled kernels, run sequentially.
    """

    @override
    def open(self, file: ModelFile, inner: Callable[[], Runner]) -> Runner:
        model = inner()
        if file.path.suffix == ".onnx" and not model.kernels:
            from cotenant.execute.onnx.segments import SegmentedModel
            from cotenant.techniques.placement.execute.placed_model import PlacedModel

            return PlacedModel(model) if isinstance(model, SegmentedModel) else model
        if file.path.suffix == ".pt2":
            from cotenant.execute.torch.model import TorchModel
            from cotenant.techniques.placement.execute.placed_torch import PlacedTorch

            return PlacedTorch(model) if isinstance(model, TorchModel) else model
        return model

    @override
    def measures(self, found: ModelVersion) -> str:
        return "" if found.config.model.placement == "none" else "its placements"

    @override
    def choose(self, model: Runner, trial: VersionTrial) -> Mapping[int, float]:
        """Time ratios of the placements that gain, by size of share. A warning says why there is none."""
        from cotenant.techniques.placement.execute.placeable import Placeable
        from cotenant.techniques.placement.execute.placed_model import PlacedModel
        from cotenant.techniques.placement.measure.placed import follow_fast

        name = trial.found.model
        if not isinstance(model, Placeable if isinstance(trial.target, StreamTarget) else PlacedModel):
            why = "has compiled kernels" if model.kernels else "does not run on onnxruntime"
            _log.warning("model %r: placement is 'auto', but it %s: it runs sequentially", name, why)
            return {}
        gains = follow_fast(model, trial)
        if not gains:
            _log.warning(
                "model %r: placement is 'auto', but no placement gains: 'cotenant place REPOSITORY %s' searches one",
                *(name, name),
            )
        return gains

    @override
    def follow(self, model: Runner, graphs: Path, chosen: Followed) -> None:
        """Follow these placements, which are kept beside the graphs."""
        from cotenant.techniques.placement.execute.kept_placements import follow

        follow(model, graphs, chosen)

    @override
    def on_stream(self, model: Any, share: Share, lane: StreamLane, cores: Sequence[int]) -> WholeRun | None:
        from cotenant.techniques.placement.execute.placed_torch import placed_stream

        return placed_stream(model, share, lane, cores)
