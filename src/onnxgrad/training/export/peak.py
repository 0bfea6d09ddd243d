"""A limit of memory for the whole process of a host: exports are run by one until a plan is measured within it.

Where a C++ compiler finds the headers of ONNX Runtime and nlohmann/json, the host is `host.hpp` on the library of the
onnxruntime package; else it is `host.py`, whose process has Python in it. Plans are tried from the fastest to the
smallest: all as it is, memory before speed, results computed anew and batches in parts, adapters, fewer layers. The
plan is a part of the contract, and hosts keep to it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.files import replacing
from onnxgrad.model_io import load_model
from onnxgrad.remat import amount
from onnxgrad.remat.budget import OverBudget, megabytes
from onnxgrad.training.export.files import export_step
from onnxgrad.training.loop.peak import (
    Settings,
    changed,
    check_platform,
    choose,
    fit_memory,
    headroom,
    in_words,
    limit_for,
    plans,
)
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.loop.sparse_update import example_arrays

_STEPS = 3
#: Starts a program, and prints the largest resident memory that it had, in KiB. A process of its own is small.
_CODE = """import os, resource, sys
code = os.spawnv(os.P_WAIT, sys.argv[1], sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)"""


def export_within_peak(
    model: ir.Model,
    attach: Callable[[Recipe], ir.Model],
    folder: Path,
    recipe: Recipe,
    peak: int | str,
    batch_size: int,
    target: str = "any",
) -> tuple[dict[str, Any], str]:
    """Export the first plan with which a host is measured within `peak`: the contract, and a note.

    Args:
        model: without training information.
        attach: makes the training model of a recipe.
        folder: is made; files in it are replaced.
        recipe: the settings of the algorithm, and sizes of open dimensions.
        peak: bytes, or an amount.
        batch_size: rows of a batch.
        target: see `export_step`.

    Raises:
        BadInput: no plan is; the message has the smallest limit that can be met.
    """
    check_platform()
    limit = amount(peak)
    most, dims = limit - headroom(limit), recipe.step.dims
    groups: list[list[Settings]] = [[{}], [{"small": True}]]
    groups += [[{**plan, "small": True} for plan in group] for group in plans(recipe, batch_size, model)[1:]]

    def write(settings: Settings, place: Path) -> dict[str, Any]:
        parts = settings.get("accumulate", 1)
        memory, rows = settings.get("memory"), -(-batch_size // parts)
        source = attach(changed(recipe, settings))
        contract = export_step(source, place, target=target, memory=memory, batch_size=rows, dims=dims)
        plan = {"batch_size": batch_size, "parts": parts, "small": settings.get("small", False)}
        contract["plan"] = plan | {key: n for key, n in contract.get("plan", {}).items() if key not in plan}
        with replacing(place / "contract.json") as file:
            file.write_text(json.dumps(contract, indent=1) + "\n", encoding="utf-8")
        return contract

    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as scratch:
        host, device = build_host(Path(scratch)), Path(scratch, "device")

        def measured(settings: Settings) -> dict[str, float]:
            try:
                contract = write(settings, device)
            except OverBudget as error:
                return {"least": error.least}
            grown = host_memory(host, device, contract, batch_size, dims)
            return {"grown": grown, "plain": contract["plan"].get("result_bytes", 0)}

        settings, taken = choose(groups, lambda s: fit_memory(s, measured, most, s is groups[-1][-1]), most)
    said = f"{in_words(settings)}; measured with {'host.py' if host is None else 'host.hpp'}"
    if taken > most:
        raise BadInput(
            f"no host trains with batches of {batch_size} rows within {megabytes(limit)}: the smallest limit that can "
            f"be met is {megabytes(limit_for(taken))} ({said})"
        )
    return write(settings, folder), f"{megabytes(taken)} measured within {megabytes(limit)}: {said}"


def build_host(folder: Path) -> Path | None:
    """Compile the host in C++ in `folder`; None where that is not possible."""
    compiler = subprocesses.which("g++") or subprocesses.which("clang++")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if compiler is None or library is None:
        return None
    program, source = folder / "host", Path(__file__).with_name("host.hpp")
    (folder / "libonnxruntime.so.1").symlink_to(library)  # as it is called in the library itself
    command = [compiler, "-std=c++17", "-Os", "-DONNXGRAD_HOST_MAIN", "-isystem", "/usr/include/onnxruntime"]
    command += ["-x", "c++", str(source), "-x", "none", str(library), f"-Wl,-rpath,{folder}", "-o", str(program)]
    return None if subprocesses.run(command).returncode else program


def host_memory(
    host: Path | None, device: Path, contract: dict[str, Any], batch_size: int, dims: Any = None
) -> float:  # fmt: skip
    """The largest resident memory of the process of a host, in bytes, that trains for a few steps and saves.

    Args:
        host: the program of `build_host`; None: host.py.
        device: the folder of an export.
        contract: of the export.
        batch_size: rows of a batch.
        dims: sizes of open dimensions of a batch.

    Raises:
        BadInput: the host refuses the export.
    """
    model = load_model(device / "train.onnx")
    batch = example_arrays(model, contract["models"]["train"]["batch"], batch_size, dims)
    np.savez(device / "data.npz", **batch)  # type: ignore[arg-type]
    program = [sys.executable, str(device / "host.py")] if host is None else [str(host), "--folder", str(device)]
    words = [*program, str(device / "data.npz"), "--epochs", str(_STEPS), "--save", str(device / "saved.npz")]
    done = subprocesses.run([*subprocesses.PYTHON, "-c", _CODE, *words], text=True)
    if done.returncode:
        raise BadInput((done.stderr.strip().splitlines() or ["the host fails"])[-1].removeprefix("error: "))
    return 1024.0 * float(done.stdout.split()[-1])
