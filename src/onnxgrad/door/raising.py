"""Raise every node of a model to an opset that the rules speak (18), where that can be done rightly.

Node by node, so that weights, metadata, docs and symbols of the rest are never touched and an error
can name its node: an operator whose definition did not change stays as it is, one whose form changed
goes alone through ``onnx.version_converter``. Where that converter is wrong (it forgets that the old
Resize was asymmetric, clips float64 with a float32 bound, keeps the axis of a Hardmax although it
changed its meaning, …) a fix of our own takes its place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from onnxgrad.errors import BadInput
from onnxgrad.ir.names import Names, described
from onnxgrad.ir.walk import subgraphs

LOWEST_READ, LOWEST_RULES = 7, 18
NEWEST_LOADED, NEWEST_IR_LOADED = 26, 13  # the newest opset that stock ONNX Runtime loads, and IR version

#: Operators whose newer versions only allow more types.
_SAME_FORM = frozenset({"If", "Loop", "Constant"})

#: Writes what takes a node's place and gives its outputs; None: leave it to the onnx package.
Fix = Callable[["_Site"], "list[ir.Value | None] | None"]
_FIXES: dict[str, tuple[int, Fix]] = {}


class CannotRaiseError(Exception):
    """Why one node cannot be raised."""


#: Passes of inference, each of which starts from the ranks that the last one found.
_ROUNDS = 4


def _fix(op_type: str, until: int) -> Callable[[Fix], Fix]:
    """Register a fix for nodes of `op_type` below opset `until`."""

    def register(function: Fix) -> Fix:
        _FIXES[op_type] = until, function
        return function

    return register


@functools.cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _since(op_type: str, opset: int) -> int | None:
    schema = _schema(op_type, opset)
    return None if schema is None else schema.since_version


def _changes(op_type: str, source: int, target: int) -> bool:
    since = _since(op_type, source)
    return since is None or since != _since(op_type, target)


def raised_functions(model: ir.Model, wanted: Collection[ir.OperatorIdentifier]) -> set[ir.OperatorIdentifier]:
    """Those of the `wanted` functions that mean the same at the opset that `raise_opset` will reach; raised to it.

    The others have to be inlined: what replaces a node may depend on types and attributes, which differ from call to
    call.
    """
    opset = model.graph.opset_imports.get("", LOWEST_RULES)
    target = max(LOWEST_RULES, opset)
    if not wanted or any(f.opset_imports.get("", 0) > target for f in model.functions.values()):
        return set()
    same = set()
    for name in wanted:
        function = model.functions[name]
        source = function.opset_imports.get("", opset)
        inner = [n for n in function.all_nodes() if n.domain == ""]
        if source >= LOWEST_READ and not any(
            n.op_type not in _SAME_FORM and _changes(n.op_type, source, target) for n in inner
        ):
            function.opset_imports[""] = target
            same.add(name)
    return same


def raise_opset(model: ir.Model) -> None:
    """Bring `model` to opset 18 or the newest that any of its nodes has, in place.

    A node whose ``version`` is set was written for that opset (an inlined function's), the others for
    the model's. Raises BadInput, naming the node, where one cannot be raised; the model is then spoiled.
    """
    imports = model.graph.opset_imports
    nodes = [n for g in (model.graph, *model.graph.subgraphs()) for n in g if n.domain == ""]
    opset = imports.get("", LOWEST_RULES)
    known = onnx.defs.onnx_opset_version()
    if opset > known:
        raise BadInput(
            f"the model has opset {opset}; the installed onnx package knows up to {known}\n  hint: pip install -U onnx"
        )
    if opset < LOWEST_READ:
        raise BadInput(
            f"the model has opset {opset}; models from opset {LOWEST_READ} on can be read\n"
            f"  hint: export it again with opset {LOWEST_RULES} or newer"
        )
    target = max(LOWEST_RULES, opset, *(n.version or 0 for n in nodes), 0)
    stale = [n for n in nodes if (n.version or opset) < target and _changes(n.op_type, n.version or opset, target)]
    if stale:
        _infer(model)
    names = Names.of(model)
    same: set[object] = set()  # what the converter was seen to leave alone
    for node in stale:
        source = node.version or opset
        try:
            key = source, _form(node)
            if key not in same and _raise_node(node, source, target, names):
                same.add(key)
        except CannotRaiseError as e:
            raise BadInput(
                f"cannot raise {described(node)} from opset {source} "
                f"to {target}: {e}\n  hint: export the model again with opset {LOWEST_RULES} or newer"
            ) from e
    for node in nodes:
        node.version = None
    _fill_defaults(model, target)
    imports[""] = target
    model.ir_version = max(model.ir_version or 0, 8)


def _infer(model: ir.Model) -> None:
    """Types and ranks, in place. The onnx package loses the rank at a Reshape to a shape that is computed."""
    level = logging.getLogger("onnx_ir").level
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    try:
        for _ in range(_ROUNDS):
            ShapeInferencePass(check_type=False, strict_mode=False)(model)
            found = False
            for node in model.graph:
                if node.op_type == "Reshape" and node.domain == "" and node.outputs[0].shape is None:
                    wanted = node.inputs[1].shape if len(node.inputs) > 1 and node.inputs[1] is not None else None
                    if wanted is not None and len(wanted) == 1 and isinstance(wanted[0], int):
                        node.outputs[0].shape = ir.Shape([None] * wanted[0])
                        found = True
            if not found:
                break
    finally:
        logging.getLogger("onnx_ir").setLevel(level)


def settle_opset(model: ir.Model) -> None:
    """Have `model` ask for no newer opset than runtimes load, where all of its nodes are the same there; in place.

    An operator of a newer opset is often one that is written out in older ones.
    """
    imports = model.graph.opset_imports
    opset = imports.get("", LOWEST_RULES)
    if opset <= NEWEST_LOADED or model.functions:
        return
    nodes = [n for g in (model.graph, *model.graph.subgraphs()) for n in g if n.domain == ""]
    if not any(_changes(op_type, NEWEST_LOADED, opset) for op_type in {n.op_type for n in nodes}):
        imports[""] = NEWEST_LOADED
        model.ir_version = min(model.ir_version or 0, NEWEST_IR_LOADED)


def _fill_defaults(model: ir.Model, opset: int) -> None:
    """Write out the default attributes of operators that are defined by a function body.

    The onnx package forgets them when it expands the body, and then refuses the model in a full check.
    """
    for graph in model.graphs():
        for node in graph:
            schema = _schema(node.op_type, opset) if node.domain == "" else None
            if schema is not None and schema.has_function:  # type: ignore[attr-defined]
                for name, spec in schema.attributes.items():
                    if name not in node.attributes and spec.default_value.name:
                        node.attributes[name] = ir.serde.deserialize_attribute(spec.default_value)


class _Site:
    """One node that is being replaced: its attributes, and ways to write what takes its place."""

    def __init__(self, node: ir.Node, source: int, target: int, names: Names) -> None:
        self.node, self.source, self.target, self.names = node, source, target, names
        self.new: list[ir.Node] = []

    def attr(self, name: str, default: object = None) -> object:
        given = self.node.attributes.get(name)
        return default if given is None else given.value

    def input(self, i: int) -> ir.Value | None:
        return self.node.inputs[i] if i < len(self.node.inputs) else None

    def used(self, i: int) -> bool:
        """Whether anything reads output `i`."""
        if i >= len(self.node.outputs):
            return False
        value = self.node.outputs[i]
        return bool(value.uses()) or value.is_graph_output()

    def emit(
        self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: object
    ) -> tuple[ir.Value, ...]:
        attrs = [
            v if isinstance(v, ir.Attr) else ir.convenience.convert_attribute(k, v)  # type: ignore[arg-type]
            for k, v in attributes.items()
            if v is not None
        ]
        node = ir.Node("", op_type, inputs, attrs, num_outputs=outputs, name=self.names.fresh(f"raised_{op_type}"))
        for value in node.outputs:
            value.name = self.names.fresh(f"raised_{op_type}")
        self.new.append(node)
        return tuple(node.outputs)

    def const(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        array = np.asarray(array) if dtype is None else np.asarray(array).astype(dtype.numpy())
        return self.emit("Constant", value=ir.tensor(array, dtype=dtype))[0]

    @property
    def dtype(self) -> ir.DataType:
        value = self.input(0)
        if value is None or value.dtype is None:
            raise CannotRaiseError("the type of its input is not known")
        return value.dtype

    def replace_by(self, values: list[ir.Value | None]) -> None:
        """Have `values` take the place of the node's outputs, under the same names."""
        node, graph = self.node, self.node.graph
        assert graph is not None
        old = list(node.outputs)
        for before, after in zip(old, values):
            if after is None:
                continue
            name, after.type, after.shape = before.name, before.type, before.shape
            after.metadata_props.update(before.metadata_props)
            before.replace_all_uses_with(after, replace_graph_outputs=True)
            before.name = None
            after.name = name
        graph.insert_before(node, self.new)
        graph.remove(node, safe=True)
        last = next(n for n in reversed(self.new) if n.op_type != "Constant")
        last.name = node.name or last.name
        last.doc_string = node.doc_string
        for new in self.new:
            new.metadata_props.update(node.metadata_props)


def _form(node: ir.Node) -> object:
    """All of `node` that decides what becomes of it."""
    attrs = tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))
    types = tuple(v and (v.dtype, None if v.shape is None else len(v.shape)) for v in node.inputs)
    return node.op_type, attrs, types, tuple(bool(v.name) for v in node.outputs)


def _raise_node(node: ir.Node, source: int, target: int, names: Names) -> bool:
    """Replace `node` by what it is at opset `target`; true if it is the same there."""
    if _since(node.op_type, source) is None:
        raise CannotRaiseError("the specification has no such operator")
    if node.op_type in _SAME_FORM or (node.op_type == "Scan" and source >= 9):
        return True
    if subgraphs(node) and node.op_type not in _FIXES:
        raise CannotRaiseError("its form has changed")
    until, fix = _FIXES.get(node.op_type, (0, None))
    if fix is not None and source < until:
        site = _Site(node, source, target, names)
        values = fix(site)
        if values is not None:
            site.replace_by(values)
            return False
    return _convert(node, source, target, names)


# --- by the onnx package ---------------------------------------------------------------------------


def _convert(node: ir.Node, source: int, target: int, names: Names) -> bool:
    """Send `node` alone through the onnx package's converter; put what comes back in its place."""
    values = {v.name: v for v in node.inputs if v is not None}
    inputs, constants = [], []
    for name, value in values.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes <= 1024 and not isinstance(tensor, ir.ExternalTensor):
            constants.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
        else:
            inputs.append(ir.to_proto(value))
    outputs = [ir.to_proto(v) for v in node.outputs if v.name]
    graph = onnx.helper.make_graph([ir.to_proto(node)], "node", inputs, outputs, constants)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", source)], ir_version=8)
    try:
        converted = onnx.version_converter.convert_version(proto, target)
    except Exception as e:
        reason = str(e).splitlines()[0].rsplit("failed: ", 1)[-1]
        raise CannotRaiseError(f"the onnx version converter says: {reason}") from e
    after = converted.graph.node
    if len(after) == 1 and after[0].SerializeToString() == _normal(graph.node[0]).SerializeToString():
        return True
    site = _Site(node, source, target, names)
    known: dict[str, ir.Value | None] = {"": None, **values}  # type: ignore[dict-item]
    known |= {
        t.name: site.const(onnx.numpy_helper.to_array(t)) for t in converted.graph.initializer if t.name not in values
    }
    for made in after:
        attrs = {a.name: ir.from_proto(a) for a in made.attribute}
        results = site.emit(made.op_type, *[known[name] for name in made.input], outputs=len(made.output), **attrs)
        known.update((name, value) for name, value in zip(made.output, results))
        for name, value in zip(made.output, results):
            if not name:
                value.name = ""
    site.replace_by([known.get(v.name or "") for v in node.outputs])
    return False


def _normal(node: onnx.NodeProto) -> onnx.NodeProto:
    """`node` as the converter writes it when it changes nothing."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("metadata_props")
    for field in ("domain", "doc_string", "name"):
        if not getattr(copy, field):
            copy.ClearField(field)
    return copy


# --- where that is wrong ---------------------------------------------------------------------------


@_fix("Clip", until=11)
def _clip(site: _Site) -> list[ir.Value | None]:
    """Bounds become inputs, in the dtype of x; one that is not given stays away."""
    low, high = (site.attr(k) for k in ("min", "max"))
    bounds = [None if b is None else site.const(np.float32(b), site.dtype) for b in (low, high)]  # type: ignore[arg-type]
    return [site.emit("Clip", site.input(0), *bounds)[0]]


@_fix("Pad", until=11)
def _pad(site: _Site) -> list[ir.Value | None]:
    """Margins and value become inputs, the value in the dtype of x."""
    pads = site.const(np.array(site.attr("pads"), np.int64))
    value = site.const(site.attr("value", 0.0), site.dtype)
    return [site.emit("Pad", site.input(0), pads, value, mode=site.attr("mode"))[0]]


@_fix("Softmax", until=13)
@_fix("LogSoftmax", until=13)
@_fix("Hardmax", until=13)
def _normalized(site: _Site) -> list[ir.Value | None]:
    """It took all axes from `axis` on together: where that is the last one alone, it still does."""
    op, x, axis = site.node.op_type, site.input(0), site.attr("axis", 1)
    assert x is not None
    if axis == -1 or (x.shape is not None and axis == len(x.shape) - 1):
        return [site.emit(op, x, axis=-1)[0]]
    flat = site.emit("Flatten", x, axis=axis)[0]
    return [site.emit("Reshape", site.emit(op, flat, axis=-1)[0], site.emit("Shape", x)[0])[0]]


@_fix("Dropout", until=12)
def _dropout(site: _Site) -> list[ir.Value | None]:
    """It did nothing but in training, which was not said by the model."""
    if site.used(1):
        raise CannotRaiseError("its mask is read, and what a mask is outside of training has changed")
    return [
        site.emit("Dropout", site.input(0), site.const(site.attr("ratio", 0.5), ir.DataType.FLOAT))[0],
        None,
    ]


@_fix("BatchNormalization", until=14)
def _batch_normalization(site: _Site) -> list[ir.Value | None]:
    """More than one output used to mean training; ``spatial`` is gone."""
    if site.source < 9 and site.attr("spatial", 1) != 1:
        return _unshared_normalization(site)
    if site.used(3) or site.used(4):
        raise CannotRaiseError("the saved statistics are read, which it no longer gives")
    training = len([v for v in site.node.outputs if v.name]) > 1
    results = site.emit(
        "BatchNormalization",
        *site.node.inputs,
        outputs=3 if training else 1,
        epsilon=site.attr("epsilon"),
        momentum=site.attr("momentum"),
        training_mode=1 if training else None,
    )
    return [*results]


def _unshared_normalization(site: _Site) -> list[ir.Value | None]:
    """With ``spatial=0`` each element of an example had its own statistics: y = (x - μ)/√(v + ε)·s + b, broadcast."""
    if len([v for v in site.node.outputs if v.name]) > 1:
        raise CannotRaiseError("spatial=0 has no newer form in training")
    x, scale, bias, mean, variance = site.node.inputs[:5]
    (shifted,) = site.emit("Add", variance, site.const(site.attr("epsilon", 1e-5), site.dtype))
    (deviation,) = site.emit("Sub", x, mean)
    (unit,) = site.emit("Div", deviation, *site.emit("Sqrt", shifted))
    return [*site.emit("Add", *site.emit("Mul", unit, scale), bias)]


@_fix("Upsample", until=10)
def _upsample(site: _Site) -> list[ir.Value | None]:
    """It was what is now an asymmetric Resize, rounding down."""
    scales = site.input(1)
    if scales is None:
        scales = site.const(np.array(site.attr("scales"), np.float32))
    return _asymmetric(site, scales)


@_fix("Resize", until=13)
def _resize(site: _Site) -> list[ir.Value | None] | None:
    """It was what is now an asymmetric Resize; the nearest was rounded down in enlarging, up in shrinking.

    How to round was never written down; this is what ONNX Runtime does with such models.
    """
    if site.source >= 11:
        if site.attr("coordinate_transformation_mode") == "tf_half_pixel_for_nn":
            return _half_pixel(site)
        return None
    scales = site.input(1)
    assert scales is not None
    if site.attr("mode", "nearest") != "nearest":
        return _asymmetric(site, scales)
    known = ir.convenience.get_const_tensor(scales)
    if known is None or scales.is_graph_input():
        raise CannotRaiseError("its scales are not constant, and how it rounds depends on them")
    shrinks, grows = (known.numpy() < 1).any(), (known.numpy() > 1).any()
    if shrinks and grows:
        raise CannotRaiseError("it enlarges one axis and shrinks another, for which it rounds in two ways")
    return _asymmetric(site, scales, "ceil" if shrinks else "floor")


def _half_pixel(site: _Site) -> list[ir.Value | None]:
    """Places half a pixel above those of half_pixel: rounded down they are what is now the nearest, up at a half."""
    if site.attr("mode", "nearest") != "nearest" or site.attr("nearest_mode", "round_prefer_floor") != "floor":
        raise CannotRaiseError("tf_half_pixel_for_nn has a newer form only where the nearest is rounded down")
    x, _, *sizes = site.node.inputs
    half = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return [*site.emit("Resize", x, None, *sizes, outputs=1, mode="nearest", **half)]


def _asymmetric(site: _Site, scales: ir.Value, rounding: str = "floor") -> list[ir.Value | None]:
    mode = site.attr("mode", "nearest")
    return [
        site.emit(
            "Resize",
            site.input(0),
            None,
            scales,
            mode=mode,
            coordinate_transformation_mode="asymmetric",
            nearest_mode=rounding if mode == "nearest" else None,
        )[0]
    ]


@_fix("Scan", until=9)
def _scan(site: _Site) -> list[ir.Value | None]:
    """It ran over a batch of sequences: a Scan over the batch, whose body is a Scan over one of them.

    Where an example has a length of its own, only so many of its steps are taken, and what they give is filled up
    with zeros.
    """
    count = int(site.attr("num_scan_inputs"))  # type: ignore[call-overload]
    body = site.node.attributes["body"].as_graph()
    lengths, operands = site.input(0), list(site.node.inputs[1:])
    states = len(operands) - count
    inner: list[ir.Node] = []

    def formal(like: ir.Value | None) -> ir.Value:
        """One example of `like`."""
        assert like is not None
        shape = None if like.shape is None else ir.Shape(like.shape[1:])
        return ir.Value(name=site.names.fresh("raised_Scan_example"), type=like.type, shape=shape)

    def emit(op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: object) -> list[ir.Value]:
        site.emit(op_type, *inputs, outputs=outputs, **attributes)
        inner.append(site.new.pop())
        return list(inner[-1].outputs)

    def vector(*numbers: int) -> ir.Value:
        return emit("Constant", value=ir.tensor(np.array(numbers, np.int64)))[0]

    formals = [formal(v) for v in operands]
    given = list(formals)
    length = None if lengths is None else formal(lengths)
    if length is not None:
        (taken,) = emit("Reshape", length, vector(1))
        given[states:] = [emit("Slice", x, vector(0), taken, vector(0))[0] for x in formals[states:]]
    del site.node.attributes["body"]
    held = {
        "body": ir.AttrGraph("body", body),
        "num_scan_inputs": count,
        "scan_input_directions": site.attr("directions"),
    }
    results = emit("Scan", *given, outputs=len(site.node.outputs), **held)
    if length is not None:
        rest = emit("Sub", emit("Shape", formals[states], start=0, end=1)[0], taken)[0]
        for k, step in enumerate(body.outputs[states:], states):
            if step.shape is None:
                raise CannotRaiseError("the rank of what its steps give is not known, and it has lengths")
            ranks = vector(*[0] * (len(step.shape) + 1)), vector(*[0] * len(step.shape))
            (pads,) = emit("Concat", ranks[0], rest, ranks[1], axis=0)
            (results[k],) = emit("Pad", results[k], pads)
    graph = ir.Graph([*([length] if length is not None else []), *formals], results, nodes=inner, name="examples")
    every = [*([lengths] if lengths is not None else []), *operands]
    return [
        *site.emit("Scan", *every, outputs=len(results), body=ir.AttrGraph("body", graph), num_scan_inputs=len(every))
    ]
