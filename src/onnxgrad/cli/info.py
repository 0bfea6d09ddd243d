"""``onnxgrad info``: the contents of a model file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir
import typer

from onnxgrad.cli.console import cell, console
from onnxgrad.cli.system import describe_system
from onnxgrad.errors import BadInput, OnnxGradError, json_text
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.training import attach
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.spec.training_info import training_notes
from onnxgrad.wording import operator_text, tensor_text

#: Bytes of a model whose weights are not looked at.
LARGE = 10**9


def info(
    model: Annotated[
        Path | None, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    system: Annotated[
        bool, typer.Option("--system", help="Print versions, the processor and the target instead.")
    ] = False,
) -> None:
    """Say what MODEL reads and gives, how large it is, of which operators it consists, and how it is trained."""
    if system:
        _print_system(as_json)
        return
    if model is None:
        raise BadInput("name a model, or --system")
    opened = load_model(model)
    found = described(opened, sum(p.stat().st_size for p in files_of(opened, model)))
    if as_json:
        print(json_text(found))
        return
    out = console()
    values = [(what[:-1], value["name"], value["type"]) for what in ("inputs", "outputs") for value in found[what]]
    width = max((len(name) for _, name, _ in values), default=0)
    for what, name, kind in values:
        out.print(cell(f"{what:<10} {name:<{width}}  {kind}"), soft_wrap=True)
    weights, operators = found["weights"], found["operators"]
    inside = f"; {weights['in_attributes']:,} numbers in operators" if weights["in_attributes"] else ""
    lines = {
        "weights": f"{weights['count']} tensors, {weights['numbers']:,} numbers{inside}",
        "trains": found["trains"],
        "file": f"{found['bytes'] / 1e6:.3g} MB, IR version {found['ir_version']}, "
        + ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found["opsets"].items()),
        "made by": found["producer"],
        "operators": f"{sum(operators.values())}: " + ", ".join(f"{n} {kind}" for kind, n in operators.items()),
        "functions": ", ".join(found["functions"]),
        "classes": ", ".join(found["classes"] or ()),
        "training": "; ".join(found["training"]),
    }
    for name, text in lines.items():
        if text:
            out.print(cell(f"{name:<10} {text}"), soft_wrap=True)


def _print_system(as_json: bool) -> None:
    found = describe_system()
    if as_json:
        print(json_text(found))
        return
    width = max(map(len, found))
    for name, text in found.items():
        console().print(cell(f"{name:<{width}}  {text}"), soft_wrap=True)


def described(model: ir.Model, size: int) -> dict[str, Any]:
    """The same as plain values; `size` is that of its files, in bytes."""
    graph = model.graph
    weights = [v for v in graph.initializers.values() if v.const_value is not None]
    operators = Counter(operator_text(n.domain, n.op_type) for g in model.graphs() for n in g)
    return {
        "inputs": [_value(v) for v in required_inputs(graph)],
        "outputs": [_value(v) for v in graph.outputs],
        "weights": {
            "count": len(weights),
            "numbers": sum(v.const_value.size for v in weights if v.const_value),
            "in_attributes": _numbers_in_attributes(model),
        },
        "trains": _trains(model, size),
        "bytes": size,
        "ir_version": model.ir_version,
        "opsets": dict(model.opset_imports),
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))),
        "operators": dict(operators.most_common()),
        "functions": [f"{domain}::{name}" for domain, name, _ in model.functions],
        "classes": class_names(model),
        "training": [*([f"{len(infos)} entries"] if (infos := training_info(model)) else []), *training_notes(model)],
    }


def _numbers_in_attributes(model: ir.Model) -> int:
    """The number of floats in attributes of operators of ``ai.onnx.ml``, which keep their weights there."""
    nodes = [n for n in model.graph if n.domain == "ai.onnx.ml"]
    return sum(len(a.as_floats()) for n in nodes for a in n.attributes.values() if a.type == ir.AttributeType.FLOATS)


def _trains(model: ir.Model, size: int) -> str:
    """The weights of the first float output that train by default, in words; empty for a model of more than 1 GB."""
    floats = [v.name for v in model.graph.outputs if holds_floats(v)]
    if training_info(model) or not floats or size > LARGE:
        return ""
    try:
        notes = training_notes(attach(model, loss="mse", output=floats[0]))
    except OnnxGradError as error:
        return f"nothing: {str(error).partition(chr(10))[0]}"
    return next((note.removeprefix("trains ") for note in notes if note.startswith("trains ")), "")


def _value(value: ir.Value) -> dict[str, Any]:
    dims = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    kind = "?" if value.dtype is None else value.dtype.name.lower()
    return {"name": value.name, "type": tensor_text(value.dtype, dims), "dtype": kind, "shape": dims}
