"""The nodes that an execution provider runs itself in a type: a session of the node alone is made to see.

ONNX Runtime's own list of kernels is no part of its interface, and asking for it ends the process where a provider that
it was built with (TensorRT) has no library.
"""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir
import onnxruntime

#: The provider to which ONNX Runtime leaves what the others do not run.
CPU = "CPUExecutionProvider"


def has_kernel(provider: str, node: ir.Node, opset: int, dtype: ir.DataType) -> bool:
    """True if `provider` runs `node` with its float tensors as tensors of `dtype`.

    Args:
        provider: its full name.
        node: typed; its float tensors now are those that are meant. Nodes with bodies move tensors of any type.
        opset: the version of its domain that the model imports.
        dtype: a float type.
    """
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return True
    proto = ir.to_proto(node)
    proto.ClearField("metadata_props")
    proto.name = proto.doc_string = ""
    proto.input[:] = [name and f"i{k}" for k, name in enumerate(proto.input)]
    proto.output[:] = ["o0", *(name and f"o{k}" for k, name in enumerate(proto.output[1:], 1))]
    fixed = _fixed(node.domain, node.op_type, opset)
    kinds = tuple(None if v is None else _kind(v.dtype, dtype, k in fixed) for k, v in enumerate(node.inputs))
    return _runs(provider, proto.SerializeToString(deterministic=True), kinds, opset)


@functools.cache
def _fixed(domain: str, op_type: str, opset: int) -> frozenset[int]:
    """The inputs of an operator that have one type always, such as the scales of a Resize."""
    try:
        formal = onnx.defs.get_schema(op_type, opset, domain).inputs
    except onnx.defs.SchemaError:
        return frozenset()
    return frozenset(k for k, parameter in enumerate(formal) if len(parameter.types) == 1)


def _kind(kind: ir.DataType | None, dtype: ir.DataType, fixed: bool) -> int:
    if kind is None:
        return 0
    return int(dtype if kind.is_floating_point() and not fixed else kind)


@functools.cache
def _runs(provider: str, node: bytes, kinds: tuple[int | None, ...], opset: int) -> bool:
    """True if there is a session on `provider` alone of a node whose inputs have these types (None: not given)."""
    proto = onnx.NodeProto.FromString(node)
    inputs = [
        onnx.helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(proto.input, kinds)
        if name and kind is not None
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    imports = [onnx.helper.make_opsetid(proto.domain, opset)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([proto], "node", inputs, outputs), opset_imports=imports, ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if provider != CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    except Exception:
        return False
    return True
