"""Loop and Scan as the specification has them, where the reference evaluator departs from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference.ops.op_loop import Loop as CountedLoop
from onnx.reference.ops.op_scan import Scan as ForwardScan


class Loop(CountedLoop):
    """Without a condition too, and with results of each turn that are stacked, not joined."""

    op_domain = ""

    def _run(self, count: Any, condition: Any, *initial: Any, context: Any = None, **_: Any) -> Any:
        names, held = self.body.input_names, len(initial)
        states, stacks = list(initial), [[] for _ in self.body.output_names[1 + held :]]
        turn, goes_on = 0, condition is None or bool(condition)
        while goes_on and (count is None or turn < count):
            feeds = {**(context or {}), **dict(zip(names, (np.array(turn), np.array(goes_on), *states)))}
            results = self._run_body(feeds)
            goes_on, states = bool(results[0]), results[1 : 1 + held]
            for stack, result in zip(stacks, results[1 + held :]):
                stack.append(result)
            turn += 1
        if not turn and stacks:
            raise NotImplementedError("the shapes of results of no turn")
        return (*states, *map(np.stack, stacks))


class Scan(ForwardScan):
    """In all directions and along all axes, of which the reference evaluator has the first."""

    op_domain = ""

    def __init__(self, node: onnx.NodeProto, run_params: Any) -> None:
        ways = ("scan_input_directions", "scan_output_directions", "scan_input_axes", "scan_output_axes")
        self._ways = {a.name: list(a.ints) for a in node.attribute if a.name in ways}
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        del plain.attribute[:]
        plain.attribute.extend(a for a in node.attribute if a.name not in ways)
        super().__init__(plain, run_params)

    def _run(self, *args: Any, **named: Any) -> Any:
        count = len(args) - self.num_scan_inputs
        scanned = [self._turned(a, "input", i) for i, a in enumerate(args[count:])]
        results = super()._run(*args[:count], *scanned, **named)
        return (*results[:count], *(self._turned(r, "output", i, back=True) for i, r in enumerate(results[count:])))

    def _turned(self, array: np.ndarray, end: str, at: int, back: bool = False) -> np.ndarray:
        axis = (self._ways.get(f"scan_{end}_axes") or [0] * (at + 1))[at]
        array = array if back else np.moveaxis(array, axis, 0)
        array = array[::-1] if (self._ways.get(f"scan_{end}_directions") or [0] * (at + 1))[at] else array
        return np.moveaxis(array, 0, axis) if back else array
