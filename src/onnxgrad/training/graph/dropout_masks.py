"""Dropout that a run can repeat: masks are a function of the seed, the number of the step and the place.

The Dropout of ONNX draws from a generator inside of the runtime, whose position no checkpoint can hold. A step draws
its masks itself: state counts the steps (the seed above, the count below 2³²), and element i of the n-th Dropout is
dropped where hash(i + hash(hash(hash(seed) + n) + count)) is small. The hash is lowbias32 (Ellis, "Prospecting for hash
functions"): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, on integers of 32 bits that
wrap around. One hash decides on two elements, by 16 bits each, so a ratio is met to 1/65536.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import constant, is_op
from onnxgrad.training.metadata import MASKS

#: Name of the state.
COUNT = "dropout_step"
INT32, UINT32 = int(ir.DataType.INT32), int(ir.DataType.UINT32)
#: Numbers that are drawn are below it.
SPAN = 1 << 16


def kept_count(model: ir.Model) -> np.ndarray:
    """The state that a training model was saved with; that of seed 0 before the first step, if it has none."""
    text = model.metadata_props.get(MASKS) or "0"
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise BadInput(f"the model's metadata {MASKS!r} is {text[:40]!r}, not a count")
    return np.array(int(text), np.int64)


def first_count(seed: int) -> np.ndarray:
    """The state of a run with this seed before its first step."""
    return np.array((seed % (1 << 31)) << 32, np.int64)


def drop_by_count(graph: ir.Graph, taken: Collection[str] = ()) -> str:
    """Replace every Dropout of `graph` that drops; the name of the input that counts (its next value: ``…_next``).

    Empty if there is none. Dropouts in nested graphs, and those with a computed mode or ratio, are unchanged.
    """
    nodes = [n for n in graph if _drops(n)]
    if not nodes:
        return ""
    name = COUNT
    while name in taken:
        name = f"{name}_"
    held = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.append(held)
    for number, node in enumerate(nodes):
        _replace(graph, node, held, number)
    builder = Builder(graph)
    after = builder.Add(Var(builder, held), builder.const(np.array(1)))
    after.value.name = f"{name}_next"
    graph.outputs.append(after.value)
    return name


def _drops(node: ir.Node) -> bool:
    if not is_op(node, "Dropout") or len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    training = constant(node.inputs[2])
    if training is None or not training.all():
        return False
    if node.inputs[1] is None:
        return True
    ratio = constant(node.inputs[1])
    return ratio is not None and bool((ratio > 0).all())


def _replace(graph: ir.Graph, node: ir.Node, held: ir.Value, number: int) -> None:
    before = set(graph)
    b = Builder(graph)
    x, count = b.var(node.inputs[0]), Var(b, held)  # type: ignore[arg-type]
    ratio = None if node.inputs[1] is None else constant(node.inputs[1])
    share = 0.5 if ratio is None else float(ratio)
    kept = b.GreaterOrEqual(draw_numbers(b, count, number, x), b.const(np.int32(round(share * SPAN))))
    factor = 1 / (1 - share) if share < 1 else 0.0
    y = x * b.Where(kept, b.const(factor, x.dtype), b.const(0.0, x.dtype))
    made = [n for n in graph if n not in before]
    graph.remove(made)
    graph.insert_before(node, made)
    for old, new in zip(node.outputs, (y, kept)):
        if old.uses() or old.is_graph_output():
            name = old.name
            new.value.type, new.value.shape = old.type or new.value.type, old.shape or new.value.shape
            old.replace_all_uses_with(new.value, replace_graph_outputs=True)
            old.name, new.value.name = None, name
    graph.remove(node, safe=True)


def draw_numbers(b: Builder, count: Var, number: int, x: Var) -> Var:
    """Integers from 0 to `SPAN` - 1 in the shape of `x`, int32: of the `number`-th place, at `count`, a scalar."""
    seed, step = (b.Cast(f(count, b.const(np.array(1 << 32))), to=INT32) for f in (b.Div, b.Mod))
    start = _hash_bits(b, _hash_bits(b, _hash_bits(b, seed) + number) + step)
    size = b.Size(x)
    pairs = b.Cast(b.Div(b.Add(size, b.const(np.array(1))), b.const(np.array(2))), to=INT32)
    places = b.Range(b.const(np.int32(0)), pairs, b.const(np.int32(1)))
    bits = b.Cast(_hash_bits(b, places + start), to=UINT32)
    half = b.const(np.uint32(16))
    low, high = b.BitwiseAnd(bits, b.const(np.uint32(SPAN - 1))), b.BitShift(bits, half, direction="RIGHT")
    drawn = b.Cast(b.Concat(low, high, axis=0), to=INT32)
    return b.reshape(b.Slice(drawn, [0], b.Reshape(size, [1]), [0]), b.shape_of(x))


def _hash_bits(b: Builder, x: Var) -> Var:
    """The hash of `x`, int32."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = b.Mul(_fold_bits(b, x, shift), b.const(np.uint32(factor).view(np.int32)))
    return _fold_bits(b, x, 16)


def _fold_bits(b: Builder, x: Var, shift: int) -> Var:
    """x ^ x >> shift, of the bits of `x`, int32."""
    bits = b.Cast(x, to=UINT32)
    return b.Cast(b.BitwiseXor(bits, b.BitShift(bits, b.const(np.uint32(shift)), direction="RIGHT")), to=INT32)
