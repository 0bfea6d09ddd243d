"""Erf of float64, for which ONNX Runtime's CPU provider has no kernel, in elementary operators.

Rational approximations of Cody (1969, "Rational Chebyshev approximations for the error function"): one of erf for
|x| < 0.46875, one of erfc(|x|)·exp(x²) beyond. The largest error is 5e-16 of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.runtime.kernels.elementwise import PHASE
from onnxgrad.runtime.rewrites.rewrite import write_out
from onnxgrad.runtime.setting import Setting

#: Coefficients of numerator and denominator, the highest power first. The first denominator begins with 1.
_ERF = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_ERFC = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
_SMALL, _ONE = 0.46875, 6.0  # from the second on, erf is ±1


def _is_double_erf(node: ir.Node) -> bool:
    return is_op(node, "Erf") and (x := node.inputs[0]) is not None and x.dtype == ir.DataType.DOUBLE


def _erf(b: Builder, node: ir.Node) -> list[Var]:
    def ratio(of: Var, coefficients: tuple[Sequence[float], Sequence[float]]) -> Var:
        sums = []
        for first, second, *rest in coefficients:
            total = of * first + second
            for c in rest:
                total = total * of + c
            sums.append(total)
        return sums[0] / sums[1]

    (x,) = (b.var(v) for v in node.inputs if v is not None)
    size = b.Abs(x)
    capped = b.Min(size, _ONE)
    square = capped * capped
    small = x * ratio(square, _ERF)
    tail = b.Exp(-square) * ratio(capped, _ERFC)
    large = b.Sign(x) * (1.0 - tail)
    return [b.Where(size < _SMALL, small, large)]


DOUBLE_ERF = write_out(
    "double_erf",
    "a rational approximation, exact to 5e-16",
    "Erf of float64, which the CPU provider has no kernel for",
    _is_double_erf,
    _erf,
    lambda setting: setting.is_elsewhere() or ("kernels have it" if not setting.keeps_operators() else ""),
)
#: The same, of what kernels have left.
LEFT_ERF = replace(DOUBLE_ERF, name="left_erf", phase=PHASE, unless=Setting.keeps_operators)
