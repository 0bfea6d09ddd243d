"""The part of a network that behaves differently in training, copied in training mode.

Exported models have BatchNormalization and Dropout in inference mode, and stay unchanged. Nodes that depend on these
are copied into the algorithm, where BatchNormalization normalizes with the statistics of the batch and moves its
running statistics, ``running = momentum·running + (1 - momentum)·batch`` with the population variance, as ONNX defines
it; and Dropout drops. The copies read the same initializers.

Many exporters omit Dropout, so it can be inserted again behind nodes by name or type; and a BatchNormalization can be
kept in inference mode (frozen). A BatchNormalization that an exporter has folded into the weights of the preceding
layer cannot be restored: that layer trains with the folded weights.

A file that was exported in training mode is put in inference mode first, so it trains, and is saved, as any other.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import ancestors, reads, subgraphs
from onnxgrad.ir.match import is_standard
from onnxgrad.ir.names import described
from onnxgrad.ir.subgraphs import rewire
from onnxgrad.training.graph.batchnorm import trains

Values = dict[ir.Value, ir.Value]


@dataclass(frozen=True)
class Mode:
    """The differences between training and inference mode.

    Attributes:
        on: False: the network trains in inference mode.
        frozen: globs over the names of BatchNormalization nodes that stay in inference mode.
        dropout: the share that is dropped behind nodes: by type, or by a glob over their names or outputs.
    """

    on: bool = True
    frozen: Sequence[str] = ()
    dropout: Mapping[str, float] = field(default_factory=dict)

    def check(self, nodes: Sequence[ir.Node]) -> None:
        """Raise BadInput for a pattern that no node matches, or a share that is none."""
        norms = [n for n in nodes if _standard(n, "BatchNormalization")]
        for pattern in self.frozen:
            if not norms:
                raise BadInput(
                    "there is no BatchNormalization to freeze: the model has none, or its exporter has folded them "
                    "into the weights before them"
                )
            if not any(_matches_name(n, pattern) for n in norms):
                raise BadInput(f"no BatchNormalization matches {pattern!r}; there are: {_names(norms)}")
        for pattern, share in self.dropout.items():
            if isinstance(share, (str, bool)) or not 0 <= share < 1:
                raise BadInput(f"dropout behind {pattern!r} must be in [0, 1), not {share}")
            if not any(self._drops_after(n, pattern) for n in nodes):
                types = sorted({n.op_type for n in nodes if n.outputs and n.outputs[0].dtype in FLOATS})
                raise BadInput(
                    f"no node with a float output is called {pattern!r} or of that type; types: {', '.join(types)}"
                )

    def switches(self, node: ir.Node) -> bool:
        """True if `node` runs in inference mode and has to be switched to training mode."""
        return _off(node) and not any(
            _matches_name(node, p) for p in self.frozen if _standard(node, "BatchNormalization")
        )

    def dropped(self, node: ir.Node) -> float:
        """The share that is dropped of the output of `node`."""
        return next((share for p, share in self.dropout.items() if share and self._drops_after(node, p)), 0.0)

    @staticmethod
    def _drops_after(node: ir.Node, pattern: str) -> bool:
        if not node.outputs or node.outputs[0].dtype not in FLOATS or node.op_type == "Constant":
            return False
        return node.op_type == pattern or _matches_name(node, pattern)


def _matches_name(node: ir.Node, pattern: str) -> bool:
    names = [node.name, *(v.name for v in node.outputs[:1])]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names if name)


def _names(nodes: Sequence[ir.Node]) -> str:
    shown = [n.name or n.outputs[0].name or "" for n in nodes[:6]]
    return ", ".join(shown) + (", …" if len(nodes) > len(shown) else "")


def _standard(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and is_standard(node)


def _off(node: ir.Node) -> bool:
    """True if `node` is a BatchNormalization or Dropout in inference mode."""
    if _standard(node, "BatchNormalization"):
        return not trains(node)
    if _standard(node, "Dropout"):
        given = node.inputs[2] if len(node.inputs) > 2 else None
        if given is None:
            return True
        known = ir.convenience.get_const_tensor(given)
        return known is not None and not known.numpy().any()
    return False


def exported_in_training(node: ir.Node) -> bool:
    """True if `node` is a BatchNormalization or Dropout in training mode whose other outputs nothing reads.

    Running statistics that are computed, or read, belong to a graph that moves them itself: False.
    """
    if not (_standard(node, "BatchNormalization") or _standard(node, "Dropout")) or _off(node):
        return False
    others = node.outputs[1:]
    if any(v.uses() or v.is_graph_output() for v in others):
        return False
    if node.op_type == "BatchNormalization":
        return all(v is not None and v.is_initializer() and not v.is_graph_input() for v in node.inputs[3:5])
    mode = node.inputs[2]
    return mode is not None and ir.convenience.get_const_tensor(mode) is not None


def to_inference(nodes: Iterable[ir.Node]) -> None:
    """Put every BatchNormalization and Dropout of `nodes` in inference mode, in place.

    What reads new running statistics reads those that were.
    """
    for node in nodes:
        if _standard(node, "BatchNormalization"):
            node.attributes.pop("training_mode", None)
            for value, running in zip(node.outputs[1:], node.inputs[3:5]):
                if running is not None:
                    value.replace_all_uses_with(running, replace_graph_outputs=True)
            node.resize_outputs(1)
        elif _standard(node, "Dropout") and len(node.inputs) > 2:
            mode, graph = node.inputs[2], node.graph
            node.resize_inputs(2)
            if mode is not None and graph is not None and mode.is_initializer() and not mode.uses():
                graph.initializers.pop(mode.name or "", None)


def statistics(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """The running statistics of every BatchNormalization of `nodes`."""
    return {v for n in nodes if _standard(n, "BatchNormalization") for v in list(n.inputs)[3:5] if v is not None}


def switch(builder: Builder, nodes: Sequence[ir.Node], ys: Sequence[ir.Value], mode: Mode) -> tuple[Values, Values]:
    """Append a copy, in training mode, of the nodes before `ys` that training changes.

    Returns:
        The copy of each value that has one, and the next value of each running statistic.
    """
    copies: Values = {}
    updates: Values = {}
    for node in ancestors(nodes, ys):
        for inner in (n for g in subgraphs(node) for n in g.all_nodes() if mode.switches(n)):
            raise BadInput(
                f"{described(inner)} is inside a branch or loop body of {described(node)}, "
                f"where training mode is not supported; attach with train_mode=False"
            )
        if mode.switches(node) or any(v in copies for v in reads(node)):
            copies |= _copy_node(builder, node, copies, updates, mode.switches(node))
        share = mode.dropped(node)
        if share:
            behind = node.outputs[0]
            kept = Var(builder, copies.get(behind, behind))
            ratio = builder.const(np.float32(share))
            dropped = builder.Dropout(kept, ratio, builder.const(np.array(True)))
            dropped.value.name = builder.names.exactly(identifier(f"dropped_{behind.name}"))
            copies[behind] = dropped.value
    return copies, updates


def _copy_node(builder: Builder, node: ir.Node, copies: Values, updates: Values, switched: bool) -> Values:
    """Append a copy of `node` that reads copies, in training mode if it is `switched`. Returns its outputs."""
    inputs = [None if v is None else copies.get(v, v) for v in node.inputs]
    attributes = {a.name: a for a in node.attributes.values()}
    count = len(node.outputs)
    statistic: list[ir.Value] = []
    if switched and _standard(node, "BatchNormalization"):
        statistic = _running(node)
        inputs[3:5] = [updates.get(v, v) for v in statistic]
        attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        count = 3
    elif switched:
        inputs += [None] * (3 - len(inputs))
        inputs[2] = builder.const(np.array(True)).value
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        [rewire(a, copies) for a in attributes.values()],
        num_outputs=count,
        name=builder.names.exactly(identifier(f"train_{node.name or node.op_type}")),
    )
    made: Values = {}
    for old, new in zip(node.outputs, copy.outputs):
        new.name = builder.names.exactly(identifier(f"train_{old.name}")) if old.name else ""
        made[old] = new
    for running, new in zip(statistic, copy.outputs[1:]):
        new.name = builder.names.fresh(identifier(f"{running.name}_next"))
        updates[running] = new
    builder.append(copy)
    return made


def _running(node: ir.Node) -> list[ir.Value]:
    found = [v for v in list(node.inputs)[3:5] if v is not None]
    for v in found:
        if not v.is_initializer() or v.is_graph_input():
            raise BadInput(
                f"{described(node)}: its running statistic {v.name!r} is no initializer, "
                "so training cannot update it; attach with train_mode=False"
            )
    return found
