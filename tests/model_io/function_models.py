"""Models of local functions, by name and at random."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

OPSET = 21
_IMPORTS = [helper.make_opsetid("", OPSET), helper.make_opsetid("my", 1)]


def parsed(text: str) -> onnx.ModelProto:
    """A model in the textual form of ONNX."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {OPSET}, "my" : 1]>\n{text}')


def layer(head_size: int = 4) -> onnx.FunctionProto:
    """One layer of a transformer; the weights are its operands."""
    nodes = [helper.make_node("LayerNormalization", ["x", "g", "b"], ["n"], axis=-1)]
    for k in "qkv":
        nodes += [
            helper.make_node("MatMul", ["n", f"w{k}"], [f"{k}_flat"]),
            helper.make_node("Constant", [], [f"{k}_shape"], value_ints=[0, 0, -1, head_size]),
            helper.make_node("Reshape", [f"{k}_flat", f"{k}_shape"], [f"{k}_split"]),
            helper.make_node("Transpose", [f"{k}_split"], [k], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Constant", [], ["scale"], value_float=head_size**-0.5),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o"]),
        helper.make_node("Transpose", ["o"], ["o_back"], perm=[0, 2, 1, 3]),
        helper.make_node("Constant", [], ["o_shape"], value_ints=[0, 0, -1]),
        helper.make_node("Reshape", ["o_back", "o_shape"], ["o_flat"]),
        helper.make_node("MatMul", ["o_flat", "wo"], ["attended"]),
        helper.make_node("Add", ["x", "attended"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["up"]),
        helper.make_node("Gelu", ["up"], ["act"]),
        helper.make_node("MatMul", ["act", "w2"], ["down"]),
        helper.make_node("Add", ["h", "down"], ["y"]),
    ]
    formals = ["x", "g", "b", "wq", "wk", "wv", "wo", "w1", "w2"]
    return helper.make_function("my", "Layer", formals, ["y"], nodes, _IMPORTS[:1])


def transformer(layers: int, width: int = 8, shape: tuple = ("B", "S")) -> onnx.ModelProto:
    """A transformer whose layers are calls of one function."""
    rng = np.random.default_rng(0)
    weights, nodes, x = [], [], "x"
    w = width
    sizes = {"g": (w,), "b": (w,), "wq": (w, w), "wk": (w, w), "wv": (w, w), "wo": (w, w), "w1": (w, 2 * w)}
    sizes["w2"] = (2 * w, w)
    for i in range(layers):
        for name, dims in sizes.items():
            array = rng.standard_normal(dims) * 0.3 + (name == "g")
            weights.append(numpy_helper.from_array(array.astype(np.float32), f"{name}{i}"))
        nodes.append(helper.make_node("Layer", [x, *(f"{n}{i}" for n in sizes)], [f"h{i}"], domain="my"))
        x = f"h{i}"
    nodes.append(helper.make_node("ReduceMean", [x], ["y"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "transformer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [*shape, width])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])],
        weights,
    )
    return helper.make_model(graph, opset_imports=_IMPORTS, functions=[layer()], ir_version=10)


class Random:
    """Functions that call functions, with attributes, overloads, several results and operands left out or repeated."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.functions: list[onnx.FunctionProto] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def nodes(self, values: list[str], depth: int, alpha: object) -> list[onnx.NodeProto]:
        """Some nodes on `values`, which grow by what they give; all are of one shape."""
        made = []
        for _ in range(self.draw.randint(2, 4)):
            kind = self.draw.choice(["unary", "binary", "attribute", "call", "call", "if", "sum"])
            pick = self.draw.choice
            out = self.fresh()
            if kind == "call" and depth:
                made.append(self.call(values, depth, out))
                values += list(made[-1].output)
                continue
            if kind == "if":
                made += self.branch(pick(values), pick(values), out)
            elif kind == "binary":
                made.append(helper.make_node(pick(["Add", "Mul", "Sub"]), [pick(values), pick(values)], [out]))
            elif kind == "attribute":
                node = helper.make_node("LeakyRelu", [pick(values)], [out])
                if isinstance(alpha, str):
                    a = onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name=alpha)
                    node.attribute.append(a)
                else:
                    node.attribute.append(helper.make_attribute("alpha", 0.25))
                made.append(node)
            elif kind == "sum":
                total = self.fresh()
                made.append(helper.make_node("ReduceSum", [pick(values)], [total], keepdims=1))
                made.append(helper.make_node("Mul", [total, pick(values)], [out]))
                made.append(helper.make_node("Tanh", [out], [out + "b"]))
                out += "b"
            else:
                made.append(helper.make_node(pick(["Tanh", "Sigmoid", "Sin", "Softplus"]), [pick(values)], [out]))
            values.append(out)
        return made

    def branch(self, condition: str, x: str, out: str) -> list[onnx.NodeProto]:
        """x·Tanh(x) where the sum of `condition` is above 0, else Sin(x): captured in both branches."""
        graphs = []
        for ops in (["Tanh", "Mul"], ["Sin"]):
            inner, last = [], x
            for op in ops:
                new = self.fresh()
                inner.append(helper.make_node(op, [last, x] if op == "Mul" else [last], [new]))
                last = new
            graphs.append(helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info(last, 1, None)]))
        s, z, c = self.fresh(), self.fresh(), self.fresh()
        return [
            helper.make_node("ReduceSum", [condition], [s], keepdims=0),
            helper.make_node("Constant", [], [z], value_float=0.0),
            helper.make_node("Greater", [s, z], [c]),
            helper.make_node("If", [c], [out], then_branch=graphs[0], else_branch=graphs[1]),
        ]

    def call(self, values: list[str], depth: int, out: str) -> onnx.NodeProto:
        if not self.functions or self.draw.random() < 0.4:
            self.function(depth - 1)
        function = self.draw.choice(self.functions)
        operands = [self.draw.choice(values) for _ in function.input]
        node = helper.make_node(function.name, operands, [out], domain="my", overload=function.overload)
        if len(function.output) > 1 and self.draw.random() < 0.6:
            node.output.append(self.fresh())
        if self.draw.random() < 0.6:
            node.attribute.append(helper.make_attribute("slope", self.draw.choice([0.1, 0.4])))
        return node

    def function(self, depth: int) -> None:
        inputs = [self.fresh() for _ in range(self.draw.randint(1, 3))]
        values = list(inputs)
        nodes = self.nodes(values, depth, "slope")
        outputs = [values[-1], self.draw.choice(values)][: self.draw.randint(1, 2)]
        name = f"F{self.draw.randint(0, 1)}"  # the same name often: an overload
        made = helper.make_function(
            "my", name, inputs, list(dict.fromkeys(outputs)), nodes, _IMPORTS, overload=f"o{len(self.functions)}",
            attribute_protos=[helper.make_attribute("slope", 0.3)],
        )  # fmt: skip
        self.functions.append(made)

    def model(self) -> onnx.ModelProto:
        """A model of operands `x` and `w` and result `y`."""
        values = ["x", "w"]
        nodes = [self.call(values, 3, self.fresh())]
        values += list(nodes[0].output)
        nodes += self.nodes(values, 3, None)
        nodes.append(helper.make_node("Sum", values, ["s"]))
        nodes.append(helper.make_node("Tanh", ["s"], ["y"]))
        double = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            nodes,
            "random",
            [helper.make_tensor_value_info("x", double, ["N", 2])],
            [helper.make_tensor_value_info("y", double, ["N", 2])],
            [numpy_helper.from_array(np.array([[0.3, -0.7]], np.float32), "w_row")],
        )
        graph.node.insert(0, helper.make_node("Add", ["x", "w_row"], ["w"]))
        return helper.make_model(graph, opset_imports=_IMPORTS, functions=self.functions, ir_version=10)
