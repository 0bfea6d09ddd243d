"""Convolutions in the layout that ONNX Runtime's CPU kernels like best, also where their weights change.

ONNX Runtime keeps channels in blocks of 16 or 8, innermost (domain ``com.microsoft.nchwc``), and then convolves
directly, without copying windows: 1.3 to 2 times as fast for 3×3, 3 to 5 times for depthwise, reordering included.
It does so by itself where the weights are constants, which in a step they are not. Here the same operators
are written for weights that are computed: these are reordered in the graph, with two Transposes that move whole
blocks. The graph that is given stays as it is; a copy with other operators is what the session gets.

How large a block is depends on the processor, and the domain is none that ONNX Runtime promises to keep: so both
are tried once per process, and only what gives the right numbers is used (`block_size`).
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad.ir.walk import prune
from onnxgrad.runtime.depthwise import RowProducts

DOMAIN = "com.microsoft.nchwc"


@functools.cache
def block_size() -> int:
    """How many channels are a block here; 0 where the layout cannot be used or gives other numbers."""
    try:
        size = int(_run(_reordering(), {"x": np.zeros((1, 4, 1, 1), np.float32)}).shape[1])
        if size not in (8, 16, 32):
            return 0
        rng = np.random.default_rng(0)
        for groups, stride in ((1, 1), (1, 2), (2 * size, 1), (2 * size, 2)):
            model = _convolution(2 * size, groups, stride)
            feeds = {
                "x": rng.standard_normal((2, 2 * size, 6, 5)).astype(np.float32),
                "w": rng.standard_normal((2 * size, 2 * size // groups, 3, 3)).astype(np.float32),
            }
            changed = blocked(model, size)
            assert changed is not model
            if not np.allclose(_run(changed, feeds), _run(model, feeds), rtol=1e-4, atol=1e-4):
                return 0
        return size
    except Exception:  # whatever it is: then not
        return 0


def blocked(model: ir.Model, block: int | None = None) -> ir.Model:
    """`model` with its convolutions in blocks of `block` channels; `model` itself if it has none that gain.

    The default is what the processor has (see `block_size`), and nothing changes where that is unknown.
    """
    if not any(_gains(node, 8) for node in model.graph):
        return model
    if block is None:
        block = block_size()
    if not block or not any(_gains(node, block) for node in model.graph):
        return model
    model = model.clone()
    model.opset_imports[DOMAIN] = 1
    writer = _Writer(model.graph, block)
    for node in list(model.graph):
        if _gains(node, block):
            writer.convolve(node)
        elif (found := RowProducts.ending_in(node, block)) is not None:
            writer.correlate(node, found)
    prune(model.graph)
    return model


def _gains(node: ir.Node, block: int) -> bool:
    """Whether `node` is a float32 Conv over whole blocks of channels, with more than one tap and changing weights."""
    if node.op_type != "Conv" or node.domain != "":
        return False
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or w.shape is None or len(w.shape) != 4 or not w.shape.is_static():
        return False
    if ir.DataType.FLOAT not in (x.dtype, w.dtype) or (w.is_initializer() and not w.is_graph_input()):
        return False
    mode = node.attributes.get("auto_pad")
    if mode is not None and mode.as_string() not in ("NOTSET", ""):
        return False
    out, inner, *taps = w.shape.numpy()
    group = _group(node)
    if out % block or taps == [1, 1] or max(taps) > LARGEST:
        return False
    return inner % block == 0 if group == 1 else (inner == 1 and group == out)


#: Kernels with more rows or columns (a cotangent as the kernel) are few outputs for many taps, which gain nothing.
LARGEST = 11


def _group(node: ir.Node) -> int:
    given = node.attributes.get("group")
    return given.as_int() if given is not None else 1


class _Writer:
    """Replaces nodes of one graph; a value is reordered once, however many read it."""

    def __init__(self, graph: ir.Graph, block: int) -> None:
        self.graph = graph
        self.block = block
        self.at: ir.Node | None = None
        self._known: dict[tuple[ir.Value, str], ir.Value] = {}
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self._serial = 0

    # --- emission ------------------------------------------------------------------------------

    def emit(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        """A node before the one at hand; its output."""
        attrs = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]  # type: ignore[arg-type]
        node = ir.Node(domain, op_type, inputs, attrs, num_outputs=1, name=self._name(op_type))
        node.outputs[0].name = self._name(op_type)
        assert self.at is not None
        self.graph.insert_before(self.at, node)
        return node.outputs[0]

    def view(self, x: ir.Value, *dims: int) -> ir.Value:
        """`x` reshaped."""
        return self.emit("Reshape", x, self.constant(*dims))

    def constant(self, *dims: int) -> ir.Value:
        """A vector of integers."""
        if dims not in self._constants:
            tensor = ir.tensor(np.array(dims, np.int64), name=self._name("dims"))
            value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64))
            value.shape = ir.Shape([len(dims)])
            self.graph.register_initializer(value)
            self._constants[dims] = value
        return self._constants[dims]

    def _name(self, what: str) -> str:
        self._serial += 1
        return f"blocked.{what}.{self._serial}"

    def once(self, x: ir.Value, how: str) -> ir.Value:
        """`x` in blocks: as an "operand", as the "weights" of a convolution, or as those of a "depthwise" one."""
        if (x, how) not in self._known:
            self._known[x, how] = getattr(self, f"_{how}")(x)
        return self._known[x, how]

    def _operand(self, x: ir.Value) -> ir.Value:
        return self.emit("ReorderInput", x, domain=DOMAIN)

    def _depthwise(self, w: ir.Value) -> ir.Value:
        assert w.shape is not None
        channels, _, *taps = w.shape.numpy()
        return self.view(self._operand(self.view(w, 1, channels, *taps)), channels, 1, *taps)

    def _weights(self, w: ir.Value) -> ir.Value:
        """[O, C, …] as [O/b, C/b, …, b of C, b of O]"""
        assert w.shape is not None
        out, inner, *taps = w.shape.numpy()
        b, count = self.block, int(np.prod(taps))
        rows = self.emit("Transpose", self.view(w, out // b, b, inner * count), perm=[0, 2, 1])
        blocks = self.view(rows, out // b, inner // b, b, count, b)
        return self.view(self.emit("Transpose", blocks, perm=[0, 1, 3, 2, 4]), out, inner, *taps)

    # --- nodes ---------------------------------------------------------------------------------

    def convolve(self, node: ir.Node) -> None:
        """Replace a Conv."""
        self.at = node
        x, w = node.inputs[0], node.inputs[1]
        assert x is not None
        assert w is not None
        assert w.shape is not None
        channels = w.shape.numpy()[0]
        kernel = self.once(w, "weights" if _group(node) == 1 else "depthwise")
        new = ir.Node(
            DOMAIN,
            "Conv",
            [self.once(x, "operand"), kernel, *node.inputs[2:]],
            list(node.attributes.values()),
            num_outputs=1,
            name=self._name("Conv"),
        )
        new.outputs[0].name = self._name("Conv")
        self.graph.insert_before(node, new)
        y = self.emit("ReorderOutput", new.outputs[0], domain=DOMAIN, channels=channels)
        self._replace(node, y)

    def correlate(self, node: ir.Node, found: RowProducts) -> None:
        """Replace the cotangent of depthwise weights, of which `node` is the last operator.

        The images are laid one below the other, with as many rows of zeros between them as a window reaches over;
        the cotangents likewise. Then one depthwise convolution has them all, and Σ over the batch is inside it.
        """
        self.at = node
        (channels, height, width), (_, rows, columns) = found.sizes
        (stride, stride_across), (above, before), reach = found.strides, found.head, found.reach
        pitch = max(above + height, (rows - 1) * stride + reach[0] + 1 - above)
        pitch += -pitch % stride
        big = self._stacked(found.big, found.sizes[0], above, pitch)
        small = self._stacked(found.small, found.sizes[1], 0, pitch // stride)
        after = (columns - 1) * stride_across + reach[1] + 1 - before - width
        y = self.emit(
            "Conv",
            self.view(big, 1, channels, -1, width),
            self.view(small, channels, 1, -1, columns),
            domain=DOMAIN,
            group=channels,
            strides=list(found.dilations),
            dilations=list(found.strides),
            pads=[0, before, reach[0] + 1 - stride, after],
        )
        y = self.emit("ReorderOutput", y, domain=DOMAIN, channels=channels)
        self._replace(node, self.view(y, channels, 1, *found.taps))

    def _stacked(self, x: ir.Value, sizes: tuple[int, int, int], above: int, pitch: int) -> ir.Value:
        """`x` in blocks, its images one below the other: `above` rows of zeros, the image, zeros up to `pitch` rows."""
        channels, height, width = sizes
        line = width * self.block
        images = self.view(self.once(x, "operand"), -1, channels // self.block, height * line)
        if pitch > height:
            below = pitch - height - above
            images = self.emit("Pad", images, self.constant(0, 0, above * line, 0, 0, below * line))
        return self.emit("Transpose", images, perm=[1, 0, 2])

    def _replace(self, node: ir.Node, y: ir.Value) -> None:
        old = node.outputs[0]
        y.type, y.shape = old.type, old.shape
        old.replace_all_uses_with(y, replace_graph_outputs=True)
        y.name, old.name = old.name, y.name
        self.graph.remove(node, safe=True)


# --- the trial -------------------------------------------------------------------------------------


def _reordering() -> ir.Model:
    x, y = _value("x", None, None, None, None), _value("y")
    node = ir.Node(DOMAIN, "ReorderInput", [x], outputs=[y])
    return _model([x], [node], [y])


def _convolution(channels: int, groups: int, stride: int) -> ir.Model:
    x, w, y = _value("x", None, channels, None, None), _value("w", channels, channels // groups, 3, 3), _value("y")
    attributes = [ir.AttrInt64s("pads", [1] * 4), ir.AttrInt64s("strides", [stride] * 2), ir.AttrInt64("group", groups)]
    return _model([x, w], [ir.Node("", "Conv", [x, w], attributes, outputs=[y])], [y])


def _value(name: str, *dims: int | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims) if dims else None)


def _model(inputs: list[ir.Value], nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18, DOMAIN: 1}, name="trial")
    return ir.Model(graph, ir_version=9)


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)[0]
