"""Plausible inputs of batch 1 for the zoo's models, at their declared shapes, for load generators and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cotenant.zoo import ocr, small
from cotenant.zoo.errors import ZooError
from cotenant.zoo.graph import Array

_TEXT = (
    "planned promised enforced latency target tenant query batch segment partition deadline headroom group plan "
    "invoice total amount shipped address quantity delivery monday morning river window letter garden music"
)
_WORDS = tuple(_TEXT.split())
_CLS, _SEP, _FIRST_WORD, _LAST_WORD = 101, 102, 1996, 29612  # in BERT's uncased vocabulary; words lie between
_TOKENS = (32, 128)
_MAGIKA_SIDE = 1024  # bytes taken from either end of a file
_MAGIKA_BLOCK = 4096  # bytes searched for them at either end
_MAGIKA_PADDING = 256
_SILERO_CONTEXT, _SILERO_CHUNK, _SILERO_RATE_HZ = 64, 512, 16000


def magika_input(content: bytes) -> dict[str, Array]:
    """Input `bytes` of magika for a file, INT32 [1, 2048]: its stripped beginning and end, padded with 256."""
    whole = len(content) <= _MAGIKA_BLOCK
    beginning, end = content[:_MAGIKA_BLOCK].lstrip(), content[-_MAGIKA_BLOCK:].rstrip()
    if whole:
        beginning, end = content.strip(), content.strip()
    values = np.full(2 * _MAGIKA_SIDE, _MAGIKA_PADDING, np.int32)
    beginning, end = beginning[:_MAGIKA_SIDE], end[-_MAGIKA_SIDE:]
    values[: len(beginning)] = list(beginning)
    values[len(values) - len(end) :] = list(end)
    return {"bytes": values[None]}


def silero_input(chunk: Array, context: Array | None = None, state: Array | None = None) -> dict[str, Array]:
    """Inputs of silero-vad for 512 new samples of 16 kHz audio.

    `context` is the last 64 samples of the previous chunk, `state` its output `stateN`; a stream starts without them.
    """
    context = np.zeros(_SILERO_CONTEXT, np.float32) if context is None else context
    state = np.zeros((2, 1, 128), np.float32) if state is None else state
    return {"input": np.concatenate((context, chunk)).astype(np.float32)[None], "state": state}


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), count))


def _detection(rng: np.random.Generator) -> dict[str, Array]:
    page = np.full((320, 320, 3), 255, np.uint8)
    drawn = ocr.draw_picture([_words(rng, 2) for _ in range(4)], size=22)[:320, :320]
    page[: drawn.shape[0], : drawn.shape[1]] = drawn
    return {"x": ocr.detection_input(page)}


def _line(rng: np.random.Generator) -> Array:
    return ocr.draw_picture([_words(rng, 1)], size=32)[16:64]


def _orientation(rng: np.random.Generator) -> dict[str, Array]:
    line = _line(rng)
    return {"x": ocr.orientation_input(line[::-1, ::-1] if rng.random() < 0.5 else line)}


def _recognition(rng: np.random.Generator) -> dict[str, Array]:
    return {"x": ocr.recognition_input(_line(rng))}


def _magika(rng: np.random.Generator) -> dict[str, Array]:
    return magika_input(_words(rng, int(rng.integers(20, 600))).encode())


def _silero(rng: np.random.Generator) -> dict[str, Array]:
    seconds = np.arange(_SILERO_CHUNK) / _SILERO_RATE_HZ
    tone = 0.2 * np.sin(2 * np.pi * rng.uniform(100, 300) * seconds)
    return silero_input((tone + 0.02 * rng.standard_normal(_SILERO_CHUNK)).astype(np.float32))


def _tokens(rng: np.random.Generator) -> dict[str, Array]:
    length = _TOKENS[int(rng.integers(0, len(_TOKENS)))]
    used = int(rng.integers(length // 2, length + 1))
    input_ids = np.zeros((1, length), np.int64)
    mask = np.zeros((1, length), np.int64)
    input_ids[0, :used] = [_CLS, *rng.integers(_FIRST_WORD, _LAST_WORD, used - 2), _SEP]
    mask[0, :used] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def _image(rng: np.random.Generator) -> dict[str, Array]:
    """Normalised pixels have mean 0 and variance 1 per channel, whatever the picture."""
    return {"input": rng.standard_normal((1, 3, 224, 224), np.float32)}


def _row(rng: np.random.Generator) -> dict[str, Array]:
    return {"x": rng.standard_normal((1, 16), np.float32)}


def _click(rng: np.random.Generator) -> dict[str, Array]:
    ids = rng.integers(0, small.ROWS, (1, small.TABLES))
    return {"dense": rng.standard_normal((1, small.DENSE), np.float32), "ids": ids}


_SAMPLES: dict[str, Callable[[np.random.Generator], dict[str, Array]]] = {
    "bert_base": _tokens,
    "bert_large": _tokens,
    "identity": _row,
    "magika": _magika,
    "minilm": _tokens,
    "mlp_recommender": _click,
    "mobilenet_v2": _image,
    "ocr_detection": _detection,
    "ocr_orientation": _orientation,
    "ocr_recognition": _recognition,
    "resnet50": _image,
    "silero_vad": _silero,
    "tiny": _row,
}


def sample_inputs(model: str, rng: np.random.Generator) -> dict[str, Array]:
    """Draw inputs of batch 1 for a model of the zoo. Raises ZooError for an unknown model."""
    if model not in _SAMPLES:
        raise ZooError(f"model {model!r} has no sample inputs; expected one of: {', '.join(sorted(_SAMPLES))}")
    return _SAMPLES[model](rng)
