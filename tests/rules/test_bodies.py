"""Function bodies: expanded, a node computes the same; operators without a rule climb the ladder."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.ir import Builder
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.lower import expand
from onnxgrad.rules import registry
from onnxgrad.testing import Case, node_model, reference
from tests.rules.ladder import ladder


def ints(*values):
    return np.array(values, np.int64)


def single(*shape):
    """Bodies that hold float32 constants run in float32 only."""
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


X = (2, 3)
QKV = [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)]
SIMPLE = [
    *("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "LogSoftmax", "Mish", "Relu", "Selu"),
    *("Shrink", "Softmax", "Softplus", "Softsign", "ThresholdedRelu"),
]
BODIES = [
    *[Case(name, [X]) for name in SIMPLE],
    *[Case(n, [X, ints(1)]) for n in ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")],
    Case("ReduceL2", [X], {"keepdims": 0}, note="all"),
    Case("Elu", [X], {"alpha": 0.5}, note="alpha"),
    Case("Gelu", [X], {"approximate": "tanh"}, note="tanh"),
    Case("Swish", [X], opset=24),
    Case("PRelu", [X, (3,)]),
    Case("Clip", [X, np.array(-0.5), np.array(0.5)]),
    Case("Clip", [X, None, np.array(0.5)], note="no minimum"),
    Case("CastLike", [X, ()]),
    Case("GreaterOrEqual", [X, (3,)]),
    Case("LessOrEqual", [X, (3,)]),
    Case("CenterCropPad", [(3, 4), ints(5, 2)]),
    Case("LayerNormalization", [X, (3,), (3,)], outputs=3),
    Case("LayerNormalization", [X, (3,)], outputs=1, note="no bias"),
    Case("GroupNormalization", [(2, 4, 3), (4,), (4,)], {"num_groups": 2}),
    Case("RMSNormalization", [X, (3,)], opset=23),
    Case("MeanVarianceNormalization", [(2, 3, 2, 2)]),
    Case("NegativeLogLikelihoodLoss", [X, ints(0, 2), (3,)], note="weights"),
    Case("NegativeLogLikelihoodLoss", [X, ints(0, 2)], {"ignore_index": 2, "reduction": "sum"}),
    Case("SoftmaxCrossEntropyLoss", [X, ints(0, 2)], outputs=2),
    Case("SoftmaxCrossEntropyLoss", [X, ints(0, 2), (3,)], {"reduction": "none"}, note="weights"),
    Case("RotaryEmbedding", [(1, 2, 3, 4), (5, 2), (5, 2), ints(0, 1, 2)[None]], opset=23),
    Case("Attention", QKV, {"scale": 0.25}, opset=23),
    Case(
        "Attention",
        [*QKV, None, (1, 2, 2, 4), (1, 2, 2, 4)],
        {"scale": 0.25},
        outputs=3,
        opset=23,
        note="past",
    ),
    Case("AffineGrid", [(2, 2, 3), ints(2, 1, 2, 3)], opset=20),
]


def expanded(model):
    opened = ir.from_proto(model)
    infer_model(opened)
    builder = Builder(opened.graph)
    new = expand(builder, next(iter(opened.graph)))
    assert new
    return ir.to_proto(opened)


@pytest.mark.parametrize("case", BODIES, ids=lambda c: c.id)
def test_body_computes_what_the_operator_computes(case):
    rng = np.random.default_rng(0)
    feeds = {
        f"x{i}": (rng.standard_normal(x) if isinstance(x, tuple) else np.asarray(x))
        for i, x in enumerate(case.inputs)
        if x is not None
    }
    feeds = {k: a.astype(np.float32) if a.dtype.kind == "f" else a for k, a in feeds.items()}
    model = node_model(case, feeds, dtype=np.float32)
    body = expanded(model)
    onnx.checker.check_model(body)
    assert case.op not in {n.op_type for n in body.graph.node}
    assert [o.name for o in body.graph.output] == [o.name for o in model.graph.output]
    want = reference(model, feeds)
    for name, got in reference(body, feeds).items():
        np.testing.assert_allclose(got, want[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_every_operator_with_a_body_is_tried():
    """Of the standard operators that take floats; left out are random ones and generators of constants.

    Range has a rule; the reference evaluator stacks what its body scans in another shape.
    """
    newest = {}
    for s in onnx.defs.get_all_schemas():
        if s.domain == "" and s.since_version <= 26 and (s.has_function or s.has_context_dependent_function):
            newest[s.name] = s
    left = {
        "Bernoulli",
        "BlackmanWindow",
        "HammingWindow",
        "HannWindow",
        "DynamicQuantizeLinear",
        "SequenceMap",
    }
    assert set(newest) - left <= {c.op for c in BODIES}


def test_outputs_that_hand_an_operand_through_get_a_node_of_their_own():
    """Without bounds the body of Clip is an Identity; the operand keeps its name."""
    model = node_model(Case("Clip", [X]), {"x0": np.zeros(X)})
    body = expanded(model)
    assert [i.name for i in body.graph.input] == ["x0"]
    assert [o.name for o in body.graph.output] == ["y0"]


WITHOUT_RULE = [
    Case("CenterCropPad", [(3, 4), ints(5, 2)]),
    Case("CenterCropPad", [(3, 5, 2), ints(4, 4)], {"axes": [-2, 0]}, note="two axes"),
    Case("CenterCropPad", [(3, 4), ints(3, 4)], note="as it is"),
    Case("CenterCropPad", [(3, 4), ints(2, 7)], fed=True, note="fed"),
]
test_rule = ladder("bodies", WITHOUT_RULE)


@pytest.mark.parametrize("op", sorted({c.op for c in WITHOUT_RULE}))
def test_these_operators_have_no_rule(op):
    assert registry.get("", op, 23) is None
