"""Convolutions of 3×3 taps side by side to calls of ``source/winograd.c``: forward, and for the cotangent of the input.

In depth there may be up to seven taps (3×3×3). They have no name where they run forward: any such Conv in float32 is
one, if its weights change. Constant weights are laid out once by ONNX Runtime, for a whole chain of convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import is_constant, is_op

#: The name of the kernel.
KERNEL = "Conv3x3"

#: Fewest channels on either side, and tiles of 4×4 in all pictures: with fewer, transforming these or weights shows.
_CHANNELS, _TILES = 16, 64
#: The number of images assumed if it is known only at run time.
_IMAGES = 16
#: Most numbers of transformed weights (16 MB).
_WEIGHTS = 1 << 22
#: The most taps in depth.
_DEEPEST = 7
#: The most computed per requested result: tiles, and vectors of 16 channels, may be cut off.
_EMPTIEST = 1.6


def gains(images: int | None, channels: tuple[int, int], size: Sequence[int | None], deep: int = 1) -> bool:
    """True if the kernel is quicker from so many channels to so many, for pictures that become `size`, of `deep` taps.

    The decision depends on the sizes in the graph alone, so that all ranks make the same one.
    """
    known = [n for n in size if n is not None]
    if len(known) < len(size) or min(channels) < _CHANNELS:
        return False
    tiles = math.prod(known[:-2]) * math.prod(-(-n // 4) for n in known[-2:])
    inner, outer = (-(-n // 16) * 16 for n in channels)
    return (
        (images or _IMAGES) * tiles >= _TILES
        and 36 * deep * inner * outer <= _WEIGHTS
        and 16 * tiles * outer <= _EMPTIEST * math.prod(known) * channels[1]
    )


def fuse_convolutions(graph: ir.Graph, domain: str) -> int:
    """Replace each Conv of `graph` that benefits by a call. Returns the count."""
    count = 0
    for node in list(graph):
        pads = _pads(node)
        if pads is None:
            continue
        old = node.outputs[0]
        attributes = attributes_of({"pads": pads, "turned": 0})
        call = ir.Node(domain, KERNEL, node.inputs, attributes, num_outputs=1, name=f"native.{KERNEL}.forward.{count}")
        graph.insert_before(node, call)
        new = call.outputs[0]
        new.type, new.shape, new.name = old.type, old.shape, old.name
        ir.convenience.replace_all_uses_with([old], [new], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        count += 1
    return count


def _pads(node: ir.Node) -> list[int] | None:
    """The padding of a Conv that the kernel gains for, before and behind three axes; None of anything else."""
    if not is_op(node, "Conv"):
        return None
    x, w = node.inputs[:2]
    y = node.outputs[0]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or w.dtype != ir.DataType.FLOAT or is_constant(w):
        return None
    if w.shape is None or not w.shape.is_static() or y.shape is None or len(w.shape) != len(y.shape):
        return None
    m, c, *taps = w.shape.numpy()
    *deep, height, width = taps if len(taps) in (2, 3) else (0, 0)
    given = {
        name: node.attributes[name].as_ints() for name in ("strides", "dilations", "pads") if name in node.attributes
    }
    if (height, width) != (3, 3) or not all(1 <= n <= _DEEPEST for n in deep):
        return None
    if node.attributes.get_int("group", 1) != 1:
        return None
    if any(n != 1 for name in ("strides", "dilations") for n in given.get(name, ())):
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", ""):
        return None
    pads = list(given.get("pads", (0,) * 2 * len(taps)))
    images, _, *size = (d if isinstance(d, int) else None for d in y.shape)
    if not all(0 <= p < n for p, n in zip(pads, [*taps, *taps])):
        return None
    flat = [0] * (1 - len(deep))  # in depth
    sides = [*flat, *pads[: len(taps)], *flat, *pads[len(taps) :]]
    return sides if gains(images, (c, m), size, math.prod(deep)) else None
