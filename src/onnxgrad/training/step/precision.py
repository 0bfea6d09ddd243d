"""Precisions by name (fp32, fp16, bf16), for the execution provider that runs the step.

Experimental: a GPU has run steps of small networks alone. The tests run such graphs on the CPU provider, which casts.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels_of_provider import has_kernel
from onnxgrad.training.graph.mixed_precision import NAMES, Precision


def precision_for(name: str | None, options: Options) -> Precision | None:
    """The precision called `name` on the first provider of `options`; None for no name and for "fp32".

    Raises:
        BadInput: there is no such precision, or the provider does not multiply matrices in it.
    """
    if name is None or name == "fp32":
        return None
    if name not in NAMES:
        raise BadInput(f"precision is fp32, {' or '.join(NAMES)}, not {name!r}")
    provider, dtype = options.provider, NAMES[name]
    if provider == "CPUExecutionProvider":
        raise BadInput(
            f"precision {name!r} is not for the CPU provider of ONNX Runtime, which has no products in 16 bits: it "
            "would cast every operand to float32 and back\n  hint: leave precision out, or use a provider that has "
            "such products: Options(providers=('CUDAExecutionProvider', 'CPUExecutionProvider')), --provider cuda"
        )
    factors = [ir.Value(name=letter, type=ir.TensorType(ir.DataType.FLOAT)) for letter in "ab"]
    if not has_kernel(provider, ir.Node("", "MatMul", factors), 13, dtype):
        raise BadInput(f"precision {name!r}: {provider} does not multiply matrices of {dtype.name} here")
    return Precision.named(name, lambda node: has_kernel(provider, node, _opset(node), dtype))


def _opset(node: ir.Node) -> int:
    return 18 if node.graph is None else node.graph.opset_imports.get(node.domain, 18)
