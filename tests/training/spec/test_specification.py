"""The worked examples of the specification, executed; what to expect is computed by PyTorch or by hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.training import ReferenceTraining, attach, compile_step, lower_gradients, validate
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import mlp, run, train
from tests.training.spec.test_gradient_node import model

ROOT = Path(__file__).parents[3]
#: Tests of the onnx package, which the page cites as well.
CASES = {"test_gradient_of_add", "test_gradient_of_add_and_mul"}
RNG = np.random.default_rng(7)
W, X = RNG.standard_normal((2, 1, 2, 2)).astype(np.float32), RNG.standard_normal((3, 1, 3, 3)).astype(np.float32)
Z, H_1, Z_1 = (RNG.standard_normal(s).astype(np.float32) for s in ((8, 2), (3, 8), (8, 2)))

PICTURE = """g (float[2, 1, 2, 2] W, float[3, 1, 3, 3] X, float[8, 2] Z, float[3, 8] H_1, float[8, 2] Z_1)
    => ({outputs}) {{
    C = Conv (X, W)
    H = Flatten (C)
    L = Gemm (H, Z)
    Y = Tanh (L)
    {gradient}
}}"""


def picture(outputs: str, gradient: str) -> dict[str, np.ndarray]:
    proto = model(PICTURE.format(outputs=outputs, gradient=gradient))
    return run(lower_gradients(proto), {"W": W, "X": X, "Z": Z, "H_1": H_1, "Z_1": Z_1})


def by_torch(h: np.ndarray | None = None, z: np.ndarray = Z) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    w, z = torch.tensor(W, requires_grad=True), torch.tensor(z, requires_grad=True)
    at = torch.conv2d(torch.tensor(X), w).flatten(1) if h is None else torch.tensor(h, requires_grad=True)
    at.retain_grad()
    torch.tanh(at @ z).sum().backward()
    found = {"W": w.grad, "Z": z.grad, "H": at.grad}
    return {n: g.numpy() for n, g in found.items() if g is not None}


@pytest.mark.torch
def test_gradient_with_respect_to_w_and_z():
    """The first picture: Gradient(xs=["W", "Z"], zs=["X"], y="Y")."""
    found = picture(
        "float[2, 1, 2, 2] dW, float[8, 2] dZ", 'dW, dZ = Gradient <xs = ["W", "Z"], zs = ["X"], y = "Y"> (W, Z, X)'
    )
    want = by_torch()
    np.testing.assert_allclose(found["dW"], want["W"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["dZ"], want["Z"], rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_gradient_with_respect_to_an_intermediate_tensor():
    """The second: Gradient(xs=["H", "Z"], y="Y"), H being computed from W and X."""
    found = picture("float[3, 8] dH, float[8, 2] dZ", 'dH, dZ = Gradient <xs = ["H", "Z"], y = "Y"> (H, Z)')
    want = by_torch()
    np.testing.assert_allclose(found["dH"], want["H"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["dZ"], want["Z"], rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_first_output_skipped():
    """ "For example, user can assign an empty string to the 1st output name of that Gradient"."""
    proto = model(
        PICTURE.format(
            outputs="float[8, 2] dZ", gradient='dW, dZ = Gradient <xs = ["W", "Z"], zs = ["X"], y = "Y"> (W, Z, X)'
        )
    )
    proto.graph.node[-1].output[0] = ""
    lowered = lower_gradients(proto)
    found = run(lowered, {"W": W, "X": X, "Z": Z, "H_1": H_1, "Z_1": Z_1})
    np.testing.assert_allclose(found["dZ"], by_torch()["Z"], rtol=1e-4, atol=1e-5)
    assert [n.op_type for n in lowered.graph.node].count("Conv") == 1, "dY/dW was computed"


@pytest.mark.torch
def test_gradient_at_a_specific_value():
    """The last: dY/dH when H = H_1 and Z = Z_1; nothing of the first part is evaluated again."""
    found = picture("float[3, 8] dH, float[8, 2] dZ", 'dH, dZ = Gradient <xs = ["H", "Z"], y = "Y"> (H_1, Z_1)')
    want = by_torch(H_1, Z_1)
    np.testing.assert_allclose(found["dH"], want["H"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["dZ"], want["Z"], rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_second_order_of_a_linear_model():
    """W, X → Gemm → Y → Loss → O: a Gradient of the first Gradient's dO/dW, and one more of that."""
    torch = pytest.importorskip("torch")
    proto = model("""g (double[4, 2] X, double[2, 3] W, double[4, 3] L)
        => (double[4, 2] dX, double[2, 3] dW, double[4, 2] dWdX, double[2, 3] d2W, double[2, 3] d3W) {
        Y = Gemm (X, W)
        D = Sub (Y, L)
        D2 = Mul (D, D)
        D4 = Mul (D2, D2)
        O = ReduceMean <keepdims = 0> (D4)
        dX, dW = Gradient <xs = ["X", "W"], zs = ["L"], y = "O"> (X, W, L)
        dWdX, d2W = Gradient <xs = ["X", "W"], zs = ["L"], y = "dW"> (X, W, L)
        none, d3W = Gradient <xs = ["X", "W"], zs = ["L"], y = "d2W"> (X, W, L)
    }""")
    x, w, target = (RNG.standard_normal(s) for s in ((4, 2), (2, 3), (4, 3)))
    found = run(lower_gradients(proto), {"X": x, "W": w, "L": target})
    x_, w_ = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    loss = ((x_ @ w_ - torch.tensor(target)) ** 4).mean()
    dx, dw = torch.autograd.grad(loss, (x_, w_), create_graph=True)
    dwdx, d2w = torch.autograd.grad(dw.sum(), (x_, w_), create_graph=True)
    (d3w,) = torch.autograd.grad(d2w.sum(), w_)
    for name, want in (("dX", dx), ("dW", dw), ("dWdX", dwdx), ("d2W", d2w), ("d3W", d3w)):
        np.testing.assert_allclose(found[name], want.detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_page_names_what_exists():
    """Every module, function, test and case that the page cites."""
    page = (ROOT / "docs" / "training-specification.md").read_text()
    rooms = [ROOT / "src" / "onnxgrad" / room for room in ("transforms", "training")]
    sources = {f.name: f.read_text() for room in rooms for f in room.rglob("*.py")}
    tests = ROOT / "tests" / "training"
    cited = 0
    for line in page.splitlines():
        here: Path | None = None
        for span in re.findall(r"`([^`]+)`", line):
            file, _, name = span.partition("::")
            if span in CASES:
                continue
            if re.fullmatch(r"([\w/]+/)?test_\w+(\.py)?", file):
                here = (ROOT if file.startswith("tests/") else tests) / file if file.endswith(".py") else here
                name = name or ("" if file.endswith(".py") else file)
                assert here is not None, f"{span}: of which file"
                assert here.is_file(), f"{span}: no such file"
                assert not name or f"def {name}(" in here.read_text(), f"{span} in {here}: no such test"
            elif file.endswith(".py"):
                assert file in sources, f"{span}: no such module"
                assert not name or re.search(rf"(def|class) {name.rpartition('.')[2]}\b", sources[file]), span
            cited += 1
        for case in re.findall(r'`spec/test_validation.py` ((?:"[^"]+"(?:, | and )?)+)', line):
            for quoted in re.findall(r'"([^"]+)"', case):
                assert f'"{quoted}"' in (tests / "spec" / "test_validation.py").read_text(), f"no case {quoted!r}"
    assert cited > 150


def test_concatenation():
    """a, b → MatMul → c → Sigmoid → d is the inference graph, d → Add → e the algorithm, and e takes the place of b."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        net (float[2, 2] tensor_a) => (float[2, 2] tensor_d)
        <float[2, 2] tensor_b = {1, 2, 3, 4}> {
            tensor_c = MatMul (tensor_a, tensor_b)
            tensor_d = Sigmoid (tensor_c)
        }""")
    info = proto.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [helper.make_node("Add", ["tensor_d", "tensor_d"], ["tensor_e"])],
            "algorithm",
            [],
            [helper.make_tensor_value_info("tensor_e", TensorProto.FLOAT, [2, 2])],
        )
    )
    info.update_binding.add(key="tensor_b", value="tensor_e")
    assert validate(proto) == []
    runner, a = ReferenceTraining(proto), np.float32([[0.1, 0.2], [0.3, 0.4]])
    b = np.float32([[1, 2], [3, 4]])
    step = compile_step(proto, outputs=["tensor_d"])
    for _ in range(2):
        runner.step({"tensor_a": a})
        b = 2 / (1 + np.exp(-a @ b))
        np.testing.assert_allclose(runner.state["tensor_b"], b, rtol=1e-5)
    state, _ = train(step, [{"tensor_a": a}] * 2)
    np.testing.assert_allclose(state["tensor_b"], b, rtol=1e-5)


def test_block_coordinate_descent():
    """Two blocks of one quadratic, an entry for each, and the count of both in the first: x = r⁻¹-steps by hand."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net () => (float f)
        <float u = {4.0}, float v = {-3.0}> {
            uu = Mul (u, u)
            vv = Mul (v, v)
            uv = Mul (u, v)
            s = Add (uu, vv)
            f = Add (s, uv)
        }""")
    for me, other in (("u", "v"), ("v", "u")):
        info = proto.training_info.add()
        nodes = [
            helper.make_node("Gradient", [me, other], [f"d{me}"], domain=DOMAIN, xs=[me], zs=[other], y="f"),
            helper.make_node("Adagrad", [f"R{me}", "T", me, f"d{me}", f"H{me}"], [f"{me}_new", f"H{me}_new"],
                             domain=DOMAIN, decay_factor=0.5),
        ]  # fmt: skip
        held = [numpy_helper.from_array(np.array(0.3, np.float32), f"R{me}"),
                numpy_helper.from_array(np.array(0, np.float32), f"H{me}")]  # fmt: skip
        outputs = [helper.make_tensor_value_info(n, 1, []) for n in (f"{me}_new", f"H{me}_new")]
        if me == "u":
            nodes.append(helper.make_node("Add", ["T", "one"], ["T_new"]))
            held += [numpy_helper.from_array(np.array(n, np.int64), name) for name, n in (("T", 0), ("one", 1))]
            outputs.append(helper.make_tensor_value_info("T_new", TensorProto.INT64, []))
            info.update_binding.add(key="T", value="T_new")
        info.algorithm.CopyFrom(helper.make_graph(nodes, "algorithm", [], outputs, held))
        info.update_binding.add(key=me, value=f"{me}_new")
        info.update_binding.add(key=f"H{me}", value=f"H{me}_new")
    assert validate(proto) == []
    u, v, hu, hv = 4.0, -3.0, 0.0, 0.0
    for t in range(20):
        g = 2 * u + v
        hu += g * g
        u -= 0.3 / (1 + t * 0.5) * g / (np.sqrt(hu) + 1e-6)
        g = 2 * v + u
        hv += g * g
        v -= 0.3 / (1 + (t + 1) * 0.5) * g / (np.sqrt(hv) + 1e-6)  # the first entry has counted already
    runner = ReferenceTraining(proto)
    for _ in range(20):
        runner.step({})
    state, _ = train(compile_step(proto), [{}] * 20)
    for found in (runner.state, state):
        np.testing.assert_allclose([found["u"], found["v"], found["T"]], [u, v, 20], rtol=1e-5)


# --- the same training in PyTorch -------------------------------------------------------------------

OPTIMIZERS = {
    "adagrad": ({"learning_rate": 2**-3, "eps": 1e-6}, lambda o, p: o.Adagrad(p, lr=2**-3, eps=1e-6)),
    "adam, the operator": (
        {"learning_rate": 2**-7, "eps": 1e-16, "convention": "onnx"},
        lambda o, p: o.Adam(p, lr=2**-7, eps=1e-16),
    ),
    "adam": (
        {"learning_rate": 2**-7, "eps": 1e-3},
        lambda o, p: o.Adam(p, lr=2**-7, eps=1e-3),
    ),
    "momentum": ({"learning_rate": 2**-4, "momentum": 0.8}, lambda o, p: o.SGD(p, lr=2**-4, momentum=0.8)),
    "nesterov": (
        {"learning_rate": 2**-4, "momentum": 0.8},
        lambda o, p: o.SGD(p, lr=2**-4, momentum=0.8, nesterov=True),
    ),
}


def trained_by_torch(make, batches, dtype):
    torch = pytest.importorskip("torch")
    p = {t.name: torch.tensor(numpy_helper.to_array(t), requires_grad=True) for t in mlp(dtype=dtype).graph.initializer}
    optimizer = make(torch.optim, list(p.values()))
    for batch in batches:
        optimizer.zero_grad()
        x, labels = (torch.tensor(batch[n].astype(dtype)) for n in ("x", "labels"))
        y = torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        torch.nn.functional.mse_loss(y, labels).backward()
        optimizer.step()
    return {n: v.detach().numpy() for n, v in p.items()}


@pytest.mark.torch
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hundred_steps_of_pytorch(name):
    """In double precision to 9 digits; in single precision as far from that as PyTorch itself is, up to a factor.

    Rates are stored as float32, so these are powers of two.
    """
    settings, make = OPTIMIZERS[name]
    rng = np.random.default_rng(5)
    batches = [{"x": rng.standard_normal((16, 4)), "labels": rng.standard_normal((16, 3))} for _ in range(100)]
    exact, single = (trained_by_torch(make, batches, dtype) for dtype in (np.float64, np.float32))
    for dtype in (np.float64, np.float32):
        model = attach(mlp(dtype=dtype), loss="mse", optimizer=name.partition(",")[0], **settings)
        assert validate(model) == []
        state, _ = train(compile_step(model), [{n: a.astype(dtype) for n, a in b.items()} for b in batches])
        for n, want in exact.items():
            if dtype == np.float64:
                np.testing.assert_allclose(state[n], want, rtol=1e-9, atol=1e-11, err_msg=n)
            else:
                theirs = np.abs(single[n] - want).max()
                assert np.abs(state[n] - want).max() <= 4 * theirs + 1e-6 * np.abs(want).max(), n
