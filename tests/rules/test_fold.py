"""MaxUnpool and Col2Im up the ladder."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder
from tests.rules.windowed import GatherElements, ScatterElements

EVALUATORS = (GatherElements, ScatterElements)


def places(shape, within, seed=0):
    """Distinct indices into a tensor of shape `within`, as many as a tensor of `shape` has."""
    rng = np.random.default_rng(seed)
    return rng.permutation(int(np.prod(within)))[: int(np.prod(shape))].reshape(shape)


def unpool(x, index, *, shape=None, note="", order=1, **attrs):
    rest = [] if shape is None else [np.array(shape)]
    return Case("MaxUnpool", [x, index, *rest], attrs, wrt=[0], order=order, note=note, evaluators=EVALUATORS)


TWICE = {"kernel_shape": [2, 2], "strides": [2, 2]}
UNPOOL = [
    unpool((2, 1, 3), places((2, 1, 3), (2, 1, 6)), kernel_shape=[2], strides=[2], order=2),
    unpool((1, 2, 2, 3), places((1, 2, 2, 3), (1, 2, 4, 6)), **TWICE, order=2),
    unpool((1, 2, 2, 3), places((1, 2, 2, 3), (1, 2, 3, 4)), kernel_shape=[2, 2], note="stride 1"),
    unpool((1, 1, 2, 3), places((1, 1, 2, 3), (1, 1, 3, 4)), kernel_shape=[3, 2], strides=[2, 2],
           pads=[1, 1, 1, 1], note="pads"),
    unpool((1, 1, 2, 2), np.array([[[[5, 5], [13, 5]]]]), **TWICE, note="one place for three"),
    unpool((1, 1, 2, 2, 1), places((1, 1, 2, 2, 1), (1, 1, 4, 2, 3)), kernel_shape=[2, 1, 3], strides=[2, 1, 3]),
    unpool((1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]]), shape=[1, 1, 4, 4], **TWICE, note="shape"),
]  # fmt: skip


def col2im(x, image, block, *, note="", order=1, **attrs):
    return Case("Col2Im", [x, np.array(image), np.array(block)], attrs, wrt=[0], order=order, note=note)


COL2IM = [
    col2im((1, 4, 6), [3, 4], [2, 2], order=2),
    col2im((2, 8, 2), [2, 4], [2, 2], strides=[2, 2], note="tiles"),
    col2im((1, 6, 6), [4, 3], [2, 3], strides=[2, 1], pads=[1, 1, 0, 1], note="pads"),
    col2im((1, 8, 4), [5, 6], [2, 2], dilations=[3, 2], strides=[1, 3], note="dilations"),
    col2im((1, 4, 4), [5], [2], note="one axis"),
    col2im((1, 8, 2), [2, 3, 2], [2, 2, 2], note="three axes"),
    col2im((1, 2, 2), [5], [2], strides=[3], note="gaps"),
]
CASES = [*UNPOOL, *COL2IM]
test_rule = ladder("fold", CASES)
test_dtype = dtypes([UNPOOL[1], COL2IM[2]])


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def test_unpooling_into_a_shape_follows_the_runtime():
    """Beside an output shape ONNX Runtime counts indices in that shape, the reference evaluator in another."""
    held = UNPOOL[-1]
    index, shape = held.inputs[1], np.array([1, 1, 5, 5])
    x = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)
    u = np.random.default_rng(0).standard_normal((1, 1, 5, 5)).astype(np.float32)
    case = unpool(x, index, shape=shape, **TWICE)
    model = vjp(node_model(case, {"x0": x, "x1": index, "x2": shape}, dtype=np.float32), wrt=["x0"], of=["y0"])
    got = run(model, {"x0": x, signature(model).cotangents["y0"]: u})
    where = [int(np.flatnonzero(got["y0"] == v)[0]) for v in x.reshape(-1)]
    np.testing.assert_array_equal(got[signature(model).gradients["x0"]].reshape(-1), u.reshape(-1)[where])


@pytest.mark.parametrize("fed", [(1,), (2,), (1, 2)], ids=str)
def test_columns_of_sizes_that_only_the_run_knows(fed):
    """The image and the block may be computed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 6, 6)).astype(np.float32)
    attrs = {"strides": [2, 1], "pads": [1, 1, 0, 1]}
    case = Case("Col2Im", [x, np.array([4, 3]), np.array([2, 3])], attrs, fed=True)
    feeds = {f"x{i}": v for i, v in enumerate(case.inputs)}
    primal = node_model(case, feeds, symbolic=True, dtype=np.float32)
    for i in {1, 2} - set(fed):
        primal.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(feeds[f"x{i}"], f"x{i}"))
        del primal.graph.input[[v.name for v in primal.graph.input].index(f"x{i}")]
    model = vjp(primal, wrt=["x0"], of=["y0"])
    u = rng.standard_normal((1, 1, 4, 3)).astype(np.float32)
    given = {k: v for k, v in feeds.items() if k == "x0" or int(k[1:]) in fed}
    got = run(model, given | {signature(model).cotangents["y0"]: u})[signature(model).gradients["x0"]]
    for at in np.ndindex(x.shape):
        unit = np.zeros_like(x)
        unit[at] = 1
        assert got[at] == pytest.approx(np.vdot(run(primal, given | {"x0": unit})["y0"], u), abs=1e-6)
