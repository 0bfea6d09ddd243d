"""Resuming: write the checkpoint of a run, compare it when the run is resumed, and continue from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.distributed import launched
from onnxgrad.errors import BadInput
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.loop.checkpoint import Checkpoint, check_state_fits
from onnxgrad.training.loop.checkpoint_parts import save_checkpoint
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.run import Run
from onnxgrad.training.metadata import CONVENTION

#: Characters of a message that are of the checkpoint.
_MOST = 400
_ACCEPT = "\n  hint: --accept-changes (in Python accept_changes=True) goes on with what it is told now"


def save(run: Run) -> None:
    """Write the checkpoint of `run`, with this process's part of the state."""
    at = run.position
    document = {
        "step": at.step,
        "epoch": at.epoch,
        "row": at.row,
        "total": at.total,
        "terms": at.terms,
        "seconds": at.seconds,
        "drawing": run.drawing,
        "settings": run.settings,
        "target": run.target,
        "job": launched().job,
        "finished": at.finished,
        "callbacks": [[type(c).__name__, c.state(), c.settings()] for c in run.callbacks if c.state()],
        "history": at.history.to_json(),
    }
    found = Checkpoint(dict(run.machine.now), document, run.fingerprint, run.strategy.extras())
    if run.state_folder is not None:
        save_checkpoint(found, run.step.state, run.strategy, run.state_folder)
    run.kept = True


def is_restarted(run: Run) -> bool:
    """True if a launcher has restarted this process, and the checkpoint has an unfinished run.

    If ranks join or leave, a launcher restarts all of them without counting it: then the run of its job is not at its
    end.
    """
    launch = launched()
    if run.checkpoint is None or not run.checkpoint.is_file() or not (launch.restarts or launch.job):
        return False
    if launch.restarts:
        return True
    found = Checkpoint.load_file(run.checkpoint).run
    return found.get("job") == launch.job and not found.get("finished") and found.get("epoch", 0) < run.epochs


def resume(run: Run, accept_changes: bool) -> None:
    """Restore `run` and its callbacks from the run's checkpoint.

    Raises:
        BadInput: there is none, it is damaged, or it is that of a run with other settings.
    """
    found = _load_checkpoint(run)
    run.kept = True
    classes = found.run.get("settings", {}).get("classes")
    if classes and accept_changes:  # the meaning of outputs is no choice
        _number(run, classes)
    try:
        moved = _compare(run, found, accept_changes)
        _resume_callbacks(run, found.run["callbacks"], accept_changes)
        _go_on(run, found, moved)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"the checkpoint {str(run.checkpoint)!r} does not say where its run stood") from error
    if moved:  # the rest of an epoch with other batches is undefined: that epoch restarts
        run.position.begin_epoch()


def _load_checkpoint(run: Run) -> Checkpoint:
    """The checkpoint; of several ranks, the first one reads it and broadcasts everything except state."""
    like = {name: t.initial.numpy() for name, t in run.step.state.items()}

    def read() -> Checkpoint:
        if run.checkpoint is None:
            raise BadInput("to resume, say in which folder the checkpoint is")
        found = Checkpoint.load(run.checkpoint)
        check_state_fits(found, like, run.checkpoint)
        return found

    held = Checkpoint(like)

    def tell() -> list[Any]:
        nonlocal held
        held = read()
        _check_extras(held, like_extras, run.checkpoint)
        return [held.run, held.step_graph]

    like_extras = run.strategy.extras()
    held.extras = like_extras
    document, step_graph = run.strategy.ranks.first(tell)
    return Checkpoint(held.state, document, step_graph, run.strategy.ranks.shared(held.extras))


def _check_extras(found: Checkpoint, like: dict[str, np.ndarray], path: Path | None) -> None:
    """Give `found` the extras of `like`; missing ones start as zeros, as in a new run."""
    kept = {name: found.extras.get(name, np.zeros_like(array)) for name, array in like.items()}
    for name, array in kept.items():
        if (array.dtype, array.shape) != (like[name].dtype, like[name].shape):
            raise BadInput(f"the checkpoint {str(path)!r} belongs to another model: its {name!r} is of another size")
    found.extras = kept


def _number(run: Run, classes: Any) -> None:
    if not isinstance(classes, list) or not all(isinstance(n, str) for n in classes):
        raise BadInput(f"the checkpoint {str(run.checkpoint)!r} does not name its classes")
    for data in (run.data, run.validation):
        if data is not None:
            data.number(classes)


def _compare(run: Run, found: Checkpoint, accept_changes: bool) -> bool:
    """Compare the settings of a run with those of its checkpoint; returns True if it draws other batches.

    Raises:
        BadInput: other settings differ, and the caller does not accept changes.
    """
    before = {**found.run["drawing"], **found.run.get("settings", {})}
    now = {**run.drawing, **run.settings}
    needed = ["seed", "shuffle", "batch_size", "rows", *(["training data"] if "settings" in found.run else [])]
    for what in needed:  # the first versions wrote no settings
        if what not in before and not accept_changes:
            raise BadInput(f"the checkpoint {str(run.checkpoint)!r} does not say which {what.replace('_', ' ')} it had")
    if not (before.get("validation data") and now["validation data"]):
        del now["validation data"]  # measured from now on, or no more
    changes = [
        (what.replace("_", " "), before[what], new)
        for what, new in now.items()
        if what in before and before[what] != new
    ]
    if not accept_changes:
        for what, old, new in changes:
            raise _other(run, f"other {what}" if what.endswith("data") else f"{what} {_plain(old)}, not {_plain(new)}")
        if found.step_graph != run.fingerprint:
            raise BadInput(
                f"the checkpoint {str(run.checkpoint)!r} belongs to another training step: the model, the loss, "
                f"the optimizer or its settings are not those that it was written with{_ACCEPT}{_other_adam(run)}"
            )
    return any(what in ("seed", "shuffle", "batch size", "rows", "sample", "training data") for what, _, _ in changes)


def _plain(value: Any) -> Any:
    """`value`, a float with the digits of float32."""
    return f"{value:.7g}" if isinstance(value, float) else value


def _other_adam(run: Run) -> str:
    """A hint for runs of Adam that began when its operator of the specification was the default."""
    infos = () if run.step.source is None else run.step.source.infos
    if not any(p.key == CONVENTION for info in infos for p in info.algorithm.metadata_props):
        return ""
    return '\n  hint: a run of adam or adamw that onnxgrad 0.1 began goes on with convention="onnx" (--convention onnx)'


def _other(run: Run, what: str) -> BadInput:
    what = what if len(what) <= _MOST else f"{what[: _MOST - 1]}…"
    return BadInput(
        f"the checkpoint {str(run.checkpoint)!r} was written with {what}; a resumed run needs the same{_ACCEPT}"
    )


def _go_on(run: Run, found: Checkpoint, moved: bool) -> None:
    if isinstance(run.data, Stream) and found.run["step"] and not run.data.is_repeatable and not moved:
        raise BadInput(
            f"{run.data.name} is an iterator, which cannot go back to row {found.run['row']} of epoch "
            f"{found.run['epoch'] + 1}\n  hint: hand over a function that returns it (lambda: rows())"
        )
    if not moved and not isinstance(run.data, Stream) and found.run["row"] > run.rows:
        raise BadInput(
            f"the checkpoint {str(run.checkpoint)!r} stands at row {found.run['row']} of an epoch of {run.rows} rows"
        )
    history = History.of_json(found.run["history"])
    if (target := found.run.get("target")) in ("portable", "native"):  # earlier versions do not record it
        run.trainer.follow(target)
    run.take_state(found.state)
    run.strategy.load_extras(found.extras)
    at = run.position
    at.step = found.run["step"]
    about = at.history.about
    at.history = history
    at.history.about |= about
    at.epoch, at.row = found.run["epoch"], found.run["row"]
    at.total, at.seconds = found.run["total"], found.run["seconds"]
    at.finished, at.terms = found.run["finished"], dict(found.run.get("terms", {}))


def _resume_callbacks(run: Run, kept: Sequence[Sequence[Any]], accept_changes: bool) -> None:
    remembering = [c for c in run.callbacks if c.state()]
    had = [str(name) for name, *_ in kept]
    if had != [type(c).__name__ for c in remembering] and not accept_changes:
        raise BadInput(
            f"the checkpoint {str(run.checkpoint)!r} was written by a run with other callbacks "
            f"({', '.join(had) or 'none'}); a resumed run needs the same"
        )
    for callback in remembering:
        name = type(callback).__name__
        if name not in had:
            continue
        _, state, *settings = kept[had.index(name)]
        had[had.index(name)] = ""
        if settings not in ([], [callback.settings()]) and not accept_changes:
            raise _other(run, f"{name} {settings[0]}, not {callback.settings()}")
        callback.load_state(state)
