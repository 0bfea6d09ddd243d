"""If nodes with constant conditions become the nodes of their branch: same numbers, names kept apart."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.known_branches import take_known_branches
from onnxgrad.model_io import open_model
from onnxgrad.runtime import Options, Session
from onnxgrad.training import Trainer

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
F = "float[N]"
EITHER = f"y = If(c) <then_branch = a () => ({F} p) {{ p = Exp(x) }}, else_branch = b () => ({F} q) {{ q = Neg(x) }}>"
CASES = {
    "then": f"({F} x) => ({F} y) <bool c = {{1}}> {{ {EITHER} }}",
    "else": f"({F} x) => ({F} y) <bool c = {{0}}> {{ {EITHER} }}",
    "computed, nested, same names": f"""({F} x, bool d) => ({F} y, {F} z) <int64 r = {{16000}}> {{
        k = Constant<value_int = 16000>()
        c = Equal(r, k)
        y = If(c) <
            then_branch = a () => ({F} p) {{
                t = Exp(x)
                p = If(c) <then_branch = i () => ({F} t2) {{ t2 = Sin(t) }},
                           else_branch = j () => ({F} t3) {{ t3 = Cos(t) }}>
            }}, else_branch = b () => ({F} q) {{ q = Neg(x) }}>
        e = Not(c)
        z = If(e) <
            then_branch = a2 () => ({F} p) {{ p = Exp(x) }},
            else_branch = b2 () => ({F} q) {{
                t = Abs(x)
                u = If(d) <then_branch = k1 () => ({F} v) {{ v = Sqrt(t) }},
                           else_branch = k2 () => ({F} v) {{ v = Neg(t) }}>
                q = Add(t, u)
            }}>
    }}""",
    "hands on an outer value": f"""({F} x) => ({F} y, {F} z) <bool c = {{1}}> {{
        t = Exp(x)
        y = If(c) <then_branch = a () => ({F} p) {{ p = Identity(t) }}, else_branch = b () => ({F} q) {{ q = Neg(x) }}>
        z = Mul(y, t)
    }}""",
    "inside a loop": f"""({F} x) => ({F} y) <bool c = {{1}}, int64 n = {{3}}> {{
        y = Loop(n, c, x) <body = l (int64 i, bool k, {F} s) => (bool o, {F} s2) {{
            o = Identity(k)
            s2 = If(c) <then_branch = a () => ({F} p) {{ p = Sin(s) }}, else_branch = b () => ({F} q) {{ q = Neg(s) }}>
        }}>
    }}""",
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name):
    proto = onnx.parser.parse_model(HEAD + CASES[name])
    model = ir.from_proto(proto)
    infer_model(model)
    taken = take_known_branches(model.graph)
    assert taken == {"computed, nested, same names": 3}.get(name, 1)
    changed = ir.to_proto(model)
    onnx.checker.check_model(changed, full_check=True)
    feeds = {"x": np.linspace(0.1, 2, 5).astype(np.float32)}
    for d in (True, False):
        feeds |= {"d": np.array(d)} if "bool d" in CASES[name] else {}
        (one, other) = (
            onnxruntime.InferenceSession(p.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
            for p in (proto, changed)
        )
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert [o.name for o in changed.graph.output] == [o.name for o in proto.graph.output]


def test_a_branch_that_no_types_fit_is_never_looked_at():
    """The branch that is not taken squeezes an axis of two: ONNX Runtime refuses the model as it is."""
    text = (
        "(float[N, 2] x) => (float[N, 2] y) <bool c = {1}> { y = If(c) <then_branch = a () => (float[N, 2] p)"
        " { p = Exp(x) }, else_branch = b () => (float[N] q)"
        " { k = Constant<value_ints = [1]>()\n q = Squeeze(x, k) }> }"
    )
    proto = onnx.parser.parse_model(HEAD + text)
    with pytest.raises(Exception, match="must be 1 instead of 2"):
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.ones((3, 2), np.float32)
    np.testing.assert_allclose(Session(ir.from_proto(proto), Options(target="portable")).run({"x": x})["y"], np.exp(x))
    open_model(proto)


def test_conditions_that_are_fed_stay():
    text = CASES["then"].replace("(float[N] x)", "(float[N] x, bool c)", 1).replace("<bool c = {1}>", "")
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    assert take_known_branches(model.graph) == 0


#: In the branch for 16 kHz: what the Sigmoid in front of the output takes.
LOGITS = "If_0_then_branch__Inline_0__/decoder/decoder/2/Conv_output_0"


@pytest.mark.skipif(find_spec("silero_vad") is None, reason="silero-vad is not installed")
@pytest.mark.parametrize("target", ["portable", "native"])
def test_voice_detection_with_a_fixed_rate_trains(target, tmp_path):
    """With the rate as a constant its step has branches in branches; with kernels in C, ONNX Runtime crashed on it."""
    proto = onnx.load(Path(find_spec("silero_vad").origin).with_name("data") / "silero_vad.onnx")
    for value in list(proto.graph.input):
        if value.name == "sr":
            proto.graph.input.remove(value)
        shape = {"input": ["N", 576], "state": [2, "N", 128]}.get(value.name)
        if shape:
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, shape))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(16000), "sr"))
    options = Options(target=target, threads=1)
    trainer = Trainer(proto, loss="bce_with_logits", output=LOGITS, learning_rate=1e-3, options=options)
    rng = np.random.default_rng(0)
    batch = {
        "input": rng.standard_normal((4, 576)).astype(np.float32) / 10,
        "state": np.zeros((2, 4, 128), np.float32),
        "labels": np.ones((4, 1, 1), np.float32),
    }
    losses = [float(trainer.machine.step(batch)[trainer.step.loss]) for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "m.onnx")  # which crashed ONNX Runtime where weights had left a branch that it takes itself
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert found.run(["output"], {k: batch[k] for k in ("input", "state")})[0].shape == (4, 1)
