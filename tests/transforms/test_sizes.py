"""The growth of whole models: nodes that differentiation adds, compared with a golden file like single rules.

``ONNXGRAD_GOLDEN=update pytest -n0 tests/transforms/test_sizes.py`` writes the file anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest

from onnxgrad import jvp, vjp
from tests.large_models import float_weights, gpt, resnet50

GOLDEN = Path(__file__).parent / "sizes.json"


def _statistics(model: onnx.ModelProto) -> set[str]:
    return {name for n in model.graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]}


def _resnet_weights() -> onnx.ModelProto:
    model = resnet50(8, 10)
    trained = [w for w in float_weights(model) if w not in _statistics(model)]
    return vjp(model, wrt=trained)


MODELS = {
    "resnet50, 161 weights": (lambda: resnet50(8, 10), _resnet_weights),
    "resnet50, input": (lambda: resnet50(8, 10), lambda: vjp(resnet50(8, 10), wrt="x")),
    "resnet50, input, forward": (lambda: resnet50(8, 10), lambda: jvp(resnet50(8, 10), wrt="x")),
    "gpt of 2 layers, all weights": (gpt, lambda: vjp(gpt(), wrt=float_weights(gpt()))),
    "gpt of 12 layers, embeddings": (lambda: gpt(12), lambda: vjp(gpt(12), wrt="gather0_0")),
    "gpt of 12 layers, all weights": (lambda: gpt(12), lambda: vjp(gpt(12), wrt=float_weights(gpt(12)))),
}


@pytest.mark.parametrize("name", MODELS)
def test_size(name):
    primal, derived = (make() for make in MODELS[name])
    before, after = len(primal.graph.node), len(derived.graph.node)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("ONNXGRAD_GOLDEN") == "update":
        golden[name] = [before, after]
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    assert golden[name] == [before, after]
    assert after <= 9 * before


@pytest.mark.parametrize(("name", "most"), [("resnet50, input", 2.0), ("gpt of 12 layers, embeddings", 2.2)])
def test_nodes_added_per_node(name, most):
    before, after = json.loads(GOLDEN.read_text())[name]
    assert (after - before) / before <= most


def test_growth_is_linear_in_the_layers():
    """Twice the layers add twice the nodes: nothing is derived again for each of its uses."""
    sizes = [len(vjp(gpt(n), wrt=float_weights(gpt(n))).graph.node) for n in (2, 4, 6)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
