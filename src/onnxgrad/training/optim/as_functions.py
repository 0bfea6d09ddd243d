"""Every optimizer as a pair of ONNX functions (init, update), to be called by graphs of one's own.

``init`` turns a tensor into its first state; ``update`` turns learning rate, number of steps (this one included),
tensor, gradient and state into the new tensor and the new state. Both are pure, of standard operators, for a tensor of
one type and shape (Adafactor and Muon treat matrices and vectors differently); settings are constants in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.ir.match import HALF
from onnxgrad.lower.optimizers import updated
from onnxgrad.training.optim.formulas import Formula
from onnxgrad.training.optim.optimizers import in_full, optimizer_named
from onnxgrad.training.option_strings import spelled
from onnxgrad.training.spec.optimizer_bodies import as_function

#: The domain of the functions.
OWN_DOMAIN = "onnxgrad.optimizers"


@dataclass(frozen=True)
class OptimizerFunctions:
    """An optimizer in (init, update) form.

    Attributes:
        init: ``(X) → states``.
        update: ``(R, T, X, G, states) → (X', states')``; R is a float scalar, T an int64 scalar, from 1 on.
        states: the names of the states, in order.
    """

    init: onnx.FunctionProto
    update: onnx.FunctionProto
    states: tuple[str, ...]


def optimizer_functions(
    optimizer: str,
    shape: Sequence[int],
    *,
    dtype: Any = np.float32,
    opset: int = 21,
    options: Mapping[str, Any] | None = None,
) -> OptimizerFunctions:
    """The optimizer of this name (with settings, as ``lion:betas=0.9,0.95``) for tensors of `shape` and `dtype`.

    Adam and AdamW have their ε where `convention` says, as everywhere.

    Raises:
        BadInput: there is no such optimizer or setting, or `dtype` is none that it updates.
    """
    name, given = spelled(optimizer)
    rule, settings = optimizer_named(name, {**in_full(given), **in_full(options or {})})
    dims = tuple(int(d) for d in shape)
    element = ir.DataType.from_numpy(np.dtype(dtype))
    if not element.is_floating_point():
        raise BadInput(f"an optimizer updates floats, not {element}")
    operator = rule.operator(settings)
    if operator is not None and element in HALF:
        raise BadInput(f"{name} does not update {element}")
    inner = ir.DataType.FLOAT if element in HALF else element
    wanted = rule.states(settings, dims)
    kept: dict[str, tuple[Var, Var]] = {}
    b = Builder(ir.Graph([], [], nodes=[], name=name, opset_imports={"": opset}))

    def formal(label: str, of: ir.DataType, size: Sequence[int]) -> Var:
        value = ir.Value(name=b.names.exactly(label), type=ir.TensorType(of), shape=ir.Shape(size))
        b.graph.inputs.append(value)
        return Var(b, value)

    def keep(label: str, initial: float, following: Any) -> Var:
        if label not in kept:
            old = formal(label, ir.DataType.DOUBLE, [])
            kept[label] = old, following(old)
            firsts[label] = (ir.DataType.DOUBLE, (), initial)
        return kept[label][1]

    rate, count = formal("R", ir.DataType.FLOAT, []), formal("T", ir.DataType.INT64, [])
    x, g = formal("X", element, dims), formal("G", element, dims)
    firsts: dict[str, tuple[ir.DataType, tuple[int, ...], float]] = {n: (inner, s, 0.0) for n, s in wanted.items()}
    states = [formal(n, inner, size) for n, size in wanted.items()]
    if operator is None:
        wide = [v if v.dtype == inner else b.Cast(v, to=int(inner)) for v in (x, g)]
        o = Formula(b, settings, rate, lambda: count, inner, keep)
        new, *after = rule.update(o, *wide, *states)
        new = b.cast_like(new, x)
    else:
        shrunk = x * b.Sub(1.0, b.Mul(b.cast_like(rate, x), settings["weight_decay"])) if operator.shrinks else x
        steps = count if operator.present else b.Sub(count, b.const(np.int64(1)))
        operands = [rate, steps, shrunk, g, *states]
        new, *after = updated(b, operator.type, operands, operator.attributes, shortest=True)
    outputs = [new, *after, *(value for _, value in kept.values())]
    names = [*wanted, *kept]
    for value, label in zip(outputs, ("X", *names)):
        value.value.name = b.names.exactly(f"{label}_new")
    b.graph.outputs.extend(v.value for v in outputs)
    prune(b.graph)
    shown = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "learning_rate")
    doc = f"{(rule.update.__doc__ or name).splitlines()[0]}\n{rule.source}; {shown}"
    inputs = [v.name or "" for v in b.graph.inputs]
    update = as_function(OWN_DOMAIN, f"{name}_update", b.graph, inputs, doc_string=doc)
    return OptimizerFunctions(_init(f"{name}_init", {n: firsts[n] for n in names}, opset), update, tuple(names))


def _init(
    name: str, states: Mapping[str, tuple[ir.DataType, tuple[int, ...], float]], opset: int
) -> onnx.FunctionProto:
    nodes, outputs = [], []
    for label, (dtype, shape, first) in states.items():
        dims = helper.make_tensor(f"{label}_shape", onnx.TensorProto.INT64, [len(shape)], shape)
        value = onnx.numpy_helper.from_array(np.array([first], dtype.numpy()), f"{label}_value")
        nodes += [
            helper.make_node("Constant", [], [f"{label}_dims"], value=dims),
            helper.make_node("ConstantOfShape", [f"{label}_dims"], [f"{label}_first"], value=value),
        ]
        outputs.append(f"{label}_first")
    return helper.make_function(OWN_DOMAIN, name, ["X"], outputs, nodes, [helper.make_opsetid("", opset)])


__all__ = ["OWN_DOMAIN", "OptimizerFunctions", "optimizer_functions"]
