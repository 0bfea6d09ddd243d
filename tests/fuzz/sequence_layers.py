"""Layers of random networks over sequences, and with bodies: recurrence, attention, If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz.layer_parts import layer, linear, shape_of, with_axes
from tests.fuzz.networks import STEPS, Network
from tests.fuzz.random_graphs import Unfit


@layer
def recurrent(net: Network, x: str) -> str:
    x = with_axes(net, x, 3)
    _, steps, features = net.shapes[x]
    if steps > 40:
        raise Unfit("too long")
    kind = net.choose(["LSTM", "GRU", "RNN"])
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], net.size(most=33)
    direction = net.choose(["forward", "reverse", "bidirectional"])
    ways = 1 + (direction == "bidirectional")
    layout = int(net.chance(0.15))
    operands = [
        x if layout else net.add("Transpose", x, perm=[1, 0, 2]),
        net.weight(ways, gates * hidden, features, scale=features**-0.5),
        net.weight(ways, gates * hidden, hidden, scale=hidden**-0.5),
        net.weight(ways, 2 * gates * hidden, scale=0.1) if net.chance(0.7) else "",
    ]
    lengths = ""
    if net.chance(0.3):
        lengths = net.input(net.rng.integers(1, steps + 1, STEPS * net.rows).astype(np.int32), "lengths")
    operands.append(lengths)
    for _ in range(1 + (kind == "LSTM")):
        operands.append(_first_state(net, x, (ways, hidden), layout) if net.chance(0.4) else "")
    attributes: dict[str, Any] = {}
    if kind == "LSTM":
        operands.append(net.weight(ways, 3 * hidden, scale=0.3) if net.chance(0.3) else "")
        attributes["input_forget"] = 1 if net.chance(0.1) else None
    if kind == "GRU":
        attributes["linear_before_reset"] = int(net.chance(0.5))
    if net.chance(0.2):
        attributes["clip"] = float(net.choose([0.5, 1.0, 3.0]))
    if net.chance(0.3):
        many = {"LSTM": 3, "GRU": 2, "RNN": 1}[kind] * ways
        names = ["Tanh", "Sigmoid", "Relu", "Softsign", "HardSigmoid", "Affine", "LeakyRelu", "ScaledTanh", "Elu"]
        attributes["activations"] = [net.choose(names) for _ in range(many)]
        if net.chance(0.5) or {"Affine", "ScaledTanh"} & set(attributes["activations"]):
            attributes["activation_alpha"] = [0.4] * many
            attributes["activation_beta"] = [0.3] * many
    while not operands[-1]:
        operands.pop()
    outputs = 2 + (kind == "LSTM")
    results = net.add(
        kind, *operands, outputs=outputs, hidden_size=hidden, direction=direction,
        layout=layout or None, **attributes,
    )  # fmt: skip
    everything = (net.rows, steps, ways, hidden) if layout else (steps, ways, net.rows, hidden)
    last = (net.rows, ways, hidden) if layout else (ways, net.rows, hidden)
    net.shapes |= {n: everything if i == 0 else last for i, n in enumerate(results)}
    found = [results[0]] if net.chance(0.6) else []
    found += [r for r in results[1:] if net.chance(0.4)] or results[1 : 1 + (not found)]
    rows = [_rows_first(net, y, layout) for y in found]
    y = rows[0] if len(rows) == 1 else net.add("Concat", *(net.add("Flatten", r) for r in rows), axis=1)
    return y


def _first_state(net: Network, x: str, size: tuple[int, int], layout: int) -> str:
    """An initial state, of trained numbers that all rows share, or zeros of the size of the batch."""
    ways, hidden = size
    small = (1, ways, hidden) if layout else (ways, 1, hidden)
    if not net.is_dynamic:
        wide = (net.rows, ways, hidden) if layout else (ways, net.rows, hidden)
        return net.weight(*wide, scale=0.3) if net.chance(0.5) else net.constant(np.zeros(wide), np.float32)
    rows = net.add("Shape", x, start=0, end=1)
    sizes = [net.constant([ways]), net.constant([hidden])]
    sizes.insert(0 if layout else 1, rows)
    to = net.add("Concat", *sizes, axis=0)
    if net.chance(0.3):
        return net.add("Mul", net.add("Expand", net.weight(*small, scale=0.3), to), net.constant(0, np.float32))
    return net.add("Expand", net.weight(*small, scale=0.3), to)


def _rows_first(net: Network, y: str, layout: int) -> str:
    """A result of a recurrent layer with the batch first and its directions one after the other."""
    shape = net.shapes[y]
    if layout:
        return y
    if len(shape) == 4 and shape[1] == 1 and net.chance(0.5):
        return net.add("Transpose", net.add("Squeeze", y, net.constant([1])), perm=[1, 0, 2])
    perm = [2, 0, 1, 3] if len(shape) == 4 else [1, 0, 2]
    y = net.add("Transpose", y, perm=perm)
    net.shapes[y] = tuple(shape[p] for p in perm)
    return y if net.chance(0.3) else with_axes(net, y, len(shape) - 1)


@layer
def attention(net: Network, x: str) -> str:
    """Attention written out: of `x` to itself or to a trained memory, with or without heads and masks."""
    x = with_axes(net, x, 3)
    rows, queries, width = net.shapes[x]
    if queries > 65:
        raise Unfit("too many queries")
    heads, depth = net.choose([0, 0, 1, 2, 3]), net.choose([1, 2, 4, 5, 8, 16])
    inner = depth * max(heads, 1)
    q = linear(net, x, inner)
    if net.chance(0.25):  # a trained memory: its scores have fewer axes than the queries
        keys = net.size(most=33)
        k, v = net.weight(inner, keys), net.weight(keys, inner)
        p = net.add("Softmax", net.add("MatMul", q, k), axis=net.choose([-1, 2]))
        return net.add("MatMul", p, v)
    keys, source = queries, x
    if net.chance(0.2):
        keys = net.size(most=33)
        source = net.input(net.numbers(keys, width))
    k, v = linear(net, source, inner), linear(net, source, inner)
    if heads:
        split = [0, 0, heads, depth] if net.chance(0.5) else None
        for_each = {}
        for name, length in ((q, queries), (k, keys), (v, keys)):
            to = split or [-1 if net.is_dynamic else rows, length, heads, depth]
            for_each[name] = net.add("Reshape", name, net.constant(to))
        q, v = (net.add("Transpose", for_each[n], perm=[0, 2, 1, 3]) for n in (q, v))
        if net.chance(0.5):
            k = net.add("Transpose", for_each[k], perm=[0, 2, 3, 1])
        else:
            k = net.add("Transpose", net.add("Transpose", for_each[k], perm=[0, 2, 1, 3]), perm=[0, 1, 3, 2])
    else:
        k = net.add("Transpose", k, perm=[0, 2, 1])
    scale = depth**-0.5
    how = net.rng.integers(4)
    if how == 0:
        q = net.add("Mul", q, net.constant(scale, np.float32))
    s = net.add("MatMul", q, k)
    if how == 1:
        s = net.add("Div", s, net.constant(scale**-1, np.float32))
    elif how == 2:
        s = net.add("Mul", net.constant([scale], np.float32), s)
    s = _masked(net, s, queries, keys, bool(heads))
    p = net.add("Softmax", s, axis=-1 if net.chance(0.7) else 2 + bool(heads))
    y = net.add("MatMul", p, v)
    if heads:
        y = net.add("Transpose", y, perm=[0, 2, 1, 3])
        y = net.add("Reshape", y, net.constant([0, 0, inner]))
    return linear(net, y, net.size()) if net.chance(0.5) and shape_of(net, y) else y


def _masked(net: Network, scores: str, queries: int, keys: int, heads: bool) -> str:
    how = net.rng.integers(6)
    future = np.triu(np.ones((queries, keys)), 1) > 0
    if how == 0:
        return net.add("Add", scores, net.constant(np.where(future, -1e9, 0), np.float32))
    if how == 1:
        return net.add("Where", net.constant(future, np.bool_), net.constant(-np.inf, np.float32), scores)
    if how == 2:  # each row of data has its own length
        seen = np.arange(keys) < net.rng.integers(1, keys + 1, STEPS * net.rows)[:, None]
        mask = net.input(seen.reshape(STEPS * net.rows, *[1] * (1 + heads), keys), "mask")
        return net.add("Where", mask, scores, net.constant(-1e4, np.float32))
    if how == 3:
        heads_of = net.choose([1, None]) if heads else None
        sizes = (queries, keys) if heads_of is None else (1, queries, keys)
        return net.add("Add", scores, net.weight(*sizes, scale=0.3))
    return scores


@layer
def attention_operator(net: Network, x: str) -> str:
    if net.opset < 23:
        raise Unfit("no such operator")
    x = with_axes(net, x, 3)
    _, queries, _ = net.shapes[x]
    groups, each, depth = net.choose([1, 2]), net.choose([1, 2, 3]), net.choose([1, 2, 4, 8])
    q = linear(net, x, groups * each * depth)
    k, v = linear(net, x, groups * depth), linear(net, x, groups * depth)
    if queries > 65:
        raise Unfit("too many queries")
    more: dict[str, Any] = {"is_causal": int(net.chance(0.3))}
    if net.chance(0.3):
        more["scale"] = 0.3
    if net.chance(0.2):
        more["softcap"] = 2.0
    mask = []
    if net.chance(0.3):
        seen = np.tril(np.ones((queries, queries))) > 0
        mask = [net.constant(seen, np.bool_) if net.chance(0.5) else net.weight(queries, queries, scale=0.3)]
    if net.chance(0.5):
        return net.add("Attention", q, k, v, *mask, q_num_heads=groups * each, kv_num_heads=groups, **more)
    parts = []
    for name, heads in ((q, groups * each), (k, groups), (v, groups)):
        y = net.add("Reshape", name, net.constant([0, 0, heads, depth]))
        parts.append(net.add("Transpose", y, perm=[0, 2, 1, 3]))
    return net.add("Transpose", net.add("Attention", *parts, *mask, **more), perm=[0, 2, 1, 3])


@layer
def branches(net: Network, x: str) -> str:
    """An If, on what the data say or on what the size of the batch says."""
    x = with_axes(net, x, 2)
    width, features = net.size(most=33), net.shapes[x][1]
    ways = []
    for name in ("yes", "no"):
        w, b = net.weight(features, width, scale=features**-0.5), net.weight(width, scale=0.1)
        h, y = net.name(), net.name()
        nodes = [helper.make_node("MatMul", [x, w], [h])]
        nodes.append(helper.make_node("Add", [h, b], [y]))
        if net.chance(0.5):
            nodes.append(helper.make_node("Tanh", [y], [y + "_"]))
            y += "_"
        ways.append(helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)]))
    if net.chance(0.5):
        total = net.add("ReduceSum", x, keepdims=0)
        test = net.add("Greater", total, net.constant(0.1, np.float32))
    else:
        total = net.add("Size", x)
        test = net.add("Greater", total, net.constant(20))
    return net.add("If", test, then_branch=ways[0], else_branch=ways[1])


@layer
def loop(net: Network, x: str) -> str:
    """A Loop over the same weights, with and without results of each turn."""
    x = with_axes(net, x, 2)
    features = net.shapes[x][1]
    if features > 65:
        raise Unfit("wide")
    w, turns = net.weight(features, features, scale=features**-0.5), net.constant(net.choose([1, 2, 4]))
    stacks = net.chance(0.4)
    i, go, on, a, h, b = (net.name() for _ in range(6))
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Identity", [go], [on]), helper.make_node("MatMul", [a, w], [h])]
    nodes.append(helper.make_node(net.choose(["Tanh", "Sigmoid", "Softsign"]), [h], [b]))
    outputs = [info(on, TensorProto.BOOL, []), info(b, TensorProto.FLOAT, None)]
    if stacks:
        e = net.name()
        nodes.append(helper.make_node("Mul", [h, b], [e]))
        outputs.append(info(e, TensorProto.FLOAT, None))
    inputs = [info(i, TensorProto.INT64, []), info(go, TensorProto.BOOL, []), info(a, TensorProto.FLOAT, None)]
    body = helper.make_graph(nodes, "turn", inputs, outputs)
    if not stacks:
        return net.add("Loop", turns, "", x, body=body)
    last, each = net.add("Loop", turns, "", x, outputs=2, body=body)
    return net.add("Add", last, net.add("ReduceSum", each, net.constant([0]), keepdims=0))


@layer
def nested(net: Network, x: str) -> str:
    """A Loop over the steps of a sequence, with an If or a Loop in each turn."""
    x = with_axes(net, x, 3)
    _, steps, features = net.shapes[x]
    if steps > 9 or features > 65:
        raise Unfit("too long, or wide")
    w = net.weight(features, features, scale=features**-0.5)
    steps_first, zero = net.add("Transpose", x, perm=[1, 0, 2]), net.constant(0)
    i, go, on, a, e, b, p, q, y = (net.name() for _ in range(9))
    make, info = helper.make_node, helper.make_tensor_value_info
    nodes = [make("Gather", [steps_first, i], [e]), make("Identity", [go], [on])]
    if net.chance(0.5):
        ways = [([make("MatMul", [a, w], [p]), make("Tanh", [p], [p + "t"])], p + "t"), ([make("Neg", [a], [q])], q)]
        graphs = [helper.make_graph(n, o, [], [info(o, TensorProto.FLOAT, None)]) for n, o in ways]
        nodes += [make("Mod", [i, net.constant(2)], [b + "m"]), make("Equal", [b + "m", zero], [b + "e"])]
        nodes.append(make("If", [b + "e"], [b], then_branch=graphs[0], else_branch=graphs[1]))
    else:
        names = [net.name() for _ in range(5)]
        j, more, still, s, t = names
        turn = [make("Identity", [more], [still]), make("MatMul", [s, w], [t + "p"]), make("Tanh", [t + "p"], [t])]
        ends = [info(j, TensorProto.INT64, []), info(more, TensorProto.BOOL, []), info(s, TensorProto.FLOAT, None)]
        results = [info(still, TensorProto.BOOL, []), info(t, TensorProto.FLOAT, None)]
        inner = helper.make_graph(turn, "inner", ends, results)
        nodes.append(make("Loop", [net.constant(2), "", a], [b], body=inner))
    nodes.append(make("Add", [b, e], [y]))
    ends = [info(i, TensorProto.INT64, []), info(go, TensorProto.BOOL, []), info(a, TensorProto.FLOAT, None)]
    results = [info(on, TensorProto.BOOL, []), info(y, TensorProto.FLOAT, None)]
    body = helper.make_graph(nodes, "outer", ends, results)
    return net.add("Loop", net.constant(steps), "", net.add("Gather", steps_first, zero), body=body)


@layer
def scan(net: Network, x: str) -> str:
    """A Scan over the steps of a sequence, with a cell written out."""
    x = with_axes(net, x, 3)
    _, steps, features = net.shapes[x]
    if steps > 40:
        raise Unfit("too long")
    hidden = net.size(most=33)
    t = net.add("Transpose", x, perm=[1, 0, 2])
    zero = net.add("Gather", t, net.constant(0))
    first = net.add("MatMul", zero, net.weight(features, hidden, scale=features**-0.5))
    w, u = net.weight(features, hidden, scale=features**-0.5), net.weight(hidden, hidden, scale=hidden**-0.5)
    s, e, p, q, m, z, g, out, o = (net.name() for _ in range(9))
    make, info = helper.make_node, helper.make_tensor_value_info
    nodes = [make("MatMul", [e, w], [p]), make("MatMul", [s, u], [q]), make("Add", [p, q], [m])]
    if net.chance(0.5):  # gated
        nodes += [make("Sigmoid", [m], [g]), make("Tanh", [p], [z]), make("Sub", [z, s], [z + "d"])]
        nodes += [make("Mul", [g, z + "d"], [z + "m"]), make("Add", [s, z + "m"], [out])]
    else:
        nodes.append(make(net.choose(["Tanh", "Relu", "Sigmoid"]), [m], [out]))
    nodes.append(make(net.choose(["Identity", "Tanh", "Softplus"]), [out], [o]))
    ends = [info(n, TensorProto.FLOAT, None) for n in (s, e, out, o)]
    body = helper.make_graph(nodes, "cell", ends[:2], ends[2:])
    back = int(net.chance(0.3))
    last, every = net.add(
        "Scan", first, t, outputs=2, num_scan_inputs=1, body=body,
        scan_input_directions=[back], scan_output_directions=[back],
    )  # fmt: skip
    return last if net.chance(0.4) else net.add("Transpose", every, perm=[1, 0, 2])
