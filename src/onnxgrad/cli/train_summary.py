"""The messages of a training run: its settings before the first step, its end after the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.cli.console import entry
from onnxgrad.errors import printable
from onnxgrad.training.data import Data
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.language.inputs import Empty
from onnxgrad.training.loop.run import Run
from onnxgrad.training.loop.trained import Trained
from onnxgrad.training.parallel.joining import processors
from onnxgrad.wording import count_text

#: Classes whose rows are counted in a line.
MOST = 12


def summary(run: Run, schedule: str) -> list[str]:
    """Describe which array feeds which input, the rates, the duration and the device."""
    trainer, rows, held_out = run.trainer, run.data, run.validation
    step, options = run.step, trainer.options
    held = "" if held_out is None else f", {len(held_out):,} held out"
    caches = [name for name in rows.called if isinstance(rows.columns[name], Empty)]
    fed = ", ".join(f"{printable(a)} → {printable(n)}" for n, a in rows.called.items() if n not in caches)
    fed += f", {len(caches)} empty caches" if caches else ""
    rates = ", ".join(f"{name} {float(t.numpy()):g}" for name, t in step.rates.items())
    provider = options.provider.removesuffix("ExecutionProvider")
    threads = options.threads or processors()
    own, whole = trainer.optimizer_bytes
    shared = f"; {_amount(own)} of {_amount(whole)} of the optimizer's state"
    ranks = trainer.strategy.ranks.size
    several = f"{ranks} ranks, each " if ranks > 1 else ""
    steps = "" if run.steps_per_epoch is None else f" of {count_text(run.steps_per_epoch, 'step')}"
    lines = {
        "data": f"{'a stream' if isinstance(rows, Stream) else f'{len(rows):,} rows'}{held}; {fed}",
        "classes": _classes(trainer, rows),
        "keeps": str(trainer.preprocessing),
        "rates": f"{rates}, schedule {schedule}" if rates else "",
        "run": f"{count_text(run.epochs, 'epoch')}{steps}, {count_text(run.batch_size, 'row')} each",
        "on": f"{several}{provider}, {count_text(threads, 'thread')}, {options.target}{shared if ranks > 1 else ''}",
    }
    return [f"{name:<7} {text}" for name, text in lines.items() if text]


def _classes(trainer: Trained, rows: Data | Stream) -> str:
    """The classes of the rows by name or number, with their row counts; empty for other labels."""
    numbers, known = rows.labels, [f.ignored for f in rows.fields if f.indices]
    if numbers is None or not (known or rows.classes):
        return ""
    found, counts = np.unique(numbers[~np.isin(numbers, [n for n in known if n is not None])], return_counts=True)
    names = rows.classes or trainer.classes
    each = [
        f"{printable(names[c]) if names and c < len(names) else c} {count:,}"
        for c, count in zip(found[:MOST].tolist(), counts)
    ]
    return f"{len(found):,}: {', '.join(each)}{', …' if len(found) > MOST else ''}"


def outcome(about: Mapping[str, Any]) -> list[str]:
    """The reason for a stop before the last epoch, and the epoch that was kept; empty without either."""
    lines = []
    if about.get("stopped"):
        lines.append(entry("stopped", about["stopped"]))
    best = about.get("best")
    if isinstance(best, dict):
        value = next((f"{k} {v:.6g}" for k, v in best.items() if k not in ("epoch", "step")), "")
        lines.append(entry("kept", f"epoch {best.get('epoch')}, {value}"))
    for state in about.get("kept") or ():
        value = next(f"{k} {v:.6g}" for k, v in state.items() if k not in ("epoch", "step", "file"))
        lines.append(entry("kept, too", f"step {state['step']}, {value}  {state['file']}"))
    return lines


def _amount(count: float) -> str:
    """`count` bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
