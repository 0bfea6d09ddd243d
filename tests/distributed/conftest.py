"""The models that ranks train, as files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.training.models import blobs, classifier


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, data to train on and data to measure."""
    folder = tmp_path_factory.mktemp("ranks")
    onnx.save(classifier(), folder / "m.onnx")
    np.savez(folder / "d.npz", **blobs(90))
    np.savez(folder / "v.npz", **blobs(300, 1))
    return folder
