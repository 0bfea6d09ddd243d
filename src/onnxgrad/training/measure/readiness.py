"""Readiness of a model file for training: automatic repairs, and improvements of the export."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput, OnnxGradError, printable, reason_of
from onnxgrad.ir.exporter_names import dropped_biases, folded_parameters, lost_detach
from onnxgrad.ir.graph import required_inputs
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.model_io.validity import complaint
from onnxgrad.training.build.attach import attach
from onnxgrad.training.detection.heads import known_head, refusal
from onnxgrad.training.detection.losses import detection_loss
from onnxgrad.training.graph.lost_updates import lost_updates
from onnxgrad.training.graph.rounding import is_rounding
from onnxgrad.training.spec.training_info import training_notes
from onnxgrad.training.step.compile import compile_step
from onnxgrad.wording import tensor_text

#: Kinds of findings: a fact; a change that onnxgrad makes; a better export; the model does not train.
FACT, MENDED, ADVICE, REFUSED = "trains", "mended", "advice", "refused"
#: Where a network of so many convolutions has no normalization, an exporter has most likely folded it.
MANY = 8
#: What trains a detector.
_COMMAND = "onnxgrad train --task detection --data boxes.json trains it on COCO's boxes, and others"


@dataclass(frozen=True)
class Finding:
    """A finding about a model before training; `kind` is one of those above."""

    kind: str
    text: str


def readiness(model: AnyModel, loss: Any = None, **attached: Any) -> list[Finding]:
    """Check how `model` would train, by attaching a loss and compiling a step.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        loss: as of `attach`; default: that of a detector's head, or cross_entropy, or mse where that does not fit.
        attached: further arguments of `attach`.

    Returns:
        Findings; one of them is of the kind REFUSED if the model does not train.

    Raises:
        BadInput: the model cannot be read, or it is not valid.
    """
    opened = open_model(model).model
    found = [*_inputs(opened), *_nodes(opened)]
    why: dict[str, list[str]] = {}
    losses = [(name, name) for name in ("cross_entropy", "mse")] if loss is None else [(loss, loss)]
    if loss is None and (head := known_head(opened)) is not None:
        losses = [("detection", detection_loss(opened, head))]
        found = [Finding(FACT, f"{head.text}; {_COMMAND}"), *found]
    elif loss is None and (unknown := refusal(opened)):
        found = [Finding(ADVICE, unknown), *found]
    for name, function in losses:
        try:
            proto = attach(model, loss=function, **attached)
            compile_step(proto)
        except OnnxGradError as error:
            why.setdefault(reason_of(error), []).append(printable(name))
            continue
        algorithm = proto.training_info[0].algorithm
        given = [f"{v.name} {_declared(v)}" for v in algorithm.input]
        labels = f"; labels: {', '.join(given)}" if given else ""
        facts = [Finding(FACT, f"with loss {name}{labels}"), *(Finding(FACT, line) for line in training_notes(proto))]
        return [*facts, *found]
    if problem := complaint(opened):
        raise BadInput(f"the model is not valid: {problem}")
    return [*(Finding(REFUSED, f"loss {' or '.join(names)}: {reason}") for reason, names in why.items()), *found]


def _declared(value: Any) -> str:
    kept = ir.serde.deserialize_value_info_proto(value, None)
    return tensor_text(kept.dtype, kept.shape)


def _inputs(model: ir.Model) -> list[Finding]:
    graph = model.graph
    fixed = [v for v in required_inputs(graph) if v.shape and isinstance(v.shape[0], int)]
    return [
        Finding(
            ADVICE,
            f"{printable(v.name or '')} has {v.shape[0]} rows, always: a batch has exactly as many; "  # type: ignore[index]
            "export with a dynamic first dimension",
        )
        for v in fixed
    ]


def _nodes(model: ir.Model) -> list[Finding]:
    nodes = [n for g in model.graphs() for n in g]
    kinds = Counter(n.op_type for n in nodes)
    found = []
    folded = folded_parameters(model.graph)
    if missing := folded + dropped_biases(model.graph):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        found.append(
            Finding(
                ADVICE,
                f"the exporter left parameters out or computed with them in advance: {names}; "
                "export with optimize=False, and they train",
            )
        )
    if lost_detach(model.graph):
        found.append(
            Finding(
                ADVICE,
                "the exporter left `detach()` out: gradients pass there; export with optimize=False, and they stop",
            )
        )
    if count := kinds["BatchNormalization"]:
        found.append(Finding(MENDED, f"{count} BatchNormalization run in training mode; --freeze-bn leaves them"))
    elif not folded and kinds["Conv"] >= MANY and not any("Normalization" in kind for kind in kinds):
        found.append(
            Finding(
                ADVICE,
                f"{kinds['Conv']} Conv and no normalization: an exporter may have folded BatchNormalization into them; "
                "take small learning rates, or export in training mode",
            )
        )
    if count := kinds["Dropout"]:
        found.append(Finding(MENDED, f"{count} Dropout drop while training"))
    if rounding := sum(map(is_rounding, nodes)):
        found.append(Finding(MENDED, f"{rounding} rounding nodes are passed straight through by gradients"))
    return [*found, *(Finding(ADVICE, line) for line in lost_updates(model))]
