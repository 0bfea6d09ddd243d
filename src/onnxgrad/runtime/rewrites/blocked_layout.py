"""Convolutions in the layout that ONNX Runtime's CPU kernels like best, also where their weights change.

ONNX Runtime stores channels in blocks of 16 or 8, innermost (domain ``com.microsoft.nchwc``), and then convolves
directly, without copying windows: 1.3 to 2 times as fast for 3×3, 3 to 5 times for depthwise, reordering included.
Images of a few channels are read unblocked, and only the result is blocked (1.0 to 1.5 times). Convolutions over one
axis are those of images of one row (1.1 to 2 times where they are long and have few weights). ONNX Runtime does so
only for constant weights, which the weights of a step are not. Here the same operators are emitted for computed
weights, which are reordered in the graph.

The size of a block depends on the processor, and ONNX Runtime does not guarantee the domain. So both are tried once per
process, and used only if the results are correct (`block_size`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import constant, is_constant, is_op, not_none, permutation, producer, sizes
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite

DOMAIN = "com.microsoft.nchwc"


@functools.cache
def block_size() -> int:
    """The number of channels in a block on this machine; 0 if the layout is unusable or inexact."""
    try:
        size = int(run(_reordering(), {"x": np.zeros((1, 4, 1, 1), np.float32)})[0].shape[1])
        if size not in (8, 16, 32):
            return 0
        rng = np.random.default_rng(0)
        model = _convolutions(2 * size)
        shapes = {v.name or "": zip(v.shape or (), (2, 0, 6, 5)) for v in model.graph.inputs}
        sizes = {name: [d if isinstance(d, int) else chosen for d, chosen in shape] for name, shape in shapes.items()}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
        changed = blocked(model, size)
        assert not any(is_op(node, "Conv") for node in changed.graph)
        pairs = zip(run(changed, feeds), run(model, feeds), strict=True)
        return size if all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs) else 0
    except Exception:  # of any kind: the layout is not used
        return 0


def blocked(model: ir.Model, block: int | None = None) -> ir.Model:
    """`model` with its convolutions in blocks of `block` channels; `model` itself if it has none that gain.

    The default is the block size of the processor (see `block_size`); if that is unknown, nothing changes.
    """
    if not any(_gains(node, 1) for node in model.graph):
        return model
    block = block_size() if block is None else block
    if not block or not any(_gains(node, block) for node in model.graph):
        return model
    model = model.clone()
    _write(Builder(model.graph, noting=False, prefix="blocked_layout"), block)
    prune(model.graph)
    return model


def _applies(graph: ir.Graph) -> bool:
    """True if a Conv gains; only then does the processor have to be tried."""
    return any(_gains(node, 1) for node in graph) and any(_gains(node, block_size()) for node in graph)


def _write(b: Builder, block: int) -> int:
    blocks = Blocks(b, block)
    nodes = [node for node in b.graph if _gains(node, block)]
    for node in nodes:
        blocks.convolve(node)
    return len(nodes)


def _gains(node: ir.Node, block: int) -> bool:
    """True if `node` is a float32 Conv over whole blocks of channels, with more than one tap and changing weights."""
    if not is_op(node, "Conv"):
        return False
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or w.shape is None or len(w.shape) not in (3, 4) or not w.shape.is_static():
        return False
    if ir.DataType.FLOAT not in (x.dtype, w.dtype) or is_known_before(w):
        return False
    if node.attributes.get_string("auto_pad", "") not in ("NOTSET", ""):
        return False
    out, inner, *taps = w.shape.numpy()
    group = _group(node)
    if len(taps) == 1 and not _is_long(x, node.outputs[0], out * inner * taps[0]):
        return False
    if group == 1:
        return fits_blocks(out, inner, taps, block)
    return inner == 1 and group == out and fits_blocks(out, out, taps, block)


def fits_blocks(out: int, inner: int, taps: Sequence[int], block: int) -> bool:
    """True if channels are whole blocks, or few of the operand, and the taps are more than one, but no whole image."""
    if not block or out % block or max(taps) == 1 or max(taps) > (LARGEST if len(taps) == 2 else LONGEST):
        return False
    return inner % block == 0 or inner < block


def is_known_before(w: ir.Value) -> bool:
    """True if `w` is a constant, or one turned round, which ONNX Runtime folds: then it writes the blocks itself."""
    while (node := w.producer()) is not None and is_op(node, ("Transpose", "Slice", "Reshape")):
        w = not_none(node.inputs[0])
    return is_constant(w)


#: Kernels with more rows or columns (a cotangent as the kernel) are few outputs for many taps, which gain nothing.
LARGEST = 11
#: Over one axis: the same; the fewest places of a result, and products of one row of a batch.
LONGEST, PLACES, PRODUCTS = 31, 48, 3 << 19


def _is_long(x: ir.Value, y: ir.Value, weights: int) -> bool:
    """True if a convolution of `weights` over one axis, of known length, pays for laying out operands and weights."""
    if x.shape is None or y.shape is None or not all(isinstance(v.shape[-1], int) for v in (x, y) if v.shape):
        return False
    places = y.shape[-1]
    assert isinstance(places, int)
    return places >= PLACES and places * weights >= PRODUCTS


def _group(node: ir.Node) -> int:
    return node.attributes.get_int("group", 1)


def original_filter(w: ir.Value) -> ir.Value | None:
    """The filter whose flipped, channel-exchanged form is `w`; None for other forms."""
    dims = sizes(w)
    back = producer(w, "Slice")
    swap = producer(w if back is None else back.inputs[0], "Transpose")
    if dims is None or swap is None or permutation(swap) != (1, 0, *range(2, len(dims))):
        return None
    if back is None:  # of one tap
        return swap.inputs[0] if max(dims[2:], default=0) == 1 else None
    steps, axes, starts, ends = (constant(back.inputs[i]) if len(back.inputs) > i else None for i in (4, 3, 1, 2))
    if steps is None or axes is None or starts is None or ends is None:
        return None
    reversal = (steps == -1).all() and (starts == -1).all() and (ends < -(1 << 31)).all()
    whole = sorted(axes % len(dims)) == [a for a in range(2, len(dims)) if dims[a] != 1]
    return swap.inputs[0] if reversal and whole else None


def emit_blocked(b: Builder, op_type: str, *operands: Any, **attributes: Any) -> Var:
    """Emit an operator of the blocked layout, with the type of its result: inference does not know that domain."""
    values = [v.value if isinstance(v, Var) else v for v in operands]
    y = ir.Value(type=ir.TensorType(ir.DataType.FLOAT))
    return b.append(ir.Node(DOMAIN, op_type, values, attributes_of(attributes), outputs=[y]))[0]


class Blocks:
    """Writes operators on blocks of channels; a value is reordered once, however many read it."""

    def __init__(self, b: Builder, block: int) -> None:
        self.b, self.block = b, block
        b.graph.opset_imports[DOMAIN] = 1
        self._known: dict[tuple[ir.Value, str], Var] = {}

    def once(self, x: ir.Value, how: str) -> Var:
        """`x` in blocks: an "operand", "weights" of a convolution, "filters" of few channels, "depthwise" weights."""
        if (x, how) not in self._known:
            self._known[x, how] = getattr(self, f"_{how}")(x)
        return self._known[x, how]

    def _operand(self, x: ir.Value | Var) -> Var:
        image = self.image(x)
        value = image.value if isinstance(image, Var) else image
        for node, _ in value.uses():
            if node.domain == DOMAIN and node.op_type == "ReorderInput" and node.graph is self.b.graph:
                self._move_up(node, value.producer())
                return Var(self.b, node.outputs[0])
        return self.fresh(image)

    def _move_up(self, node: ir.Node, producer: ir.Node | None) -> None:
        """Have `node` follow the producer of its only operand, before all readers."""
        first = self.b.graph[0] if producer is None else producer
        if node is not first:
            self.b.graph.remove(node)
            (self.b.graph.insert_before if producer is None else self.b.graph.insert_after)(first, node)

    def fresh(self, x: ir.Value | Var) -> Var:
        """`x` in blocks, which live no longer than the reader that is written next."""
        return emit_blocked(self.b, "ReorderInput", self.image(x))

    def stack(
        self,
        image: ir.Value | Var,
        parts: int,
        sizes: tuple[int, int],
        rows: tuple[int, int],
        columns: tuple[int, int],
        lanes: int,
    ) -> Var:
        """Images one below the other: [N, parts·height·width·lanes] as [parts, N·pitch, line·lanes].

        Args:
            image: the images, in `parts` of `lanes` channels, which are innermost.
            sizes: the height and the width of an image.
            rows: the number of rows of zeros above an image, and the `pitch`, the rows from one to the next.
            columns: the number of columns of zeros before an image, and the `line`, the columns of the result.
            lanes: the number of channels side by side.
        """
        (height, width), (above, pitch), (before, line) = sizes, rows, columns
        lines = self.view(image, -1, parts, height, width * lanes)
        pads = above, before * lanes, pitch - above - height, (line - before - width) * lanes
        if any(pads):
            lines = self.b.Pad(lines, [0, 0, *pads[:2], 0, 0, *pads[2:]])
        if parts == 1:
            return self.view(lines, 1, -1, line * lanes)
        planes = self.b.Transpose(self.view(lines, -1, parts, pitch * line * lanes), perm=[1, 0, 2])
        return self.view(planes, parts, -1, line * lanes)

    def image(self, x: ir.Value | Var) -> ir.Value | Var:
        """`x`; if it has one axis of places, as images of one row."""
        shape = x.shape
        assert shape is not None
        return x if len(shape) == 4 else self.b.reshape(x, [-1, shape[1], 1, shape[2]])

    def _depthwise(self, w: ir.Value) -> Var:
        channels, _, *taps = not_none(w.shape).numpy()
        return self.view(self._operand(self.view(w, 1, channels, *taps)), channels, 1, *taps)

    def _filters(self, w: ir.Value) -> Var:
        """[O, C, …] as [O/b, C, …, b of O], for fewer channels than a block"""
        out, inner, *taps = not_none(w.shape).numpy()
        rows = self._operand(self.view(w, 1, out, inner * int(np.prod(taps)), 1))
        return self.view(rows, out, inner, *taps)

    def _weights(self, w: ir.Value) -> Var:
        """[O, C, …] as [O/b, C/b, …, b of C, b of O]

        Whole rows of b numbers are moved; where a Transpose moves single ones, it takes three times as long, and seven
        times where the weights are also turned round (those of the transposed convolution).
        """
        out, inner, *taps = not_none(w.shape).numpy()
        b, count = self.block, int(np.prod(taps))
        turned = original_filter(w)
        if turned is None:
            rows = self.view(self._operand(self.view(w, 1, out, inner * count, 1)), -1, b, count, b)
            return self.view(self.b.Transpose(rows, perm=[0, 2, 1, 3]), out, inner, *taps)
        rows = self.view(self._operand(self.view(turned, inner, out, count, 1)), inner // b, b, out // b, count, b)
        blocks = self.b.Transpose(rows, perm=[2, 0, 3, 1, 4])
        return self.view(self.b.Gather(blocks, np.arange(count - 1, -1, -1), axis=2), out, inner, *taps)

    def view(self, x: ir.Value | Var, *dims: int) -> Var:
        """`x` reshaped."""
        return self.b.reshape(x, list(dims))

    # --- nodes ---------------------------------------------------------------------------------

    def convolve(self, node: ir.Node) -> None:
        """Replace a Conv."""
        self.b.before = node
        x, w = not_none(node.inputs[0]), not_none(node.inputs[1])
        assert w.shape is not None
        channels = w.shape.numpy()[0]
        few = _group(node) == 1 and w.shape.numpy()[1] < self.block
        kernel = self.once(w, "depthwise" if _group(node) > 1 else "filters" if few else "weights")
        image = self.image(x) if few else self.once(x, "operand")
        attributes: dict[str, Any] = dict(node.attributes)
        out, is_row = node.outputs[0], len(w.shape) == 3
        if is_row:
            kernel = self.view(kernel, *w.shape.numpy()[:2], 1, w.shape.numpy()[2])
            for name in ("kernel_shape", "strides", "dilations"):
                if name in node.attributes:
                    attributes[name] = [1, *node.attributes[name].as_ints()]
            head, tail = node.attributes.get_ints("pads", [0, 0])
            attributes["pads"] = [0, head, 0, tail]
        y = self.unblock(emit_blocked(self.b, "Conv", image, kernel, *node.inputs[2:], **attributes), channels)
        if is_row:
            y = self.b.reshape(y, [-1, channels, not_none(out.shape)[2]])
        replace_value(y, out)

    def unblock(self, y: Var, channels: int) -> Var:
        """The blocked value in plain layout."""
        return emit_blocked(self.b, "ReorderOutput", y, channels=channels)


BLOCKED_LAYOUT = rewrite(
    "blocked_layout",
    "convolutions in blocks of channels",
    "float32, images or long rows, more than one tap, whole blocks, weights that change",
    _applies,
    lambda b: _write(b, block_size()),
)


# --- the trial -------------------------------------------------------------------------------------


def _reordering() -> ir.Model:
    x, y = _value("x", None, None, None, None), _value("y")
    node = ir.Node(DOMAIN, "ReorderInput", [x], outputs=[y])
    return _model([x], [node], [y])


def _convolutions(out: int) -> ir.Model:
    """Convolutions of each kind to `out` channels: dense, by channel and of few channels; with and without strides."""
    nodes = []
    for i, ((channels, groups), stride) in enumerate(itertools.product(((out, 1), (out, out), (3, 1)), (1, 2))):
        x, w = _value(f"x{i}", None, channels, None, None), _value(f"w{i}", out, channels // groups, 3, 3)
        attributes = attributes_of({"pads": [1] * 4, "strides": [stride] * 2, "group": groups})
        nodes.append(ir.Node("", "Conv", [x, w], attributes, outputs=[_value(f"y{i}")]))
    return _model([v for n in nodes for v in n.inputs if v is not None], nodes, [n.outputs[0] for n in nodes])


def _value(name: str, *dims: int | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims) if dims else None)


def _model(inputs: list[ir.Value], nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18, DOMAIN: 1}, name="trial")
    return ir.Model(graph, ir_version=9)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a small model. Raises the errors of ONNX Runtime unchanged."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)
