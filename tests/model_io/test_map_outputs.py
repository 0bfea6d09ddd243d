"""Models that end in dictionaries: the default of skl2onnx is differentiated and trained like any other."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from tests.training.nets import run

ML = "ai.onnx.ml"


def zipped():
    """The model that skl2onnx writes for a binary MLP: labels, and a ZipMap of (1 - p, p)."""
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]>
        net (float[N, 4] X) => (int64[M] label)
        <float[1] unity = {1}, int32[2] classes = {0, 1}, int64[1] flat = {-1}> {
            h = MatMul (X, w1)
            a = Relu (h)
            s = MatMul (a, w2)
            p = Sigmoid (s)
            q = Sub (unity, p)
            both = Concat <axis = 1> (q, p)
            at = ArgMax <axis = 1> (both)
            picked = ai.onnx.ml.ArrayFeatureExtractor (classes, at)
            shaped = Reshape (picked, flat)
            label = Cast <to = 7> (shaped)
            named = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (both)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (4, 6)), ("w2", (6, 1))):
        net.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    row = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    net.graph.output.append(helper.make_value_info("named", helper.make_sequence_type_proto(row)))
    onnx.checker.check_model(net, full_check=True)
    return net


@pytest.mark.filterwarnings("ignore:the output 'named'")
def test_what_comes_before_a_zipmap_is_differentiated():
    with pytest.warns(UserWarning, match="the output 'named' is the tensor 'both' here; the ZipMap"):
        derived = onnxgrad.grad(zipped(), wrt="X", of="named")
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    (total,) = run(derived, {"X": x}).values()
    np.testing.assert_allclose(total, 0, atol=1e-6, err_msg="1 - p + p does not change")
    (found,) = run(onnxgrad.grad(zipped(), wrt="X", of="p"), {"X": x}).values()
    w1, w2 = (numpy_helper.to_array(t).astype(np.float64) for t in zipped().graph.initializer[-2:])
    h = x @ w1
    p = 1 / (1 + np.exp(-np.maximum(h, 0) @ w2))
    np.testing.assert_allclose(found, (p * (1 - p) * w2.T * (h > 0)) @ w1.T, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the output 'named'")
def test_a_model_that_ends_in_a_zipmap_is_trained(tmp_path):
    """From the file; the labels of the trained model are those of the probabilities that it has learned."""
    onnx.save(zipped(), tmp_path / "m.onnx")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    labels = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    trainer = Trainer(tmp_path / "m.onnx", loss="cross_entropy", optimizer="adam", learning_rate=0.05)
    trainer.fit({"X": x, "labels": labels}, epochs=30, batch_size=16)
    trained = trainer.inference_model()
    found = run(trained, {"X": x})
    assert (found["label"] == labels).mean() > 0.95
    np.testing.assert_array_equal(found["named"].argmax(1), found["label"])


def test_maps_that_nothing_stands_for_are_refused():
    net = zipped()
    keys = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    net.graph.input.append(helper.make_value_info("words", keys))
    net.graph.node.insert(0, helper.make_node("CastMap", ["words"], ["unused"], domain=ML, cast_to="TO_FLOAT"))
    with pytest.raises(BadInput, match="the input 'words' of the model is a map, which is no tensor"):
        onnxgrad.grad(net, wrt="X", of="p")
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "own": 1]>
        net (float[N] X) => (float[N] y) { y = Neg (X)  m = own.Words (X) }""")
    net.graph.output.append(helper.make_value_info("m", keys))
    with pytest.raises(BadInput, match=r"the output 'm' of the model is a map.*\n  hint: drop that output"):
        onnxgrad.grad(net, wrt="X", of="y")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mlp", "sgd"])
@pytest.mark.parametrize("classes", [2, 3])
def test_what_skl2onnx_exports_is_trained(kind, classes):
    """Trained on, from random weights, by the loss of the probabilities before the ZipMap."""
    skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx")
    linear_model = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    neural_network = pytest.importorskip("sklearn.neural_network", reason="needs scikit-learn")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 4)).astype(np.float32)
    labels = x[:, :classes].argmax(1)
    make = {
        "mlp": lambda: neural_network.MLPClassifier((8,), max_iter=1, random_state=0),
        "sgd": lambda: linear_model.SGDClassifier(loss="log_loss", alpha=1.0, max_iter=1, tol=None, random_state=0),
    }[kind]
    fitted = make().fit(x[:8], [*range(classes), *labels[classes:8]])
    exported = skl2onnx.to_onnx(fitted, x[:1])
    trainer = Trainer(exported, loss="cross_entropy", optimizer="adam", learning_rate=0.05)
    trainer.fit({"X": x, "labels": labels}, epochs=40, batch_size=16)
    found = run(trainer.inference_model(), {"X": x})
    assert (found["output_label"] == labels).mean() > 0.9
