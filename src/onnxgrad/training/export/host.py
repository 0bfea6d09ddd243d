"""Train with exported step models: an example of a host that needs onnxruntime and numpy, and nothing else.

    python host.py train.npz --epochs 2 --batch-size 32 [--parts 4] [--small] [--save trained.npz]

It reads contract.json, state.npz and the models beside it. The arrays of the .npz file have the names of the inputs,
or of the columns that the model was trained on.
"""

import argparse
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime

Batch = dict[str, np.ndarray]
VERSION = 1


class HostError(ValueError):
    """An error that a user can fix, with one message."""


class Host:
    """The state, and the models that read and replace it. `small` puts memory before speed, with one thread."""

    def __init__(self, folder: str | Path, threads: int = 0, small: bool = False) -> None:
        self.folder = Path(folder)
        try:
            self.contract = json.loads((self.folder / "contract.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HostError(f"cannot read {self.folder / 'contract.json'}: {error}") from error
        if not isinstance(self.contract, dict) or self.contract.get("version") != VERSION:
            raise HostError(f"{self.folder / 'contract.json'} is not a contract of version {VERSION}")
        self.state = arrays(self.folder / "state.npz")
        self.rates = {name: np.float32(value) for name, value in self.contract["rates"].items()}
        self.plan = self.contract.get("plan", {})
        self._small = small or self.plan.get("small", False)
        self._threads = 1 if self._small else threads
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}

    def run(self, model: str, batch: Batch | None = None, **rates: float) -> Batch:
        """Run one model of the contract on the state. Stores new state, and returns the results."""
        about = self.contract["models"][model]
        if model not in self._sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self._threads
            options.log_severity_level = 4  # failures are raised, once
            if self._small:
                options.enable_cpu_mem_arena = options.enable_mem_pattern = False
                options.add_session_config_entry("session.disable_prepacking", "1")
            path = str(self.folder / about["file"])
            try:
                self._sessions[model] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # ONNX Runtime's exceptions share no base but this one
                raise HostError(f"cannot load {path}: {first_line(error)}") from error
        session = self._sessions[model]
        kinds = {i.name: i.type for i in session.get_inputs()}
        missing = [name for name in about["batch"] if name not in (batch or {})]
        if missing:
            raise HostError(f"{about['file']} takes {missing[0]}, which the batch does not have")
        feeds = {name: (batch or {})[name] for name in about["batch"]}
        feeds |= {ends["input"]: self.state[name] for name, ends in about["state"].items()}
        feeds |= {name: self.state[name] for name in about["reads"]}
        for name in about["rates"]:
            dtype = np.float64 if "double" in kinds[name] else np.float32
            feeds[name] = np.asarray(rates.get(name, self.rates.get(name, 0.0)), dtype)
        outputs = [ends["output"] for ends in about["state"].values()]
        wanted = list(dict.fromkeys([*outputs, *about["results"]]))
        try:
            found = dict(zip(wanted, session.run(wanted, feeds)))
        except Exception as error:
            raise HostError(f"{about['file']} does not run: {first_line(error)}") from error
        for name, ends in about["state"].items():
            self.state[name] = found[ends["output"]]
        return {name: found[name] for name in about["results"]}

    def prepared(self, batch: Batch) -> Batch:
        """`batch` as the model was trained: columns of a table joined by name, bytes of pictures scaled.

        Raises:
            HostError: a column is missing.
        """
        found, about = dict(batch), self.contract.get("preprocessing", {})
        for name, features in about.get("inputs", {}).items():
            columns = features["columns"]
            if name in found or not any(c in batch for c in columns):
                continue
            missing = [c for c in columns if c not in batch]
            if missing:
                raise HostError(f"the data have no column {missing[0]!r}, which the model was trained on")
            several = [batch[c].astype(np.float32) for c in columns]
            found[name] = np.stack(several, axis=1) if len(columns) > 1 else batch[columns[0]]
        images = about.get("images", {})
        for name in images.get("inputs", []):
            pixels = found.get(name)
            if pixels is not None and pixels.dtype == np.uint8 and pixels.ndim == 4:
                shape = (1, -1, 1, 1) if pixels.shape[1] in (1, 3) else (1, 1, 1, -1)
                mean, std = (np.reshape(images[k], shape) for k in ("mean", "std"))
                found[name] = ((pixels.astype(np.float32) / 255 - mean) / std).astype(np.float32)
        return found

    def step(self, batch: Batch) -> Batch:
        """One step, in parts where the contract plans it; its results."""
        parts = self.plan.get("parts", 1)
        return self.run("train", batch) if parts == 1 else self.step_in_parts(batch, parts)

    def step_in_parts(self, batch: Batch, parts: int) -> Batch:
        """One step from the gradients of parts of the batch, added up; the loss of the batch."""
        rows, loss = len(next(iter(batch.values()))), self.contract["loss"]
        losses, weights = [], []
        for k, chosen in enumerate(np.array_split(np.arange(rows), min(parts, rows))):
            part = {name: array[chosen] for name, array in batch.items()}
            results = self.run("gradient", part, gradient_keep=float(k > 0))
            weights.append(float(results.get("batch_weight", 1)))  # a sum has none
            losses.append(float(results[loss]) * weights[-1] if weights[-1] else 0.0)  # the mean of nothing is NaN
        self.run("update")
        total = sum(weights) if "batch_weight" in results else 1.0
        return {loss: np.asarray(np.sum(losses) / (total or np.nan), results[loss].dtype)}


def arrays(path: str | Path) -> Batch:
    """The arrays of an .npz file by name. Raises HostError if it cannot be read."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise HostError(f"cannot read {path} as .npz: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def positive(text: str) -> int:
    """A number of at least one."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> None:
    """Train on the arrays of an .npz file. Bad input is one message and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch-size", type=positive, help="default: as the contract plans, or 32")
    parser.add_argument("--parts", type=positive, help="default: as the contract plans, or 1")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="memory before speed")
    parser.add_argument("--save", help="where to write the state")
    options = parser.parse_args()
    try:
        train(options)
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def train(options: argparse.Namespace) -> None:
    """Take the steps that the command line asks for. Raises HostError for bad input."""
    host = Host(Path(__file__).parent, options.threads, options.small)
    data = host.prepared(arrays(options.data))
    used = {name: data[name] for name in host.contract["models"]["train"]["batch"] if name in data}
    lengths = {name: len(array) if array.ndim else 0 for name, array in used.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise HostError(f"the arrays of {options.data} need the same number of rows, and one at least: {lengths}")
    rows = next(iter(lengths.values()), 1)
    loss = host.contract["loss"]
    size, parts = options.batch_size or host.plan.get("batch_size", 32), options.parts or host.plan.get("parts", 1)
    for epoch in range(options.epochs):
        for low in range(0, rows, size):
            batch = {name: array[low : low + size] for name, array in used.items()}
            found = host.run("train", batch) if parts == 1 else host.step_in_parts(batch, parts)
            print(f"epoch {epoch + 1}  loss {float(found[loss])!r}", flush=True)
    if options.save:
        try:
            np.savez(options.save, **host.state)  # type: ignore[arg-type]
        except OSError as error:
            raise HostError(f"cannot write {options.save}: {error.strerror or error}") from error


if __name__ == "__main__":
    main()
