"""Every rewrite has a name, a switch and a row on the page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from benchmarks import rewrites

import onnxgrad.runtime.rewrites
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.runtime.rewrites import REWRITES

ROOT = Path(__file__).parents[3]


def test_the_page_lists_every_rewrite():
    page = (ROOT / "docs" / "internals" / "runtime.md").read_text()
    table = page.partition("<!-- rewrites -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    listed = [(row[0].strip("`"), row[1], row[2]) for row in rows]
    assert listed == [*((r.name, r.what, r.where) for r in REWRITES), (rewrites.ALL, "", "")]
    for row in rows:
        assert all(re.fullmatch(r"–|1?\.\d\d", cell) for cell in row[3:])
        assert any(cell != "–" for cell in row[3:]), f"{row[0]} gains nowhere"


def test_the_page_is_what_was_measured():
    kept = rewrites.json.loads(rewrites.RESULTS.read_text())
    assert rewrites.table(kept) in (ROOT / "docs" / "internals" / "runtime.md").read_text()


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.name)
def test_each_is_a_module_that_says_what_it_gains(rewrite):
    module = importlib.import_module(f"onnxgrad.runtime.rewrites.{rewrite.name}")
    assert getattr(module, rewrite.name.upper()) is rewrite
    assert len(module.__doc__) > 200
    assert Path(__file__).with_name(f"test_{rewrite.name}.py").exists() or rewrite.name == "depthwise_weight"
    assert Options(without=(rewrite.name,)).native()


def test_modules_that_are_no_rewrite_are_few():
    folder = Path(onnxgrad.runtime.rewrites.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {r.name for r in REWRITES}
    assert modules == {"__init__", "rewrite"}


def test_an_unknown_name_is_refused():
    with pytest.raises(BadInput, match="there is no pass 'blcoked_layout'; there are pool_first, attention_blocks"):
        Options(without=("blcoked_layout",)).native()
