"""Read the text in a picture with the three OCR models of the quick-start repository.

    python examples/read_picture.py                               # draws a picture and reads it in this process
    python examples/read_picture.py receipt.png                   # reads a file
    python examples/read_picture.py --url http://127.0.0.1:8000   # through a running 'cotenant serve models/'

Needs: pip install 'cotenant[zoo]' && pip install --no-deps rapidocr-onnxruntime==1.4.4
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

import cotenant
from cotenant import zoo

LINES = ("Planned, promised and enforced", "Total: 1,234.56 EUR", "98 % answered in time")


def in_process(root: Path) -> zoo.ocr.Infer:
    """Open one session per model; return what runs them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {
        model: ort.InferenceSession(root / model / "1" / "model.onnx", options, providers=["CPUExecutionProvider"])
        for model in (zoo.ocr.DETECTION, zoo.ocr.ORIENTATION, zoo.ocr.RECOGNITION)
    }

    def infer(model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = sessions[model]
        return dict(zip((o.name for o in session.get_outputs()), session.run(None, inputs), strict=True))

    return infer


def over_http(url: str) -> zoo.ocr.Infer:
    """Return what sends queries to a server."""
    client = cotenant.Client(url)
    return lambda model, inputs: client.infer(model, inputs).outputs


def load_picture(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Read the text in a picture.")
    parser.add_argument("picture", type=Path, nargs="?", help="an image file; without one, a picture is drawn")
    parser.add_argument("--models", type=Path, default=Path("models"), help="the model repository (made if missing)")
    parser.add_argument("--url", help="a server of that repository; without one, the models run in this process")
    given = parser.parse_args()
    try:
        zoo.build_repository(given.models, models=(zoo.ocr.DETECTION, zoo.ocr.ORIENTATION, zoo.ocr.RECOGNITION))
        image = zoo.ocr.draw_picture(LINES) if given.picture is None else load_picture(given.picture)
        infer = in_process(given.models) if given.url is None else over_http(given.url)
        start_ns = time.perf_counter_ns()
        lines = zoo.ocr.read_text(image, infer, zoo.ocr.load_labels(given.models / zoo.ocr.RECOGNITION / "labels.txt"))
    except (cotenant.CotenantError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(f"{line.score:.3f}  {line.box}  {line.text}")
    print(f"{len(lines)} lines in {(time.perf_counter_ns() - start_ns) / 1e6:.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
