"""``python -m tests.fuzz --guided models [--seconds 600]``: inputs that reach code which none before has reached.

libFuzzer, through atheris (which is no requirement: ``pip install atheris``), watches the lines of onnxgrad that a case
runs, and goes on from those that run new ones. Targets: "models" are opened, examined and differentiated,
"checkpoints" are loaded, "data" are read into fields. As everywhere, only an ``OnnxGradError`` may come out, in little
time and memory. What else comes out is told once for each kind, and its bytes are kept in ``--keep``.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["onnxgrad"]):
    from tests.fuzz import __main__ as fuzz

import onnx
from google.protobuf.message import DecodeError

from onnxgrad import OnnxGradError
from onnxgrad.training.loop.checkpoint import Checkpoint

#: The kinds of files of the target "data"; the first byte of a case chooses one.
_DATA = (".npz", ".npy", ".parquet", ".arrow")
_LONGEST = 1 << 16


def seeds(target: str) -> list[bytes]:
    """Valid cases to begin with."""
    if target == "models":
        return [m.SerializeToString() for m in fuzz.models()]
    if target == "checkpoints":
        return [content for suffix, content in fuzz.files() if suffix == ".safetensors"]
    held = [(s, c) for s, c in fuzz.files() if s in _DATA]
    return [bytes([_DATA.index(suffix)]) + content for suffix, content in held]


def attempt(target: str, data: bytes, folder: Path) -> None:
    """Do what is done with a file of these bytes."""
    if target == "models":
        path = folder / "m.onnx"
        path.write_bytes(data)
        fuzz.use_model(path)
    elif target == "checkpoints":
        path = folder / "c.safetensors"
        path.write_bytes(data)
        Checkpoint.load(path)
    elif data:
        path = folder / f"x{_DATA[data[0] % len(_DATA)]}"
        path.write_bytes(data[1:])
        fuzz.use_data(path)


def mutated(data: bytes, size: int, seed: int) -> bytes:
    """Half of the models have fields changed, and stay messages; all else is libFuzzer's."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        try:
            found = fuzz.changed(onnx.ModelProto.FromString(data), rng).SerializePartialToString()
        except (DecodeError, ValueError, TypeError):
            return atheris.Mutate(data, size)
        return found if len(found) <= size else data
    return atheris.Mutate(data, size)


def watched(target: str, folder: Path, keep: Path) -> Callable[[bytes], None]:
    """The function that libFuzzer calls for each case."""
    known: set[str] = set()

    def one(data: bytes) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(target, data, folder)
        except OnnxGradError:
            pass
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            kind = f"{type(error).__name__} {[(f.filename, f.lineno) for f in frames]}"
            if kind not in known:
                known.add(kind)
                place = keep / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
                place.write_bytes(data)
                print(f"--- {place}\n{traceback.format_exc()}", flush=True)

    return one


def main() -> None:
    """Run libFuzzer until the time is over; it ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=fuzz.TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", type=Path, required=True)
    args = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        folder, corpus = Path(name), Path(name, "corpus")
        corpus.mkdir()
        for k, seed in enumerate(seeds(args.target)):
            (corpus / str(k)).write_bytes(seed)
        options = [f"-max_total_time={args.seconds}", f"-timeout={fuzz.SECONDS}", f"-max_len={_LONGEST}"]
        options += [
            f"-rss_limit_mb={fuzz.MEMORY >> 20}",
            f"-artifact_prefix={args.keep}/{args.target}-",
            "-verbosity=0",
        ]
        mutator = {"custom_mutator": mutated} if args.target == "models" else {}
        atheris.Setup([sys.argv[0], *options], watched(args.target, folder, args.keep), **mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
