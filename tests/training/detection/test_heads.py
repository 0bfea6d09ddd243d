"""Heads are recognised behind decoding and suppression, get a dynamic batch, and other classes."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.ir.graph import named_values
from onnxgrad.model_io import open_model
from onnxgrad.training.detection.anchors import centre_offset
from onnxgrad.training.detection.batch import open_batch
from onnxgrad.training.detection.boxes import decode
from onnxgrad.training.detection.classes import with_classes
from onnxgrad.training.detection.heads import find_head, known_head
from onnxgrad.training.detection.predict import Detector
from onnxgrad.training.detection.probe import noise, run_values, stored_names
from onnxgrad.training.metadata import DETECTOR
from tests.training.detection.detectors import ANCHORS, KINDS, OTHERS, SIDE, STRIDES, detector

NAMES = ["ant", "bee", "cat", "dog", "elk"]
#: The kind of each head, bins of distances, and the class of no object.
EXPECTED = {
    "yolov8": ("dfl", 16, None), "yolov8_nms": ("dfl", 16, None), "yolov8_raw": ("dfl", 16, None),
    "yolov10": ("dfl", 16, None), "yolov10_plain": ("dfl", 1, None), "yolov5": ("yolo5", 1, None),
    "yolox": ("yolox", 1, None),
    "nanodet": ("dfl", 8, None), "ssd": ("ssd", 1, 0), "fcos": ("fcos", 1, None),
    "retinanet": ("retinanet", 1, None), "detr": ("detr", 1, -1),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_recognised(kind):
    head = find_head(open_model(detector(kind, NAMES)).model)
    assert (head.kind, head.bins, head.background) == EXPECTED[kind]
    assert head.classes == len(NAMES)
    assert head.one_to_one == (kind in ("yolov10", "yolov10_plain", "detr"))
    if kind != "detr":
        assert [level.shape for level in head.levels] == [(SIDE // s, SIDE // s) for s in STRIDES]
        assert head.strides == list(STRIDES)


def test_anchors_are_found():
    np.testing.assert_allclose(find_head(open_model(detector("yolov5", NAMES)).model).anchors, ANCHORS, rtol=1e-5)
    model = open_model(detector("ssd", NAMES)).model
    anchors = find_head(model).anchors
    decoded = run_values(_without_weights(model), ["boxes"], noise(model, 1, (SIDE, SIDE)))["boxes"]
    np.testing.assert_allclose(anchors, decoded[0], atol=1e-4)


def _without_weights(model):
    """The model with layers that compute zero: its boxes are the anchors."""
    for value in model.graph.initializers.values():
        if value.const_value.dtype.is_floating_point() and any(use.node.op_type == "Conv" for use in value.uses()):
            value.const_value = type(value.const_value)(np.zeros_like(value.const_value.numpy()), name=value.name)
    return model


def test_moved_points_of_reference_have_sigmoid_scores():
    """Conditional DETR: boxes are sigmoid(layers + log(p / (1 - p))) of points p, and no class is that of no object."""
    proto = ir.to_proto(detector("detr", NAMES))
    last = next(n for n in proto.graph.node if "pred_boxes" in n.output)
    assert last.op_type == "Sigmoid"
    moved = [
        onnx.helper.make_node("Sigmoid", [last.input[0]], ["point"]),
        onnx.helper.make_node("Log", ["point"], ["logits_of_points"]),
        onnx.helper.make_node("Add", [last.input[0], "logits_of_points"], ["moved"]),
    ]
    at = list(proto.graph.node).index(last)
    last.input[0] = "moved"
    nodes = [*proto.graph.node[:at], *moved, *proto.graph.node[at:]]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    head = find_head(open_model(proto).model)
    assert (head.kind, head.background, head.classes) == ("detr", None, len(NAMES) + 1)


@pytest.mark.parametrize("kind", ["detr_post", "detr_chosen"])
def test_queries_of_places_have_the_loss_of_rt_detr(kind):
    head = find_head(open_model(detector(kind, NAMES)).model)
    assert head.varifocal == (kind == "detr_chosen")
    assert ("RT-DETR" in head.text) == head.varifocal


@pytest.mark.parametrize("kind", ["yolov8_seg", "yolov8_pose", "yolov8_plainseg"])
def test_masks_and_key_points_are_left_out(kind):
    plain, head = (find_head(open_model(detector(k, NAMES)).model) for k in ("yolov8", kind))
    assert (head.kind, head.classes, len(head.levels)) == (plain.kind, 5, 2)
    assert [level.boxes.size for level in head.levels] == [4 if "plain" in kind else 64] * 2
    assert len(head.others) == (2 if kind == "yolov8_pose" else 3)
    assert [head.maps, *head.mask_values[1:]] == ([""] if kind == "yolov8_pose" else ["protos", *head.others[:2]])
    assert "masks or key points are not trained" in head.text
    assert "masks" not in plain.text


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_batch_becomes_dynamic(kind):
    model = open_model(detector(kind, NAMES)).model
    head = find_head(model)
    note = open_batch(model, head)
    assert "its batch is now dynamic" in note
    pair = noise(model, 2, head.size)
    found = run_values(model, head.values, pair)
    for k in range(2):
        alone = run_values(model, head.values, {n: a[k : k + 1] for n, a in pair.items()})
        for name, array in alone.items():
            np.testing.assert_allclose(found[name][k : k + 1], array, atol=1e-5)


def test_batch_that_stays():
    model = open_model(detector("yolov8", NAMES)).model
    head = find_head(model)
    # a map that is averaged over all pictures: two together have other results
    layer = next(n for n in model.graph if n.op_type == "Relu")
    first, second = list(model.graph)[:2]
    b = Builder(model.graph, before=second)
    x = b.var(first.outputs[0])
    layer.replace_input_with(0, (x - b.ReduceMean(x, [0], keepdims=1)).value)
    assert "one picture at a time" in open_batch(model, head)
    assert model.graph.inputs[0].shape[0] == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", [*KINDS, "detr_stack", "detr_post", "detr_chosen"])
@pytest.mark.parametrize("names", [["cat", "fox"], ["cat", *"abcdefgh"]], ids=["fewer", "more"])
def test_other_classes(kind, names):
    model = open_model(detector(kind, NAMES)).model
    head = find_head(model)
    open_batch(model, head)
    feeds = noise(model, 1, head.size)
    before = run_values(model, head.values, feeds)
    new, notes = with_classes(model, head, names, NAMES)
    assert notes == [f"{len(names)} classes in the place of 5; 1 of the same names keep their weights"]
    again = find_head(model)
    assert again.classes == len(names)
    assert again.levels == new.levels
    after = run_values(model, new.values, feeds)
    for old_level, level in zip(head.levels, new.levels):
        old, found = _rows(before, old_level.scores, level.anchors), _rows(after, level.scores, level.anchors)
        first = 1 if head.background == 0 else 0
        np.testing.assert_array_equal(found[:, :, first], old[:, :, 2 + first])  # of cat
        old, found = _rows(before, old_level.boxes, level.anchors), _rows(after, level.boxes, level.anchors)
        np.testing.assert_allclose(found, old, atol=1e-5)
    shapes = {n: a.shape for n, a in run_values(model, [v.name for v in model.graph.outputs], feeds).items()}
    for value in model.graph.outputs:  # declared as they are
        declared = [d if isinstance(d, int) else None for d in value.shape]
        assert all(d in (None, s) for d, s in zip(declared, shapes[value.name], strict=True))


def _rows(values, part, anchors):
    """Channels of a map apart by anchor, [N, a, size, …]."""
    array = values[part.value]
    array = np.moveaxis(array, -1, 1) if array.ndim == 3 else array
    apart = array.reshape(array.shape[0], anchors, -1, *array.shape[2:])
    return apart[:, :, part.start : part.start + part.size]


def test_centres_of_places():
    """By the grid of a decoding, by a note, by the exporter; refused where none of them shows it."""
    yolov8 = open_model(detector("yolov8", NAMES)).model
    assert centre_offset(yolov8, find_head(yolov8)) == 0.5
    joined, apart = (open_model(detector(f"nanodet_{ending}", NAMES)).model for ending in ("plus", "apart"))
    assert (find_head(joined).offset, find_head(joined, offset=0.5).offset) == (0.0, 0.5)
    assert "NanoDet-Plus" in find_head(joined).text
    for given in (apart, open_model(detector("nanodet_plus", NAMES)).model):
        given.graph.inputs[0].name = "images"  # one output of four maps might be PicoDet's
        with pytest.raises(BadInput, match=r"--place-offset says which"):
            find_head(given)
    assert find_head(apart, offset=0.0).offset == 0.0
    apart.producer_name = "PaddlePaddle"
    assert find_head(apart).offset == 0.5
    for given in (joined, apart):
        given.metadata_props[DETECTOR] = json.dumps({"letterbox": {"width": SIDE, "height": SIDE}, "place_offset": 0.5})
    assert find_head(joined).offset == 0.5
    head = find_head(apart)
    b = Builder(apart.graph)
    y, x = np.meshgrid(*[np.float32(range(4)) * 16] * 2, indexing="ij")  # which no exporter has
    value = b.var(next(v for v in apart.graph.outputs if v.name == "distances_3"))
    grid = b.const(np.stack([x, y])[None].reshape(1, 2, -1))
    low = b.Add(grid, b.Slice(b.Reshape(value, [1, 32, -1]), [0], [2], [1]))
    apart.graph.outputs.append(low.value)
    assert centre_offset(apart, head) == 0.0


def test_same_classes_change_nothing():
    model = open_model(detector("yolov8", NAMES)).model
    head = find_head(model)
    assert with_classes(model, head, NAMES, NAMES) == (head, [])


def test_names_of_exporters():
    model = detector("yolov8", NAMES)
    assert stored_names(model, 5) == tuple(NAMES)
    assert stored_names(model, 4) is None
    model.metadata_props.clear()
    model.metadata_props["names"] = "{0: 'ant', 1: 'bee'}"
    assert stored_names(model, 2) == ("ant", "bee")
    model.metadata_props.clear()
    model.metadata_props["character"] = "ant\nbee"
    assert stored_names(model, 2) == ("ant", "bee")


def test_no_detector():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        classifier (float[N, 3, 8, 8] x) => (float[N, 2] y) <float[3, 2] W = {1, 2, 3, 4, 5, 6}> {
            p = GlobalAveragePool (x)
            f = Flatten (p)
            y = MatMul (f, W)
        }""")
    opened = open_model(model).model
    assert known_head(opened) is None
    with pytest.raises(BadInput, match=r"head of the detector is not known.*last layers are 'y'"):
        find_head(opened)
    opened.graph.inputs[0].shape = ir.Shape([3, 8, 8])  # as torchvision's for a list of pictures
    with pytest.raises(BadInput, match="the inputs are 'x'\n  hint: export it for a batch"):
        find_head(opened)


_MAPS = """
    <ir_version: 10, opset_import: ["": 21]>
    maps (float[1, 3, 16, 16] x) => (float[1, 3, 4, 4] heat, float[1, 2, 4, 4] size, float[1, 2, 4, 4] offset)
        <float[3, 3, 4, 4] A, float[2, 3, 4, 4] B, float[2, 3, 4, 4] C> {
        h = Conv <strides = [4, 4]> (x, A)
        heat = Sigmoid (h)
        size = Conv <strides = [4, 4]> (x, B)
        offset = Conv <strides = [4, 4]> (x, C)
    }"""
_REGIONS = """
    <ir_version: 10, opset_import: ["": 21]>
    regions (float[1, 3, 16, 16] x) => (float[2, 3] scores)
        <float[2, 3, 4, 4] A, float[8, 3] W, int64[2] batch = {0, 0}> {
        features = Conv <strides = [4, 4]> (x, A)
        rois = Constant <value = float[2, 4] {0, 0, 8, 8, 4, 4, 16, 16}> ()
        cut = RoiAlign <output_height = 2, output_width = 2> (features, rois, batch)
        flat = Flatten (cut)
        scores = MatMul (flat, W)
    }"""


@pytest.mark.parametrize(("text", "words"), [(_MAPS, "CenterNet.*last layers are 'h', 'size', 'offset'"),
                                         (_REGIONS, "two stages.*RoiAlign node 'cut'")])  # fmt: skip
def test_unknown_kinds_are_named(text, words, tmp_path):
    model = onnx.parser.parse_model(text)
    random = np.random.RandomState(0)
    for info in [v for v in model.graph.value_info if len(v.type.tensor_type.shape.dim) in (2, 4)]:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        weights = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, info.name))
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(BadInput, match=rf"other\.onnx: the head of the detector is not known: .*{words}"):
        Detector(str(tmp_path / "other.onnx"))


@pytest.mark.parametrize("kind", ["yolov8", "yolov8_nms", "yolov5", "ssd", "fcos", "retinanet"])
def test_decoded_as_the_model_does(kind):
    model = open_model(detector(kind, NAMES)).model
    head = find_head(model)
    feeds = noise(model, 1, head.size)
    own = run_values(model, [v.name for v in model.graph.outputs if v.dtype == ir.DataType.FLOAT], feeds)
    graph = model.graph
    b = Builder(graph)
    named = named_values(graph)
    found = decode(b, head, {name: b.var(named[name]) for name in head.values})
    ends = {"decoded": found.boxes, "probabilities": found.probabilities(b, head)}
    for name, var in ends.items():
        var.value.name = name
    ours = run_values(model, list(ends), feeds)
    boxes, scores = _own(kind, own)
    order = np.lexsort(boxes.T), np.lexsort(ours["decoded"][0].T)
    np.testing.assert_allclose(ours["decoded"][0][order[1]], boxes[order[0]], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(ours["probabilities"][0][order[1]], scores[order[0]], atol=1e-5)


def _own(kind, outputs):
    """Boxes [A, 4] as corners and scores [A, K] of a model's own outputs."""
    if kind in ("ssd", "fcos", "retinanet"):
        return outputs["boxes"][0], outputs["scores"][0, :, 1 if kind == "ssd" else 0 :]
    if kind == "yolov8_nms":
        boxes, scores = outputs["boxes"][0], outputs["scores"][0].T
    elif kind == "yolov8":
        boxes, scores = outputs["output0"][0, :4].T, outputs["output0"][0, 4:].T
    else:
        boxes, scores = outputs["output"][0, :, :4], outputs["output"][0, :, 5:] * outputs["output"][0, :, 4:5]
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1), scores
