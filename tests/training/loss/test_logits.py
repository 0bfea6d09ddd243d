"""A loss on probabilities is taken of their logits, whatever an exporter has put behind the activation, or refused.

Oracle: the cross entropy of the probabilities that the model gives, in float64, and its central differences.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxgrad.errors import BadInput
from onnxgrad.training import Loss, Trainer, attach, compile_step, evaluate
from onnxgrad.training.graph.bounds import bounds
from tests.training.nets import initial, session

ONE = "one = Constant <value = T[1] {1}> ()"
SIGMOID = f"{ONE}  p = Sigmoid (y)  q = Sub (one, p)"
PAIR = f"{SIGMOID}  e = Concat <axis = 1> (q, p)"
FLAT = "s = Constant <value = int64[2] {-1, C}> ()"
COLUMNS = """i0 = Constant <value = int64[1] {0}> ()  i1 = Constant <value = int64[1] {1}> ()
             i2 = Constant <value = int64[1] {2}> ()"""

#: What stands behind the scores y [N, C], giving z; where classes are two, y is [N, 1].
CLASSES = {
    "identity": "e = Softmax (y)  z = Identity (e)",
    "scale": f"{ONE}  e = Softmax (y)  z = Mul (e, one)",
    "log": "e = Softmax (y)  z = Log (e)",
    "cast": "h = Cast <to = 11> (y)  e = Softmax (h)  f = Cast <to = TO> (e)  z = Identity (f)",
    "reshape": f"{FLAT}  e = Softmax (y)  z = Reshape (e, s)",
    "unsqueezed": f"{COLUMNS}  u = Unsqueeze (y, i2)  e = Softmax <axis = 1> (u)  z = Squeeze (e, i2)",
    "flattened": f"{COLUMNS}  u = Unsqueeze (y, i2)  e = Softmax <axis = 1> (u)  z = Flatten (e)",
    "transposed": "t = Transpose (y)  e = Softmax <axis = 0> (t)  z = Transpose (e)",
    "clip": """low = Constant <value = T {1e-7}> ()  e = Softmax (y)  z = Clip (e, low)""",
    "epsilon": """low = Constant <value = T {1e-9}> ()  e = Softmax (y)  z = Add (e, low)""",
    "by hand": f"{COLUMNS}  e = Exp (y)  s = ReduceSum (e, i1)  z = Div (e, s)",
    "one against the rest": f"{COLUMNS}  e = Sigmoid (y)  s = ReduceSum (e, i1)  z = Div (e, s)",
    "guarded": f"""{COLUMNS} {ONE}  minus = Constant <value = T {{-1}}> ()  three = Constant <value = T {{3}}> ()
        n = Mul (y, minus)  e = Exp (n)  d = Add (e, one)  p = Reciprocal (d)  s = ReduceSum (p, i1)
        b = Cast <to = 9> (s)  nb = Not (b)  f = Cast <to = TO> (nb)  p2 = Add (p, f)  m = Mul (f, three)
        s2 = Add (s, m)  z = Div (p2, s2)""",
    "columns": f"""{COLUMNS}  e = Sigmoid (y)  a = Slice (e, i0, i1, i1)  b = Slice (e, i1, i2, i1)
        three = Constant <value = int64[1] {{3}}> ()  c = Slice (e, i2, three, i1)  j = Concat <axis = 1> (a, b, c)
        s = ReduceSum (j, i1)  z = Div (j, s)""",
    "function": "z = own.probabilities (y)",
    "written out": f"""{COLUMNS}  m = ReduceMax (y, i1)  d = Sub (y, m)  e = Exp (d)  s = ReduceSum (e, i1)
        z = Div (e, s)""",
    "written out, axes lost and given back": f"""{COLUMNS} low = Constant <value = T {{-3e38}}> ()
        column = Constant <value = int64[2] {{-1, 1}}> ()
        m = ReduceMax <keepdims = 0> (y, i1)  n = Max (low, m)  u = Unsqueeze (n, i1)  k = Identity (u)  d = Sub (y, k)
        e = Exp (d)  s = ReduceSum <keepdims = 0> (e, i1)  r = Reshape (s, column)  z = Div (e, r)""",
    "written out, expanded": f"""{COLUMNS}  size = Shape (y)  e = Exp (y)  s = ReduceSum (e, i1)  x1 = Expand (s, size)
        z = Div (e, x1)""",
    "written out as a product": f"{COLUMNS}  e = Exp (y)  s = ReduceSum (e, i1)  r = Reciprocal (s)  z = Mul (e, r)",
    "written out, its logarithm": f"""{COLUMNS}  m = ReduceMax (y, i1)  d = Sub (y, m)  e = Exp (d)
        s = ReduceSum (e, i1)  q = Div (e, s)  z = Log (q)""",
    "written out as a difference": f"""{COLUMNS}  m = ReduceMax (y, i1)  d = Sub (y, m)  e = Exp (d)
        s = ReduceSum (e, i1)  l = Log (s)  z = Sub (d, l)""",
    "the exponential of that": f"""{COLUMNS}  m = ReduceMax (y, i1)  d = Sub (y, m)  e = Exp (d)
        s = ReduceSum <keepdims = 0> (e, i1)  l = Log (s)  u = Unsqueeze (l, i1)  z1 = Sub (d, u)  z = Exp (z1)""",
    "of ReduceLogSumExp": f"{COLUMNS}  l = ReduceLogSumExp (y, i1)  d = Sub (y, l)  z = Exp (d)",
    "written out with 1 / sum": f"""{COLUMNS} {ONE}  e = Exp (y)  s = ReduceSum (e, i1)  r = Div (one, s)
        z = Mul (r, e)""",
    "written out with a power of the sum": f"""{COLUMNS}  minus = Constant <value = T {{-1}}> ()  e = Exp (y)
        s = ReduceSum (e, i1)  r = Pow (s, minus)  z = Mul (e, r)""",
    "of ReduceLogSum": f"{COLUMNS}  e = Exp (y)  l = ReduceLogSum (e, i1)  d = Sub (y, l)  z = Exp (d)",
    "as a difference of logarithms": f"""{COLUMNS}  e = Exp (y)  s = ReduceSum (e, i1)  a = Log (e)  l = Log (s)
        d = Sub (a, l)  z = Exp (d)""",
    "powers of a number": f"""{COLUMNS}  two = Constant <value = T {{2}}> ()  e = Pow (two, y)  s = ReduceSum (e, i1)
        z = Div (e, s)""",
    "sharpened": f"""{COLUMNS}  k = Constant <value = T {{1.5}}> ()  p = Softmax (y)  e = Pow (p, k)
        s = ReduceSum (e, i1)  z = Div (e, s)""",
    "of LpNormalization": "e = Exp (y)  z = LpNormalization <p = 1, axis = 1> (e)",
    "one against the rest of LpNormalization": "e = Sigmoid (y)  z = LpNormalization <p = 1> (e)",
    "with the largest score added": f"""{COLUMNS}  m = ReduceMax (y, i1)  d = Sub (y, m)  e = Exp (d)
        s = ReduceSum (e, i1)  l = Log (s)  a = Add (l, m)  d1 = Sub (y, a)  z = Exp (d1)""",
}
PAIRS = {
    "two classes": f"{PAIR}  z = Identity (e)",
    "two classes by hand": f"""{ONE}  n = Neg (y)  x1 = Exp (n)  d = Add (one, x1)  p = Div (one, d)  q = Sub (one, p)
        z = Concat <axis = 1> (q, p)""",
    "two classes turned round": f"{SIGMOID}  z = Concat <axis = 1> (p, q)",
}
EITHER = """z = If (c) <then_branch = a () => (float[N, K] p) { p = Sigmoid (y) },
    else_branch = b () => (float[N, K] q) { q = Tanh (y) }>"""
UNKNOWN = "s = ReduceSum <keepdims = 0> (y)  zero = Sub (s, s)  c = Equal (s, zero)"
BINARY = {
    "mean of one": f"{COLUMNS}  u = Unsqueeze (y, i2)  e = Sigmoid (u)  z = ReduceMean <keepdims = 0> (e, i2)",
    "the branch that is taken": f"c = Constant <value = bool {{1}}> ()  {EITHER}".replace("float[", "T["),
    "identity": "e = Sigmoid (y)  z = Identity (e)",
    "cast": "h = Cast <to = 11> (y)  e = Sigmoid (h)  f = Cast <to = TO> (e)  z = Identity (f)",
    "reshape": f"{FLAT}  e = Sigmoid (y)  z = Reshape (e, s)",
    "by hand": f"{ONE}  n = Neg (y)  x1 = Exp (n)  d = Add (x1, one)  z = Reciprocal (d)",
    "exponentials": f"{ONE}  a = Exp (y)  d = Add (a, one)  z = Div (a, d)",
    "each sign in its way": f"""{ONE}  zero = Sub (y, y)  c = GreaterOrEqual (y, zero)  size = Abs (y)  n = Neg (size)
        a = Exp (n)  d = Add (one, a)  high = Div (one, d)  low = Div (a, d)  z = Where (c, high, low)""",
    "of a tanh": """h = Constant <value = T {0.5}> ()  u = Mul (y, h)  t = Tanh (u)  v = Mul (t, h)  z = Add (h, v)""",
    "of a tanh and 1": f"""{ONE}  two = Constant <value = T {{2}}> ()  u = Div (y, two)  t = Tanh (u)  v = Add (t, one)
        z = Div (v, two)""",
    "the exponential of -softplus": "n = Neg (y)  s = Softplus (n)  m = Neg (s)  z = Exp (m)",
    "the exponential of y - softplus": "s = Softplus (y)  d = Sub (y, s)  z = Exp (d)",
    "clip": """low = Constant <value = T {1e-7}> ()  high = Constant <value = T {0.9999999}> ()
        e = Sigmoid (y)  z = Clip (e, low, high)""",
    "complement": f"{SIGMOID}  z = Identity (q)",
    "column": f"{COLUMNS}  {PAIR}  z = Slice (e, i1, i2, i1)",
    "column of two": f"""{COLUMNS}  zero = Sub (y, y)  b = Concat <axis = 1> (zero, y)  e = Softmax (b)
        z = Gather <axis = 1> (e, i1)""",
}
FUNCTION = """<domain: "own", opset_import: ["": 21]>
    probabilities (y) => (z) { e = Softmax (y)  z = Identity (e) }"""


def model(tail, wide, out, dtype="float"):
    own = ', "own": 1' if "own." in tail else ""
    code = {"float": "1", "double": "11"}[dtype]
    tail = (
        tail.replace("T[", f"{dtype}[").replace("T {", f"{dtype} {{").replace("TO", code).replace(", C}", f", {wide}}}")
    )
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21{own}]>
        net ({dtype}[N, 4] x) => ({dtype}[N, {out}] z) {{ y = MatMul (x, w)  {tail} }}
        {FUNCTION if own else ""}""")


def with_weight(proto, w):
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return proto


CASES = [
    *(pytest.param("cross_entropy", tail, 3, 3, id=f"cross entropy-{name}") for name, tail in CLASSES.items()),
    *(pytest.param("cross_entropy", tail, 1, 2, id=f"cross entropy-{name}") for name, tail in PAIRS.items()),
    *(pytest.param("bce_with_logits", tail, 1, 1, id=f"bce-{name}") for name, tail in BINARY.items()),
    *(pytest.param("bce_with_logits", tail, 1, 2, id=f"bce-{name}") for name, tail in PAIRS.items()),
]
rng = np.random.default_rng(0)
X = rng.standard_normal((6, 4)).astype(np.float32)


def wanted(loss, tail, wide, out, w, labels):
    """The loss of the probabilities that the model in float64 gives."""
    net = with_weight(model(tail, wide, out, "double"), w)
    (p,) = ReferenceEvaluator(net).run(None, {"x": X.astype(np.float64)})
    if loss == "cross_entropy":
        picked = p[np.arange(len(p)), labels]
        return -np.mean(picked if (p < 0).any() else np.log(picked))
    return -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("loss", "tail", "wide", "out"), CASES)
def test_the_loss_is_that_of_the_probabilities(loss, tail, wide, out):
    w = np.random.default_rng(1).standard_normal((4, wide)).astype(np.float32)
    draw = np.random.default_rng(2)
    labels = draw.integers(0, out, 6) if loss == "cross_entropy" else draw.integers(0, 2, (6, out)).astype(np.float32)
    attached = attach(with_weight(model(tail, wide, out), w), loss=loss, optimizer="sgd", learning_rate=1.0)
    onnx.checker.check_model(attached)
    step = compile_step(attached)
    feeds = {"x": X, "labels": labels, "learning_rate": np.array(1, np.float32), step.state["w"].input: w}
    made = session(step.model)
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    np.testing.assert_allclose(found["loss"], wanted(loss, tail, wide, out, w.astype(np.float64), labels), rtol=1e-5)
    gradient = np.zeros_like(w, np.float64)
    for at in np.ndindex(*w.shape):
        ends = []
        for sign in (1, -1):
            moved = w.astype(np.float64)
            moved[at] += sign * 1e-5
            ends.append(wanted(loss, tail, wide, out, moved, labels))
        gradient[at] = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(w - found[step.state["w"].output], gradient, rtol=1e-3, atol=1e-5)
    far = []
    for moved in (200 * w, -200 * w):  # where the probabilities are 0 and 1 and their logarithms are not finite
        feeds[step.state["w"].input] = moved
        found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
        assert np.isfinite(found["loss"])
        far.append((float(found["loss"]), np.abs(moved - found[step.state["w"].output]).max()))
    assert max(far)[0] > 10
    assert max(far)[1] > 1e-2, "and still it learns"


REFUSED = {
    "sigmoids for classes": ("cross_entropy", {}, "z = Sigmoid (y)", 3, "takes logits along axis 1, but 'z'"),
    "another axis": ("cross_entropy", {}, "z = Softmax <axis = 0> (y)", 3, "not known to be their Softmax"),
    "hard": ("bce_with_logits", {}, "z = HardSigmoid (y)", 3, "not known to be their Sigmoid"),
    "softmax for bce": ("bce_with_logits", {}, "z = Softmax (y)", 3, "the loss 'bce_with_logits' takes logits"),
    "probabilities for nll": (
        "nll",
        {},
        "z = Softmax (y)",
        3,
        "(?s)takes log-probabilities.*cross_entropy finds the logits",
    ),
    "mean of two": ("cross_entropy", {}, "a = Softmax (y)  n = Neg (y)  b = Softmax (n)  z = Mean (a, b)", 3, "twice"),
    "mean of three": (
        "bce_with_logits",
        {},
        f"{COLUMNS}  e = Sigmoid (y)  z = ReduceMean (e, i1)",
        1,
        "between 0 and 1 and is not known to be their Sigmoid",
    ),
    "either branch": (
        "bce_with_logits",
        {},
        f"{UNKNOWN} {EITHER.replace('Tanh', 'HardSigmoid')}",
        3,
        "between 0 and 1 and is not known to be their Sigmoid",
    ),
    "written out along another axis": (
        "cross_entropy",
        {},
        f"{COLUMNS}  e = Exp (y)  s = ReduceSum (e, i0)  z = Div (e, s)",
        3,
        "not known to be their Softmax",
    ),
    "shares of squares": (
        "cross_entropy",
        {},
        f"{COLUMNS}  e = Mul (y, y)  a = Abs (e)  s = ReduceSum (a, i1)  z = Div (a, s)",
        3,
        "not known to be their Softmax",
    ),
    "shares of signed numbers": (
        "cross_entropy",
        {},
        f"{COLUMNS}  s = ReduceSum (y, i1)  d = Div (y, s)  z = Identity (d)",
        3,
        "holds shares of a sum",
    ),
    "shares by a weight": (
        "cross_entropy",
        {},
        f"""{COLUMNS}  p = Softmax (y)  c = Constant <value = T[3] {{1, 2, 3}}> ()  q = Mul (p, c)
        s = ReduceSum (q, i1)  z = Div (q, s)""",
        3,
        "not known to be their Softmax",
    ),
    "squares": (
        "cross_entropy",
        {},
        "two = Constant <value = T {2}> ()  p = Sigmoid (y)  z = Pow (p, two)",
        3,
        "between 0 and 1 and is not known to be their Softmax",
    ),
    "squashed": (
        "binary_focal",
        {},
        "h = Constant <value = T {0.5}> ()  t = Erf (y)  u = Mul (t, h)  z = Add (u, h)",
        3,
        "between 0 and 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_probabilities_without_logits_are_refused(case):
    loss, options, tail, out, words = REFUSED[case]
    w = np.ones((4, 3), np.float32)
    with pytest.raises(BadInput, match=words):
        attach(with_weight(model(tail, 3, out), w), loss=Loss(loss, **options))
    named = attach(with_weight(model(tail, 3, out), w), loss=Loss(loss, **options), output="y")
    assert named.training_info, "the hint helps"


def test_scores_are_left_alone():
    """Values without a known range are used unchanged, also when clipped or made positive."""
    for tail in ("z = Relu (y)", "z = Tanh (y)", "z = LogSoftmax <axis = 0> (y)", "z = Softplus (y)"):
        w = np.ones((4, 3), np.float32)
        for loss in ("cross_entropy", "bce_with_logits"):
            found = attach(with_weight(model(tail, 3, 3), w), loss=loss).training_info[0].algorithm
            assert any("z" in n.input for n in found.node)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("z = Sigmoid (y)", 0, 1),
        ("z = Neg (y)", -np.inf, np.inf),
        ("e = Exp (y)  z = Reciprocal (e)", 0, np.inf),
        ("c = Constant <value = T {-2}> ()  e = Tanh (y)  z = Mul (e, c)", -2, 2),
        ("c = Constant <value = T {3}> ()  e = Sigmoid (y)  z = Sub (e, c)", -3, -2),
        ("a = Abs (y)  m = Sigmoid (y)  z = Min (a, m)", 0, 1),
        ("c = Constant <value = T {3}> ()  m = Sigmoid (y)  p = Add (m, c)  z = Pow (p, c)", 27, 64),
        ("z = LpNormalization <p = 1> (y)", -1, 1),
        (f"{UNKNOWN} {EITHER}", -1, 1),
        ("a = Relu (y)  c = Constant <value = T {2}> ()  d = Add (a, c)  z = Div (c, d)", 0, 1),
    ],
)
def test_bounds_hold(text, low, high):
    net = with_weight(model(text, 3, 3), np.ones((4, 3), np.float32))
    assert bounds(ir.from_proto(net).graph.outputs[0]) == (low, high)
    (z,) = ReferenceEvaluator(net).run(None, {"x": 10 * X})
    assert (z >= low).all()
    assert (z <= high).all()


def test_where_the_loss_was_taken_is_told():
    w = np.ones((4, 3), np.float32)
    info = attach(with_weight(model("e = Softmax (y)  z = Identity (e)", 3, 3), w)).training_info[0]
    told = {p.key: p.value for p in info.algorithm.metadata_props}
    assert told["onnxgrad.loss"] == "cross_entropy is taken of the logits 'y' of the probabilities 'z'"
    assert set(initial(compile_step(attach(with_weight(model("z = Softmax (y)", 3, 3), w))))) >= {"w"}


DETECTOR = """<ir_version: 10, opset_import: ["": 21]>
    detector (float[N, 8, A] x) => (float[N, 8, A] z) {
      low = Constant <value = int64[1] {0}> ()  four = Constant <value = int64[1] {4}> ()
      end = Constant <value = int64[1] {8}> ()  axis = Constant <value = int64[1] {1}> ()
      h = Mul (x, w)  boxes = Slice (h, low, four, axis)  scores = Slice (h, four, end, axis)
      scaled = Mul (boxes, stride)  TAIL  }"""
TAILS = {
    "boxes and sigmoids": "p = Sigmoid (scores)  z = Concat <axis = 1> (scaled, p)",
    "boxes behind": "p = Sigmoid (scores)  j = Concat <axis = 1> (p, scaled)  z = Identity (j)",
    "scales, one after the other": """p = Sigmoid (scores)  j = Concat <axis = 1> (scaled, p)
        t = Transpose <perm = [0, 2, 1]> (j)  k = Concat <axis = 1> (t, t)  z = Transpose <perm = [0, 2, 1]> (k)""",
}


def detector(tail):
    proto = parser.parse_model(DETECTOR.replace("TAIL", tail))
    weights = {"w": np.ones((8, 1), np.float32), "stride": np.full((4, 1), 8, np.float32)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return proto


@pytest.mark.parametrize("tail", TAILS)
def test_boxes_beside_scores_are_no_scores(tail):
    """The output of YOLO, [N, 4 + C, anchors]: the loss is refused unless the output is named."""
    for loss in ("cross_entropy", "focal", "bce_with_logits"):
        with pytest.raises(BadInput, match="only a part of 'z' can be scores"):
            attach(detector(TAILS[tail]), loss=loss, trainable=["w"])
    assert attach(detector(TAILS[tail]), loss="cross_entropy", output="scores", trainable=["w"]).training_info
    assert attach(detector(TAILS[tail]), loss="cross_entropy", output="z", trainable=["w"]).training_info
    assert attach(detector(TAILS[tail]), loss="mse", trainable=["w"]).training_info


def test_scores_of_several_heads_are_scores():
    assert attach(detector("z = Concat <axis = 1> (scaled, scores)"), loss="cross_entropy", trainable=["w"])


def test_a_score_that_is_always_the_same_is_a_score():
    """That of a further class ("none of these"), between 0 and 1 by chance."""
    tail = """sizes = Shape (scaled)  none = ConstantOfShape <value = float[1] {1.0}> (sizes)
        z = Concat <axis = 1> (scaled, none)"""
    assert attach(detector(tail), loss="cross_entropy", trainable=["w"])


def test_written_out_probabilities_are_measured_as_such():
    """Also where the file declares no shapes by which the pattern could be told."""
    proto = with_weight(
        model(CLASSES["written out, axes lost and given back"], 3, 3), np.ones((4, 3), np.float32) * X[:4, :1]
    )
    del proto.graph.value_info[:]
    labels = np.arange(6) % 3
    (p,) = ReferenceEvaluator(proto).run(None, {"x": X})
    found = evaluate(proto, {"x": X, "labels": labels}, metrics="log_loss").metrics["log_loss"]
    np.testing.assert_allclose(found, -np.log(p[np.arange(6), labels]).mean(), rtol=1e-5)


def test_numbers_that_look_like_probabilities_are_warned_of():
    """A softmax that no pattern and no range tells: its numbers do, when it is evaluated."""
    tail = f"""{COLUMNS}  k = Constant <value = T {{2}}> ()  e = Exp (y)  s = ReduceSum (e, i1)  l = Log (s)
        d = Sub (y, l)  h = Div (d, k)  r = Exp (h)  z = Mul (r, r)"""
    w = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    trainer = Trainer(with_weight(model(tail, 3, 3), w), loss="cross_entropy")
    with pytest.warns(UserWarning, match="look like probabilities"):
        trainer.evaluate({"x": X, "labels": np.arange(6) % 3})
