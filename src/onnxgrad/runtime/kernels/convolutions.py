"""Convolutions of 3×3 taps side by side to calls of ``source/winograd.c``, depthwise ones to ``source/depthwise.c``.

In depth there may be up to seven taps (3×3×3). They have no name where they run forward: any such Conv in float32 is
one, if its weights change, and any depthwise Conv or ConvTranspose. Constant weights are laid out once by ONNX Runtime,
for a whole chain of convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import is_constant, is_op

#: The names of the kernels.
KERNEL, DEPTHWISE = "Conv3x3", "Depthwise"

#: Fewest channels on either side, and tiles of 4×4 in all pictures: with fewer, transforming these or weights shows.
_CHANNELS, _TILES = 16, 64
#: Of depthwise convolutions: fewest channels and numbers of a picture, most taps on one of two axes, and most numbers
#: that windows reach. With other sizes ONNX Runtime's blocked layout is as quick.
FEWEST_GROUPS, _PLACES, _TAPS, _REACH = 8, 100, 5, 1 << 24
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


def three_axes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """`attributes` of a convolution as kernels read them: axes of one number come before those that it has."""
    missing = 3 - len(attributes["kernel"])
    single = {"kernel": 1, "strides": 1, "dilations": 1, "pads": 0, "size": 1}
    return {k: [single[k]] * missing + [int(n) for n in v] if k in single else v for k, v in attributes.items()}


def fuse_convolutions(graph: ir.Graph, domain: str) -> int:
    """Replace each Conv and ConvTranspose of `graph` that benefits by a call. Returns the count."""
    count = 0
    for node in list(graph):
        call = _call_for(node, domain, count)
        if call is None:
            continue
        old, new = node.outputs[0], call.outputs[0]
        graph.insert_before(node, call)
        new.type, new.shape, new.name = old.type, old.shape, old.name
        ir.convenience.replace_all_uses_with([old], [new], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        count += 1
    return count


def _call_for(node: ir.Node, domain: str, number: int) -> ir.Node | None:
    """The call that takes the place of `node`; None if no kernel is quicker."""
    if not is_op(node, ("Conv", "ConvTranspose")):
        return None
    x, w = node.inputs[:2]
    y = node.outputs[0]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or w.dtype != ir.DataType.FLOAT or is_constant(w):
        return None
    if w.shape is None or not w.shape.is_static() or y.shape is None or len(w.shape) != len(y.shape):
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "") or "output_shape" in node.attributes:
        return None
    taps = w.shape.numpy()[2:]
    given: dict[str, Any] = {
        name: list(node.attributes[name].as_ints()) if name in node.attributes else [default] * count
        for name, default, count in (("strides", 1, len(taps)), ("dilations", 1, len(taps)), ("pads", 0, 2 * len(taps)))
    }
    kernel = _kernel_for(node, w.shape.numpy(), y.shape, given)
    if kernel is None:
        return None
    given |= {"pads": given["pads"][: len(taps)], "kernel": taps, "size": list(y.shape)[2:]}
    how = {"group": node.attributes.get_int("group", 1), "turned": int(node.op_type == "ConvTranspose")}
    name = f"native.{kernel}.forward.{number}"
    attributes = attributes_of(three_axes(given | how))
    return ir.Node(domain, kernel, node.inputs, attributes, num_outputs=1, name=name)


def _kernel_for(node: ir.Node, w: Sequence[int], y: ir.Shape, given: Mapping[str, Sequence[int]]) -> str | None:
    """The kernel that is quicker than `node`, which has weights of shape `w`."""
    images, _, *size = (d if isinstance(d, int) else None for d in y)
    if node.attributes.get_int("group", 1) > 1:
        return DEPTHWISE if _is_depthwise(node, w, size, given) else None
    m, c, *taps = w
    if node.op_type != "Conv" or len(taps) not in (2, 3) or taps[-2:] != [3, 3] or not 1 <= taps[0] <= _DEEPEST:
        return None
    if any(n != 1 for name in ("strides", "dilations") for n in given[name]):
        return None
    if not all(0 <= p < n for p, n in zip(given["pads"], [*taps, *taps])):
        return None
    return KERNEL if gains(images, (c, m), size, math.prod(taps[:-2])) else None


def _is_depthwise(
    node: ir.Node, w: Sequence[int], size: Sequence[int | None], given: Mapping[str, Sequence[int]]
) -> bool:
    """True if each channel is a group of its own, of a size that the kernel supports and is quicker for."""
    known, (channels, one, *taps) = [n for n in size if n is not None], w
    if one != 1 or channels != node.attributes.get_int("group", 1) or channels < FEWEST_GROUPS or len(taps) > 2:
        return False
    if max(taps) == 1 or len(known) < len(size):
        return False
    is_spread = node.op_type == "ConvTranspose" and max(given["strides"]) > 1
    if len(taps) > 1 and not is_spread and (max(taps) > _TAPS or math.prod(known) < _PLACES):
        return False
    windows = zip(known, given["strides"], given["pads"], taps, given["dilations"])
    return math.prod(n * s + abs(p) + (k - 1) * d for n, s, p, k, d in windows) < _REACH
