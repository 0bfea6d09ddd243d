"""Columns of a table as the numbers of one input: missing values, categories, dates, booleans, standardization.

What is fitted on the training rows (means, names of categories) is a graph of ONNX operators from raw columns to the
input. The graph prepares the rows in training, and is written into the saved model, which then takes raw columns.

A raw column is float64 [N] (numbers, booleans as 0 and 1, dates as days since 1970-01-01; NaN is missing), or text [N]
("" is missing).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.errors import BadInput, printable
from onnxgrad.ir.graph import prune
from onnxgrad.ir.names import Names
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.column_fit import ColumnFit, TableColumn, TableSettings
from onnxgrad.training.data.raw_columns import RawColumn, checked_raw

#: Ways to fill missing values, and forms of categories.
MISSING, CATEGORIES = ("mean", "median", "drop", "indicator"), ("onehot", "index")
ML, RAW_ROWS = "ai.onnx.ml", "N"


@dataclass(frozen=True)
class Table:
    """The fitted preparation of the columns of one input.

    Attributes:
        columns: in the order of their numbers.
        as_index: categories are whole numbers from 1 on, and 0 for all others.
        missing: how missing values are filled; empty: the training rows had none.
    """

    columns: tuple[TableColumn, ...]
    as_index: bool = False
    missing: str = ""

    @classmethod
    def fit(cls, fits: Sequence[ColumnFit], settings: TableSettings, is_whole: bool, name: str) -> Table:
        """The preparation of rows with these statistics.

        Args:
            fits: of the training rows, by column.
            settings: of the run.
            is_whole: the input takes whole numbers.
            name: of the input in messages.

        Raises:
            BadInput: a value is missing, or a column has none, or cannot feed the input.
        """
        as_index = settings.categories == "index" or (is_whole and settings.categories is None)
        for fit in fits:
            if not fit.known:
                raise BadInput(f"column {fit.name!r}, which is to feed {name!r}, has no value at all")
            if fit.first_missing is not None and settings.missing is None:
                raise BadInput(
                    f"column {fit.name!r}, which is to feed {name!r}, has no value in row {fit.first_missing}\n"
                    f"  hint: --missing {'|'.join(MISSING)} (in Python missing=) fills it in, or leaves the row out"
                )
            if as_index and fit.kind != "text":
                raise BadInput(
                    f"column {fit.name!r} holds {fit.kind}s, and {name!r} takes the numbers of categories\n"
                    "  hint: join only columns of text, or --categories onehot for an input of floats"
                )
            if is_whole and not as_index:
                raise BadInput(f"{name!r} takes whole numbers; a table feeds it with --categories index")
        filled = "" if settings.missing in (None, "drop") else str(settings.missing)
        return cls(tuple(fit.column() for fit in fits), as_index, filled)

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers of a row, in their order."""
        found = []
        for c in self.columns:
            found += [c.name] if c.kind != "text" or self.as_index else [f"{c.name}={v}" for v in c.categories]
        return [*found, *(f"{c.name} is missing" for c in self.columns if c.indicator)]

    def needs(self, column: TableColumn) -> bool:
        """True if a row must have a value in `column`."""
        return not self.missing

    def check(self, settings: TableSettings, name: str) -> None:
        """Raise BadInput if `settings` ask for another preparation of the input `name` than this fitted one."""
        numbers = [c for c in self.columns if c.kind in ("number", "date")]
        is_plain = bool(numbers) and all(c.mean == 0 and c.scale == 1 for c in numbers)
        if (
            settings.missing not in (None, "drop", self.missing)
            or settings.categories not in (None, CATEGORIES[self.as_index])
            or (settings.standardize and is_plain)
        ):
            raise BadInput(
                f"the model was trained with {name!r} from {self}, and this preparation is not fitted again\n"
                "  hint: leave out --missing, --categories and --standardize"
            )

    def __call__(self, raws: Mapping[str, RawColumn], source: str) -> np.ndarray:
        """The rows of the input, [N, numbers]. Raises BadInput for a missing value or another type."""
        feeds = {}
        for k, c in enumerate(self.columns):
            raw = checked_raw(raws[c.name], c.name, c.kind, not self.needs(c), source)
            feeds[f"raw_{k}"] = raw.values
        (found,) = self._session.run(feeds).values()
        return np.asarray(found)

    @functools.cached_property
    def _session(self) -> Session:
        return Session(self.model(), Options(threads=1))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `of_json` reads."""
        return {"columns": [asdict(c) for c in self.columns], "as_index": self.as_index, "missing": self.missing}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Table:
        """The table that `to_json` wrote. Raises TypeError, ValueError or KeyError for other values."""
        columns = []
        for entry in data["columns"]:
            c = TableColumn(**{**entry, "categories": tuple(map(str, entry["categories"]))})
            if c.kind not in ("number", "boolean", "date", "text") or not np.isfinite([c.mean, c.scale]).all():
                raise ValueError
            columns.append(c)
        if not columns or data["missing"] not in ("", *MISSING):
            raise ValueError
        return cls(tuple(columns), bool(data["as_index"]), str(data["missing"]))

    def __str__(self) -> str:
        words = []
        for c in self.columns[:8]:
            what = f"{len(c.categories)} categories" if c.kind == "text" else c.kind
            words.append(f"{printable(c.name)} ({'days since 1970-01-01' if c.kind == 'date' else what})")
        more = f", … ({len(self.columns)} columns)" if len(self.columns) > 8 else ""
        scaled = ", standardized" if any(c.scale != 1 or c.mean for c in self.columns) else ""
        return f"{', '.join(words)}{more}{scaled}{f', missing: {self.missing}' if self.missing else ''}"

    # --- the graph --------------------------------------------------------------------------------

    def model(self) -> onnx.ModelProto:
        """The graph from the inputs ``raw_0``, … to ``numbers``."""
        nodes: list[onnx.NodeProto] = []
        constants: list[onnx.TensorProto] = []
        parts, marks = [], []

        def constant(name: str, array: Any) -> str:
            constants.append(numpy_helper.from_array(np.asarray(array), name))
            return name

        def emit(op: str, *inputs: str, out: str, domain: str = "", **attributes: Any) -> str:
            nodes.append(helper.make_node(op, list(inputs), [out], domain=domain, **attributes))
            return out

        column = constant("column", np.array([-1, 1])) if any(c.kind == "text" for c in self.columns) else ""
        runs = itertools.groupby(enumerate(self.columns), lambda kc: kc[0] if kc[1].kind == "text" else -1)
        for run in [list(group) for _, group in runs]:  # a text, or several columns of numbers
            (k, c), columns = run[0], [c for _, c in run]
            raw = f"raw_{k}"
            if c.kind == "text":
                first = 1 if self.as_index else 0
                keys, values = list(c.categories), list(range(first, first + len(c.categories)))
                if c.fill is not None and "" not in keys:
                    keys, values = [*keys, ""], [*values, first + c.categories.index(str(c.fill))]
                found = emit("LabelEncoder", raw, out=f"number_{k}", domain=ML, keys_strings=keys, values_int64s=values,
                             default_int64=first - 1)  # fmt: skip
                found = emit("Reshape", found, column, out=f"column_{k}")
                if not self.as_index:
                    classes = constant(f"classes_{k}", np.arange(len(c.categories))[None])
                    equal = emit("Equal", found, classes, out=f"equal_{k}")
                    found = emit("Cast", equal, out=f"onehot_{k}", to=TensorProto.FLOAT)
                parts.append(found)
                if c.indicator:
                    mark = emit("LabelEncoder", raw, out=f"mark_{k}", domain=ML, keys_strings=[""], values_floats=[1.0],
                                default_float=0.0)  # fmt: skip
                    marks.append(emit("Reshape", mark, column, out=f"marks_{k}"))
                continue
            found = emit("Concat", *(f"raw_{i}" for i, _ in run), out=f"joined_{k}", axis=0)
            by_column = constant(f"shape_{k}", np.array([len(run), -1]))
            found = emit(
                "Transpose", emit("Reshape", found, by_column, out=f"columns_{k}"), out=f"rows_{k}", perm=[1, 0]
            )
            marked = [i for i, c in enumerate(columns) if c.indicator]
            if marked or any(c.fill is not None for c in columns):
                gone = emit("IsNaN", found, out=f"gone_{k}")
                fills = constant(f"fill_{k}", [float(c.fill or 0) if self.missing else np.nan for c in columns])
                found = emit("Where", gone, fills, found, out=f"filled_{k}")
                if marked:
                    mark = emit("Cast", gone, out=f"mark_{k}", to=TensorProto.FLOAT)
                    places = constant(f"marked_{k}", np.array(marked))
                    marks.append(emit("Gather", mark, places, out=f"marks_{k}", axis=1))
            if any(c.mean or c.scale != 1 for c in columns):
                found = emit("Sub", found, constant(f"mean_{k}", [c.mean for c in columns]), out=f"centred_{k}")
                found = emit("Div", found, constant(f"scale_{k}", [c.scale for c in columns]), out=f"scaled_{k}")
            parts.append(emit("Cast", found, out=f"float_{k}", to=TensorProto.FLOAT))
        emit("Concat", *parts, *marks, out="numbers", axis=1)
        inputs = [
            helper.make_tensor_value_info(
                f"raw_{k}", TensorProto.STRING if c.kind == "text" else TensorProto.DOUBLE, [RAW_ROWS]
            )
            for k, c in enumerate(self.columns)
        ]
        element = TensorProto.INT64 if self.as_index else TensorProto.FLOAT
        output = helper.make_tensor_value_info("numbers", element, [RAW_ROWS, len(self.numbers)])
        graph = helper.make_graph(nodes, "table", inputs, [output], constants)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def write(self, model: ir.Model, name: str) -> tuple[dict[str, TableColumn], str]:
        """Put the graph in front of the input `name` of `model`, in place.

        Returns:
            The columns by their new inputs, and the name of the value in place of the input.
        """
        graph, own = model.graph, ir.from_proto(self.model())
        target = next(v for v in graph.inputs if v.name == name)
        names = Names.of(model)
        inputs, columns = list(own.graph.inputs), {}
        for value in [*own.graph.initializers.values(), *(v for node in own.graph for v in node.outputs)]:
            wanted = names.fresh(f"{name}_{value.name}")
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy(), name=wanted)
            value.name = wanted
        rows = target.shape[0] if target.shape is not None else None
        for value, c in zip(inputs, self.columns):
            value.name = names.exactly(c.name) if c.name != name else names.fresh(f"{c.name}_column")
            value.shape = ir.Shape([rows])
            columns[value.name] = c
        (end,) = own.graph.outputs
        nodes = list(own.graph)
        held = list(own.graph.initializers.values())
        own.graph.remove(nodes)
        own.graph.initializers.clear()
        own.graph.inputs.clear()
        own.graph.outputs.clear()
        for value in held:
            graph.register_initializer(value)
        places = list(graph.inputs)
        at = places.index(target)
        graph.inputs[:] = [*places[:at], *inputs, *places[at + 1 :]]
        if (target.dtype is not None and target.dtype != end.dtype) or len(target.shape or (0, 0)) == 1:
            nodes += _fit_to(target, end, names)
            end = nodes[-1].outputs[0]
        end.type, end.shape = target.type, target.shape
        target.replace_all_uses_with(end, replace_graph_outputs=True)
        first = next(iter(graph), None)
        if first is None:
            graph.extend(nodes)
        else:
            graph.insert_before(first, nodes)
        model.opset_imports.setdefault(ML, 3)
        return columns, end.name or ""


def cut_off(model: ir.Model, name: str, value: str, fed: Sequence[str]) -> None:
    """Undo `Table.write` in place: the input `name` again in place of the `value`, without the inputs `fed`.

    Raises:
        ValueError: the model has no such value or inputs.
    """
    graph = model.graph
    held = {v.name: v for node in graph for v in node.outputs}.get(value)
    places = [v for v in graph.inputs if v.name in fed]
    if held is None or len(places) != len(fed) or not places:
        raise ValueError(value)
    again = ir.Value(name=name, type=held.type, shape=held.shape)
    held.replace_all_uses_with(again, replace_graph_outputs=True)
    at = list(graph.inputs).index(places[0])
    left = [v for v in graph.inputs if v not in places]
    graph.inputs[:] = [*left[:at], again, *left[at:]]
    prune(graph)
    for tensor in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        if tensor.startswith(f"{name}_"):
            graph.initializers.pop(tensor)
    if not any(node.domain == ML for node in graph.all_nodes()):
        model.opset_imports.pop(ML, None)


def _fit_to(target: ir.Value, end: ir.Value, names: Names) -> list[ir.Node]:
    """Nodes that give `end` the type of `target`, and one axis where it has one."""
    nodes = []
    if target.shape is not None and len(target.shape) == 1:
        axis = ir.Node("", "Constant", [], [ir.AttrInt64s("value_ints", [-1])])
        axis.outputs[0].name = names.fresh("axis")
        nodes += [axis, ir.Node("", "Reshape", [end, axis.outputs[0]])]
        nodes[-1].outputs[0].name = names.fresh("numbers")
        end = nodes[-1].outputs[0]
    if target.dtype is not None and target.dtype != end.dtype:
        nodes.append(ir.Node("", "Cast", [end], [ir.AttrInt64("to", int(target.dtype))]))
        nodes[-1].outputs[0].name = names.fresh("numbers")
    return nodes
