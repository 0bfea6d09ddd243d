"""A trial of a model file in a subprocess: a file that ends ONNX Runtime ends no process of the user's."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput, warn_caller

#: Seconds after which a run counts as endless.
_PATIENCE = 60

#: Files of more bytes are loaded without packed copies of their weights, and not run.
_LARGE = 1 << 28

_SCRIPT = """
import sys
import numpy as np
import onnxruntime as ort

path, large = sys.argv[1], sys.argv[2] == "1"
try:
    path.encode()
except UnicodeEncodeError:
    path = open(path, "rb").read()
options = ort.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
if large:
    options.add_session_config_entry("session.disable_prepacking", "1")
try:
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
except Exception as error:
    print("refused", " ".join(str(error).split()))
    sys.exit()
print("loaded", flush=True)
TYPES = {"float": "f4", "double": "f8", "float16": "f2", "bool": "?", **{
    f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}}

def feeds(size):
    made = {}
    for value in session.get_inputs():
        dims = [d if isinstance(d, int) else 1 if i == 0 else size for i, d in enumerate(value.shape)]
        dtype = TYPES.get(value.type.removeprefix("tensor(").removesuffix(")"))
        if dtype is None or np.prod(dims, dtype=float) > 1 << 24:
            return None
        made[value.name] = np.full(dims, 0.5 if "f" in dtype else 0, dtype)
    return made

for size in [] if large else [1, 8, 64]:
    made = feeds(size)
    if made is None:
        break
    try:
        session.run(None, made)
        break
    except Exception:  # feeds that do not fit
        continue
print("ended", flush=True)
"""


def check_runs(path: Path, source: Path | None = None) -> None:
    """Load the model at `path` with stock ONNX Runtime, and run it once on small inputs, in a subprocess.

    Inputs that do not fit the model prove nothing about it. Operators that the CPU provider lacks cause a warning:
    another provider may have them.

    Args:
        path: a file that was written.
        source: the model that it was made from. If ONNX Runtime refuses that as well, there is a warning, no error.

    Raises:
        BadInput: ONNX Runtime refuses the file, or ends with a signal on it.
    """
    trial = _try_file(path)
    if trial is None:
        return
    if trial.returncode < 0:
        name, doing = signal.Signals(-trial.returncode).name, "runs" if "loaded" in trial.stdout else "loads"
        raise BadInput(
            f"ONNX Runtime ends with {name} when it {doing} {str(path)!r}, which was written\n"
            "  hint: please report it, with the model and the command"
        )
    refusal = _refusal(trial)
    if not refusal:
        return
    lacks = "NOT_IMPLEMENTED" in refusal or "is not a registered function/op" in refusal
    if lacks or (source is not None and (of_source := _try_file(source)) is not None and _refusal(of_source)):
        warn_caller(f"ONNX Runtime cannot run {str(path)!r} on the CPU here: {refusal[:200]}")
        return
    raise BadInput(f"ONNX Runtime refuses {str(path)!r}, which was written: {refusal[:400]}")


def _try_file(path: Path) -> subprocess.CompletedProcess[str] | None:
    """The subprocess that tried the file at `path`; None if it was still running after a minute."""
    beside = path.with_name(f"{path.name}.data")
    size = path.stat().st_size + (beside.stat().st_size if beside.exists() else 0)
    words = ["-c", _SCRIPT, str(path.absolute()), str(int(size > _LARGE))]
    try:
        return subprocesses.run([*subprocesses.PYTHON, *words], timeout=_PATIENCE, text=True)
    except subprocess.TimeoutExpired:
        return None


def _refusal(found: subprocess.CompletedProcess[str]) -> str:
    lines = found.stdout.splitlines()
    return next((line.removeprefix("refused ") for line in lines if line.startswith("refused ")), "")
