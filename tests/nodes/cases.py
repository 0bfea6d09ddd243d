"""The node tests of the onnx package that have a float input and a float output, each in the forms a model may have it.

A form says what the model knows: every operand is an input (``fed``), those that are no floats are constants
(``held``), as they are in nearly every real model, or the sizes of the floats are symbols besides (``symbolic``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.onnx_cases import NODE_CASES

FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
NEWEST = 26  # the newest opset that ONNX Runtime loads
FORMS = ("fed", "held", "symbolic")
#: Operands whose derivative is zero by convention (docs/conventions.md), whatever differences say.
BY_CONVENTION = {("Dropout", 1)}


@dataclass(frozen=True)
class NodeTest:
    """One node test: a model, its operands by name, and what it gives for them."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Any]
    expected: dict[str, Any]

    @property
    def wrt(self) -> list[str]:
        """The float inputs."""
        left = {
            n.input[i] for n in self.model.graph.node for op, i in BY_CONVENTION if n.op_type == op and len(n.input) > i
        }
        found = [i for i in self.model.graph.input if i.type.tensor_type.elem_type in FLOATS]
        return [i.name for i in found if i.name not in left]

    @property
    def of(self) -> list[str]:
        """The float outputs."""
        return [o.name for o in self.model.graph.output if o.type.tensor_type.elem_type in FLOATS]

    @property
    def node(self) -> onnx.NodeProto | None:
        """The node under test, if the model is nothing else."""
        nodes = self.model.graph.node
        return nodes[0] if len(nodes) == 1 else None

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a representative: the operators with their attributes, operands and outputs."""
        return tuple(
            (n.domain, n.op_type, tuple(sorted(a.name for a in n.attribute)), tuple(map(bool, n.input)), len(n.output))
            for n in self.model.graph.node
        )


def _opset(model: onnx.ModelProto) -> None:
    """Bring a model that is newer than ONNX Runtime knows to an opset that it knows, where it is valid there."""
    if any(n.op_type == "Mod" and not any(a.name == "fmod" and a.i for a in n.attribute) for n in model.graph.node):
        return  # of floats only opset 28 has it, which the checker does not check
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > NEWEST:
            newer, entry.version = entry.version, NEWEST
            try:
                onnx.checker.check_model(model, full_check=True)
            except Exception:  # the checker has several kinds of error, some of them of C++
                entry.version = newer
    model.ir_version = min(model.ir_version, 13)


def _array(x: Any) -> Any:
    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else x


@functools.cache
def node_tests() -> tuple[NodeTest, ...]:
    """All of them, in the order of the onnx package."""
    tests = []
    for case in NODE_CASES:
        if not case.data_sets:
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        inputs, outputs = ([_array(x) for x in side] for side in case.data_sets[0])
        feeds = dict(zip((i.name for i in model.graph.input), inputs))
        test = NodeTest(case.name, model, feeds, dict(zip((o.name for o in model.graph.output), outputs)))
        if test.wrt and test.of:
            _opset(model)
            tests.append(test)
    return tuple(tests)


def representatives() -> list[NodeTest]:
    """The first node test of every set of operators, attributes and operands; bodies that were written out are not."""
    first: dict[tuple[Any, ...], NodeTest] = {}
    for test in node_tests():
        if "_expanded" not in test.name:
            first.setdefault(test.key, test)
    return list(first.values())


def forms(test: NodeTest) -> list[str]:
    """The forms in which `test` is a different model."""
    return [f for f in FORMS if f != "held" or in_form(test.model, test.feeds, f) != test.model]


def in_form(model: onnx.ModelProto, feeds: dict[str, Any], form: str) -> onnx.ModelProto:
    """`model` with what its form says about the operands."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if form == "fed":
        return copy
    kept = []
    for value in copy.graph.input:
        array = feeds.get(value.name)
        kind = value.type.tensor_type.elem_type
        if kind in FLOATS and form == "symbolic":
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"{value.name}_{axis}"
        if kind and kind not in FLOATS and isinstance(array, np.ndarray) and array.dtype.kind in "iub":
            copy.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            kept.append(value)
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    if form == "symbolic":
        for value in copy.graph.output:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"{value.name}_{axis}"
    return copy


# --- in float64 ------------------------------------------------------------------------------------


def _widen_type(held: onnx.TypeProto) -> None:
    which = held.WhichOneof("value")
    if which == "tensor_type" and held.tensor_type.elem_type in FLOATS:
        held.tensor_type.elem_type = TensorProto.DOUBLE
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(held, which).elem_type)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in FLOATS:
        array = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


#: Operators that compute in float32 unless they are told otherwise.
_STASHED = ("LayerNormalization", "GroupNormalization", "RMSNormalization")


def _widen_nodes(nodes: Sequence[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.op_type in _STASHED and not any(a.name == "stash_type" for a in node.attribute):
            node.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))
        for a in node.attribute:
            if node.op_type == "Constant" and a.name in ("value_float", "value_floats"):
                array = np.array(a.f if a.name == "value_float" else list(a.floats), np.float64)
                a.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(array)))
            elif a.name in ("to", "dtype", "stash_type", "softmax_precision") and a.i in FLOATS:
                a.i = TensorProto.DOUBLE
            if a.HasField("t"):
                _widen_tensor(a.t)
            for graph in [*([a.g] if a.HasField("g") else []), *a.graphs]:
                _widen_graph(graph, frozenset())


def _widen_graph(graph: onnx.GraphProto, narrow: frozenset[str]) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.name not in narrow:
            _widen_type(value.type)
    for tensor in graph.initializer:
        if tensor.name not in narrow:
            _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _narrow(model: onnx.ModelProto) -> Iterator[str]:
    """Operands for which the specification does not take float64."""
    opset = {o.domain: o.version for o in model.opset_import}
    for node in model.graph.node:
        try:
            schema = onnx.defs.get_schema(node.op_type, opset.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            continue
        for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for i, name in enumerate(names):
                types = formals[min(i, len(formals) - 1)].types
                if not any("tensor(double)" in t for t in types):
                    yield name


def widened(model: onnx.ModelProto, *, anyway: bool = False) -> onnx.ModelProto | None:
    """`model` in float64; None where an operator does not allow it, unless that is to be so `anyway`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _widen_graph(copy.graph, frozenset() if anyway else frozenset(_narrow(model)))
    for function in copy.functions:
        _widen_nodes(function.node)
    if anyway:
        return copy
    try:
        onnx.checker.check_model(copy, full_check=True)
    except Exception:  # see _opset
        return None
    return copy
