"""Jacobians and Hessians by float64 central differences, on ONNX Runtime."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from onnx import TensorProto as T
from onnx import helper

from tests.models import model, stock, value


def session(proto):
    """A function of feeds that gives the outputs by name: nothing but ONNX Runtime will do."""
    held = stock(proto)
    names = [o.name for o in held.get_outputs()]
    wanted = {i.name for i in held.get_inputs()}
    return lambda feeds: dict(zip(names, held.run(None, {k: np.asarray(v) for k, v in feeds.items() if k in wanted})))


def differences(proto, feeds, wrt, of, h=1e-6):
    """∂of/∂wrt by central differences, of shape of.shape + wrt.shape; `wrt` must be an input."""
    run, x = session(proto), feeds[wrt]
    columns = []
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = h
        up, down = run(feeds | {wrt: x + step})[of], run(feeds | {wrt: x - step})[of]
        columns.append((up - down) / (2 * h))
    shape = run(feeds)[of].shape
    stacked = np.stack(columns, axis=-1) if columns else np.zeros((*shape, 0))
    return stacked.reshape((*shape, *x.shape))


def net(sizes, batch="N", seed=0, dtype=T.DOUBLE):
    """Dense layers with tanh between; rows are independent. The activations are called t0, t1, …; the output y."""
    rng, nodes, weights, last = np.random.default_rng(seed), [], {}, "x"
    array = {T.DOUBLE: np.float64, T.FLOAT: np.float32}[dtype]
    for i, (n, m) in enumerate(pairwise(sizes)):
        weights[f"w{i}"] = (rng.standard_normal((n, m)) / np.sqrt(n)).astype(array)
        weights[f"b{i}"] = rng.standard_normal(m).astype(array)
        out = "y" if i == len(sizes) - 2 else f"a{i}"
        nodes += [helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"])]
        nodes += [helper.make_node("Add", [f"h{i}", f"b{i}"], [out])]
        if out != "y":
            nodes += [helper.make_node("Tanh", [out], [f"t{i}"])]
            last = f"t{i}"
    lead = [] if batch is None else [batch]
    x = value("x", [*lead, sizes[0]], dtype)
    return model(nodes, [x], [value("y", [*lead, sizes[-1]], dtype)], weights)
