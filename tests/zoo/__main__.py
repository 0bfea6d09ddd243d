"""``python -m tests.zoo [NAME …] [--exporter torchscript|dynamo] [--page]``: hold architectures to PyTorch.

A NAME is ``package`` or ``package/architecture``. Each line of output is a row of docs/zoo.md; ``--page`` puts the new
rows there, and leaves those of what was not asked for.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from tests.zoo.architectures import PACKAGES, architectures
from tests.zoo.proof import EXPORTERS, Outcome, prove

PAGE = Path(__file__).parents[2] / "docs/zoo.md"
HEAD = """# The zoo: published architectures, held to PyTorch

Architectures of timm, torchvision and transformers, small and with random weights, are exported by both of PyTorch's
exporters, and the graphs that are derived run on ONNX Runtime. *Right* means that what is listed agrees with PyTorch:

- gradients: of every weight that the file holds, and of inputs, by a random cotangent;
- second order: the derivative of one weight's gradient by all weights;
- training: the losses of five steps of gradient descent of what trains by default, with batch normalization in training
  mode where there is one;
- batch normalization: the gradients of an export in training mode.

Numbers agree to 1e-3 of the largest in float32 or else, where rounding decides at a kink, to 1e-7 in float64. *Not
exported* is what the exporter fails at, or what it writes that does not run or computes something else than the model:
at this point, or beside it, where differences of the exported model agree with the derivative and not with PyTorch's.
`python -m tests.zoo --page` writes this page; [Conventions](conventions.md) tell what is a choice at a kink.

"""
COLUMNS = "| architecture | exporter | outcome | proven | remark |\n|---|---|---|---|---|\n"


def versions() -> str:
    """Of what the page was written with."""
    found = []
    for name in ("torch", *PACKAGES, "onnx", "onnxscript", "onnxruntime"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def row(name: str, exporter: str, outcome: Outcome) -> str:
    """A line of the table."""
    remark = outcome.remark.replace("|", "\\|").replace("<", "&lt;").replace("](", "] (")
    return f"| {name} | {exporter} | {outcome.verdict} | {', '.join(outcome.proven)} | {remark} |"


def write_page(rows: Sequence[str]) -> None:
    """Put `rows` into the page, in the place of those of the same architecture and exporter."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    table = {
        tuple(r.split(" | ")[:2]): r
        for r in [*(r for r in old if r.startswith(tuple(f"| {p}/" for p in PACKAGES))), *rows]
    }
    right = sum(r.split(" | ")[2] == "right" for r in table.values())
    summary = f"{right} of {len(table)} are right. Written with {versions()}.\n\n"
    lines = sorted(table.values(), key=lambda r: (r.split(" | ")[0].lower(), r))
    PAGE.write_text(HEAD + summary + COLUMNS + "\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a number is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--exporter", choices=EXPORTERS, action="append")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    rows = []
    for architecture in architectures():
        name = f"{architecture.package}/{architecture.name}"
        if args.names and not {name, architecture.package} & set(args.names):
            continue
        for exporter in args.exporter or EXPORTERS:
            rows.append(row(name, exporter, prove(architecture, exporter)))
            print(rows[-1], flush=True)
            gc.collect()
    if args.page:
        write_page(rows)
    return int(any(r.split(" | ")[2] == "WRONG" for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
