"""Training for a host that has nothing but an ONNX runtime: models, the first state, and a contract that explains them.

| file | inputs | outputs |
|---|---|---|
| ``train.onnx`` | batch, state, rates | next state, results |
| ``gradient.onnx`` | batch, parameters, bucket and its total, ``gradient_keep`` | next bucket and total, results |
| ``update.onnx`` | state, bucket and its total, rates | next state |
| ``evaluate.onnx`` | batch, parameters | loss, predictions |
| ``infer.onnx`` | inputs of the model, parameters | outputs of the model |
| ``state.npz`` | | the first state, by name |
| ``contract.json`` | | which inputs and outputs of each file are what |
| ``tokenizer.json`` | | the tokenizer that the model was trained with, if any |
| ``host.py`` | | a host in Python: onnxruntime and numpy, nothing else |
| ``host.mjs`` | | a host for Node and browsers: onnxruntime-node or onnxruntime-web, nothing else |
| ``host.hpp`` | | a host in C++: ONNX Runtime's C++ API and nlohmann/json, nothing else |

A host keeps the state as tensors by name. To take a step it feeds a batch, the state and the rates to ``train.onnx``,
and takes each next value for the value. To train with less memory, or on several devices, it feeds parts of a batch to
``gradient.onnx`` (``gradient_keep`` 0 for the first and 1 for the others), and then the bucket to ``update.onnx``;
buckets and totals of several devices may be added up in between.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import make_folder, replacing
from onnxgrad.ir.graph import into_input, prune, required_inputs, values_read
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import normal_domain, not_none
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, save_model
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.export.for_web import for_web, narrow_float64
from onnxgrad.training.export.web_report import report_on
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.loop.evaluation import Evaluation, measuring_graph
from onnxgrad.training.step.accumulate import SplitStep, split_step
from onnxgrad.training.step.compile import compile_step
from onnxgrad.training.step.memory_budget import within_memory
from onnxgrad.training.step.step import Step

VERSION = 1
HOSTS = ("host.py", "host.mjs", "host.hpp")
#: The operators of all models, as ONNX Runtime's build script reads them.
OPERATORS = "required_operators.config"
#: Targets of steps.
TARGETS = ("any", "web")
#: Files written beside the models.
TOKENIZER = "tokenizer.json"
BESIDE = ("state.npz", "contract.json", OPERATORS, *HOSTS)


def files_in(folder: Path) -> list[Path]:
    """The files that `export_step` may write into `folder`."""
    models = [f"{name}.onnx" for name in ("train", "gradient", "update", "evaluate", "infer")]
    return [folder / n for n in (*models, *(f"{n}.data" for n in models), *BESIDE, TOKENIZER)]


@check_keywords
def export_step(
    model: AnyModel,
    folder: str | Path,
    *,
    entry: int | None = None,
    outputs: Sequence[str] = (),
    target: str = "any",
    memory: int | str | None = None,
    batch_size: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Write everything that a host needs into `folder`; the contract.

    The halves ``gradient.onnx`` and ``update.onnx`` are written if the training information has the denominator of the
    mean loss (``attach(…, accumulate=True)``), ``evaluate.onnx`` if the loss has a value outside of training.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with training information.
        folder: is made; files in it are replaced.
        entry: which of its training entries; default: all.
        outputs: names of further values to return as results, as in `compile_step`.
        target: "any" runtime of ONNX, or "web": opset 18, without float64, in operators that onnxruntime-web has on
            WebGPU where there is a way; the contract then lists what of each model runs on the processor.
        memory, batch_size, dims: have a step, and the gradient of a part, compute results anew that do not fit (see
            `within_memory`); `batch_size` is the rows of a part.

    Raises:
        BadInput: what `compile_step` refuses, a place that cannot be written, or weights of float64 for the web.
    """
    if target not in TARGETS:
        raise BadInput(f"target must be one of {', '.join(map(repr, TARGETS))}, not {target!r}")
    step, halves = _compiled(model, entry, outputs)
    if memory is not None:
        step = within_memory(step, memory, batch_size, dims)
        if halves is not None:
            halves.gradient = within_memory(halves.gradient, memory, batch_size, dims)
    folder = Path(folder)
    make_folder(folder)
    models: dict[str, tuple[ir.Model, dict[str, Any]]] = {"train": (step.model, _ends(step))}
    state = {name: t.initial.numpy() for name, t in step.state.items()}
    if halves is not None:
        for name, half in (("gradient", halves.gradient), ("update", halves.update)):
            models[name] = (half.model, _ends(half))
            own = {n: t.initial.numpy() for n, t in half.state.items()} | {n: t.numpy() for n, t in half.reads.items()}
            state |= {n: array for n, array in own.items() if n not in state}
    measured = _evaluation(step)
    if measured is not None:
        models["evaluate"] = measured
    models["infer"] = _inference(step)
    if target == "web":
        for found, ends in models.values():
            for_web(found)
            ends["off_webgpu"] = report_on(found).off_webgpu
        state = {name: narrow_float64(name, array) for name, array in state.items()}
    contract = _contract(step, state, {name: ends for name, (_, ends) in models.items()}, batch_size)
    for name, (found, _) in models.items():
        save_model(found, folder / f"{name}.onnx")
    _write_beside(folder, step, state, [found for found, _ in models.values()])
    with replacing(folder / "contract.json") as file:
        file.write_text(json.dumps(contract, indent=1) + "\n", encoding="utf-8")
    return contract


def _compiled(model: AnyModel, entry: int | None, outputs: Sequence[str]) -> tuple[Step, SplitStep | None]:
    """The step, and its halves where it can be cut."""
    if entry is None:
        with contextlib.suppress(BadInput):
            halves = split_step(model, outputs=outputs)
            return halves.whole, halves
    return compile_step(model, entry=entry, outputs=outputs), None


def _contract(
    step: Step, state: Mapping[str, np.ndarray], ends: Mapping[str, dict[str, Any]], batch_size: int | None
) -> dict[str, Any]:
    """The document that explains the files: the state, and the roles of the `ends` of each model."""
    contract = {
        "version": VERSION,
        "loss": step.loss,
        "state": {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in state.items()},
        "rates": {name: float(t.numpy()) for name, t in step.rates.items()},
        "models": {name: {"file": f"{name}.onnx", **roles} for name, roles in ends.items()},
    }
    if step.plan is not None:
        contract["plan"] = {"batch_size": batch_size, "result_bytes": step.plan.predicted}
    if step.source is not None:
        if classes := class_names(step.source.model):
            contract["classes"] = list(classes)
        if trained := Preprocessing.of(step.source.model):
            contract["preprocessing"] = trained.to_json()
    return contract


def _write_beside(folder: Path, step: Step, state: Mapping[str, np.ndarray], models: Sequence[ir.Model]) -> None:
    """Write the files beside the models, but for the contract."""
    trained = Preprocessing() if step.source is None else Preprocessing.of(step.source.model)
    if trained.tokenizer:
        with replacing(folder / TOKENIZER) as file:
            file.write_text(trained.tokenizer, encoding="utf-8")
    with replacing(folder / "state.npz") as file, file.open("wb") as out:
        np.savez(out, **state)  # type: ignore[arg-type]
    for name in HOSTS:
        with replacing(folder / name) as file:
            shutil.copyfile(Path(__file__).with_name(name), file)
    with replacing(folder / OPERATORS) as file:
        file.write_text(required_operators(models), encoding="utf-8")


def required_operators(models: Sequence[ir.Model]) -> str:
    """The operators of `models` for ``build.sh --include_ops_by_config``: a domain, an opset and operators a line."""
    found: dict[tuple[str, int], set[str]] = {}
    for model in models:
        imports = model.graph.opset_imports
        for node in model.graph.all_nodes():
            domain = normal_domain(node.domain)
            found.setdefault((domain or "ai.onnx", imports.get(domain, 1)), set()).add(node.op_type)
    return "".join(f"{domain};{opset};{','.join(sorted(names))}\n" for (domain, opset), names in sorted(found.items()))


def _ends(step: Step) -> dict[str, Any]:
    """The roles of the inputs and outputs of a step, by name."""
    return {
        "batch": list(step.batch),
        "state": {name: {"input": t.input, "output": t.output} for name, t in step.state.items()},
        "reads": list(step.reads),
        "rates": list(step.rates),
        "results": list(step.results),
    }


def _evaluation(step: Step) -> tuple[ir.Model, dict[str, Any]] | None:
    """The loss and the predictions of the model as it would be saved; None if the loss has no value then."""
    try:
        evaluation = Evaluation.of(step)
    except BadInput:
        return None
    model, _ = measuring_graph(not_none(step.source), step)
    graph = model.graph
    values = {v.name: v for v in (*graph.inputs, *(o for n in graph for o in n.outputs))}
    shown = [values[n] for n in evaluation.boundary if n in values and values[n] not in graph.outputs]
    graph.outputs.extend(shown)
    return _fed(model, step, [v.name or "" for v in graph.outputs])


def _inference(step: Step) -> tuple[ir.Model, dict[str, Any]]:
    """The inference model, its parameters as inputs."""
    model = not_none(step.source).inference()
    return _fed(model, step, [v.name or "" for v in model.graph.outputs])


def _fed(model: ir.Model, step: Step, results: list[str]) -> tuple[ir.Model, dict[str, Any]]:
    """`model` with the state that it reads as inputs."""
    graph = model.graph
    prune(graph)
    read = []
    used = values_read(graph)
    for name in step.state:
        if graph.initializers.get(name) in used:
            into_input(graph, name)
            read.append(name)
    inputs = [v for v in required_inputs(graph) if v.name not in read]
    graph.inputs[:] = [*(v for v in inputs if v in used), *(v for v in graph.inputs if v.name in read)]
    infer_model(model)
    batch = [v.name or "" for v in graph.inputs if v.name not in read]
    return model, {"batch": batch, "state": {}, "reads": read, "rates": [], "results": results}
