"""Clean interruption of a run: a signal sets a request, and the loop ends after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP; the current step was finished and the state saved."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step = step
        self.checkpoint = checkpoint
        kept = f"; the checkpoint is {str(checkpoint)!r}" if checkpoint else "; no checkpoint was asked for"
        super().__init__(f"interrupted after step {step}{kept}")


@contextmanager
def interruptible(ask: Callable[[], None], launched: bool = False) -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP call `ask` within the block; a second one stops the process at once.

    Not if the process was `launched` with others: its launcher repeats the terminal's signal, and kills the processes
    in the end anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    asking = [signal.SIGINT, signal.SIGTERM]
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # else nohup wants it to go on
        asking.append(hangup)

    def handle(signum: int, frame: Any) -> None:
        if not launched:
            restore()
        ask()

    old = {number: signal.signal(number, handle) for number in asking}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    try:
        yield
    finally:
        restore()
