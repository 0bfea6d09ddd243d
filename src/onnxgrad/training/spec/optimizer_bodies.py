"""The optimizers as function bodies of standard operators, by the formulas that a training step runs.

A model that carries them runs its Adam, Adagrad and Momentum on any runtime that knows functions, with the nodes
as they are. A function has a fixed number of tensors, so there is one per operator and number of tensors; its
`overload` is that number, and the nodes say which they mean. Attributes stay attributes, and every
term is written, even one that is zero for the attributes of a node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_standard
from onnxgrad.ir.names import described
from onnxgrad.lower.optimizers import DOMAIN, KINDS, coefficients, updated
from onnxgrad.training.spec.training_info import model_proto
from onnxgrad.wording import count_text

#: The lowest opsets in which the bodies are valid. Momentum compares strings (its mode).
LOWEST = {"Adagrad": 15, "Adam": 15, "Momentum": 19}

_NUMBER = ["{0}_f = Constant <value_float: float = @{0}> ()", "{0} = Cast <to = 11> ({0}_f)"]
_MODE = [
    "chosen = Constant <value_string: string = @mode> ()",
    'nesterov = Constant <value_string = "nesterov"> ()',
    "mode = Equal (chosen, nesterov)",
]


def optimizer_function(op_type: str, count: int = 1, opset: int = 21) -> onnx.FunctionProto:
    """The operator `op_type` of the training domain on `count` tensors, as a function of standard operators.

    Scalars are computed in double precision; `R`, `T` and the tensors may be float or double, as the operator's own.

    Raises:
        BadInput: there is no such optimizer, or `opset` is too old for its body.
    """
    if op_type not in KINDS:
        raise BadInput(f"there is no optimizer {op_type!r} in {DOMAIN}; there are: {', '.join(KINDS)}")
    if opset < LOWEST[op_type]:
        hint = "hint: convert the model, or write the operator out with lower_gradients"
        raise BadInput(f"the body of {op_type} needs opset {LOWEST[op_type]}; the model has {opset}\n  {hint}")
    b = Builder(ir.Graph([], [], nodes=[], name=op_type, opset_imports={"": opset}))

    def formal(name: str, dtype: ir.DataType = ir.DataType.FLOAT, shape: ir.Shape | None = None) -> Var:
        value = ir.Value(name=b.names.exactly(name), type=ir.TensorType(dtype), shape=shape)
        b.graph.inputs.append(value)
        return Var(b, value)

    kinds, numbers = KINDS[op_type], coefficients(op_type)
    tensors = [f"{kind}_{i}" for kind in kinds for i in range(1, count + 1)]
    operands = [formal("R"), formal("T", ir.DataType.INT64), *map(formal, tensors)]
    given = {name: formal(name, ir.DataType.DOUBLE, ir.Shape(())) for name in numbers}
    lines = [line.format(name) for name in numbers for line in _NUMBER]
    if op_type == "Momentum":
        given["mode"] = formal("mode", ir.DataType.BOOL, ir.Shape(()))
        lines += _MODE
    old = [v for v in operands[2:] if not v.name.startswith("G_")]
    for value, like in zip(updated(b, op_type, operands, given), old):
        kind, i = like.name.split("_")
        value.value.name = b.names.exactly(f"{kind}_new_{i}")
        b.graph.outputs.append(value.value)
    return as_function(
        DOMAIN, op_type, b.graph, [v.name for v in operands],
        [parser.parse_node(line) for line in lines],
        overload=str(count),
        attributes=[name for name in given if numbers.get(name) is None],
        attribute_protos=[helper.make_attribute(name, n) for name, n in numbers.items() if n is not None],
        doc_string=f"{op_type} of {DOMAIN}, version 1, on {count_text(count, 'tensor')}",
    )  # fmt: skip


def as_function(
    domain: str, name: str, graph: ir.Graph, inputs: Sequence[str], first: Sequence[onnx.NodeProto] = (), **more: Any
) -> onnx.FunctionProto:
    """`graph` as a function of `inputs`, with initializers as Constants; the nodes `first` compute its other inputs."""
    held = [ir.to_proto(v.const_value) for v in graph.initializers.values() if v.const_value is not None]
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in held]
    nodes, imports = [*constants, *first, *map(ir.to_proto, graph)], [helper.make_opsetid("", graph.opset_imports[""])]
    return helper.make_function(domain, name, inputs, [v.name or "" for v in graph.outputs], nodes, imports, **more)


def with_optimizer_functions(model: str | os.PathLike | onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` that brings the bodies of all optimizers that its graph and its algorithms use.

    The nodes stay; each gets the `overload` for its number of tensors. Needs IR version 10 (raised to it).
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model_proto(model))
    wanted: dict[tuple[str, int], None] = {}
    for nodes in [copy.graph.node, *(f.node for f in copy.functions), *(i.algorithm.node for i in copy.training_info)]:
        _name_overloads(nodes, wanted)
    opset = next((o.version for o in copy.opset_import if is_standard(o)), 0)
    if wanted and not opset:  # a model of nothing but an optimizer
        opset = 21
        copy.opset_import.append(onnx.helper.make_opsetid("", opset))
    have = {(f.domain, f.name, f.overload) for f in copy.functions}
    for op_type, count in wanted:
        if (DOMAIN, op_type, str(count)) not in have:
            copy.functions.append(optimizer_function(op_type, count, opset))
    if wanted:
        copy.ir_version = max(copy.ir_version, 10)
    return copy


def _name_overloads(nodes: Sequence[onnx.NodeProto], wanted: dict[tuple[str, int], None]) -> None:
    for node in nodes:
        for a in node.attribute:
            for graph in (a.g, *a.graphs):
                _name_overloads(graph.node, wanted)
        if node.domain == DOMAIN and node.op_type in KINDS:
            kinds = len(KINDS[node.op_type])
            count, rest = divmod(len(node.input) - 2, kinds)
            if rest or count < 1:
                raise BadInput(f"{described(node)} has {len(node.input)} inputs; it takes R, T and {kinds} per tensor")
            node.overload = str(count)
            wanted[node.op_type, count] = None
