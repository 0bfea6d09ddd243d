"""Losses in the notation of NumPy, as ``mean((scores - y)**2) + 0.1*mean(abs(scores))``.

The text is parsed to a syntax tree, and the tree is evaluated node by node: arithmetic, comparisons, indexing by
constants, and calls of the functions in `FUNCTIONS`. Every other construct is refused before anything is computed, so a
text from elsewhere runs no code: it has no attributes, no names but arrays and functions, and no functions that
allocate memory by a number.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from onnxgrad.errors import BadInput, close_to

#: Functions of `onnxgrad.eager.numpy` that a text may call.
OF_NUMPY = tuple(
    "abs absolute arccos arcsin arctan arctan2 argmax argmin ceil clip concatenate cos cosh cumsum dot exp expand_dims "  # noqa: SIM905
    "expm1 floor isfinite isnan log log10 log1p log2 logaddexp logical_and logical_not logical_or matmul max maximum "
    "mean min minimum power prod round sign sin sinh sort sqrt square squeeze stack std sum take_along_axis tan tanh "
    "transpose var where".split()
)
#: Functions of `onnxgrad.eager.scipy.special`, and those written with them.
OF_SCIPY = ("expit", "log_softmax", "logsumexp", "softmax")
FUNCTIONS = (*OF_NUMPY, *OF_SCIPY, "norm", "relu", "sigmoid", "softplus")
#: Characters of a text, and constructs inside each other.
LONGEST, DEEPEST = 4000, 60
_NUMPY = ("np", "numpy")
_CONSTANTS = {"pi": 3.141592653589793, "e": 2.718281828459045}

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def is_expression(text: str) -> bool:
    """True if a loss is written as a formula, not as a name with options or a file."""
    return "(" in text and not text.endswith(".onnx") and ":" not in text.partition("(")[0]


class Expression:
    """A formula of arrays.

    Args:
        text: the formula.

    Raises:
        BadInput: it is no formula, or uses a construct or a function that is not allowed.

    Attributes:
        names: of its arrays, in their order.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST:
            raise BadInput(f"a formula of a loss has at most {LONGEST} characters, not {len(text)}")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
            raise BadInput(f"the loss {_short(text)} is no formula: {reason}") from error
        names: dict[str, None] = {}
        self._check(self._tree, names, 0)
        self.names = tuple(names)
        if not names:
            raise BadInput(f"the loss {_short(text)} reads no array")

    def value(self, arrays: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
        """The value of the formula of these arrays, by `functions` of the names in `FUNCTIONS`."""
        return self._value(self._tree, {**functions, **arrays})

    # --- the constructs that are allowed ----------------------------------------------------------

    def _check(self, node: ast.AST, names: dict[str, None], depth: int) -> None:
        """Raise BadInput for a construct that is not allowed; collect the names of arrays."""
        if depth > DEEPEST:
            raise self._refusal(f"it nests more than {DEEPEST} constructs")
        parts: list[ast.AST] = []
        match node:
            case ast.BinOp() if type(node.op) in _BINARY:
                parts = [node.left, node.right]
            case ast.UnaryOp() if type(node.op) in _UNARY:
                parts = [node.operand]
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
                parts = [node.left, *node.comparators]
            case ast.Call() if all(k.arg for k in node.keywords):
                self._function(node.func)
                parts = [*node.args, *(k.value for k in node.keywords)]
            case ast.Subscript():
                self._check_index(node.slice)
                parts = [node.value]
            case ast.Tuple() | ast.List():
                parts = list(node.elts)
            case ast.Constant() if isinstance(node.value, (bool, int, float)):
                if not isinstance(node.value, bool) and not abs(node.value) < 1e300:
                    raise self._refusal(f"{node.value!r:.20} is no number of an array")
            case ast.Constant() if node.value is None:
                pass
            case ast.Attribute() if isinstance(node.value, ast.Name) and node.value.id in _NUMPY:
                if node.attr not in _CONSTANTS:
                    raise self._refusal(f"{ast.unparse(node)!r} is neither called nor a constant")
            case ast.Name():
                if node.id in FUNCTIONS or node.id in _NUMPY:
                    raise self._refusal(f"{node.id!r} is a function")
                names.setdefault(node.id)
            case _:
                raise self._refusal(f"{ast.unparse(node)[:40]!r} is not allowed in it")
        for part in parts:
            self._check(part, names, depth + 1)

    def _check_index(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            number = isinstance(inner, ast.Constant) and (inner.value is None or isinstance(inner.value, int))
            if not (number or isinstance(inner, (ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load))):
                raise self._refusal(f"the index {ast.unparse(node)[:40]!r} is not made of whole numbers and None")

    def _function(self, node: ast.AST) -> str:
        """The name of the function that is called."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _NUMPY:
            name = node.attr
        elif isinstance(node, ast.Name):
            name = node.id
        else:
            raise self._refusal(f"{ast.unparse(node)[:40]!r} cannot be called\n  hint: write mean(x), not x.mean()")
        if name not in FUNCTIONS:
            near = close_to(name, FUNCTIONS)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FUNCTIONS)}"
            raise self._refusal(f"there is no function {name!r}\n  hint: {hint}")
        return name

    def _refusal(self, why: str) -> BadInput:
        return BadInput(f"the loss {_short(self.text)} cannot be read as a formula: {why}")

    # --- evaluation ------------------------------------------------------------------------------

    def _value(self, node: ast.AST, arrays: Mapping[str, Any]) -> Any:
        match node:
            case ast.BinOp():
                left, right = self._value(node.left, arrays), self._value(node.right, arrays)
                if isinstance(node.op, ast.Pow) and isinstance(left, int):
                    left = float(left)  # a power of whole numbers may have any number of digits
                try:
                    return _BINARY[type(node.op)](left, right)
                except (OverflowError, ZeroDivisionError) as error:
                    raise self._refusal(f"{ast.unparse(node)[:40]!r} is no finite number") from error
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self._value(node.operand, arrays))
            case ast.Compare():
                left, right = self._value(node.left, arrays), self._value(node.comparators[0], arrays)
                return _COMPARE[type(node.ops[0])](left, right)
            case ast.Call():
                operands = [self._value(a, arrays) for a in node.args]
                options = {str(k.arg): self._value(k.value, arrays) for k in node.keywords}
                try:
                    return arrays[self._function(node.func)](*operands, **options)
                except TypeError as error:
                    raise self._refusal(f"{ast.unparse(node)[:60]!r}: {error}") from error
            case ast.Subscript():
                return self._value(node.value, arrays)[self._index(node.slice)]
            case ast.Tuple() | ast.List():
                return tuple(self._value(e, arrays) for e in node.elts)
            case ast.Constant():
                return node.value
            case ast.Attribute():
                return _CONSTANTS[node.attr]
            case ast.Name():
                return arrays[node.id]
        raise AssertionError(node)

    def _index(self, node: ast.AST | None) -> Any:
        match node:
            case ast.Slice():
                return slice(*(self._index(part) for part in (node.lower, node.upper, node.step)))
            case ast.Tuple():
                return tuple(self._index(e) for e in node.elts)
            case ast.UnaryOp():
                return -self._index(node.operand)
            case ast.Constant():
                return node.value
        return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
