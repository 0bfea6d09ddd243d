"""The examples of the README and of the documentation run, page by page, in an empty directory."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

from tests.commands import script

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in p.read_text()]
ACTING = ("__main__", "as_autograd")  # modules that do something when they are imported
MODULES = [p for p in sorted((ROOT / "src").rglob("*.py")) if p.stem not in ACTING and ">>> " in p.read_text()]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run_in_order(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    done = script(tmp_path / "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_doctests(path):
    try:
        imported = importlib.import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name!r}")
    failed, count = doctest.testmod(imported)
    assert failed == 0 < count


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_of_the_source_that_pages_name_exist():
    """Files such as ``engine/reverse.py``, below the package."""
    source = ROOT / "src" / "onnxgrad"
    rooms = "|".join(p.name for p in source.iterdir() if p.is_dir())
    for page in (ROOT / "docs").rglob("*.md"):
        for path in re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", page.read_text()):
            assert (source / path).exists(), f"{page.name} names {path}"
