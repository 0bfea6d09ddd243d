"""Checks of the operators with parameters: products, convolutions, pools, normalizations, losses, recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.model_io.checks.examined import (
    Check,
    Checks,
    Dim,
    ExaminedNode,
    equal,
    joint,
    known,
    may_be,
    need,
    onto,
    ranked,
    vector,
)

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _size(i: int, axis: int) -> Callable[[ExaminedNode], Dim]:
    """The size of operand `i` along `axis`."""

    def size(site: ExaminedNode) -> Dim:
        shape = site.shape(i)
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None

    return size


def _positive(*names: str) -> Check:
    """The attributes `names` are positive numbers."""

    def check(site: ExaminedNode) -> None:
        for name in names:
            held = site.attr(name)
            for number in held if isinstance(held, (list, tuple)) else [held]:
                need(number is None or number > 0, f"{name} is {held}")

    return check


def _one_of(name: str, *allowed: object) -> Check:
    """The attribute `name` has a value that there is."""

    def check(site: ExaminedNode) -> None:
        held = site.attr(name)
        need(held is None or held in allowed, f"{name} is {held!r}, and may be {', '.join(map(repr, allowed))}")

    return check


# --- products -----------------------------------------------------------------------------------------


def _matmul(site: ExaminedNode) -> None:
    a, b = site.shape(0), site.shape(1)
    if a is None or b is None:
        return
    need(bool(a) and bool(b), "a product takes vectors, matrices or batches of matrices, no scalar")
    need(may_be(a[-1], b[0] if len(b) == 1 else b[-2]), f"no product of {known(a)} and {known(b)}")
    joint([a[:-2], b[:-2]])


def _gemm(site: ExaminedNode) -> None:
    a, b = site.shape(0), site.shape(1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return
    (m, k), (j, n) = a[:: -1 if site.attr("transA") else 1], b[:: -1 if site.attr("transB") else 1]
    need(may_be(k, j), f"no product of {known([m, k])} and {known([j, n])}")
    onto(site.shape(2), [m, n], 2)


def _einsum(site: ExaminedNode) -> None:
    shapes = [site.shape(i) for i in range(len(site.node.inputs))]
    equation = site.attr("equation")
    if equation is None or None in shapes:
        return
    held = [s for s in shapes if s is not None]
    need(equation.partition("->")[0].count(",") == len(held) - 1, f"{equation!r} is not for {len(held)} operands")
    terms, _ = einsum_labels(equation, [len(s) for s in held])
    sizes: dict[str, Dim] = {}
    for term, shape in zip(terms, held):
        need(len(term) == len(shape), f"{term!r} is not for {known(shape)}")
        for label, size in zip(term, shape):
            if size not in (None, 1):
                need(
                    sizes.setdefault(label, size) == size,
                    f"{label!r} of {equation!r} has sizes {sizes[label]} and {size}",
                )


# --- windows ------------------------------------------------------------------------------------------


def _lists(site: ExaminedNode, rank: int | None) -> None:
    """There is one stride, and so on, for each of `rank` spatial axes, and two pads."""
    if rank is None:
        return
    for name, each in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("pads", 2), ("output_padding", 1)):
        held = site.attr(name)
        wanted = each * rank
        need(held is None or len(held) == wanted, f"{name} is {held and list(held)}, for {rank} spatial axes")


def _spatial(i: int) -> Callable[[ExaminedNode], int | None]:
    def count(site: ExaminedNode) -> int | None:
        rank = site.rank(i)
        return None if rank is None else rank - 2

    return count


def _conv(site: ExaminedNode) -> None:
    x, w, group = site.shape(0), site.shape(1), site.attr("group") or 0
    need(group > 0, f"group is {group}")
    if x is None or w is None:
        return
    need(len(x) == len(w) >= 3, f"operands 0 and 1 are {known(x)} and {known(w)}")
    _lists(site, len(x) - 2)
    if site.node.op_type == "Conv":
        channels = None if w[1] is None else w[1] * group
        need(w[0] is None or w[0] % group == 0, f"{w[0]} channels do not divide into {group} groups")
    else:
        channels = w[0]
        need(w[0] is None or w[0] % group == 0, f"{w[0]} channels do not divide into {group} groups")
    need(may_be(x[1], channels), f"x has {x[1]} channels, and w is for {channels}")
    kernel = site.attr("kernel_shape")
    fits = kernel is None or all(map(may_be, kernel, w[2:]))
    need(fits, f"kernel_shape is {kernel and list(kernel)}, and w is {known(w)}")


def _conv_outputs(site: ExaminedNode) -> Dim:
    size, group = _size(1, 0 if site.node.op_type == "Conv" else 1)(site), site.attr("group")
    return size if size is None or site.node.op_type == "Conv" else size * group


def _pool(site: ExaminedNode) -> None:
    shape, kernel = site.shape(0), site.attr("kernel_shape")
    if shape is None or kernel is None:
        return
    _lists(site, len(shape) - 2)
    pads = site.attr("pads") or [0] * 2 * len(kernel)
    need(min(pads, default=0) >= 0, f"pads are {list(pads)}")
    if site.attr("auto_pad") not in ("SAME_UPPER", "SAME_LOWER"):
        for i, (size, k) in enumerate(zip(shape[2:], kernel)):
            reach = (k - 1) * ((site.attr("dilations") or [1] * len(kernel))[i]) + 1
            room = None if size is None else size + pads[i] + pads[i + len(kernel)]
            need(room is None or room == 0 or reach <= room, f"a window of {reach} does not fit into {room}")


def _unpooled(site: ExaminedNode) -> None:
    equal(site, 0, 1)
    _lists(site, _spatial(0)(site))


def _deformed(site: ExaminedNode) -> None:
    w, offset, groups = site.shape(1), site.shape(2), site.attr("offset_group")
    if w is None or offset is None or None in w[2:] or len(offset) < 2:
        return
    wanted = math.prod(d for d in w[2:] if d is not None) * (len(w) - 2) * groups
    need(may_be(offset[1], wanted), f"the offset has {offset[1]} channels, and should have {wanted}")


def _grid(site: ExaminedNode) -> None:
    x, grid = site.shape(0), site.shape(1)
    if x is not None and grid is not None:
        fits = len(x) == len(grid) and may_be(grid[-1], len(x) - 2)
        need(fits, f"a grid {known(grid)} is not for {known(x)}")


def _affine(site: ExaminedNode) -> None:
    theta, size = site.shape(0), site.held(1)
    if theta is not None and size is not None:
        need(len(size) in (4, 5), f"the size is {size}")
        wanted: list[Dim] = [size[0], len(size) - 2, len(size) - 1]
        need(
            len(theta) == 3 and all(map(may_be, theta, wanted)),
            f"theta is {known(theta)}, and should be {known(wanted)}",
        )


def _complex(site: ExaminedNode) -> None:
    shape = site.shape(0)
    if shape:
        need(shape[-1] in (None, 1, 2), f"the last axis has size {shape[-1]}, and should have 1 or 2")


def _columns(i: int, size: int) -> Check:
    """The last axis of operand `i` has `size` elements."""

    def check(site: ExaminedNode) -> None:
        shape = site.shape(i)
        if shape:
            need(may_be(shape[-1], size), f"operand {i} is {known(shape)}, and its last axis should have size {size}")

    return check


def _square(site: ExaminedNode) -> None:
    shape = site.shape(0)
    if shape is not None:
        need(len(shape) > 1 and may_be(shape[-1], shape[-2]), f"{known(shape)} is no square matrix")


# --- normalizations -----------------------------------------------------------------------------------


def _scaled(site: ExaminedNode) -> None:
    """Scale and bias broadcast to x (each operand after the first)."""
    for i in range(1, len(site.node.inputs)):
        onto(site.shape(i), site.shape(0), i)


def _grouped(site: ExaminedNode) -> None:
    groups, channels = site.attr("num_groups"), _size(0, 1)(site)
    if groups is not None:
        need(
            groups > 0 and (channels is None or channels % groups == 0), f"{channels} channels, num_groups is {groups}"
        )


def _group_parameters(site: ExaminedNode) -> Dim:
    return _size(0, 1)(site) if site.opset >= 21 else site.attr("num_groups")


def _modulus(site: ExaminedNode) -> None:
    value = site.node.inputs[0]
    floats = value is not None and value.dtype in FLOATS
    need(not floats or site.attr("fmod") == 1 or site.opset >= 28, "of floats fmod must be 1 before opset 28")


# --- losses -------------------------------------------------------------------------------------------


def _labelled(site: ExaminedNode) -> None:
    x, target = site.shape(0), site.shape(1)
    if x is not None and target is not None:
        need(len(x) >= 2, f"scores are {known(x)}, and should be [N, C, …]")
        wanted = [x[0], *x[2:]]
        fits = len(target) == len(wanted) and all(map(may_be, target, wanted))
        need(fits, f"labels are {known(target)}, and should be {known(wanted)}")


# --- sequences ----------------------------------------------------------------------------------------

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _recurrent(site: ExaminedNode) -> None:
    hidden, both = site.attr("hidden_size"), site.attr("direction") == "bidirectional"
    x, w, r, b = (site.shape(i) for i in range(4))
    for i, shape in ((0, x), (1, w), (2, r)):
        need(shape is None or len(shape) == 3, f"operand {i} is {known(shape)}, and should have 3 axes")
    if hidden is None and r is not None:
        hidden = r[2]
    if hidden is None:
        return
    ways, rows = 1 + both, hidden * _GATES[site.node.op_type]
    for i, shape, wanted in (
        (1, w, [ways, rows, None if x is None else x[2]]),
        (2, r, [ways, rows, hidden]),
        (3, b, [ways, 2 * rows]),
    ):
        fits = shape is None or (len(shape) == len(wanted) and all(map(may_be, shape, wanted)))
        need(fits, f"operand {i} is {known(shape)}, and should be {known(wanted)}")


def _attended(site: ExaminedNode) -> None:
    q, k, v = (site.shape(i) for i in range(3))
    if q is None or k is None or v is None:
        return
    need(len(q) == len(k) == len(v) and len(q) in (3, 4), f"operands are {known(q)}, {known(k)} and {known(v)}")
    if len(q) == 4:
        need(may_be(q[3], k[3]), f"heads of q and k have sizes {q[3]} and {k[3]}")
        need(may_be(k[2], v[2]), f"k and v have {k[2]} and {v[2]} rows")
        need(may_be(k[1], v[1]), f"k and v have {k[1]} and {v[1]} heads")
        of_q, of_k = q[1], k[1]
    else:
        of_q, of_k = site.attr("q_num_heads"), site.attr("kv_num_heads")
        need(bool(of_q) and bool(of_k), "operands with 3 axes need q_num_heads and kv_num_heads")
        for name, size, heads in (("q", q[2], of_q), ("k", k[2], of_k), ("v", v[2], of_k)):
            need(
                size is None or size % heads == 0, f"{name} has {size} columns, which are no multiple of {heads} heads"
            )
    need(not of_q or not of_k or of_q % of_k == 0, f"{of_q} heads of q are no multiple of {of_k} of k")


def _rotated(site: ExaminedNode) -> None:
    x, heads, part = site.shape(0), site.attr("num_heads"), site.attr("rotary_embedding_dim")
    if x is None or len(x) not in (3, 4):
        need(x is None, f"x is {known(x)}, and should have 3 or 4 axes")
        return
    need(len(x) == 4 or bool(heads), "x with 3 axes needs num_heads")
    size = x[3] if len(x) == 4 else None if x[2] is None else x[2] // heads
    part = part or size
    need(part is None or part % 2 == 0, f"{part} columns are rotated, which is an odd number")


LAYERS = Checks()
_auto = _one_of("auto_pad", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_windows = _positive("kernel_shape", "strides", "dilations")
_channels = _size(0, 1)
LAYERS.add([_matmul], "MatMul")
LAYERS.add([ranked(0, exactly=2), ranked(1, exactly=2), _gemm], "Gemm")
LAYERS.add([_einsum], "Einsum")
LAYERS.add([_auto, _windows, _conv, vector(2, _conv_outputs, "one for each channel")], "Conv", "ConvTranspose")
LAYERS.add([_auto, _windows, _pool], "MaxPool", "AveragePool", "LpPool")
LAYERS.add([_windows, _unpooled], "MaxUnpool")
LAYERS.add([ranked(0, least=2)], "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
LAYERS.add([_deformed], "DeformConv")
LAYERS.add([_grid, _one_of("padding_mode", "zeros", "border", "reflection")], "GridSample")
LAYERS.add([_one_of("mode", "linear", "nearest", "cubic", "bilinear", "bicubic")], "GridSample")
LAYERS.add([_affine], "AffineGrid")
LAYERS.add([_complex], "DFT")
LAYERS.add([_columns(1, 4), _one_of("mode", "avg", "max")], "RoiAlign")
LAYERS.add([_columns(1, 5)], "MaxRoiPool")
LAYERS.add([_square], "Det")
LAYERS.add([_scaled], "LayerNormalization", "RMSNormalization", "PRelu")
LAYERS.add([vector(i, _channels, "one for each channel") for i in range(1, 5)], "BatchNormalization")
LAYERS.add([vector(i, _channels, "one for each channel") for i in (1, 2)], "InstanceNormalization")
LAYERS.add([_grouped, *(vector(i, _group_parameters, "as many as there are") for i in (1, 2))], "GroupNormalization")
LAYERS.add([_positive("size")], "LRN")
LAYERS.add([ranked(1, exactly=0), ranked(2, exactly=0)], "Dropout")
LAYERS.add([_one_of("p", 1, 2)], "LpNormalization")
LAYERS.add([_modulus], "Mod")
LAYERS.add(
    [_labelled, _one_of("reduction", "none", "mean", "sum")], "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
)
LAYERS.add([vector(2, _channels, "one for each class")], "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
LAYERS.add([_one_of("direction", "forward", "reverse", "bidirectional"), _recurrent], "RNN", "GRU", "LSTM")
LAYERS.add([_attended], "Attention")
LAYERS.add([_rotated], "RotaryEmbedding")
LAYERS.add([_one_of("mode", "constant", "reflect", "edge", "wrap")], "Pad")
LAYERS.add([_one_of("mode", "DCR", "CRD")], "DepthToSpace")
LAYERS.add([_one_of("mode", "linear", "circular")], "TensorScatter")
LAYERS.add([_one_of("reduction", "none", "add", "mul", "max", "min")], "ScatterElements", "ScatterND")
LAYERS.add([_one_of("approximate", "none", "tanh")], "Gelu")
LAYERS.add([_one_of("mode", "nearest", "linear", "cubic")], "Resize")
LAYERS.add([_one_of("keep_aspect_ratio_policy", "stretch", "not_larger", "not_smaller")], "Resize")
LAYERS.add([_one_of("nearest_mode", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")], "Resize")
