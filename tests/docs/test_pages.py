"""The packages that pages and messages name exist; the tool that runs pages in clean environments reads them."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.pages import DEFAULT, ROOT, commands, installs, missing, pages

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = re.compile(r"onnxgrad\[([\w,]+)\]")


def named(text):
    return {name for names in NAMED.findall(text) for name in names.split(",")}


def test_every_extra_that_is_named_exists():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    asked = {name: file.name for file in files for name in named(file.read_text(encoding="utf-8"))}
    assert asked.keys() <= EXTRAS.keys(), asked


def test_the_page_of_extras_lists_them():
    text = (ROOT / "docs/extras.md").read_text()
    assert {f"`{name}`" in text for name in EXTRAS.keys() - {"docs", "dev", "wheels"}} == {True}


@pytest.mark.parametrize("library", ["safetensors", "matplotlib", "pyarrow", "pillow", "tokenizers", "tensorboardX"])
def test_one_extra_is_enough_to_train(library):
    assert any(asked.startswith(library) for asked in EXTRAS["train"])


def test_pages_say_what_to_install():
    asked = {page.name: installs(page) for page in pages()}
    assert asked["README.md"] == asked["getting-started.md"] == asked["training.md"] == DEFAULT
    assert asked["sparse-derivatives.md"] == ("onnxgrad[train,scipy]",)


def test_commands_run_if_their_files_are_there(tmp_path):
    (readme,) = [page for page in pages() if page.name == "README.md"]
    check, grad, train, evaluate = commands(readme)
    assert missing(check, tmp_path) == missing(grad, tmp_path) == ["model.onnx"]
    assert missing(train, tmp_path) == ["model.onnx", "train.npz", "test.npz"]
    assert missing(evaluate, tmp_path) == ["trained.onnx", "test.npz"]
