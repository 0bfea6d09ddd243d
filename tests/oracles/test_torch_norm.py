"""Normalizations against PyTorch on ONNX Runtime in float32: values, first and second derivatives."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnxgrad import signature, vjp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional
CPU = ["CPUExecutionProvider"]
X = (2, 4, 3, 5)
C = (4,)
EPSILON = 1e-3
E = {"epsilon": EPSILON}


def layer_norm(x, s, b):
    return F.layer_norm(x, x.shape[2:], s, b, EPSILON)


def mean_variance(x, axes=(0, 2, 3)):
    d = x - x.mean(axes, keepdim=True)
    return d / ((d * d).mean(axes, keepdim=True).sqrt() + 1e-9)


def per_group(x, s, b):
    return F.group_norm(x, 2, s.repeat_interleave(2), b.repeat_interleave(2), EPSILON)


def batch_norm(x, s, b, m, v):
    return F.batch_norm(x, m, v.exp(), s, b, eps=EPSILON)


def batch_norm_training(x, s, b):
    return F.batch_norm(x, None, None, s, b, training=True, eps=EPSILON)


#: operator, opset, attributes, shapes of the operands, the same in PyTorch
NORMS = {
    "layer": ("LayerNormalization", 17, {"axis": 2, **E}, [X, (3, 5), (3, 5)], layer_norm),
    "rms": (
        "RMSNormalization", 23, {"axis": -1, **E}, [X, (5,)],
        lambda x, s: F.rms_norm(x, (5,), s, EPSILON),
    ),
    "instance": (
        "InstanceNormalization", 21, {**E}, [X, C, C],
        lambda x, s, b: F.instance_norm(x, None, None, s, b, eps=EPSILON),
    ),
    "group": (
        "GroupNormalization", 21, {"num_groups": 2, **E}, [X, C, C],
        lambda x, s, b: F.group_norm(x, 2, s, b, EPSILON),
    ),
    "group, parameters per group": (
        "GroupNormalization", 18, {"num_groups": 2, **E}, [X, (2,), (2,)], per_group,
    ),
    "batch, training": (
        "BatchNormalization", 18, {"training_mode": 1, **E}, [(3, 4, 3, 2), C, C], batch_norm_training,
    ),
    "batch, training, momentum 0": (
        "BatchNormalization", 18, {"training_mode": 1, "momentum": 0.0, **E}, [(3, 4, 3, 2), C, C],
        batch_norm_training,
    ),
    "response": (
        "LRN", 18, {"size": 3, "alpha": 0.4, "beta": 0.6, "bias": 1.3}, [(2, 4, 3, 2)],
        lambda x: F.local_response_norm(x, 3, 0.4, 0.6, 1.3),
    ),
    "euclidean": ("LpNormalization", 18, {"axis": 1}, [(2, 4, 3)], lambda x: F.normalize(x, 2, 1, 0)),
    "manhattan": ("LpNormalization", 18, {"axis": 1, "p": 1}, [(2, 4, 3)], lambda x: F.normalize(x, 1, 1, 0)),
    "moments along an axis": (
        "MeanVarianceNormalization", 18, {"axes": [1]}, [(2, 4, 3)], lambda x: mean_variance(x, 1),
    ),
    "moments along the ends": (
        "MeanVarianceNormalization", 18, {"axes": [-1, 0]}, [(2, 4, 3)], lambda x: mean_variance(x, (2, 0)),
    ),
    "moments": ("MeanVarianceNormalization", 18, {}, [(2, 4, 3, 2)], mean_variance),
}  # fmt: skip


def primal(op, opset, attrs, shapes, symbolic):
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = [
        helper.make_tensor_value_info(n, 1, [f"N{n}", *s[1:]] if symbolic and n == "x0" else s)
        for n, s in zip(names, shapes)
    ]
    outputs = [helper.make_tensor_value_info("y", 1, ["Nx0" if symbolic else shapes[0][0], *shapes[0][1:]])]
    extra = []
    if op == "BatchNormalization":
        names += ["mean", "var"]
        inputs += [helper.make_tensor_value_info(n, 1, C) for n in names[-2:]]
        extra = ["running_mean", "running_var"] if attrs.get("training_mode") else []
    node = helper.make_node(op, names, ["y", *extra], **attrs)
    graph = helper.make_graph([node], "norm", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run(model, feeds, names, threads=2):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return session.run(names, {k: v.copy() for k, v in feeds.items() if k in wanted})


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "batch"])
@pytest.mark.parametrize("name", NORMS)
def test_norm(name, symbolic):
    op, opset, attrs, shapes, oracle = NORMS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    u, v = (rng.standard_normal(shapes[0]).astype(np.float32) for _ in range(2))
    tu = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    y = oracle(*tensors)
    gradients = torch.autograd.grad(y, tensors, tu, create_graph=True)
    seconds = torch.autograd.grad(gradients[0], [*tensors[:2], tu], torch.tensor(v).double(), allow_unused=True)

    model = vjp(primal(op, opset, attrs, shapes, symbolic), wrt=list(feeds), of="y")
    sig = signature(model)
    given = feeds | {sig.cotangents["y"]: u, "mean": np.ones(4, np.float32), "var": np.ones(4, np.float32)}
    got = run(model, given, ["y", *(sig.gradients[n] for n in feeds)])
    for have, want in zip(got, [y, *gradients]):
        np.testing.assert_allclose(have, want.detach().numpy(), rtol=0, atol=3e-5)

    through = [*list(feeds)[:2], sig.cotangents["y"]]
    second = vjp(model, wrt=through, of=sig.gradients["x0"])
    names = signature(second)
    got = run(second, given | {names.cotangents[sig.gradients["x0"]]: v}, [names.gradients[w] for w in through])
    for have, want in zip(got, seconds if len(feeds) > 1 else [seconds[0], seconds[-1]]):
        want = np.zeros_like(have) if want is None else want.numpy()
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-4 * max(1, np.abs(want).max()))


def test_batch_normalization_with_given_statistics():
    rng = np.random.default_rng(1)
    shapes = [(2, 4, 3, 2), C, C, C, C]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arrays[4] = np.exp(arrays[4])
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    x, s, b, m, v = tensors
    y = (x - m[:, None, None]) / (v[:, None, None] + EPSILON).sqrt() * s[:, None, None] + b[:, None, None]
    u = rng.standard_normal(shapes[0]).astype(np.float32)
    y.backward(torch.tensor(u))
    names = ["x0", "x1", "x2", "mean", "var"]
    model = vjp(primal("BatchNormalization", 18, {**E}, shapes[:3], True), wrt=names, of="y")
    sig = signature(model)
    feeds = dict(zip(names, arrays)) | {sig.cotangents["y"]: u}
    for have, t in zip(run(model, feeds, [sig.gradients[n] for n in names]), tensors):
        np.testing.assert_allclose(have, t.grad.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_training_gradients_ignore_the_running_statistics(momentum):
    """ONNX Runtime overwrites the running statistics that it is fed; no gradient may read them.

    One session, two threads, the same arrays fed again and again, and a NaN among them.
    """
    rng = np.random.default_rng(2)
    shapes = [(8, 4, 6, 6), C, C]
    attrs = {"training_mode": 1, "momentum": momentum, **E}
    model = vjp(primal("BatchNormalization", 18, attrs, shapes, True), wrt=["x0", "x1", "x2"], of="y")
    sig = signature(model)
    feeds = {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    feeds[sig.cotangents["y"]] = rng.standard_normal(shapes[0]).astype(np.float32)
    feeds |= {"mean": np.full(4, 3.0, np.float32), "var": np.full(4, 5.0, np.float32)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [sig.gradients[n] for n in ("x0", "x1", "x2")]
    first = session.run(names, feeds)
    for i in range(20):
        if momentum and i == 10:
            feeds["mean"][0] = np.nan
        for have, want in zip(session.run(names, feeds), first):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1, 2])
def test_a_zero_row_has_gradient_zero(p):
    x = np.array([[0, 0, 0], [1, -2, 2]], np.float32)
    model = vjp(primal("LpNormalization", 18, {"axis": 1, "p": p}, [x.shape], False), wrt="x0", of="y")
    sig = signature(model)
    (g,) = run(model, {"x0": x, sig.cotangents["y"]: np.ones_like(x)}, [sig.gradients["x0"]])
    np.testing.assert_array_equal(g[0], 0)
    assert np.isfinite(g).all()
    assert np.abs(g[1]).max() > 0


@pytest.mark.parametrize(
    "op",
    [f"{kind}Normalization" for kind in ("Layer", "RMS", "Batch", "Group", "Instance")],
)
def test_half_precision_keeps_its_type(op):
    """Operands in float16; the gradients have their types and are close to those in float32."""
    rng = np.random.default_rng(3)
    shapes = [(2, 4, 6), (6,), (6,)] if op in ("LayerNormalization", "RMSNormalization") else [(2, 4, 6), C, C]
    shapes = shapes[:2] if op == "RMSNormalization" else shapes
    attrs = {"num_groups": 2} if op == "GroupNormalization" else {}
    if op == "BatchNormalization":
        attrs["training_mode"] = 1
    feeds = {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    u = rng.standard_normal(shapes[0]).astype(np.float32)
    results = []
    for kind, dtype in ((1, np.float32), (10, np.float16)):
        model = primal(op, 23, attrs, shapes, True)
        for value in [*model.graph.input, *model.graph.output]:
            value.type.tensor_type.elem_type = kind
        model = vjp(model, wrt=list(feeds), of="y")
        onnx.checker.check_model(model, full_check=True)
        sig = signature(model)
        given = {k: a.astype(dtype) for k, a in (feeds | {sig.cotangents["y"]: u}).items()}
        given |= {"mean": np.ones(4, dtype), "var": np.ones(4, dtype)}
        results.append(run(model, given, [sig.gradients[n] for n in feeds]))
    for single, half in zip(*results):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half.astype(np.float32), single, rtol=0, atol=3e-2)
