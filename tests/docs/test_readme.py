"""The numbers of the README are those of the page of the benchmark."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

COLUMNS = ("onnxgrad", "onnxgrad, portable", "torch best")


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip()[1:-1].split("|")]


def test_the_readme_has_the_ratios_that_were_measured():
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("## AMD EPYC")[2].partition("Peak memory")[0]
    rows = [cells(line) for line in page.splitlines() if line.startswith("|")]
    at = [rows[0].index(name) for name in COLUMNS]
    means = [[row[k] for k in at] for row in rows if row[0].startswith("geometric mean")]
    worst = [[row[k] for k in at] for row in rows if row[0] == "worst"]
    measured = [[f"{m} ({w})" for m, w in zip(*pair, strict=True)] for pair in zip(means, worst, strict=True)]
    readme = (ROOT / "README.md").read_text()
    shown = [cells(line)[1:] for line in re.findall(r"^\| geometric mean.*$", readme, flags=re.M)]
    assert len(shown) == 3
    assert shown == measured
