"""Checks of the operators that move, pick, join and cut: axes, indices and sizes."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.model_io.checks.examined import (
    Check,
    Checks,
    Dim,
    ExaminedNode,
    broadcast,
    equal,
    joint,
    known,
    may_be,
    need,
    ranked,
    vector,
    within,
)

# --- axes ---------------------------------------------------------------------------------------------


def _axis(site: ExaminedNode) -> None:
    """The attribute `axis` is an axis of the first operand."""
    axis = site.attr("axis")
    within("axis", None if axis is None else [axis], site.rank())


def _axis_operand(i: int) -> Check:
    """Operand `i` holds axes of the first."""

    def check(site: ExaminedNode) -> None:
        within("axis", site.held(i), site.rank(), distinct=False)

    return check


def _flat(site: ExaminedNode) -> None:
    rank = site.rank()
    within("axis", [site.attr("axis")], None if rank is None else rank + 1, None if rank is None else -rank)


def _quantized(site: ExaminedNode) -> None:
    if site.rank(1) and list(site.shape(1) or ()) != [1]:  # a scale of one element serves all, wherever the axis points
        _axis(site)


def _reduced(site: ExaminedNode) -> None:
    within("axis", site.held(1) if site.attr("axes") is None else site.attr("axes"), site.rank(), distinct=False)


def _unsqueezed(site: ExaminedNode) -> None:
    rank, axes = site.rank(), site.held(1)
    within("axis", axes, None if rank is None or axes is None else rank + len(axes))


def _squeezed(site: ExaminedNode) -> None:
    shape, axes = site.shape(0), site.held(1)
    within("axis", axes, site.rank(), distinct=False)
    if shape is not None and axes is not None:
        for axis in axes:
            need(may_be(shape[axis], 1), f"axis {axis} has size {shape[axis]}, not 1")


def _permuted(site: ExaminedNode) -> None:
    perm, rank = site.attr("perm"), site.rank()
    if perm is not None and rank is not None:
        need(sorted(perm) == list(range(rank)), f"perm {list(perm)} is no order of {rank} axes")


def _concatenated(site: ExaminedNode) -> None:
    shapes = [s for i in range(len(site.node.inputs)) if (s := site.shape(i)) is not None]
    if not shapes:
        return
    rank, axis = len(shapes[0]), site.attr("axis")
    if axis is None:
        return
    within("axis", [axis], rank)
    for shape in shapes[1:]:
        fits = len(shape) == rank and all(
            may_be(a, b) for k, (a, b) in enumerate(zip(shape, shapes[0])) if k != axis % rank
        )
        need(fits, f"{known(shapes[0])} and {known(shape)} differ along more than axis {axis}")


def _sliced(site: ExaminedNode) -> None:
    sizes = [len(held) for i in range(1, 5) if (held := site.held(i)) is not None]
    need(len(set(sizes)) < 2, f"starts, ends, axes and steps have {sizes} elements, and should have equally many")
    within("axis", site.held(3), site.rank())
    need(0 not in (site.held(4) or []), "a step is 0")


def _padded(site: ExaminedNode) -> None:
    rank, pads, axes = site.rank(), site.held(1), site.held(3)
    within("axis", axes, rank)
    count = (
        len(axes) if axes is not None else rank if len(site.node.inputs) < 4 or site.node.inputs[3] is None else None
    )
    if pads is not None and count is not None:
        need(len(pads) == 2 * count, f"pads has {len(pads)} elements, not {2 * count}")
        shape = site.shape(0)
        for k, axis in enumerate(axes if axes is not None else range(count)):
            size = None if shape is None else shape[axis]
            cut = pads[k] + pads[k + count]
            need(size is None or size + cut >= 0, f"pads of {cut} are more than axis {axis} has")


def _split(site: ExaminedNode) -> None:
    _axis(site)
    shape, sizes, axis = site.shape(0), site.held(1), site.attr("axis")
    if sizes is None:
        return
    need(len(sizes) == len(site.node.outputs), f"there are {len(sizes)} sizes, and {len(site.node.outputs)} results")
    need(min(sizes, default=0) >= 0, f"sizes are {sizes}")
    if shape is not None and axis is not None:
        need(may_be(shape[axis], sum(sizes)), f"sizes {sizes} do not come to {shape[axis]}")


def _top(site: ExaminedNode) -> None:
    _axis(site)
    shape, k = site.shape(0), site.held(1)
    if k:
        size = None if shape is None else shape[site.attr("axis")]
        need(k[0] >= 0 and (size is None or k[0] <= size), f"k is {k[0]}, of {'?' if size is None else size}")


# --- places -------------------------------------------------------------------------------------------


def _in_size(indices: list[int] | None, size: Dim) -> None:
    if indices is not None and size is not None:
        wrong = next((i for i in indices if not -size <= i < size), None)
        need(wrong is None, f"the index {wrong} is none of {size}")


def _gathered(site: ExaminedNode) -> None:
    _axis(site)
    shape, axis = site.shape(0), site.attr("axis")
    _in_size(site.held(1), None if shape is None or axis is None else shape[axis])


def _by_element(site: ExaminedNode) -> None:
    _gathered(site)
    a, b = site.rank(0), site.rank(1)
    need(a is None or b is None or a == b, f"operands 0 and 1 have {a} and {b} axes, and should have equally many")
    if len(site.node.inputs) > 2:
        equal(site, 1, 2)


def _gathered_nd(site: ExaminedNode) -> None:
    shape, index, batch = site.shape(0), site.shape(1), site.attr("batch_dims") or 0
    if shape is not None and index is not None:
        need(
            0 <= batch < min(len(shape), len(index)),
            f"batch_dims is {batch}, and the operands {known(shape)}, {known(index)}",
        )
        depth = index[-1]
        need(depth is None or depth <= len(shape) - batch, f"{depth} indices at once into {known(shape)}")


def _scattered_nd(site: ExaminedNode) -> None:
    shape, index, updates = (site.shape(i) for i in range(3))
    if shape is None or index is None or not index or index[-1] is None:
        return
    depth = index[-1]
    need(depth <= len(shape), f"{depth} indices at once into {known(shape)}")
    wanted = [*index[:-1], *shape[depth:]]
    fits = updates is None or (len(updates) == len(wanted) and all(map(may_be, updates, wanted)))
    need(fits, f"updates are {known(updates)}, and should be {known(wanted)}")


def _reversed(site: ExaminedNode) -> None:
    axes = [site.attr("time_axis"), site.attr("batch_axis")]
    need(sorted(axes) == [0, 1], f"time_axis and batch_axis are {axes[0]} and {axes[1]}, and should be 0 and 1")


def _one_hot(site: ExaminedNode) -> None:
    rank = site.rank()
    within("axis", [site.attr("axis")], None if rank is None else rank + 1)
    vector(2, lambda _: 2, "off and on")(site)


# --- shapes -------------------------------------------------------------------------------------------


def _reshaped(site: ExaminedNode) -> None:
    shape, asked = site.shape(0), site.held(1)
    if asked is None:
        return
    need(asked.count(-1) < 2 and min(asked, default=0) >= -1, f"no shape is {asked}")
    if shape is None:
        return
    if not site.attr("allowzero"):
        need(0 not in asked[len(shape) :], f"the 0 in {asked} copies the size of an axis that {known(shape)} lacks")
        target: list[Dim] = [shape[k] if d == 0 else d for k, d in enumerate(asked)]
    else:
        target = list(asked)
    have, want = _count(shape), _count([d for d in target if d != -1])
    if have is not None and want is not None:
        fits = have == want or (-1 in target and have % want == 0 if want else have == 0)
        need(fits, f"{known(shape)} has not as many elements as {asked}")


def _count(shape: list[Dim]) -> int | None:
    return None if None in shape else math.prod(d for d in shape if d is not None)


def _expanded(site: ExaminedNode) -> None:
    asked = site.held(1)
    if asked is not None:
        need(min(asked, default=0) >= 0, f"no shape is {asked}")
        joint([site.shape(0), list(asked)])


def _tiled(site: ExaminedNode) -> None:
    rank, repeats = site.rank(), site.held(1)
    if repeats is not None:
        need(rank is None or len(repeats) == rank, f"repeats has {len(repeats)} elements, not {rank}")
        need(min(repeats, default=0) >= 0, f"repeats are {repeats}")


def _blocks(site: ExaminedNode) -> None:
    shape, block = site.shape(0), site.attr("blocksize")
    if block is not None:
        need(block > 0, f"blocksize is {block}")
        down = site.node.op_type == "DepthToSpace"
        for size in [] if shape is None or len(shape) < 4 else shape[1:2] if down else shape[2:]:
            by = block * block if down else block
            need(size is None or size % by == 0, f"{known(shape)} does not divide into blocks of {block}")


def _folded(site: ExaminedNode) -> None:
    shape, block = site.shape(0), site.held(2)
    if shape is not None and block and len(shape) == 3 and shape[1] is not None and math.prod(block):
        need(shape[1] % math.prod(block) == 0, f"{shape[1]} rows are no multiple of blocks of {block}")


def _clipped(site: ExaminedNode) -> None:
    for i in (1, 2):
        shape = site.shape(i)
        need(
            shape is None or all(d in (None, 1) for d in shape),
            f"operand {i} is {known(shape)}, and should be a scalar",
        )


def _resized(site: ExaminedNode) -> None:
    names = [v for v in site.node.inputs[2:4] if v is not None and v.shape != ir.Shape([0])]
    need(
        len(names) == 1, "one of scales and sizes is given, not both" if names else "neither scales nor sizes are given"
    )
    for value in names:
        need(value.shape is None or len(value.shape) == 1, "scales and sizes are vectors")
    rank, axes = site.rank(), site.attr("axes")
    within("axis", axes, rank)
    count = rank if axes is None else len(axes)
    held = names[0].shape
    if held is not None and count is not None and len(held) == 1 and isinstance(held[0], int):
        need(held[0] == count, f"there are {held[0]} scales or sizes for {count} axes")


SHAPES = Checks()

SHAPES.add([broadcast], *BROADCASTING)
SHAPES.add([_axis], "Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "ArgMax", "ArgMin", "Compress", "Unique")
SHAPES.add([_axis], "LayerNormalization", "RMSNormalization", "TensorScatter", "SplitToSequence")
SHAPES.add([_quantized], "QuantizeLinear", "DequantizeLinear")
SHAPES.add([_axis_operand(1), vector(1, lambda s: 1 if s.rank(1) else None, "an axis")], "CumSum", "CumProd")
SHAPES.add([_axis_operand(2)], "DFT")
SHAPES.add([_reduced], *(f"Reduce{how}" for how in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare")))
SHAPES.add([_reduced], "ReduceLogSum", "ReduceLogSumExp")
SHAPES.add([_reduced], "MeanVarianceNormalization")
SHAPES.add([ranked(0, least=2)], "Trilu")
for _check, _operators in (
    (_flat, ("Flatten",)),
    (_unsqueezed, ("Unsqueeze",)),
    (_squeezed, ("Squeeze",)),
    (_permuted, ("Transpose",)),
    (_concatenated, ("Concat",)),
    (_sliced, ("Slice",)),
    (_padded, ("Pad",)),
    (_split, ("Split",)),
    (_top, ("TopK",)),
    (_gathered, ("Gather",)),
    (_by_element, ("GatherElements", "ScatterElements")),
    (_gathered_nd, ("GatherND",)),
    (_scattered_nd, ("ScatterND",)),
    (_reversed, ("ReverseSequence",)),
    (_one_hot, ("OneHot",)),
    (_reshaped, ("Reshape",)),
    (_expanded, ("Expand",)),
    (_tiled, ("Tile",)),
    (_blocks, ("DepthToSpace", "SpaceToDepth")),
    (_folded, ("Col2Im",)),
    (_clipped, ("Clip",)),
    (_resized, ("Resize",)),
):
    SHAPES.add([_check], *_operators)
