"""Check the formula names that a training model stores (see `Builder.named`) against its operators.

Training models store these names in files, with coefficients for kernels that replace the operators. A file may have
other coefficients than its operators. So the formula is written again with the stored ones, and a name is used only if
the result equals the file's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.composites import Part, named_parts
from onnxgrad.training.optim import formulas as f
from onnxgrad.training.optim.formulas import Formula

Numbers = Mapping[str, float]


def _decay(a: Numbers) -> dict[str, Any]:
    return {"weight_decay": a["norm"]}


def _moments(a: Numbers) -> dict[str, Any]:
    return {**_decay(a), "betas": (a["alpha"], a["beta"]), "eps": a["epsilon"], "momentum_decay": 0.004}


def _shares(a: Numbers) -> dict[str, Any]:
    return {"weight_decay": 0.0, "betas": (a["now"], a["later"])}


def _square(centered: bool) -> Callable[[Numbers], dict[str, Any]]:
    return lambda a: {
        **_decay(a), "alpha": a["alpha"], "momentum": a["momentum"], "eps": a["epsilon"], "centered": centered
    }  # fmt: skip


#: By name: the formula, how many states it has, and its settings for the attributes of a note.
FORMULAS: dict[str, tuple[Callable[..., Any], int, Callable[[Numbers], dict[str, Any]]]] = {
    "Sgd": (f.sgd, 0, _decay),
    "Adam": (f.adam, 2, _moments),
    "NAdam": (f.nadam, 2, _moments),
    "RMSProp": (f.rmsprop, 1, _square(False)),
    "RMSPropMoving": (f.rmsprop, 2, _square(False)),
    "RMSPropCentered": (f.rmsprop, 2, _square(True)),
    "RMSPropCenteredMoving": (f.rmsprop, 3, _square(True)),
    "Lion": (f.lion, 1, _shares),
}

#: So many settings does a file have; further ones are not believed, as each takes milliseconds.
_MOST = 64
#: And no number that float32 does not hold.
_LARGEST = 1e30


class Rewriting:
    """Parts as the formulas write them, each once."""

    def __init__(self) -> None:
        self._known: dict[Any, Part | None] = {}

    def __call__(self, name: str, attributes: Numbers, dtype: ir.DataType) -> Part | None:
        """The part that the formula of this name writes, if it has just these attributes; None if not.

        Raises:
            KeyError: an attribute is missing.
        """
        key = (name, tuple(sorted(attributes.items())), dtype)
        if key not in self._known:
            numbers = all(abs(n) < _LARGEST for n in attributes.values())
            kind = dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
            if name not in FORMULAS or not numbers or not kind or len(self._known) >= _MOST:
                return None
            self._known[key] = None
            part = _written(name, attributes, dtype)
            if part is not None and part.name == name and dict(part.attributes) == dict(attributes):
                self._known[key] = part
        return self._known[key]


def _written(name: str, attributes: Numbers, dtype: ir.DataType) -> Part | None:
    formula, states, settings = FORMULAS[name]
    builder = Builder(ir.Graph([], [], nodes=[], name="notes", opset_imports={"": 21}))

    def formal(kind: ir.DataType, *shape: int) -> Var:
        value = ir.Value(name=builder.names.fresh("given"), type=ir.TensorType(kind), shape=ir.Shape(shape))
        builder.graph.inputs.append(value)
        return Var(builder, value)

    rate, time, kept = formal(dtype), formal(ir.DataType.INT64), formal(ir.DataType.DOUBLE)
    written = Formula(builder, settings(attributes), rate, lambda: time, dtype, lambda *_: kept)
    formula(written, *(formal(dtype, 2) for _ in range(2 + states)))
    return next(named_parts(builder.graph), None)
