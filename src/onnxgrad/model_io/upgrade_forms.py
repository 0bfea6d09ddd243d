"""Old forms of operators that the onnx package's version converter gets wrong, each with its replacement.

A fix receives an `UpgradedNode`: the node, and helpers to write its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import constant, not_none
from onnxgrad.ir.subgraphs import empty, formal

Results = Sequence[Var | None]
#: Writes the replacement of a node, and returns its outputs; None: leave it to the onnx package.
Fix = Callable[["UpgradedNode"], Results | None]
FIXES: dict[str, tuple[int, Fix]] = {}


class CannotRaiseError(Exception):
    """Raised with the reason that a node cannot be raised."""


def fix(op_type: str, until: int) -> Callable[[Fix], Fix]:
    """Register a fix for nodes of `op_type` below opset `until`."""

    def register(function: Fix) -> Fix:
        FIXES[op_type] = until, function
        return function

    return register


class UpgradedNode:
    """A node under conversion: its attributes, and `emit`, which writes a node before it."""

    def __init__(self, node: ir.Node, source: int, builder: Builder) -> None:
        self.node, self.source, self.builder, self.emit = node, source, builder, builder.emit

    def attr(self, name: str, default: object = None) -> object:
        """The attribute `name`, or the default that it had."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.value

    def input(self, i: int) -> ir.Value | None:
        """Operand `i`; None if it is missing."""
        return self.node.inputs[i] if i < len(self.node.inputs) else None

    def used(self, i: int) -> bool:
        """True if a consumer reads output `i`."""
        if i >= len(self.node.outputs):
            return False
        value = self.node.outputs[i]
        return bool(value.uses()) or value.is_graph_output()

    def const(self, array: object, dtype: ir.DataType | None = None) -> Var:
        """Write a constant, which is no initializer: those are weights."""
        array = np.asarray(array) if dtype is None else np.asarray(array).astype(dtype.numpy())
        return self.emit("Constant", value=ir.tensor(array, dtype=dtype))

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of the first operand. Raises CannotRaiseError if it is not known."""
        value = self.input(0)
        if value is None or value.dtype is None:
            raise CannotRaiseError("the type of its input is not known")
        return value.dtype

    def replace_by(self, values: Results, nodes: Sequence[ir.Node]) -> None:
        """Replace the node by `nodes`, which were written, and its outputs by `values`, under the same names."""
        for before, var in zip(self.node.outputs, values):
            if var is None:
                continue
            after = var.value
            name, after.type, after.shape = before.name, before.type, before.shape
            after.metadata_props.update(before.metadata_props)
            before.replace_all_uses_with(after, replace_graph_outputs=True)
            before.name = None
            after.name = name
        self.builder.graph.remove(self.node, safe=True)
        last = next(n for n in reversed(nodes) if n.op_type != "Constant")
        last.name = self.node.name or last.name
        last.doc_string = self.node.doc_string
        for node in nodes:
            node.metadata_props.update(self.node.metadata_props)


@fix("Clip", until=11)
def _clip(site: UpgradedNode) -> Results:
    """Convert the bounds to inputs in the dtype of x; missing bounds stay missing."""
    low, high = (site.attr(k) for k in ("min", "max"))
    bounds = [None if b is None else site.const(np.float32(b), site.dtype) for b in (low, high)]  # type: ignore[arg-type]
    return [site.emit("Clip", site.input(0), *bounds)]


@fix("Pad", until=11)
def _pad(site: UpgradedNode) -> Results:
    """Margins and value become inputs, the value in the dtype of x."""
    pads = site.const(np.array(site.attr("pads"), np.int64))
    value = site.const(site.attr("value", 0.0), site.dtype)
    return [site.emit("Pad", site.input(0), pads, value, mode=site.attr("mode"))]


@fix("Softmax", until=13)
@fix("LogSoftmax", until=13)
@fix("Hardmax", until=13)
def _upgrade_softmax(site: UpgradedNode) -> Results:
    """It took all axes from `axis` on together: where that is the last one alone, it still does."""
    op, x, axis = site.node.op_type, not_none(site.input(0)), site.attr("axis", 1)
    if axis == -1 or (x.shape is not None and axis == len(x.shape) - 1):
        return [site.emit(op, x, axis=-1)]
    flat = site.emit("Flatten", x, axis=axis)
    return [site.emit("Reshape", site.emit(op, flat, axis=-1), site.emit("Shape", x))]


@fix("Dropout", until=12)
def _dropout(site: UpgradedNode) -> Results:
    """Convert the ratio to an input; the mode is inference, as the old node had none."""
    if site.used(1):
        raise CannotRaiseError("its mask is read, and the meaning of a mask outside of training has changed")
    ratio = site.const(site.attr("ratio", 0.5), ir.DataType.FLOAT)
    return [site.emit("Dropout", site.input(0), ratio), None]


@fix("BatchNormalization", until=14)
def _batch_normalization(site: UpgradedNode) -> Results:
    """More than one output used to mean training; ``spatial`` is gone."""
    if site.source < 9 and site.attr("spatial", 1) != 1:
        return _unshared_normalization(site)
    if site.used(3) or site.used(4):
        raise CannotRaiseError("the saved statistics are read, which it no longer gives")
    training = len([v for v in site.node.outputs if v.name]) > 1
    results = site.emit(
        "BatchNormalization",
        *site.node.inputs,
        outputs=3 if training else 1,
        epsilon=site.attr("epsilon"),
        momentum=site.attr("momentum"),
        training_mode=1 if training else None,
    )
    return results if training else [results]


def _unshared_normalization(site: UpgradedNode) -> Results:
    """With ``spatial=0`` each element of an example had its own statistics: y = (x - μ)/√(v + ε)·s + b, broadcast."""
    if len([v for v in site.node.outputs if v.name]) > 1:
        raise CannotRaiseError("spatial=0 has no newer form in training")
    x, scale, bias, mean, variance = site.node.inputs[:5]
    shifted = site.emit("Add", variance, site.const(site.attr("epsilon", 1e-5), site.dtype))
    unit = site.emit("Sub", x, mean) / site.emit("Sqrt", shifted)
    return [site.emit("Add", site.emit("Mul", unit, scale), bias)]


@fix("Upsample", until=10)
def _upsample(site: UpgradedNode) -> Results:
    """Convert Upsample to an asymmetric Resize that rounds down."""
    scales = site.input(1)
    return _asymmetric(site, site.const(np.array(site.attr("scales"), np.float32)) if scales is None else scales)


@fix("Resize", until=13)
def _resize(site: UpgradedNode) -> Results | None:
    """Convert to an asymmetric Resize; the nearest element was rounded down in enlarging, up in shrinking.

    The rounding was never specified; this is the behaviour of ONNX Runtime on such models.
    """
    if site.source >= 11:
        if site.attr("coordinate_transformation_mode") == "tf_half_pixel_for_nn":
            return _half_pixel(site)
        return None
    scales = not_none(site.input(1))
    if site.attr("mode", "nearest") != "nearest":
        return _asymmetric(site, scales)
    known = constant(scales)
    if known is None:
        raise CannotRaiseError("its scales are not constant, and how it rounds depends on them")
    shrinks, grows = (known < 1).any(), (known > 1).any()
    if shrinks and grows:
        raise CannotRaiseError("it enlarges one axis and shrinks another, for which it rounds in two ways")
    return _asymmetric(site, scales, "ceil" if shrinks else "floor")


def _half_pixel(site: UpgradedNode) -> Results:
    """Shift the coordinates by half a pixel: rounding down then equals today's nearest, up at a half."""
    if site.attr("mode", "nearest") != "nearest" or site.attr("nearest_mode", "round_prefer_floor") != "floor":
        raise CannotRaiseError("tf_half_pixel_for_nn has a newer form only where the nearest is rounded down")
    x, _, *sizes = site.node.inputs
    half: dict[str, Any] = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return [site.emit("Resize", x, None, *sizes, mode="nearest", **half)]


def _asymmetric(site: UpgradedNode, scales: ir.Value | Var, rounding: str = "floor") -> Results:
    mode = site.attr("mode", "nearest")
    return [
        site.emit(
            "Resize",
            site.input(0),
            None,
            scales,
            mode=mode,
            coordinate_transformation_mode="asymmetric",
            nearest_mode=rounding if mode == "nearest" else None,
        )
    ]


@fix("Scan", until=9)
def _scan(site: UpgradedNode) -> Results:
    """Convert a Scan over a batch of sequences: a Scan over the batch, whose body is a Scan over one of them.

    For an example with a shorter length, only so many steps run, and their results are filled up with zeros.
    """
    count = int(site.attr("num_scan_inputs"))  # type: ignore[call-overload]
    body = site.node.attributes["body"].as_graph()
    lengths, operands = site.input(0), list(site.node.inputs[1:])
    states = len(operands) - count
    b, graph = empty(site.builder, "examples")

    def example(batch: ir.Value | None) -> Var:
        """One example of `batch`."""
        assert batch is not None
        shape = None if batch.shape is None else ir.Shape(batch.shape[1:])
        return formal(b, ir.Value(type=batch.type, shape=shape), "raised_Scan_example")

    formals = [example(v) for v in operands]
    given = list(formals)
    length = None if lengths is None else example(lengths)
    if length is not None:
        taken = b.Reshape(length, [1])
        given[states:] = [b.Slice(x, [0], taken, [0]) for x in formals[states:]]
    del site.node.attributes["body"]
    held = {
        "body": ir.AttrGraph("body", body),
        "num_scan_inputs": count,
        "scan_input_directions": site.attr("directions"),
    }
    outcome = b.emit("Scan", *given, outputs=len(site.node.outputs), **held)
    results = [outcome] if isinstance(outcome, Var) else list(outcome)
    if length is not None:
        rest = b.Shape(formals[states], start=0, end=1) - taken
        for k, step in enumerate(body.outputs[states:], states):
            if step.shape is None:
                raise CannotRaiseError("the rank of its outputs is not known, and it has lengths")
            axes = len(step.shape)
            results[k] = b.Pad(results[k], b.Concat([0] * (axes + 1), rest, [0] * axes, axis=0))
    graph.inputs.extend(x.value for x in [*([] if length is None else [length]), *formals])
    graph.outputs.extend(x.value for x in results)
    every = [*([] if lengths is None else [lengths]), *operands]
    node = ir.Node(
        "",
        "Scan",
        every,
        [ir.AttrGraph("body", graph), ir.AttrInt64("num_scan_inputs", len(every))],
        num_outputs=len(results),
    )
    return site.builder.append(node)
