"""Lowering of the short-time Fourier transform: frames of the signal, windowed, then a DFT of each.

The frames are Gathered, so that the transpose adds them back where they overlap. They become the first
axis of a tensor of rank 3, whose axis to transform is the default of DFT at every opset.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.lower.registry import attribute, lowering


@lowering("STFT")
def stft(b: Builder, node: ir.Node, x: Var, step: Var, window: Var | None, length: Var | None) -> Sequence[Var | None]:
    """Y[f] = F·(w ∘ x[f·step : f·step + N]) for each frame f"""
    if length is not None:
        count = b.Cast(length, to=int(ir.DataType.INT64))
    else:
        count = b.Squeeze(b.shape_of(x, 1, 2) if window is None else b.shape_of(window), [0])
    stride = b.Cast(step, to=int(ir.DataType.INT64))
    frames = b.Div(b.size_of(x, 1) - count, stride) + 1
    starts = b.Mul(b.Range(0, frames, 1), stride)
    index = b.Add(b.Unsqueeze(starts, [1]), b.Range(0, count, 1))
    framed = b.Gather(x, b.folded(index), axis=1)
    if window is not None:
        framed = framed * b.Unsqueeze(window, [1])
    half = attribute(b, node, "onesided")
    bins = b.Div(count, b.const(2)) + 1 if half else count
    frames, bins, count = (b.folded(b.Unsqueeze(v, [0])) for v in (frames, bins, count))
    known, shape = bins.const, node.outputs[0].shape
    declared = None if shape is None else shape[2]
    if known is not None and isinstance(declared, int) and declared != known[0]:
        raise NotDifferentiable(
            f"its output has {known[0]} frequencies, but the model declares {declared}\n"
            "  hint: shape inference of the onnx package takes `onesided`, where it is left out, to be 0; write it"
        )
    rows = b.reshape(framed, b.join([-1], count, b.shape_of(x, 2, 3)))
    spectra = b.DFT(rows, onesided=1 if half else None)
    return [b.reshape(spectra, b.join(b.shape_of(x, 0, 1), frames, bins, [2]))]
