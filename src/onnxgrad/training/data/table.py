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
import onnx_ir as ir

from onnxgrad.errors import BadInput, printable
from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.ir.names import Names
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.column_fit import ColumnFit, TableColumn, TableSettings
from onnxgrad.training.data.raw_columns import RawColumn, checked_raw

#: Ways to fill missing values, and forms of categories.
MISSING, CATEGORIES = ("mean", "median", "drop", "indicator"), ("onehot", "index")
ML, RAW_ROWS = "ai.onnx.ml", "N"
_FLOAT = int(ir.DataType.FLOAT)


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

    def _raw_inputs(self, names: Sequence[str], rows: Any) -> list[ir.Value]:
        """The inputs that take raw columns, under these names."""
        types = [ir.DataType.STRING if c.kind == "text" else ir.DataType.DOUBLE for c in self.columns]
        return [ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape([rows])) for n, t in zip(names, types)]

    def model(self) -> ir.Model:
        """The graph from the inputs ``raw_0``, … to ``numbers``."""
        raws = self._raw_inputs([f"raw_{k}" for k in range(len(self.columns))], RAW_ROWS)
        graph = ir.Graph(raws, [], nodes=[], opset_imports={"": 18, ML: 3}, name="table")
        b = Builder(graph, noting=False)
        y = self._emit(b, [b.var(v) for v in raws]).value
        y.name, y.shape = "numbers", ir.Shape([RAW_ROWS, len(self.numbers)])
        graph.outputs.append(y)
        return ir.Model(graph, ir_version=9)

    def _emit(self, b: Builder, raws: Sequence[Var]) -> Var:
        """The numbers of raw columns, [N, numbers]."""
        parts, marks = [], []
        runs = itertools.groupby(enumerate(self.columns), lambda kc: kc[0] if kc[1].kind == "text" else -1)
        for run in [list(group) for _, group in runs]:  # a text, or several columns of numbers
            (k, c), columns = run[0], [c for _, c in run]
            if c.kind == "text":
                first = 1 if self.as_index else 0
                keys, values = list(c.categories), list(range(first, first + len(c.categories)))
                if c.fill is not None and "" not in keys:
                    keys, values = [*keys, ""], [*values, first + c.categories.index(str(c.fill))]
                x = _encode(b, raws[k], keys_strings=keys, values_int64s=values, default_int64=first - 1)
                if not self.as_index:
                    x = b.Cast(b.Equal(x, np.arange(len(c.categories))[None]), to=_FLOAT)
                parts.append(x)
                if c.indicator:
                    marks.append(_encode(b, raws[k], keys_strings=[""], values_floats=[1.0], default_float=0.0))
                continue
            x = b.Concat(*(raws[i] for i, _ in run), axis=0)
            x = b.Transpose(b.Reshape(x, [len(run), -1]), perm=[1, 0])
            marked = [i for i, c in enumerate(columns) if c.indicator]
            if marked or any(c.fill is not None for c in columns):
                gone = b.IsNaN(x)
                x = b.Where(gone, np.array([float(c.fill or 0) if self.missing else np.nan for c in columns]), x)
                if marked:
                    marks.append(b.Gather(b.Cast(gone, to=_FLOAT), marked, axis=1))
            if any(c.mean or c.scale != 1 for c in columns):
                x = b.Div(b.Sub(x, np.array([c.mean for c in columns])), np.array([c.scale for c in columns]))
            parts.append(b.Cast(x, to=_FLOAT))
        return b.Concat(*parts, *marks, axis=1)

    def write(self, model: ir.Model, name: str) -> tuple[dict[str, TableColumn], str]:
        """Put the graph in front of the input `name` of `model`, in place.

        Returns:
            The columns by their new inputs, and the name of the value in place of the input.
        """
        graph, names = model.graph, Names.of(model)
        target = next(v for v in graph.inputs if v.name == name)
        called = [names.exactly(c.name) if c.name != name else names.fresh(f"{c.name}_column") for c in self.columns]
        inputs = self._raw_inputs(called, None if target.shape is None else target.shape[0])
        places = list(graph.inputs)
        at = places.index(target)
        graph.inputs[:] = [*places[:at], *inputs, *places[at + 1 :]]
        model.opset_imports.setdefault(ML, 3)
        b = Builder(graph, names, noting=False, prefix=name)
        b.before = next(iter(graph), None)
        end = self._emit(b, [b.var(v) for v in inputs])
        if target.shape is not None and len(target.shape) == 1:
            end = b.Reshape(end, [-1])
        if target.dtype not in (None, end.dtype):
            end = b.Cast(end, to=int(target.dtype or 0))
        end.value.type, end.value.shape = target.type, target.shape
        target.replace_all_uses_with(end.value, replace_graph_outputs=True)
        return dict(zip(called, self.columns)), end.name


def _encode(b: Builder, texts: Var, **attributes: Any) -> Var:
    """The numbers of `texts`, one below the other."""
    return b.Reshape(b.emit("LabelEncoder", texts, domain=ML, **attributes), [-1, 1])


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
