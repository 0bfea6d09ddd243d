"""Sort float initializers into weights and constants that an exporter stored as initializers.

The use of a tensor decides. The rows of the table below are tried in this order, and the first match wins; names that
exporters choose decide only if the use does not. The constants are listed in the notes (`Sorted.describe`), and
``trainable=["all"]`` trains them nevertheless.

| tensor | is |
|---|---|
| infinities, numbers beyond 1e8 | a constant |
| PyTorch's newer exporter noted a buffer, or computed it and from no parameter | a constant |
| the name that PyTorch models give a buffer (``inv_freq``, ``cos_cached``, ``pixel_mean``, …) | a constant |
| statistics of a normalization that is written out, with what scales them; its scale and shift in one | a constant |
| made-up ones and zeros of an InstanceNormalization of groups, which PyTorch writes GroupNorm as | a constant |
| only meets sine and cosine, as factor | a constant: frequencies |
| varies along one axis, and is read by a layer (next row but one) or added to what one gives | a weight |
| sines and cosines of positions, an even or geometric grid | a constant |
| read by a product, a convolution, a normalization, an embedding, a recurrent layer, another domain | a weight |
| PyTorch's newer exporter noted a parameter | a weight |
| bound, exponent, fill value, size | a constant |
| one number: goes (or went) through Exp, Softplus, Sigmoid, Tanh; a bias; ``logit_scale``, ``a.b`` | a weight |
| one number otherwise, expanded to a first state for instance | a constant |
| 0 and one large number, or 0 and 1 in several axes; three or more whole and half numbers | a constant: mask, anchors |
| added to or multiplied with the input before the first weight (not: a vector for each number) | a constant: mean |
| varies along several axes, and has a name that the exporter made up among names of modules | a constant |
| anything else | a weight |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.exporter_names import folded_buffers, is_buffer, is_parameter
from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import is_standard, not_none
from onnxgrad.training.graph.frozen_norms import frozen_norms, norms_groups

#: Operators that read weights.
LAYERS = {
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "DeformConv", "Einsum", "LSTM", "GRU", "RNN", "Attention", "PRelu"),
    *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"),
    *("Gather", "EmbedLayerNormalization", "LinearAttention", "CausalConvWithState"),
}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Sum", "Where", "Concat"}
_SETTINGS = {
    *("Pow", "Clip", "Min", "Max", "Mod", "Pad", "Resize", "Range", "OneHot", "Dropout", "QuantizeLinear"),
    *("DequantizeLinear", "TopK", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "ThresholdedRelu"),
}
_GATES = {"Exp", "Softplus", "Sigmoid", "Tanh"}
_MOVES = {
    *("Identity", "Cast", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Slice", "Neg"),
    *("Split", "CastLike", "QuantizeLinear", "DequantizeLinear"),
}
_BUFFERS = {
    *(
        "inv_freq",
        "original_inv_freq",
        "cos_cached",
        "sin_cached",
        "freqs_cis",
        "position_ids",
        "relative_coords_table",
    ),
    *("weight_u", "weight_v", "_u", "_v"),  # of a spectral norm
    *("anchors", "anchor_grid", "pixel_mean", "pixel_std", "image_mean", "image_std", "attn_mask", "causal_mask"),
}
_NUMBERS = {"logit_scale", "logit_bias", "temperature", "log_temperature"}
#: Names that exporters make up: ``onnx::Mul_12``, ``val_7``, ``_to_copy``, ``auto.cast.4``, ``/Constant_output_0``, …
_MADE_UP = re.compile(
    r"^(onnx::.*|_?val_\d+(_\d+)?|\d+|.*_output_\d+|.*[Cc]onstant.*|_to_copy.*|.*lifted_tensor.*|clone.*|auto\.\w+\.\d+)$"
)
#: Names of values that an exporter has computed from a parameter: exp(logit_scale), for instance.
_FOLDED = re.compile(r"^(exp|softplus|sigmoid|tanh)(_\d+)?$")
_SAMPLE = 64


@dataclass(frozen=True)
class Sorted:
    """The initializers that train by default, and why each of the others does not."""

    weights: dict[str, ir.Value]
    constants: dict[str, str]

    def describe(self, trained: Iterable[str], values: Mapping[str, ir.Value]) -> str:
        """Describe the trained weights, and the candidates that are constants."""
        names = list(trained)
        count = sum(t.size for n in names if (t := values[n].const_value) is not None)
        odd = [n for n in names if n not in self.weights or values[n].shape is None or not len(values[n].shape or ())]
        line = f"trains {len(names)} tensors, {count:,} numbers" + (f", among them {_list_names(odd)}" if odd else "")
        groups: dict[str, list[str]] = {}
        for name, why in self.constants.items():
            if name not in names:
                groups.setdefault(why, []).append(name)
        if groups:
            line += "; left out as constants: " + ", ".join(f"{_list_names(n)} ({why})" for why, n in groups.items())
            line += "; --trainable all trains these, too"
        return line


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sort_out(candidates: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> Sorted:
    """Sort `candidates`, float initializers that a loss depends on, into weights and constants.

    Args:
        candidates: by name.
        nodes: of the graph, in order.
    """
    named = any("." in name and not _MADE_UP.match(name) for name in candidates)
    first = _before_the_first_weight(candidates, nodes)
    circles = _circles(candidates)
    graph = nodes[0].graph if nodes else None
    folded = folded_buffers(graph) if isinstance(graph, ir.Graph) else set()
    frozen = frozen_norms(candidates, lambda name: named and ("." not in name or bool(_MADE_UP.match(name))))
    weights: dict[str, ir.Value] = {}
    constants: dict[str, str] = {}
    for name, value in candidates.items():
        why = _FROZEN if value in frozen else _constant(name, value, named, first, circles)
        if not why and value in folded:
            why = "computed from no parameter"
        if why:
            constants[name] = why
        else:
            weights[name] = value
    if not weights:  # then the existing one was meant
        usual = {n: v for n, v in candidates.items() if n not in constants or constants[n] in (_ONE, _INPUT, _GRID)}
        ranked = {n: v for n, v in usual.items() if v.shape is not None and len(v.shape)}
        weights = ranked
        constants = {n: why for n, why in constants.items() if n not in weights}
    return Sorted(weights, constants)


INFINITE = "infinities"
_ONE = "a single number"
_INPUT = "mean or deviation of the input"
_GRID = "a grid or anchors"
_MADE = "made by the exporter"
_FROZEN = "a normalization that is frozen"


def _constant(name: str, value: ir.Value, named: bool, first: set[ir.Value], circles: set[ir.Value]) -> str:
    """The reason that `value` is a constant; empty for a weight.

    Args:
        named: True if names of other candidates are those of parameters of modules.
    """
    array = not_none(value.const_value).numpy()
    limit = min(1e8, 0.99 * float(ml_dtypes.finfo(array.dtype).max))
    with np.errstate(invalid="ignore"):
        low, high = float(array.min(initial=0)), float(array.max(initial=0))
    if not -limit < low <= high < limit:  # nan, too
        return INFINITE
    if is_buffer(value):
        return "a buffer"
    if re.split(r"[./]", name)[-1] in _BUFFERS:
        return "a buffer by its name"
    if _varying_axes(array) <= 1 and array.size > 1 and _only_angles(value):
        return "frequencies"
    if named and _MADE_UP.match(name) and all(norms_groups(node, at) for node, at in value.uses()):
        return _MADE
    uses = list(meetings(value))
    if any(_scales_integers(node, at) for node, at, _ in uses):
        return "the scale of stored integers"
    bias = any(node.op_type in ("Add", "Sub") and behind_layer(node, at) for node, at, _ in uses)
    layer = any(node.op_type in LAYERS or not is_standard(node) for node, _, _ in uses)
    if array.size > 1 and _varying_axes(array) == 1 and (bias or layer):
        return ""
    if value in circles or _regular(array):
        return "a table of sines, or a regular grid"
    if is_parameter(value) or (array.size > 1 and layer):
        return ""
    if uses and all(node.op_type in _SETTINGS for node, _, _ in uses):
        return "a bound, an exponent or a setting"
    if array.size == 1:
        layer = any(n.op_type in LAYERS - {"MatMul"} and at > 0 and "Expand" not in way for n, at, way in uses)
        layer |= bias and array.ndim > 0
        gate = any(_GATES & set(through) or node.op_type in _GATES for node, _, through in uses)
        # PyTorch's older exporter names nodes by their paths in the module, and no number that it makes itself
        module = not _MADE_UP.match(name) and any(
            n.op_type in _ELEMENTWISE and ("." in name or (n.name or "").startswith("/")) for n, _, _ in uses
        )
        return "" if layer or gate or module or name in _NUMBERS or _FOLDED.match(name) else _ONE
    values = array.astype(np.float64) if array.size <= 1 << 20 else np.array([0.1])
    least, most = values.min(initial=np.inf), values.max(initial=-np.inf)
    are_two = least < most and bool(((values == least) | (values == most)).all())
    if are_two and 0 in (least, most) and (max(-least, most) >= 50 or (most == 1 and _varying_axes(array) > 1)):
        return "a mask"
    if least < most and not are_two and not np.any(np.mod(2 * values, 1)):
        return _GRID
    if value in first:
        return _INPUT
    if named and _MADE_UP.match(name) and _varying_axes(array) > 1:
        return _MADE
    return ""


def _varying_axes(array: np.ndarray) -> int:
    """The number of axes along which the array has more than one entry."""
    return sum(n > 1 for n in array.shape)


def meetings(value: ir.Value, through: tuple[str, ...] = ()) -> Iterable[tuple[ir.Node, int, tuple[str, ...]]]:
    """The nodes that combine `value` with another, the input index, and the operators on the way there."""
    for node, at in value.uses():
        own = node.op_type in _MOVES | _GATES or (node.op_type in ("Clip", "Min", "Max") and bool(through or at == 0))
        if is_standard(node) and own and at == 0 and len(through) < 8:
            found = [m for out in node.outputs for m in meetings(out, (*through, node.op_type))]
            if found:
                yield from found
                continue
        yield node, at, through


def _scales_integers(node: ir.Node, at: int) -> bool:
    """True if the other factor is the scale of a value quantized at run time, as beside a MatMulInteger."""
    other = node.inputs[1 - at] if node.op_type == "Mul" and at < 2 else None
    maker = None if other is None else other.producer()
    return maker is not None and maker.op_type == "DynamicQuantizeLinear"


def behind_layer(node: ir.Node, at: int) -> bool:
    """True if the other operand of an addition is the output of a layer."""
    others = [v for i, v in enumerate(node.inputs) if i != at and v is not None]
    maker = others[0].producer() if len(others) == 1 else None
    while maker is not None and maker.op_type in _MOVES and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker is not None and maker.op_type in LAYERS - {"Gather"}


def _only_angles(value: ir.Value) -> bool:
    """True if `value` reaches only Sin and Cos, through products and moves: it scales angles."""
    ends: set[str] = set()
    seen = {value}
    queue = [value]
    while queue:
        for node, _ in queue.pop().uses():
            if node.op_type in _MOVES | {"MatMul", "Mul", "Div", "Einsum", "Concat"}:
                queue += [v for v in node.outputs if v not in seen]
                seen |= set(node.outputs)
            else:
                ends.add(node.op_type)
    return ends == {"Sin", "Cos"}


def _before_the_first_weight(candidates: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """The values added to inputs of the model, or multiplied with them, before any layer."""
    held = set(candidates.values())
    raw: set[ir.Value] = {v for node in nodes for v in reads(node) if v.is_graph_input()}
    found: set[ir.Value] = set()
    for node in nodes:
        data = [v for v in reads(node) if v in raw]
        own = [v for v in reads(node) if v in held]
        if not data or any(v not in raw and v not in held and v.const_value is None for v in reads(node)):
            continue
        if not own and node.op_type in _MOVES | {"Div", "Mul", "Sub", "Add", "Resize", "Pad"}:
            raw |= set(node.outputs)
        elif len(own) == 1 and len(data) == 1 and node.op_type in ("Add", "Sub", "Mul", "Div"):
            if _embeds(own[0], data[0], node.outputs[0]):
                continue
            found |= set(own)
            raw |= set(node.outputs)
    return found


def _embeds(own: ir.Value, data: ir.Value, result: ir.Value) -> bool:
    """True if a table makes a vector of each number of `data`: an embedding of numbers, as in FT-Transformer."""
    if own.const_value is None or data.shape is None or result.shape is None or len(data.shape) != len(result.shape):
        return False
    is_wider = any(before == 1 and after != 1 for before, after in zip(data.shape, result.shape))
    return is_wider and _varying_axes(own.const_value.numpy()) > 1


def _sample(array: np.ndarray) -> np.ndarray:
    return np.squeeze(array)[tuple(slice(0, _SAMPLE) for _ in np.squeeze(array).shape)].astype(np.float64)


def _regular(array: np.ndarray) -> bool:
    """True if x[t + 1] + x[t - 1] = c·x[t] along an axis, with a c per column.

    Sines, lines and geometric sequences have this form. Also True if two halves of the last axis, or neighbours on it,
    are sines and cosines of the same angles.
    """
    x = _sample(array)
    for axis in range(x.ndim):
        if x.shape[axis] < 8:
            continue
        rows = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        middle, ends = rows[1:-1], rows[2:] + rows[:-2]
        weight = (middle * middle).sum(0)
        c = (middle * ends).sum(0) / np.where(weight, weight, 1)
        changing = np.ptp(rows, axis=0) > 0
        scale = np.abs(rows).max()
        if changing.any() and scale and np.abs(ends - c * middle).max() < 1e-4 * scale:
            return True
        steps = np.diff(rows, axis=0)
        if changing.any() and np.ptp(steps, axis=0).max() < 1e-5 * scale:
            return True
    table = np.squeeze(array)
    table = table[:_SAMPLE].astype(np.float64) if table.ndim > 1 else table
    if table.ndim < 2 or min(table.shape[0], table.shape[-1]) < 2 or table.size < 16:
        return False
    n = table.shape[-1]
    pairs = [(table[..., ::2], table[..., 1::2])] if n % 2 == 0 else []
    for parts in (2, 4):
        if n % parts == 0:
            cut = np.split(table, parts, axis=-1)
            pairs.append((np.concatenate(cut[::2], -1), np.concatenate(cut[1::2], -1)))
    return any(_on_a_circle(a, b) for a, b in pairs)


def _on_a_circle(a: np.ndarray, b: np.ndarray) -> bool:
    """True if a² + b² is constant, for a and b that vary."""
    radius = a * a + b * b
    circle = radius.max() > 0 and np.ptp(radius) < 1e-3 * radius.max() and np.ptp(a) > 0.1 and np.ptp(b) > 1e-3
    return bool(circle and np.any(np.mod(a, 1)))  # rows of an identity are no angles


def _circles(candidates: Mapping[str, ir.Value]) -> set[ir.Value]:
    """Pairs of tables of the same shape that are the cosines and sines of the same angles."""
    by_shape: dict[tuple[object, ...], list[ir.Value]] = {}
    for value in candidates.values():
        if value.shape is not None and len(value.shape) > 1 and value.dtype in FLOATS and value.const_value is not None:
            by_shape.setdefault(tuple(value.shape), []).append(value)
    found: set[ir.Value] = set()
    for group in by_shape.values():
        group = [v for v in group[:64] if all(n.op_type not in ("Conv", "Gemm", "MatMul") for n, _ in v.uses())]
        tables = [(v, _sample(not_none(v.const_value).numpy())) for v in group] if len(group) > 1 else []
        for i, (v, a) in enumerate(tables):
            for w, b in tables[i + 1 :]:
                if a.size >= 8 and (_on_a_circle(a, b) or _on_a_circle(b, a)):
                    found |= {v, w}
    return found
