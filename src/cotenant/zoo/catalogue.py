"""Models of the quick-start repository, with origin, declared shapes, batch and SLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cotenant.zoo.carriers import MAGIKA, MINILM, RAPIDOCR, SILERO, Carrier
from cotenant.zoo.errors import ZooError


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the quick-start repository. `file` is in its carrier; None: `cotenant.zoo.build` writes the model.

    `labelled`: the repository has a labels.txt with the names of its classes.

    `slo_ms` is about five times the latency alone on one core (docs/models.md) at the largest declared shape.
    """

    about: str
    slo_ms: int
    max_batch: int
    batch_note: str
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    carrier: Carrier | None
    file: str | None = None
    max_queue: int = 128
    labelled: bool = False


def _tokens(length: int) -> dict[str, tuple[int, ...]]:
    return {"input_ids": (1, length), "attention_mask": (1, length)}


ENTRIES: dict[str, Entry] = {
    "ocr_detection": Entry(
        about="PP-OCRv4 text detection: where in a picture is text? Trained weights.",
        slo_ms=500,
        max_batch=1,
        batch_note="pictures differ in size, so queries are never merged",
        shapes=({"x": (1, 3, 320, 320)}, {"x": (1, 3, 320, 640)}, {"x": (1, 3, 640, 640)}),
        carrier=RAPIDOCR,
        file="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    ),
    "ocr_orientation": Entry(
        about="PP-OCR text orientation: is a line upside down? Trained weights.",
        slo_ms=20,
        max_batch=4,
        batch_note="every line is scaled to the same size",
        shapes=({"x": (1, 3, 48, 192)},),
        carrier=RAPIDOCR,
        file="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        labelled=True,
    ),
    "ocr_recognition": Entry(
        about="PP-OCRv4 text recognition: what does a line say? Trained weights; labels.txt holds its characters.",
        slo_ms=400,
        max_batch=4,
        batch_note="lines of one padded width can be merged",
        shapes=({"x": (1, 3, 48, 320)}, {"x": (1, 3, 48, 640)}, {"x": (1, 3, 48, 960)}),
        carrier=RAPIDOCR,
        file="rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        labelled=True,
    ),
    "magika": Entry(
        about="magika: which of 214 file types do these bytes look like? Trained weights; labels.txt names the types.",
        slo_ms=30,
        max_batch=1,
        batch_note="its answers change by up to 1 % with the size of a batch, and merging saves nothing on a CPU",
        shapes=({"bytes": (1, 2048)},),
        carrier=MAGIKA,
        file="magika/models/standard_v3_3/model.onnx",
        labelled=True,
    ),
    "silero_vad": Entry(
        about="silero-vad: voice activity detection. Trained weights. One query is 32 ms of a 16 kHz stream: 512 new\n"
        "# samples after the 64 before them. Stateful: the client sends each stateN back as the next state.",
        slo_ms=20,
        max_batch=1,
        batch_note="its shapes are fixed",
        shapes=({"input": (1, 576), "state": (2, 1, 128)},),
        carrier=SILERO,
        file="silero_vad/data/silero_vad_openvino_16k.onnx",
    ),
    "minilm": Entry(
        about="all-MiniLM-L6-v2: text to a unit vector of 384; close in meaning, close in angle. Trained weights.",
        slo_ms=120,
        max_batch=8,
        batch_note="queries padded to the same length can be merged",
        shapes=(_tokens(32), _tokens(128)),
        carrier=MINILM,
    ),
    "resnet50": Entry(
        about="ResNet-50 with seeded weights: the work of an image classifier, not its answers.",
        slo_ms=250,
        max_batch=4,
        batch_note="",
        shapes=({"input": (1, 3, 224, 224)},),
        carrier=None,
    ),
}


def entry(model: str) -> Entry:
    """Entry of a model.

    Raises:
        ZooError: the quick-start repository has no such model.
    """
    if model not in ENTRIES:
        raise ZooError(f"model {model!r} is not in the quick-start repository; expected one of: {', '.join(ENTRIES)}")
    return ENTRIES[model]


def config_text(model: str, slo_ms: int | None = None) -> str:
    """Text of the `config.toml` of a model, with `slo_ms` in place of the SLO of the catalogue, if given."""
    spec = entry(model)
    return entry_text(model, replace(spec, slo_ms=slo_ms or spec.slo_ms))


def entry_text(model: str, spec: Entry) -> str:
    """Text of the `config.toml` of a model with this entry."""
    note = f"; {spec.batch_note}" if spec.batch_note else ""
    lines = [
        f"# {spec.about}",
        "",
        "[tenant]",
        f'name = "{model}"',
        f"slo_ms = {spec.slo_ms}  # SLO: largest time from arrival to response",
        "weight = 1.0  # value of a query under overload, relative to other tenants",
        "priority = 0  # 1 is the highest; 0: none",
        f"max_queue = {spec.max_queue}  # largest number of waiting queries; further ones are rejected",
        "",
        "[model]",
        f"max_batch = {spec.max_batch}  # largest number of queries in one batch{note}",
    ]
    for shapes in spec.shapes:
        lines += ["", "[[model.shapes]]  # profiled at this shape"]
        lines += [f"{name} = {list(shape)}" for name, shape in shapes.items()]
    lines += ["", "[segments]", "max_ms = 10.0  # longest segment, for which queries of other tenants wait", ""]
    return "\n".join(lines)
