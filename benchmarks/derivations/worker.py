"""One contender: derives one of the graphs each time that it is asked to, and tells what that took.

    python -m benchmarks.derivations.worker onnxgrad 'MLP, 2 layers'

For each line on the standard input, one line of JSON: CPU seconds, nodes of the derivative, and the megabytes by which
the peak of the process is above what it held before.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable

import onnx

from benchmarks.derivations.graphs import PROBLEMS, Problem, perceptron
from benchmarks.memory import resident

#: Derivations in a turn that takes at least this long: short ones are repeated.
SECONDS = 0.3


def contender(name: str) -> Callable[[Problem], onnx.ModelProto]:
    """The function that derives the pullback of `y`."""
    if name == "onnx-ad":
        import onnx_ad

        return lambda p: onnx_ad.reverse(p.model, inputs=p.wrt, outputs=["y"], layout="onnx")
    import onnxgrad

    return lambda p: onnxgrad.vjp(p.model, wrt=p.wrt, of=["y"])


def peak() -> float:
    """Megabytes."""
    return resident() / 2**20


def main() -> None:
    warnings.simplefilter("ignore")
    derive, problem = contender(sys.argv[1]), PROBLEMS[sys.argv[2]]()
    derive(perceptron(2))
    before, count = peak(), 1
    for _ in sys.stdin:
        gc.collect()
        begin = time.process_time()
        for _ in range(count):
            derived = derive(problem)
        taken = (time.process_time() - begin) / count
        nodes = len(derived.graph.node)
        del derived
        if taken * count < SECONDS:
            count = max(1, int(SECONDS / taken))
        print(json.dumps([taken, nodes, peak() - before]), flush=True)


if __name__ == "__main__":
    main()
