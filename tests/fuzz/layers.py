"""Layers of random networks, and whole ones."""

from __future__ import annotations

import numpy as np
import onnx

from tests.fuzz import sequence_layers  # noqa: F401  (layers)
from tests.fuzz.layer_parts import LAYERS, layer, linear, shape_of, unary, window, with_axes
from tests.fuzz.networks import STEPS, Network
from tests.fuzz.random_graphs import Unfit


@layer
def dense(net: Network, x: str) -> str:
    y = linear(net, with_axes(net, x, net.choose([2, 2, 3, 4])), net.size())
    return unary(net, y) if net.chance(0.7) else y


@layer
def activation(net: Network, x: str) -> str:
    how = net.rng.integers(7)
    shape = shape_of(net, x)
    if how < 2:
        return unary(net, x)
    if how == 2:
        slope = [d if net.chance(0.6) else 1 for d in shape[1:]]
        return net.add("PRelu", x, net.weight(*slope, around=0.2, scale=0.1))
    if how == 3:
        return net.add(net.choose(["Softmax", "LogSoftmax"]), x, axis=int(net.rng.integers(1, len(shape))))
    if how == 4:
        return net.add("Mul", x, net.add("Sigmoid", x))
    if how == 5:
        low, high = net.constant(-0.7, np.float32), net.constant(0.9, np.float32)
        return net.add("Clip", x, *net.choose([(low, high), (low,), ("", high)]))
    if shape[-1] % 2:
        raise Unfit("no halves")
    a, b = net.add("Split", x, net.constant([shape[-1] // 2] * 2), outputs=2, axis=-1)
    return net.add("Mul", a, net.add(net.choose(["Sigmoid", "Tanh"]), b))


@layer
def normalization(net: Network, x: str) -> str:
    how = net.choose(["Layer", "Layer", "written", "RMS", "rms written", "Group", "Instance", "Batch", "Lp", "LRN"])
    count = 4 if how == "LRN" else net.choose([3, 4] if how in ("Group", "Instance") else [2, 3, 4])
    x = with_axes(net, x, count)
    shape = net.shapes[x]
    spread = {"Instance": shape[2:], "Group": shape[2:], "Batch": (shape[0], *shape[2:])}.get(how, shape[-1:])
    if np.prod(spread) < 2:
        raise Unfit("one number, which only rounding tells from its mean")
    eps = float(net.choose([1e-5, 1e-3, 1e-2]))
    channels = shape[1]
    if how in ("Layer", "RMS"):
        axis = int(net.rng.integers(1, len(shape))) if net.chance(0.3) else len(shape) - 1
        scale = net.weight(*shape[axis:], around=1, scale=0.2)
        axis = axis if net.chance(0.5) else axis - len(shape)
        if how == "RMS" and net.opset >= 23:
            return net.add("RMSNormalization", x, scale, axis=axis, epsilon=eps)
        bias = [net.weight(*shape[axis:], scale=0.2)] if net.chance(0.7) else []
        return net.add("LayerNormalization", x, scale, *bias, axis=axis, epsilon=eps)
    if how in ("written", "rms written"):
        axes, two = net.constant([-1]), net.constant(2, np.float32)
        if how == "written":
            x = net.add("Sub", x, net.add("ReduceMean", x, axes))
        square = net.add("Pow", x, two) if net.chance(0.5) else net.add("Mul", x, x)
        root = net.add("Sqrt", net.add("Add", net.add("ReduceMean", square, axes), net.constant(eps, np.float32)))
        y = net.add("Div", x, root) if net.chance(0.6) else net.add("Mul", x, net.add("Reciprocal", root))
        y = net.add("Mul", y, net.weight(shape[-1], around=1, scale=0.2))
        return net.add("Add", y, net.weight(shape[-1], scale=0.2)) if net.chance(0.7) else y
    if how == "Lp":
        return net.add("LpNormalization", x, axis=int(net.rng.integers(1, len(shape))), p=net.choose([1, 2]))
    if how == "LRN":
        return net.add("LRN", x, size=net.choose([1, 3, 5]), alpha=0.1, beta=0.75)
    vectors = [net.weight(channels, around=1, scale=0.2), net.weight(channels, scale=0.2)]
    if how == "Group":
        groups = net.choose([d for d in range(1, channels + 1) if channels % d == 0])
        if net.opset < 21:
            raise Unfit("its scales are of groups")
        return net.add("GroupNormalization", x, *vectors, num_groups=groups, epsilon=eps)
    if how == "Instance" and len(shape) > 2:
        return net.add("InstanceNormalization", x, *vectors, epsilon=eps)
    held = [net.constant(np.zeros(channels), np.float32), net.constant(np.ones(channels), np.float32)]
    return net.add("BatchNormalization", x, *vectors, *held, epsilon=eps, momentum=0.9)


@layer
def convolution(net: Network, x: str) -> str:
    x = with_axes(net, x, net.choose([3, 4, 4, 5]))
    shape = net.shapes[x]
    attributes = window(net, shape[2:])
    groups = net.choose([d for d in range(1, shape[1] + 1) if shape[1] % d == 0]) if net.chance(0.4) else 1
    channels = groups * net.choose([1, 1, 2, 3, 4, 8]) if groups > 1 else net.size(most=33)
    w = net.weight(channels, shape[1] // groups, *attributes["kernel_shape"])
    bias = [net.weight(channels, scale=0.1)] if net.chance(0.6) else []
    if net.chance(0.3):
        del attributes["kernel_shape"]
    y = net.add("Conv", x, w, *bias, group=groups if groups > 1 else None, **attributes)
    return unary(net, y) if net.chance(0.4) else y


@layer
def transposed_convolution(net: Network, x: str) -> str:
    x = with_axes(net, x, net.choose([3, 4, 4, 5]))
    shape = net.shapes[x]
    attributes = window(net, shape[2:])
    attributes.pop("auto_pad", None)
    groups = net.choose([d for d in range(1, shape[1] + 1) if shape[1] % d == 0]) if net.chance(0.3) else 1
    each = net.choose([1, 2, 3, 5, 8])
    w = net.weight(shape[1], each, *attributes["kernel_shape"])
    bias = [net.weight(groups * each, scale=0.1)] if net.chance(0.6) else []
    if "strides" in attributes and net.chance(0.3):
        attributes["output_padding"] = [int(net.rng.integers(0, s)) for s in attributes["strides"]]
    return net.add("ConvTranspose", x, w, *bias, group=groups if groups > 1 else None, **attributes)


@layer
def pool(net: Network, x: str) -> str:
    x = with_axes(net, x, net.choose([3, 4, 4, 5]))
    op = net.choose(["MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "Global"])
    if op == "Global":
        y = net.add(net.choose(["GlobalAveragePool", "GlobalMaxPool"]), x)
        return net.add("Flatten", y) if net.chance(0.5) else y
    attributes = window(net, net.shapes[x][2:], dilated=op == "MaxPool")
    if op != "LpPool":
        # ONNX Runtime infers another size than it computes where windows leave gaps
        gaps = any(s > k for s, k in zip(attributes.get("strides", ()), attributes["kernel_shape"]))
        attributes["ceil_mode"] = int(net.chance(0.3) and "auto_pad" not in attributes and not gaps)
    if op == "AveragePool":
        attributes["count_include_pad"] = int(net.chance(0.5))
    return net.add(op, x, **attributes)


@layer
def embedding(net: Network, x: str) -> str:
    words, width = net.size(least=2), net.size(most=33)
    length = net.choose([1, 2, 3, 5, 9])
    ids = net.input(net.rng.integers(0, words, (STEPS * net.rows, length)), "ids")
    y = net.add("Gather", net.weight(words, width, scale=1.0), ids)
    x = linear(net, with_axes(net, x, 2), width)
    return net.add("Add", y, net.add("Unsqueeze", x, net.constant([1])))


@layer
def gathered(net: Network, x: str) -> str:
    shape = shape_of(net, x)
    axis = int(net.rng.integers(1, len(shape)))
    size = shape[axis]
    how = net.rng.integers(6)
    if how == 0:
        return net.add("Gather", x, net.constant(net.rng.integers(-size, size, net.choose([1, 3, 5]))), axis=axis)
    if how == 1 and not net.is_dynamic:
        index = net.rng.integers(0, size, [int(net.rng.integers(1, d + 1)) if i else d for i, d in enumerate(shape)])
        return net.add("GatherElements", x, net.constant(index), axis=axis)
    if how == 2:  # the index of each row comes with the data
        x = with_axes(net, x, 3)
        steps = net.shapes[x][1]
        index = net.input(net.rng.integers(0, steps, (STEPS * net.rows, 2, 1)), "index")
        return net.add("GatherND", x, index, batch_dims=1)
    if how == 3:
        starts, ends = int(net.rng.integers(0, size)), int(net.rng.integers(1, size + 1))
        step = net.choose([1, 2, -1])
        if step < 0:
            starts, ends = size - 1, -size - 1
        return net.add("Slice", x, *(net.constant([v]) for v in (starts, ends, axis, step)))
    if how == 4:
        x = with_axes(net, x, 3)
        index = net.add("TopK", x, net.constant([min(2, net.shapes[x][1])]), outputs=2, axis=1)[0]
        return index
    pads = np.zeros(2 * len(shape), np.int64)
    pads[axis], pads[axis + len(shape)] = net.rng.integers(0, min(size, 3), 2)
    return net.add("Pad", x, net.constant(pads), mode=net.choose(["constant", "edge", "reflect"]))


@layer
def scattered(net: Network, x: str) -> str:
    x = with_axes(net, x, 2)
    rows, width = net.shapes[x]
    how = net.choose(["add", "none", "max", "mul"])
    if net.chance(0.5):  # columns, in the turned matrix
        t = net.add("Transpose", x, perm=[1, 0])
        count = min(width, 3)
        at = net.rng.permutation(width)[:count] if how == "none" else net.rng.integers(0, width, count)
        source = net.add("Gather", t, net.constant(net.rng.integers(0, width, count)))
        y = net.add("ScatterND", t, net.constant(at[:, None]), net.add("Tanh", source), reduction=how)
        return net.add("Transpose", y, perm=[1, 0])
    if how == "none":
        at = np.argsort(net.rng.random((STEPS * rows, width)), axis=1)
    else:
        at = net.rng.integers(0, width, (STEPS * rows, width))
    index = net.input(at, "index")
    return net.add("ScatterElements", x, index, net.add("Tanh", x), axis=1, reduction=how)


@layer
def residual(net: Network, x: str) -> str:
    width = shape_of(net, x)[-1]
    h = linear(net, x, net.size(most=33))
    h = linear(net, unary(net, h), width)
    return net.add("Add", *((x, h) if net.chance(0.5) else (h, x)))


@layer
def tied(net: Network, x: str) -> str:
    """One matrix read twice: by a product, and by another one, by a lookup or by a sum."""
    x = with_axes(net, x, 2)
    features, hidden = net.shapes[x][1], net.size()
    w = net.weight(features, hidden, scale=features**-0.5)
    h = unary(net, net.add("MatMul", x, w))
    how = net.rng.integers(3)
    if how == 0:
        return net.add("MatMul", h, net.add("Transpose", w, perm=[1, 0]))
    if how == 1:
        ids = net.input(net.rng.integers(0, features, (STEPS * net.rows, net.choose([1, 3, 5]))), "ids")
        return net.add("Mul", net.add("Gather", w, ids), net.add("Unsqueeze", h, net.constant([1])))
    return net.add("Add", h, net.add("ReduceSum", w, net.constant([0]), keepdims=net.choose([0, 1])))


@layer
def joined(net: Network, x: str) -> str:
    """Two paths from one value, beside each other."""
    x = with_axes(net, x, net.choose([2, 3]))
    a, b = linear(net, x, net.size(most=33)), unary(net, x)
    if net.chance(0.5):
        return net.add("Concat", a, b, axis=-1)
    return net.add("Concat", a, b, a, axis=len(net.shapes[x]) - 1)


@layer
def parted(net: Network, x: str) -> str:
    shape = shape_of(net, x)
    axis = int(net.rng.integers(1, len(shape)))
    if shape[axis] < 2:
        raise Unfit("one")
    first = int(net.rng.integers(1, shape[axis]))
    a, b = net.add("Split", x, net.constant([first, shape[axis] - first]), outputs=2, axis=axis)
    if 2 * first == shape[axis] and net.chance(0.7):
        return net.add(net.choose(["Add", "Mul", "Sub", "Max"]), a, b)
    return net.add("Concat", b, a, axis=axis) if net.chance(0.7) else a


@layer
def reduced(net: Network, x: str) -> str:
    shape = shape_of(net, x)
    op = net.choose(["Sum", "Mean", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare"])
    axes = 1 + net.rng.permutation(len(shape) - 1)[: net.rng.integers(1, 3)]
    keep = int(len(axes) == len(shape) - 1 or net.chance(0.5))
    y = net.add(f"Reduce{op}", x, net.constant(axes), keepdims=keep)
    return net.add(net.choose(["Sub", "Mul"]), x, y) if keep and net.chance(0.5) else y


@layer
def combined(net: Network, x: str) -> str:
    shape = shape_of(net, x)
    w = net.weight(*([d if net.chance(0.6) else 1 for d in shape[1:]][net.rng.integers(len(shape) - 1) :]), around=1)
    op = net.choose(["Add", "Sub", "Mul", "Div", "Max", "Min"])
    if op == "Div":
        w = net.add("Add", net.add("Abs", w), net.constant(0.5, np.float32))
    return net.add(op, *((x, w) if op == "Div" or net.chance(0.7) else (w, x)))


@layer
def contracted(net: Network, x: str) -> str:
    x = with_axes(net, x, 3)
    _, a, b = net.shapes[x]
    k = net.choose([1, 2, 5, 8])
    if net.chance(0.4):
        return net.add("Einsum", x, net.weight(b, a, k, scale=b**-0.5), equation="nab,bak->nk")
    if net.chance(0.5):
        return net.add("Einsum", x, net.weight(b, k, scale=b**-0.5), equation="nab,bk->nak")
    y = net.add("MatMul", x, net.add("Transpose", x, perm=[0, 2, 1]))
    return net.add("Mul", y, net.constant(1 / b, np.float32))


@layer
def moved(net: Network, x: str) -> str:
    how = net.rng.integers(5)
    x = with_axes(net, x, net.choose([3, 4]))
    shape = net.shapes[x]
    if how == 0:
        return net.add("Transpose", x, perm=[0, *(1 + net.rng.permutation(len(shape) - 1))])
    if how == 1:
        reps = np.ones(len(shape), np.int64)
        reps[net.rng.integers(1, len(shape))] = 2
        return net.add("Tile", x, net.constant(reps))
    if how == 2:
        axis = net.constant(int(net.rng.integers(1, len(shape))))
        return net.add("CumSum", x, axis, exclusive=int(net.chance(0.5)), reverse=int(net.chance(0.5)))
    if how == 3:
        return net.add("Flatten", x, axis=1)
    x = with_axes(net, x, 4)
    _, c, h, w = net.shapes[x]
    if c % 4 == 0:
        return net.add("DepthToSpace", x, blocksize=2, mode=net.choose(["DCR", "CRD"]))
    to = net.add("Shape", x, start=0, end=1)
    sizes = net.add("Concat", to, net.constant([c, 2 * h, w + 1]), axis=0)
    return net.add("Resize", x, "", "", sizes, mode=net.choose(["nearest", "linear", "cubic"]))


def grown(rng: np.random.Generator, most: int = 6) -> tuple[Network, str]:
    """A random network of two to six layers, or the first `most` of them, and the value that it ends in."""
    net = Network(rng)
    count = int(rng.integers(1, 5))
    sizes = [net.size(most=33) if i else net.size(most=17) for i in range(count)]
    while np.prod(sizes) > 600:
        sizes[int(np.argmax(sizes))] = net.choose([1, 2, 3, 4])
    x = net.input(net.numbers(*sizes))
    wanted, names = int(rng.integers(2, 7)), sorted(LAYERS)
    for _ in range(80):
        if len(net.layers) == min(wanted, most):
            return net, x
        try:
            x = net.attempt(LAYERS[net.choose(names)], x)
        except (Unfit, ValueError, IndexError):
            continue
    raise Unfit("no layer fits")


def headed(net: Network, x: str, loss: str) -> tuple[onnx.ModelProto, np.ndarray]:
    """The network with an end that `loss` compares, and the labels for it."""

    def head(net: Network, x: str) -> str:
        if loss in ("mse", "l1", "huber") and net.chance(0.5) and np.prod(shape_of(net, x)[1:]) < 300:
            return x
        flat = net.chance(0.8) or len(shape_of(net, x)) > 4
        return linear(net, with_axes(net, x, 2) if flat else x, net.choose([2, 3, 5, 10]))

    y = net.attempt(head, x) if net.shapes.get(x) else x
    shape, rows = shape_of(net, y), STEPS * net.rows
    if loss == "cross_entropy":
        if len(shape) > 2:
            y = net.attempt(lambda net, x: linear(net, with_axes(net, x, 2), 3), y)
        labels = net.rng.integers(0, net.shapes[y][1], rows)
    elif loss == "bce_with_logits":
        labels = (net.rng.random((rows, *shape[1:])) < 0.5).astype(np.float32)
    else:
        labels = net.numbers(*shape[1:])
    return net.finished(y), labels
