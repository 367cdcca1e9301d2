"""The README: its commands run as they are written, its figures are those of the kept results, and it stays short."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import urllib.request
from pathlib import Path
from subprocess import run as run_process

import onnx
import pytest
from onnx import TensorProto

from onnx_samples import Sketch, info
from processes import serving

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ").split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.removeprefix("$ ").startswith(("cotenant ", "make ", "curl "))
]
SLOW = {"make demo", "make test"}
"""Not run here: each takes minutes."""
SERVING = {"cotenant serve models/", "curl -d @request.json localhost:8000/v2/models/minilm/infer"}
"""Run together: the request is sent by hand, to a port that is free."""

sys.path.insert(0, str(ROOT / "scripts"))
import draw_design  # noqa: E402
import draw_readme  # noqa: E402


def embedding() -> onnx.ModelProto:
    """A stand-in for the model of the README: token ids and their mask to one vector."""
    s = Sketch()
    tokens = s.op("Cast", "input_ids", to=TensorProto.FLOAT)
    mask = s.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    s.op("ReduceSum", s.op("Mul", tokens, mask), s.constant([1]), out="embedding", keepdims=1)
    dims = ["batch", "tokens"]
    inputs = [info(name, dims, TensorProto.INT64) for name in ("input_ids", "attention_mask")]
    return s.model(inputs, [info("embedding", ["batch", 1])])


def side_file(name: str) -> str:
    """A file of the README: the right side of the block that names it, from its line to that of the next file."""
    block = next(block for block in BLOCKS if re.search(rf"^{re.escape(name)} ", block, re.MULTILINE))
    lines = block.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(f"{name} "))
    left = re.match(r"\S+ +", lines[first])
    assert left is not None
    found = [lines[first][left.end() :]]
    for line in lines[first + 1 :]:
        if line[: left.end()].strip():
            break
        found.append(line[left.end() :])
    return "\n".join(found) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the README, a small model in place of the real ones, and what `init` makes of it."""
    folder = tmp_path_factory.mktemp("readme")
    onnx.save(embedding(), folder / "minilm.onnx")
    assert "minilm" in cotenant(folder, next(command for command in COMMANDS if command.split()[1] == "init"))
    config = folder / "models" / "minilm" / "config.toml"
    text = re.sub("slo_ms = .*", "slo_ms = 20000", config.read_text(encoding="utf-8"))  # for a busy machine, too
    config.write_text(text, encoding="utf-8")
    (folder / "workload.toml").write_text(side_file("workload.toml").replace("10.0", "1.0"), encoding="utf-8")
    (folder / "request.json").write_text(side_file("request.json"), encoding="utf-8")
    (folder / "demo").symlink_to(folder)
    (folder / "examples").mkdir()
    tenants = '[[device]]\nname = "cpu"\ncores = 1\n\n[[tenant]]\nname = "minilm"\nrate = 1\n'
    (folder / "examples" / "tenants.toml").write_text(tenants, encoding="utf-8")
    return folder


def cotenant(place: Path, command: str, *more: str) -> str:
    """What a command of the README prints, which has to succeed. The run of the test has few queries."""
    command = re.sub(r"explain \d+", "explain 7", command)
    words = [sys.executable, "-m", *shlex.split(command), *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    done = run_process(words, cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_commands_run_as_they_are_written(place: Path) -> None:
    assert set(COMMANDS) > SLOW | SERVING
    left = [command for command in COMMANDS if command not in SLOW | SERVING]
    assert all(command.startswith("cotenant ") for command in left)
    for command in [each for each in left if each.split()[1] in ("models", "profile")]:
        assert "minilm" in cotenant(place, command)
        left.remove(command)
    with serving(place / "models") as server:
        body = (place / "request.json").read_bytes()
        request = urllib.request.Request(f"{server.url}/v2/models/minilm/infer", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["x-cotenant-outcome"] == "answered"
            assert json.load(answer)["model_name"] == "minilm"
        for command in [each for each in left if each.split()[1] in ("infer", "load")]:
            words = {"infer": "embedding  float32[1, 1]: 9883", "load": "minilm"}[command.split()[1]]
            assert words in cotenant(place, command, "--http", server.url)
            left.remove(command)
    left = [each for each in left if each.split()[1] not in ("init", "doctor")]  # run above; of this machine
    for command in left:
        assert cotenant(place, command).strip(), command
    assert {command.split()[1] for command in left} == {"explain", "plan", "simulate"}


def test_figures_are_those_of_the_kept_results() -> None:
    result = draw_readme.kept()
    assert draw_readme.table(result) in README
    for name, content in draw_readme.drawn().items():
        assert (draw_readme.FOLDER / name).read_text(encoding="utf-8") == content, "run scripts/draw_readme.py"
        assert f"docs/pictures/{name}" in README
    summary = result["summary"]
    assert f"**{summary['over_triton_tuned_1x']:.1f} times Triton's" in README
    bound = json.loads((ROOT / "bench" / "results" / "overload.json").read_text(encoding="utf-8"))["summary"]
    assert f"**{bound['default_of_bound_served']:.2f} of the best possible" in README


def test_it_is_short_and_the_index_names_all_pages() -> None:
    assert len(README.splitlines()) <= 150
    assert max(map(len, README.splitlines())) <= 160
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index]
    assert missing == ["README.md"], "pages that the index does not name"


def test_the_picture_of_the_design_is_that_of_the_registry() -> None:
    for name, content in draw_design.drawn().items():
        assert (draw_readme.FOLDER / name).read_text(encoding="utf-8") == content, "run scripts/draw_design.py"
        assert f"pictures/{name}" in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
