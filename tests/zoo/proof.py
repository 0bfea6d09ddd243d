"""One architecture by one exporter: what comes of it, held to PyTorch.

Gradients of every weight, the gradients of a batch normalization in training, five steps of training, and the
derivative of a gradient. Each number is judged in float32; one that misses is judged in float64, on the same weights:
there rounding cannot put a value on the other side of a kink.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import onnxgrad
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import StepRunner
from onnxgrad.training import attach, compile_step
from tests.zoo.architectures import Architecture

torch.set_num_threads(1)  # the models are small
EXPORTERS = ("torchscript", "dynamo")
CLOSE = 1e-3
EXACT = 1e-7
STEPS = 5


class ExportFails(Exception):
    """The exporter fails, or what it writes does not run, or computes something else than the model."""


class Wrong(Exception):
    """A number differs from PyTorch's."""


class NotJudged(Exception):
    """PyTorch has no number to compare with."""


@dataclass
class Outcome:
    """The result of a proof."""

    verdict: str
    proven: list[str] = field(default_factory=list)
    remark: str = ""


def exported(net: nn.Module, inputs: Mapping[str, Tensor], exporter: str) -> onnx.ModelProto:
    """`net` in the mode it is in, with a batch of any size."""
    named = {"input_names": list(inputs), "output_names": ["y"]}
    logging.disable(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            if exporter == "dynamo":
                sizes = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
                shapes = (sizes,)  # those of *tensors
                program = torch.onnx.export(
                    net,
                    tuple(inputs.values()),
                    dynamo=True,
                    verbose=False,
                    dynamic_shapes=shapes,
                    optimize=not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules()),
                    **named,
                )
                return program.model_proto
            file = io.BytesIO()
            torch.onnx.export(
                net, tuple(inputs.values()), file, dynamo=False, opset_version=17, do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE, dynamic_axes={n: {0: "N"} for n in inputs}, **named,
            )  # fmt: skip
            return onnx.load_from_string(file.getvalue())
        except Exception as error:
            raise ExportFails(f"the exporter fails: {brief(error)}") from error
        finally:
            logging.disable(logging.NOTSET)


def brief(error: BaseException) -> str:
    """The first line of a message that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """On ONNX Runtime; by the reference where it lacks a kernel, for float64."""
    onnxruntime.set_default_logger_severity(4)
    wanted = {i.name for i in model.graph.input}
    held = {n: a for n, a in feeds.items() if n in wanted}
    names = [o.name for o in model.graph.output]
    try:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
        return dict(zip(names, ReferenceEvaluator(model).run(None, held)))
    return dict(zip(names, session.run(None, held)))


@dataclass(frozen=True)
class Weight:
    """A parameter, by name, that an initializer holds; `turned` if as its transpose."""

    parameter: str
    turned: bool = False

    def of(self, tensor: Any) -> Any:
        """A gradient of the one as that of the other."""
        return tensor.T if self.turned else tensor


def weights_of(model: onnx.ModelProto, net: nn.Module) -> dict[str, Weight]:
    """The initializers that hold a parameter, known by what they hold: names stay where an exporter folds."""
    parameters = {n: p.detach().numpy() for n, p in net.named_parameters() if p.requires_grad and p.numel()}
    found: dict[str, Weight] = {}
    for initializer in model.graph.initializer:
        if initializer.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            continue
        array = onnx.numpy_helper.to_array(initializer)
        for name, p in parameters.items():
            if np.array_equal(array, p):
                found[initializer.name] = Weight(name)
                break
            if p.ndim == 2 and np.array_equal(array, p.T):
                found[initializer.name] = Weight(name, True)
                break
    return found


def compared(what: str, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], limit: float) -> None:
    """Raises Wrong if any differs: relative to its largest element, or to a thousandth of the largest of all."""
    sizes = {n: float(np.abs(w).max(initial=0)) for n, w in want.items()}
    least = 1e-3 * max(sizes.values(), default=0.0) or 1.0
    errors = {}
    for name, w in want.items():
        if got[name].shape != w.shape:
            raise Wrong(f"{what}: {name} has the shape {got[name].shape}, not {w.shape}")
        worst = float(np.abs(got[name].astype(np.float64) - w).max(initial=0))
        errors[name] = worst / max(sizes[name], least) if np.isfinite(worst) else np.inf
    name = max(errors, key=errors.__getitem__)
    if errors[name] > limit:
        bad = sum(e > limit for e in errors.values())
        raise Wrong(f"{what}: {bad} of {len(errors)} differ, {name} by {errors[name]:.2g}")


@dataclass
class Case:
    """A model in one precision and mode, and its export."""

    net: nn.Module
    inputs: dict[str, Tensor]
    model: onnx.ModelProto
    weights: dict[str, Weight]
    limit: float

    @classmethod
    def of(cls, net: nn.Module, inputs: dict[str, Tensor], exporter: str, wide: bool = False) -> Case:
        """The export of `net`, checked to compute what `net` computes."""
        net = copy.deepcopy(net).double() if wide else copy.deepcopy(net)
        inputs = {n: x.double() if wide and x.is_floating_point() else x for n, x in inputs.items()}
        model = exported(copy.deepcopy(net), inputs, exporter)
        case = cls(net, inputs, model, weights_of(model, net), EXACT if wide else CLOSE)
        if not case.weights:
            raise ExportFails("the export holds none of the weights")
        try:
            got = run(model, case.feeds)["y"]
        except Exception as error:
            raise ExportFails(f"the export does not run: {brief(error)}") from error
        try:
            compared("the export", {"y": got}, {"y": copy.deepcopy(net)(*inputs.values()).detach().numpy()}, case.limit)
        except Wrong as error:
            raise ExportFails(f"the export computes something else ({error})") from error
        return case

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {n: x.numpy() for n, x in self.inputs.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are initializers."""
        own = dict(self.net.named_parameters())
        return {w.parameter: own[w.parameter] for w in self.weights.values()}

    def pulled(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The inputs that are floats, what the model gives for them, and a cotangent."""
        given = {i.name for i in self.model.graph.input}
        inputs = {n: x.clone() for n, x in self.inputs.items()}
        floats = {n: x.requires_grad_() for n, x in inputs.items() if x.is_floating_point() and n in given}
        y = self.net(*inputs.values())
        return floats, y, random(y, 1)

    def judged(self, what: str, got: Mapping[str, np.ndarray], want: Mapping[str, Tensor | None]) -> None:
        """Compare what initializers and inputs got with what parameters and inputs should; shared ones get the sum."""
        sums: dict[str, np.ndarray] = {}
        for name, array in got.items():
            weight = self.weights.get(name)
            key, array = (name, array) if weight is None else (weight.parameter, weight.of(array))
            sums[key] = sums[key] + array if key in sums else array
        zeros = {n: np.zeros_like(a) for n, a in sums.items()}
        compared(what, sums, {n: zeros[n] if g is None else g.detach().numpy() for n, g in want.items()}, self.limit)

    def gradients(self) -> None:
        """Of every weight, and of inputs that are floats."""
        floats, y, u = self.pulled()
        sources = floats | self.parameters
        want = dict(zip(sources, torch.autograd.grad(y, list(sources.values()), u, allow_unused=True)))
        wrt = [*floats, *self.weights]
        derived = onnxgrad.vjp(self.model, wrt=wrt, of="y")
        names = onnxgrad.signature(derived)
        got = run(derived, self.feeds | {names.cotangents["y"]: u.numpy()})
        try:
            self.judged("gradients", {n: got[names.gradients[n]] for n in wrt}, want)
        except Wrong as error:
            self.differences({n: got[names.gradients[n]] for n in self.weights}, want, u)
            raise error

    def differences(self, got: Mapping[str, np.ndarray], want: Mapping[str, Tensor | None], u: Tensor) -> None:
        """Raises ExportFails if the export itself moves as its gradients say, and not as PyTorch's do.

        Along PyTorch's gradient of the weight that differs most: then what was exported is another function.
        """

        def slopes(name: str) -> tuple[float, float, np.ndarray]:
            weight = self.weights[name]
            g = want[weight.parameter]
            v = weight.of(np.zeros_like(weight.of(got[name])) if g is None else g.numpy()).astype(np.float64)
            v = v / (np.abs(v).max(initial=0) or 1.0)
            return float((got[name] * v).sum()), 0.0 if g is None else float((weight.of(g).numpy() * v).sum()), v

        name = max(got, key=lambda n: abs(slopes(n)[0] - slopes(n)[1]))
        mine, theirs, v = slopes(name)
        (held,) = (i for i in self.model.graph.initializer if i.name == name)
        kept, array = held.SerializeToString(), onnx.numpy_helper.to_array(held)
        found = []
        for h in (0.1, 0.01):
            ends = []
            for sign in (1, -1):
                held.CopyFrom(onnx.numpy_helper.from_array((array + sign * h * v).astype(array.dtype), name))
                ends.append(float((run(self.model, self.feeds)["y"].astype(np.float64) * u.numpy()).sum()))
            found.append((ends[0] - ends[1]) / (2 * h))
        held.ParseFromString(kept)
        if min(abs(d - mine) for d in found) < 0.1 * min(abs(d - theirs) for d in found):
            raise ExportFails(
                f"the export is another function: along {name} its slope is {found[-1]:.3g}, its gradient {mine:.3g}, "
                f"and PyTorch's {theirs:.3g}"
            )

    def second_order(self) -> None:
        """The dependence of one weight's gradient, along a direction, on every weight."""
        _, y, u = self.pulled()
        sources = self.parameters
        holders = [w.parameter for w in self.weights.values()]
        single = [n for n, w in self.weights.items() if holders.count(w.parameter) == 1]
        matrices = [n for n in single if sources[self.weights[n].parameter].dim() > 1 and "embed" not in n] or single
        name = matrices[len(matrices) // 2]
        weight = self.weights[name]
        (first,) = torch.autograd.grad(y, sources[weight.parameter], u, create_graph=True)
        direction = random(first, 2)
        if first.requires_grad:
            try:
                want = torch.autograd.grad(first, list(sources.values()), direction, allow_unused=True)
            except RuntimeError as error:
                raise NotJudged(f"PyTorch has no second order: {brief(error)}") from error
        else:
            want = (None,) * len(sources)
        once = onnxgrad.vjp(self.model, wrt=name, of="y")
        names = onnxgrad.signature(once)
        twice = onnxgrad.vjp(once, wrt=list(self.weights), of=names.gradients[name])
        again = onnxgrad.signature(twice)
        feeds = self.feeds | {names.cotangents["y"]: u.numpy()}
        got = run(
            twice, feeds | {again.cotangents[names.gradients[name]]: np.ascontiguousarray(weight.of(direction).numpy())}
        )
        self.judged(
            f"second order of {name}", {n: got[again.gradients[n]] for n in self.weights}, dict(zip(sources, want))
        )

    def folded(self) -> int:
        """The number of relevant parameters that exist only in the exporter's folded form."""
        _, y, u = self.pulled()
        held = self.parameters
        rest = [p for n, p in self.net.named_parameters() if p.requires_grad and n not in held]
        grads = torch.autograd.grad(y, rest, u, allow_unused=True) if rest else ()
        return sum(g is not None and bool(g.abs().max() > 0) for g in grads)

    def training(self, batches: bool) -> str:
        """Five steps of gradient descent of what trains by default; returns what that leaves out or takes too much.

        With `batches`, batch normalization is as in training, in PyTorch and by what `attach` makes of it.
        """
        holders = [w.parameter for w in self.weights.values()]
        if len(set(holders)) < len(holders):
            return "training not compared: a shared weight is two initializers in the file"
        net = copy.deepcopy(self.net).train(batches)
        own = dict(net.named_parameters())
        parameters = {n: own[w.parameter] for n, w in self.weights.items()}
        with torch.no_grad():
            y = copy.deepcopy(net)(*self.inputs.values())
        target = random(y, 3)
        options = {"output": "y", "loss": "mse", "optimizer": "sgd", "train_mode": batches}

        def loss_of() -> Tensor:
            return ((net(*self.inputs.values()) - target) ** 2).mean()

        attached = attach(self.model, learning_rate=0.0, **options)
        chosen = {b.key for b in attached.training_info[0].update_binding}
        chosen &= {i.name for i in self.model.graph.initializer}
        start = loss_of()
        grads = dict(zip(parameters, torch.autograd.grad(start, list(parameters.values()), allow_unused=True)))
        used = {n for n, g in grads.items() if g is not None and bool(g.abs().max() > 0)}
        moved = {n.split("running_")[0] for n in chosen if "running_" in n}
        odd = [f"trains {n}" for n in sorted(chosen - parameters.keys()) if n.split("running_")[0] not in moved]
        odd += [f"leaves out {n}" for n in sorted(used - chosen)]
        chosen &= used
        norm = sum(float((grads[n].double() ** 2).sum()) for n in chosen)  # type: ignore[union-attr]
        if not norm > 0:
            raise Wrong(f"nothing to train among {sorted(chosen)[:3]}")
        rate = 0.02 * start.item() / norm
        net.load_state_dict(copy.deepcopy(self.net.state_dict()))
        optimizer = torch.optim.SGD([parameters[n] for n in sorted(chosen)], lr=rate)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        step = compile_step(attach(self.model, learning_rate=rate, trainable=sorted(chosen), **options))
        (labels,) = set(step.batch) - set(self.feeds)
        batch = {n: a for n, a in self.feeds.items() if n in step.batch} | {labels: target.numpy()}
        runner = StepRunner(step, threads=1)
        got = [float(np.array(runner.step(batch)[step.loss])) for _ in range(STEPS)]
        fall = losses[0] - losses[-1]
        if fall <= 0 or not np.abs(np.subtract(got, losses)).max() < 0.01 * fall:
            raise Wrong(f"losses {got}, not {losses}")
        return "; ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")


def random(like: Tensor, seed: int) -> Tensor:
    """Numbers of the normal distribution, the same in every precision."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def prove(architecture: Architecture, exporter: str) -> Outcome:
    """Hold `architecture`, exported by `exporter`, to PyTorch."""
    outcome = Outcome("right")
    remarks: list[str] = []
    try:
        net, inputs = architecture.made()
        case = Case.of(net.eval(), inputs, exporter)
        for what, part in (("gradients", Case.gradients), ("second order", Case.second_order)):
            try:
                outcome.proven.append(what + either(part, case, net, inputs, exporter))
            except NotJudged as error:
                remarks.append(str(error))
        if count := case.folded():
            remarks.append(f"what the exporter made of parameters stands for them: {count}")
        batches = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
        remark = case.training(batches)
        remarks += [remark] if remark else []
        outcome.proven += [] if remark.startswith("training not") else ["training"]
        if batches:
            try:
                case = Case.of(net.train(), inputs, exporter)
                what = "batch normalization" + either(Case.gradients, case, net, inputs, exporter)
                outcome.proven.append(what)
            except ExportFails as error:
                remarks.append(f"in training {error}")
    except ExportFails as error:
        outcome.verdict = "not exported"
        remarks.append(str(error))
    except OnnxGradError as error:
        outcome.verdict = "refused"
        remarks.append(brief(error))
    except Wrong as error:
        outcome.verdict = "WRONG"
        remarks.append(str(error))
    except Exception as error:  # a derivative that does not run, for one
        outcome.verdict = "WRONG"
        remarks.append(f"{type(error).__name__}: {brief(error)}")
    outcome.remark = "; ".join(remarks)
    return outcome


def either(part: Any, case: Case, net: nn.Module, inputs: dict[str, Tensor], exporter: str) -> str:
    """Prove `part` in float32, or else in float64; says which, if the latter."""
    try:
        part(case)
    except Wrong as error:
        try:
            part(Case.of(net, inputs, exporter, wide=True))
        except (ExportFails, Wrong) as wide:
            raise Wrong(f"{error}; in float64 {wide}") from wide
        return " (float64)"
    return ""
