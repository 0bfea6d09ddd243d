"""``python -m tests.nodes.relay`` writes docs/relay.md: Relay's differentiable operators, as ONNX.

Relay (the graph language of TVM) lists the operators that its automatic differentiation must know, by the levels of
its operator library. Each of them is a row here: the same function in standard operators, with operands to try it on.
The page says of each what `examine` found: both modes against differences in float64, and on ONNX Runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxgrad.check import check
from tests.nodes.cases import NodeTest
from tests.nodes.checking import EVALUATORS, Outcome, examine
from tests.nodes.table import cell

PAGE = Path(__file__).parents[2] / "docs" / "relay.md"
FORMS = ("fed", "symbolic")
RED = "🔴 none"


@dataclass(frozen=True)
class Row:
    """An operator of Relay and a graph that computes it.

    `operands` are float32 tensors, ``x[2,3] y[3]``, of which those whose name begins with p are positive;
    `constants` are written as the parser of the onnx package takes them.
    """

    level: int
    relay: str
    operands: str
    body: str
    constants: str = ""
    outputs: str = "y"
    note: str = ""

    @property
    def onnx(self) -> str:
        """The operators of the graph, in order."""
        return ", ".join(dict.fromkeys(re.findall(r"= ([A-Z]\w*)", self.body)))

    def node_test(self) -> NodeTest:
        """The graph, with operands and results."""
        rng = np.random.default_rng(0)
        shapes = {
            name: [int(d) for d in dims.split(",") if d]
            for name, dims in re.findall(r"(\w+)\[([\d,]*)\]", self.operands)
        }
        feeds = {}
        for name, shape in shapes.items():
            x = rng.standard_normal(shape)
            feeds[name] = np.asarray(np.abs(x) + 0.5 if name.startswith("p") else x, np.float32)
        inputs = ", ".join(f"float{list(shape) or ''} {name}" for name, shape in shapes.items())
        outputs = ", ".join(f"float {name}" for name in self.outputs.split())
        text = f"""<ir_version: 10, opset_import: ["": 21]>
            {re.sub(r"[^a-z0-9]", "_", self.relay)} ({inputs}) => ({outputs}) <{self.constants}> {{ {self.body} }}"""
        model = parser.parse_model(text.replace("<>", ""))
        expected = dict(zip(self.outputs.split(), ReferenceEvaluator(model, new_ops=list(EVALUATORS)).run(None, feeds)))
        for value in model.graph.output:
            value.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
            for size in expected[value.name].shape:
                value.type.tensor_type.shape.dim.add().dim_value = size
        return NodeTest(self.relay, model, feeds, expected)


def unary(level: int, relay: str, op: str, operand: str = "x", note: str = "") -> Row:
    return Row(level, relay, f"{operand}[2,3]", f"y = {op} ({operand})", note=note)


def binary(level: int, relay: str, op: str, note: str = "", second: str = "b[3]") -> Row:
    return Row(level, relay, f"a[2,3] {second}", f"y = {op} (a, {second[: second.index('[')]})", note=note)


def truth(relay: str, op: str, note: str = "") -> Row:
    """A comparison, whose result is read as a number."""
    return Row(4, relay, "a[2,3] b[3]", f"t = {op} (a, b) y = Cast <to = 1> (t)", note=note or "a truth value")


def reduction(relay: str, op: str) -> Row:
    return Row(4, relay, "x[2,3,2]", f"y = {op} <keepdims = 0> (x, axes)", "int64[2] axes = {0, 2}")


def shift(relay: str, direction: str) -> Row:
    body = f"""q = Abs (x) r = Mul (q, ten) u = Cast <to = 13> (r) s = BitShift <direction = "{direction}"> (u, n)
        y = Cast <to = 1> (s)"""
    return Row(4, relay, "x[2,3]", body, "uint64[1] n = {1}, float ten = {10}", note="of integers, to which x is cast")


IMAGE = "x[1,2,5,4]"
ROWS = [
    unary(1, "log", "Log", "p"),
    unary(1, "sqrt", "Sqrt", "p"),
    unary(1, "exp", "Exp"),
    unary(1, "sigmoid", "Sigmoid"),
    binary(1, "add", "Add"),
    binary(1, "substract", "Sub", note="so spelled there"),
    binary(1, "multiply", "Mul"),
    binary(1, "divide", "Div", second="p[3]"),
    Row(1, "mod", "a[2,3] p[3]", "y = Mod <fmod = 1> (a, p)", note="Relay truncates, as fmod does"),
    unary(1, "tanh", "Tanh"),
    Row(1, "concatenate", "a[2,3] b[2,1]", "y = Concat <axis = 1> (a, b)"),
    Row(1, "expand_dims", "x[2,3]", "y = Unsqueeze (x, axes)", "int64[2] axes = {1, 2}", note="several axes at once"),
    Row(1, "softmax", "x[2,3]", "y = Softmax <axis = -1> (x)"),
    Row(1, "log_softmax", "x[2,3]", "y = LogSoftmax <axis = -1> (x)"),
    unary(1, "relu", "Relu"),
    Row(
        1,
        "dropout",
        "x[4,5]",
        "y = Dropout <seed = 7> (x, ratio, training)",
        "float ratio = {0.5}, bool training = {1}",
        note="in training; the mask of ONNX Runtime is another",
    ),
    Row(
        1,
        "batch_norm",
        "x[4,3,2] s[3] b[3] m[3] p[3]",
        "y, mean, var = BatchNormalization <training_mode = 1, momentum = 0.9, epsilon = 0.01> (x, s, b, m, p)",
        outputs="y mean var",
        note="in training; the momentum weights the running value that was",
    ),
    Row(1, "bias_add", "x[2,3,4] b[3]", "c = Unsqueeze (b, axes) y = Add (x, c)", "int64[1] axes = {1}", note="axis 1"),
    Row(2, "conv2d", f"{IMAGE} w[3,2,3,3] b[3]", "y = Conv <pads = [1, 1, 1, 1], strides = [2, 1]> (x, w, b)"),
    Row(
        2,
        "conv2d_transpose",
        "x[1,2,3,2] w[2,3,3,3]",
        "y = ConvTranspose <strides = [2, 2], output_padding = [1, 1], pads = [1, 1, 1, 1]> (x, w)",
    ),
    Row(2, "dense", "x[2,4] w[3,4]", "y = Gemm <transB = 1> (x, w)"),
    Row(2, "max_pool", IMAGE, "y = MaxPool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0]> (x)"),
    Row(
        2,
        "avg_pool",
        IMAGE,
        "y = AveragePool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0], count_include_pad = 1> (x)",
    ),
    Row(2, "global_max_pool", IMAGE, "y = GlobalMaxPool (x)"),
    Row(2, "global_avg_pool", IMAGE, "y = GlobalAveragePool (x)"),
    Row(
        2,
        "upsampling",
        "x[1,2,3,2]",
        'y = Resize <mode = "linear"> (x, , scales)',
        "float[4] scales = {1.0, 1.0, 2.0, 2.0}",
    ),
    Row(2, "flatten", "x[2,3,2]", "y = Flatten <axis = 1> (x)"),
    Row(2, "pad", "x[2,3] v[]", "y = Pad (x, pads, v)", "int64[4] pads = {1, 0, 2, 1}"),
    Row(
        2,
        "lrn",
        IMAGE,
        "y = LRN <size = 3, alpha = 0.3, beta = 0.6, bias = 1.5> (x)",
        note="ONNX divides α by the size",
    ),
    Row(
        2,
        "l2_normalize",
        "x[2,3,2]",
        "q = ReduceSumSquare (x, axes) m = Max (q, least) r = Sqrt (m) y = Div (x, r)",
        "int64[2] axes = {1, 2}, float least = {0.0001}",
        note="several axes and a least square, which LpNormalization has not",
    ),
    Row(
        2,
        "conv2d_winograd_without_weight_transform",
        f"{IMAGE} w[3,2,3,3]",
        "y = Conv (x, w)",
        note="a way to compute it, here on the weight that was not transformed",
    ),
    Row(
        2,
        "conv2d_winograd_weight_transform",
        "w[2,2,3,3]",
        "h = MatMul (g, w) y = MatMul (h, t)",
        "float[4,3] g = {1, 0, 0, 0.5, 0.5, 0.5, 0.5, -0.5, 0.5, 0, 0, 1}, "
        "float[3,4] t = {1, 0.5, 0.5, 0, 0, 0.5, -0.5, 0, 0, 0.5, 0.5, 1}",
        note="G·w·Gᵀ, a constant linear map",
    ),
    Row(3, "leaky_relu", "x[2,3]", "y = LeakyRelu <alpha = 0.1> (x)"),
    Row(3, "prelu", "x[2,3,2] s[3,1]", "y = PRelu (x, s)"),
    Row(3, "reshape", "x[2,6]", "y = Reshape (x, shape)", "int64[3] shape = {0, -1, 2}"),
    Row(3, "reshape_like", "a[2,6] b[3,4]", "s = Shape (b) y = Reshape (a, s)", note="b gives its shape only"),
    unary(3, "copy_identity", "Identity"),
    Row(3, "transpose", "x[2,3,2]", "y = Transpose <perm = [2, 0, 1]> (x)"),
    Row(3, "squeeze", "x[2,1,3]", "y = Squeeze (x, axes)", "int64[1] axes = {1}"),
    unary(3, "floor", "Floor"),
    unary(3, "ceil", "Ceil"),
    Row(3, "trunc", "x[2,3]", "s = Sign (x) a = Abs (x) f = Floor (a) y = Mul (s, f)", note="no single operator"),
    Row(3, "clip", "x[2,3]", "y = Clip (x, low, high)", "float low = {-0.5}, float high = {0.7}"),
    unary(3, "round", "Round", note="ONNX rounds half to even"),
    unary(3, "abs", "Abs"),
    unary(3, "negative", "Neg"),
    Row(3, "take", "x[4,2]", "y = Gather <axis = 0> (x, i)", "int64[3] i = {2, 0, 2}"),
    Row(
        3,
        "zeros",
        "x[2,3]",
        "z = ConstantOfShape <value = float[1] {0}> (s) y = Add (x, z)",
        "int64[2] s = {2, 3}",
        note="beside x",
    ),
    Row(3, "zeros_like", "x[2,3]", "s = Shape (x) y = ConstantOfShape <value = float[1] {0}> (s)"),
    Row(
        3,
        "ones",
        "x[2,3]",
        "z = ConstantOfShape <value = float[1] {1}> (s) y = Add (x, z)",
        "int64[2] s = {2, 3}",
        note="beside x",
    ),
    Row(3, "ones_like", "x[2,3]", "s = Shape (x) y = ConstantOfShape <value = float[1] {1}> (s)"),
    Row(3, "full", "v[]", "y = Expand (v, s)", "int64[2] s = {2, 3}"),
    Row(3, "full_like", "x[2,3] v[]", "s = Shape (x) y = Expand (v, s)"),
    Row(3, "cast", "x[2,3]", "h = Cast <to = 11> (x) y = Cast <to = 1> (h)", note="to another float type and back"),
    Row(3, "split", "x[2,5]", "y, z = Split <axis = 1> (x, sizes)", "int64[2] sizes = {2, 3}", outputs="y z"),
    shift("right_shift", "RIGHT"),
    shift("left_shift", "LEFT"),
    truth("equal", "Equal"),
    Row(
        4,
        "not_equal",
        "a[2,3] b[3]",
        "e = Equal (a, b) t = Not (e) y = Cast <to = 1> (t)",
        note="a truth value; no single operator",
    ),
    truth("greater", "Greater"),
    truth("greater_equal", "GreaterOrEqual"),
    truth("less", "Less"),
    truth("less_equal", "LessOrEqual"),
    binary(4, "maximum", "Max"),
    binary(4, "minimum", "Min"),
    Row(4, "power", "p[2,3] b[3]", "y = Pow (p, b)"),
    Row(4, "where", "c[2,3] a[2,3] b[3]", "t = Greater (c, zero) y = Where (t, a, b)", "float zero = {0}"),
    Row(4, "argmax", "x[2,3]", "i = ArgMax <axis = 1> (x) y = Cast <to = 1> (i)", note="indices"),
    Row(4, "argmin", "x[2,3]", "i = ArgMin <axis = 1> (x) y = Cast <to = 1> (i)", note="indices"),
    reduction("sum", "ReduceSum"),
    reduction("max", "ReduceMax"),
    reduction("min", "ReduceMin"),
    reduction("mean", "ReduceMean"),
    reduction("prod", "ReduceProd"),
    Row(
        4,
        "strided_slice",
        "x[4,5]",
        "y = Slice (x, b, e, axes, steps)",
        "int64[2] b = {0, 4}, int64[2] e = {3, 0}, int64[2] axes = {0, 1}, int64[2] steps = {1, -2}",
    ),
    Row(4, "broadcast_to", "x[3,1]", "y = Expand (x, s)", "int64[3] s = {2, 3, 4}"),
    Row(
        5,
        "resize",
        "x[1,2,3,4]",
        'y = Resize <mode = "cubic", coordinate_transformation_mode = "align_corners"> (x, , , sizes)',
        "int64[4] sizes = {1, 2, 5, 3}",
    ),
    Row(
        5,
        "multibox_prior",
        "x[1,2,2,3]",
        """s = Shape <start = 3> (x) n = Squeeze (s) k = Range (zero, n, one) w = Cast <to = 1> (k)
           c = Add (w, half) v = Cast <to = 1> (s) y = Div (c, v)""",
        "int64 zero = {0}, int64 one = {1}, float half = {0.5}",
        note="centres of anchors along one axis: they depend on the shape only",
    ),
    Row(
        5,
        "multibox_transform_loc",
        "anchor[3,4] offset[3,4]",
        """centre, size = Split <axis = 1, num_outputs = 2> (anchor) d, e = Split <axis = 1, num_outputs = 2> (offset)
           m = Mul (d, size) c = Add (m, centre) f = Exp (e) s = Mul (f, size) h = Mul (s, half) a = Sub (c, h)
           b = Add (c, h) y = Concat <axis = 1> (a, b)""",
        "float half = {0.5}",
        note="offsets decoded to corners",
    ),
    Row(
        5,
        "nms",
        "boxes[1,3,4] scores[1,1,3]",
        "i = NonMaxSuppression <center_point_box = 0> (boxes, scores, n, least, least) y = Cast <to = 1> (i)",
        "int64[1] n = {3}, float[1] least = {0.1}",
        note="indices",
    ),
    Row(10, "broadcast_to_like", "x[3,1] like[2,3,4]", "s = Shape (like) y = Expand (x, s)"),
    Row(
        10,
        "collapse_sum_like",
        "x[2,3,4] like[3,1]",
        """h = Shape (x) w = Shape (like) r = Shape (h) q = Shape (w) n = Sub (r, q)
           ones = ConstantOfShape <value = int64[1] {1}> (n) p = Concat <axis = 0> (ones, w) e = Equal (p, one)
           z = NonZero (e) axes = Squeeze (z, first) c = ReduceSum <noop_with_empty_axes = 1> (x, axes)
           y = Reshape (c, w)""",
        "int64 one = {1}, int64[1] first = {0}",
        note="the transpose of broadcasting, with shapes that only the run knows",
    ),
    Row(
        10,
        "slice_like",
        "x[3,4] like[2,3]",
        "s = Shape (like) y = Slice (x, b, s)",
        "int64[2] b = {0, 0}",
    ),
    Row(
        10,
        "layout_transform",
        "x[1,4,2,3]",
        "r = Reshape (x, s) y = Transpose <perm = [0, 1, 3, 4, 2]> (r)",
        "int64[5] s = {1, 2, 2, 2, 3}",
        note="NCHW to NCHW2c",
    ),
    unary(10, "device_copy", "Identity", note="placement; the value stays"),
    unary(10, "on_device", "Identity", note="placement; the value stays"),
]

INTRO = """# Relay's operators

Generated by `python -m tests.nodes.relay`; `tests/nodes/test_relay.py` runs every row.

Relay, the graph language of TVM, lists by level the operators that differentiation must know. Here each is written in
standard operators of ONNX and differentiated.

- **with respect to**: **x** has a derivative, x 0 one of zero.
- **how**: the classes of the rules on the way, see [Operators](operators.md).
- **proof**: both modes agree with differences in float64 (in how many elements; in the others the function has a kink
  there), and ONNX Runtime runs both and gives the same; with known sizes and with symbolic ones.
"""


def examined(row: Row) -> dict[str, Outcome]:
    """The results, by form."""
    test = row.node_test()
    return {form: examine(test, form) for form in FORMS}


def moving(row: Row) -> set[str]:
    """The operands by which a derivative is other than zero on the way that `check` finds."""
    test = row.node_test()
    return {w for w in test.wrt if any(r.status != "zero" for r in check(test.model, wrt=w, of=test.of).rows)}


def line(row: Row) -> str:
    """A line of the page."""
    found = examined(row)
    test = row.node_test()
    alive = moving(row)
    operands = ", ".join(f"**{w}**" if w in alive else f"{w} 0" for w in test.wrt)
    kinds = dict.fromkeys(f"{r.status}" for r in check(test.model, wrt=test.wrt, of=test.of).rows)
    good = all(o.proven for o in found.values())
    count = min(o.compared for o in found.values())
    ran = all(any("vjp" in e for e in o.executed) for o in found.values())
    proof = f"{count} elements{', ONNX Runtime' if ran else ''}" if good else RED
    parts = (str(row.level), row.relay, row.onnx, operands, ", ".join(kinds) or "zero", proof, row.note)
    return f"| {' | '.join(cell(p).replace(chr(92) + '*', '*') for p in parts)} |"


def page() -> str:
    """The whole page."""
    titles = ("level", "Relay", "ONNX", "with respect to", "how", "proof", "remark")
    head = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([INTRO, *head, *map(line, ROWS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
