"""Losses of detectors: equal to the original implementations, and so are their gradients in a step."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.runtime import Options, Session
from onnxgrad.training import attach
from onnxgrad.training.detection.boxes import overlap
from onnxgrad.training.detection.losses import detection_loss
from onnxgrad.training.detection.matching import pair
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.step.compile import compile_step
from tests.training.detection.raw_maps import case, projections

#: Results of `reference_losses`.
REFERENCES = {
    "dfl": {"box": 4.692288, "classes": 1200.446045, "distances": 4.20922},
    "plain": {"box": 3.7146, "classes": 424.591705, "distances": 0.084611},
    "yolox": {"box": 4.620537, "objects": 122.762474, "classes": 2.393831},
    "yolo5": {"box": 0.126129, "objects": 0.131392, "classes": 0.060257},
    "ssd": {"box": 4.916819, "classes": 16.185259},
    "fcos": {"box": 1.011048, "objects": 0.927148, "classes": 17.24086},
    "retinanet": {"box": 2.426455, "classes": 330.648651},
    "detr": {"classes": 1.674707, "box": 2.434967, "overlap": 1.94727},
    "deformable": {"classes": 5.196993, "box": 2.526981, "overlap": 2.072268},
    "rtdetr": {"classes": 5.265613, "box": 2.526981, "overlap": 2.072268},
    "dfine": {"classes": 5.24357, "box": 4.186576, "overlap": 2.566407},
}
#: Slopes of the references, see `projections`.
GRADIENTS = {
    "dfl": {"boxes": 0.180738, "scores": -11.7337},
    "plain": {"boxes": 2.88281, "scores": -2.48225},
    "yolox": {"boxes": 0.450306, "objects": -0.752239, "scores": -0.200767},
    "yolo5": {"map": 0.00603011},
    "ssd": {"boxes": 0.712096, "scores": -1.249},
    "fcos": {"boxes": 0.00403458, "objects": -0.0782818, "scores": 0.543438},
    "retinanet": {"boxes": 0.0966599, "scores": 1.32236},
    "detr": {"logits": 0.108601, "pred_boxes": 8.5492},
    "deformable": {"logits": 0.967787, "pred_boxes": 4.74634},
    "rtdetr": {"logits": 0.512105, "pred_boxes": 4.74634},
    "dfine": {"logits": 0.46816, "pred_boxes": 0.755177},
}


def _loss(kind, **about):
    c = case(kind)
    return detection_loss(c.model, c.head, **about), c


@pytest.mark.parametrize("kind", REFERENCES)
def test_equal_to_the_original(kind):
    loss, c = _loss(kind)
    found = Session(loss, Options(target="portable")).run(c.feeds)
    total = found.pop("detection_loss")
    expected = {f"{name}_loss": value for name, value in REFERENCES[kind].items()}
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)
    np.testing.assert_allclose(total, sum(expected.values()), rtol=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", REFERENCES)
def test_no_labels(kind):
    loss, c = _loss(kind)
    feeds = {**c.feeds, "labels": np.full((3, 5, 5), -1, np.float32)}
    found = Session(loss, Options(target="portable")).run(feeds)
    assert all(np.isfinite(v) for v in found.values())
    assert found["box_loss"] == 0


def _learned_maps(c):
    """A detector whose raw maps are its weights."""
    opened = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    graph = ir.Graph([opened], [], nodes=[], opset_imports={"": 21}, name="maps")
    b = Builder(graph)
    kind = ir.TensorType(ir.DataType.FLOAT)
    for name, array in c.maps.items():
        tensor = ir.tensor(array, name=f"{name}_weights")
        weights = ir.Value(name=tensor.name, type=kind, shape=ir.Shape(array.shape), const_value=tensor)
        graph.initializers.add(weights)
        (result,) = b.append(ir.Node("", "Add", [weights, opened]))
        result.value.name, result.value.type, result.value.shape = name, kind, ir.Shape(array.shape)
        graph.outputs.append(result.value)
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("kind", REFERENCES)
def test_gradient_of_the_original(kind):
    """A step of descent on the raw maps themselves goes along the gradient of the original implementation."""
    loss, c = _loss(kind)
    step = compile_step(attach(_learned_maps(c), loss=Loss(loss), optimizer="sgd", learning_rate=1.0, trainable=["*"]))
    state = {t.input: t.initial.numpy() for t in step.state.values()}
    rates = {name: rate.numpy() for name, rate in step.rates.items()}
    feeds = {"x": np.zeros(1, np.float32), "labels": c.labels}
    found = Session(step.model, Options(target="portable")).run({**state, **rates, **feeds})
    moved = {n: c.maps[n] - found[step.state[f"{n}_weights"].output] for n in c.maps}
    # of two labels on one prediction, YOLOv5 learns the overlap with whichever is written last
    assert projections(moved) == pytest.approx(GRADIENTS[kind], rel=1e-3 if kind == "yolo5" else 1e-4, abs=1e-5)


def _boxes(random, count):
    low = random.uniform(0, 50, (count, 2))
    return np.concatenate([low, low + random.uniform(1, 40, (count, 2))], 1)


def _graph(arrays, write):
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    for name, array in arrays.items():
        shape = ir.Shape([None] * array.ndim)
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape))
    b = Builder(graph)
    result = write(b, *map(b.var, graph.inputs))
    graph.outputs.append(result.value)
    feeds = {name: array.astype(np.float32) for name, array in arrays.items()}
    return next(iter(Session(ir.Model(graph, ir_version=10), Options(target="portable")).run(feeds).values()))


@pytest.mark.parametrize("kind", ["iou", "giou", "diou", "ciou"])
def test_overlaps(kind):
    random = np.random.RandomState(0)
    one, other = _boxes(random, 40), _boxes(random, 40)
    other[0] = one[0]
    found = _graph({"one": one, "other": other}, lambda b, x, y: overlap(b, x, y, kind))
    expected = np.array([_overlap(p, q, kind) for p, q in zip(one, other)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found[0] == pytest.approx(1, abs=1e-5)


def _overlap(p, q, kind):
    """By the formulas of the papers."""
    shared = max(0, min(p[2], q[2]) - max(p[0], q[0])) * max(0, min(p[3], q[3]) - max(p[1], q[1]))
    area = [(r[2] - r[0]) * (r[3] - r[1]) for r in (p, q)]
    union = sum(area) - shared
    hull = max(p[2], q[2]) - min(p[0], q[0]), max(p[3], q[3]) - min(p[1], q[1])
    apart = ((p[0] + p[2] - q[0] - q[2]) ** 2 + (p[1] + p[3] - q[1] - q[3]) ** 2) / 4
    found = shared / union
    if kind == "giou":
        return found - (hull[0] * hull[1] - union) / (hull[0] * hull[1])
    if kind in ("diou", "ciou"):
        iou, found = found, found - apart / (hull[0] ** 2 + hull[1] ** 2)
    if kind == "ciou":
        v = 4 / np.pi**2 * (np.arctan2(q[2] - q[0], q[3] - q[1]) - np.arctan2(p[2] - p[0], p[3] - p[1])) ** 2
        found -= v * v / (1 - iou + v) if v else 0
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 4, 6), (4, 8, 8), (4, 10, 40)])
@pytest.mark.parametrize("contended", [False, True])
def test_pairs_of_least_cost(sizes, contended):
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.RandomState(sum(sizes))
    cost = random.standard_normal(sizes)
    if contended:  # all labels want the same predictions
        cost = cost[:, :1] + 0.05 * cost
    counts = random.randint(0, sizes[1] + 1, sizes[0])
    there = (np.arange(sizes[1]) < counts[:, None]).astype(np.float32)
    found = _graph({"cost": cost, "there": there}, pair)
    for k, count in enumerate(counts):
        rows, columns = optimize.linear_sum_assignment(cost[k, :count])
        np.testing.assert_array_equal(found[k].sum(1), there[k])
        assert found[k].sum(0).max() <= 1
        assert (found[k] * cost[k]).sum() == pytest.approx(cost[k][rows, columns].sum(), abs=1e-4)


def test_other_overlap():
    values = {}
    for kind in ("giou", "diou", "ciou"):
        loss, c = _loss("dfl", box_loss=kind)
        values[kind] = float(Session(loss, Options(target="portable")).run(c.feeds)["box_loss"])
    assert len(set(values.values())) == 3
    assert values["ciou"] == pytest.approx(REFERENCES["dfl"]["box"], rel=1e-4)
    with pytest.raises(BadInput, match="box_loss"):
        _loss("ssd", box_loss="giou")
