"""Stop nodes: a run ends there with an error, instead of never ending or returning uninitialized memory.

The name of such a node begins with a reason, which any runtime prints, and continues with the node that is
differentiated. `explain_stop` makes a sentence of both.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from onnxgrad.ir.names import Names

RECURRENT = "recurrent_layer_of_at_least_one_step"
CONVOLUTION = "no_weight_gradient_of_an_empty_batch"

_SENTENCES = {
    RECURRENT: "the sequences have no steps, and this derivative needs at least one; leave such a batch out, or pad its"
    " sequences by a step and give their true length 0 as sequence_lens",
    CONVOLUTION: "the batch is empty, and ONNX Runtime computes no gradient of convolution weights from no rows; leave"
    " such a batch out",
}  # fmt: skip
_NAME = re.compile(rf"({'|'.join(_SENTENCES)})(?:\.(\w+)\.(.*))?_\d+$")


def name_stop(names: Names, reason: str, node: ir.Node) -> str:
    """A new name for a node that stops for `reason` in the derivative of `node`."""
    return names.fresh(f"{reason}.{node.op_type}.{node.name or node.outputs[0].name}")


def explain_stop(name: str) -> str | None:
    """The sentence for a failure at the node `name`; None if no run stops there on purpose."""
    match = _NAME.search(name)
    if match is None:
        return None
    where = f"{match[2]} node {match[3]!r}: " if match[2] else ""
    return where + _SENTENCES[match[1]]
