"""``onnxgrad grad``: write the model with its derivative."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer
from rich.table import Table

import onnxgrad
from onnxgrad.cli import panels
from onnxgrad.cli.console import cell, console, print_lines
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, Force, check_paths
from onnxgrad.control_flow.checkpointing import Every, checkpointing
from onnxgrad.custom import custom_rules
from onnxgrad.errors import BadInput
from onnxgrad.model_io import files_of, load_model, save_model, signature
from onnxgrad.model_io.validity import complaint
from onnxgrad.rules.registry import registry
from onnxgrad.runtime.trial import check_runs
from onnxgrad.transforms.rematerialize import rematerialize
from onnxgrad.transforms.select_values import default_of
from onnxgrad.wording import tensor_text


class Transform(enum.StrEnum):
    """The derivative to build."""

    grad = "grad"
    value_and_grad = "value_and_grad"
    vjp = "vjp"
    jvp = "jvp"
    jacobian = "jacobian"
    hessian = "hessian"
    hvp = "hvp"
    sparse_jacobian = "sparse_jacobian"
    sparse_hessian = "sparse_hessian"


Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dims",
        "--dim",
        help="How large a dimension is that the model leaves open, for --memory and sparse modes: N=64. Repeatable.",
    ),
]


def dims_of(texts: Sequence[str] | None) -> dict[str, int]:
    """``N=64`` as sizes of dimensions by name."""
    found = {}
    for text in texts or ():
        name, equals, number = text.rpartition("=")
        if not equals or not name or not number.isdecimal() or not int(number):
            raise BadInput(f"--dim {text} is not written as N=64")
        found[name] = int(number)
    return found


StraightThrough = Annotated[
    list[str] | None,
    typer.Option(
        help="Take this operator, which rounds (QuantizeLinear, Round, …), for what it rounds; may be repeated."
    ),
]


def grad(
    model: panels.Model,
    wrt: Annotated[list[str], typer.Option(help="Differentiate with respect to this value; may be repeated.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the derived model.")],
    of: Annotated[
        list[str] | None,
        typer.Option(
            help="Differentiate this value, or a part of it such as 'y[:,3]'; may be repeated. "
            "Default: every float output."
        ),
    ] = None,
    class_: Annotated[
        int | None,
        typer.Option("--class", help="Differentiate this class: 'y[:,3]' for the value y that is differentiated."),
    ] = None,
    mode: Annotated[
        Transform,
        typer.Option(
            help="grad: gradients of the sum of `of`, nothing else. value_and_grad: the same beside the "
            "outputs of the model. vjp: for cotangents given as inputs. jvp: tangents for given tangents. "
            "jacobian: all derivatives of `of`. hessian: all second ones of its sum. hvp: their product "
            "with given tangents. sparse_jacobian, sparse_hessian: those that can be nonzero."
        ),
    ] = Transform.grad,
    straight_through: StraightThrough = None,
    rule: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a derivative of your own (docs/custom-rules.md); may be repeated."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--checkpointing",
            metavar="K|sqrt",
            help="Reverse mode through a Loop or Scan keeps the states of every K-th step only, or of √steps many "
            "(docs/control-flow.md).",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What a run computes may take so much at a time (200MB): residuals that do not fit are computed anew."
        ),
    ] = None,
    dims: Dims = None,
    force: Force = False,
) -> None:
    """Write MODEL with its derivative to another file."""
    primal = load_model(model)
    check_paths({MODEL: files_of(primal, model), "--rule": rule}, {OUTPUT: output}, force=force)
    if class_ is not None:
        of = [f"{name}[:,{class_}]" for name in of or default_of(primal.graph)]
    with registry.straight_through(*straight_through or ()), custom_rules(*rule or ()), checkpointing(_period(every)):
        derived = getattr(onnxgrad, mode.value)(
            primal, wrt=wrt, of=of or None, **({"shapes": _shapes(primal, dims)} if mode.value in _SPARSE else {})
        )
    plan = None
    if memory is not None:
        derived, plan = rematerialize(derived, memory, dims=dims_of(dims))
    files = save_model(derived, output)
    try:
        check_runs(output, model)
    except BadInput as error:
        if why := complaint(primal):
            raise BadInput(f"the model is not valid: {why}") from error
        raise
    _summary(primal, derived, files)
    if plan is not None:
        print_lines(f"memory: {plan}")


_SPARSE = (Transform.sparse_jacobian, Transform.sparse_hessian)


def _shapes(model: ir.Model, dims: Sequence[str] | None) -> dict[str, list[int]]:
    """The shapes of those inputs that ``--dims`` names a dimension of."""
    sizes, found = dims_of(dims), {}
    for v in model.graph.inputs:
        shape = [sizes.get(str(d), d) for d in v.shape or ()]
        if any(str(d) in sizes for d in v.shape or ()):
            found[v.name or ""] = [d for d in shape if isinstance(d, int)]
    return found


def _period(text: str | None) -> Every:
    return int(text) if text is not None and text.isdecimal() else text


def _summary(primal: ir.Model, derived: ir.Model, files: list[Path]) -> None:
    names = signature(derived)
    table = Table("", "name", "type", "for", box=None, pad_edge=False)
    values = {v.name: v for v in (*derived.graph.inputs, *derived.graph.outputs)}
    for kind, mapping in (
        ("input", names.cotangents),
        ("input", names.input_tangents),
        ("output", names.gradients),
        ("output", names.output_tangents),
        ("output", names.products),
        *(("output", {f"{a}, {b}": made for b, made in row.items()}) for a, row in names.jacobians.items()),
        *(("output", {f"{a}, {b}": made for b, made in row.items()}) for a, row in names.hessians.items()),
        *(("output", {f"{a}, {part}": made for part, made in row.items()}) for a, row in names.patterns.items()),
    ):
        for name, made in mapping.items():
            table.add_row(*map(cell, (kind, made, _type(values[made]), name)))
    console().print(table)
    before, after = (primal.graph.opset_imports.get("", 18), derived.graph.opset_imports[""])
    raised = f", opset {before} → {after}" if before != after else ""
    count = sum(len(g) for g in derived.graphs())
    kept = f", and {len(derived.functions)} local functions" if derived.functions else ""
    print_lines(
        f"{count} nodes{kept}, {count - sum(len(g) for g in primal.graphs()):+d} against the model{raised}; "
        f"written to {', '.join(map(str, files))}"
    )


def _type(value: ir.Value) -> str:
    return tensor_text(value.dtype, value.shape)
