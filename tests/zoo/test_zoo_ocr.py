"""Reading pictures: the parts on inputs whose answers can be told by hand, and the whole with the trained models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from cotenant import zoo
from cotenant.zoo import ocr
from cotenant.zoo.regions import find_regions

MODELS = (ocr.DETECTION, ocr.ORIENTATION, ocr.RECOGNITION)
EXAMPLE = Path(__file__).parents[2] / "examples" / "read_picture.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    zoo.build_repository(root, models=MODELS)
    return root


@pytest.fixture(scope="module")
def characters(root) -> list[str]:
    return ocr.load_labels(root / ocr.RECOGNITION / "labels.txt")


@pytest.fixture(scope="module")
def infer(root) -> ocr.Infer:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    sessions = {
        model: ort.InferenceSession(root / model / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])
        for model in MODELS
    }

    def run(model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = sessions[model].run(None, inputs)
        return dict(zip((o.name for o in sessions[model].get_outputs()), outputs, strict=True))

    return run


@pytest.mark.models
def test_drawn_lines_are_read_back_exactly(infer, characters):
    lines = ["Planned, promised and enforced", "Total: 1,234.56 EUR", "98 % answered in time"]
    read = ocr.read_text(ocr.draw_picture(lines), infer, characters)
    assert [line.text for line in read] == lines
    assert all(line.score > 0.9 for line in read)
    tops = [line.box[1] for line in read]
    assert tops == sorted(tops)


@pytest.mark.models
def test_a_picture_upside_down_is_read_from_its_bottom(infer, characters):
    picture = ocr.draw_picture(["Total: 1,234.56 EUR", "answered in time"])
    read = ocr.read_text(picture[::-1, ::-1], infer, characters)
    assert [line.text for line in read] == ["answered in time", "Total: 1,234.56 EUR"]


@pytest.mark.models
def test_an_empty_picture_has_no_lines(infer, characters):
    assert ocr.read_text(np.full((100, 150, 3), 255, np.uint8), infer, characters) == []


@pytest.mark.models
def test_characters_match_the_classes(infer, characters):
    assert len(characters) == 6625
    assert (characters[0], characters[-1]) == ("blank", " ")
    with pytest.raises(zoo.ZooError, match=r"6625 classes.*labels\.txt"):
        ocr.read_text(ocr.draw_picture(["some text"]), infer, characters[:-1])


@pytest.mark.models
def test_the_example_reads_its_own_picture(root):
    done = subprocess.run([sys.executable, EXAMPLE, "--models", root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Planned, promised and enforced" in done.stdout
    assert "3 lines in" in done.stdout


def test_the_example_names_a_missing_file(root, tmp_path):
    command = [sys.executable, EXAMPLE, "--models", root, tmp_path / "nothing.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nothing.png" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\]"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \[4, 4, 3\]"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \[0, 4, 3\]"),
    ],
    ids=["grey", "float", "empty"],
)
def test_what_is_no_rgb_picture_is_refused(image, found):
    with pytest.raises(zoo.ZooError, match=found):
        ocr.read_text(image, lambda model, inputs: {}, ["blank", "a"])


def test_a_served_model_that_answers_something_else_is_named():
    image = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(zoo.ZooError, match=r"ocr_detection: expected one output of rank 4, found \[1, 2\]"):
        ocr.read_text(image, lambda model, inputs: {"y": np.zeros((1, 2))}, ["blank", "a"])
    with pytest.raises(zoo.ZooError, match=r"ocr_detection: .* found nothing"):
        ocr.read_text(image, lambda model, inputs: {}, ["blank", "a"])


def test_decoding_merges_repeats_and_drops_blanks():
    steps = [1, 1, 0, 1, 2, 2, 0, 0, 3]
    probabilities = np.full((len(steps), 4), 0.1, np.float32)
    probabilities[np.arange(len(steps)), steps] = 0.7
    text, score = ocr.decode(probabilities, ["blank", "a", "b", " "])
    assert text == "aab "
    assert score == pytest.approx(0.7)
    assert ocr.decode(np.array([[0.9, 0.1]]), ["blank", "a"]) == ("", 0.0)


def test_boxes_are_grown_scaled_and_clipped():
    probabilities = np.zeros((64, 96), np.float32)
    probabilities[10:20, 20:60] = 0.9  # 40 across, 10 down: grown by 400 * 1.6 / 100 = 6.4
    probabilities[40:60, 0:30] = 0.4  # above the pixel threshold, below the region's
    assert ocr.text_boxes(probabilities, 128, 96) == [(14, 7, 66, 53)]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (100, 33), (720, 1280), (4000, 50)])
def test_detection_inputs_have_sides_of_multiples_of_32(height, width):
    tensor = ocr.detection_input(np.zeros((height, width, 3), np.uint8))
    assert tensor.shape[:2] == (1, 3)
    assert all(side % 32 == 0 and 32 <= side <= 960 for side in tensor.shape[2:])
    assert (tensor == -1).all()


def test_recognition_inputs_keep_the_aspect_and_take_few_widths():
    line = np.full((24, 100, 3), 255, np.uint8)
    tensor = ocr.recognition_input(line)
    assert tensor.shape == (1, 3, 48, 320)
    assert (tensor[..., :200] == 1).all()
    assert (tensor[..., 200:] == 0).all()
    assert ocr.recognition_input(np.zeros((10, 10000, 3), np.uint8)).shape == (1, 3, 48, 1920)


def labels_by_flood(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Reference: depth-first search over pixels."""
    left = {(int(r), int(c)) for r, c in np.argwhere(mask)}
    boxes = []
    while left:
        stack = [left.pop()]
        seen = list(stack)
        while stack:
            row, column = stack.pop()
            around = [(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            fresh = [pixel for pixel in around if pixel in left]
            left.difference_update(fresh)
            stack += fresh
            seen += fresh
        rows, columns = zip(*seen, strict=True)
        boxes.append((min(columns), min(rows), max(columns) + 1, max(rows) + 1))
    return sorted(boxes)


@settings(max_examples=150, deadline=None)
@given(
    numpy_strategies.arrays(
        np.bool_, st.tuples(st.integers(1, 12), st.integers(1, 12)), elements=st.booleans(), fill=st.nothing()
    )
)
def test_regions_agree_with_a_flood_fill(mask):
    regions = find_regions(mask.astype(np.float32), 0.5)
    assert sorted((r.left, r.top, r.right, r.bottom) for r in regions) == labels_by_flood(mask)
    assert all(r.mean == pytest.approx(1.0) for r in regions)
