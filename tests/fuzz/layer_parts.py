"""The parts of layers in random networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.networks import Network

LAYERS: dict[str, Callable[[Network, str], str]] = {}
UNARY = [
    *("Relu", "Tanh", "Sigmoid", "Elu", "Selu", "Celu", "LeakyRelu", "Softplus", "Softsign", "HardSigmoid", "Gelu"),
    *("HardSwish", "Mish", "Erf", "ThresholdedRelu", "Sin", "Abs", "Neg", "Exp", "Atan"),
]


def layer(function: Callable[[Network, str], str]) -> Callable[[Network, str], str]:
    """Have random networks hold this layer: it writes nodes behind a value of rows, and gives what they compute."""
    LAYERS[function.__name__] = function
    return function


def with_axes(net: Network, x: str, count: int) -> str:
    """`x` with so many axes; what a row holds is kept."""
    shape = net.shapes.get(x)
    if shape is None:
        net.measure(net.nodes[_begin(net, x) :], [x])
        shape = net.shapes[x]
    if len(shape) == count:
        return x
    left, sizes = int(np.prod(shape[1:])), []
    for _ in range(count - 2):
        divisors = [d for d in range(1, left + 1) if left % d == 0 and d <= 40]
        sizes.append(net.choose(divisors))
        left //= sizes[-1]
    sizes.append(left)
    net.rng.shuffle(sizes)
    y = net.add("Reshape", x, net.constant([-1 if net.is_dynamic else net.rows, *sizes]))
    net.shapes[y] = (net.rows, *sizes)
    return y


def _begin(net: Network, x: str) -> int:
    """The first of the last nodes that compute `x` of values whose shapes are known."""
    known, wanted, first = set(net.shapes) | set(net.weights) | set(net.constants), {x}, len(net.nodes)
    for at in range(len(net.nodes) - 1, -1, -1):
        if wanted & set(net.nodes[at].output):
            first = at
            wanted |= {n for n in net.nodes[at].input if n and n not in known}
    return first


def shape_of(net: Network, x: str) -> tuple[int, ...]:
    """The shape of `x`."""
    if x not in net.shapes:
        net.measure(net.nodes[_begin(net, x) :], [x])
    return net.shapes[x]


def unary(net: Network, x: str) -> str:
    """An activation."""
    op = net.choose(UNARY if net.opset >= 20 else [u for u in UNARY if u != "Gelu"])
    return net.add(op, x, approximate=net.choose(["none", "tanh"]) if op == "Gelu" else None)


def linear(net: Network, x: str, outputs: int, bias: bool | None = None) -> str:
    """A product of the last axis with a matrix."""
    shape = shape_of(net, x)
    bias = net.chance(0.7) if bias is None else bias
    if len(shape) == 2 and net.chance(0.5):
        turned = net.chance(0.5)
        w = net.weight(*((outputs, shape[-1]) if turned else (shape[-1], outputs)), scale=shape[-1] ** -0.5)
        y = net.add("Gemm", x, w, *([net.weight(outputs)] * bias), transB=int(turned))
    else:
        y = net.add("MatMul", x, net.weight(shape[-1], outputs, scale=shape[-1] ** -0.5))
        if bias:
            b = net.weight(outputs, scale=0.1)
            y = net.add("Add", y, b) if net.chance(0.7) else net.add("Add", b, y)
    net.shapes[y] = (*shape[:-1], outputs)
    return y


def window(net: Network, sizes: tuple[int, ...], dilated: bool = True) -> dict[str, Any]:
    """Attributes of a window over axes of these sizes."""
    n = len(sizes)
    kernel = [int(net.rng.integers(1, min(s, 5) + 1)) for s in sizes]
    found: dict[str, Any] = {"kernel_shape": kernel}
    if net.chance(0.5):
        found["strides"] = [int(s) for s in net.rng.integers(1, 4, n)]
    if dilated and net.chance(0.3):
        found["dilations"] = [2 if net.chance(0.5) and 2 * k - 1 <= s else 1 for k, s in zip(kernel, sizes)]
    how = net.rng.random()
    if how < 0.4:
        found["pads"] = [int(net.rng.integers(0, k)) for k in kernel * 2]
    elif how < 0.6:
        ways = (
            ["VALID"] if "dilations" in found else ["SAME_UPPER", "SAME_LOWER", "VALID"]
        )  # ONNX Runtime has no others
        found["auto_pad"] = net.choose(ways)
    return found
