"""The tables of the documentation and the help of the command list what there is: all of it, and nothing else."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from onnxgrad.demo.tasks import TASKS
from onnxgrad.training.loop import callbacks, trackers
from onnxgrad.training.loss.losses import LOSSES
from onnxgrad.training.loss.step_metrics import IN_STEP
from onnxgrad.training.optim.optimizers import OPTIMIZERS
from onnxgrad.training.optim.schedules import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"
#: Pages whose flags are those of training commands.
TRAINING = (
    *("fine-tuning.md", "heads.md", "what-trains.md", "adapters.md", "callbacks.md", "checkpoints.md", "data.md"),
    *("training.md", "losses.md", "optimizers.md", "exported-steps.md"),
    *("migration.md", "migration-loop.md", "migration-losses.md", "migration-optimizer.md", "migration-devices.md"),
)


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The first table under a heading: its rows without the first cell, by the code in the first cell."""
    text = (DOCS / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", section, flags=re.M)
    assert lines, f"{page} has no table under {heading!r}"
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()]
    return {name: row[1:] for row in rows for name in code(row[0])}


def code(cell: str) -> list[str]:
    """The code spans in `cell`, without arguments."""
    return [text.partition("(")[0] for text in re.findall(r"`([^`]+)`", cell)]


def shown(command: str) -> str:
    """The help of a command, its lines joined."""
    done = CliRunner().invoke(build(), [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


def test_losses():
    rows = table("losses.md", "All losses")
    assert list(rows) == list(LOSSES)
    for name, (_, contains, options, _) in rows.items():
        loss = LOSSES[name]
        fixed = {"axis"} if name == "ctc" else set()  # which has one value, the last axis
        assert sorted(code(options)) == sorted(loss.options.keys() - {"reduction"} - fixed), name
        assert contains == (loss.contains[0] if loss.contains else ""), name


def test_optimizers():
    rows = table("optimizers.md", "All optimizers")
    assert list(rows) == list(OPTIMIZERS)
    for name, (_, operator, settings, _) in rows.items():
        recipe = OPTIMIZERS[name]
        assert sorted(code(settings)) == sorted(recipe.settings.keys() - {"learning_rate", "weight_decay"}), name
        stated = recipe.operator(recipe.settings)
        assert operator == (stated.type if stated else ""), name


def test_schedules():
    rows = table("optimizers.md", "All schedules")
    assert list(rows) == list(SCHEDULES)
    for name, (_, options) in rows.items():
        found = dict(re.findall(r"`(\w+)`(?: \(([^)]+)\))?", options))
        assert found.keys() == SCHEDULES[name].options.keys(), name
        for option, default in SCHEDULES[name].options.items():
            assert (float(found[option]) if found[option] else None) == default, (name, option)


def test_measures():
    text = (DOCS / "losses.md").read_text()
    sentence = re.search(r"Metrics are further results .*?: (.*?) is that of", text, flags=re.S)
    assert sentence
    assert sorted(code(sentence[1])) == sorted(IN_STEP)


def test_callbacks():
    public = {
        name: kind
        for module in (callbacks, trackers)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, callbacks.Callback) and not name.startswith("_")
    }
    rows = table("callbacks.md", "All callbacks")
    assert rows.keys() - {"onnxgrad[mlflow]", "reporter"} == public.keys() - {"Callback"}


@pytest.mark.parametrize("command", ["train", "export-step"])
def test_the_help_lists_what_the_tables_list(command):
    text = shown(command)
    for page, heading, last in (
        ("losses.md", "All losses", ", LOSS.onnx, or a formula"),
        ("optimizers.md", "All optimizers", ". Settings"),
        ("optimizers.md", "All schedules", " or plateau"),
    ):
        assert f"{', '.join(table(page, heading))}{last}" in text, heading


def test_the_help_lists_the_demonstrations():
    text = shown("demo")
    readme = (DOCS.parent / "README.md").read_text()
    for name in TASKS:
        assert re.search(rf"\b{name}\b", text)
        assert name == "digits" or f"run.py demo {name}" in readme


def test_flags_that_the_pages_name_exist():
    hosts = files("onnxgrad.training.export").joinpath("host.mjs").read_text()
    known = set(re.findall(r"--[a-z][a-z-]*", shown("train") + shown("export-step") + shown("demo") + hosts))
    for page in TRAINING:
        named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", (DOCS / page).read_text()))
        assert named <= known, page


def test_every_page_is_linked_from_the_readme_or_the_list_and_has_a_place_in_the_site():
    site = (DOCS / "index.md").read_text().split()
    linked = {
        (start.parent / target).resolve()
        for start in (DOCS.parent / "README.md", DOCS / "pages.md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", start.read_text())
    }
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).with_suffix("").as_posix() in [*site, "index"], page.name
        assert page.stem in ("pages", "index", "security") or page in linked, page.name


def test_contributing_lists_the_markers_options_and_variables_of_the_suite():
    root = DOCS.parent
    rows = re.findall(r"^\| (`.*?) \|", (root / "CONTRIBUTING.md").read_text(), flags=re.M)
    listed = {name for row in rows for name in code(row)}
    markers = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    options = re.findall(r'addoption\("(--[\w-]+)"', (root / "tests" / "conftest.py").read_text())
    tests = [path.read_text() for path in (root / "tests").rglob("*.py") if path != Path(__file__)]
    variables = {name for text in tests for name in re.findall(r"(?<![\w<])ONNXGRAD_[A-Z_]+\b", text)}
    assert listed == {re.split(r"[(:]", m)[0] for m in markers} | {*options} | variables
