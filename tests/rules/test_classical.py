"""Operators of ai.onnx.ml up the ladder; ONNX Runtime's kernels against what their derivatives take them for."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference.op_run import OpRun

from onnxgrad import NoDerivative, NotDifferentiable, signature, vjp
from onnxgrad.testing import Case, node_model, numeric_gradient
from tests.rules.dtypes import session
from tests.rules.evaluators import Cast
from tests.rules.ladder import ladder

ML = "ai.onnx.ml"


class Normalizer(OpRun):
    """The reference evaluator's own takes the largest absolute value for MAX, and knows no vectors."""

    op_domain = ML

    def _run(self, x, norm="MAX"):
        n = {
            "MAX": lambda: x.max(-1, keepdims=True),
            "L1": lambda: np.abs(x).sum(-1, keepdims=True),
            "L2": lambda: np.sqrt((x * x).sum(-1, keepdims=True)),
        }[norm]()
        return (np.where(n == 0, x, x / np.where(n == 0, 1, n)),)


class FeatureVectorizer(OpRun):
    """The reference evaluator's own fails where an operand is to be filled up."""

    op_domain = ML

    def _run(self, *operands, inputdimensions):
        parts = [np.pad(x, ((0, 0), (0, max(0, w - x.shape[1]))))[:, :w] for x, w in zip(operands, inputdimensions)]
        return (np.concatenate(parts, axis=1),)


def case(
    op: str, operands: list, note: str = "", outputs: int = 1, evaluators: tuple = (), symbolic=True, **attrs
) -> Case:
    return Case(
        op,
        operands,
        attrs,
        domain=ML,
        note=note,
        outputs=outputs,
        of=[outputs - 1],
        symbolic=symbolic,
        evaluators=[Cast, *evaluators],
        atol=1e-5,
    )


X = np.array([[0.5, -1.2, 2.0], [1.5, 0.3, -0.7]])
THREE = {"coefficients": [0.1, -0.2, 0.3, 0.4, 0.5, -0.6, 0.7, 0.8, 0.9], "intercepts": [0.5, 0.1, -0.3]}
ONE = {"coefficients": [0.1, -0.2, 0.3], "intercepts": [0.5]}
SUPPORT = {
    "coefficients": [0.5, -1.0],
    "support_vectors": [0.1, 0.2, 0.3, -0.4, 0.5, 0.6],
    "n_supports": 2,
    "rho": [0.25],
    "kernel_params": [0.5, 0.25, 3.0],
}
ROWS = {0: (0,), 1: (0,)}
CASES = [
    case("Scaler", [(2, 3)], offset=[0.5, 1.0, -2.0], scale=[2.0, 0.5, -1.5]),
    case("Scaler", [(2, 3)], "one for all", offset=[0.5], scale=[2.0]),
    case("Imputer", [X], imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=-1.0),
    case("Imputer", [X], "nan", imputed_value_floats=[1.0], replaced_value_float=float("nan")),
    case("FeatureVectorizer", [(2, 3), (2, 1)], inputdimensions=[3, 1], evaluators=(FeatureVectorizer,), symbolic=ROWS),
    case(
        "FeatureVectorizer",
        [(2, 3), (2, 2)],
        "cut, filled up",
        inputdimensions=[2, 3],
        evaluators=(FeatureVectorizer,),
        symbolic=ROWS,
    ),
    case("ArrayFeatureExtractor", [(2, 4), np.array([[3, 0, 3]])]),
    case("ArrayFeatureExtractor", [(2, 2, 3), np.array([1, 2])], "rank 3"),
    *[case("Normalizer", [X], n, norm=n, evaluators=(Normalizer,)) for n in ("MAX", "L1", "L2")],
    case("Normalizer", [X[0]], "vector", norm="L2", evaluators=(Normalizer,)),
    case("LinearRegressor", [(2, 3)], **ONE),
    case("LinearRegressor", [(2, 3)], "three targets", targets=3, **THREE),
    *[
        case("LinearClassifier", [(2, 3)], p, outputs=2, classlabels_ints=[4, 5, 6], post_transform=p, **THREE)
        for p in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    ],
    *[case("SVMRegressor", [(2, 3)], k, kernel_type=k, **SUPPORT) for k in ("LINEAR", "POLY", "RBF", "SIGMOID")],
    replace(
        case("SVMRegressor", [(2, 3)], "no supports", coefficients=[0.5, 1.0, -1.0], rho=[0.25], n_supports=0),
        runtime=False,  # ONNX Runtime does not load it
    ),
]
test_rule = ladder("classical", CASES)
ONE_SCORE = [  # which the reference evaluator rounds to float32
    case("LinearClassifier", [(2, 3)], f"one score {p}", outputs=2, classlabels_ints=[0, 1], post_transform=p, **ONE)
    for p in ("NONE", "LOGISTIC")
]


def on_runtime(node: Case, x: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value and the cotangent of x, on ONNX Runtime in float32."""
    feeds = {"x0": x.astype(np.float32)} | {f"x{i}": v for i, v in enumerate(node.inputs) if i}
    name = f"y{node.outputs - 1}"
    back = vjp(node_model(node, feeds, dtype=np.float32), wrt="x0", of=name)
    run = session(back)
    given = {i.name: {**feeds, f"{name}_cotangent": u.astype(np.float32)}[i.name] for i in run.get_inputs()}
    return tuple(run.run([name, "x0_grad"], given))


@pytest.mark.parametrize("node", [c for c in CASES if c.runtime] + ONE_SCORE, ids=lambda c: c.id)
def test_the_kernel_computes_what_is_differentiated(node: Case) -> None:
    """Central differences of ONNX Runtime's own primal, with steps that float32 bears."""
    rng = np.random.default_rng(0)
    x = np.asarray(rng.standard_normal(node.inputs[0]) if isinstance(node.inputs[0], tuple) else node.inputs[0])
    node = replace(node, inputs=[x, *(rng.standard_normal(v) if isinstance(v, tuple) else v for v in node.inputs[1:])])
    feeds = {f"x{i}": v.astype(np.float32) if v.dtype.kind == "f" else v for i, v in enumerate(node.inputs)}
    run, name = session(node_model(node, feeds, dtype=np.float32)), f"y{node.outputs - 1}"
    wanted = [i.name for i in run.get_inputs()]

    def f(x: np.ndarray) -> np.ndarray:
        return run.run([name], {n: {**feeds, "x0": x.astype(np.float32)}[n] for n in wanted})[0].astype(np.float64)

    u = rng.standard_normal(f(x).shape)
    got = on_runtime(replace(node, inputs=[feeds[f"x{i}"] for i in range(len(node.inputs))]), x, u)
    np.testing.assert_allclose(got[0], f(x), rtol=1e-5)
    np.testing.assert_allclose(got[1], numeric_gradient(lambda x: np.vdot(u, f(x)), x, step=1e-2), atol=2e-2)


def test_what_was_missing_has_no_derivative() -> None:
    for missing in (-1.0, np.nan):
        x = np.array([[0.5, missing, 2.0], [missing, 0.3, -0.7]])
        node = case("Imputer", [x], imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=missing)
        y, g = on_runtime(node, x, np.ones((2, 3)))
        np.testing.assert_array_equal(g, [[1, 0, 1], [0, 1, 1]])
        np.testing.assert_allclose(y, [[0.5, 2, 2], [1, 0.3, -0.7]])


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_a_row_of_zeros(norm: str) -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    g = on_runtime(case("Normalizer", [x], norm=norm), x, np.array([[1.0, 2.0]] * 2))[1]
    assert np.isfinite(g).all()
    np.testing.assert_array_equal(g[0], 0)
    assert g[1].any()


def test_names_for_labels() -> None:
    x = np.ones((2, 3))
    node = case("LinearClassifier", [x], outputs=2, classlabels_strings=["a", "b", "c"], **THREE)
    g = on_runtime(node, x, np.array([[1, 0, 0], [0, 0, 2.0]]))[1]
    np.testing.assert_allclose(g, [[0.1, -0.2, 0.3], [1.4, 1.6, 1.8]], rtol=1e-6)


def test_one_score_for_two_classes_and_the_logistic_transform() -> None:
    x = X[:1]
    node = case("LinearClassifier", [x], outputs=2, classlabels_ints=[0, 1], post_transform="LOGISTIC", **ONE)
    z, g = on_runtime(node, x, np.array([[1.0, 3.0]]))
    p = z[0, 1]
    np.testing.assert_allclose(g, [2 * p * (1 - p) * np.array(ONE["coefficients"])], rtol=1e-5)


def test_which_side_it_is_on_has_derivative_zero() -> None:
    node = case("SVMRegressor", [X], kernel_type="RBF", one_class=1, **SUPPORT)
    np.testing.assert_array_equal(on_runtime(node, X, np.ones((2, 1)))[1], 0)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (case("LinearRegressor", [X], post_transform="PROBIT", **ONE), "PROBIT"),
        (case("SVMRegressor", [X], post_transform="LOGISTIC", kernel_type="RBF", **SUPPORT), "post_transform"),
        (
            case("LinearClassifier", [X], outputs=2, classlabels_ints=[0, 1], post_transform="SOFTMAX", **ONE),
            "one score for two classes",
        ),
    ],
    ids=lambda v: getattr(v, "op", v),
)
def test_what_is_not_settled_is_refused(node: Case, says: str) -> None:
    with pytest.raises(NotDifferentiable, match=says):
        on_runtime(node, X, np.ones((2, 1)))


def test_votes_are_refused() -> None:
    node = helper.make_node("SVMClassifier", ["x"], ["l", "z"], domain=ML, classlabels_ints=[0, 1])
    with pytest.raises(NoDerivative, match="votes"):
        vjp(of_rows(node), wrt="x")


def of_rows(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model of `nodes` from rows x to rows z."""
    infos = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3])]
    outs = [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["N", None])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(ML, 3)]
    return helper.make_model(helper.make_graph(list(nodes), "g", infos, outs), opset_imports=opsets, ir_version=10)


def test_a_pipeline() -> None:
    """Scaled, normalized, classified: types and shapes are known all the way."""
    make = helper.make_node
    nodes = [
        make("Imputer", ["x"], ["a"], domain=ML, imputed_value_floats=[0.0], replaced_value_float=float("nan")),
        make("Scaler", ["a"], ["b"], domain=ML, offset=[1.0, 2.0, 3.0], scale=[0.5, 1.0, 2.0]),
        make("FeatureVectorizer", ["b"], ["c"], domain=ML, inputdimensions=[3]),
        make("Normalizer", ["c"], ["d"], domain=ML, norm="L2"),
        make(
            "LinearClassifier",
            ["d"],
            ["l", "z"],
            domain=ML,
            classlabels_ints=[0, 1, 2],
            post_transform="SOFTMAX",
            **THREE,
        ),
    ]
    model = of_rows(*nodes)
    back = vjp(model, wrt="x")
    onnx.checker.check_model(back, full_check=True)
    run, u = session(back), np.array([[1.0, -2.0, 0.5], [0.3, 0.0, 1.0]], np.float32)
    plain = session(model)

    def f(x: np.ndarray) -> float:
        return float(np.vdot(u, plain.run(["z"], {"x": x.astype(np.float32)})[0]))

    (g,) = run.run([signature(back).gradients["x"]], {"x": X.astype(np.float32), "z_cotangent": u})
    np.testing.assert_allclose(g, numeric_gradient(f, X, step=1e-2), atol=2e-3)
