"""Indexing, scattering, padding and products against PyTorch's autograd, on ONNX Runtime in float32."""

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgrad import signature, vjp

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.torch
ort.set_default_logger_severity(3)
RNG = np.random.default_rng(0)
I23 = np.array([[0, 2, 2], [1, 0, 2]])


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def scatter_reduce(how):
    return lambda x, i, u: torch.scatter_reduce(x, 0, i, u, how, include_self=True)


CASES = {
    "gather rows": ("Gather", [floats(6, 3), np.array([5, 0, 5, 5])], {}, lambda x, i: x[i]),
    "gather grid": ("Gather", [floats(6, 3), I23], {}, lambda x, i: x[i]),
    "gather axis 1": ("Gather", [floats(2, 6), np.array([5, -1])], {"axis": 1}, lambda x, i: x[:, i]),
    "gather elements": ("GatherElements", [floats(4, 5), I23], {}, lambda x, i: torch.gather(x, 0, i)),
    "gather elements 1": (
        "GatherElements",
        [floats(4, 5), I23],
        {"axis": 1},
        lambda x, i: torch.gather(x, 1, i),
    ),
    "gather nd": (
        "GatherND",
        [floats(4, 5), np.array([[0, 1], [3, 4], [0, 1]])],
        {},
        lambda x, i: x[i[:, 0], i[:, 1]],
    ),
    "scatter add": (
        "ScatterElements",
        [floats(3, 4), I23, floats(2, 3)],
        {"reduction": "add"},
        lambda x, i, u: x.scatter_add(0, i, u),
    ),
    "scatter mul": (
        "ScatterElements",
        [floats(3, 4), I23, floats(2, 3)],
        {"reduction": "mul"},
        scatter_reduce("prod"),
    ),
    "scatter max": (
        "ScatterElements",
        [floats(3, 4), I23, floats(2, 3)],
        {"reduction": "max"},
        scatter_reduce("amax"),
    ),
    "scatter min": (
        "ScatterElements",
        [floats(3, 4), I23, floats(2, 3)],
        {"reduction": "min"},
        scatter_reduce("amin"),
    ),
    "scatter max ties": (
        "ScatterElements",
        [np.ones((3, 4), np.float32), I23, np.ones((2, 3), np.float32)],
        {"reduction": "max"},
        scatter_reduce("amax"),
    ),
    "top k": ("TopK", [floats(2, 6), np.array([3])], {}, lambda x, k: torch.topk(x, 3).values),
    "slice": (
        "Slice",
        [floats(7, 6), np.array([1, -1]), np.array([6, 0]), np.array([0, 1]), np.array([2, 1])],
        {},
        lambda x, *_: x[1:6:2, -1:0],
    ),
    "flip": (
        "Slice",
        [floats(4, 3), np.array([-1]), np.array([-(2**63)]), np.array([0]), np.array([-1])],
        {},
        lambda x, *_: x.flip(0),
    ),
    "crop and pad": (
        "Pad",
        [floats(3, 4), np.array([-1, 2, 1, -2])],
        {},
        lambda x, _: torch.nn.functional.pad(x, (2, -2, -1, 1)),
    ),
    "reflect": (
        "Pad",
        [floats(1, 3, 4), np.array([0, 0, 2, 0, 0, 3])],
        {"mode": "reflect"},
        lambda x, _: torch.nn.functional.pad(x, (2, 3), mode="reflect"),
    ),
    "edge": (
        "Pad",
        [floats(1, 3, 4), np.array([0, 0, 2, 0, 0, 5])],
        {"mode": "edge"},
        lambda x, _: torch.nn.functional.pad(x, (2, 5), mode="replicate"),
    ),
    "wrap": (
        "Pad",
        [floats(1, 3, 4), np.array([0, 0, 2, 0, 0, 3])],
        {"mode": "wrap"},
        lambda x, _: torch.nn.functional.pad(x, (2, 3), mode="circular"),
    ),
    "tile": ("Tile", [floats(2, 3), np.array([2, 3])], {}, lambda x, _: x.tile(2, 3)),
    "pixel shuffle": (
        "DepthToSpace",
        [floats(2, 8, 2, 3)],
        {"blocksize": 2, "mode": "CRD"},
        lambda x: torch.nn.functional.pixel_shuffle(x, 2),
    ),
    "tril": ("Trilu", [floats(3, 4), np.array(-1)], {"upper": 0}, lambda x, _: x.tril(-1)),
    "gemm": (
        "Gemm",
        [floats(3, 2), floats(4, 3), floats(4)],
        {"transA": 1, "transB": 1, "alpha": 0.5},
        lambda a, b, c: 0.5 * a.T @ b.T + c,
    ),
    "linear": ("MatMul", [floats(2, 3, 4), floats(4, 5)], {}, lambda a, b: a @ b),
    "bmm": ("MatMul", [floats(2, 1, 3, 4), floats(5, 4, 2)], {}, lambda a, b: a @ b),
    "einsum": (
        "Einsum",
        [floats(2, 3, 4), floats(5, 4)],
        {"equation": "bij,kj->bki"},
        lambda a, b: torch.einsum("bij,kj->bki", a, b),
    ),
    "diagonal": (
        "Einsum",
        [floats(3, 3), floats(3)],
        {"equation": "ii,i->i"},
        lambda a, b: torch.einsum("ii,i->i", a, b),
    ),
}


@pytest.mark.parametrize("fixed", [True, False], ids=["constant", "fed"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, symbolic, fixed):
    op, arrays, attrs, f = CASES[name]
    names = [f"x{i}" for i in range(len(arrays))]
    wrt = [n for n, a in zip(names, arrays) if a.dtype.kind == "f"]
    inputs = [
        helper.make_tensor_value_info(
            n,
            helper.np_dtype_to_tensor_dtype(a.dtype),
            [f"{n}_{k}" for k in range(a.ndim)] if symbolic and n in wrt else a.shape,
        )
        for n, a in zip(names, arrays)
        if n in wrt or not fixed
    ]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in zip(names, arrays) if n not in wrt and fixed]
    outputs = ["y", "i"] if op == "TopK" else ["y"]
    node = helper.make_node(op, names, outputs, **attrs)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    tensors = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    want = f(*tensors)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * want.ndim)
    graph = helper.make_graph([node], "g", inputs, [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    derived = vjp(model, wrt=wrt, of="y")
    u = floats(*want.shape)
    want.backward(torch.tensor(u))
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    given = dict(zip(names, arrays)) | {signature(derived).cotangents["y"]: u}
    got = dict(
        zip(
            [o.name for o in session.get_outputs()],
            session.run(None, {i.name: given[i.name] for i in session.get_inputs()}),
        )
    )
    np.testing.assert_allclose(got["y"], want.detach().numpy(), rtol=1e-5, atol=1e-6)
    for n, t in zip(names, tensors):
        if n in wrt:
            np.testing.assert_allclose(
                got[signature(derived).gradients[n]], t.grad.numpy(), rtol=1e-5, atol=1e-5, err_msg=n
            )


def test_gradient_of_an_embedding_is_the_same_every_time():
    """Repeated indices must be added, not raced over by the threads of the runtime."""
    table, ids = floats(1000, 64), RNG.integers(0, 50, 1024)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Gather", ["table", "ids"], ["y"])],
            "g",
            [
                helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, table.shape),
                helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"]),
            ],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 64])],
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    derived = vjp(model, wrt="table")
    assert not any(n.op_type == "ScatterND" for n in derived.graph.node)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(derived.SerializeToString(), options, providers=["CPUExecutionProvider"])
    u = floats(1024, 64)
    want = np.zeros_like(table, np.float64)
    np.add.at(want, ids, u.astype(np.float64))
    feeds = {"table": table, "ids": ids, "y_cotangent": u}
    held = {i.name: feeds[i.name] for i in session.get_inputs()}
    for _ in range(30):
        np.testing.assert_allclose(session.run(["table_grad"], held)[0], want, atol=1e-4)
