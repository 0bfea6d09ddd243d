"""Process groups: agreement before a run, results of single ranks, and errors of one rank or of all.

Before the first step every rank announces its settings, or its error; a difference, or an error of any rank, is raised
on all. After that, an error is either common to all ranks, which find it in the same numbers, or that of one rank,
which leaves the others and reports the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxgrad.distributed import Alone, Collective, Lost, broadcast_document, gathered
from onnxgrad.errors import BadInput, OnnxGradError, TrainingError


class OnRank(TrainingError):
    """An error on one rank only, unknown to the others; its message names the rank."""


class OnAll(BadInput):
    """An error that is raised on all ranks, with the same words."""


class Ranks:
    """The ranks of a run; this process is one of them.

    Args:
        collective: the engine that connects them.

    Attributes:
        agreed: True if all ranks know that they do the same.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.agreed = False

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.collective.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.collective.size

    @property
    def is_first(self) -> bool:
        """True for the rank that writes and prints."""
        return self.rank == 0

    # --- facts that are the same on all ranks --------------------------------------------------

    def agree(self, document: Callable[[], Mapping[str, Any]]) -> None:
        """Check that `document` is the same JSON on all ranks; it maps names for messages to the coming actions.

        Raises:
            OnAll: they do not, or one of them could not get that far; the message says what, and which.
        """
        self._judge({"does": document()})

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Raise an error of any rank, before they have agreed, on all of them as OnAll."""
        self.agreed = False
        with self.continued():
            yield

    @contextmanager
    def continued(self) -> Iterator[None]:
        """Raise an error like `settling`; after the ranks have agreed, raise it unchanged."""
        try:
            yield
        except OnnxGradError as error:
            if not self.agreed and not isinstance(error, Lost):
                self._judge({"error": str(error)})
            raise

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Meet the other ranks at the end of a block, in which any rank may fail: all of them do then."""
        with self.settling():
            yield
            self.agree(dict)

    def _judge(self, message: Mapping[str, Any]) -> None:
        found = gathered(self.collective, message)
        self.agreed = True
        errors = {rank: one["error"] for rank, one in enumerate(found) if "error" in one}
        if errors:
            if len(errors) == self.size and len(set(errors.values())) == 1:
                raise OnAll(errors[0])
            raise OnAll("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        first, lines = found[0]["does"], []
        for rank, one in enumerate(found):
            does = one["does"]
            for what in sorted({**first, **does}):
                if first.get(what) != does.get(what):
                    lines.append(f"rank {rank}: {_describe_difference(what, does.get(what), first.get(what))}")
        if lines:
            more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise OnAll("the ranks are not about to do the same, as rank 0 does\n  " + "\n  ".join(lines[:8]) + more)

    def every(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of `action` on all ranks, which are JSON.

        Raises:
            OnAll: it raised an error on some of them; the message says which.
        """
        try:
            answer = {"value": action()}
        except OnnxGradError as error:
            answer = {"error": str(error)}
        found = gathered(self.collective, answer)
        errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if "error" in one]
        if errors:
            raise OnAll("\n".join(errors))
        return [one["value"] for one in found]

    def first(self, action: Callable[[], Any]) -> Any:
        """Return the result of `action` on the first rank, which is JSON; the other ranks wait for it.

        Raises:
            OnAll: it raised an error there.
        """
        answer: dict[str, Any] = {}
        if self.is_first:
            try:
                answer = {"value": action()}
            except OnnxGradError as error:
                answer = {"error": str(error)}
        answer = broadcast_document(self.collective, answer)
        if "error" in answer:
            raise OnAll(answer["error"])
        return answer["value"]

    def shared(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copy the tensors of the first rank to all; `state` of the other ranks gives only names, dtypes and shapes."""
        return dict(self.broadcast_each(state))

    def broadcast_each(self, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors of the first rank on all ranks, by name."""
        for name, array in sorted(state.items()):
            found = np.array(array, order="C")
            self.collective.broadcast(found)
            yield name, found

    def check_equal(self, state: Mapping[str, np.ndarray], step: int) -> None:
        """Raise TrainingError unless all ranks have the same bits."""
        found = gathered(self.collective, digest(state))
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            raise TrainingError(
                f"after step {step} the weights of rank {others[0]} are no longer those of rank 0, bit by bit: "
                "machines of different kinds round differently\n"
                "  hint: --target portable, and the same versions on all machines"
            )

    # --- errors of one rank -------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Leave the other ranks on an error of this rank alone, and send them the reason.

        A TrainingError, which all ranks find in the same numbers, and an interrupt are raised unchanged.
        """
        try:
            yield
        except (OnAll, Lost, KeyboardInterrupt):
            raise
        except OnnxGradError as error:
            if type(error) is TrainingError:
                raise
            self.collective.close(str(error))
            raise OnRank(f"rank {self.rank}: {error}") from error
        except BaseException as error:
            self.collective.close(f"{type(error).__name__}: {error}")
            raise


class SingleRank(Ranks):
    """The only process of a run: it needs no agreement, and its errors are raised unchanged."""

    def __init__(self) -> None:
        super().__init__(Alone())

    def agree(self, document: Callable[[], Mapping[str, Any]]) -> None:
        """Do nothing: there are no other ranks."""
        self.agreed = True

    @contextmanager
    def continued(self) -> Iterator[None]:
        """Let errors pass."""
        yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let errors pass."""
        yield

    def every(self, action: Callable[[], Any]) -> list[Any]:
        """The result of `action`."""
        return [action()]

    def first(self, action: Callable[[], Any]) -> Any:
        """The result of `action`."""
        return action()

    def broadcast_each(self, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of `state`, not copied."""
        yield from state.items()

    def check_equal(self, state: Mapping[str, np.ndarray], step: int) -> None:
        """Do nothing: there are no other ranks."""


def digest(state: Mapping[str, np.ndarray]) -> str:
    """The digest of names, dtypes, shapes and contents of tensors."""
    found = hashlib.blake2b(digest_size=16)
    for name, array in sorted(state.items()):
        found.update(f"{name}{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _describe_difference(what: str, here: Any, there: Any) -> str:
    """One line for a difference; digests are not shown."""
    texts = [str(value) for value in (here, there)]
    if any(len(text) >= 32 for text in texts):
        return f"other {what}"
    return f"{what} {texts[0]}, not {texts[1]}"
