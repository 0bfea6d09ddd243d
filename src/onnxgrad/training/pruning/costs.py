"""Costs of a model with given channels: operations for a row, and bytes of weights.

Both are sums of products of sizes, so removed channels scale each term by the shares that its axes keep. Milliseconds
are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad.ir.einsum_labels import einsum_axes
from onnxgrad.training.pruning.channels import Axis, Channels, rank_of
from onnxgrad.training.pruning.known_sizes import SIZES, numbers_of

#: Seconds of a measurement.
_SECONDS = 0.4


class Cost:
    """A sum of terms; each shrinks with the axes that it is a product of.

    Args:
        channels: of the graph.
        terms: amounts with the axes whose sizes they are multiples of.
    """

    def __init__(self, channels: Channels, terms: list[tuple[float, list[Axis]]]) -> None:
        of_widths = np.zeros(len(channels.locked), bool)
        for width in channels.widths:
            of_widths[width.channels] = True
        axes = {a for _, own in terms for a in own if a in channels.sets and of_widths[channels.sets[a]].any()}
        self._number = {axis: i for i, axis in enumerate(axes)}
        self._ids = [channels.sets[axis] for axis in self._number]
        self._terms = [(amount, [self._number[a] for a in own if a in self._number]) for amount, own in terms]

    def __call__(self, gone: np.ndarray) -> float:
        """The amount without the sets that the mask `gone` has."""
        shares = [1 - gone[ids].mean() for ids in self._ids]
        return float(sum(amount * math.prod(shares[i] for i in own) for amount, own in self._terms))


def flops(model: ir.Model, channels: Channels) -> Cost:
    """Multiplications and additions of layers for one row."""
    open_rows = any(
        v.shape is not None and len(v.shape) and not isinstance(v.shape[0], int) for v in model.graph.inputs
    )
    terms: list[tuple[float, list[Axis]]] = []
    for axes in (axes for node in model.graph for axes in _factors(node) if axes):
        shapes = [(v.meta.get(SIZES) or v.shape, a) for v, a in axes]
        count = math.prod((numbers_of(shape[a]) or (1, 1))[0] for shape, a in shapes if shape is not None)
        terms.append((2.0 * count / (2 if open_rows else 1), axes))
    return Cost(channels, terms)


def _factors(node: ir.Node) -> list[list[Axis]]:
    """The axes whose sizes are multiplied in the operations of a layer, for each of its products."""
    x, w, r = (*node.inputs, None, None, None)[:3]
    if not node.outputs or x is None or w is None or w.shape is None or x.shape is None:
        return []
    out = node.outputs[0]
    whole: list[Axis] = [(out, a) for a in range(rank_of(out))]
    if node.op_type == "Conv":
        return [[*whole, *((w, a) for a in range(1, rank_of(w)))]]
    if node.op_type == "ConvTranspose":
        return [[*((x, a) for a in range(rank_of(x))), *((w, a) for a in range(1, rank_of(w)))]]
    if node.op_type == "Gemm":
        return [[*whole, (w, 1 if node.attributes.get_int("transB", 0) else 0)]]
    if node.op_type == "MatMul" and rank_of(w) > 1:
        return [[*whole, (w, rank_of(w) - 2)]]
    if node.op_type == "Einsum" and r is None:
        return [[axes[0] for axes in einsum_axes(node)]]
    if node.op_type in ("LSTM", "GRU", "RNN") and r is not None:
        return [[(x, 0), (x, 1), *((v, a) for a in range(3))] for v in (w, r)]
    return []


def weight_bytes(model: ir.Model, channels: Channels) -> Cost:
    """The bytes of initializers."""
    terms: list[tuple[float, list[Axis]]] = []
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            terms.append((float(value.const_value.nbytes), [(value, a) for a in range(rank_of(value))]))
    return Cost(channels, terms)


def milliseconds(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> float:
    """The median time of a run in plain ONNX Runtime on one thread.

    It is the time of the thread: other processes of the machine do not count.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 10 or (time.perf_counter() - start < _SECONDS and len(times) < 500):
        begin = time.thread_time()
        session.run(None, feeds)
        times.append(time.thread_time() - begin)
    return 1e3 * float(np.median(times[2:]))
