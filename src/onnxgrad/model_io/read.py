"""Read a model file or message; every defect raises one BadInput.

``onnx_ir`` drops two things that must not get lost: ``training_info`` is kept beside the model (see
`training_info`), and sparse initializers are written out as dense ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.external_data import FETCHED, external_locations, settle_external
from onnxgrad.files import open_ordinary, reading
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.names import described
from onnxgrad.model_io.aside import copy_aside, put_back, set_aside
from onnxgrad.model_io.checks.declared_sizes import check_message
from onnxgrad.model_io.checks.notes_in_files import check_notes
from onnxgrad.model_io.hub import HubFile
from onnxgrad.model_io.map_outputs import without_maps
from onnxgrad.model_io.zeros import declare_sparse

TRAINING = "onnxgrad.training_info"


def load_model(path: str | os.PathLike, aside: bool = False) -> ir.Model:
    """The model in a file; weights in external data stay on disk until they are needed.

    Args:
        path: of the file, or ``hf://org/repo/model.onnx`` on the Hugging Face Hub.
        aside: True if large weights of its own wait on disk as well, in a copy (see `set_aside`).

    Raises:
        BadInput: there is no such file, or it is not a whole ONNX model.
    """
    remote = HubFile.of(path)
    path = Path(path) if remote is None else remote.fetch()
    proto = parse(path)
    has_sparse = _check(proto, str(path))
    if remote is not None:
        for location in external_locations(proto):
            remote.beside(location).fetch()
    external = settle_external(proto, path)
    held: Mapping[str, ir.TensorProtocol] = {}
    if aside:
        proto, held = set_aside(proto)
    model = _read(proto, str(path), has_sparse)
    external.hold(model)
    if remote is not None:
        model.meta[FETCHED] = path
    put_back(model, held)
    return model


def as_given(model: str | os.PathLike | onnx.ModelProto | ir.Model) -> ir.Model:
    """`model` unchanged: no other opset, nothing inlined."""
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    return model if isinstance(model, ir.Model) else load_model(model)


def in_memory(tensor: ir.ExternalTensor) -> ir.Tensor:
    """`tensor`, read from its file."""
    return ir.Tensor(
        tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string
    )


def read_proto(proto: onnx.ModelProto, aside: bool = False) -> ir.Model:
    """An ``ir.Model`` for `proto`, which shares its weights; they are never written to.

    With `aside`, large weights are copied to disk instead (see `set_aside`), and nothing is shared.
    """
    what = "the model"
    has_sparse = _check(proto, what)
    proto, held = copy_aside(proto) if aside else (proto, {})
    model = _read(proto, what, has_sparse)
    put_back(model, held)
    return model


def _check(proto: onnx.ModelProto, what: str) -> bool:
    """The checks that are possible before `proto` is converted. Returns True if it has sparse initializers."""
    if not proto.HasField("graph") or not (proto.opset_import or proto.ir_version < 3):
        raise BadInput(f"{what} is not a whole ONNX model\n  hint: was it cut off, or written by something else?")
    for opset in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        if not 0 < opset.version < 2**31:
            raise BadInput(f"{what} is not a valid ONNX model: it imports opset {opset.version}")
    return check_message(proto, what)


def _read(proto: onnx.ModelProto, what: str, has_sparse: bool) -> ir.Model:
    proto = without_maps(proto, what)
    if has_sparse:
        dense = onnx.ModelProto()
        dense.CopyFrom(proto)
        _densify(dense.graph)
        proto = dense
    log = logging.getLogger("onnx_ir.serde")
    disabled, log.disabled = log.disabled, True  # the subject of its warnings is refused below
    try:
        model = ir.from_proto(proto)
    except Exception as e:
        reason = str(e.__cause__ or e).strip().splitlines()[-1]
        raise BadInput(f"{what} is not a valid ONNX model: {reason}") from e
    finally:
        log.disabled = disabled
    model.meta[TRAINING] = [_copy_training_info(t) for t in proto.training_info]
    return model


def training_info(model: ir.Model) -> list[onnx.TrainingInfoProto]:
    """The training information of `model` (it travels in ``model.meta``), to read or to change."""
    return model.meta.setdefault(TRAINING, [])


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """The weights of `model` that are in external data."""
    held = (v.const_value for g in scopes(model.graph) for v in g.initializers.values())
    return [t for t in held if isinstance(t, ir.ExternalTensor)]


def check_scopes(model: ir.Model) -> None:
    """Refuse graphs that read undefined values; sort graphs whose nodes are out of order."""
    try:
        if not is_ordered(model.graph):
            model.graph.sort()
            is_ordered(model.graph)
    except BadInput:
        raise
    except ValueError as e:
        raise BadInput(f"the nodes of the model form a cycle: {e}") from e


def is_ordered(graph: ir.Graph, outer: Collection[ir.Value] = ()) -> bool:
    """True if every value is computed before it is read. Raises BadInput for a value without a producer."""
    known = set(outer) | set(graph.inputs) | set(graph.initializers.values())
    ordered = True
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                if value.producer() is None:
                    raise BadInput(
                        f"{described(node)} reads {value.name!r}, "
                        "which is no input, no initializer and no output of a node"
                    )
                ordered = False
        for inner in subgraphs(node):
            ordered &= is_ordered(inner, known)
        known.update(node.outputs)
    for value in graph.outputs:
        if value not in known:
            raise BadInput(f"output {value.name!r} of the model is given by no node")
    return ordered


def parse(path: Path) -> onnx.ModelProto:
    """The message in a file, unchecked.

    Raises:
        BadInput: there is no such file, or no message in it.
    """
    if path.is_dir():
        raise BadInput(f"{path} is a directory, not a model file")
    try:
        with open_ordinary(path) as file, reading(path):
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise BadInput(f"{path} is empty")
            check_notes(file, size, str(path))
            return onnx.load(file, load_external_data=False)
    except BadInput:
        raise
    except Exception as e:
        hint = "was it cut off, or is it no ONNX file?"
        if size >= 2**31:
            hint = "a single file cannot hold 2 GB or more: save the model with external data"
        elif "depth" in str(e).lower():
            hint = "its graphs lie deeper in each other than the package protobuf reads"
        raise BadInput(f"{path} is not a readable ONNX model\n  hint: {hint}") from e


def _copy_training_info(info: onnx.TrainingInfoProto) -> onnx.TrainingInfoProto:
    """A copy of its own, with sparse initializers written out as those of the model are; large zeros are declared."""
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    if _has_sparse(copy.algorithm):
        _densify(copy.algorithm, declare_sparse)
    if _has_sparse(copy.initialization):
        _densify(copy.initialization)
    return copy


def _inner(graph: onnx.GraphProto) -> Iterable[onnx.GraphProto]:
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield a.g
            yield from a.graphs


def _has_sparse(graph: onnx.GraphProto) -> bool:
    return bool(graph.sparse_initializer) or any(map(_has_sparse, _inner(graph)))


def _densify(
    graph: onnx.GraphProto, declare: Callable[[onnx.SparseTensorProto], onnx.TensorProto | None] = lambda sparse: None
) -> None:
    """Write the sparse initializers of `graph` out, but for those that `declare` gives a message for."""
    for sparse in graph.sparse_initializer:
        declared = declare(sparse)
        if declared is not None:
            graph.initializer.append(declared)
            continue
        values = onnx.numpy_helper.to_array(sparse.values)
        at = onnx.numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if at.ndim == 2:
            dense[tuple(at.T)] = values
        else:
            dense.reshape(-1)[at] = values
        graph.initializer.append(onnx.numpy_helper.from_array(dense, sparse.values.name))
        graph.initializer[-1].metadata_props.extend(sparse.values.metadata_props)
    graph.ClearField("sparse_initializer")
    for inner in _inner(graph):
        _densify(inner)
