"""The structure of modules: no import circle, no hidden import, no class name twice, one table of layers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "onnxgrad"

#: Packages of the extras, and what only some machines have: imported where they are used.
OPTIONAL = {
    *(
        "autograd",
        "huggingface_hub",
        "IPython",
        "jax",
        "matplotlib",
        "ml_dtypes",
        "mlflow",
        "mpi4py",
        "onnxscript",
        "PIL",
        "psutil",
        "pyarrow",
    ),
    *("safetensors", "scipy", "sklearn", "tensorboardX", "tokenizers", "torch", "wandb", "fcntl", "msvcrt", "resource"),
}

#: Imports inside functions that have a reason: a command that answers Ctrl-C while it loads the rest, a checker that
#: loads the runtime only to run on it, functions of formulas that stand on SciPy, an extra, rich for what is shown,
#: what a `Trainer` is built without (a sixth of the time to import it), and the pass that inlines functions (a
#: twentieth of the time of a first derivative).
LATE = {
    "cli/__init__.py onnxgrad",
    "cli/__init__.py onnxgrad.cli.app",
    "ir/constants.py onnx.reference",
    "model_io/local_functions.py onnx_ir.passes.common",
    "model_io/open.py onnxgrad.model_io.inline",
    "runtime/reference.py onnx.reference",
    "testing.py onnxruntime",
    "training/adapters/parts.py onnx.reference",
    "training/loop/listeners.py onnxgrad.training.loop.progress_bar",
    "training/loop/samples.py rich.console",
    "training/loop/trained.py onnxgrad.training.adapters.folder",
    "training/loop/trained.py onnxgrad.training.language.task",
    "training/loop/trained.py onnxgrad.training.loop.evaluation",
    "training/loop/trainer.py onnxgrad.training.loop.fit",
    "training/loop/trainer.py onnxgrad.training.loop.listeners",
    "training/loop/trainer.py onnxgrad.training.loop.peak",
    "training/loop/trainer.py onnxgrad.training.loop.pruning",
    "training/loop/trainer.py onnxgrad.training.loop.rate_finder",
    "training/loop/trainer.py onnxgrad.training.loop.resume",
    "training/loop/trainer.py onnxgrad.training.measure.predict",
    "training/loss/evaluated.py onnxgrad.eager.scipy",
    "training/loss/recorded.py onnxgrad.training.loss",
}


#: Modules for two libraries that both call an estimator so.
NAMESAKES = ["interop/art.py", "sklearn.py"]


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module, by its path below the package, with its tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, or of one that imports itself (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in edges[v]:
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            part = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(part) > 1 or v in edges[v]:
                found.append(sorted(part))

    for v in edges:
        if v not in index:
            visit(v)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": set()}) == [["b", "c"], ["d"]]


def test_no_import_circle():
    grimp = pytest.importorskip("grimp", reason="import-linter is not installed")
    graph = grimp.build_graph("onnxgrad", cache_dir=None)
    edges = {m: set(graph.find_modules_directly_imported_by(m)) for m in sorted(graph.modules)}
    assert len(edges) > 200
    assert circles(edges) == []


def test_no_import_inside_a_function_but_for_optional_packages():
    offenders = []
    for path, tree in modules():
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or "."]
                elif isinstance(node, ast.Import):
                    names = [a.name for a in node.names]
                else:
                    continue
                offenders += [f"{path} {n}" for n in names if n.partition(".")[0] not in OPTIONAL]
    assert set(offenders) == LATE


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert shared.pop("Classifier", NAMESAKES) == NAMESAKES
    assert shared == {}


def test_the_page_of_the_design_has_the_layers_of_the_contract():
    contracts = tomllib.loads((ROOT / "importlinter.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == ["onnxgrad"])
    enforced = [{n for n in layer.split(" | ") if not n.startswith("_")} for layer in layers]
    table = (ROOT / "docs" / "design.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    told = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines() if row.startswith("| `")]
    assert told == enforced
