"""Prefetching: a thread makes the next batches while the current step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

#: Batches that are ready at most; as many more are being read and being made.
DEPTH = 2


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The items of `batches`, in order, made ahead of time; an error is raised at the item that caused it.

    A caller that stops early closes the iterator, which ends the thread. At most ``DEPTH + 2`` batches exist at a time.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(DEPTH)
    stopped = threading.Event()

    def enqueue(kind: str, what: Any) -> None:
        while not stopped.is_set():
            try:
                return ready.put((kind, what), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                enqueue("batch", batch)
                if stopped.is_set():
                    return
            enqueue("end", None)
        except BaseException as error:
            enqueue("error", error)

    thread = threading.Thread(target=work, name="onnxgrad-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, what = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise what
            yield what
    finally:
        stopped.set()
        thread.join()
