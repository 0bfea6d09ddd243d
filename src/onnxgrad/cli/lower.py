"""``onnxgrad lower``: Gradient nodes and optimizers written out as standard operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer

from onnxgrad.cli import panels
from onnxgrad.cli.console import print_lines
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, Force, check_paths
from onnxgrad.model_io import files_of, load_model, save_model, training_info
from onnxgrad.runtime.trial import check_runs
from onnxgrad.training import lower_gradients
from onnxgrad.transforms.gradient_node import DOMAIN
from onnxgrad.wording import count_text


def lower(
    model: panels.Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the lowered model.")],
    force: Force = False,
) -> None:
    """Write MODEL with the operators of ai.onnx.preview.training replaced by standard ones.

    That is Gradient, Adam, Adagrad and Momentum (and GraphCall of ONNX 1.7), in the graph, in branches, loop
    bodies and local functions, and in training information, whose entries and bindings stay.
    """
    source = load_model(model)
    check_paths({MODEL: files_of(source, model)}, {OUTPUT: output}, force=force)
    lowered = lower_gradients(source)
    files = save_model(lowered, output)
    check_runs(output)
    print_lines(
        f"{count_text(_count(source), 'operator')} of {DOMAIN} written out; "
        f"{count_text(sum(len(g) for g in lowered.graphs()), 'node')}"
        f"{_entries(lowered)}; written to {', '.join(map(str, files))}"
    )


def _count(model: ir.Model) -> int:
    own = sum(n.domain == DOMAIN for g in model.graphs() for n in g)
    own += sum(n.domain == DOMAIN for f in model.functions.values() for n in f.all_nodes())
    return own + sum(n.domain == DOMAIN for info in training_info(model) for n in info.algorithm.node)


def _entries(model: ir.Model) -> str:
    infos = training_info(model)
    if not infos:
        return ""
    return f" and {sum(len(i.algorithm.node) for i in infos)} in {count_text(len(infos), 'training entry')}"
