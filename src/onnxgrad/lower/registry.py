"""The registry of handwritten lowerings: operators written in others, with every weight an operand.

A lowering is a function of a builder, the node and its operands that returns the new outputs of the node (``None`` for
a missing one). Its nodes replace the node in the graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var, schemas
from onnxgrad.ir.match import normal_domain
from onnxgrad.ir.names import described
from onnxgrad.lower.function_bodies import _take_place

Lowering = Callable[[Builder, ir.Node], Sequence[Var | None]]
Writer = Callable[..., Sequence[Var | None]]
_table: dict[tuple[str, str], Lowering] = {}


def lowering(*names: str, domain: str = "", operands: type | None = None) -> Callable[[Writer], Writer]:
    """Register ``f(b, node, *operands)`` as the lowering of operators; missing operands are None.

    The parameters bear the names of the inputs. Of an operator with many of them, ``f(b, node, x)`` takes an instance
    of the dataclass `operands`, whose fields bear these names.
    """

    def register(writer: Writer) -> Writer:
        inputs = inputs_of(writer, operands)
        is_open = inputs[-1].kind is inspect.Parameter.VAR_POSITIONAL

        @functools.wraps(writer)
        def lower(b: Builder, node: ir.Node) -> Sequence[Var | None]:
            given = [None if v is None else b.var(v) for v in node.inputs]
            if len(given) > len(inputs) and not is_open:
                raise NotDifferentiable(f"it has {len(given)} operands, and takes {len(inputs)}")
            given += [None] * (len(inputs) - is_open - len(given))
            for x, formal in zip(given, inputs):
                if formal.annotation == "Var":
                    require_operand(x, formal.name)
            return writer(b, node, *given) if operands is None else writer(b, node, operands(*given))

        for name in names:
            _table[domain, name] = lower
        return writer

    return register


def inputs_of(writer: Writer, operands: type | None = None) -> list[inspect.Parameter]:
    """The parameters of a lowering that stand for inputs of the operator."""
    return list(inspect.signature(operands or writer).parameters.values())[0 if operands else 2 :]


def require_operand(x: Var | None, name: str) -> Var:
    """An operand that every node must have."""
    if x is None:
        raise NotDifferentiable(f"its input {name} is left out\n  hint: export the model again")
    return x


def lowering_for(op_type: str, domain: str = "") -> Lowering | None:
    """The lowering of an operator in this package, or None."""
    return _table.get((normal_domain(domain), op_type))


def attribute(b: Builder, node: ir.Node, name: str) -> Any:
    """The attribute `name` of a node of a standard operator: as given, else the default, else None."""
    return schemas.attribute(node, name, opset=b.infer.context.get_opset_version(node.domain))


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by its handwritten lowering. Returns the new nodes, or None without one."""
    lower = lowering_for(node.op_type, node.domain)
    return None if lower is None else replace(builder, node, lower)


def replace(
    builder: Builder, node: ir.Node, lower: Callable[[Builder, ir.Node], Sequence[Var | None] | None]
) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by the results of `lower`, which may omit unread ones. Returns the new nodes.

    Nothing is replaced where `lower` returns None.
    """
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        return None
    b = builder.nested(graph)
    taken: set[ir.Value] = set()
    results: list[ir.Value | None] = []
    with b.record() as new:
        try:
            written = lower(b, node)
        except NotDifferentiable as e:
            raise type(e)(f"{described(node)}: {e}") from e
        for r in written or ():
            if r is not None and (r.value in taken or r.value.producer() not in new):
                r = b.copy(r)
            taken.update([] if r is None else [r.value])
            results.append(None if r is None else r.value)
    graph.remove(new, safe=written is None)
    if written is None:
        return None
    graph.insert_before(node, new)
    for actual, produced in zip(node.outputs, results):
        if actual.name and (produced is not None or actual.uses()):
            _take_place(builder, actual, produced)
    graph.remove(node, safe=True)
    return new
