"""An .onnx classifier in the Adversarial Robustness Toolbox: its gradients, and its attacks."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput, UnknownName

pytest.importorskip("art", reason="adversarial-robustness-toolbox is not installed")
from art.attacks.evasion import CarliniL2Method, DeepFool, FastGradientMethod, ProjectedGradientDescentNumpy
from art.defences.preprocessor import FeatureSqueezing

from onnxgrad.interop.art import Classifier

RNG = np.random.default_rng(0)
W, B = RNG.standard_normal((6, 4)), RNG.standard_normal(4)


def model(tail="y = Identity(s)", dtype="double"):
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({dtype}[N, 6] x) => ({dtype}[N, 4] y) '
        f"{{ t = Tanh(x)\n m = MatMul(t, w)\n s = Add(m, b)\n {tail} }}"
    )
    for name, array in {"w": W, "b": B}.items():
        array = array.astype(np.float32 if dtype == "float" else np.float64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def slope(f, x, step=2.0**-11):
    """Central differences of the numbers that `f` gives per example; ART rounds `x` to float32, so all is in 1/2048."""
    found = np.zeros((*f(x).shape, x.shape[1]))
    for i in range(x.shape[1]):
        move = np.zeros_like(x)
        move[:, i] = step
        found[..., i] = (f(x + move) - f(x - move)) / (2 * step)
    return found


@pytest.mark.parametrize(("tail", "probabilities"), [("y = Identity(s)", False), ("y = Softmax(s)", True)])
def test_gradients_of_the_loss_and_of_classes(tail, probabilities):
    f = Classifier(model(tail), probabilities=probabilities)
    x, labels = np.rint(512 * RNG.standard_normal((5, 6))) / 512, np.array([0, 3, 1, 1, 2])
    assert (f.input_shape, f.nb_classes) == ((6,), 4)
    scores = f.predict(x, batch_size=2)
    odds = scores if probabilities else np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(f.compute_loss(x, labels), -np.log(odds[np.arange(5), labels]), rtol=1e-12)
    np.testing.assert_allclose(
        f.loss_gradient(x, labels), slope(lambda z: f.compute_loss(z, labels), x), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(f.loss_gradient(x, np.eye(4, dtype=np.uint8)[labels]), f.loss_gradient(x, labels))
    soft = RNG.dirichlet(np.ones(4), 5)
    np.testing.assert_allclose(
        f.loss_gradient(x, soft), slope(lambda z: f.compute_loss(z, soft), x), rtol=1e-5, atol=1e-6
    )
    every = f.class_gradient(x)
    np.testing.assert_allclose(every, slope(f.predict, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(f.class_gradient(x, 2), every[:, 2:3])
    np.testing.assert_array_equal(f.class_gradient(x, labels), every[np.arange(5), labels][:, None])
    for layer in ("t", f.layer_names.index("t")):
        np.testing.assert_allclose(f.get_activations(x, layer, batch_size=2), np.tanh(x), rtol=1e-14)


def test_attacks_find_what_is_taken_for_another_class(tmp_path):
    f = Classifier(model(dtype="float"), clip_values=(-2, 2))
    x = RNG.uniform(-1, 1, (8, 6)).astype(np.float32)
    taken = f.predict(x).argmax(1)
    for attack in (
        FastGradientMethod(f, eps=1.2),
        ProjectedGradientDescentNumpy(f, eps=1.2, eps_step=0.2, max_iter=10, verbose=False),
        DeepFool(f, max_iter=50, epsilon=0.02, verbose=False),
        CarliniL2Method(f, max_iter=20, learning_rate=0.1, initial_const=1.0, verbose=False),
    ):
        moved = attack.generate(x)
        assert np.abs(moved).max() <= 2
        assert (f.predict(moved).argmax(1) != taken).mean() > 0.5, type(attack).__name__
    f.save("copy.onnx", str(tmp_path))
    np.testing.assert_array_equal(Classifier(tmp_path / "copy.onnx").predict(x), f.predict(x))


def test_what_art_does_before_the_model_is_part_of_it():
    f = Classifier(model(dtype="float"), clip_values=(0, 1), preprocessing=(0.5, 2.0))
    bare = Classifier(model(dtype="float"))
    x = RNG.uniform(0, 1, (3, 6)).astype(np.float32)
    np.testing.assert_allclose(f.predict(x), bare.predict((x - 0.5) / 2), rtol=1e-6)
    np.testing.assert_allclose(
        f.loss_gradient(x, [1, 2, 3]), bare.loss_gradient((x - 0.5) / 2, [1, 2, 3]) / 2, rtol=1e-5
    )
    squeezed = Classifier(
        model(dtype="float"), clip_values=(0, 1), preprocessing_defences=FeatureSqueezing((0, 1), bit_depth=1)
    )
    np.testing.assert_allclose(squeezed.predict(x), bare.predict(np.rint(x)), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "how", "error", "says"),
    [
        ("(float[N, 2] x, float[N, 2] z) => (float[N, 2] y) { y = Add(x, z) }", {}, BadInput, "one input"),
        ("(float[N, 2] x) => (float[N, K] y) { y = Identity(x) }", {}, BadInput, "number of classes"),
        ("(float[N, 2] x) => (float[N, 2] y) { y = Identity(x) }", {"of": "z"}, UnknownName, "'z'"),
    ],
)
def test_models_that_are_no_classifiers_are_refused(text, how, error, says):
    with pytest.raises(error, match=says):
        Classifier(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'), **how)


def test_art_does_not_train():
    with pytest.raises(BadInput, match=r"onnxgrad\.train"):
        Classifier(model()).fit(np.zeros((1, 6)), [0])


@pytest.mark.skipif(find_spec("rapidocr_onnxruntime") is None, reason="rapidocr-onnxruntime is not installed")
def test_pgd_turns_a_line_of_text_upside_down():
    """The packaged classifier of text directions (0° or 180°) is fooled by noise of 2 % of the range."""
    (path,) = Path(find_spec("rapidocr_onnxruntime").origin).parent.glob("models/*cls*.onnx")
    f = Classifier(path, probabilities=True, clip_values=(-1, 1))
    line = np.ones((1, 3, 48, 192), np.float32)
    line[:, :, 8:40, 20:170:6] = -1  # strokes
    line[:, :, 30:34, 20:170] = -1
    before = f.predict(line)
    moved = ProjectedGradientDescentNumpy(f, eps=0.04, eps_step=0.01, max_iter=5, verbose=False).generate(line)
    assert np.abs(moved - line).max() <= 0.04 + 1e-6
    assert f.predict(moved)[0, before.argmax()] < before.max() - 0.2
