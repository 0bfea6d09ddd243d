"""The map from derived inputs and outputs to primal values, stored in the model's metadata.

Derived names are predictable (``x_grad``, ``y_cotangent``, ``x_tangent``) and valid C identifiers; a
clash gets a suffix. A program reads the exact mapping from the model instead of guessing names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput

KEY = "onnxgrad.signature"


@dataclass
class Signature:
    """Dicts from primal name to derived name.

    Attributes:
        cotangents: of each `of` of a VJP, the input that takes its cotangent.
        gradients: of each `wrt`, the output that holds its gradient.
        input_tangents: of each `wrt` of a JVP, the input that takes its tangent.
        output_tangents: of each `of` of a JVP, the output that holds its tangent.
        products: of each `wrt` of a Hessian- or Gauss-Newton-vector product, the output that holds it.
        jacobians: of each `of`, and then of each `wrt`, the output that holds the Jacobian.
        hessians: of each pair of `wrt`, the output that holds that block of the Hessian.
        patterns: of each output that holds the entries of a sparse matrix, the outputs that say where these are:
            ``{"indices": …, "indptr": …}``.
        path: of each `wrt` of a jet, the inputs that take the derivatives of its path, first to last.
        jets: of each `of` of a jet, the outputs that hold its derivatives, first to last.
        laplacians: of each `of`, the output that holds its Laplacian.
        residuals: what the two halves of a split derivative hand on; outputs of one, inputs of the other.
    """

    cotangents: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    input_tangents: dict[str, str] = field(default_factory=dict)
    output_tangents: dict[str, str] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    jacobians: dict[str, dict[str, str]] = field(default_factory=dict)
    hessians: dict[str, dict[str, str]] = field(default_factory=dict)
    patterns: dict[str, dict[str, str]] = field(default_factory=dict)
    path: dict[str, list[str]] = field(default_factory=dict)
    jets: dict[str, list[str]] = field(default_factory=dict)
    laplacians: dict[str, str] = field(default_factory=dict)
    residuals: list[str] = field(default_factory=list)

    @property
    def tangents(self) -> dict[str, str]:
        """Both kinds of tangents in one dict."""
        return {**self.input_tangents, **self.output_tangents}

    def store(self, model: ir.Model) -> None:
        """Write it into the metadata of `model`."""
        model.metadata_props[KEY] = json.dumps(vars(self))


def signature(model: onnx.ModelProto | ir.Model) -> Signature:
    """The signature of a derived model.

    Raises:
        BadInput: `model` was not derived by onnxgrad.
    """
    if isinstance(model, ir.Model):
        stored = model.metadata_props.get(KEY)
    else:
        stored = next((p.value for p in model.metadata_props if p.key == KEY), None)
    if stored is None:
        raise BadInput("the model carries no signature: it is not one that onnxgrad derived")
    return Signature(**json.loads(stored))
