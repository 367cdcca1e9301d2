"""Arithmetic of boxes with fixed shapes: anchors, decoding, RoIAlign by gathering, suppression in parallel.

A box is (left, top, right, bottom) in pixels of the input picture. Nothing here depends on the values of tensors for
its shapes, so that a detector can be exported, captured as a CUDA graph and batched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

LOG_RATIO_LIMIT = math.log(1000 / 16)
"""Largest step of a side's logarithm, as in Detectron: a wild prediction must not overflow exp."""

ASPECTS = (0.5, 1.0, 2.0)


def anchors(
    height: int, width: int, stride: float, side: float, aspects: Sequence[float] = ASPECTS, offset: float = 0.0
) -> Tensor:
    """Return [height * width * n, 4]: per cell one box of area side ** 2 for each of n aspects (height over width).

    A cell's boxes are centred `offset` of a stride behind its corner.
    """
    rows = (torch.arange(height, dtype=torch.float32) + offset) * stride
    columns = (torch.arange(width, dtype=torch.float32) + offset) * stride
    roots = torch.tensor([math.sqrt(aspect) for aspect in aspects])
    half = torch.stack([side / roots, side * roots, side / roots, side * roots], dim=1) / 2
    half = half * torch.tensor([-1.0, -1.0, 1.0, 1.0])
    top, left = torch.meshgrid(rows, columns, indexing="ij")
    centre = torch.stack([left, top, left, top], dim=2)
    return (centre[:, :, None] + half).reshape(-1, 4)


def decode(boxes: Tensor, deltas: Tensor, move: float, stretch: float, side: int) -> Tensor:
    """Move and scale `boxes` [..., 4] by `deltas` [..., 4], then clip to the square picture (R-CNN, appendix C).

    Deltas are steps of the centre in sizes of the box times `move`, and of the sides' logarithms times `stretch`.
    """
    low, high = torch.split(boxes, 2, dim=-1)
    shift, growth = torch.split(deltas, 2, dim=-1)
    size = high - low
    centre = (low + high) / 2 + size * (shift / move)
    half = size * (growth / stretch).clamp(max=LOG_RATIO_LIMIT).exp() / 2
    return torch.cat([centre - half, centre + half], dim=-1).clamp(0, side)


def overlaps(boxes: Tensor) -> Tensor:
    """Return intersection over union of all pairs: [batch, n, 4] -> [batch, n, n]; 0 where both are empty."""
    low, high = torch.split(boxes.transpose(1, 2), 2, dim=1)  # engines are slow on broadcasts that end in a 2
    lowest = torch.maximum(low.unsqueeze(3), low.unsqueeze(2))
    shared = (torch.minimum(high.unsqueeze(3), high.unsqueeze(2)) - lowest).clamp(min=0).prod(dim=1)
    area = (high - low).prod(dim=1)
    return shared / (area.unsqueeze(2) + area.unsqueeze(1) - shared).clamp(min=1e-6)


def decayed(boxes: Tensor, log_scores: Tensor, labels: Tensor | None = None, sigma: float = 0.5) -> Tensor:
    """Return log scores lowered for overlap with better boxes: Matrix NMS, Gaussian (Wang et al., NeurIPS 2020, 3.3).

    `boxes` [batch, n, 4], `log_scores` [batch, n] sorted from best to worst, `labels` [batch, n]: boxes of different
    labels do not compete. Logarithms keep scores distinct that all round to 1.
    """
    iou = overlaps(boxes)
    if labels is not None:
        iou = iou * (labels.unsqueeze(2) == labels.unsqueeze(1)).to(iou.dtype)
    squared = torch.triu(iou, diagonal=1) ** 2  # row: the better box of the pair
    excused = squared.amax(dim=1)  # a box that is itself hidden by a better one suppresses less
    return log_scores - ((squared - excused.unsqueeze(2)) / sigma).amax(dim=1)


def best_of_classes(
    boxes: Sequence[Tensor], log_scores: Sequence[Tensor], each: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best `count` boxes [batch, count, 4], their scores and labels [batch, count], the best first.

    `boxes` and `log_scores`, concatenated along the second dimension, hold `each` candidates of label 1, then as many
    of label 2 and so on.
    """
    lowered = torch.cat(list(log_scores), dim=1)
    kept, order = torch.topk(lowered, min(count, lowered.shape[1]))
    labels = torch.div(order, each, rounding_mode="floor") + 1
    return take(torch.cat(list(boxes), dim=1), order), kept.exp(), labels


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Return [batch, k, c]: of `rows` [batch, n, c] those that `index` [batch, k] names."""
    return torch.gather(rows, 1, index.unsqueeze(2).expand(-1, -1, rows.shape[2]))


def roi_align(
    flat: Tensor, rois: Tensor, base: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, out: int
) -> Tensor:
    """Sample features inside boxes: RoIAlign (He et al., ICCV 2017, section 3) with 2 x 2 samples a bin, averaged.

    `flat` [cells, channels]: the cells of all maps of all pictures, row by row. Per box of `rois` [r, 4]: `base`, where
    its map begins in `flat`; `scale`, cells per pixel; `rows`, `columns`, the size of its map (all [r]; `scale` FP32,
    the others INT64). Cell centres lie at halves. Returns [r, out, out, channels].
    """
    steps = (torch.arange(2 * out, dtype=flat.dtype, device=flat.device) + 0.5) / (2 * out)
    left, top, right, bottom = (rois * scale.unsqueeze(1)).unbind(1)

    def sample(start: Tensor, end: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Along one side: the cells of each bin's two samples and their shares, [r, out, 4]."""
        last = (size - 1).unsqueeze(1)
        place = start.unsqueeze(1) + steps * (end - start).unsqueeze(1) - 0.5
        place = torch.minimum(place.clamp(min=0), last.to(place.dtype))
        before = place.floor()
        after = place - before
        first = before.to(torch.int64)
        cells = torch.stack([first, torch.minimum(first + 1, last)], dim=2)
        shares = torch.stack([1 - after, after], dim=2) / 2
        return cells.reshape(-1, out, 4), shares.reshape(-1, out, 4)

    row, share_y = sample(top, bottom, rows)
    column, share_x = sample(left, right, columns)
    line = base.view(-1, 1, 1) + row * columns.view(-1, 1, 1)
    cells = (line.view(-1, out, 1, 4, 1) + column.view(-1, 1, out, 1, 4)).reshape(-1, 16)
    shares = (share_y.view(-1, out, 1, 4, 1) * share_x.view(-1, 1, out, 1, 4)).reshape(-1, 1, 16)
    value = torch.matmul(shares, functional.embedding(cells, flat))  # one pass over the gathered cells
    return value.reshape(-1, out, out, flat.shape[1])
