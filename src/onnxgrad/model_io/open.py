"""Open a model: one private copy of the caller's, with its opset upgraded, functions inlined and types inferred."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, printable, warn_caller
from onnxgrad.ir import Builder
from onnxgrad.ir.cleanup import end_derivation
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.downgrade import settle_opset
from onnxgrad.ir.fold import infer_and_fold
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.match import is_standard
from onnxgrad.model_io.checks.declared_sizes import PROTOBUF_LIMIT
from onnxgrad.model_io.checks.nodes import check_nodes
from onnxgrad.model_io.local_functions import (
    Functions,
    Identifier,
    check_calls,
    drop_unused,
    fill_defaults,
    rename_overloads,
)
from onnxgrad.model_io.match_subgraphs import TARGETS, cut_out
from onnxgrad.model_io.optional_returns import settle_unbinding
from onnxgrad.model_io.read import (
    TRAINING,
    check_scopes,
    external_tensors,
    load_model,
    read_proto,
    training_info,
)
from onnxgrad.model_io.save import gathered, to_proto, weight_bytes
from onnxgrad.model_io.settled_sizes import settle_sizes
from onnxgrad.model_io.signature import KEY
from onnxgrad.model_io.symbolic_dims import settle_dims
from onnxgrad.model_io.upgrade import LOWEST_RULES, changes, raise_opset, raised_functions
from onnxgrad.model_io.validity import blamed

Model = TypeVar("Model", onnx.ModelProto, ir.Model)
Keep = Callable[[ir.Model], set[Identifier]]
AnyModel = str | os.PathLike | onnx.ModelProto | ir.Model


#: Tensors up to this many bytes may be looked into (shapes, axes, bounds).
READ_BELOW = 1024


def keep_no_function(model: ir.Model) -> set[Identifier]:
    """Inline every function."""
    return set()


@dataclass
class Opened:
    """A model that the library may change, and the way back to the caller's kind.

    Attributes:
        model: private; nothing in it that can change is shared with the caller's.
        kind: `onnx.ModelProto` or `onnx_ir.Model`, what `close` gives.
        functions: the local functions that stay functions; None if there are none.
        inference: has inferred the model, and will infer new nodes.
        from_path: True if it was read from a file (external data is then gathered on the way out).
        opset_in: the opset that the caller's model had.
        training: names of values that the model's training information refers to.
        constants: names of initializers that lowering has added to those of the caller's model.
    """

    model: ir.Model
    kind: type
    functions: Functions | None = None
    inference: Inference | None = None
    from_path: bool = False
    opset_in: int = LOWEST_RULES
    training: frozenset[str] = field(default_factory=frozenset)
    constants: frozenset[str] = field(default_factory=frozenset)

    def finish(self, builder: Builder) -> None:
        """Clean up the graph that `builder` derived; initializers that training information refers to stay."""
        initializers = self.model.graph.initializers
        end_derivation(builder, [v for n, v in initializers.items() if n in self.training])

    def close(self) -> onnx.ModelProto | ir.Model:
        """The model in the kind of the caller's argument (ModelProto for a path)."""
        if self.functions is not None:
            drop_unused(self.model)
        self._settle_training()
        if not self.model.meta[TRAINING]:
            settle_opset(self.model)
        if self.kind is ir.Model:
            return self.model
        return gathered(self.model) if self.from_path else to_proto(self.model)

    def _settle_training(self) -> None:
        """Drop, with a warning, training information about values that the model no longer has."""
        if not training_info(self.model):
            return
        graph = self.model.graph
        have = {v.name for v in graph.inputs} | set(graph.initializers) | {v.name for n in graph for v in n.outputs}
        kept = []
        for info in training_info(self.model):
            missing = sorted(outside_names(info) - {n for n in have if n})
            if missing:
                warn_caller(
                    f"training information dropped: it refers to {printable(', '.join(missing))}, "
                    "which the derived model does not have"
                )
            else:
                kept.append(info)
        self.model.meta[TRAINING] = kept


def open_model(
    model: AnyModel,
    first: Callable[[ir.Model], None] | None = None,
    *,
    keep: Keep = keep_no_function,
    own: bool = False,
) -> Opened:
    """A private copy of `model`, ready to be differentiated.

    Local functions are inlined, except those that `keep` chooses; nodes below opset 18 are raised, types and shapes are
    inferred, and arithmetic on known shapes is folded. `first` sees, and may change, the model as written, before all
    that. With `own`, the result is `model` itself, an ``ir.Model``.

    Raises:
        BadInput: it cannot be read, is no valid model, or cannot be raised.
    """
    with blamed(model):
        return _open_private(model, first, keep, own)


def _open_private(model: AnyModel, first: Callable[[ir.Model], None] | None, keep: Keep, own: bool) -> Opened:
    if isinstance(model, ir.Model):
        opened = Opened(model if own else _private(model), ir.Model)
    elif isinstance(model, onnx.ModelProto):
        opened = Opened(read_proto(model), onnx.ModelProto)
        _refuse_lost_data(opened.model)
    elif isinstance(model, (str, os.PathLike)):
        opened = Opened(load_model(model), onnx.ModelProto, from_path=True)
        size = weight_bytes(opened.model)
        if size > PROTOBUF_LIMIT:
            raise BadInput(
                f"{os.fspath(model)} holds {size / 1e9:.1f} GB of weights; the result for a path is one "
                "ModelProto, which is limited to 2 GB\n"
                "  hint: pass onnx_ir.load(path); the result is then an onnx_ir.Model"
            )
    else:
        raise BadInput(f"a model is a path, an onnx.ModelProto or an onnx_ir.Model, not a {type(model).__name__}")
    private = opened.model
    if first is not None:
        first(private)
    check_scopes(private)
    imports = private.graph.opset_imports
    opened.opset_in = imports.setdefault("", imports.pop("ai.onnx", LOWEST_RULES))
    infos = training_info(private)
    _refuse_old_training(infos, opened.opset_in)
    opened.training = frozenset().union(*(all_names(i) for i in infos)) if infos else frozenset()
    settle_dims(private)
    check_calls(private)
    targets = TARGETS.value
    ruled = {name for name in private.functions if name[:2] in targets.operators}
    kept = raised_functions(private, keep(private) | ruled)
    if ruled - kept:
        name = "::".join(min(ruled - kept)[:2])
        raise BadInput(
            f"the function {name}, which has a rule of its own, is not written for opset {LOWEST_RULES} or newer, "
            "or not for that of the model\n  hint: export the model again"
        )
    if private.functions:
        from onnxgrad.model_io.inline import inline_functions  # the library's pass for it takes 5 ms to import

        inline_functions(private, kept)
    settle_unbinding(private)
    raise_opset(private)
    if private.functions:
        rename_overloads(private, ruled)
        fill_defaults(private)
        opened.functions = Functions(private)
    opened.inference = infer_and_fold(private, opened.functions)
    if settle_sizes(private.graph):
        opened.inference = infer_and_fold(private, opened.functions)
    check_nodes(private)
    for cut in targets.cuts:
        cut_out(private, cut, required=KEY not in private.metadata_props)
    if private.functions and opened.functions is None:
        opened.functions = Functions(private)
        opened.inference.context.calls = opened.functions
    return opened


def _private(model: ir.Model) -> ir.Model:
    """A copy that shares only weights and attribute values, which are never changed in place."""
    check_scopes(model)
    copy = copy_model(model)
    for graph in scopes(copy.graph):
        for value in [*graph.inputs, *graph.initializers.values(), *[v for n in graph for v in n.outputs]]:
            if isinstance(value.type, ir.TensorType):
                value.type = ir.TensorType(value.type.dtype, denotation=value.type.denotation)
            if value.shape is not None:
                value.shape = value.shape.copy()
    infos = model.meta.get(TRAINING, ())
    copy.meta[TRAINING] = [onnx.TrainingInfoProto.FromString(i.SerializeToString()) for i in infos]
    return copy


def _refuse_lost_data(model: ir.Model) -> None:
    """Raise BadInput for small external tensors without a file; large weights may stay references."""
    for tensor in external_tensors(model):
        if tensor.nbytes <= READ_BELOW and not os.path.isfile(tensor.path):
            raise BadInput(
                f"{tensor.name!r} is in external data ({tensor.location}), but it is not known where\n"
                "  hint: pass the path of the model, or load it with its external data"
            )


# --- training information --------------------------------------------------------------------------


def outside_names(info: onnx.TrainingInfoProto) -> set[str]:
    """The values of the model that `info` reads, binds and differentiates."""
    own: set[str] = set()
    read: set[str] = set()
    for graph in (info.algorithm, info.initialization):
        own |= {v.name for v in graph.input} | {t.name for t in graph.initializer}
        own |= {name for node in graph.node for name in node.output}
    for node in info.algorithm.node:
        read |= {name for name in node.input if name}
        if node.op_type == "Gradient":
            for a in node.attribute:
                read |= {s.decode() for s in a.strings} if a.name in ("xs", "zs") else {a.s.decode()}
    read |= {v.name for v in info.algorithm.output}
    for binding in (*info.initialization_binding, *info.update_binding):
        read |= {binding.key, binding.value}
    return {name for name in read - own if name}


def all_names(info: onnx.TrainingInfoProto) -> set[str]:
    """Every name in `info`, which new values of the model must not have: the graphs will be joined."""
    names = outside_names(info)
    for graph in (info.algorithm, info.initialization):
        names |= {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
        names |= {name for node in graph.node for name in (*node.input, *node.output, node.name)}
    return names


def _refuse_old_training(infos: list[onnx.TrainingInfoProto], opset: int) -> None:
    """Training information shares the model's opset: refuse where raising that would change it."""
    if opset >= LOWEST_RULES:
        return
    for info in infos:
        for node in (*info.algorithm.node, *info.initialization.node):
            if is_standard(node) and changes(node.op_type, opset, LOWEST_RULES):
                raise BadInput(
                    f"the model has opset {opset} and training information that uses {node.op_type}, "
                    f"which newer opsets define anew\n  hint: write both for opset {LOWEST_RULES} or newer"
                )
