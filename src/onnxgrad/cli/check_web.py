"""``onnxgrad check --target web``: the operators of a model that browsers run."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import onnx_ir as ir
import onnxruntime
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onnxgrad.cli.console import cell
from onnxgrad.runtime.session import session_source
from onnxgrad.training.export.web_report import NOWHERE, PROCESSOR, web_report


def print_web_report(out: Console, model: ir.Model, path: Path) -> bool:
    """Print the operators of `model`, read from `path`, that do not run on WebGPU or WASM.

    Returns:
        True if a session on WebGPU runs it.
    """
    report = web_report(model)
    if report.rows:
        places = [Column(text, no_wrap=True) for text in ("on WebGPU", "on WASM")]
        table = Table(*places, "operators", "why, and what to do", box=None, pad_edge=False)
        for (where, why, remedy), rows in groupby(report.rows, key=lambda r: (r.where, r.why, r.remedy)):
            gpu = Text("on the processor") if where == PROCESSOR else Text("fails", "bold red")
            wasm = Text("fails", "bold red") if where == NOWHERE else Text("runs")
            names = ", ".join(f"{r.op_type} ×{r.count}" if r.count > 1 else r.op_type for r in rows)
            table.add_row(gpu, wasm, cell(names), Text(f"{why}\n→ {remedy}"))
        out.print(table)
    off = sum(row.count for row in report.rows)
    refused = _refused(path)
    if report.on_webgpu and not refused:
        out.print(Text(f"WebGPU: {report.total - off} of {report.total} nodes, the others on the processor"))
    else:
        out.print(Text("WebGPU: does not run"))
    out.print(Text("WASM: runs" if report.on_wasm and not refused else "WASM: does not run"))
    if refused and report.on_wasm:
        out.print(cell(f"onnxruntime {onnxruntime.__version__} does not load it here either: {refused}"))
    return report.on_webgpu and not refused


def _refused(path: Path) -> str:
    """The error of stock ONNX Runtime for the model; empty if it loads.

    ONNX Runtime for WASM has the CPU kernels of the stock build.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(session_source(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # each of its errors has a class of its own
        return str(error).splitlines()[0]
    return ""
