"""RoiAlign, MaxRoiPool and DeformConv up the ladder."""

import itertools

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder
from tests.rules.sampled import DeformConv, MaxRoiPool
from tests.rules.windowed import GatherElements, ScatterElements

EVALUATORS = (DeformConv, GatherElements, MaxRoiPool, ScatterElements)
BOXES = [[0.31, 0.42, 3.27, 2.61], [1.13, -2.7, 6.12, 2.23]]
ODD = [[2.11, 1.73, 2.34, 1.96], [2.9, 2.8, 1.13, 1.27], [-9.3, -9.1, -5.2, -4.1], [-4.3, -3.1, 8.2, 9.1]]


def image(shape):
    """No two elements near each other, nor near 0."""
    return np.random.default_rng(7).permutation(int(np.prod(shape))).reshape(shape) / 7 - 2.03


def align(x, boxes, *, note="", order=1, **attrs):
    shape, x = x, image(x) if attrs.get("mode") == "max" else x
    batch = np.arange(len(boxes))[::-1] % shape[0]
    form = "output_half_pixel" if "output" in attrs.get("coordinate_transformation_mode", "") else ""
    parts = [attrs.get("mode", "avg"), form, str(attrs.get("sampling_ratio", 0)), note]
    size = {"output_height": 1, "output_width": 2}
    given = {"order": order, "opset": 16, "evaluators": EVALUATORS, "symbolic": {0: (0, 1, 2, 3), 1: (0,)}}
    return Case("RoiAlign", [x, np.array(boxes), batch], size | attrs, note=" ".join(filter(None, parts)), **given)


SECOND = ["half_pixel"]
FORMS = itertools.product(["avg", "max"], ["half_pixel", "output_half_pixel"], [0, 1, 2])
ALIGN = [
    *(
        align((2, 1, 4, 5), BOXES, mode=m, coordinate_transformation_mode=f, sampling_ratio=s, order=1 + (f in SECOND))
        for m, f, s in FORMS
    ),
    align((1, 1, 4, 3), ODD, note="odd"),
    align((1, 1, 4, 3), ODD, note="odd", mode="max", coordinate_transformation_mode="output_half_pixel"),
    align((1, 2, 3, 4), BOXES, spatial_scale=0.7, note="scaled", output_height=2, sampling_ratio=1),
    align((1, 1, 3, 4), BOXES[:1], spatial_scale=0.7, note="scaled"),
]


def max_pool(x, boxes, *, note="", order=1, **attrs):
    boxes = np.array([[i % x[0], *box] for i, box in enumerate(boxes)], float)
    given = {"order": order, "opset": 16, "evaluators": EVALUATORS, "wrt": [0]}
    return Case("MaxRoiPool", [image(x), boxes], {"pooled_shape": [2, 1], **attrs}, note=note, **given)


POOL = [
    max_pool((2, 2, 4, 5), BOXES, order=2),
    max_pool((1, 1, 4, 3), ODD, note="odd"),
    max_pool((1, 1, 4, 5), [[0, 0, 3, 3], [2, 1, 9, 6]], note="scaled", spatial_scale=0.6, pooled_shape=[2, 3]),
]


def deform(x, w, out, *, bias=False, mask=False, note="", order=1, symbolic=True, **attrs):
    rng = np.random.default_rng(3)
    kernel, parts = int(np.prod(w[2:])), attrs.get("offset_group", 1)
    shape = (x[0], parts * kernel * len(out), *out)
    offset = rng.integers(-2, 3, shape) + rng.choice([0.3, 0.7], shape)  # none near a kink
    operands = [x, w, offset, (w[0],) if bias else None, (x[0], parts * kernel, *out) if mask else None]
    while operands[-1] is None:
        operands.pop()
    given = {"order": order, "opset": 19, "evaluators": EVALUATORS, "symbolic": symbolic}
    return Case("DeformConv", operands, attrs, note=note, **given)


SHAPES = {0: (0, 1, 2, 3), 1: (0,), 2: (0, 2, 3), 3: (0,), 4: (0, 2, 3)}  # ONNX Runtime wants to know the rest
BATCH = {0: (0,), 2: (0,)}
DEFORM = [
    deform((1, 1, 3, 3), (1, 1, 2, 2), (2, 2), order=2, symbolic=SHAPES),
    deform((2, 2, 2, 3), (2, 2, 2, 1), (1, 2), bias=True, mask=True, order=2, strides=[1, 2], symbolic=SHAPES),
    deform((1, 2, 3, 3), (2, 1, 1, 2), (3, 2), group=2, note="groups", symbolic={0: (2, 3), 2: (2, 3)}),
    deform((1, 2, 3, 3), (1, 2, 1, 2), (3, 2), offset_group=2, mask=True, note="offset groups", symbolic=SHAPES),
    deform((1, 2, 4, 3), (1, 2, 2, 2), (2, 3), pads=[0, 1, 0, 1], dilations=[2, 2], note="pads", symbolic=BATCH),
    deform((1, 1, 4), (1, 1, 2), (3,), note="one axis", symbolic={}),
    deform((1, 1, 2, 3, 2), (1, 1, 1, 2, 1), (2, 2, 2), note="three axes", symbolic={}),
]
CASES = [*ALIGN, *POOL, *DEFORM]
test_rule = ladder("regions", CASES)
test_dtype = dtypes([ALIGN[0], POOL[0], DEFORM[1]])


@pytest.mark.parametrize("case", [c for c in CASES if not c.note.endswith(("axis", "axes"))], ids=lambda c: c.id)
def test_what_is_written_out_is_what_the_runtime_computes(case):
    """The value in the derived graph is that of ONNX Runtime's own kernel."""
    rng = np.random.default_rng(0)
    held = [rng.standard_normal(x) if isinstance(x, tuple) else x for x in case.inputs]
    feeds = {f"x{i}": x for i, x in enumerate(held) if x is not None}
    primal = node_model(case, feeds, dtype=np.float32)
    derived = vjp(primal, wrt=["x0"], of=["y0"])
    results = []
    for model in (primal, derived):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        given = {i.name: feeds.get(i.name) for i in session.get_inputs()}
        if model is derived:
            given[signature(derived).cotangents["y0"]] = np.zeros(results[0].shape)
        given = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in given.items()}
        results.append(session.run(["y0"], given)[0])
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=2e-5)
