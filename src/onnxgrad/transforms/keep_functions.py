"""Derivations that keep large local functions, and the blame for failures over models that contradict themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from onnxgrad.errors import BadInput, NotDifferentiable, RuleError
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.declared_shapes import undeclared
from onnxgrad.model_io.validity import blamed

Result = TypeVar("Result")
Derive = TypeVar("Derive", bound=Callable[..., Any])


@dataclass
class Attempt:
    """A derivation that leaves large local functions functions.

    Attributes:
        kept: True if it kept one that what is differentiated depends on; if it fails, inlining may help.
    """

    kept: bool = False


def keeping_functions(model: AnyModel, derive: Callable[[AnyModel, Attempt | None], Result]) -> Result:
    """Return ``derive(model, attempt)``, which keeps large local functions, or with None, which inlines all.

    All are inlined where something inside a function cannot be differentiated (the message then gives the whole path),
    or where something is not known inside that is known from one call. An error is final where no call leads to what
    is differentiated; so is a RuleError, which is a bug. (Names inside a function are seen when the model is opened,
    see `Derivation`.)

    Raises:
        BadInput: the model is not valid or contradicts itself, as by `blaming_the_model`.
    """

    def attempted(model: AnyModel) -> Result:
        attempt = Attempt()
        try:
            return derive(model, attempt)
        except (NotDifferentiable, BadInput):
            if not attempt.kept:
                raise
        return derive(model, None)

    return _judged(model, attempted)


def blaming_the_model(derive: Derive) -> Derive:
    """Wrap `derive` so that failures caused by an invalid or contradictory model raise BadInput."""

    @functools.wraps(derive)
    def judged(*args: Any, **kwargs: Any) -> Any:
        if args:
            return _judged(args[0], lambda model: derive(model, *args[1:], **kwargs))
        rest = {name: value for name, value in kwargs.items() if name != "model"}
        return _judged(kwargs.get("model"), lambda model: derive(model=model, **rest))

    return judged  # type: ignore[return-value]


def _judged(model: Any, derive: Callable[[Any], Result]) -> Result:
    with blamed(model):
        try:
            return derive(model)
        except RuleError as e:
            _blame_declarations(e, model, derive)
            raise


def _blame_declarations(error: RuleError, model: Any, derive: Callable[[Any], object]) -> None:
    """Raise BadInput if the derivation that failed with `error` succeeds without declarations of results."""
    copy = undeclared(model)
    if copy is None:
        return
    try:
        derive(copy)
    except Exception:
        return
    where = re.search(r"\w+ node '[^']*'", str(error))
    raise BadInput(
        "the shapes that the model declares contradict its operators"
        + (f", which shows at {where.group()}" if where else "")
        + "\n  hint: onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True), or drop its value_info"
    ) from error
