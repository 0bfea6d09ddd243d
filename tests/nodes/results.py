"""The tests that prove each operator: runs the suites that compare derivatives, and writes results.json.

A case of the ladder, or of its float types, proves the operator of the case; any other test of these suites proves the
operators of the models that it differentiates. A node test of the onnx package proves the operator of its one node.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from onnxgrad.testing import Case
from onnxgrad.transforms import derivation

RESULTS = Path(__file__).parent / "results.json"
TESTS = Path(__file__).parents[1]
SUITES = ("rules", "control_flow", "oracles")
#: tests that break rules on purpose
ASIDE = ("test_mutations.py",)


def key(domain: str, op_type: str) -> str:
    """The operator as the table writes it."""
    return f"{domain}::{op_type}" if domain not in ("", "ai.onnx") else op_type


def _own(node: ir.Node) -> bool:
    """True for a node of the test's model, rather than of a derivative."""
    return not (node.name or "").startswith(("d_", "raised_"))


class Recorder:
    """A plugin of pytest that notes, for each operator, how many tests of each file passed, failed, or ran what."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        self.dtypes: dict[str, set[str]] = defaultdict(set)
        self.nodes: dict[str, list[int]] = defaultdict(list)
        self.second: set[str] = set()
        self._seen: set[str] = set()

    def __enter__(self) -> Recorder:
        self._open = derivation.open_lowered

        def opened(*given: Any, **options: Any) -> Any:
            found = self._open(*given, **options)
            graphs = [found.model.graph, *found.model.graph.subgraphs()]
            self._seen |= {key(n.domain, n.op_type) for g in graphs for n in g if _own(n)}
            return found

        derivation.open_lowered = opened
        return self

    def __exit__(self, *_: object) -> None:
        derivation.open_lowered = self._open

    def pytest_runtest_setup(self) -> None:
        self._seen.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call" and not report.skipped:
            self._note(item, report)
        return report

    def _note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        name, case = item.originalname, params.get("case")  # type: ignore[attr-defined]
        told = dict(report.user_properties)
        file = str(item.path.relative_to(TESTS).with_suffix("")).replace("test_", "")
        proven = self._seen
        if isinstance(case, Case) and name in ("test_rule", "test_dtype"):
            proven = {key(case.domain, case.op)}
            if report.passed and name == "test_dtype" and "ran" in told:
                self.dtypes[next(iter(proven))].add(told["ran"])
            if report.passed and name == "test_rule":
                self.nodes[next(iter(proven))].append(told["vjp_nodes"])
                self.second |= proven if case.order > 1 else set()
                self.dtypes[next(iter(proven))] |= {"float32"} if case.runtime else set()
        for op in proven:
            self.tests[op][file][0 if report.passed else 1] += 1

    def results(self) -> dict[str, Any]:
        """For each operator: tests by file as [passed, failed], float types, nodes of the VJP, second order."""
        return {
            op: {
                "tests": dict(sorted(self.tests[op].items())),
                "dtypes": sorted(self.dtypes[op]),
                "vjp_nodes": sorted(set(self.nodes[op])),
                "second_order": op in self.second,
            }
            for op in sorted(self.tests)
        }


def run(chosen: Sequence[str] = ()) -> int:
    """Run the suites, or the `chosen` files of them (``rules/test_norm.py``), whose results are then added to the rest.

    Returns the exit code of pytest.
    """
    every = [p for suite in SUITES for p in sorted((TESTS / suite).glob("test_*.py")) if p.name not in ASIDE]
    files = [str(TESTS / c) for c in chosen] or [str(p) for p in every]
    with Recorder() as recorder:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "--complete", *files], plugins=[recorder])
    found = recorder.results()
    if chosen:
        before = recorded()
        found = {op: _joined(before.get(op, {}), found.get(op, {})) for op in {*before, *found}}
    lines = [f"  {json.dumps(op)}: {json.dumps(held)}" for op, held in sorted(found.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(code)


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The records of an operator from an earlier run, joined with a run of some files."""
    return {
        "tests": dict(sorted({**old.get("tests", {}), **new.get("tests", {})}.items())),
        **{k: sorted({*old.get(k, []), *new.get(k, [])}) for k in ("dtypes", "vjp_nodes")},
        "second_order": old.get("second_order", False) or new.get("second_order", False),
    }


def recorded() -> dict[str, dict[str, Any]]:
    """The results of the last run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    os.environ.pop("ONNXGRAD_GOLDEN", None)
    raise SystemExit(run(sys.argv[1:]))
