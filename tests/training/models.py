"""Small models and data for tests of training."""

import numpy as np
import onnx

from onnxgrad.training import attach


def classifier(hidden: int = 8, batch: int | str = "N", softmax: bool = False) -> onnx.ModelProto:
    """float32[N, 6] x → float32[N, 3] y."""
    rng = np.random.default_rng(0)
    last = "z" if softmax else "y"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        classifier (float[{batch}, 6] x) => (float[{batch}, 3] y) {{
            h = MatMul (x, w1)
            hb = Add (h, b1)
            a = Tanh (hb)
            {last} = MatMul (a, w2)
            {"y = Softmax (z)" if softmax else ""}
        }}""")
    weights = {
        "w1": rng.standard_normal((6, hidden)) * 0.4,
        "b1": np.zeros(hidden),
        "w2": rng.standard_normal((hidden, 3)) * 0.4,
    }
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.checker.check_model(model, full_check=True)
    return model


def blobs(rows: int = 90, seed: int = 0) -> dict[str, np.ndarray]:
    """Three clouds that `classifier` can tell apart."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((3, 6)) * 1.5
    labels = rng.integers(0, 3, rows)
    x = centres[labels] + rng.standard_normal((rows, 6)) * 0.5
    return {"x": x.astype(np.float32), "labels": labels.astype(np.int64)}


def trainable(
    optimizer: str = "adam", learning_rate: float = 0.02, loss: str = "cross_entropy", **options
) -> onnx.ModelProto:
    return attach(classifier(), loss=loss, optimizer=optimizer, learning_rate=learning_rate, **options)
