"""The entrance of all transforms, and derivations that keep large local functions.

A failure over a model that contradicts itself is an error of the model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from onnxgrad._later import without_collection
from onnxgrad.errors import BadInput, NotDifferentiable, RuleError
from onnxgrad.keywords import check_keywords
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


def keeping_functions(derive: Callable[[Attempt | None], Result]) -> Result:
    """Return ``derive(attempt)``, which keeps large local functions, or ``derive(None)``, which inlines all.

    All functions are inlined if a value inside one cannot be differentiated (the message then has the whole path), or
    if a fact known from a single call is unknown inside. An error is final if no call leads to the differentiated
    values; so is a RuleError, which is a bug. (Names inside a function are seen when the model is opened, see
    `Derivation`.)
    """
    attempt = Attempt()
    try:
        return derive(attempt)
    except (NotDifferentiable, BadInput):
        if not attempt.kept:
            raise
    return derive(None)


def transform(derive: Derive) -> Derive:
    """Decorate a transform of models: a function of a model, and of options that are given by name."""
    return check_keywords(without_collection()(blaming_the_model(derive)))  # type: ignore[return-value]


def blaming_the_model(derive: Derive) -> Derive:
    """Wrap `derive` so that failures caused by an invalid or contradictory model raise BadInput."""

    @functools.wraps(derive)
    def judged(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        with blamed(model):
            try:
                return derive(*args, **kwargs)
            except RuleError as e:
                others = {name: value for name, value in kwargs.items() if name != "model"}
                _blame_declarations(e, model, lambda copy: derive(copy, *args[1:], **others))
                raise

    return judged  # type: ignore[return-value]


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
