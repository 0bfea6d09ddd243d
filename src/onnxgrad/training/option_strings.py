"""Parser of settings on one line: ``0.5*name:key=value,key=value``.

Losses, optimizers, schedules and groups share this spelling. A value is a number, ``true``, ``false``, a word, or
several of them (``betas=0.9,0.95``: an item without ``=`` belongs to the key before it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnxgrad.errors import BadInput, close_to

#: Names of other libraries.
_ELSEWHERE = {
    **dict.fromkeys(("ce", "crossentropy", "crossentropyloss", "log_loss", "softmax"), "cross_entropy"),
    **dict.fromkeys(
        ("bce", "bceloss", "bcewithlogitsloss", "binary_crossentropy", "binary_cross_entropy"), "bce_with_logits"
    ),
    **dict.fromkeys(("mae", "l1loss", "l1_loss", "mean_absolute_error"), "l1"),
    **dict.fromkeys(("l2", "mseloss", "mse_loss", "mean_squared_error", "squared_error"), "mse"),
    **dict.fromkeys(("kldiv", "kl_div", "kldivloss", "kl_divergence"), "kl"),
    **dict.fromkeys(("diceloss", "dice_loss", "soft_dice"), "dice"),
    **dict.fromkeys(("lovasz_softmax", "lovaszsoftmax", "jaccard", "iou"), "lovasz"),
}
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name:key=value,…``. Returns the name and its options. Raises BadInput for other forms.

    >>> spelled("adamw:betas=0.9,0.95,eps=1e-6")
    ('adamw', {'betas': (0.9, 0.95), 'eps': 1e-06})
    """
    if not isinstance(text, str):
        raise BadInput(f"a name is wanted, as 'name' or 'name:key=value', not a {type(text).__name__}")
    name, _, rest = text.partition(":")
    found: dict[str, list[Any]] = {}
    values: list[Any] | None = None
    for piece in rest.split(",") if rest else []:
        key, given, value = piece.partition("=")
        if given:
            if key.strip() in found:
                raise BadInput(f"{text!r} gives {key.strip()!r} twice")
            values = found[key.strip()] = []
        if values is None or not key.strip():
            raise BadInput(f"{text!r} is not written as name:key=value,key=value")
        values.append(_value(value if given else key))
    return name.strip(), {key: v[0] if len(v) == 1 else tuple(v) for key, v in found.items()}


def weighted(text: str) -> tuple[float, str]:
    """Parse ``0.5*name…``. Returns the factor, 1 if it is missing, and the rest.

    >>> weighted("0.5*kl:temperature=2"), weighted("mse")
    ((0.5, 'kl:temperature=2'), (1.0, 'mse'))
    """
    head, star, rest = text.partition("*")
    if not star or ":" in head:
        return 1.0, text
    try:
        return float(head), rest.strip()
    except ValueError:
        raise BadInput(f"{text!r} begins with {head!r}, which is no number\n  hint: write 0.5*name") from None


def _value(text: str) -> Any:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def looked_up(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of `table` called `name`. Raises BadInput, which lists the known names."""
    if name not in table:
        raise BadInput(f"there is no {what} {name!r}; there are: {', '.join(table)}{_near(name, table)}")
    return table[name]


def _near(name: str, table: Iterable[str]) -> str:
    usual = _ELSEWHERE.get(name.lower().replace("-", "_").replace(" ", "_"), "")
    close = [usual] if usual in table else close_to(name, table)
    return f"\n  hint: did you mean {close[0]!r}?" if close else ""


def completed(what: str, defaults: Mapping[str, Any], given: Mapping[str, Any], kind: str = "option") -> dict[str, Any]:
    """`defaults` updated by `given`.

    Raises:
        BadInput: an option that does not exist, or a word where a number belongs.
    """
    for key, value in given.items():
        if key not in defaults:
            listed = f"{', '.join(defaults) or 'none'}{_near(key, defaults)}"
            raise BadInput(f"{what} has no {kind} {key!r}; it has: {listed}")
        number = isinstance(defaults[key], (int, float)) and not isinstance(defaults[key], bool)
        if number and (isinstance(value, (str, bool)) or not isinstance(value, (int, float))):
            raise BadInput(f"{what}: {key} must be a number, not {value!r}")
        if isinstance(defaults[key], bool) and not isinstance(value, bool):
            raise BadInput(f"{what}: {key} must be true or false, not {value!r}")
    return {**defaults, **given}


def one_of(what: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise BadInput unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise BadInput(f"{what} must be {' or '.join(map(repr, choices))}, not {value!r}")
