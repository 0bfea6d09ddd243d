"""Elementwise operators as steps of programs, of the operations of ``source/elementwise.h``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import is_op, single_constant
from onnxgrad.runtime.kernels.steps import Real, Steps, Unfit, letter

DOMAIN = "onnxgrad.native"

#: Operations of elements, in the order of the kernel's own list.
OPERATIONS = tuple(
    """ADD SUB MUL DIV MIN MAX NEG ABS SQRT RELU SIGN FLOOR CEIL ROUND EXP LOG POW SIN COS TAN ASIN ACOS ATAN SINH COSH
    ASINH ACOSH ATANH ERF NORMAL BELL TANH SIGMOID SOFTPLUS
    LESS LESS_EQUAL EQUAL TRUTH IS_NAN SELECT AND OR XOR NOT WHOLE_ADD WHOLE_SUB WHOLE_MUL SHIFT_LEFT SHIFT_RIGHT
    WHOLE_LESS WHOLE_LESS_EQUAL NATURAL_LESS NATURAL_LESS_EQUAL WHOLE_EQUAL WHOLE_TRUTH FLOAT_OF_WHOLE""".split()  # noqa: SIM905
)

#: The most axes of operands and results of programs.
AXES = 8

#: The letters that the operators of one program may have, by the type of its numbers.
_TOGETHER = {np.float32: frozenset("FIUB"), np.float64: frozenset("DLB")}

#: A dimension: a number, or the name of one.
Dims = tuple[int | str, ...]


def dims(value: ir.Value) -> Dims | None:
    """The shape of `value`; None unless every dimension has a number or a name."""
    shape = value.shape
    if shape is None:
        return None
    found = tuple([d if type(d) is int else d.value for d in shape.dims])  # type: ignore[union-attr]
    return None if len(found) > AXES or None in found else found  # type: ignore[return-value]


Writes = Callable[[Steps, ir.Node, Sequence[int], str], int]
_OPERATORS: dict[str, Writes] = {}


def _operator(*names: str) -> Callable[[Writes], Writes]:
    def registered(writes: Writes) -> Writes:
        _OPERATORS.update(dict.fromkeys(names, writes))
        return writes

    return registered


def _one_of(codes: Mapping[str, str], kind: str) -> str:
    """The operation for a kind of operands; that of float32 is the same for float64."""
    code = codes.get(kind, codes.get("F") if kind == "D" else None)
    if code is None:
        raise Unfit
    return code


_UNARY = {
    **{name: {"F": name.upper()} for name in (
        "Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Softplus", "Relu", "Sign", "Floor", "Ceil",
        "Round",
    )},
    **{name: {"D": name.upper()} for name in (  # vectors of float32 are quicker in ONNX Runtime
        "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
    )},
    "IsNaN": {"F": "IS_NAN"}, "Not": {"B": "NOT"}, "BitwiseNot": {"I": "NOT", "U": "NOT"},
}  # fmt: skip
_BINARY = {
    "Add": {"F": "ADD", "I": "WHOLE_ADD", "U": "WHOLE_ADD"},
    "Sub": {"F": "SUB", "I": "WHOLE_SUB", "U": "WHOLE_SUB"},
    "Mul": {"F": "MUL", "I": "WHOLE_MUL", "U": "WHOLE_MUL"},
    "Div": {"F": "DIV"},
    "Less": {"F": "LESS", "I": "WHOLE_LESS", "U": "NATURAL_LESS"},
    "LessOrEqual": {"F": "LESS_EQUAL", "I": "WHOLE_LESS_EQUAL", "U": "NATURAL_LESS_EQUAL"},
    "Equal": {"F": "EQUAL", "I": "WHOLE_EQUAL", "U": "WHOLE_EQUAL", "B": "WHOLE_EQUAL"},
    "And": {"B": "AND"}, "Or": {"B": "OR"}, "Xor": {"B": "XOR"},
    **{f"Bitwise{name}": dict.fromkeys("IU", name.upper()) for name in ("And", "Or", "Xor")},
}  # fmt: skip
_SWAPPED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual"}


@_operator(*_UNARY)
def _unary(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return b(_one_of(_UNARY[node.op_type], kind), x[0])


@_operator(*_BINARY)
def _binary(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return b(_one_of(_BINARY[node.op_type], kind), x[0], x[1])


@_operator(*_SWAPPED)
def _add_swapped(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return b(_one_of(_BINARY[_SWAPPED[node.op_type]], kind), x[1], x[0])


@_operator("Min", "Max", "Sum")
def _variadic(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    code, total = _one_of({"F": {"Min": "MIN", "Max": "MAX", "Sum": "ADD"}[node.op_type]}, kind), x[0]
    for more in x[1:]:
        total = b(code, total, more)
    return total


@_operator("BitShift")
def _shift(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return b(_one_of({"U": f"SHIFT_{node.attributes['direction'].as_string()}"}, kind), x[0], x[1])


@_operator("Cast")
def _cast(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    match (kind + letter(node.outputs[0])).replace("D", "F"):
        case "FF" | "II" | "UU" | "BB" | "IU" | "UI":
            return x[0]
        case "BF":
            return b("AND", x[0], b.float(1))
        case "BI" | "BU":
            return b("AND", x[0], b.bits(1))
        case "FB":
            return b("TRUTH", x[0])
        case "IB" | "UB":
            return b("WHOLE_TRUTH", x[0])
        case "IF" | "LF":
            return b("FLOAT_OF_WHOLE", x[0])
    raise Unfit


@_operator("Reciprocal")
def _reciprocal(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return b(_one_of({"F": "DIV"}, kind), b.float(1), x[0])


@_operator("Pow")
def _pow(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    """A power; ONNX Runtime multiplies for the exponents 2 and 3, and calls the C library for others."""
    exponent = single_constant(node.inputs[1])
    number = None if exponent is None or exponent.ndim > len(dims(node.outputs[0]) or ()) else exponent.item()
    if number not in (2, 3):
        return b(_one_of({"D": "POW"}, kind), *x)
    square = b(_one_of({"F": "MUL"}, kind), x[0], x[0])
    return square if number == 2 else b("MUL", square, x[0])


@_operator("Clip")
def _clip(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    """A clip with constant numbers as bounds; a missing bound is the end of the range."""
    if kind not in ("F", "D") or node.attributes:
        raise Unfit
    found = x[0]
    for k, (code, end) in enumerate((("MAX", np.finfo(b.real).min), ("MIN", np.finfo(b.real).max)), 1):
        given = node.inputs[k] if k < len(node.inputs) else None
        bound = b.real(end) if given is None else single_constant(given)
        if bound is None or np.isnan(bound).any():
            raise Unfit
        found = b(code, found, b.float(float(bound.reshape(()))))
    return found


def _if_positive(b: Steps, x: int, otherwise: int) -> int:
    return b("SELECT", b("LESS_EQUAL", b.float(0), x), x, otherwise)


#: Operators that are the same for all types that they have.
_FORMULAS: dict[str, Callable[[Steps, ir.Node, Sequence[int]], int]] = {
    "Where": lambda b, node, x: b("SELECT", *x),
    "Identity": lambda b, node, x: x[0],
    "LeakyRelu": lambda b, node, x: _if_positive(
        b, x[0], b("MUL", x[0], b.float(node.attributes.get_float("alpha", 0.01)))
    ),
    "PRelu": lambda b, node, x: b("SELECT", b("LESS", x[0], b.float(0)), b("MUL", x[0], x[1]), x[0]),
    "Softsign": lambda b, node, x: b("MUL", x[0], b("DIV", b.float(1), b("ADD", b.float(1), b("ABS", x[0])))),
    "Mish": lambda b, node, x: b("MUL", x[0], b("TANH", b("SOFTPLUS", x[0]))),
}


@_operator(*_FORMULAS)
def _formula(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    return _FORMULAS[node.op_type](b, node, x)


@_operator("HardSigmoid")
def _hard_sigmoid(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    y, centre = b("MUL", x[0], b.float(node.attributes.get_float("alpha", 0.2))), node.attributes.get_float("beta", 0.5)
    y = b("ADD", y, b.float(centre)) if centre else y  # the maximum makes 0 of -0 as well
    return b("MAX", b("MIN", y, b.float(1)), b.float(0))


@_operator("Elu", "Selu")
def _elu(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    read, is_scaled = node.attributes.get_float, node.op_type == "Selu"
    alpha = b.float(read("alpha", _SELU[0] if is_scaled else 1.0))
    y = _if_positive(b, x[0], b("MUL", alpha, b("SUB", b("EXP", x[0]), b.float(1))))
    return b("MUL", b.float(read("gamma", _SELU[1])), y) if is_scaled else y


@_operator("Gelu")
def _gelu(b: Steps, node: ir.Node, x: Sequence[int], kind: str) -> int:
    half = b("MUL", x[0], b.float(0.5))
    given = node.attributes.get("approximate")
    if given is None or given.as_string() == "none":
        inner = b("ERF", b("MUL", x[0], b.float(math.sqrt(0.5))))
    else:
        cube = b("MUL", b("MUL", b("MUL", x[0], x[0]), x[0]), b.float(0.044715))
        inner = b("TANH", b("MUL", b("ADD", x[0], cube), b.float(math.sqrt(2 / math.pi))))
    return b("MUL", half, b("ADD", inner, b.float(1)))


#: The numbers of Selu, alpha and gamma.
_SELU = 1.67326319217681884765625, 1.05070102214813232421875

#: Operators that are written for floating-point numbers alone.
_REAL_ONLY = frozenset({"Elu", "Selu", "LeakyRelu", "PRelu", "HardSigmoid", "Softsign", "Mish", "Gelu"})


def operands_of(node: ir.Node) -> list[ir.Value | None]:
    """The operands of `node`, before an Expand where the shape of the result is the same without it."""
    given = [None if v is None else _before_expand(v) for v in node.inputs]
    if all(v is own for v, own in zip(given, node.inputs)) or (shape := dims(node.outputs[0])) is None:
        return list(node.inputs)
    shapes = [dims(v) or () for v in given if v is not None]
    there = {k for each in shapes for k, (d, whole) in enumerate(zip(each[::-1], shape[::-1])) if d == whole}
    return given if len(there) == len(shape) else list(node.inputs)


def _before_expand(value: ir.Value) -> ir.Value:
    """The operand of the Expand that makes `value`, else `value`."""
    maker = value.producer()
    given = maker.inputs[0] if maker is not None and is_op(maker, "Expand") else None
    return value if given is None or dims(given) is None else given


def write_steps(b: Steps, node: ir.Node) -> None:
    """The steps of one operator.

    Raises:
        Unfit: programs do not have it, for these types.
    """
    writes = _OPERATORS[node.op_type] if is_known(node) else None
    if writes is None or len(node.outputs) != 1 or not letter(node.outputs[0]):
        raise Unfit
    given = operands_of(node)
    kinds = [letter(v) for v in given]
    alike = kinds[1:] if node.op_type == "Where" else kinds[:1] if node.op_type == "Clip" else kinds
    there = {letter(node.outputs[0]), *(kind for kind, v in zip(kinds, given) if v is not None)}
    if not alike or len(set(alike)) != 1 or not there <= _TOGETHER[b.real]:
        raise Unfit
    kind = alike[0]
    if (node.op_type in _REAL_ONLY and kind not in ("F", "D")) or (node.op_type != "Cast" and kind == "L"):
        raise Unfit
    read = given[:1] if node.op_type == "Clip" else given
    b.known[node.outputs[0]] = writes(b, node, [b.read(v, given) for v in read], kind)


#: Operators of float64 that the CPU provider of ONNX Runtime has no kernel for.
_DOUBLE_ONLY_HERE = frozenset(
    """Acos Acosh Asin Asinh Atan Atanh Cosh Erf Gelu HardSigmoid LeakyRelu Mish PRelu Sinh Softplus Softsign
    Tan""".split()  # noqa: SIM905
)


def is_only_here(node: ir.Node) -> bool:
    """True if kernels have the operator, for its types, and ONNX Runtime has not."""
    return is_op(node, _DOUBLE_ONLY_HERE) and letter(node.outputs[0]) == "D"


def real_of(nodes: Iterable[ir.Node]) -> Real:
    """The floating-point type of the program that has `nodes`."""
    for node in nodes:
        for v in (*node.outputs, *node.inputs):
            if letter(v) in ("D", "L"):
                return np.float64
    return np.float32


def is_known(node: ir.Node) -> bool:
    """True if programs have the operator, for some types."""
    return is_op(node, _OPERATORS)


#: Operators by domain, name and types, of those that programs have or not by these alone.
_written: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], bool] = {}


def is_written(node: ir.Node) -> bool:
    """True if programs have the operator, for its types."""
    kinds = tuple(map(letter, node.inputs))
    by_types = not node.attributes and "" not in kinds and node.op_type not in ("Pow", "Clip")
    key = node.domain, node.op_type, kinds, tuple(map(letter, node.outputs))
    if by_types and key in _written:
        return _written[key]
    try:
        write_steps(Steps(real=real_of([node])), node)
        found = True
    except Unfit:
        found = False
    if by_types:
        _written[key] = found
    return found
