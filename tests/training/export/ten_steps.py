"""A step with everything that hosts have to get right, and what ten of them must come to: what host.py comes to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad.training import attach, export_step
from onnxgrad.training.export.host import Host
from tests.training.models import blobs, classifier

ROWS = 9


def rows() -> dict[str, np.ndarray]:
    """90 of them; labels do not count in the first five, the first of two parts of a batch."""
    data = blobs()
    data["labels"][:5] = -100
    return data


def exported_step(folder: Path) -> Path:
    """The folder, with the step, and with data.npz of 90 rows."""
    loss, dropout = "cross_entropy:ignore_index=-100", {"Tanh": 0.2}
    export_step(
        attach(classifier(), loss=loss, optimizer="adam", learning_rate=0.02, dropout=dropout, accumulate=True), folder
    )
    np.savez(folder / "data.npz", **rows())
    return folder


def compare(folder: Path, parts: int, printed: str, saved: Path) -> Host:
    """Compare losses and state of another host with those of host.py, which stands at the state of the other."""
    host, data, losses = Host(folder, 1), rows(), []
    for low in range(0, 10 * ROWS, ROWS):
        batch = {n: a[low : low + ROWS] for n, a in data.items()}
        losses.append(float((host.step(batch) if parts == 1 else host.step_in_parts(batch, parts))["loss"]))
    np.testing.assert_allclose([float(line.split()[-1]) for line in printed.splitlines()], losses, atol=1e-5)
    with np.load(saved) as end:
        assert set(end.files) == set(host.state)
        for name, array in host.state.items():
            assert (end[name].dtype, end[name].shape) == (array.dtype, array.shape)
            np.testing.assert_allclose(end[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
        host.state = dict(end)
    assert not list(saved.parent.glob("*.partial"))
    return host
