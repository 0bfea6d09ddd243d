"""``onnxgrad check --train``: whether a file trains as it was exported, and what a better export would give."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import jvp, vjp
from onnxgrad.training.measure.readiness import readiness
from tests.cli.said import ran, said
from tests.training.graph.test_linear_models import classifier as sklearn_classifier

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '


def model(text, weights=None):
    proto = onnx.parser.parse_model(HEAD + text)
    for name, shape in (weights or {}).items():
        array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def checked(proto, place, flags="", code=0):
    onnx.save(proto, place / "m.onnx")
    return said(place, f"check PLACE/m.onnx --train {flags}", code)


def test_a_classifier_of_probabilities(tmp_path):
    proto = model("(float[N, 6] x) => (float[N, 3] y) { s = MatMul(x, w)\n y = Softmax(s) }", {"w": (6, 3)})
    assert checked(proto, tmp_path).splitlines() == [
        "trains   with loss cross_entropy; labels: labels int64[N]",
        "trains   cross_entropy is taken of the logits 's' of the probabilities 'y'",
        "trains   trains 1 tensors, 18 numbers",
    ]
    first = json.loads(checked(proto, tmp_path, "--loss mse --json"))[0]
    assert first == {"kind": "trains", "text": "with loss mse; labels: labels float32[N, 3]"}


def test_nothing_that_onnxgrad_named_is_shown(tmp_path):
    text = checked(sklearn_classifier([0, 1, 2]), tmp_path)
    assert "cross_entropy is taken of the logits behind the probabilities" in text
    assert "labels: labels int64[?]" in text
    assert "15 numbers in operators" in said(tmp_path, "info PLACE/m.onnx")


def test_one_score_is_no_class_also_behind_a_sigmoid(tmp_path):
    proto = model("(float[N, 6] x) => (float[N, 1] y) { s = MatMul(x, w)\n y = Sigmoid(s) }", {"w": (6, 1)})
    text = " ".join(checked(proto, tmp_path, "--loss cross_entropy", 1).split())
    assert "one score for each row" in text
    assert "bce_with_logits takes one score" in text


def test_what_is_mended_and_what_a_better_export_would_give():
    chain = "".join(f"c{i + 1} = Conv(c{i}, w{i})\n " for i in range(8))
    proto = model(
        f"(float[2, 3, 9, 9] c0) => (float[2, 3] y) {{ {chain} d = Dropout(c8, half)\n y = Flatten(d) }}"
        .replace("float[2, 3] y", "float[2, 243] y"),
        {f"w{i}": (3, 3, 1, 1) for i in range(8)},
    )  # fmt: skip
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    kinds = {(f.kind, f.text.split(";")[0]) for f in readiness(proto)}
    assert ("advice", "c0 has 2 rows, always: a batch has exactly as many") in kinds
    assert ("advice", "8 Conv and no normalization: an exporter may have folded BatchNormalization into them") in kinds
    assert ("mended", "1 Dropout drop while training") in kinds
    normed = model(
        "(float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) { y = BatchNormalization(x, a, b, m, v) }",
        dict.fromkeys("abmv", (3,)),
    )
    assert "1 BatchNormalization run in training mode" in next(f.text for f in readiness(normed) if f.kind == "mended")
    rounded = model(
        "(float[N, 4] x) => (float[N, 2] y) { q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        " y = MatMul(d, w) }",
        {"w": (4, 2)},
    )
    for name, array in {"s": np.float32(0.1), "z": np.int8(0)}.items():
        rounded.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    found = readiness(rounded)
    assert ("mended", "2 rounding nodes are passed straight through by gradients") in {(f.kind, f.text) for f in found}
    assert found[0].kind == "trains"


def test_parameters_that_pytorchs_exporter_has_folded():
    """A batch normalization in the weights of a convolution, and the softmax of a parameter."""
    proto = model(
        "(float[N, 3, 4, 4] x) => (float[N, 3] y) { c = Conv(x, w, b)\n p = GlobalAveragePool(c)\n f = Flatten(p)\n"
        " h = MatMul(f, val_1)\n y = MatMul(h, softmax) }",
        {"w": (3, 3, 1, 1), "b": (3,), "val_1": (3, 3), "softmax": (3, 3)},
    )
    names = {"p_c_weight": "w", "p_n_weight": "n.weight", "p_last": "last", "p_mix": "mix"}
    signature = "\n".join(f"{p}: PARAMETER target='{name}'" for p, name in names.items())
    entry = proto.graph.metadata_props.add()
    entry.key, entry.value = "pkg.torch.export.ExportedProgram.graph_signature", signature
    calls = {"Conv": "%b : aten._native_batch_norm(%c, %p_n_weight)", "MatMul": "%l : aten.linear(%f, %p_last)"}
    for node in list(proto.graph.node)[:-1]:
        if node.op_type in calls:
            entry = node.metadata_props.add()
            entry.key, entry.value = "pkg.torch.onnx.fx_node", calls[node.op_type]
    (advice,) = [f.text for f in readiness(proto) if f.kind == "advice"]
    assert "in advance: n.weight, mix; export with optimize=False" in advice


def test_biases_of_zeros_that_pytorchs_exporter_has_left_out():
    """The optimizer of the exporter removes them from a Gemm."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    for layer in net[:2]:
        torch.nn.init.zeros_(layer.bias)
    for optimize in (False, True):
        exported = torch.onnx.export(net, (torch.ones(2, 4),), dynamo=True, verbose=False, optimize=optimize)
        advice = " ".join(f.text for f in readiness(exported.model_proto) if f.kind == "advice")
        assert ("in advance: 0.bias, 1.bias; export" in advice) is optimize


@pytest.mark.parametrize("optimize", [False, True])
def test_values_that_pytorch_detached(optimize):
    """A straight-through estimator: a file that is not optimized has PyTorch's derivative, and another says why not."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("onnxscript", reason="needs onnxscript")

    class StraightThrough(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = torch.nn.Parameter(torch.arange(1.0, 6.0))

        def forward(self, x):
            y = self.factors * x
            return y + (y.sin() - y).detach()

    module, x = StraightThrough(), torch.linspace(-1, 1, 5)
    proto = torch.onnx.export(
        module, (x,), dynamo=True, verbose=False, optimize=optimize, input_names=["x"], output_names=["y"]
    ).model_proto
    ones, factors = np.ones(5, np.float32), module.factors.detach().numpy()
    for derive, direction, result in ((vjp, "y_cotangent", "x_grad"), (jvp, "x_tangent", "y_tangent")):
        session = onnxruntime.InferenceSession(derive(proto, wrt="x", of="y").SerializeToString())
        (slopes,) = session.run([result], {"x": x.numpy(), direction: ones})
        assert np.allclose(slopes, factors * (np.cos(factors * x.numpy()) if optimize else 1), atol=1e-5)
    assert any("`detach()`" in f.text for f in readiness(proto)) is optimize


def test_what_does_not_train(tmp_path):
    (line,) = checked(model("(float[N, 4] x) => (float[N, 4] y) { y = Tanh(x) }"), tmp_path, code=1).splitlines()
    assert line.startswith("refused  loss cross_entropy or mse: ")
    two = model("(float[N, 4] x) => (float[N, 2] y, float[N, 2] z) { y = MatMul(x, w)\n z = Tanh(y) }", {"w": (4, 2)})
    assert "name the output" in checked(two, tmp_path, code=1)
    assert checked(two, tmp_path, "--of z").startswith("trains ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--train --wrt x", "neither --wrt"),
        ("--loss mse", "--loss goes with --train"),
        ("--json", "--json goes with --train"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, flags, says):
    onnx.save(model("(float[N, 4] x) => (float[N, 4] y) { y = Tanh(x) }"), tmp_path / "m.onnx")
    assert says in str(ran(tmp_path, f"check PLACE/m.onnx {flags}", 2).output)


SCATTERED = """(float[3, 2] x{more}) => (float[4, 2] y) {{
    u = MatMul (x, w)
    zeros = Constant <value = float[4, 2] {{0, 0, 0, 0, 0, 0, 0, 0}}> ()
    base = Constant <value = float[1] {{{base}}}> ()
    {index}
    s = {scatter}
    y = Add (base, s)
}}"""
ROWS = "i = Constant <value = int64[3, 2] {%s}> ()"
VECTOR = "c = Constant <value = int64[3, 1] {%s}> ()\n n = Shape (u)\n i = Expand (c, n)"
BY_ELEMENT = "ScatterElements <axis = 0> (zeros, i, u)"


@pytest.mark.parametrize(
    ("index", "scatter", "more", "words"),
    [
        (ROWS % "0, 1, 2, 3, 0, 0", BY_ELEMENT, "", "only one of the updates of an index that occurs twice"),
        (ROWS % "0, 1, 2, 3, -4, 0", BY_ELEMENT, "", "only one of the updates of an index that occurs twice"),
        (VECTOR % "3, 1, 3", BY_ELEMENT, "", "only one of the updates of an index that occurs twice"),
        ("", BY_ELEMENT, ", int64[3, 2] i", "only one of the updates of an index if it occurs twice"),
        (ROWS % "0, 1, 2, 0, 1, 2", BY_ELEMENT, "", ""),
        (VECTOR % "3, 1, 2", BY_ELEMENT, "", ""),
        (ROWS % "0, 1, 2, 3, 0, 0", 'ScatterElements <axis = 0, reduction = "add"> (zeros, i, u)', "", ""),
        (ROWS % "0, 1, 2, 3, 0, 0", "ScatterElements <axis = 0> (v, i, u)", ", float[4, 2] v", "leaves open which one"),
        ("", "ScatterElements <axis = 0> (v, i, u)", ", int64[3, 2] i, float[4, 2] v", ""),
        (
            "i = Constant <value = int64[3, 1] {2, 0, 2}> ()",
            "ScatterND (zeros, i, u)",
            "",
            "ScatterND and Add add only",
        ),
        ("i = Constant <value = int64[3, 1] {2, 0, 1}> ()", "ScatterND (zeros, i, u)", "", ""),
    ],
)
def test_updates_that_are_lost(index, scatter, more, words):
    """PyTorch's older exporter writes index_add without its sums; what only one update has is whole."""
    proto = model(SCATTERED.format(index=index, scatter=scatter, more=more, base=0), {"w": (2, 2)})
    found = [f.text for f in readiness(proto, "mse") if "Scatter" in f.text]
    assert len(found) == bool(words), found
    assert words in "".join(found)


def test_the_run_names_updates_that_are_lost(tmp_path):
    text = SCATTERED.format(index="", scatter=BY_ELEMENT, more=", int64[3, 2] i", base=0)
    onnx.save(model(text.replace("[4, 2]", "[3, 2]").replace(", 0, 0}", "}"), {"w": (2, 2)}), tmp_path / "m.onnx")
    ones = np.ones((3, 2), np.float32)
    np.savez(tmp_path / "d.npz", x=ones, i=ones.astype(np.int64), labels=ones)
    text = said(tmp_path, "train PLACE/m.onnx --data PLACE/d.npz --loss mse --epochs 1 -o PLACE/o.onnx")
    assert "advice: ScatterElements and Add add only one of the updates of an index if it occurs twice" in text
