"""Train with exported step models: an example of a host that needs onnxruntime and numpy, and nothing else.

    python host.py train.npz --epochs 2 --batch-size 32 [--parts 4] [--save trained.npz]

It reads contract.json, state.npz and the models beside it. The arrays of the .npz file have the names of the inputs.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime

Batch = dict[str, np.ndarray]


class Host:
    """The state, and the models that read and replace it."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        self.folder = Path(folder)
        self.contract = json.loads((self.folder / "contract.json").read_text(encoding="utf-8"))
        with np.load(self.folder / "state.npz") as file:
            self.state = {name: file[name] for name in file.files}
        self.rates = {name: np.float32(value) for name, value in self.contract["rates"].items()}
        self._threads = threads
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}

    def run(self, model: str, batch: Batch | None = None, **rates: float) -> Batch:
        """Run one model of the contract on the state; what it renews is kept, its results are returned."""
        about = self.contract["models"][model]
        if model not in self._sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self._threads
            path = str(self.folder / about["file"])
            self._sessions[model] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        session = self._sessions[model]
        kinds = {i.name: i.type for i in session.get_inputs()}
        feeds = {name: (batch or {})[name] for name in about["batch"]}
        feeds |= {ends["input"]: self.state[name] for name, ends in about["state"].items()}
        feeds |= {name: self.state[name] for name in about["reads"]}
        for name in about["rates"]:
            dtype = np.float64 if "double" in kinds[name] else np.float32
            feeds[name] = np.asarray(rates.get(name, self.rates.get(name, 0.0)), dtype)
        outputs = [ends["output"] for ends in about["state"].values()]
        wanted = list(dict.fromkeys([*outputs, *about["results"]]))
        found = dict(zip(wanted, session.run(wanted, feeds)))
        for name, ends in about["state"].items():
            self.state[name] = found[ends["output"]]
        return {name: found[name] for name in about["results"]}

    def step(self, batch: Batch) -> Batch:
        """One step; its results."""
        return self.run("train", batch)

    def step_in_parts(self, batch: Batch, parts: int) -> Batch:
        """One step from the gradients of parts of the batch, added up; the mean loss of the parts."""
        rows = len(next(iter(batch.values())))
        losses = []
        for k, chosen in enumerate(np.array_split(np.arange(rows), min(parts, rows))):
            part = {name: array[chosen] for name, array in batch.items()}
            results = self.run("gradient", part, gradient_keep=float(k > 0))
            losses.append(results[self.contract["loss"]])
        self.run("update")
        return {self.contract["loss"]: np.asarray(np.mean(losses))}


def main() -> None:
    """Train on the arrays of an .npz file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", help="where to write the state")
    options = parser.parse_args()
    host = Host(Path(__file__).parent, options.threads)
    with np.load(options.data) as file:
        data = {name: file[name] for name in file.files}
    rows = len(next(iter(data.values())))
    loss = host.contract["loss"]
    for epoch in range(options.epochs):
        for low in range(0, rows, options.batch_size):
            batch = {name: array[low : low + options.batch_size] for name, array in data.items()}
            found = host.step(batch) if options.parts == 1 else host.step_in_parts(batch, options.parts)
            print(f"epoch {epoch + 1}  loss {float(found[loss])!r}", flush=True)
    if options.save:
        np.savez(options.save, **host.state)


if __name__ == "__main__":
    main()
