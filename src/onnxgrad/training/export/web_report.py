"""Report on the execution of a model in a browser: on WebGPU, on the processor (WASM), or not at all.

``webgpu.json`` lists the operators with a kernel on WebGPU and the versions at which they match. onnxruntime-web runs
every other node on the processor, where it has nearly all that stock ONNX Runtime has, but for one: the build with the
native WebGPU provider (``onnxruntime-web/webgpu``) holds no kernel for float64 at all, and does not load such a model.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from onnxgrad.ir.downgrade import NEWEST_LOADED
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import is_op, normal_domain
from onnxgrad.ir.schemas import schema_of
from onnxgrad.model_io import AnyModel, load_model
from onnxgrad.model_io.inline import inline_functions
from onnxgrad.model_io.read import check_scopes, read_proto
from onnxgrad.model_io.validity import blamed
from onnxgrad.runtime.batch_norm import uses_batch

#: The opset that ``target="web"`` writes: the newest at which every operator of the table matches.
OPSET = 18
#: Where a node runs that does not run on WebGPU.
PROCESSOR, WASM, NOWHERE = "processor", "wasm", "nowhere"
#: Types that kernels on WebGPU compute with; bool as result of comparisons and for conditions.
ON_DEVICE = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT32, ir.DataType.UINT32, ir.DataType.BOOL})
#: Parts of a Split: WebGPU promises eight buffers to a shader, and one holds the whole.
MOST_PARTS = 7
#: The index of the data input, if it is not the first.
_DATA = {"Where": 1}
#: Operators that run for any type of the first operand: Shape reads no elements, and loops have bodies.
_ANY_DATA = {"Shape", "Loop", "Scan"}


@dataclass
class OffDevice:
    """Nodes of a model that do not run on WebGPU, all for one reason.

    Attributes:
        op_type: of the standard domain, or with its domain before it.
        where: ``"processor"``: beside a GPU; ``"wasm"``: a session on WebGPU fails, only one without runs the model;
            ``"nowhere"``: no build of onnxruntime-web loads the model.
        why: the reason; `remedy`: what can be done about it.
    """

    op_type: str
    where: str
    why: str
    remedy: str
    count: int = 0

    @property
    def runs(self) -> bool:
        """True if a session on WebGPU runs these nodes, possibly on the processor."""
        return self.where == PROCESSOR


@dataclass
class WebReport:
    """The result of `web_report`; `total` counts all nodes, including those of inner graphs."""

    total: int = 0
    rows: list[OffDevice] = field(default_factory=list)

    @property
    def on_webgpu(self) -> bool:
        """True if a session on WebGPU runs the model, possibly with parts on the processor."""
        return all(row.runs for row in self.rows)

    @property
    def on_wasm(self) -> bool:
        """True if a session on WASM runs the model."""
        return all(row.where != NOWHERE for row in self.rows)

    @property
    def off_webgpu(self) -> dict[str, int]:
        """The number of nodes that do not run on WebGPU, by operator."""
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.op_type] = counts.get(row.op_type, 0) + row.count
        return counts


@functools.cache
def _table() -> dict[str, str]:
    held = json.loads(Path(__file__).with_name("webgpu.json").read_text(encoding="utf-8"))
    found: dict[str, str] = dict(held["operators"])
    for op, version in held["operators measured"].items():
        found[op] = f"{found[op]},{version}" if op in found else str(version)
    return found


def versions_on_webgpu(op_type: str) -> str:
    """The versions at which an operator has a kernel on WebGPU, as the table writes them; empty if none."""
    return _table().get(op_type, "")


def has_kernel(op_type: str, version: int) -> bool:
    """True if a kernel covers the `version` of an operator: within a range, or equal to an open-ended start."""
    for part in filter(None, versions_on_webgpu(op_type).split(",")):
        low, _, high = part.rstrip("+").partition("-")
        if int(low) <= version <= int(high or low):
            return True
    return False


def web_report(model: AnyModel) -> WebReport:
    """Examine every node of `model`, unchanged, for onnxruntime-web 1.30.

    Raises:
        BadInput: the model cannot be read, or its nodes do not fit together.
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model)
    with blamed(model):
        private = model.clone() if isinstance(model, ir.Model) else read_proto(model)
        check_scopes(private)
        inline_functions(private)
        infer_model(private)
        return report_on(private)


def report_on(model: ir.Model) -> WebReport:
    """`web_report` of a model without local functions whose types are inferred."""
    report, rows = WebReport(), dict[tuple[str, str, str], OffDevice]()
    for node, inside in _nodes(model.graph):
        if is_op(node, "Constant"):
            continue
        report.total += 1
        row = _of_node(node, inside, model.graph.opset_imports)
        if row is not None:
            rows.setdefault((row.op_type, row.where, row.why), row).count += 1
    report.rows = sorted(rows.values(), key=lambda r: (r.where == PROCESSOR, r.why, r.op_type))
    return report


def _nodes(held: ir.Graph, inside: str = "") -> Iterator[tuple[ir.Node, str]]:
    """Each node, with the loop that contains it, if any."""
    for node in held:
        yield node, inside
        for graph in subgraphs(node):
            yield from _nodes(graph, inside if node.op_type == "If" else inside or node.op_type)


def _of_node(node: ir.Node, inside: str, opsets: dict[str, int]) -> OffDevice | None:
    domain = normal_domain(node.domain)
    name = f"{domain}.{node.op_type}" if domain else node.op_type
    opset = opsets.get(node.domain, opsets.get("", 1) if not domain else 1)
    schema = schema_of(domain, node.op_type, opset)
    if not domain and opset > NEWEST_LOADED:
        return OffDevice(name, NOWHERE, f"opset {opset} is newer than {NEWEST_LOADED}", f"export it for opset {OPSET}")
    if domain not in ("", "com.microsoft", "ai.onnx.ml") or (not domain and schema is None):
        return OffDevice(
            name, NOWHERE, "onnxruntime-web has no such operator", "write it as a local function of standard ones"
        )
    data = _data(node)
    if data == ir.DataType.DOUBLE or any(v.dtype == ir.DataType.DOUBLE for v in node.outputs):
        return OffDevice(
            name,
            WASM,
            "float64, of which onnxruntime-web/webgpu has no kernel; the build for WASM runs it",
            "target web writes scalars of optimizers in float32; export weights as float32",
        )
    if uses_batch(node):
        why = "in training mode, which the kernel refuses when it runs"
        return OffDevice(name, WASM, why, "target web writes it out in operators that have a kernel")
    if splits_widely(node) and data in ON_DEVICE:
        why = f"more than {MOST_PARTS} parts, for which a GPU need not have buffers: it fails when it runs"
        return OffDevice(name, WASM, why, "target web writes Slices, where the sizes of the parts are known")
    if inside:
        return OffDevice(name, PROCESSOR, f"inside a {inside}", _UNROLL)
    if data is not None and data not in ON_DEVICE and node.op_type not in _ANY_DATA:
        remedy = "none needed where it is a shape, a label or a counter" if data == ir.DataType.INT64 else "use float32"
        return OffDevice(name, PROCESSOR, f"{data.name.lower()} is not computed on WebGPU", remedy)
    version = schema.since_version if schema is not None else opset
    if not versions_on_webgpu(name):
        return OffDevice(
            name, PROCESSOR, "no kernel", _UNROLL if node.op_type in ("Loop", "Scan") else _remedy(node, opset)
        )
    if not has_kernel(name, version):
        why = f"kernels for versions {versions_on_webgpu(name)}, this is {version}"
        return OffDevice(name, PROCESSOR, why, f"export it for opset {OPSET}, or with target web")
    return None


def splits_widely(node: ir.Node) -> bool:
    """True for a Split that needs more buffers at once than every GPU has."""
    return is_op(node, "Split") and len(node.outputs) > MOST_PARTS


_UNROLL = "write the steps out if their number is small and fixed; else it is well on the processor"


def _remedy(node: ir.Node, opset: int) -> str:
    schema = schema_of("", node.op_type, opset)
    written: bool = schema is not None and (schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]
    return "target web writes it out in operators that have one" if written else "use an operator that has one"


def _data(node: ir.Node) -> ir.DataType | None:
    """The type that a node computes with; None if it is not known."""
    at = _DATA.get(node.op_type, 0)
    first = node.inputs[at] if at < len(node.inputs) else None
    value = first if first is not None else (node.outputs[0] if node.outputs else None)
    if node.op_type == "Cast" and node.outputs[0].dtype not in (None, *ON_DEVICE):
        value = node.outputs[0]
    return None if value is None else value.dtype
