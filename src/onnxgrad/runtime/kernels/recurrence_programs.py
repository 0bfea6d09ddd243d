"""Bodies of Scans as programs for the kernel of ``source/recurrence.c``.

A body fits if each row of its states, slices and results depends on that row alone: products with matrices from
outside, elementwise operators, and columns that are split, sliced and joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.ir.match import constant, is_op, single_constant
from onnxgrad.runtime.kernels.elementwise_steps import Dims, dims, is_known, is_written, write_steps
from onnxgrad.runtime.kernels.programs import CODES, Entry, Spot
from onnxgrad.runtime.kernels.recurrence_layout import RowLayout
from onnxgrad.runtime.kernels.steps import Steps, Unfit

_MOST_OPERANDS, _MOST_RESULTS = 40, 32


@dataclass(frozen=True)
class RowProgram:
    """The arguments of a call of the kernel.

    Attributes:
        operands: by place, None for one that it does not read.
        results: by place, None for one that is not read.
        attributes: the program.
    """

    operands: Sequence[ir.Value | None]
    results: Sequence[ir.Value | None]
    attributes: Mapping[str, Sequence[int]]


def program_of(scan: ir.Node) -> RowProgram:
    """Compile the program of `scan`.

    Raises:
        Unfit: the body does anything else, or too much.
    """
    body = scan.attributes["body"].as_graph()
    slices = scan.attributes["num_scan_inputs"].as_int()
    count = len(body.inputs) - slices
    ways = {}
    for end, number in (("input", slices), ("output", len(body.outputs) - count)):
        given = scan.attributes.get(f"scan_{end}_axes")
        if given is not None and any(given.as_ints()):
            raise Unfit
        ways[end] = list(scan.attributes.get_ints(f"scan_{end}_directions") or [0] * number)
    first = dims(body.inputs[0])
    if first is None or len(first) != 2:
        raise Unfit
    b = _Body(scan, count, first[0], ways["input"][0] if len(set(ways["input"])) == 1 else None)
    for k, (inner, outer) in enumerate(zip(body.inputs, scan.inputs)):
        if outer is None or inner.dtype != ir.DataType.FLOAT:
            raise Unfit
        width = b.width_of(inner)
        if k < count:
            b.known[inner] = b.add_given("STATE", k, width)
        else:
            b.known[inner] = b.scanned(outer, width, ways["input"][k - count])
    for node in body:
        b.add(node)
    if any(v.dtype != ir.DataType.FLOAT for v in body.outputs):
        raise Unfit
    states = [(b.read(v), b.width_of(v)) for v in body.outputs[:count]]
    read = [v.name and (v.is_graph_output() or bool(v.uses())) for v in scan.outputs]
    results = [
        (k, b.read(v), b.width_of(v), ways["output"][k - count])
        for k, v in enumerate(body.outputs)
        if k >= count and read[k]
    ]
    if b.waiting:
        raise Unfit

    def clock() -> Entry:
        return "SCANNED", b.operand(b.outer[count]), b.width_of(body.inputs[count]), 0

    program = RowLayout(b.made, b.widths, results, states, clock).program()
    used = {place for kind, place, *_ in program.entries if kind not in ("REGISTER", "CONSTANT", "RESULT")}
    operands = [v if k in used else None for k, v in enumerate((*scan.inputs[:count], *b.operands))]
    if len(operands) > _MOST_OPERANDS or len(scan.outputs) > _MOST_RESULTS:
        raise Unfit
    return RowProgram(operands, [v if r else None for v, r in zip(scan.outputs, read)], program.attributes())


class _Body(Steps):
    """The steps of a body. Each place has a width, which is 0 for a constant: one number for any column."""

    def __init__(self, scan: ir.Node, states: int, rows: int | str, way: int | None) -> None:
        super().__init__()
        self.scan, self.states, self.rows, self.way = scan, states, rows, way
        self.formals = scan.attributes["body"].as_graph().inputs
        self.outer = [v for v in scan.inputs if v is not None]
        self.widths: list[int] = []
        self.operands: dict[ir.Value, int] = {}  #: after those that are the first values of the states
        self.waiting: dict[ir.Value, tuple[int, Spot]] = {}  #: products to which something is added: rows, matrix
        self.sinking: set[ir.Node] = set()  #: operators before the Scan that its steps take over

    # --- steps ------------------------------------------------------------------------------------

    def __call__(self, code: str, *places: int) -> int:
        if code == "CONSTANT":
            return self.made_of(code, 0, *places)
        width = max(self.widths[p] for p in places)
        if code not in CODES or not width:
            raise Unfit
        return self.made_of(code, width, *(self.spread(p, width) for p in places))

    def made_of(self, code: str, width: int, *about: Any) -> int:
        """A step whose results have `width` columns."""
        place = self.once(code, about, width)
        if place == len(self.widths):
            self.widths.append(width)
        return place

    def spread(self, place: int, width: int) -> int:
        """`place` with as many columns as `width`."""
        if self.widths[place] in (0, width):
            return place
        if self.widths[place] != 1:
            raise Unfit
        return self.made_of("SPREAD", width, place)

    def row(self, place: int, width: int) -> int:
        """`place` with as many columns as `width`, also where it is a constant."""
        return self.spread(place, width) if self.widths[place] else self.made_of("SPREAD", width, place)

    def add_given(self, kind: str, place: int, width: int, way: int = 0) -> int:
        """A value that is there before the step."""
        return self.made_of("GIVEN", width, (kind, place, width, way))

    # --- values -----------------------------------------------------------------------------------

    def width_of(self, value: ir.Value) -> int:
        """The number of columns of a value of the body, whose rows are those of the states."""
        shape = dims(value)
        if shape is None or len(shape) != 2 or shape[0] != self.rows or not isinstance(shape[1], int) or not shape[1]:
            raise Unfit
        return shape[1]

    def operand(self, value: ir.Value) -> int:
        """The number of an operand."""
        if value.dtype != ir.DataType.FLOAT:
            raise Unfit
        return self.operands.setdefault(value, self.states + len(self.operands))

    def read(self, value: ir.Value | None, beside: Collection[ir.Value | None] = ()) -> int:
        del beside  # ranks are seen to where widths are
        if value is None:
            raise Unfit
        if value in self.known:
            return self.known[value]
        number = single_constant(value)
        if number is not None and number.ndim <= 2:
            flat = number.reshape(())
            if value.dtype == ir.DataType.BOOL:
                return self.bits(-int(flat))
            if value.dtype == ir.DataType.FLOAT:
                return self.float(float(flat))
            raise Unfit
        self.known[value] = self.captured(value)
        return self.known[value]

    def captured(self, value: ir.Value) -> int:
        """Rows that are the same at each step, or one row for all."""
        shape = dims(value)
        if shape is None or not self.is_outside(value):
            raise Unfit
        width = shape[-1] if shape else 1
        if not isinstance(width, int) or not width:
            raise Unfit
        if all(d == 1 for d in shape[:-1]) and len(shape) <= 2:
            return self.add_given("SHARED", self.operand(value), width)
        if len(shape) == 2 and shape[0] == self.rows:
            return self.add_given("FIXED", self.operand(value), width)
        raise Unfit

    def is_outside(self, value: ir.Value) -> bool:
        """True if `value` is there before the first step."""
        body, maker = self.scan.attributes["body"].as_graph(), value.producer()
        inside = maker is not None and maker.graph is body
        return not inside and value not in self.formals and value not in body.initializers.values()

    def scanned(self, outer: ir.Value, width: int, way: int) -> int:
        """The slices of `outer`, or of its operands, if no other node reads it."""
        if outer in self.known:
            return self.known[outer]
        node = self.sliceable_producer(outer)
        if node is not None:
            self.sinking.add(node)
            for v in node.inputs:
                shape = None if v is None else dims(v)
                if v is not None and shape is not None and len(shape) == 3 and single_constant(v) is None:
                    if not isinstance(shape[2], int):
                        raise Unfit
                    self.scanned(v, shape[2], way)
            write_steps(self, node)
            return self.known[outer]
        place = self.add_given("SCANNED", self.operand(outer), width, way)
        if self.way is not None:
            self.known[outer] = place
        return place

    def sliceable_producer(self, outer: ir.Value) -> ir.Node | None:
        """The producer of `outer`, if it can be computed slice by slice."""
        node, shape = outer.producer(), dims(outer)
        if self.way is None or node is None or node.graph is not self.scan.graph or outer.is_graph_output():
            return None
        if shape is None or len(shape) != 3 or not is_known(node) or not is_written(node):
            return None
        if any(user is not self.scan and user not in self.sinking for user in outer.consumers()):
            return None
        return node if all(self._goes_along(v, shape) for v in node.inputs) else None

    def _goes_along(self, value: ir.Value | None, shape: Dims) -> bool:
        """True if a step can read its slice of an operand of this shape."""
        own = None if value is None else dims(value)
        if own is None or value is None:
            return False
        if single_constant(value) is not None:
            return len(own) <= 2
        if value.dtype != ir.DataType.FLOAT or (own and own[-1] not in (1, shape[2])):
            return False
        if len(own) == 3:
            return own[:2] == shape[:2]
        return all(d == 1 for d in own[:-1]) or (len(own) == 2 and own[0] == shape[1])

    # --- operators --------------------------------------------------------------------------------

    def add(self, node: ir.Node) -> None:
        """The steps of a node of the body."""
        if node.op_type == "Shape" or all(constant(v) is not None for v in node.outputs):
            return  # nothing that a step computes with
        if is_op(node, ("MatMul", "Gemm")):
            self.product(node)
        elif is_op(node, ("Split", "Slice")):
            self.view(node)
        elif is_op(node, "Concat"):
            self.join(node)
        elif is_op(node, "Expand"):
            self.known[node.outputs[0]] = self.spread(self.read(node.inputs[0]), self.width_of(node.outputs[0]))
        elif not self.added(node):
            self.width_of(node.outputs[0])
            write_steps(self, node)

    def product(self, node: ir.Node) -> None:
        """x·M, with a matrix that is there before the first step."""
        left, right, *more = node.inputs
        gemm = node.op_type == "Gemm"
        given = node.attributes
        if gemm and (given.get_int("transA") or {given.get_float("alpha", 1.0), given.get_float("beta", 1.0)} != {1.0}):
            raise Unfit
        turned = int(bool(gemm and given.get_int("transB")))
        maker = None if right is None else right.producer()
        if maker is not None and maker.op_type == "Transpose" and maker.attributes.get_ints("perm") == (1, 0):
            right, turned = maker.inputs[0], 1 - turned
        shape = None if right is None else dims(right)
        if left is None or right is None or shape is None or len(shape) != 2 or not self.is_outside(right):
            raise Unfit
        depth, columns = shape[::-1] if turned else shape
        rows, width = self.read(left), self.width_of(node.outputs[0])
        if columns != width or depth != self.width_of(left) or self.widths[rows] != depth:
            raise Unfit
        matrix = ("MATRIX", self.operand(right), width, turned), int(depth)
        out = node.outputs[0]
        users = [use.node for use in out.uses()]
        if more and more[0] is not None:
            self.known[out] = self.made_of("PRODUCT", width, rows, self.row(self.read(more[0]), width), matrix)
        elif len(users) == 1 and users[0].op_type == "Add" and not out.is_graph_output() and not users[0].domain:
            self.waiting[out] = rows, matrix
        else:
            self.known[out] = self.made_of("PRODUCT", width, rows, -1, matrix)

    def added(self, node: ir.Node) -> bool:
        """True if `node` adds something to a product that waited for it; this is one step."""
        late = [v for v in node.inputs if v in self.waiting]
        if not late or node.op_type != "Add" or node.inputs[0] is node.inputs[1] or None in node.inputs:
            return False
        product, other = late[0], node.inputs[node.inputs[0] is late[0]]
        rows, matrix = self.waiting.pop(product)
        width = self.width_of(node.outputs[0])
        if other in self.waiting:
            more, second = self.waiting.pop(other)
            addend = self.made_of("PRODUCT", width, more, -1, second)
        else:
            addend = self.row(self.read(other), width)
        self.known[node.outputs[0]] = self.made_of("PRODUCT", width, rows, addend, matrix)
        return True

    def view(self, node: ir.Node) -> None:
        """Columns of a value."""
        source = self.read(node.inputs[0])
        if self.widths[source] != self.width_of(node.inputs[0]):  # type: ignore[arg-type]
            raise Unfit
        first = 0
        if node.op_type == "Slice":
            numbers = [None if v is None else constant(v) for v in node.inputs[1:]]
            if len(numbers) < 3 or any(n is None or n.size != 1 for n in numbers):
                raise Unfit
            start, _, axis, *step = (int(n.item()) for n in numbers if n is not None)
            first = min(max(start + self.widths[source] * (start < 0), 0), self.widths[source])
            if axis not in (1, -1) or step not in ([], [1]):
                raise Unfit
        elif node.attributes.get_int("axis", 0) not in (1, -1):
            raise Unfit
        for out in node.outputs:
            width = self.width_of(out)
            self.known[out] = self.made_of("VIEW", width, source, first)
            first += width
        if first > self.widths[source]:
            raise Unfit

    def join(self, node: ir.Node) -> None:
        """Concatenate values along columns."""
        if node.attributes.get_int("axis", 0) not in (1, -1):
            raise Unfit
        parts: list[int] = []
        for v in node.inputs:
            if v is None or self.widths[self.read(v)] not in (0, self.width_of(v)):
                raise Unfit
            parts += [self.read(v), self.width_of(v)]
        self.known[node.outputs[0]] = self.made_of("JOIN", sum(parts[1::2]), *parts)
