"""Runs a family's cases up the ladder and holds their node counts to a golden file.

``ONNXGRAD_GOLDEN=update pytest -n0 tests/rules`` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from onnxgrad.testing import Case, check_rule

GOLDEN = Path(__file__).parent / "golden"


def ladder(family: str, cases: Sequence[Case]) -> Callable[..., None]:
    """The test of a family: one parameter per case."""
    ids = [c.id for c in cases]
    assert len(set(ids)) == len(ids), f"{family}: give these cases a note: {sorted(i for i in ids if ids.count(i) > 1)}"

    path = GOLDEN / f"{family}.json"  # case → [nodes that the VJP adds, nodes that the JVP adds]

    @pytest.mark.sweep(3)
    @pytest.mark.parametrize("case", cases, ids=ids)
    def test_rule(case: Case, record_property: Callable[[str, object], None]) -> None:
        report = check_rule(case)
        record_property("vjp_nodes", report.vjp_nodes)
        counts = [report.vjp_nodes, report.jvp_nodes]
        golden = json.loads(path.read_text()) if path.exists() else {}
        if os.environ.get("ONNXGRAD_GOLDEN") == "update":
            kept = {k: v for k, v in {**golden, case.id: counts}.items() if k in ids}
            path.write_text("{\n" + ",\n".join(f'  "{k}": {kept[k]}' for k in sorted(kept)) + "\n}\n")
        else:
            assert golden.get(case.id) == counts, "the emitted graph changed in size: update the golden file"

    return test_rule
