"""Old forms of operators that the onnx package's version converter gets wrong, each with its replacement.

A fix receives an `UpgradedNode`: the node, and helpers to write its replacement.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant
from onnxgrad.ir.names import Names

#: Writes the replacement of a node, and returns its outputs; None: leave it to the onnx package.
Fix = Callable[["UpgradedNode"], "list[ir.Value | None] | None"]
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
    """A node under conversion: its attributes, and helpers to write the nodes that replace it."""

    def __init__(self, node: ir.Node, source: int, target: int, names: Names) -> None:
        self.node, self.source, self.target, self.names = node, source, target, names
        self.new: list[ir.Node] = []

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

    def emit(
        self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: object
    ) -> tuple[ir.Value, ...]:
        """Write a node; its outputs."""
        attrs = [
            v if isinstance(v, ir.Attr) else ir.convenience.convert_attribute(k, v)  # type: ignore[arg-type]
            for k, v in attributes.items()
            if v is not None
        ]
        node = ir.Node("", op_type, inputs, attrs, num_outputs=outputs, name=self.names.fresh(f"raised_{op_type}"))
        for value in node.outputs:
            value.name = self.names.fresh(f"raised_{op_type}")
        self.new.append(node)
        return tuple(node.outputs)

    def const(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        """Write a constant."""
        array = np.asarray(array) if dtype is None else np.asarray(array).astype(dtype.numpy())
        return self.emit("Constant", value=ir.tensor(array, dtype=dtype))[0]

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of the first operand. Raises CannotRaiseError if it is not known."""
        value = self.input(0)
        if value is None or value.dtype is None:
            raise CannotRaiseError("the type of its input is not known")
        return value.dtype

    def replace_by(self, values: list[ir.Value | None]) -> None:
        """Replace the node's outputs by `values`, under the same names."""
        node, graph = self.node, self.node.graph
        assert graph is not None
        old = list(node.outputs)
        for before, after in zip(old, values):
            if after is None:
                continue
            name, after.type, after.shape = before.name, before.type, before.shape
            after.metadata_props.update(before.metadata_props)
            before.replace_all_uses_with(after, replace_graph_outputs=True)
            before.name = None
            after.name = name
        graph.insert_before(node, self.new)
        graph.remove(node, safe=True)
        last = next(n for n in reversed(self.new) if n.op_type != "Constant")
        last.name = node.name or last.name
        last.doc_string = node.doc_string
        for new in self.new:
            new.metadata_props.update(node.metadata_props)


@fix("Clip", until=11)
def _clip(site: UpgradedNode) -> list[ir.Value | None]:
    """Convert the bounds to inputs in the dtype of x; missing bounds stay missing."""
    low, high = (site.attr(k) for k in ("min", "max"))
    bounds = [None if b is None else site.const(np.float32(b), site.dtype) for b in (low, high)]  # type: ignore[arg-type]
    return [site.emit("Clip", site.input(0), *bounds)[0]]


@fix("Pad", until=11)
def _pad(site: UpgradedNode) -> list[ir.Value | None]:
    """Margins and value become inputs, the value in the dtype of x."""
    pads = site.const(np.array(site.attr("pads"), np.int64))
    value = site.const(site.attr("value", 0.0), site.dtype)
    return [site.emit("Pad", site.input(0), pads, value, mode=site.attr("mode"))[0]]


@fix("Softmax", until=13)
@fix("LogSoftmax", until=13)
@fix("Hardmax", until=13)
def _upgrade_softmax(site: UpgradedNode) -> list[ir.Value | None]:
    """It took all axes from `axis` on together: where that is the last one alone, it still does."""
    op, x, axis = site.node.op_type, site.input(0), site.attr("axis", 1)
    assert x is not None
    if axis == -1 or (x.shape is not None and axis == len(x.shape) - 1):
        return [site.emit(op, x, axis=-1)[0]]
    flat = site.emit("Flatten", x, axis=axis)[0]
    return [site.emit("Reshape", site.emit(op, flat, axis=-1)[0], site.emit("Shape", x)[0])[0]]


@fix("Dropout", until=12)
def _dropout(site: UpgradedNode) -> list[ir.Value | None]:
    """Convert the ratio to an input; the mode is inference, as the old node had none."""
    if site.used(1):
        raise CannotRaiseError("its mask is read, and the meaning of a mask outside of training has changed")
    return [
        site.emit("Dropout", site.input(0), site.const(site.attr("ratio", 0.5), ir.DataType.FLOAT))[0],
        None,
    ]


@fix("BatchNormalization", until=14)
def _batch_normalization(site: UpgradedNode) -> list[ir.Value | None]:
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
    return [*results]


def _unshared_normalization(site: UpgradedNode) -> list[ir.Value | None]:
    """With ``spatial=0`` each element of an example had its own statistics: y = (x - μ)/√(v + ε)·s + b, broadcast."""
    if len([v for v in site.node.outputs if v.name]) > 1:
        raise CannotRaiseError("spatial=0 has no newer form in training")
    x, scale, bias, mean, variance = site.node.inputs[:5]
    (shifted,) = site.emit("Add", variance, site.const(site.attr("epsilon", 1e-5), site.dtype))
    (deviation,) = site.emit("Sub", x, mean)
    (unit,) = site.emit("Div", deviation, *site.emit("Sqrt", shifted))
    return [*site.emit("Add", *site.emit("Mul", unit, scale), bias)]


@fix("Upsample", until=10)
def _upsample(site: UpgradedNode) -> list[ir.Value | None]:
    """Convert Upsample to an asymmetric Resize that rounds down."""
    scales = site.input(1)
    if scales is None:
        scales = site.const(np.array(site.attr("scales"), np.float32))
    return _asymmetric(site, scales)


@fix("Resize", until=13)
def _resize(site: UpgradedNode) -> list[ir.Value | None] | None:
    """Convert to an asymmetric Resize; the nearest element was rounded down in enlarging, up in shrinking.

    The rounding was never specified; this is the behaviour of ONNX Runtime on such models.
    """
    if site.source >= 11:
        if site.attr("coordinate_transformation_mode") == "tf_half_pixel_for_nn":
            return _half_pixel(site)
        return None
    scales = site.input(1)
    assert scales is not None
    if site.attr("mode", "nearest") != "nearest":
        return _asymmetric(site, scales)
    known = constant(scales)
    if known is None:
        raise CannotRaiseError("its scales are not constant, and how it rounds depends on them")
    shrinks, grows = (known < 1).any(), (known > 1).any()
    if shrinks and grows:
        raise CannotRaiseError("it enlarges one axis and shrinks another, for which it rounds in two ways")
    return _asymmetric(site, scales, "ceil" if shrinks else "floor")


def _half_pixel(site: UpgradedNode) -> list[ir.Value | None]:
    """Shift the coordinates by half a pixel: rounding down then equals today's nearest, up at a half."""
    if site.attr("mode", "nearest") != "nearest" or site.attr("nearest_mode", "round_prefer_floor") != "floor":
        raise CannotRaiseError("tf_half_pixel_for_nn has a newer form only where the nearest is rounded down")
    x, _, *sizes = site.node.inputs
    half = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return [*site.emit("Resize", x, None, *sizes, outputs=1, mode="nearest", **half)]


def _asymmetric(site: UpgradedNode, scales: ir.Value, rounding: str = "floor") -> list[ir.Value | None]:
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
        )[0]
    ]


@fix("Scan", until=9)
def _scan(site: UpgradedNode) -> list[ir.Value | None]:
    """Convert a Scan over a batch of sequences: a Scan over the batch, whose body is a Scan over one of them.

    For an example with a shorter length, only so many steps run, and their results are filled up with zeros.
    """
    count = int(site.attr("num_scan_inputs"))  # type: ignore[call-overload]
    body = site.node.attributes["body"].as_graph()
    lengths, operands = site.input(0), list(site.node.inputs[1:])
    states = len(operands) - count
    inner: list[ir.Node] = []

    def formal(like: ir.Value | None) -> ir.Value:
        """One example of `like`."""
        assert like is not None
        shape = None if like.shape is None else ir.Shape(like.shape[1:])
        return ir.Value(name=site.names.fresh("raised_Scan_example"), type=like.type, shape=shape)

    def emit(op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: object) -> list[ir.Value]:
        site.emit(op_type, *inputs, outputs=outputs, **attributes)
        inner.append(site.new.pop())
        return list(inner[-1].outputs)

    def vector(*numbers: int) -> ir.Value:
        return emit("Constant", value=ir.tensor(np.array(numbers, np.int64)))[0]

    formals = [formal(v) for v in operands]
    given = list(formals)
    length = None if lengths is None else formal(lengths)
    if length is not None:
        (taken,) = emit("Reshape", length, vector(1))
        given[states:] = [emit("Slice", x, vector(0), taken, vector(0))[0] for x in formals[states:]]
    del site.node.attributes["body"]
    held = {
        "body": ir.AttrGraph("body", body),
        "num_scan_inputs": count,
        "scan_input_directions": site.attr("directions"),
    }
    results = emit("Scan", *given, outputs=len(site.node.outputs), **held)
    if length is not None:
        rest = emit("Sub", emit("Shape", formals[states], start=0, end=1)[0], taken)[0]
        for k, step in enumerate(body.outputs[states:], states):
            if step.shape is None:
                raise CannotRaiseError("the rank of its outputs is not known, and it has lengths")
            ranks = vector(*[0] * (len(step.shape) + 1)), vector(*[0] * len(step.shape))
            (pads,) = emit("Concat", ranks[0], rest, ranks[1], axis=0)
            (results[k],) = emit("Pad", results[k], pads)
    graph = ir.Graph([*([length] if length is not None else []), *formals], results, nodes=inner, name="examples")
    every = [*([lengths] if lengths is not None else []), *operands]
    return [
        *site.emit("Scan", *every, outputs=len(results), body=ir.AttrGraph("body", graph), num_scan_inputs=len(every))
    ]
