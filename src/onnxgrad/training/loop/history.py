"""The history of a run: the loss per step, a record per epoch, stored as one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxgrad.files import replacing

#: Entries of a history that are tables of a report.
_TABLES = frozenset({"settings", "provenance", "before", "after", "best"})


@dataclass
class Curve:
    """Means of the training loss over equal runs of steps; at most `limit` of them, however long the run.

    A full curve merges neighbours, and each point covers twice as many steps. So a curve of a million steps costs as
    much as one of a thousand, and every step counts in the means.
    """

    limit: int = 512
    width: int = 1
    means: list[float] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def add(self, loss: float) -> None:
        """Add the loss of one step."""
        self.total += loss
        self.count += 1
        if self.count == self.width:
            self.means.append(self.total / self.width)
            self.total, self.count = 0.0, 0
            if len(self.means) == self.limit:
                pairs = zip(self.means[::2], self.means[1::2])
                self.means = [(a + b) / 2 for a, b in pairs]
                self.width *= 2

    @property
    def steps(self) -> list[int]:
        """The last step of each run."""
        return [(i + 1) * self.width for i in range(len(self.means))]


@dataclass
class History:
    """All that is known about a run.

    Attributes:
        epochs: a record per finished epoch.
        curve: the loss along the way.
        about: settings, and what came of the run.
        terms: the same of each term of the loss, if there are several.
        evaluations: a record of each time that validation data were measured, where that was not after every epoch.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)
    about: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    terms: dict[str, Curve] = field(default_factory=dict)

    def measured(self, entry: str) -> list[tuple[int, float]]:
        """``(step, value)`` of each time that `entry`, such as ``validation_loss``, was measured."""
        records = [*self.evaluations, *self.epochs]
        found = {r["step"]: r[entry] for r in records if isinstance(r.get(entry), (int, float))}
        return sorted(found.items())

    def to_json(self) -> dict[str, Any]:
        """The history as plain data, with the state of the curve, so that `of_json` continues it."""
        between = {"evaluations": self.evaluations} if self.evaluations else {}
        terms = {"terms": {name: asdict(curve) for name, curve in self.terms.items()}} if self.terms else {}
        return {"epochs": self.epochs, "curve": asdict(self.curve), **terms, **between, **self.about}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> History:
        """The history from the output of `to_json`. Raises KeyError, TypeError or ValueError for other data."""
        about = {k: v for k, v in data.items() if k not in ("epochs", "curve", "evaluations", "terms")}
        curve = _curve_of(data["curve"])
        terms = {str(name): _curve_of(of) for name, of in data.get("terms", {}).items()}
        evaluations = list(data.get("evaluations", ()))
        epochs = list(data["epochs"])
        if not all(map(_is_record, epochs + evaluations)) or not all(_is_number(record["loss"]) for record in epochs):
            raise TypeError("the record of an epoch holds numbers by name, its step and loss among them")
        if not all(isinstance(about[key], dict) for key in _TABLES & about.keys()):
            raise TypeError("settings and scores are entries by name")
        return cls(epochs, curve, about, evaluations, terms)

    def write(self, path: Path) -> None:
        """Write the metrics file, all or nothing."""
        document = self.about | ({"evaluations": self.evaluations} if self.evaluations else {})
        document |= {
            "epochs": self.epochs,
            "training_loss": {
                "step": self.curve.steps,
                "loss": self.curve.means,
                **{name: curve.means for name, curve in self.terms.items()},
            },
        }
        with replacing(path) as file:
            file.write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _curve_of(data: Mapping[str, Any]) -> Curve:
    """The curve that `asdict` wrote. Raises TypeError for other data."""
    curve = Curve(**data)
    numbers = [curve.limit, curve.width, curve.total, curve.count, *curve.means]
    if not all(map(_is_number, numbers)) or curve.width < 1 or not isinstance(curve.means, list):
        raise TypeError("the curve consists of numbers")
    return curve


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53)


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return False
    return all(value is None or isinstance(value, str) or _is_number(value) for value in record.values())


def plain(value: Any) -> Any:
    """`value` with None for numbers that JSON has no words for."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
