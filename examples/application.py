"""Serve two applications of quick-start models and ask them: several models, one request, one SLO for the whole.

    python examples/application.py                    # builds the models in a temporary directory and serves them
    python examples/application.py --models models    # or in a repository of yours

The files of the applications are in examples/application. Needs: pip install 'cotenant[zoo]' &&
pip install --no-deps rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import cotenant
from cotenant import zoo

MODELS = ("ocr_orientation", "ocr_recognition", "silero_vad")
HERE = Path(__file__).parent / "application"


def read_lines(client: cotenant.Client, labels: list[str]) -> None:
    """A line of text, and the same one upside down."""
    line = zoo.ocr.draw_picture(["One request"])[16:64]
    for picture in (line, line[::-1, ::-1]):
        outputs = client.infer("line", {"line": zoo.ocr.recognition_input(picture)}).outputs
        text, _ = zoo.ocr.decode(outputs["characters"][0], labels)
        way = "upside down" if outputs["turned"][0].argmax() else "upright"
        print(f"a line of text, {way}: {text!r}")


def hear(client: cotenant.Client) -> None:
    """Two chunks of silence: the state of the first stage is the second one's, and never leaves the server."""
    chunk = np.zeros(512, np.float32)
    first = zoo.samples.silero_input(chunk)
    inputs = {"chunk": first["input"], "state": first["state"], "next_chunk": zoo.samples.silero_input(chunk)["input"]}
    outputs = client.infer("hear", inputs).outputs
    speech = [float(outputs[name][0, 0]) for name in ("speech", "next_speech")]
    print("speech in two chunks of silence: " + ", ".join("yes" if each > 0.5 else "no" for each in speech))


def serve(root: Path) -> None:
    """Put the files of the applications beside the models, and serve the repository."""
    zoo.build_repository(root, models=MODELS)
    for name in ("line", "hear"):
        shutil.copytree(HERE / name, root / name, dirs_exist_ok=True)
    with cotenant.Server(root) as server:
        with cotenant.Client(server.url) as client:
            read_lines(client, zoo.ocr.load_labels(root / "ocr_recognition" / "labels.txt"))
            hear(client)
        for name in ("line", "hear"):
            print(f"{name}: {server.outcomes(name)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve two applications and ask them.")
    parser.add_argument("--models", type=Path, help="the model repository; without one, a temporary one is made")
    given = parser.parse_args()
    try:
        if given.models is not None:
            serve(given.models)
        else:
            with tempfile.TemporaryDirectory() as folder:
                serve(Path(folder) / "models")
    except zoo.ZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
