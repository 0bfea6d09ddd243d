"""Sessions of stock ONNX Runtime: a graph after its passes, in memory or through a file; errors of one line."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad._later import without_collection
from onnxgrad.errors import BadInput, is_unicode
from onnxgrad.external_data import check_external
from onnxgrad.ir.graph import dependents, scopes
from onnxgrad.ir.match import is_op
from onnxgrad.ir.passes import Passed, run_passes, warn_of
from onnxgrad.ir.serialize import serialize, serialize_apart
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.feeds import feed
from onnxgrad.runtime.idle_fusions import idle_fusions
from onnxgrad.runtime.kernels import wants_kernels
from onnxgrad.runtime.options import Options
from onnxgrad.runtime.passes import OPTIMIZATION, PREPARATION, Memory, SessionSetting
from onnxgrad.runtime.same_memory import SameMemory
from onnxgrad.runtime.setting import Setting
from onnxgrad.runtime.tensors import array_of, ort_value
from onnxgrad.runtime.wrong_fusions import wrong_fusions

#: Models with more bytes of constants go to the runtime through a file, which it maps into memory: as a message they
#: are held four times meanwhile (a ResNet-50 with its way back takes 930 MB so, and 700 through a file).
_LARGE = 1 << 25

#: Training steps with more bytes of constants do without packed copies of them (see `Options.packed`).
_UNPACKED = 1 << 28

#: A protobuf message must stay below 2 GiB.
_MESSAGE_LIMIT = 2_000_000_000


#: Types of tensors that numpy has itself.
_OF_NUMPY = frozenset(
    f"tensor({n})"
    for n in "float double float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool string".split()  # noqa: SIM905
)


#: The runtime's text around the type of the tensors in a sequence or an optional.
_HELD = re.compile(r"optional\(|seq\(|(?<=\))\)")

#: A model in memory, serialized, or its path.
AnyModel = ir.Model | onnx.ModelProto | bytes | str | Path


@without_collection()
def create(
    model: AnyModel,
    options: Options,
    flush: bool = False,
    renewed: Mapping[str, str] | None = None,
    overwritten: set[str] | None = None,
    shared: SameMemory | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime for `model`, which may be larger than a protobuf message.

    Args:
        model: the model to run.
        options: the settings of ONNX Runtime.
        flush: treat denormal numbers as zeros in the session's threads. The first such session of a process makes the
            calling thread do so as well, from then on.
        renewed: inputs that are state, and the outputs that are their new values.
        overwritten: receives the inputs whose new value a kernel may write over the old one.
        shared: receives the same for standard operators, where there are no kernels.
        shapes: receives those of outputs that the session returns in other shapes; the caller reshapes them.

    Raises:
        BadInput: ONNX Runtime cannot load it.
    """
    if isinstance(model, onnx.ModelProto):
        model = ir.from_proto(model)
    if options.target != "portable":
        graph = model if isinstance(model, ir.Model) else _read(model)
        wanted = graph is not None and _may_want_kernels(graph)
        if options.target == "auto":
            options = options.resolve_target() if wanted else dataclasses.replace(options, target="portable")
        if options.target == "native" and wanted and graph is not None:
            model = graph
    wrong = wrong_fusions(model) if options.level != "none" else []
    if isinstance(model, ir.Model) and options.level is None:
        options = dataclasses.replace(options, level="all" if _gains_from_layout(model, bool(renewed)) else "extended")
    native = options.native()
    if flush:
        native.add_session_config_entry("session.set_denormal_as_zero", "1")
    packs = keeps_packed(model, options, bool(renewed))
    if not packs:
        native.add_session_config_entry("session.disable_prepacking", "1")

    def load(model: ir.Model | bytes | str | Path) -> onnxruntime.InferenceSession:
        names, settings = options.provider_names, options.provider_settings
        left_out = wrong + (idle_fusions(model) if isinstance(model, ir.Model) and options.level != "none" else [])
        without = {"disabled_optimizers": left_out} if left_out else {}
        return _load_session(
            model,
            lambda s: onnxruntime.InferenceSession(s, native, providers=names, provider_options=settings, **without),
        )

    try:
        if not isinstance(model, ir.Model):
            return load(model)
        memory = Memory(renewed or {}, overwritten is not None, shared is not None, packs, shapes is not None)
        session, setting = _create_optimized(model, options, memory, load)
    except BadInput:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base but this one
        raise BadInput(f"ONNX Runtime cannot load the model: {one_line(error)}") from error
    if overwritten is not None:
        overwritten |= setting.overwritten
    if shared is not None:
        shared.take(setting.shared)
    if shapes is not None:
        shapes |= setting.shapes
    return session


def keeps_packed(model: ir.Model | bytes | str | Path, options: Options, has_state: bool) -> bool:
    """True if a session of `model` keeps packed copies of constants, see `Options.packed`."""
    if options.packed is not None:
        return options.packed
    return not (has_state and isinstance(model, ir.Model) and _constant_bytes(model) >= _UNPACKED)


def session_source(path: str | os.PathLike) -> str | bytes:
    """The source of a session of ONNX Runtime: `path`, or the file's bytes if its name is not UTF-8.

    Raises:
        BadInput: the model keeps weights in a file elsewhere, which the runtime would read (see `external_data`).
    """
    name = os.fspath(path)
    check_external(Path(name))
    return name if is_unicode(name) else Path(name).read_bytes()


def passes_of(
    model: ir.Model, options: Options, memory: Memory | None = None, upto: int | None = None, counted: bool = False
) -> Passed[SessionSetting]:
    """`model` after the passes of a session, with a report of each.

    Args:
        model: the model to run.
        options: the settings of ONNX Runtime, with "portable" or "native" as the target.
        memory: the state of the session.
        upto: the number of optimizations that run; default: all.
        counted: count the nodes before and after each pass.
    """
    said = options.target, options.layout, options.provider_names
    first = run_passes(model, PREPARATION, lambda: Setting(model.graph, *said), options.without, counted)
    original = first.model.graph
    setting = partial(SessionSetting, original, *said, level=options.level, **({} if memory is None else vars(memory)))
    optimized = run_passes(first.model, OPTIMIZATION[:upto], setting, options.without, counted)
    return dataclasses.replace(
        optimized, reports=first.reports + optimized.reports, failed=first.failed | optimized.failed
    )


def _create_optimized(
    model: ir.Model, options: Options, memory: Memory, load: Callable[[ir.Model], onnxruntime.InferenceSession]
) -> tuple[onnxruntime.InferenceSession, SessionSetting]:
    """A session of `model` after passes; passes that fail, or whose graph ONNX Runtime refuses, are skipped."""
    refused: dict[str, str] = {}
    while True:
        passed = passes_of(model, options, memory)
        try:
            session = load(passed.model)
        except BadInput:
            raise
        except Exception as error:
            if not refused:
                portable = dataclasses.replace(options, target="portable")
                load(passes_of(model, portable, memory, upto=0).model)  # raises if the model itself is refused
            for i, p in enumerate(OPTIMIZATION):
                if p.looks or p.name not in passed.applied:
                    continue
                try:
                    load(passes_of(model, options, memory, upto=i + 1).model)
                except Exception:  # the first graph that is refused
                    refused[p.name] = f"ONNX Runtime refuses the graph: {one_line(error)}"
                    options = dataclasses.replace(options, without=(*options.without, p.name))
                    break
            else:
                raise
        else:
            warn_of(passed.failed | refused)
            return session, passed.setting
        finally:
            for node in passed.setting.unnamed:
                node.name = None


def _load_session(
    model: ir.Model | bytes | str | Path, session: Callable[[bytes | str], onnxruntime.InferenceSession]
) -> onnxruntime.InferenceSession:
    """A session of `model`, through a file if it is large or has external data."""
    if not isinstance(model, ir.Model):
        return session(model if isinstance(model, bytes) else session_source(model))
    weight, is_apart = _constant_bytes(model), _has_external_data(model)
    in_file = is_apart or weight >= _LARGE
    created = _through_a_file(model, session, weight < _MESSAGE_LIMIT and not is_apart) if in_file else None
    return session(serialize(model).SerializeToString()) if created is None else created


def _may_want_kernels(model: ir.Model) -> bool:
    try:
        return wants_kernels(model)
    except Exception:  # a recogniser fails: so does the pass that it belongs to, which warns
        return True


def _has_external_data(model: ir.Model) -> bool:
    tensors = (v.const_value for graph in scopes(model.graph) for v in graph.initializers.values())
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)


def _constant_bytes(model: ir.Model) -> int:
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def _read(model: bytes | str | Path) -> ir.Model | None:
    """The deserialized model, if it may contain nodes for kernels; None if only the runtime needs it."""
    try:
        proto = onnx.ModelProto.FromString(model if isinstance(model, bytes) else Path(model).read_bytes())
        apart = onnx.TensorProto.EXTERNAL
        if proto.graph.sparse_initializer or any(t.data_location == apart for t in proto.graph.initializer):
            return None
        return ir.from_proto(proto)
    except Exception:  # the runtime reports the error
        return None


def _through_a_file(
    model: ir.Model, session: Callable[[str], onnxruntime.InferenceSession], may_fail: bool
) -> onnxruntime.InferenceSession | None:
    """A session with constants in a deleted file, which stays open; None if there is no room for it."""
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "model.onnx")
        try:
            with open(path.with_name("model.data"), "wb") as weights:
                path.write_bytes(serialize_apart(model, weights, "model.data").SerializeToString())
        except OSError:
            if not may_fail:
                raise
            return None
        created = session(str(path))
    give_back()
    return created


def give_back(old: bool = False) -> None:
    """Return memory freed by building graphs and sessions to the system (if the C library can; 11 to 36 MB).

    Graphs have many cycles, so temporary objects stay until the garbage collector runs. It pauses while graphs are
    built, so they are of its youngest generation, or of the second one after a pause.

    Args:
        old: look at old objects as well (modules among them), which takes longer: graphs that hold large weights become
            old if other models were built before.
    """
    gc.collect(2 if old else 1 if gc.isenabled() else 0)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _gains_from_layout(model: ir.Model, has_state: bool) -> bool:
    """True if some Conv of `model` has constant weights, and it is worth to have ONNX Runtime lay them out anew.

    It is not for large weights whose gradients the model returns, since these are computed in the former layout:
    creating the session takes twice as long, to save 0 to 14 % of a run (see docs/internals/sessions.md).
    """
    filters = [w for g in scopes(model.graph) for n in g if is_op(n, "Conv") and (w := n.inputs[1]) is not None]
    if not any(w.is_initializer() and not w.is_graph_input() for w in filters):
        return False
    few = has_state or _constant_bytes(model) < _LARGE
    return few or dependents(model.graph, model.graph.inputs).isdisjoint(filters)


def _fed(name: str, held: Any) -> Any:
    """`feed` of each array in a sequence, which is a list; an optional without a value is None."""
    if isinstance(held, list):
        return [_fed(name, each) for each in held]
    return None if held is None else feed(name, held)


class Session:
    """A model on plain ONNX Runtime: feeds in, outputs by name out.

    Attributes:
        native: the session of ONNX Runtime.
        inputs, outputs: the names of the inputs and outputs.
        shapes: those of outputs that `native` returns in other shapes.
    """

    def __init__(self, model: AnyModel, options: Options | None = None) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.native = create(model, options or Options(), shapes=self.shapes)
        self.inputs = [v.name for v in self.native.get_inputs()]
        self.outputs = [v.name for v in self.native.get_outputs()]
        ends = (*self.native.get_inputs(), *self.native.get_outputs())
        self._leaves_garbage = isinstance(model, ir.Model) and _constant_bytes(model) >= _LARGE
        self._is_numpy = all(_HELD.sub("", v.type) in _OF_NUMPY for v in ends)

    def run(self, feeds: Mapping[str, np.ndarray], outputs: list[str] | None = None) -> dict[str, np.ndarray]:
        """Evaluate `outputs` (default: all).

        Raises:
            BadInput: ONNX Runtime refuses the feeds or fails on them, or would misread them (see `feed`).
        """
        if self._leaves_garbage:  # the caller may have dropped the model by now
            self._leaves_garbage = False
            give_back()
        names = self.outputs if outputs is None else outputs
        feeds = {name: _fed(name, array) for name, array in feeds.items()}
        try:
            if self._is_numpy:  # a third of the time that values of the runtime take
                return self.reshape(dict(zip(names, self.native.run(names, feeds))))
            values = {k: ort_value(np.ascontiguousarray(v)) if v.ndim else ort_value(v) for k, v in feeds.items()}
            results: list[Any] = self.native.run_with_ort_values(names, values)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {one_line(error)}") from error
        return self.reshape({name: array_of(value) for name, value in zip(names, results)})

    def reshape(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """`arrays`, results of `native` by name, in the shapes of the model."""
        for name in self.shapes.keys() & arrays.keys() if self.shapes else ():
            arrays[name] = arrays[name].reshape(self.shapes[name])
        return arrays
