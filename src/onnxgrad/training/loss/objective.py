"""The objective: one loss, or a weighted sum of several, each of a prediction and its labels.

A term is a loss of this package by name, or any graph that computes a scalar: an ONNX model, a FunctionProto, an
onnxscript function, or the recording of a function (see `recorded`). Labels are inputs of the algorithm, or outputs of
a teacher, a model that becomes a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import not_none
from onnxgrad.training.graph.inline_graphs import Inlined
from onnxgrad.training.graph.row_axis import rows_first
from onnxgrad.training.loss.class_axis import CLASS_AXIS, with_class_axis
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.loss.label_inputs import Labels, classes
from onnxgrad.training.loss.logits import Ending
from onnxgrad.training.loss.loss_function import LossFunction, prediction
from onnxgrad.training.loss.recorded import Recorded, arranged, is_function, of_graph, operand_of, record
from onnxgrad.training.loss.row_pairs import fit_axes, paired_rows
from onnxgrad.training.loss.score_blocks import MANY, ScoreBlocks
from onnxgrad.training.loss.step_metrics import row_functions, write_step_metrics
from onnxgrad.wording import tensor_text, type_text

#: The name of a value that has none in the model, such as the logits of a LinearClassifier.
_OWN = re.compile(r"d_[A-Z]\w*_\d+")
#: The denominator of a sum that is no mean, in words.
SUMMED = "nothing"


class Objective:
    """The terms, being written.

    Args:
        builder: writes behind the inference graph.
        terms: the losses that are added.
        output: finds the value of the model that a name stands for (None: the only float output).
        rows: the axis of a prediction along which the rows of the data lie (see `row_axis`).
        whole: True if losses must be functions of the predictions as a whole.
    """

    def __init__(
        self,
        builder: Builder,
        terms: Sequence[Loss],
        output: Callable[[str | None], ir.Value],
        rows: Callable[[ir.Value], int] = lambda value: 0,
        whole: bool = False,
    ) -> None:
        self.b, self.terms, self.output, self.rows, self.whole = builder, terms, output, rows, whole
        #: of each term: the class axis of the model's output, and the permutation that moves its rows to the front
        self._given: list[tuple[Any, list[int] | None]] = []
        self.losses = [self._function(t) for t in terms]
        self.inputs = list(builder.graph.inputs)
        self.measures: dict[str, Var] = {}
        self.notes: dict[str, None] = {}
        self._values = {v.name or "": v for v in builder.graph.inputs}
        self._values |= {v.name: v for node in builder.graph for v in node.outputs if v.name}
        #: losses that are graphs, with the values of the model that they read (None: data), and the names of these
        self.graphs: dict[int, Inlined] = {}
        self._reads: dict[int, list[ir.Value | None]] = {}
        self._feeds: dict[int, list[str]] = {}
        self.recorded: list[Recorded] = []
        #: the names of the results of the terms, where there are several
        self.named: list[str] = []
        for k in [k for k, kind in enumerate(self.losses) if kind is None]:
            self._open_graph(k)

    def _open_graph(self, k: int) -> None:
        """Open term `k`, a graph, or record it."""
        term, what = self.terms[k], f"the loss {self.terms[k].name!r}"
        if is_function(term.loss):
            loss, names, fed = arranged(term.loss, self._values, term.labels)
            values = [self._values.get(n) if f is None else None for n, f in zip(names, fed)]
            if values[0] is None and fed[0] is None:
                values[0] = self.output(term.output)
            operands = [None if v is None else operand_of(v) for v in values]
            examples = {
                n: np.asarray(term.examples[f]) for n, f in zip(names, fed) if f is not None and f in term.examples
            }
            found: Recorded | None = record(loss, names, operands, examples)
            assert found is not None
            self.graphs[k] = Inlined(found.model, what)
            feeds = [f or "" for f in fed]
        else:
            self.graphs[k] = graph = Inlined(term.loss, what)
            feeds = list(graph.inputs)
            values = [self._values.get(name) for name in feeds]
            if feeds and values[0] is None:
                values[0] = self.output(term.output)
            found = None if graph.model is None else of_graph(term.name, graph.model)
        self._reads[k], self._feeds[k] = values, feeds
        if found is not None:
            reads = [f if v is None else v.name or "" for f, v in zip(feeds, values)]
            own = frozenset(v.name or "" for v in values if v is not None)
            counts = {f: found.classes[n] for n, f in zip(names, feeds) if n in found.classes} if found.classes else {}
            self.recorded.append(replace(found, reads=tuple(reads), values=own, classes=counts))

    def _function(self, term: Loss) -> tuple[LossFunction, dict[str, Any]] | None:
        """The loss of that name, and its options; None for a graph."""
        found = term.function()
        if found is None:
            self._given.append((None, None))
            return None
        loss, options = found
        y = self.output(term.output)
        rank, at = len(y.shape or ()), self.rows(y)
        if "time" in options:  # the operator of CTC reads either order
            options = {**options, "time": 0 if at == 1 else options["time"]}
            at = 0
        if "axis" in options:
            given, options = options["axis"], with_class_axis(options, y, at)
            if given is not None and rank > 2:
                y.metadata_props[CLASS_AXIS] = str(given)
        perm = rows_first(rank, at) if at else None
        self._given.append((options.get("axis"), perm))
        if perm is not None and "axis" in options:
            options = {**options, "axis": perm.index(options["axis"] % rank)}
        return loss, options

    def predictions(self) -> list[ir.Value]:
        """Every value of the model that a term reads."""
        found: dict[ir.Value, None] = {}
        for k, kind in enumerate(self.losses):
            if kind is not None:
                found |= dict.fromkeys(self._ending(k).leaves)
            else:
                found |= dict.fromkeys(v for v in self._reads[k] if v is not None)
        return list(found)

    @property
    def needs_all_rows(self) -> bool:
        """True if losses of parts of a batch may not add up to that of the batch.

        One is a graph or a function, or compares rows; or their means are over different counts.
        """
        counts = {self._counted(k) for k, kind in enumerate(self.losses) if kind is not None}
        return len(counts) > 1 or any(kind is None or kind[0].compares_rows(kind[1]) for kind in self.losses)

    def gather_predictions(self, copies: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Identities of the predictions, for a loss of all rows: they can be replaced by those of all parts of a batch.

        Raises:
            BadInput: the rows of a prediction are not on its first axis, or their number is fixed.
        """
        found = {}
        for value in self.predictions():
            if self.rows(value) or not value.shape or isinstance(value.shape[0], int):
                raise BadInput(
                    f"{value.name!r}, which a loss reads, has no open number of rows on its first axis, so parts of a "
                    "batch cannot be joined\n  hint: --memory 2GB needs less memory as well, and computes the same"
                )
            gathered = self.b.copy(copies.get(value, value))
            gathered.value.name = self.b.names.exactly(f"{value.name}_of_batch")
            found[value] = gathered.value
        return found

    def count_once(self) -> None:
        """Write ``batch_sum`` for terms that are taken of all rows at once."""
        self._weigh([(SUMMED, self.b.const(np.float32(1)))])

    def _ending(self, k: int) -> Ending:
        """The values that term `k`, a loss by name, compares with labels."""
        term, kind = self.terms[k], not_none(self.losses[k])
        value = self.output(term.output)
        axis, perm = self._given[k]
        if kind[0].labels is classes:  # one score is no class, probability or not
            classes(value, {**kind[1], "axis": axis})
        found = prediction(kind[0], value, {**kind[1], "axis": axis}, term.name, term.output is not None)
        if perm is not None:
            found = found.then(lambda b, x: b.Transpose(x, perm=perm))
        if found.leaves != (value,):
            names = [repr(v.name) for v in found.leaves if not _OWN.fullmatch(v.name or "")]
            logits = f"the logits {' and '.join(names)} of" if names else "the logits behind"
            self.notes[f"{term.name} is taken of {logits} the probabilities {value.name!r}"] = None
        return found

    def write(self, copies: Mapping[ir.Value, ir.Value], metrics: Sequence[str] = (), count: bool = False) -> Var:
        """Append all terms. Returns the scalar to minimize; further values are in `measures`.

        Args:
            copies: what the values of the model are in training.
            metrics: names of measures, taken of the first term's prediction and labels.
            count: also write ``batch_weight``, over how much the mean of a batch is taken (``batch_sum`` if losses are
                summed).
        """
        b = self.b
        total: Var | None = None
        counts: list[tuple[str, Var | None]] = []
        for k, term in enumerate(self.terms):
            kind = self.losses[k]
            rights: dict[str, Var] = {}
            if kind is None:
                value, how_much = self._graph(k, copies), None
                operands: tuple[Var, list[Var]] | None = None
            else:
                operands = self._operands(k, copies)
                y, labels = operands
                weighted: Var | None = None
                if term.row_weights is not None:
                    rows = labels[0].dims[:1]
                    column = self.label(term.row_weights, y.dtype or ir.DataType.FLOAT, rows)
                    value, weighted = kind[0].by_rows(b, y, labels, kind[1], column)
                elif (blocks := self._blocks(k, y)) is not None:
                    others = row_functions(metrics) if k == 0 else {}
                    value, *found = kind[0].by_blocks(b, blocks, y, labels[0], kind[1], list(others.values()))
                    rights = dict(zip(others, found))
                else:
                    value = kind[0].write(b, y, *labels, **kind[1])
                how_much = weighted or kind[0].count(b, y, labels, kind[1]) if count else None
                counts.append((self._counted(k), how_much))
            if k == 0 and metrics:
                self.measures |= write_step_metrics(b, metrics, kind, operands, rights)
            if count and how_much is None:
                raise BadInput(
                    f"the loss {term.name!r} does not say over how much its mean is taken, or compares the examples "
                    "of a batch with each other; it cannot be accumulated over parts of a batch\n"
                    "  hint: --memory 2GB needs less memory as well, and computes the same"
                )
            value = b.Mul(value, float(term.factor)) if term.factor != 1 else value
            if len(self.terms) > 1:
                value = self._named(value, f"loss_{term.name}")
                self.measures[value.name] = value
                self.named.append(value.name)
            total = value if total is None else total + b.cast_like(value, total)
        if count:
            self._weigh(counts)
        return self._named(not_none(total), "loss")

    def _named(self, value: Var, name: str) -> Var:
        """`value` under a name of its own."""
        if value.value.producer() is None or value.name in self.measures or value.name == "loss":
            value = self.b.copy(value)
        value.value.name = self.b.names.exactly(name)
        return value

    def _blocks(self, k: int, y: Var) -> ScoreBlocks | None:
        """Logits `y` of term `k` as blocks of rows; None if they are computed as a whole.

        Raises:
            BadInput: blocks are asked for, and cannot be had.
        """
        kind = self.losses[k]
        if kind is None or kind[0].of_rows is None or kind[1]["block_rows"] == 0:
            return None
        asked = kind[1]["block_rows"]
        if self.whole:
            if asked is not None:
                raise BadInput(f"block_rows={asked}: this optimizer needs the predictions as a whole; drop block_rows")
            return None
        found = ScoreBlocks.of(y.value, kind[1]["axis"])
        if found is None and asked is not None:
            raise BadInput(
                f"the loss {self.terms[k].name!r} has block_rows={asked}, but {y.name!r} is not known to be a product "
                "of rows and one matrix\n  hint: drop block_rows, or give the axis of the classes"
            )
        return None if found is None or (asked is None and found.classes < MANY) else found

    def _weigh(self, counts: list[tuple[str, Var | None]]) -> None:
        if len({what for what, _ in counts}) > 1:
            found = " and ".join(sorted({what for what, _ in counts}))
            raise BadInput(f"the losses take their means over {found}; such a sum cannot be accumulated exactly")
        _, value = counts[0]
        assert value is not None
        value = self.b.cast_like(value, self.b.const(np.float32(0)))
        name = "batch_sum" if counts[0][0] == SUMMED else "batch_weight"
        self.measures[name] = self._named(value, name)

    def _counted(self, k: int) -> str:
        """A description of what two losses must share for accumulation of their sum, for loss `k`, by name."""
        kind, weights = not_none(self.losses[k]), self.terms[k].row_weights
        loss, options = kind
        if options["reduction"] == "sum":
            return SUMMED
        extra = [f"{key} {options[key]}" for key in ("ignore_index", "weight") if options.get(key) is not None]
        what = "rows" if loss.mean in ("elements", "labels", "weights") and not extra else loss.mean
        return " with ".join([what, *extra]) + (f" by {weights}" if weights is not None else "")

    def _operands(self, k: int, copies: Mapping[ir.Value, ir.Value]) -> tuple[Var, list[Var]]:
        term, kind = self.terms[k], not_none(self.losses[k])
        loss, options = kind
        y = self._ending(k).write(self.b, lambda v: Var(self.b, copies.get(v, v)))
        wanted = loss.labels(y.value, options)
        if term.teacher is not None:
            return y, [self._taught(term, loss, options, wanted)]
        base = term.labels or "labels"
        return y, [
            self.label(f"{base}{suffix}", *what, named=term.labels is not None) for suffix, what in wanted.items()
        ]

    def label(self, wanted: str, dtype: ir.DataType, dims: Any, named: bool = True) -> Var:
        """The label input: an existing one of the model or another term, or a new one."""
        for value in self.b.graph.inputs:
            if value.name == wanted:
                allowed = {ir.DataType.INT32, ir.DataType.INT64} if dtype == ir.DataType.INT64 else {dtype}
                if value.dtype not in allowed:
                    hint = "" if value in self.inputs else "\n  hint: give the labels of each loss a name, with labels="
                    given = type_text(value.dtype)
                    raise BadInput(
                        f"the label input {wanted!r} is a tensor of {given}, not of {type_text(dtype)}{hint}"
                    )
                return fit_axes(Var(self.b, value), dims, "the labels")
        value = ir.Value(
            name=self.b.names.exactly(wanted),
            type=ir.TensorType(dtype),
            shape=None if dims is None else ir.Shape(dims),
        )
        if named and value.name != wanted:
            hint = "choose another name"
            if wanted != "labels":
                other = f"{wanted}_column"
                hint = (
                    f"of a column, write {other!r}, and --inputs {other}={wanted} (in Python "
                    f"inputs={{{other!r}: {wanted!r}}})"
                )
            raise BadInput(
                f"the loss cannot compare with {wanted!r}, which is a value of the model, but no input\n  hint: {hint}"
            )
        self.b.graph.inputs.append(value)
        return Var(self.b, value)

    def _taught(self, term: Loss, loss: LossFunction, options: Mapping[str, Any], wanted: Labels) -> Var:
        """The output of the teacher, which replaces the labels."""
        if wanted[""][0] == ir.DataType.INT64:
            raise BadInput(f"the loss {term.name!r} takes class numbers, which a teacher does not give; use kl or mse")
        taught = Inlined(term.teacher, "the teacher")
        sources = {v.name: v for v in self.inputs}
        if len(taught.inputs) == len(sources) == 1:
            operands = list(sources.values())
        else:
            missing = [n for n in taught.inputs if n not in sources]
            if missing:
                has = ", ".join(map(repr, sources))
                raise BadInput(f"the teacher has the input {missing[0]!r}, which the model has not; it has: {has}")
            operands = [sources[n] for n in taught.inputs]
        outputs = [v for v in taught.write(self.b, [Var(self.b, v) for v in operands]) if v.dtype in FLOATS]
        if len(outputs) != 1:
            raise BadInput(f"the teacher has {len(outputs)} float outputs; it must have one")
        found, dims = outputs[0], wanted[""][1]
        if options.get("targets", "logits") == "logits":
            found = prediction(loss, found.value, options, term.name).write(self.b, self.b.var)
        return fit_axes(found, dims, "the teacher's output")

    def _graph(self, k: int, copies: Mapping[ir.Value, ir.Value]) -> Var:
        """A loss that is a graph: its first output; the others are measures."""
        loss, b = self.graphs[k], self.b
        operands: list[Var] = []
        first = None
        what = f"the operand of the loss {self.terms[k].name!r}"
        for formal, name, value in zip(loss.inputs, self._feeds[k], self._reads[k]):
            declared = loss.typed.get(formal)
            if value is None:
                if declared is not None and declared.dtype is not None:
                    found = self.label(name, declared.dtype, None if declared.shape is None else tuple(declared.shape))
                else:
                    assert first is not None
                    found = self.label(name, first.dtype or ir.DataType.FLOAT, first.shape)
            else:
                found = Var(b, copies.get(value, value))
            first = first or found
            dims = None if declared is None or declared.shape is None else tuple(declared.shape)
            operands.append(fit_axes(found, dims, what))
        if pairs := paired_rows(loss.model_of(b, operands), [o.shape for o in operands]):
            raise BadInput(f"the loss {self.terms[k].name!r}: {pairs}")
        result, *others = loss.write(b, operands)
        for other in others:
            self.measures[other.name] = other
            if other.name.endswith("_loss") and other.shape == () and other.dtype in FLOATS:
                self.named.append(other.name)
        if result.dtype not in FLOATS or (result.shape is not None and result.shape not in ((), (1,))):
            what = tensor_text(result.dtype, result.shape)
            raise BadInput(f"the loss {self.terms[k].name!r} gives {what}; a loss is a float scalar")
        return result if result.shape == () else b.reshape(result, np.array([], np.int64))
