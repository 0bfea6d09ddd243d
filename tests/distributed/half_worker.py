"""Each rank of `test_precision`: steps with products in 16 bits on the CPU, which is declared to have them.

The batch of the second step holds an infinite element of the last rank. The state after each step goes to a file.
"""

import os
import sys
from pathlib import Path

import numpy as np

from onnxgrad.runtime import Options
from onnxgrad.training import Trainer
from onnxgrad.training.step import precision as of_step
from tests.training.nets import mlp

of_step.takes = of_step.has_kernel = lambda *asked: True
options = Options(threads=1, target="portable", providers=("AzureExecutionProvider", "CPUExecutionProvider"))
shard = {"shard_optimizer": True} if "shard" in sys.argv else {}
trainer = Trainer(mlp(), loss="mse", optimizer="adam", learning_rate=0.05, precision="fp16", options=options,
                  distributed="torch", **shard)  # fmt: skip
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rng = np.random.default_rng(0)
x, labels = (rng.standard_normal((12, n)).astype(np.float32) for n in (4, 3))
found: dict[str, np.ndarray] = {}
for step in range(6):
    own = slice(rank * 12 // size, (rank + 1) * 12 // size)
    given = x.copy()
    if step == 1:
        given[-1, 2] = np.inf
    results = trainer.machine.step({"x": given[own], "labels": labels[own]})
    state = trainer.machine.state()
    found |= {f"{step}/{n}": state[n] for n in ("w1", "b1", "w2", "b2", "loss_scale", "good_steps")}
    found[f"{step}/loss"] = results["loss"]
np.savez(Path(sys.argv[1]) / f"{rank}.npz", **found)
