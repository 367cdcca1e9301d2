"""Text recognition in a picture by three served models: text detection, line orientation, text recognition.

The models are those of PP-OCR (Du et al., 2020). Detection yields a probability map of shrunken text regions, which are
expanded again (Liao et al., Differentiable Binarization, AAAI 2020, section 3.5). Recognition yields a sequence of
class probabilities with greedy decoding (Graves et al., Connectionist Temporal Classification, ICML 2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.zoo.errors import ZooError
from cotenant.zoo.graph import Array
from cotenant.zoo.regions import Region, find_regions

if TYPE_CHECKING:
    from types import ModuleType

DETECTION, ORIENTATION, RECOGNITION = "ocr_detection", "ocr_orientation", "ocr_recognition"

# Settings of rapidocr-onnxruntime 1.4.4 for these models (its config.yaml), unless noted.
PIXEL_THRESHOLD = 0.3
REGION_THRESHOLD = 0.5
GROWTH = 1.6
ORIENTATION_SIZE = (48, 192)  # height, width
FLIP_THRESHOLD = 0.9
TEXT_THRESHOLD = 0.5
LINE_HEIGHT = 48
LINE_WIDTH_STEP = 320  # own choice: few widths, so that lines of several pictures can share a batch
LINE_WIDTH_MAX = 1920  # own choice: bounds the work of one query
DETECTION_STEP = 32  # the detector halves the picture five times
DETECTION_SIDE_MAX = 960  # own choice: bounds the work of one query

Infer = Callable[[str, dict[str, Array]], Mapping[str, Array]]
"""(model, inputs by name) -> outputs by name."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line read: its text, the mean probability of its characters, its box (left, top, right, bottom) in pixels."""

    text: str
    score: float
    box: tuple[int, int, int, int]


def _pillow() -> tuple[ModuleType, ModuleType, ModuleType]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ZooError("reading and drawing pictures needs Pillow; run: pip install 'cotenant[zoo]'") from None
    return Image, ImageDraw, ImageFont


def _normalised(image: Array, height: int, width: int) -> Array:
    """Resize UINT8 RGB to FP32 [3, height, width], blue first as these models were trained, -1 to 1."""
    image_module = _pillow()[0]
    resized = image_module.fromarray(image).resize((width, height), image_module.Resampling.BILINEAR)
    pixels = np.asarray(resized, np.float32)[:, :, ::-1].transpose(2, 0, 1)
    return np.ascontiguousarray(pixels / 127.5 - 1.0)


def detection_input(image: Array) -> Array:
    """Return FP32 [1, 3, height, width], sides rounded to multiples of 32 and at most 960."""
    height, width = image.shape[:2]
    scale = min(1.0, DETECTION_SIDE_MAX / max(height, width))
    rounded = [max(1, round(side * scale / DETECTION_STEP)) * DETECTION_STEP for side in (height, width)]
    return _normalised(image, *rounded)[None]


def orientation_input(line: Array) -> Array:
    """Return FP32 [1, 3, 48, 192] of a line's picture, padded at the right."""
    height, width = ORIENTATION_SIZE
    return _padded(line, height, width)


def recognition_input(line: Array) -> Array:
    """Return FP32 [1, 3, 48, n * 320] of a line's picture, padded at the right."""
    width = math.ceil(LINE_HEIGHT * line.shape[1] / line.shape[0])
    rounded = min(LINE_WIDTH_MAX, math.ceil(width / LINE_WIDTH_STEP) * LINE_WIDTH_STEP)
    return _padded(line, LINE_HEIGHT, rounded)


def _padded(line: Array, height: int, width: int) -> Array:
    inked = min(width, math.ceil(height * line.shape[1] / line.shape[0]))
    padded = np.zeros((1, 3, height, width), np.float32)
    padded[0, :, :, :inked] = _normalised(line, height, inked)
    return padded


def text_boxes(probabilities: Array, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """Turn the detector's map [rows, columns] into boxes on a picture of height x width pixels, top to bottom."""
    rows, columns = probabilities.shape

    def grow(region: Region) -> tuple[int, int, int, int]:
        across, down = region.right - region.left, region.bottom - region.top
        margin = across * down * GROWTH / (2 * (across + down))
        return (
            max(0, round((region.left - margin) * width / columns)),
            max(0, round((region.top - margin) * height / rows)),
            min(width, round((region.right + margin) * width / columns)),
            min(height, round((region.bottom + margin) * height / rows)),
        )

    regions = find_regions(probabilities, PIXEL_THRESHOLD)
    kept = [r for r in regions if r.mean > REGION_THRESHOLD and min(r.right - r.left, r.bottom - r.top) > 2]
    boxes = [box for box in map(grow, kept) if box[2] - box[0] > 3 and box[3] - box[1] > 3]
    return sorted(boxes, key=lambda box: (box[1], box[0]))


def decode(probabilities: Array, characters: Sequence[str]) -> tuple[str, float]:
    """Decode one line's [steps, classes] greedily: repeats merged, class 0 (blank) left out; text and mean score.

    Raises:
        ZooError: `characters` has not one entry per class.
    """
    if probabilities.shape[-1] != len(characters):
        raise ZooError(
            f"{RECOGNITION}: the model has {probabilities.shape[-1]} classes, characters has {len(characters)}; "
            "expected the labels.txt written beside the model's config.toml"
        )
    best = probabilities.argmax(axis=1)
    kept = best != 0
    kept[1:] &= best[1:] != best[:-1]
    score = float(probabilities.max(axis=1)[kept].mean()) if kept.any() else 0.0
    return "".join(characters[index] for index in best[kept]), score


def read_text(image: Array, infer: Infer, characters: Sequence[str]) -> list[TextLine]:
    """Read the lines of text in a picture, top to bottom.

    Args:
        image: UINT8 RGB [height, width, 3].
        infer: runs a served model: `infer(model, inputs) -> outputs`; called once for detection and twice per line.
        characters: characters of the recognition model by class, as `load_labels` reads them.

    Raises:
        ZooError: the picture has another shape or type. Or a model returned other outputs than one tensor of the
            expected rank, or `characters` does not fit the recognition model.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise ZooError(f"image: expected uint8 [height, width, 3] in RGB, found {image.dtype} {list(image.shape)}")
    probabilities = _only(infer, DETECTION, detection_input(image), 4)[0, 0]
    lines = []
    for box in text_boxes(probabilities, *image.shape[:2]):
        left, top, right, bottom = box
        line = image[top:bottom, left:right]
        if line.shape[0] >= 1.5 * line.shape[1]:
            line = np.rot90(line)
        upright, flipped = _only(infer, ORIENTATION, orientation_input(line), 2)[0, :2]
        if flipped > upright and flipped > FLIP_THRESHOLD:
            line = line[::-1, ::-1]
        text, score = decode(_only(infer, RECOGNITION, recognition_input(line), 3)[0], characters)
        if text and score >= TEXT_THRESHOLD:
            lines.append(TextLine(text, score, box))
    return lines


def _only(infer: Infer, model: str, tensor: Array, rank: int) -> Array:
    outputs = list(infer(model, {"x": tensor}).values())
    if len(outputs) != 1 or outputs[0].ndim != rank:
        found = ", ".join(str(list(output.shape)) for output in outputs) or "nothing"
        raise ZooError(f"{model}: expected one output of rank {rank}, found {found}")
    return outputs[0]


def load_labels(path: Path) -> list[str]:
    """Read a `labels.txt` of a repository, with one class per line; a class may be white space."""
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


def draw_picture(lines: Sequence[str], *, size: int = 32) -> Array:
    """Draw the lines in black on white, `size` pixels high; UINT8 RGB [height, width, 3], sides multiples of 32.

    Words have two spaces between them: the recognition model, trained mostly on Chinese text, misses narrower gaps.
    """
    image_module, draw_module, font_module = _pillow()
    font: Any = font_module.load_default(size=size)
    spaced = [line.replace(" ", "  ") for line in lines]
    width = max((math.ceil(font.getlength(line)) for line in spaced), default=0) + 2 * size
    height = 2 * size * len(spaced) + size
    sides = [math.ceil(side / DETECTION_STEP) * DETECTION_STEP for side in (width, height)]
    picture = image_module.new("RGB", sides, "white")
    draw = draw_module.Draw(picture)
    for index, line in enumerate(spaced):
        draw.text((size, size // 2 + 2 * size * index), line, fill="black", font=font)
    return np.asarray(picture).copy()
