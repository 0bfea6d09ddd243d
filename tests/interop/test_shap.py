"""SHAP takes an .onnx model: its plots draw our values, which are SHAP's own where these are exact."""

import numpy as np
import onnx
import pytest

shap = pytest.importorskip("shap", reason="no shap")
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import onnxgrad  # noqa: E402
from onnxgrad.errors import BadInput  # noqa: E402
from onnxgrad.interop.shap import explanation  # noqa: E402

RNG = np.random.default_rng(0)
NAMES = ["a", "b", "c"]


def model(last: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 3] x) => (float[N, 2] y) {{
            z = MatMul (x, w)
            y = {last} (z)
        }}""")
    array = RNG.standard_normal((3, 2)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return proto


def test_of_a_linear_model_values_are_those_of_shap():
    net, background = model("Identity"), RNG.standard_normal((400, 3)).astype(np.float32)
    x = RNG.standard_normal((4, 3)).astype(np.float32)
    found = explanation(net, x, background, target=1, names=NAMES)
    f = onnxgrad.Function(net)
    exact = shap.explainers.Exact(
        lambda rows: np.asarray(f(rows.astype(np.float32)))[:, 1], shap.maskers.Independent(background, 400)
    )(x)
    np.testing.assert_allclose(found.values, exact.values, atol=1e-5)
    np.testing.assert_allclose(found.base_values, exact.base_values, atol=1e-5)


def test_values_add_up_to_the_output():
    """Of a curved model, expected gradients (Aumann-Shapley) are other numbers than Shapley values, of the same sum."""
    net, background = model("Tanh"), RNG.standard_normal((80000, 3)).astype(np.float32)
    x = RNG.standard_normal((4, 3)).astype(np.float32)
    found = explanation(net, x, background, target=0)
    total = found.values.sum(1) + found.base_values
    np.testing.assert_allclose(total, onnxgrad.Function(net)(x)[:, 0], atol=0.02)


def test_its_plots_draw_them(tmp_path):
    import matplotlib.pyplot as plt

    found = explanation(model("Tanh"), *RNG.standard_normal((2, 20, 3)), target=0, names=NAMES)
    for draw in (lambda: shap.plots.waterfall(found[0], show=False), lambda: shap.plots.beeswarm(found, show=False),
                 lambda: shap.plots.bar(found, show=False)):  # fmt: skip
        plt.figure()
        draw()
        labels = {t.get_text().split(" = ")[-1] for axis in plt.gcf().axes for t in axis.get_yticklabels()}
        assert set(NAMES) <= labels
        plt.close("all")


def test_several_numbers_for_a_row_are_refused():
    with pytest.raises(BadInput, match="say which column with target="):
        explanation(model("Tanh"), *RNG.standard_normal((2, 5, 3)))
