"""Streams on several ranks: a table that is fitted in one pass, killed within an epoch and resumed."""

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet
import pytest

from onnxgrad.distributed import Lost
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer
from tests.distributed.simulated import World
from tests.training.parallel.test_low_bandwidth import Dies

RNG = np.random.default_rng(0)
AGES = [None if i % 7 == 3 else float(i) for i in range(90)]
COLOURS = [["red", "green", None][i % 3] for i in range(90)]
TABLE = pa.table({"age": AGES, "colour": COLOURS, "goal": RNG.standard_normal(90)})


def fitted(size, data, folder=None, dies=None, **settings):
    """The states of `size` ranks after a run."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 5] x) => (float[N, 1] y) <float[5, 1] w = {0.1, 0.2, 0.3, 0.4, 0.5}> { y = MatMul (x, w) }""")

    def work(collective):
        how = {"loss": "mse", "labels": "goal", "optimizer": "adam", "learning_rate": 0.02}
        trainer = Trainer(model, distributed=collective, options=Options(threads=1, target="portable"), **how)
        table = {"inputs": {"x": "age,colour"}, "missing": "indicator", "standardize": True}
        run = {"batch_size": 16, "epochs": 2, "seed": 3, "progress": False, "checkpoint": folder}
        trainer.fit(data, callbacks=[Dies(*dies)] if dies else [], **table, **run, **settings)
        return trainer.state()

    return World(size).run(work)


@pytest.mark.parametrize("order", [{"stream": True}, {"shuffle_buffer": 20}], ids=str)
def test_a_table_that_is_streamed_goes_on_exactly(order, tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(TABLE, path, row_group_size=25)
    whole = fitted(2, path, tmp_path / "whole", checkpoint_seconds=0, **order)
    with pytest.raises((SystemExit, Lost)):
        fitted(2, path, tmp_path / "killed", (1, 9), checkpoint_seconds=0, **order)
    resumed = fitted(2, path, tmp_path / "killed", resume=True, **order)
    (alone,) = fitted(1, path, **order)
    for name, array in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], array)
        np.testing.assert_array_equal(resumed[1][name], array)
        np.testing.assert_allclose(alone[name], array, rtol=1e-4, atol=1e-6)
    if "stream" in order:
        (memory,) = fitted(1, TABLE, shuffle=False)
        np.testing.assert_allclose(memory["w"], whole[0]["w"], rtol=1e-4, atol=1e-6)
