"""Placement of quantization nodes and their scales, by ONNX Runtime's quantizer and calibrators."""

from __future__ import annotations

import fnmatch
import importlib
import io
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName, as_bad_input
from onnxgrad.ir import Names
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import is_standard
from onnxgrad.model_io import AnyModel, open_model, training_info
from onnxgrad.model_io.aside import external_aside
from onnxgrad.model_io.save import to_proto
from onnxgrad.runtime import Session
from onnxgrad.settings import setting
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.graph.rounding import is_quantized
from onnxgrad.training.graph.trainable import is_pattern
from onnxgrad.training.metadata import QUANTIZED
from onnxgrad.training.option_strings import looked_up
from onnxgrad.training.quantization.masters import with_masters
from onnxgrad.training.quantization.norms import fold_norms

#: Types of weights and of activations, as ONNX Runtime calls them.
WEIGHTS = {"int8": "QInt8", "uint8": "QUInt8", "int4": "QInt4", "uint4": "QUInt4"}
ACTIVATIONS = {"uint8": "QUInt8", "int8": "QInt8", "uint16": "QUInt16", "int16": "QInt16"}
ROUNDINGS = {"nearest": "each weight by itself", "learned": "by what the layer gives"}
CALIBRATIONS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
#: A model of few bits, and one of quantized numbers of 16 bits, needs this opset.
_OPSET = 21
_ENDINGS = ("Softmax", "LogSoftmax", "Sigmoid")


@dataclass(frozen=True)
class Scheme:
    """The number types of a quantized model, and the method to choose scales."""

    panel: ClassVar[str] = "Model"

    weights: str = setting("int8", f"{', '.join(WEIGHTS)}.")
    activations: str = setting("uint8", f"{', '.join(ACTIVATIONS)}.")
    per_channel: bool = setting(
        True, "One scale for each output channel of a weight, or one for the whole weight.", off="--per-tensor"
    )
    block_size: int | None = setting(
        None, "Quantize only the weights of MatMul, to 4 bits, in blocks of so many rows: 32. Activations stay floats."
    )
    calibration: str = setting(
        "minmax", f"How a range follows from the values of an activation: {', '.join(CALIBRATIONS)}."
    )
    rounding: str = setting(
        "nearest", f"Of weights: {', '.join(ROUNDINGS)} (by the outputs of the layer over the rows, AdaRound)."
    )
    operators: Sequence[str] = setting(
        (), "Quantize nodes of this type: Conv. Default: all that ONNX Runtime can.", short=("--operator",), many=True
    )
    exclude: Sequence[str] = setting((), "Not this node: a name, or a glob.", metavar="NODE", many=True)

    def __post_init__(self) -> None:
        looked_up("type of weights", self.weights, WEIGHTS)
        looked_up("type of activations", self.activations, ACTIVATIONS)
        looked_up("calibration", self.calibration, CALIBRATIONS)
        looked_up("rounding", self.rounding, ROUNDINGS)
        size = self.block_size
        if size is not None and (size < 16 or size & (size - 1)):
            raise BadInput(f"blocks have 16, 32, 64, … rows, not {size}")
        if size is not None and self.weights not in ("int4", "uint4"):
            raise BadInput(f"weights in blocks are int4 or uint4, not {self.weights}")


def opened_floats(model: AnyModel) -> ir.Model:
    """`model`, private, in a form that is ready to be quantized: normalizations folded, every node named.

    Raises:
        BadInput: it is quantized already, it carries training information, or it cannot be opened.
    """
    opened = open_model(model).model
    external_aside(opened)
    graph = opened.graph
    found = next((n for n in graph.all_nodes() if is_quantized(n)), None)
    if found is not None or QUANTIZED in opened.metadata_props:
        named = f": it has a {found.op_type}" if found is not None else ""
        raise BadInput(f"the model is quantized already{named}\n  hint: `train` fine-tunes it as it is")
    if training_info(opened):
        raise BadInput("the model carries training information\n  hint: quantize the trained inference model")
    own_tensors(opened)
    fold_norms(graph)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_input() and not value.is_graph_output():
            del graph.initializers[name]  # ONNX Runtime warns of each
    names = Names.of_graph(graph)
    _separate_biases(graph, names)
    for node in graph:
        node.name = node.name or names.fresh(node.op_type)
    return opened


def _separate_biases(graph: ir.Graph, names: Names) -> None:
    """Give every layer a bias of its own: as integers, they have different scales.

    ONNX Runtime's quantizer would do so, under names that the model may have for something else.
    """
    for value in list(graph.initializers.values()):
        readers = [n for n, at in value.uses() if at == 2 and n.op_type in ("Conv", "ConvTranspose", "Gemm")]
        if value.const_value is None or value.is_graph_input():
            continue
        for node in readers[1:]:
            own = add_initializer(graph, ir.tensor(value.const_value.numpy(), name=names.fresh(f"{value.name}_copy")))
            node.replace_input_with(2, own)


def place_quantizers(model: ir.Model, scheme: Scheme, batches: Iterable[Mapping[str, np.ndarray]]) -> ir.Model:
    """Quantize `model`, from `opened_floats`, by `scheme`; weights stay floats that are rounded (see `masters`).

    Args:
        model: is not changed.
        scheme: the form of the stored integers.
        batches: inputs by name, over which activations are calibrated.

    Raises:
        BadInput: nothing in it can be quantized, or ONNX Runtime cannot do that.
        UnknownName: a type of node or a node that it does not have.
    """
    left_out = _left_out(model.graph, scheme)
    weights = {n: v.const_value.numpy() for n, v in model.graph.initializers.items() if v.const_value is not None
               and v.dtype in FLOATS}  # fmt: skip
    proto = to_proto(model)
    with _quietly(), as_bad_input("ONNX Runtime's quantizer fails"):
        made = _blocks(proto, scheme, left_out) if scheme.block_size else _static(proto, scheme, left_out, batches)
        Session(made)  # a model that cannot run is no result
    quantized = open_model(made).model
    if with_masters(quantized, weights) is None:
        kinds = ", ".join(sorted({n.op_type for n in model.graph}))
        blocks = "\n  hint: only weights of MatMul are quantized in blocks; give no block_size"
        hint = blocks if scheme.block_size else ""
        raise BadInput(f"nothing in the model can be quantized; its nodes are {kinds}{hint}")
    return quantized


def _left_out(graph: ir.Graph, scheme: Scheme) -> list[str]:
    """The names of nodes that are not quantized: those excluded, and activations that the model ends in."""
    nodes = {n.name or "": n for n in graph}
    kinds = {n.op_type for n in graph}
    for kind in scheme.operators:
        if kind not in kinds:
            raise UnknownName(kind, kinds, "type of node")
    found = [n.name or "" for n in graph if n.op_type in _ENDINGS and any(v.is_graph_output() for v in n.outputs)]
    for text in scheme.exclude:
        chosen = [name for name in nodes if _matches(name, text)]
        if not chosen:
            raise UnknownName(text, nodes, "node")
        found += chosen
    return list(dict.fromkeys(found))


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) if is_pattern(pattern) else name == pattern


def _static(
    proto: onnx.ModelProto, scheme: Scheme, left_out: list[str], batches: Iterable[Mapping[str, np.ndarray]]
) -> onnx.ModelProto:
    if "4" in scheme.weights or "16" in scheme.activations:
        proto = _raise_opset(proto)
    quantization = importlib.import_module("onnxruntime.quantization")  # which takes 70 ms, and few models need

    class Batches(quantization.CalibrationDataReader):  # type: ignore[name-defined]
        """Every batch once."""

        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> Any:
            return next(self._left, None)

    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "quantized.onnx"
        quantization.quantize_static(
            proto,
            path,
            Batches(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=scheme.per_channel,
            weight_type=quantization.QuantType[WEIGHTS[scheme.weights]],
            activation_type=quantization.QuantType[ACTIVATIONS[scheme.activations]],
            calibrate_method=quantization.CalibrationMethod[CALIBRATIONS[scheme.calibration]],
            op_types_to_quantize=list(scheme.operators) or None,
            nodes_to_exclude=left_out,
        )
        return onnx.load(path)


def _blocks(proto: onnx.ModelProto, scheme: Scheme, left_out: list[str]) -> onnx.ModelProto:
    try:
        module = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")  # which sets up logging
    except ImportError as error:
        raise BadInput("this onnxruntime does not quantize weights in blocks\n  hint: a newer one does") from error
    made = module.MatMulNBitsQuantizer(
        _raise_opset(proto),
        block_size=scheme.block_size,
        is_symmetric=scheme.weights == "int4",
        nodes_to_exclude=left_out,
        quant_format=importlib.import_module("onnxruntime.quantization").QuantFormat.QDQ,
    )
    made.process()
    found: onnx.ModelProto = made.model.model
    nodes: dict[str, onnx.NodeProto] = {}  # a weight that several nodes read is dequantized before each of them
    for node in found.graph.node:
        nodes.setdefault(node.output[0], node)
    del found.graph.node[:]
    found.graph.node.extend(nodes.values())
    return found


def _raise_opset(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` in an opset that has quantized numbers of 4 and 16 bits, and blocks."""
    if all(o.version >= _OPSET for o in proto.opset_import if is_standard(o)):
        return proto
    with as_bad_input(f"the model cannot be raised to opset {_OPSET}, which 4 bits need"):
        return onnx.version_converter.convert_version(proto, _OPSET)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what the quantizer prints and logs, and its configuration of logging."""
    root, before = logging.getLogger(), logging.root.manager.disable
    handlers, level = list(root.handlers), root.level
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
        root.setLevel(level)
