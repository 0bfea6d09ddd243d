"""Steps as onnxruntime-web runs them: opset 18, no float64, and operators that have a kernel on WebGPU.

The target is ``onnxruntime-web/webgpu``, which also runs on the processor alone; the provider of the same name in the
default build is deprecated, and fails on steps with convolutions.

Optimizers compute shared values (rates, bias corrections) in float64, for which the WebGPU build of onnxruntime-web has
no kernel. Here they become float32, and 1 - βᵀ, which would cancel, a form that does not. Operators without a kernel on
WebGPU are lowered to their function bodies, if they have one.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.constants import known_value
from onnxgrad.ir.downgrade import settle_opset
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import described
from onnxgrad.ir.schemas import schema_of
from onnxgrad.lower.function_bodies import body_of, expand
from onnxgrad.lower.registry import Lowering, attribute, replace
from onnxgrad.runtime.batch_norm import batch_normalization, uses_batch
from onnxgrad.training.export.web_report import OPSET, has_kernel, report_on, splits_widely

DOUBLE, FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT
#: Terms of eˣ - 1 = x·(1 + x/2·(1 + x/3·…)), enough for float32 while -NEAR < x.
TERMS, NEAR = 9, 0.5


def for_web(model: ir.Model) -> None:
    """Write `model`, whose types are inferred, for onnxruntime-web; in place.

    Raises:
        BadInput: it holds tensors of float64, or an operator that means something else in opset 18.
    """
    for graph in scopes(model.graph):
        _write_out(graph)
    other = settle_opset(model, OPSET)
    if other is not None:
        raise BadInput(
            f"target 'web' writes opset {OPSET}, and {described(other)} means something else there or is unknown\n"
            f"  hint: export the model for opset {OPSET}"
        )
    for graph in scopes(model.graph):
        _narrow(graph)
    infer_model(model)
    finish(model.graph)
    for row in report_on(model).rows:
        if not row.runs:
            raise BadInput(f"target 'web': {row.op_type}: {row.why}\n  hint: {row.remedy}")


def narrow_float64(name: str, array: np.ndarray) -> np.ndarray:
    """The tensor for the web target: a float64 scalar becomes float32.

    Raises:
        BadInput: it is float64, and no scalar.
    """
    if array.dtype != np.float64:
        return array
    if array.size > 1:
        raise BadInput(_REFUSED.format(name))
    return array.astype(np.float32)


_REFUSED = (
    "target 'web': {!r} is float64, of which onnxruntime-web/webgpu has no kernel\n"
    "  hint: export the model with float32, or the step without a target, for WASM"
)


def _write_out(graph: ir.Graph) -> None:
    """Lower float operators without a kernel to their function bodies, recursively."""
    builder = Builder(graph)
    todo = list(graph)
    while todo:
        node = todo.pop()
        write = _WRITTEN.get(node.op_type) if not node.domain and node.outputs[0].dtype in FLOATS else None
        if write is not None and _PROVIDED.get(node.op_type, lambda _: True)(node):
            todo.extend(replace(builder, node, write) or ())
            continue
        known = schema_of("", node.op_type, OPSET)
        if node.domain or (known is not None and has_kernel(node.op_type, known.since_version)):
            continue
        body = body_of(node, builder.opset) if any(v.dtype in FLOATS for v in node.outputs) else None
        if body is not None and not any(subgraphs(inner) for inner in body):
            todo.extend(expand(builder, node) or ())


def _sum(b: Builder, node: ir.Node) -> list[Var]:
    return [functools.reduce(operator.add, [b.var(v) for v in node.inputs if v is not None])]


def _sign(b: Builder, node: ir.Node) -> list[Var]:
    x = b.var(not_none(node.inputs[0]))
    return [b.cast_like(x > 0, x) - b.cast_like(x < 0, x)]


def _split(b: Builder, node: ir.Node) -> list[Var]:
    sizes, axis = not_none(_parts(node)), [attribute(b, node, "axis")]
    ends = [int(end) for end in np.cumsum(sizes)]
    x = b.var(not_none(node.inputs[0]))
    return [b.Slice(x, [end - size], [end], axis) for size, end in zip(sizes, ends, strict=True)]


def _parts(node: ir.Node) -> list[int] | None:
    """The sizes of the parts of a Split, if they are known."""
    x, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if given is not None:
        sizes = known_value(given, OPSET)
        return None if sizes is None else [int(size) for size in sizes]
    whole = x.shape[node.attributes.get_int("axis", 0)] if x is not None and x.shape is not None else None
    if not isinstance(whole, int):
        return None
    size = -(-whole // len(node.outputs))
    return [min(size, max(whole - k * size, 0)) for k in range(len(node.outputs))]


#: Operators without a kernel on WebGPU (at least for some nodes) and without a body; and a test of these nodes.
_WRITTEN: dict[str, Lowering] = {
    "BatchNormalization": batch_normalization,
    "Sum": _sum,
    "Sign": _sign,
    "Split": _split,
}
_PROVIDED: dict[str, Callable[[ir.Node], bool]] = {
    "BatchNormalization": uses_batch,
    "Split": lambda node: splits_widely(node) and _parts(node) is not None,
}


def _narrow(graph: ir.Graph) -> None:
    """float32 in place of float64."""
    builder = Builder(graph)
    for node in list(graph):
        if (found := _one_minus_power(node, builder.opset)) is not None:
            replace(builder, node, found)
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.dtype == DOUBLE:
            if value.is_graph_input() and (value.shape is None or value.shape.rank()):
                raise BadInput(_REFUSED.format(value.name))
            value.type = ir.TensorType(FLOAT)  # other values may share its shape
    for name, value in graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype == DOUBLE:
            value.const_value = ir.tensor(narrow_float64(name, value.const_value.numpy()), name=name)
            value.type = ir.TensorType(FLOAT)
    for node in list(graph):
        for key, attr in node.attributes.items():
            if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == DOUBLE:
                array = attr.as_tensor().numpy().astype(np.float32)
                node.attributes[key] = ir.AttrTensor(key, ir.tensor(array))
            elif key in ("to", "dtype") and attr.type == ir.AttributeType.INT and attr.as_int() == DOUBLE:
                node.attributes[key] = ir.AttrInt64(key, int(FLOAT))
        source = node.inputs[0] if node.op_type == "Cast" else None
        result = node.outputs[0]
        if source is not None and source.dtype == result.dtype and not result.is_graph_output():
            result.replace_all_uses_with(source)


def _one_minus_power(node: ir.Node, opset: int) -> Lowering | None:
    """For 1 - cˣ of float64, a form that does not cancel where cˣ is nearly 1."""
    if node.op_type != "Sub" or node.outputs[0].dtype != DOUBLE:
        return None
    one, power = node.inputs
    pow_ = power.producer() if power is not None else None
    if one is None or pow_ is None or pow_.op_type != "Pow" or pow_.inputs[0] is None or pow_.inputs[1] is None:
        return None
    number, base = known_value(one, opset), known_value(pow_.inputs[0], opset)
    if number is None or base is None or number.size != 1 or base.size != 1:
        return None
    if number.item() != 1 or not 0 < base.item() < 1:
        return None
    rate, exponent = math.log(base.item()), pow_.inputs[1]

    def write(b: Builder, _: ir.Node) -> list[Var]:
        x = b.var(exponent) * rate
        near = x * (1 / TERMS) + 1.0
        for k in range(TERMS - 1, 1, -1):
            near = x * (1 / k) * near + 1.0
        return [-b.Where(x > -NEAR, x * near, b.Exp(x) - 1.0)]

    return write
