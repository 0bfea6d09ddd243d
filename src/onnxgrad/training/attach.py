"""Attach a loss and an optimizer to an inference model, as a TrainingInfoProto.

The algorithm reads the inference graph and adds: the labels, the loss, one Gradient node, the optimizer
and its state, a counter of steps, the learning rate. Where the network behaves differently in training
(BatchNormalization, Dropout), the algorithm has a copy of that part of it (see `trainmode`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad import flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.door import AnyModel, open_model, training_info
from onnxgrad.engine.paths import on_path
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.infer import forget_values
from onnxgrad.ir.walk import reads
from onnxgrad.training.info import CONVENTION, DOMAIN, FED
from onnxgrad.training.losses import Loss, labels_of, loss_named, prediction
from onnxgrad.training.recipes import Hyper, Recipe, recipe_named
from onnxgrad.training.trainmode import ancestors, statistics, switch
from onnxgrad.training.weights import initializer, is_weight, own_weights


def attach(
    model: AnyModel,
    *,
    loss: str = "cross_entropy",
    optimizer: str = "adam",
    output: str | None = None,
    labels: str | None = None,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    convention: str | None = None,
    trainable: Sequence[str] | None = None,
    train_mode: bool = True,
    loss_options: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    """The model with training information.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. It stays a valid inference model;
            weights in Constant nodes, or shared by chance, become initializers of their own (see `weights`),
            and opsets below 18 are raised. Training information that it has is replaced.
        loss: ``cross_entropy``, ``nll``, ``mse``, ``l1``, ``huber`` or ``bce_with_logits``. If the model
            ends in the Softmax (Sigmoid) that the loss contains, the loss is taken of what goes into it.
        optimizer: ``sgd``, ``momentum``, ``nesterov``, ``adam``, ``adamw`` or ``adagrad``.
        output: the value that meets the labels; default: the model's only float output.
        labels: name of the label input: a new one, or an input that the model has. Default: ``labels``.
        learning_rate: default: 0.001 for adam and adamw, else 0.01.
        weight_decay: default: 0.01 for adamw, else 0. Added to the gradient (norm coefficient), except by
            adamw, which shrinks the weights themselves.
        momentum: of momentum and nesterov; default 0.9.
        betas: of adam and adamw; default (0.9, 0.999).
        eps: of adam, adamw (default 1e-8) and adagrad (default 1e-10).
        convention: of adam and adamw: where ε stands. "onnx" (default) is the operator of the specification, which
            divides by √H + ε and corrects the bias afterwards; "torch" corrects H first, as PyTorch does, and is
            written out in standard operators. Which it is stands in the metadata of the algorithm.
        trainable: names of initializers (or of outputs of Constant nodes) to train. Default: every float
            initializer of rank 1 or more that the loss depends on, except the running statistics of
            BatchNormalization and tensors with infinities or numbers beyond 1e8 (masks); Constants count
            where the model has no float initializers of rank 2 or more. Scalars are mostly constants of
            the architecture; name them to train them.
        train_mode: run BatchNormalization (updating its running statistics) and Dropout as in training.
        loss_options: ``reduction`` ("mean" or "sum") and those of the loss: ``axis`` of the classes (1),
            ``ignore_index``, ``weight`` per class, ``delta``.

    Raises:
        UnknownName, BadInput: a name that the model does not have, or an option that does not fit.
    """
    kind = loss_named(loss, loss_options or {})
    recipe = recipe_named(optimizer, Hyper(learning_rate, weight_decay, momentum, betas, eps, convention))
    return _Attachment(model, trainable).attach(kind, recipe, output, labels, train_mode)


class _Attachment:
    """One model to which an algorithm is attached: written behind the inference graph, then cut off it."""

    def __init__(self, model: AnyModel, trainable: Sequence[str] | None) -> None:
        self.model = open_model(model).model
        self.graph = self.model.graph
        ir.external_data.load_to_model(self.model)
        training_info(self.model).clear()
        self.trainable = trainable
        own_weights(self.graph, trainable or ())
        for value in list(self.graph.inputs):
            if value.is_initializer():  # an input with a default value is a weight
                self.graph.inputs.remove(value)
        self.model.opset_imports.setdefault(DOMAIN, 1)
        self.builder = Builder(self.graph)
        self.nodes = list(self.graph)
        self.held = set(self.graph.initializers)
        self.inputs = list(self.graph.inputs)
        self.bindings: dict[str, str] = {}

    def attach(self, loss: tuple[Loss, dict[str, Any]], optimizer: tuple[Recipe, Hyper], output: str | None,
               labels: str | None, train_mode: bool) -> onnx.ModelProto:  # fmt: skip
        """Write everything; the model with its training information."""
        kind, options = loss
        y = prediction(kind, self._output(output), options)
        updates: dict[ir.Value, ir.Value] = {}
        if train_mode:
            copies, updates = switch(self.builder, self.nodes, y)
            y = copies.get(y, y)
        target = self._labels(labels, *labels_of(kind, y, options))
        value = kind.write(self.builder, Var(self.builder, y), target, **options)
        value.value.name = self.builder.names.exactly("loss")
        parameters = self._parameters(value.value)
        for statistic, new in updates.items():
            self.bindings[statistic.name or ""] = new.name or ""
        gradients = self._gradient(value.value, parameters)
        self._optimize(*optimizer, parameters, gradients)
        proto = self._cut(value.name)
        convention = optimizer[1].convention
        if convention is not None:
            said = "after the correction of bias (PyTorch)" if convention == "torch" else "before it (ONNX)"
            props = proto.training_info[0].algorithm.metadata_props
            props.add(key=CONVENTION, value=f"Adam adds its epsilon {said}")
        return proto

    def _output(self, name: str | None) -> ir.Value:
        values = {v.name or "": v for v in self.graph.outputs}
        if name is not None:
            values |= {v.name: v for node in self.nodes for v in node.outputs if v.name}
            if name not in values:
                raise UnknownName(name, values, "value")
            if values[name].dtype not in FLOATS:
                raise BadInput(f"{name!r} is a tensor of {values[name].dtype}; a loss is taken of floats")
            return values[name]
        floats = [v for v in self.graph.outputs if v.dtype in FLOATS]
        if len(floats) != 1:
            found = ", ".join(repr(v.name) for v in floats) or "none"
            raise BadInput(f"name the output that meets the labels with `output`; float outputs: {found}")
        return floats[0]

    def _labels(self, name: str | None, dtype: ir.DataType, dims: Any) -> Var:
        """The label input: one that the model has, or a new one."""
        wanted = name or "labels"
        for value in self.graph.inputs:
            if value.name == wanted:
                allowed = {ir.DataType.INT32, ir.DataType.INT64} if dtype == ir.DataType.INT64 else {dtype}
                if value.dtype not in allowed:
                    raise BadInput(f"the label input {wanted!r} is a tensor of {value.dtype}, not of {dtype}")
                return Var(self.builder, value)
        value = ir.Value(
            name=self.builder.names.exactly(wanted),
            type=ir.TensorType(dtype),
            shape=None if dims is None else ir.Shape(dims),
        )
        if name is not None and value.name != name:
            raise BadInput(f"{name!r} is a value of the model, but no input: choose another name for `labels`")
        self.graph.inputs.append(value)
        return Var(self.builder, value)

    def _parameters(self, loss: ir.Value) -> list[ir.Value]:
        """The initializers to train."""
        initializers = {n: v for n, v in self.graph.initializers.items() if n in self.held}
        nodes = list(self.graph)
        running = statistics(nodes)
        floats = [v for v in initializers.values() if v.dtype in FLOATS]
        reached = {v for node in on_path(nodes, floats, [loss], self.builder) for v in reads(node)}
        if self.trainable is None:
            found = [v for v in floats if v in reached and v not in running and is_weight(v)]
            if not found:
                raise BadInput("the loss depends on no float initializer: there is nothing to train")
            return found
        found = []
        for name in dict.fromkeys(self.trainable):
            if name not in initializers:
                raise UnknownName(name, initializers, "initializer")
            value = initializers[name]
            if value.dtype not in FLOATS:
                raise BadInput(f"{name!r} is a tensor of {value.dtype}; only floats can be trained")
            if value not in reached:
                raise BadInput(f"the loss does not depend on {name!r}: it cannot be trained")
            if value in running:
                raise BadInput(f"{name!r} is a running statistic, which is not trained by its gradient")
            found.append(value)
        if not found:
            raise BadInput("`trainable` is empty: there is nothing to train")
        return found

    def _gradient(self, loss: ir.Value, parameters: list[ir.Value]) -> list[Var]:
        needed = {v for node in ancestors(list(self.graph), loss) for v in reads(node)}
        others = [v for v in self.graph.inputs if v in needed]
        node = ir.Node(
            DOMAIN,
            "Gradient",
            [*parameters, *others],
            [
                ir.AttrStrings("xs", [v.name or "" for v in parameters]),
                *([ir.AttrStrings("zs", [v.name or "" for v in others])] if others else []),
                ir.AttrString("y", loss.name or ""),
            ],
            num_outputs=len(parameters),
            name=self.builder.names.exactly("gradient"),
        )
        for value, like in zip(node.outputs, parameters):
            value.name = self.builder.names.exactly(identifier(f"{like.name}_grad"))
            value.type, value.shape = like.type, like.shape
        return list(self.builder.append(node))

    def _held(self, name: str, array: np.ndarray, dtype: ir.DataType, fed: bool = False) -> Var:
        """A new initializer of its own (constants of the builder are shared)."""
        tensor = ir.tensor(array.astype(dtype.numpy()), name=self.builder.names.exactly(identifier(name)))
        value = initializer(tensor)
        if fed:
            value.metadata_props[FED] = "rate"
        self.graph.register_initializer(value)
        return Var(self.builder, value)

    def _bind(self, held: ir.Value, new: Var) -> None:
        if new.value.producer() is None or new.name in self.bindings.values():
            (new,) = self.builder.append(ir.Node("", "Identity", [new.value]))
        new.value.name = self.builder.names.exactly(identifier(f"{held.name}_next"))
        self.bindings[held.name or ""] = new.name

    def _optimize(self, recipe: Recipe, hyper: Hyper, parameters: list[ir.Value], gradients: list[Var]) -> None:
        """The optimizer on all parameters, those of one dtype together; its state and its counter."""
        b = self.builder
        for value in parameters:
            if recipe.operator and value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
                raise BadInput(f"{value.name!r} is a tensor of {value.dtype}; only sgd updates other types")
        rate = self._held("learning_rate", np.array(hyper.learning_rate), ir.DataType.FLOAT, fed=True)
        finished = present = rate
        if recipe.counts:
            finished = self._held("steps", np.array(0), ir.DataType.INT64)
            present = b.Add(finished, b.const(np.int64(1)))
            self._bind(finished.value, present)
        for dtype in dict.fromkeys(v.dtype for v in parameters):
            chosen = [k for k, v in enumerate(parameters) if v.dtype == dtype]
            xs = [Var(b, parameters[k]) for k in chosen]
            gs = [gradients[k] for k in chosen]
            states = [
                [self._held(f"{x.name}_{suffix}", np.zeros(tuple(x.value.shape or ())), dtype) for x in xs]  # type: ignore[arg-type]
                for suffix in recipe.states
            ]
            new = recipe.write(b, hyper, rate, finished, present, xs, gs, *states)
            for olds, news in zip([xs, *states], new):
                for x, x_new in zip(olds, news):
                    self._bind(x.value, x_new)

    def _cut(self, loss: str) -> onnx.ModelProto:
        """The inference model as it was, and what was added to it as a training entry."""
        own = {v.name for v in self.graph.inputs if v not in self.inputs}
        named = {v.name: v for node in self.graph for v in node.outputs}
        forget_values(self.graph)
        proto = ir.to_proto(self.model)
        info = proto.training_info.add()
        algorithm = info.algorithm
        algorithm.name = "training"
        full, inference = proto.graph, len(self.nodes)
        made = {o for node in full.node[inference:] for o in node.output}
        algorithm.node.extend(full.node[inference:])
        algorithm.input.extend(v for v in full.input if v.name in own)
        algorithm.initializer.extend(t for t in full.initializer if t.name not in self.held)
        algorithm.value_info.extend(v for v in full.value_info if v.name in made)
        for name in [loss, *self.bindings.values()]:
            algorithm.output.append(ir.to_proto(named[name]))
        added = made | own | {t.name for t in algorithm.initializer}
        del full.node[inference:]
        for field in (full.input, full.initializer, full.value_info):
            for i in reversed(range(len(field))):
                if field[i].name in added:
                    del field[i]
        for tensor in algorithm.initializer:
            props = self.graph.initializers[tensor.name].metadata_props
            for key, value in props.items():
                tensor.metadata_props.add(key=key, value=value)
        for key, value in self.bindings.items():
            info.update_binding.add(key=key, value=value)
        return proto
