"""A model and its gradient, drawn side by side: what onnxgrad adds, and what it reads of the forward pass.

pip install onnxgrad[train]
python examples/draw_graph.py [picture.png]
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib.pyplot as plt
import onnx

import onnxgrad

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"
MODEL = """
    <ir_version: 10, opset_import: ["": 21]>
    classifier (float[N, 3] x, float[3, 2] W) => (float[N, 2] y) {
        h = MatMul (x, W)
        y = Tanh (h)
    }"""


def places(graph: onnx.GraphProto) -> dict[str, tuple[float, float]]:
    """The place of each input, node and output: one row below the lowest of its operands."""
    row: dict[str, int] = {i.name: 0 for i in graph.input}
    rows: dict[int, list[str]] = {0: list(row)}
    for node in graph.node:
        depth = 1 + max((row[name] for name in node.input if name in row), default=0)
        rows.setdefault(depth, []).append(node.name or node.output[0])
        row.update(dict.fromkeys(node.output, depth))
    for value in graph.output:
        rows.setdefault(row[value.name] + 1, []).append(f"{value.name} ")
    return {k: ((i + 0.5) / len(names), -float(depth)) for depth, names in rows.items() for i, k in enumerate(names)}


def draw(axes: Any, graph: onnx.GraphProto, own: set[str], title: str) -> None:
    """Draw `graph`; what `own` does not name was derived."""
    where, made = places(graph), {i.name: i.name for i in graph.input}
    for node in graph.node:
        key = node.name or node.output[0]
        for name in node.input:
            if name in made:
                arrow(axes, where[made[name]], where[key], BLUE if key in own else ORANGE)
        made.update(dict.fromkeys(node.output, key))
        box(axes, where[key], node.op_type, BLUE if key in own else ORANGE)
    for value in graph.input:
        box(axes, where[value.name], value.name, GREY)
    for value in graph.output:
        arrow(axes, where[made[value.name]], where[f"{value.name} "], GREY)
        box(axes, where[f"{value.name} "], value.name, GREY)
    axes.set(title=title, xlim=(0, 1), ylim=(min(y for _, y in where.values()) - 0.5, 0.5))
    axes.axis("off")


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """An arrow between two boxes."""
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.2, "shrinkA": 11, "shrinkB": 13}
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=1)


def box(axes: Any, where: tuple[float, float], text: str, color: str) -> None:
    """A box with a text."""
    filled = {"boxstyle": "round,pad=0.35", "fc": color if color != GREY else "white", "ec": color}
    ink = "white" if color != GREY else "black"
    axes.text(*where, text, ha="center", va="center", bbox=filled, color=ink, zorder=2)


def main(picture: str = "graph.png") -> tuple[int, int]:
    """Draw both graphs; the numbers of nodes before and after."""
    model = onnx.parser.parse_model(MODEL)
    derived = onnxgrad.vjp(model, wrt=["x", "W"])
    own = {node.output[0] for node in model.graph.node}
    for node in derived.graph.node:
        node.name = ""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 5), width_ratios=[1, 2.2])
    draw(left, model.graph, own, "model.onnx")
    draw(right, derived.graph, own, "onnxgrad.vjp(model, wrt=['x', 'W'])")
    figure.tight_layout()
    figure.savefig(picture)
    return len(model.graph.node), len(derived.graph.node)


if __name__ == "__main__":
    before, after = main(*sys.argv[1:2])
    print(f"{before} nodes, with the gradient {after}")
