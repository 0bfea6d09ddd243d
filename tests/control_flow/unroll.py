"""Write the steps of every Scan and Loop of a model out, for a known number of steps: the oracle."""

from __future__ import annotations

import itertools

import onnx
from onnx import helper

_numbers = itertools.count()


def unrolled(model: onnx.ModelProto, *steps: int) -> onnx.ModelProto:
    """`model` without loops: the k-th Loop or Scan, in order of appearance, makes `steps[k]` steps.

    The last number counts for all that follow. Only nodes are left that ONNX Runtime runs one by one.
    """
    counts = itertools.chain(steps, itertools.repeat(steps[-1]))
    flat = onnx.ModelProto()
    flat.CopyFrom(model)
    nodes = _flatten(flat.graph.node, counts)
    del flat.graph.node[:]
    flat.graph.node.extend(nodes)
    return flat


def _flatten(nodes, counts):
    out = []
    for node in nodes:
        if node.op_type in ("Scan", "Loop"):
            out += _flatten(_steps(node, next(counts)), counts)
        elif node.op_type == "If":
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            for a in copy.attribute:
                inner = _flatten(a.g.node, counts)
                del a.g.node[:]
                a.g.node.extend(inner)
            out.append(copy)
        else:
            out.append(node)
    return out


def _attr(node, name, default):
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _steps(node, count):
    body = _attr(node, "body", None)
    tag = f"u{next(_numbers)}"
    out = []

    def const(value):
        name = f"{tag}_c{next(_numbers)}"
        out.append(helper.make_node("Constant", [], [name], **value))
        return name

    loop = node.op_type == "Loop"
    lead, head = (2, 1) if loop else (0, 0)
    scans = 0 if loop else _attr(node, "num_scan_inputs", None)
    n = len(body.input) - lead - scans
    k = len(body.output) - head - n
    in_axes, in_back = (_attr(node, f"scan_input_{x}", [0] * scans) for x in ("axes", "directions"))
    out_axes, out_back = (_attr(node, f"scan_output_{x}", [0] * k) for x in ("axes", "directions"))
    state = list(node.input[lead : lead + n])
    stacks = [[] for _ in range(k)]
    for t in range(count):
        mine = f"{tag}_{t}_"
        inner = {}
        for i, x in enumerate(node.input[lead + n :]):
            at = const({"value_int": count - 1 - t if in_back[i] else t})
            inner[body.input[n + i].name] = f"{mine}in{i}"
            out.append(helper.make_node("Gather", [x, at], [f"{mine}in{i}"], axis=in_axes[i]))
        if loop:
            inner[body.input[0].name] = const({"value_int": t})
            true = onnx.helper.make_tensor("", onnx.TensorProto.BOOL, [], [True])
            inner[body.input[1].name] = const({"value": true})
        inner |= {v.name: s for v, s in zip(body.input[lead:], state)}
        for tensor in body.initializer:
            inner[tensor.name] = const({"value": tensor})
        out += _renamed(body.node, inner, mine)
        state = [inner.get(v.name, v.name) for v in body.output[head : head + n]]
        for i, v in enumerate(body.output[head + n :]):
            part = f"{mine}out{i}"
            axis = const({"value_ints": [out_axes[i]]})
            out.append(helper.make_node("Unsqueeze", [inner.get(v.name, v.name), axis], [part]))
            stacks[i].insert(0 if out_back[i] else t, part)
    for name, value in zip(node.output, state):
        if name:
            out.append(helper.make_node("Identity", [value], [name]))
    for i, (name, parts) in enumerate(zip(node.output[n:], stacks)):
        if name:
            out.append(helper.make_node("Concat", parts, [name], axis=out_axes[i]))
    return out


def _renamed(nodes, names, tag):
    """Copies of `nodes` that read through `names`, which what they define is added to."""
    out = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = ""
        copy.input[:] = [names.get(i, i) for i in node.input]
        for a in copy.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                inside = dict(names)
                for v in [*a.g.input, *a.g.initializer]:
                    inside[v.name] = tag + v.name
                inner = _renamed(a.g.node, inside, tag)
                del a.g.node[:]
                a.g.node.extend(inner)
                for v in [*a.g.input, *a.g.output]:
                    v.name = inside.setdefault(v.name, tag + v.name)
                for t in a.g.initializer:
                    t.name = inside.setdefault(t.name, tag + t.name)
        for o in node.output:
            if o:
                names[o] = tag + o
        copy.output[:] = [names.get(o, o) for o in node.output]
        out.append(copy)
    return out
