"""What a training run says of itself: before the first step what it will do, after the last one why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrad.errors import shown
from onnxgrad.training import Trainer
from onnxgrad.training.data import Data
from onnxgrad.training.parallel.joining import processors


def summary(
    trainer: Trainer, rows: Data, held_out: Data | None, epochs: int, batch_size: int, schedule: str
) -> list[str]:
    """Which array feeds which input, the rates, how long it runs, and on what."""
    step, options = trainer.step, trainer.options
    held = "" if held_out is None else f", {len(held_out):,} held out"
    fed = ", ".join(f"{shown(array)} → {shown(name)}" for name, array in rows.called.items())
    rates = ", ".join(f"{name} {float(t.numpy()):g}" for name, t in step.rates.items())
    size = rows.fixed or batch_size
    provider = options.providers[0].removesuffix("ExecutionProvider")
    threads = options.threads or processors()
    own, whole = trainer.optimizer_bytes
    shared = f"; {_amount(own)} of {_amount(whole)} of the optimizer's state"
    several = "" if trainer.ranks is None else f"{trainer.ranks.size} ranks, each "
    lines = {
        "data": f"{len(rows):,} rows{held}; {fed}",
        "rates": f"{rates}, schedule {schedule}" if rates else "",
        "run": f"{epochs} epochs of {-(-len(rows) // size):,} steps, {size} rows each",
        "on": f"{several}{provider}, {threads} threads, {trainer.options.target}{shared if trainer.ranks else ''}",
    }
    return [f"{name:<6} {text}" for name, text in lines.items() if text]


def outcome(about: Mapping[str, Any]) -> list[str]:
    """Why a run stopped before its last epoch, and which epoch was kept, where there is something to say."""
    lines = []
    if about.get("stopped"):
        lines.append(f"{'stopped':<14} {about['stopped']}")
    best = about.get("best")
    if isinstance(best, dict):
        value = next((f"{k} {v:.6g}" for k, v in best.items() if k not in ("epoch", "step")), "")
        lines.append(f"{'kept':<14} epoch {best.get('epoch')}, {value}")
    for entry in about.get("kept") or ():
        value = next(f"{k} {v:.6g}" for k, v in entry.items() if k not in ("epoch", "step", "file"))
        lines.append(f"{'kept, too':<14} step {entry['step']}, {value}  {entry['file']}")
    return lines


def _amount(count: float) -> str:
    """So many bytes, in words."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
