"""The state of one inference: symbols, elements of shape vectors, and the table of functions to infer with.

``onnx-shape-inference`` stores the elements of whole-number vectors, as shapes are computed from such. Without a
bound, a vector that is doubled thirty times, or the declared length of one, takes all memory, for a symbol per element.
The library has no setting for it, so its context is bounded by a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.constants import MOST_ELEMENTS
from onnxgrad.ir.infer.limits import MOST_TEXT, check_shape
from onnxgrad.ir.match import Dim

#: Types of tensors that shapes may be made of.
_INTEGERS = frozenset(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))
#: Sets types and shapes of the outputs of a node. Every context that it gets is a `InferenceContext`.
Infer = Callable[[osi.ShapeInferenceContext, ir.Node], None]


class Calls(Protocol):
    """Local functions that stay functions.

    The library types a body once for all similar calls, with the new symbols of the first: sizes known only at run time
    (the number of nonzero elements) would then count as equal in all of them.
    """

    def __contains__(self, node: ir.Node) -> bool:
        """True if `node` calls one of them."""

    def infer(self, ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        """Set types and shapes of the results of a call."""


class InferenceContext(osi.ShapeInferenceContext):
    """The library's context with bounds, a count of new symbols, and a registry and local functions of its own.

    Attributes:
        registry: The functions to infer with.
        calls: The local functions that stay functions, if there are any.
        made: The number of symbols made for dimensions that are not known.
    """

    def __init__(
        self,
        opset_imports: Mapping[str, int],
        registry: osi.OpShapeInferenceRegistry,
        calls: Calls | None = None,
    ) -> None:
        super().__init__(opset_imports)
        self.registry = registry
        self.calls = calls
        self.made = 0

    def function(self, node: ir.Node) -> Infer | None:
        """Return the function that infers `node`; None for an operator that has none."""
        if self.calls is not None and node in self.calls:
            return self.calls.infer
        version = node.version or self.get_opset_version(node.domain)  # an inlined function's nodes have their own
        return self.registry.get(node.domain, node.op_type, version)

    def run(self, infer: Infer, node: ir.Node) -> None:
        """Infer the outputs of `node` by `infer`.

        Raises:
            ShapeInferenceError, OpUsageError: the node is not valid; exceptions of other kinds become the first.
        """
        try:
            infer(self, node)
        except (osi.ShapeInferenceError, osi.OpUsageError):
            raise
        except Exception as error:
            what = {"node_name": node.name, "op_type": node.op_type, "domain": node.domain}
            message = f"Shape inference failed for {node.domain}::{node.op_type}"
            raise osi.ShapeInferenceError(**what, message=message) from error

    def new_symbolic_dim(self) -> ir.SymbolicDim:
        """Return a new symbol, and count it."""
        self.made += 1
        return super().new_symbolic_dim()

    def set_shape(self, value: ir.Value, shape: ir.Shape) -> bool:
        """Set a shape that a tensor can have; formulas of sizes that are too long become new symbols."""
        check_shape(value, shape)
        if any(not isinstance(d, int) and len(d.value or "") > MOST_TEXT for d in shape.dims):
            shape = ir.Shape([d if len(str(d)) <= MOST_TEXT else self.new_symbolic_dim() for d in shape])
        if value.shape is None and _has_names(shape):
            value.shape = shape
            return True
        return super().set_shape(value, shape)

    def _refine_shape(self, value: ir.Value, existing: ir.Shape, inferred: ir.Shape) -> bool:
        """Keep what says more of each dimension; another rank that is declared is wrong (ONNX Runtime only warns)."""
        if len(existing) == len(inferred):
            return super()._refine_shape(value, existing, inferred)
        value.shape = inferred
        return True

    def name_anonymous_dims(self, value: ir.Value) -> bool:
        """Give a symbol to each dimension of `value` without one. Returns whether there was any."""
        return value.shape is not None and not _has_names(value.shape) and super().name_anonymous_dims(value)

    def get_symbolic_value(self, value: ir.Value) -> list[Dim] | None:
        """Return the elements of a short vector."""
        known = self._symbolic_values.get(value)
        if known is not None or value.dtype not in _INTEGERS:
            return known
        tensor = value.const_value
        if tensor is None:
            return super().get_symbolic_value(value)
        return tensor.numpy().ravel().tolist() if tensor.size <= MOST_ELEMENTS and len(tensor.shape) < 2 else None

    def reads(self, value: ir.Value) -> bool:
        """True if elements of `value` are known that no constant holds."""
        return value in self._symbolic_values

    def set_symbolic_value(self, value: ir.Value, data: list[Dim]) -> None:
        """Store the elements of a short vector."""
        if len(data) <= MOST_ELEMENTS and all(
            -(2**63) <= d < 2**63 if isinstance(d, int) else d.value is not None and len(d.value) <= MOST_TEXT
            for d in data
        ):
            if value.const_value is None and _takes_numbers(value, data):
                numbers = np.array(data if len(value.shape or ()) else data[0], value.dtype.numpy())  # type: ignore[union-attr]
                value.const_value = ir.Tensor(numbers, name=value.name)
            self._symbolic_values[value] = data  # the library also writes them into the metadata of the model

    def _maybe_record_anchor_equality(self, existing_dim: Dim, inferred_dim: Dim) -> None:
        """Record nothing: a pass of the library that is not run compares sizes, by formulas of sympy."""


def _has_names(shape: ir.Shape) -> bool:
    """True if every dimension is a number or has a name; the library asks a protocol, which is slow, for each."""
    return all(isinstance(d, int) or d.value is not None for d in shape.dims)


def _takes_numbers(value: ir.Value, data: list[Dim]) -> bool:
    """True if `data` are the elements of the scalar or vector `value`, all of them numbers."""
    is_small = value.dtype is not None and value.shape is not None and len(value.shape) < 2 and data
    return bool(is_small and all(isinstance(d, int) for d in data))
