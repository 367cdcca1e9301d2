"""Files of other servers and frameworks, which no engine here reads: what to do with each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_EXPORT = "export it as ONNX, or as .pt2 with torch.export"
FOREIGN = {
    ".xml": "OpenVINO IR is not read; convert the model that it was made from to ONNX",
    ".tflite": "TensorFlow Lite is not read; convert it with tf2onnx (python -m tf2onnx.convert --tflite FILE)",
    ".pb": "a TensorFlow graph is not read; convert it with tf2onnx",
    ".h5": "a Keras file is not read; convert it with tf2onnx",
    ".keras": "a Keras file is not read; export it with model.export(..., format='onnx')",
    ".joblib": "a pickle is not read; convert the estimator with skl2onnx.to_onnx",
    ".pkl": "a pickle is not read; convert the estimator with skl2onnx.to_onnx",
    ".pt": f"a pickle of torch is not read; {_EXPORT}",
    ".pth": f"a pickle of torch is not read; {_EXPORT}",
    ".safetensors": f"these are weights without a graph; {_EXPORT}",
    ".plan": "a TensorRT engine is not read; take the ONNX file that it was built from",
    ".engine": "a TensorRT engine is not read; take the ONNX file that it was built from",
    "MLmodel": "an MLflow model is not read; convert its model to ONNX",
}
"""By suffix or name: formats of other servers, and what to do with such a file."""


def remedy_of(path: Path) -> str:
    """What to do with a file of another format; empty where the format is not known."""
    return FOREIGN.get(path.name) or FOREIGN.get(path.suffix.lower()) or ""


def foreign_words(folder: Path) -> str:
    """What to do with the first file of another format in a directory or right below; empty where there is none."""
    for each in (folder, *(entry for entry in entries_of(folder) if entry.is_dir())):
        for path in files_of(each):
            if remedy := remedy_of(path):
                return f"{path}: {remedy}"
    return ""


def files_of(folder: Path) -> Iterator[Path]:
    """The regular files right in a directory, by name; none where it is no directory."""
    return (path for path in entries_of(folder) if path.is_file())


def entries_of(folder: Path) -> list[Path]:
    """What lies right in a directory, by name; nothing where it is no directory."""
    return sorted(Path(entry.path) for entry in os.scandir(folder)) if folder.is_dir() else []
