"""One competitor in a process of its own: reads commands from stdin, answers in JSON.

``python -m benchmarks.training.worker MODULE VARIANT WORKLOAD FOLDER THREADS``; then lines ``step K`` and
``forward K``, each answered with the K times (and losses), and the peak memory of the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    module, variant, name, folder, threads = sys.argv[1:6]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if hasattr(os, "sched_setaffinity"):  # some competitors take as many threads as they may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    begin = time.perf_counter()
    from benchmarks.memory import resident
    from benchmarks.training.competitors import Unable, Workload

    try:
        prepare = importlib.import_module(f"benchmarks.training.competitors.{module}").prepare
        prepared = prepare(Workload.read(name, Path(folder)), int(threads), variant)
        start_up = time.perf_counter() - begin
        done, first = 0, time.perf_counter()
        for line in sys.stdin:
            what, count = line.split()
            times, losses = [], []
            if what == "forward" and prepared.forward is None:
                answer(times=[], losses=[])
                continue
            for _ in range(int(count)):
                first = time.perf_counter()
                if what == "step":
                    losses.append(prepared.step(done))
                    done += 1
                else:
                    prepared.forward()
                times.append(time.perf_counter() - first)
            peak = resident() / 2**20
            about = {"start_up": start_up, "parts": prepared.parts, "notes": prepared.notes}
            answer(times=times, losses=losses, peak_mb=peak, **about)
    except Unable as error:
        answer(unable=str(error))
    except Exception as error:
        answer(unable=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main()
