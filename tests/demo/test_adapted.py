"""``onnxgrad demo … --lora``: adapters in the place of all weights."""

import numpy as np
import onnx

from onnxgrad import load_adapter
from onnxgrad.demo import tasks
from tests.cli.said import said
from tests.training.models import blobs, classifier


def test_adapters_in_a_demonstration(tmp_path, monkeypatch):
    task = tasks.Task(
        model=classifier,
        data=lambda: (blobs(), blobs(seed=1)),
        recipe={"loss": "cross_entropy", "optimizer": "adamw", "learning_rate": 1e-9},
        epochs=2,
        batch_size=32,
        adapted={"learning_rate": 0.05, "train_also": ["b1"], "targets": "all"},
    )
    monkeypatch.setitem(tasks.TASKS, "small", task)
    text = said(tmp_path, "demo small --lora 2 -o PLACE/out")
    assert "adapts 2 weights" in text
    assert "adapter" in text
    before, after = (onnx.load(tmp_path / "out" / f"small-{what}.onnx") for what in ("before", "trained"))
    assert len(before.graph.node) == len(after.graph.node), "adapters are merged"
    loaded = load_adapter(before, tmp_path / "out" / "adapter", merge=True)
    arrays = [{t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (before, loaded, after)]
    for name, array in arrays[2].items():
        assert (array != arrays[0][name]).any(), "they take steps of their own size"
        np.testing.assert_allclose(arrays[1][name], array, atol=1e-6)


def test_what_is_not_pretrained_has_no_adapters(tmp_path):
    text = said(tmp_path, "demo digits --lora 4 -o PLACE/out", code=2)
    assert "no pretrained weights to adapt; there are: reviews" in text
    assert not (tmp_path / "out").exists()
