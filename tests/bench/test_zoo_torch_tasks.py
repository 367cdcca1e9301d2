"""The zoo's torch modules beyond classifiers: detectors, encoders, the recurrent classifier, the recommender."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from bench import zoo
from bench.zoo import (
    boxes,
    detection,
    ensemble,
    export,
    language,
    plain,
    rcnn,
    recommender,
    recurrent,
    seeding,
    yolo,
)
from bench.zoo.mobile import InvertedResidual
from cotenant.graph.dfg import Dfg
from cotenant.graph.onnx import load_dfg
from cotenant.zoo import ZooError


def thinned(made: zoo.Definition) -> zoo.Definition:
    """SSD without the backbone's residual blocks, which teach nothing new and take their time to export."""
    for number, block in enumerate(made.module.backbone):
        if isinstance(block, InvertedResidual) and block.residual and number != detection.SPLIT:
            made.module.backbone[number] = torch.nn.Identity()
    return made


class TinySsd(detection.SsdMobileNet):
    """One map of 4 x 4 cells, four anchors a cell, eight classes and the background."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.classes = 9
        self.heads = torch.nn.ModuleList(torch.nn.Conv2d(3, 4 * width, 8, 8) for width in (4, 9))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps, logits = (head(image).permute(0, 2, 3, 1).flatten(1) for head in self.heads)
        return torch.unflatten(steps, 1, (-1, 4)), torch.unflatten(logits, 1, (-1, 9))

    def anchors(self, side: int) -> torch.Tensor:
        return boxes.anchors(4, 4, side / 4, side / 3, (0.5, 1.0, 2.0, 3.0), 0.5)


def small_detector(by_class: bool) -> zoo.Definition:
    return detection.detector_definition(TinySsd, "", 32, 1, by_class=by_class)


def three_lenets() -> zoo.Definition:
    return ensemble.definition(dict.fromkeys("abc", plain.DEFINITIONS["lenet"]))


RCNN = rcnn.RcnnShape(side=64, blocks=(1, 1, 1, 1), channels=16, hidden=24, classes=5)
BERT = language.BertShape(layers=1, hidden=16, heads=2, intermediate=32, vocabulary=50, positions=12)
BST = recommender.BstShape(items=40, categories=9, profile=(7, 5), ages=6, history=4, width=16, heads=2, mlp=(16, 8))
SMALL: dict[str, Callable[[], zoo.Definition]] = {
    "bert": lambda: language.definition(BERT, "", 1, length=8),
    "bst": lambda: recommender.definition(BST),
    "lstm": lambda: recurrent.definition(vocabulary=30, embedding=8, hidden=12, length=6),
    "tiny_yolov2": lambda: yolo.definition((4, 4, 4, 8, 8, 8, 8, 8), side=64),
    "ssd_mobilenet": lambda: thinned(detection.definition(classes=3, side=64)),
    "mask_rcnn": lambda: rcnn.definition(rcnn.MaskRcnn, RCNN),
    "ensemble": three_lenets,
}
SLOW = ("mask_rcnn",)
"""Traced at batch 1: an open batch doubles the time that its export takes."""


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def small(name: str) -> zoo.Model:
    made = SMALL[name]()
    seeding.seed_weights(made.module, 0)
    made.module.eval().requires_grad_(False)
    return zoo.Model(name, made.module, made.inputs, made.outputs, made.batched, limits=made.limits)


def run(model: zoo.Model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        found = model.module(**inputs)
    return dict(zip(model.outputs, found if isinstance(found, tuple) else (found,), strict=True))


def on_meta(name: str) -> zoo.Definition:
    with torch.device("meta"):
        return zoo.define(name)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def channels(module: torch.nn.Module) -> int:
    """Of all batch normalisations."""
    return sum(part.num_features for part in module.modules() if isinstance(part, torch.nn.BatchNorm2d))


@pytest.mark.parametrize(
    ("name", "per_channel", "published"),
    [
        ("bert_base", 0, 109_482_240),
        ("bert_large", 0, 335_141_888),
        ("faster_rcnn", -2, 41_755_286),  # the frameworks freeze batch normalisations, so do not count their parameters
        ("mask_rcnn", -2, 44_401_393),
        ("ssd_mobilenet", -1, 16_818_207),  # 16.818 million after folding, which leaves a bias a channel
        ("tiny_yolov2", 2, 15_867_885),  # darknet's file has the means and variances too
    ],
)
def test_as_many_parameters_as_published(name: str, per_channel: int, published: int) -> None:
    module = on_meta(name).module
    assert parameters(module) + per_channel * channels(module) == published


def test_ssd_on_vgg16_has_the_published_size() -> None:
    """As the frameworks' reference model, which is for COCO; the paper's VOC model is the same with fewer classes."""
    with torch.device("meta"):
        made = detection.vgg_definition(classes=91)
    assert parameters(made.module) == 35_641_826
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        detection.vgg_definition().module(torch.empty(1, 3, 300, 300))
    assert counted.get_total_flops() / 2e9 == pytest.approx(31.4, abs=0.05)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("bert_base", [(2, 128, 768), (2, 768)]),
        ("bert_large", [(2, 128, 1024), (2, 1024)]),
        ("bst", [(2, 1)]),
        ("ensemble", [(2, 1000)]),
        ("faster_rcnn", [(2, 100, 4), (2, 100), (2, 100)]),
        ("lstm_classifier", [(2, 2)]),
        ("mask_rcnn", [(2, 100, 4), (2, 100), (2, 100), (2, 100, 28, 28)]),
        ("ssd_mobilenet", [(2, 1917, 4), (2, 1917, 91)]),
        ("ssd_mobilenet_by_class", [(2, 100, 4), (2, 100), (2, 100)]),
        ("ssd_resnet34", [(2, 100, 4), (2, 100), (2, 100)]),
        ("ssd_vgg16", [(2, 8732, 4), (2, 8732, 21)]),
        ("tiny_yolov2", [(2, 125, 13, 13)]),
    ],
)
def test_shapes_of_outputs(name: str, shapes: list[tuple[int, ...]]) -> None:
    made = on_meta(name)
    inputs = {
        key: torch.empty((2, *shape[1:]), dtype=getattr(torch, dtype), device="meta")
        for key, (dtype, shape) in made.inputs.items()
    }
    found = made.module.eval()(**inputs)
    assert [tuple(x.shape) for x in (found if isinstance(found, tuple) else (found,))] == shapes
    assert len(made.outputs) == len(shapes)


@pytest.mark.parametrize("name", SMALL)
def test_both_files_answer_as_the_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(small(name), batched=name not in SLOW)
    traced = export.exported(model)
    monkeypatch.setattr(export, "exported", lambda _model: traced)  # once for both files: it takes half of the time
    zoo.save_onnx(model, tmp_path / "model.onnx")
    zoo.save_pt2(model, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == list(model.inputs)
    assert [x.name for x in session.get_outputs()] == list(model.outputs)
    for batch in (1, 3) if model.batched else (1,):
        inputs = zoo.examples(model, batch, seed=batch)
        expected = run(model, inputs)
        feed = {key: x.numpy() for key, x in inputs.items()}
        converted = dict(zip(model.outputs, map(torch.from_numpy, session.run(None, feed)), strict=True))
        for other in (program(**inputs), converted):
            assert list(other) == list(model.outputs)
            for x in other.values():
                assert x.shape[0] == batch
                assert x.isfinite().all()
            if "labels" in other:
                assert_same_detections(other, expected)
            else:
                torch.testing.assert_close(other, expected, atol=1e-3, rtol=0)


def branches(dfg: Dfg) -> list[set[int]]:
    """Of the operator with most inputs: what is made for each of them and for no other."""
    producer = {name: op.index for op in dfg.operators for name in op.outputs}
    ancestors: list[set[int]] = []
    for op in dfg.operators:
        before = [producer[name] for name in op.inputs if name in producer]
        ancestors.append({*before}.union(*(ancestors[i] for i in before)))
    join = max(dfg.operators, key=lambda op: len(op.inputs))
    ends = [producer[name] for name in join.inputs]
    wholes = [ancestors[i] | {i} for i in ends]
    return [whole.difference(*(other for other in wholes if other is not whole)) for whole in wholes]


def test_each_class_is_a_branch_of_units_of_its_own(tmp_path: Path) -> None:
    """Also behind the fusing of operators, which must leave branches apart for a placement to move them."""
    made = small_detector(True)
    seeding.seed_weights(made.module, 0)
    model = zoo.Model("ssd", made.module.eval(), made.inputs, made.outputs, batched=False)
    zoo.save_onnx(model, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = zoo.examples(model)
    answers = session.run(None, {"image": inputs["image"].numpy()})
    assert_same_detections(dict(zip(made.outputs, map(torch.from_numpy, answers), strict=True)), run(model, inputs))
    dfg = load_dfg(tmp_path / "model.onnx")
    found = branches(dfg)
    assert len(found) == 8
    home = {index: unit.index for unit in dfg.units for index in unit.operators}
    units = [{home[index] for index in branch} for branch in found]
    for number, branch in enumerate(found):
        types = {dfg.operators[index].op_type for index in branch}
        assert {"TopK", "GatherElements", "ReduceMax"} <= types, "picks its scores and boxes, and suppresses"
        members = {index for unit in units[number] for index in dfg.units[unit].operators}
        assert members <= branch, "no unit of a branch does anything else"
    assert sum(map(len, units)) == len(set().union(*units)), "no two branches share a unit"
    assert all(op.is_costed for op in dfg.operators)


@pytest.mark.parametrize(
    "make",
    [
        lambda by_class: rcnn.definition(rcnn.FasterRcnn, replace(RCNN, by_class=by_class)),
        lambda by_class: rcnn.definition(rcnn.MaskRcnn, replace(RCNN, by_class=by_class)),
        small_detector,
    ],
)
def test_suppression_by_class_gives_the_same_detections(make: Callable[[bool], zoo.Definition]) -> None:
    found = []
    for by_class in (False, True):
        made = make(by_class)
        seeding.seed_weights(made.module, 5)
        image = seeding.examples(zoo.Model("", made.module, made.inputs, made.outputs, True), 2, seed=4)["image"]
        with torch.inference_mode():
            answers = [dict(zip(made.outputs, made.module.eval()(image), strict=True)) for _ in range(2)]
        assert all(torch.equal(answers[0][name], answers[1][name]) for name in made.outputs)
        found.append(answers[0])
    assert torch.equal(found[0]["scores"], found[1]["scores"])
    assert found[0]["labels"].unique().numel() >= 4, "more than one class has detections"
    assert_same_detections(found[1], found[0])


def test_ssd_has_an_anchor_for_every_prediction() -> None:
    with torch.device("meta"):
        raw = detection.SsdResNet34()
        steps, logits = raw(torch.empty(1, 3, 1200, 1200))
    assert steps.shape == (1, 15130, 4)
    assert logits.shape == (1, 15130, 81)
    made = raw.anchors(1200)
    assert made.shape == (15130, 4)
    torch.testing.assert_close(made[0], torch.tensor([-30.0, -30.0, 54.0, 54.0]))  # 84 pixels about the middle of 24
    width, height = made[:, 2] - made[:, 0], made[:, 3] - made[:, 1]
    torch.testing.assert_close((height / width)[10000:10006], torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1 / 3]))


def test_an_ensemble_says_the_mean_of_what_its_members_say() -> None:
    model = small("ensemble")
    inputs = zoo.examples(model, 2)
    with torch.inference_mode():
        each = [member(inputs["input"]).softmax(1) for member in model.module.members]
    assert (each[0] - each[1]).abs().max() > 1e-3, "members have weights of their own"
    torch.testing.assert_close(run(model, inputs)["scores"], sum(each) / 3)


def assert_same_detections(other: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """In any order, as scores that are equal but for rounding may be sorted either way; a few may miss the cut."""
    torch.testing.assert_close(other["scores"], expected["scores"], atol=1e-3, rtol=0)
    pictures, count = expected["scores"].shape
    for picture in range(pictures):
        apart = torch.zeros(count, count)
        for name in expected:
            ours, theirs = (x[name][picture].float().reshape(count, -1) for x in (expected, other))
            apart = torch.maximum(apart, (ours[:, None] - theirs[None]).abs().amax(dim=2))
        assert (apart.amin(dim=1) < 1e-3).float().mean() >= 0.95


def test_padding_does_not_change_what_bert_says_of_the_rest() -> None:
    model = small("bert")
    ids = torch.tensor([[5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, 8, 9, 40, 41, 42]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]] * 2)
    masked = run(model, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(masked["last_hidden_state"][0, :5], masked["last_hidden_state"][1, :5])
    torch.testing.assert_close(masked["pooler_output"][0], masked["pooler_output"][1])
    seen = run(model, {"input_ids": ids, "attention_mask": torch.ones_like(mask)})["pooler_output"]
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def test_the_lstm_reads_its_whole_text_in_order() -> None:
    model = small("lstm")
    texts = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5]])
    logits = run(model, {"input_ids": texts})["logits"]
    assert (logits[0] - logits[1]).abs().max() > 1e-6
    assert (logits[0] - logits[2]).abs().max() > 1e-6


def test_every_input_of_bst_counts() -> None:
    model = small("bst")
    inputs = zoo.examples(model)
    click = run(model, inputs)["click"]
    for name, x in inputs.items():
        changed = x.clone()
        changed[:, -1] = (changed[:, -1] + 1) % model.limits[name]
        assert (run(model, {**inputs, name: changed})["click"] - click).abs().max() > 1e-6, name


def test_yolo_pools_at_stride_one_without_shrinking() -> None:
    module = yolo.TinyYoloV2((1,) * 8, classes=1).eval()
    seen: list[torch.Size] = []
    for conv in module.convs:
        conv.register_forward_hook(lambda _m, _i, made: seen.append(made.shape[2:]))
    module(torch.zeros(1, 3, 64, 64))
    assert [size[0] for size in seen] == [64, 32, 16, 8, 4, 2, 2, 2]


def test_anchors_have_the_area_and_the_aspects_asked_for() -> None:
    made = boxes.anchors(2, 3, stride=16, side=128)
    assert made.shape == (2 * 3 * 3, 4)
    width, height = made[:, 2] - made[:, 0], made[:, 3] - made[:, 1]
    torch.testing.assert_close(width * height, torch.full((18,), 128.0**2))
    torch.testing.assert_close((height / width)[:3], torch.tensor([0.5, 1.0, 2.0]))
    centre = ((made[:, :2] + made[:, 2:]) / 2).reshape(2, 3, 3, 2)
    torch.testing.assert_close(centre[1, 2, 0], torch.tensor([32.0, 16.0]))


def test_decode_moves_stretches_and_clips() -> None:
    box = torch.tensor([10.0, 20.0, 30.0, 60.0])
    torch.testing.assert_close(boxes.decode(box, torch.zeros(4), 1.0, 1.0, 100), box)
    moved = boxes.decode(box, torch.tensor([1.0, -0.5, 3 * math.log(2), 0.0]), 2.0, 3.0, 100)
    torch.testing.assert_close(moved, torch.tensor([10.0, 10.0, 50.0, 50.0]))
    wild = boxes.decode(box, torch.tensor([0.0, 0.0, 1e4, 1e4]), 1.0, 1.0, 90)
    torch.testing.assert_close(wild, torch.tensor([0.0, 0.0, 90.0, 90.0]))


def test_overlaps() -> None:
    made = boxes.overlaps(torch.tensor([[[0.0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6], [4, 4, 4, 9]]]))[0]
    torch.testing.assert_close(made[0], torch.tensor([1.0, 1 / 3, 0.0, 0.0]))
    torch.testing.assert_close(made, made.T)
    assert made[3, 3] == 0  # an empty box


@pytest.mark.parametrize("labelled", [False, True])
def test_matrix_nms_as_the_paper_writes_it(labelled: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    corner = torch.rand(2, 12, 2, generator=rng) * 4
    given = torch.cat([corner, corner + 2 + torch.rand(2, 12, 2, generator=rng) * 3], dim=2)
    scores = torch.rand(2, 12, generator=rng).sort(dim=1, descending=True).values
    labels = torch.randint(0, 3, (2, 12), generator=rng) if labelled else torch.zeros(2, 12, dtype=torch.int64)
    made = boxes.decayed(given, scores.log(), labels if labelled else None).exp()
    for picture in range(2):
        iou = boxes.overlaps(given)[picture].tolist()
        kind = labels[picture].tolist()
        for j in range(12):
            better = [i for i in range(j) if kind[i] == kind[j]]
            decay = 1.0
            for i in better:
                hidden = max((iou[k][i] for k in range(i) if kind[k] == kind[i]), default=0.0)
                decay = min(decay, math.exp(-(iou[i][j] ** 2) / 0.5) / math.exp(-(hidden**2) / 0.5))
            assert made[picture, j].item() == pytest.approx(scores[picture, j].item() * decay, rel=1e-4)


def test_roi_align_as_grid_sampling_does_it() -> None:
    rng = torch.Generator().manual_seed(5)
    feature = torch.randn(1, 3, 9, 7, generator=rng)
    rois = torch.tensor(
        [[4.0, 4.0, 20.0, 30.0], [0.0, 0.0, 28.0, 36.0], [25.0, 30.0, 28.0, 36.0], [8.0, 8.0, 8.0, 8.0]]
    )
    pixels = 4.0
    flat = torch.cat([torch.zeros(5, 3), feature[0].flatten(1).T])
    ones = torch.ones(4, dtype=torch.int64)
    made = boxes.roi_align(flat, rois, 5 * ones, ones / pixels, 9 * ones, 7 * ones, 3)
    steps = (torch.arange(6) + 0.5) / 6
    for roi, found in zip(rois, made, strict=True):
        x = (roi[0] + steps * (roi[2] - roi[0])) / (7 * pixels) * 2 - 1
        y = (roi[1] + steps * (roi[3] - roi[1])) / (9 * pixels) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=2)[None]
        sampled = functional.grid_sample(feature, grid, padding_mode="border", align_corners=False)
        expected = functional.avg_pool2d(sampled, 2)[0].permute(1, 2, 0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_regions_come_from_the_picture_and_the_level_of_their_size() -> None:
    regions = rcnn.RegionFeatures(512)
    maps = []
    for level in rcnn.LEVELS:
        side = 512 // 2**level
        maps.append(torch.stack([torch.full((1, side, side), 10.0 * picture + level) for picture in range(2)]))
    sides = torch.tensor([0.0, 100.0, 112.5, 224.5, 447.0, 449.0, 500.0])
    square = torch.stack([torch.zeros(7), torch.zeros(7), sides, sides], dim=1)
    made = regions(maps, square.expand(2, 7, 4), 2)
    levels = torch.tensor([2.0, 2, 3, 4, 4, 5, 5])
    torch.testing.assert_close(made.flatten(1).mean(1), torch.cat([levels, levels + 10]))


def test_detections_are_sorted_in_range_and_each_picture_for_itself() -> None:
    model = small("mask_rcnn")
    image = zoo.examples(model, 2)["image"]
    both = run(model, {"image": image})
    assert both["boxes"].min() >= 0
    assert both["boxes"].max() <= 1
    assert (both["boxes"][..., 2:] >= both["boxes"][..., :2]).all()
    assert (both["scores"].diff(dim=1) <= 0).all()
    assert both["labels"].min() >= 1
    assert both["labels"].max() < RCNN.classes
    assert (both["boxes"][0] - both["boxes"][1]).abs().max() > 1e-3
    alone = run(model, {"image": image[1:]})
    for name, x in alone.items():
        torch.testing.assert_close(x[0], both[name][1], atol=1e-4, rtol=1e-4)


def test_a_picture_that_the_pyramid_cannot_halve_is_refused() -> None:
    with pytest.raises(ZooError, match="side is 100, expected a multiple of 32"):
        rcnn.FasterRcnn(rcnn.RcnnShape(side=100))
