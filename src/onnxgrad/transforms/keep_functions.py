"""Derivations that keep large local functions; they start again with all functions inlined where that fails.

An error over a model that contradicts itself is told as that.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import onnx_ir as ir

from onnxgrad.context import Attempt, changed
from onnxgrad.errors import BadInput, NotDifferentiable, RuleError
from onnxgrad.model_io.declared_shapes import undeclared
from onnxgrad.model_io.validity import blamed

Derive = TypeVar("Derive", bound=Callable[..., Any])


def keeping_functions(derive: Derive) -> Derive:
    """Have `derive` leave large local functions functions; where that cannot be, it starts again with all inlined.

    That is where something inside cannot be differentiated (the message then tells the whole path), or where inside
    something is not known that is known from one call: an error is final where no call leads to what is
    differentiated. (Names inside a function are seen when the model is opened, see `Derivation`.)

    A failure over a model that is not valid is told as such (see `onnxgrad.model_io.validity`).
    """

    @functools.wraps(derive)
    def attempted(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        attempt = Attempt()
        with blamed(model):
            try:
                with changed(attempt=attempt):
                    try:
                        return derive(*args, **kwargs)
                    except (NotDifferentiable, RuleError, BadInput):
                        if not attempt.kept:
                            raise
                return derive(*args, **kwargs)
            except RuleError as e:
                _blame_declarations(e, model, lambda copy: _again(derive, copy, args, kwargs))
                raise

    return attempted  # type: ignore[return-value]


def _again(derive: Callable[..., Any], model: ir.Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        derive(model, *args[1:], **kwargs)
    else:
        derive(**{**kwargs, "model": model})


def _blame_declarations(error: RuleError, model: Any, again: Callable[[ir.Model], None]) -> None:
    """Raise BadInput if the derivation that ended in `error` succeeds without what `model` declares about results."""
    copy = undeclared(model)
    if copy is None:
        return
    try:
        again(copy)
    except Exception:
        return
    where = re.search(r"\w+ node '[^']*'", str(error))
    raise BadInput(
        "the shapes that the model declares contradict its operators"
        + (f", which shows at {where.group()}" if where else "")
        + "\n  hint: onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True), or drop its value_info"
    ) from error


def inlining(wanted: bool) -> AbstractContextManager[None]:
    """Inline all functions if `wanted`: a call cannot be batched over directions, the nodes of its body can."""
    return changed(attempt=None) if wanted else nullcontext()
