"""Streams of PyTorch and of Hugging Face's datasets: a run over them is the run over their arrays."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.training import Trainer
from tests.training.nets import mlp

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
T = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
PAIRS = TensorDataset(torch.tensor(X), torch.tensor(T))


class Rows(IterableDataset):
    def __init__(self, form):
        self.form = form

    def __iter__(self):
        return (self.form(x, t) for x, t in PAIRS)


def _state(data, **settings):
    trainer = Trainer(mlp(), loss="mse", optimizer="sgd", learning_rate=0.1)
    trainer.fit(data, epochs=2, batch_size=16, **settings)
    return trainer.state()


def _check(data, **settings):
    wanted = _state({"x": X, "labels": T}, shuffle=False)
    for name, array in _state(data, **settings).items():
        np.testing.assert_array_equal(wanted[name], array)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders(workers):
    _check(DataLoader(PAIRS, batch_size=16, num_workers=workers))
    _check(
        DataLoader(
            PAIRS, batch_size=16, collate_fn=lambda rows: dict(zip(("x", "labels"), map(torch.stack, zip(*rows))))
        )
    )
    _check(DataLoader(Rows(lambda x, t: {"x": x, "labels": t}), batch_size=16))


def test_datasets_without_a_loader():
    _check(Rows(lambda x, t: (x, t)))
    _check(Rows(lambda x, t: {"inputs": {"x": x}, "labels": t.requires_grad_()}))
    _check(PAIRS, shuffle=False)


def test_streaming_datasets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": X, "labels": T})
    _check(whole.with_format("numpy"), shuffle=False)
    _check(whole.to_iterable_dataset())
    _check(whole.to_iterable_dataset().with_format("torch"))
    whole.to_parquet(tmp_path / "rows.parquet")
    _check(datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train", streaming=True,
                                 cache_dir=str(tmp_path / "cache")))  # fmt: skip


def test_lazy_frames_of_polars():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"x": list(X), "labels": list(T)}).lazy()
    _check(frame)
    _check(lambda: iter(frame.collect().iter_slices(7)))
