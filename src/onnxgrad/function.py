"""A model as a Python function of arrays, with its derivatives as functions of the same kind.

``f = Function(model)`` runs on ONNX Runtime; ``f.grad(wrt="x")`` is a `Function` again, so derivatives compose.
Sessions and derived functions are built on first use and cached; several threads may use them at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import named_values, prune, required_inputs, subgraphs
from onnxgrad.ir.match import constant, is_op, not_none
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, signature
from onnxgrad.model_io.read import as_given
from onnxgrad.model_io.results import Results, fill, jets_of, names_in, rename
from onnxgrad.model_io.save import gathered
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.feeds import as_fed, bind, copy_feeds
from onnxgrad.transforms import first_order
from onnxgrad.transforms.gradient_lowering import needs_lowering, open_lowered
from onnxgrad.transforms.jacobians import Mode, hessian, jacobian
from onnxgrad.transforms.linearize import Split, linearize, split_vjp
from onnxgrad.transforms.per_example import per_example_grad
from onnxgrad.transforms.second_order import gauss_newton_vp, hvp
from onnxgrad.transforms.select_values import Names
from onnxgrad.transforms.sparse.matrices import sparse_hessian, sparse_jacobian
from onnxgrad.transforms.taylor.jets import jet
from onnxgrad.transforms.taylor.laplacians import laplacian
from onnxgrad.transforms.vmap import Axes, vmap
from onnxgrad.wording import tensor_text

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class Function:
    """A model that is called with arrays.

    Arguments are taken in the order of the model's inputs, or by name: numpy arrays, numbers and nested lists, or
    anything that speaks DLPack (whose memory is shared where it is the CPU's). Where a number or array has another
    dtype than the input, it is converted if numpy calls that a conversion of the same kind. A sequence is a list of
    them; an optional is what it holds, or None.

    One output is returned as an array (which speaks DLPack itself), several as a dict by name. Derived functions give
    only derivatives: a dict by the names they are derivatives of, or the array itself where there is only one.

    >>> import onnx
    >>> square = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> '
    ...     'g (double[N] x) => (double[N] y) { y = Mul (x, x) }')
    >>> f = Function(square)
    >>> f([1.0, 2.0, 3.0]).tolist()
    [1.0, 4.0, 9.0]
    >>> f.grad(wrt="x")([1.0, 2.0, 3.0]).tolist()
    [2.0, 4.0, 6.0]
    >>> f.jacobian(wrt="x").vjp(wrt="x", of="y_x_jacobian").inputs
    ['x', 'y_x_jacobian_cotangent']

    Attributes:
        model: what is run.
        options: how ONNX Runtime runs it.
        results: the names of the outputs that a call returns, by what they are of.
    """

    @check_keywords
    def __init__(
        self,
        model: AnyModel,
        *,
        outputs: Names | None = None,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        options: Options | None = None,
    ) -> None:
        """Wrap `model`.

        Args:
            model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, which must not be changed later on.
            outputs: names of what to return, in place of the model's outputs: any values, intermediate ones too.
            threads: threads inside an operator; ``None`` leaves it to ONNX Runtime.
            providers: execution providers, in order of preference.
            options: everything about the runtime, in place of `threads` and `providers`.
        """
        self.model = as_given(model)
        if needs_lowering(self.model):
            self.model = open_lowered(self.model).model
        if outputs is not None:
            self.model = _with_outputs(model, outputs)
        self.options = options or Options(threads=threads, providers=tuple(providers))
        self.results: Results = {v.name or "": v.name for v in self.model.graph.outputs}
        graph = self.model.graph
        self._types = {v.name or "": v.type for v in graph.inputs}
        self._positional = [v.name or "" for v in required_inputs(graph)]
        self._overwrites = any(_overwrites_inputs(node) for node in graph)
        self._session: Session | None = None
        self._derived: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    @property
    def inputs(self) -> list[str]:
        """The names of the arguments, in order."""
        return list(self._positional)

    @property
    def session(self) -> Session:
        """The session that runs the model."""
        if self._session is None:
            with self._lock:
                if self._session is None:
                    self._session = Session(self.model, self.options)
        return self._session

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        """The same function with a session of its own; the model, which never changes, is shared."""
        return _rebuilt(self.model, self.options, self.results)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model as a file, without sessions and derived functions."""
        return _unpickle, (model_bytes(self.model), self.options, self.results)

    def __repr__(self) -> str:
        def typed(value: ir.Value) -> str:
            return f"{value.name}: {tensor_text(value.dtype, value.shape)}"

        graph = self.model.graph
        arguments = ", ".join(typed(v) for v in graph.inputs if v.name in self._positional)
        return f"<Function ({arguments}) → ({', '.join(map(typed, graph.outputs))}), {len(graph)} nodes>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results for these arguments.

        Raises:
            BadInput: arguments that the model does not take, or that ONNX Runtime fails on.
        """
        arrays = self.session.run(self.feeds(*args, **kwargs), list(dict.fromkeys(names_in(self.results))))
        return fill(self.results, arrays)

    def feeds(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Map input names to the arguments, as arrays of the right dtype or lists of arrays."""
        for name in kwargs:
            if name not in self._types:
                raise UnknownName(name, self._types, "input")
        arguments = bind(self._positional, args, kwargs)
        fed = {name: as_fed(name, argument, self._types[name]) for name, argument in arguments.items()}
        return {n: copy_feeds(a) for n, a in fed.items()} if self._overwrites else fed

    # --- derivatives -------------------------------------------------------------------------------

    def grad(self, *, wrt: Names, of: Names | None = None) -> Function:
        """The gradient of the sum of `of` with respect to `wrt`, as a function of the same arguments."""
        return self._derive(first_order.grad, lambda s: s.gradients, wrt=wrt, of=of)

    def value_and_grad(self, *, wrt: Names, of: Names | None = None) -> Callable[..., tuple[Any, Any]]:
        """A function that returns the results of this one and the gradient of the sum of `of`, in one run."""
        both = self._derive(first_order.value_and_grad, lambda s: {"": self.results, " ": s.gradients}, wrt=wrt, of=of)

        def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            arrays = both.session.run(both.feeds(*args, **kwargs), list(dict.fromkeys(names_in(both.results))))
            return fill(both.results[""], arrays), fill(both.results[" "], arrays)

        return value_and_grad

    def vjp(self, *, wrt: Names, of: Names | None = None, directions: int | str | None = None) -> Function:
        """The pullback: a function with one more argument, the cotangent, for each `of`."""
        return self._derive(first_order.vjp, lambda s: s.gradients, wrt=wrt, of=of, directions=directions)

    def jvp(self, *, wrt: Names, of: Names | None = None, directions: int | str | None = None) -> Function:
        """The pushforward: a function with one more argument, the tangent, for each `wrt`."""
        return self._derive(first_order.jvp, lambda s: s.output_tangents, wrt=wrt, of=of, directions=directions)

    def jacobian(
        self, *, wrt: Names, of: Names | None = None, mode: Mode = "auto", batch: int | None = None
    ) -> Function:
        """The Jacobian of each `of` with respect to each `wrt`, of shape ``of.shape + wrt.shape``."""
        return self._derive(jacobian, lambda s: s.jacobians, wrt=wrt, of=of, mode=mode, batch=batch)

    def hessian(self, *, wrt: Names, of: Names | None = None) -> Function:
        """The Hessian of the sum of `of`, in blocks of pairs of `wrt`."""
        return self._derive(hessian, lambda s: s.hessians, wrt=wrt, of=of)

    def hvp(self, *, wrt: Names, of: Names | None = None) -> Function:
        """The Hessian-vector product: a function with one more argument, the tangent, for each `wrt`."""
        return self._derive(hvp, lambda s: s.products, wrt=wrt, of=of)

    def gauss_newton_vp(self, *, wrt: Names, of: Names | None = None, loss: str | None = None) -> Function:
        """The product of the Gauss-Newton matrix and a vector: arguments as for `hvp`."""
        return self._derive(gauss_newton_vp, lambda s: s.products, wrt=wrt, of=of, loss=loss)

    def jet(self, *, wrt: Names, order: int, of: Names | None = None) -> Function:
        """Derivatives along a path, whose derivatives are further arguments (see `onnxgrad.jet`)."""
        return self._derive(jet, jets_of, wrt=wrt, of=of, order=order)

    def laplacian(self, *, wrt: str, of: Names | None = None, batch: int | None = None) -> Function:
        """The Laplacian of each `of`, in its shape."""
        return self._derive(laplacian, lambda s: s.laplacians, wrt=wrt, of=of, batch=batch)

    def sparse_jacobian(self, *, wrt: str, of: str | None = None) -> Callable[..., csr_array]:
        """A function of the same arguments that returns the Jacobian as a ``scipy.sparse.csr_array``.

        Its shape is (elements of `of`, elements of `wrt`), both in C order. Where it can be nonzero is found out at the
        first call for arguments of these shapes (see `onnxgrad.sparse_jacobian`).
        """
        return self._sparse(sparse_jacobian, wrt, of)

    def sparse_hessian(self, *, wrt: str, of: str | None = None) -> Callable[..., csr_array]:
        """The sparse Hessian of the sum of `of`, as a function (see `sparse_jacobian`)."""
        return self._sparse(sparse_hessian, wrt, of)

    def _sparse(self, transform: Callable[..., ir.Model], wrt: str, of: str | None) -> Callable[..., csr_array]:
        ends = (of,) if of is not None else self._float_results() or ()
        if transform is sparse_jacobian and len(ends) != 1:
            raise BadInput(f"the model has {len(ends)} float outputs; name one of {', '.join(ends)} with `of`")
        at_once = ends[0] if len(ends) == 1 else ends

        def at(*args: Any, **kwargs: Any) -> csr_array:
            feeds = self.feeds(*args, **kwargs)
            shapes = {n: a.shape for n, a in feeds.items() if isinstance(a, np.ndarray)}

            def make() -> tuple[Function, np.ndarray, np.ndarray, tuple[int, int]]:
                model = transform(self.model, wrt=wrt, of=at_once, shapes=shapes)
                values, ((name, where),) = named_values(model.graph), signature(model).patterns.items()
                indices, indptr = (_given_constant(values[where[part]]) for part in ("indices", "indptr"))
                size = math.prod(n for n in values[wrt].shape or () if isinstance(n, int))
                return self._with(model, lambda _: {name: name}), indices, indptr, (indptr.size - 1, size)

            f, indices, indptr, shape = self._cached((transform, wrt, at_once, *shapes.items()), make)
            from scipy.sparse import csr_array  # if it is missing, `transform` has raised an error

            return csr_array((f(**feeds), indices.copy(), indptr.copy()), shape=shape)

        return at

    def per_example_grad(self, *, wrt: Names, of: Names | None = None, batch: int = 0, shared: Names = ()) -> Function:
        """The gradient of each example separately, of shape ``[examples] + wrt.shape``."""
        transform = per_example_grad
        return self._derive(transform, lambda s: s.gradients, wrt=wrt, of=of, batch=batch, shared=shared)

    def vmap(self, in_axes: Axes = 0, out_axes: Axes = 0, *, axis_size: int | str = "batch") -> Function:
        """The function of a batch of rows: mapped arguments and results have one more axis (see `onnxgrad.vmap`)."""

        def make() -> Function:
            mapped = Function(vmap(self.model, in_axes, out_axes, axis_size=axis_size), options=self.options)
            names = dict(zip((v.name for v in self.model.graph.outputs), (v.name for v in mapped.model.graph.outputs)))
            mapped.results = rename(self.results, names)
            return mapped

        axes = [tuple(sorted(a.items())) if isinstance(a, Mapping) else a for a in (in_axes, out_axes)]
        return self._cached((vmap, *axes, axis_size), make)

    def linearize(self, *, wrt: Names, of: Names | None = None) -> Callable[..., tuple[Any, Callable[..., Any]]]:
        """A function that returns the results of this one, and the Jacobian at that point as a function of tangents.

        The primal runs once; each call of the function of tangents, one per `wrt`, runs only the linear half.

        >>> import onnx
        >>> f = Function(onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> '
        ...     'g (double[N] x) => (double[N] y) { y = Mul (x, x) }'))
        >>> y, push = f.linearize(wrt="x")([1.0, 2.0])
        >>> push([1.0, 0.0]).tolist(), push([0.0, 1.0]).tolist()
        ([2.0, 0.0], [0.0, 4.0])
        """
        return self._split(linearize, lambda s: (s.input_tangents, s.output_tangents), wrt=wrt, of=of)

    def split_vjp(self, *, wrt: Names, of: Names | None = None) -> Callable[..., tuple[Any, Callable[..., Any]]]:
        """A function that returns the results of this one, and the pullback at that point as a function of cotangents.

        As `linearize`; the pullback takes one cotangent for each `of`.
        """
        return self._split(split_vjp, lambda s: (s.cotangents, s.gradients), wrt=wrt, of=of)

    def _split(
        self, transform: Callable[..., Split], ends: Callable[..., tuple[Results, Results]], **how: Any
    ) -> Callable[..., tuple[Any, Callable[..., Any]]]:
        """Both halves of a derivative; the second one stores the residuals of the first."""
        how = {k: v if v is None or isinstance(v, str) else tuple(v) for k, v in how.items()}
        if how["of"] is None:
            how["of"] = self._float_results()

        def make() -> tuple[Function, Function, Results]:
            first, second = transform(self.model, **how)
            linear = Function(second, options=self.options)
            seeds, linear.results = ends(signature(second))
            return Function(first, options=self.options), linear, seeds

        primal, linear, seeds = self._cached((transform, *how.items()), make)

        def at(*args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
            feeds = primal.feeds(*args, **kwargs)
            residuals = signature(linear.model).residuals
            arrays = primal.session.run(feeds, list(dict.fromkeys([*names_in(self.results), *residuals])))
            point = {
                n: copy_feeds(a) for n, a in feeds.items() if n in linear._types
            }  # the caller may go on to change them
            point |= {n: a for n, a in arrays.items() if n in linear._types}

            def apply(*directions: Any) -> Any:
                if len(directions) != len(seeds):
                    raise BadInput(f"{len(directions)} arguments for {len(seeds)} inputs: {', '.join(seeds.values())}")
                return linear(**point, **dict(zip(seeds.values(), directions)))

            return fill(self.results, arrays), apply

        return at

    def _derive(self, transform: Callable[..., ir.Model], results: Callable[..., Results], **how: Any) -> Function:
        """The function of the transformed model, without outputs that a call does not return."""
        how = {k: v if v is None or isinstance(v, (str, int)) else tuple(v) for k, v in how.items()}
        if how["of"] is None:
            how["of"] = self._float_results()
        return self._cached((transform, *how.items()), lambda: self._with(transform(self.model, **how), results))

    def _with(self, model: ir.Model, results: Callable[..., Results]) -> Function:
        derived = Function(model, options=self.options)
        derived.results = results(signature(model))
        wanted = set(names_in(derived.results))
        kept = [v for v in model.graph.outputs if v.name in wanted]
        model.graph.outputs[:] = kept
        prune(model.graph)
        return derived

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The cached result of `make` under `key`."""
        with self._lock:
            if key not in self._derived:
                self._derived[key] = make()
            return self._derived[key]

    def _float_results(self) -> tuple[str, ...] | None:
        """The float outputs among the results, which derivatives are of by default."""
        values = {v.name: v for v in self.model.graph.outputs}
        names = dict.fromkeys(names_in(self.results))
        return tuple(n for n in names if values[n].dtype in FLOATS) or None


def model_bytes(model: ir.Model) -> bytes:
    """`model` as the bytes of a file with all of its weights.

    Raises:
        BadInput: one file cannot hold them.
    """
    return gathered(model, "save it as a file, and pickle the path of that").SerializeToString()


def model_of_bytes(data: bytes) -> ir.Model:
    """The model that `model_bytes` has written."""
    return ir.from_proto(onnx.ModelProto.FromString(data))


def _unpickle(data: bytes, options: Options, results: Results) -> Function:
    return _rebuilt(model_of_bytes(data), options, results)


def _rebuilt(model: ir.Model, options: Options, results: Results) -> Function:
    function = Function(model, options=options)
    function.results = results
    return function


def _with_outputs(model: AnyModel, names: Names) -> ir.Model:
    """A copy of `model` with the outputs `names`, and without the nodes that they do not need."""
    opened = open_lowered(model).model
    values = {v.name: v for node in opened.graph for v in node.outputs if v.name}
    opened.graph.outputs.clear()
    for name in dict.fromkeys([names] if isinstance(names, str) else names):
        if name not in values:
            raise UnknownName(name, values, "computed value")
        opened.graph.outputs.append(values[name])
    prune(opened.graph)
    return opened


def _given_constant(output: ir.Value) -> np.ndarray:
    """The elements of an output that is a constant."""
    node = output.producer()
    return not_none(constant(output) if node is None else constant(node.inputs[0]))


def _overwrites_inputs(node: ir.Node) -> bool:
    """True if ONNX Runtime writes into inputs of `node`: the statistics of a batch norm in training."""
    if is_op(node, "BatchNormalization") and node.attributes.get_int("training_mode"):
        return True
    return any(_overwrites_inputs(inner) for graph in subgraphs(node) for inner in graph)
