"""The pass of Olive in one of its workflows, before one of Olive's own passes."""

import numpy as np
import onnx
import pytest

from onnxgrad.training import evaluate
from tests.training.nets import mlp


@pytest.mark.complete
def test_a_workflow_trains_and_goes_on(tmp_path):
    try:  # its dependencies fail in many ways, such as torchvision beside another PyTorch
        from olive.workflows import run

        from onnxgrad.interop.olive import package_config
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no olive-ai that can be imported: {error}")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4)).astype(np.float32)
    rows = {"x": x, "labels": x[:, :3]}
    np.savez(tmp_path / "rows.npz", **rows)
    onnx.save(mlp(), tmp_path / "model.onnx")
    settings = {"loss": "mse", "epochs": 10, "learning_rate": 0.02}
    config = {
        "input_model": {"type": "ONNXModel", "model_path": str(tmp_path / "model.onnx")},
        "passes": {
            "train": {"type": "OnnxGradTraining", "data": str(tmp_path / "rows.npz"), "settings": settings},
            "opset": {"type": "OnnxOpVersionConversion", "target_opset": 22},
        },
        "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"),
        "evaluate_input_model": False,
    }
    (found,) = run(config, package_config=package_config()).get_output_models()
    after = onnx.load(found.model_path)
    assert after.opset_import[0].version == 22
    assert evaluate(after, rows).metrics["rmse"] < 0.5 * evaluate(mlp(), rows).metrics["rmse"]
