"""References of docstrings and comments lead somewhere: to files, modules, and names that the code has."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest

from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "onnxgrad"
MODULES = sorted(SOURCE.rglob("*.py"))
FILE = re.compile(r"(?<![\w/.:-])((?:[\w-]+/)*\w[\w-]*\.(?:py|c|h|mjs|hpp|toml|md))\b(?!/)")
DOTTED = re.compile(r"\bonnxgrad(?:\.[a-z_]\w*)+")
NAMED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
SEEN = re.compile(r"\bsee `([a-z_]\w*)`")
#: Files that are not of this repository, or that a run writes.
ELSEWHERE = {"docs/ContribOperators.md", "onnx.py", "run.toml", "fuzz_guided.py"}
#: Names below ``onnxgrad`` that are no modules: a domain of operators, keys of metadata.
PREFIXES = ("onnxgrad.native", "onnxgrad.fish")
#: Fields of a node in a tree that hold an identifier.
FIELDS = ("id", "attr", "arg", "name", "asname", "module")


class Names(NamedTuple):
    """Texts and names of a module."""

    prose: list[str]  # its comments and docstrings
    used: set[str]  # its identifiers, and the words of its literals
    defined: set[str]  # functions, classes, parameters and variables, at any depth
    top: set[str]  # its functions and classes


@cache
def names(text: str) -> Names:
    """The names of a module, by one walk through its tree."""
    tree = ast.parse(text)
    prose, used, defined = re.findall(r"(?:^|\s)#[ :].*", text), set(), set()
    alone = set()  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            alone.add(id(node.value))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in alone:
                used.update(re.findall(r"\w+", node.value))
            continue
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            prose.append(ast.get_docstring(node, clean=False) or "")
        for field in node._fields:
            word = getattr(node, field)
            if isinstance(word, str) and field in FIELDS:
                used.update(word.split("."))
                stored = isinstance(getattr(node, "ctx", None), ast.Store)
                if stored or isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.arg)):
                    defined.add(word)
    top = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return Names(prose, used, defined, top)


def names_of(text: str) -> set[str]:
    """The identifiers and the one-word literals of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {word for token in tokens if re.fullmatch(r"\w+", word := token.string.strip("\"'"))}


@cache
def stems() -> set[str]:
    """The names of modules and packages."""
    return {p.stem for p in MODULES} | {p.parent.name for p in MODULES}


@cache
def everywhere() -> set[str]:
    """The names that any module defines, and the attributes of ONNX's operators."""
    attributes = {name for schema in onnx.defs.get_all_schemas() for name in schema.attributes}
    return stems().union(*(names(p.read_text()).defined for p in MODULES)) | set(dir(builtins)) | attributes


@cache
def at_top() -> set[str]:
    """The functions and classes at the top of modules."""
    return set().union(*(names(p.read_text()).top for p in MODULES))


@cache
def files() -> set[str]:
    """The files of the repository, with a slash in front."""
    folders = ("src", "tests", "benchmarks", "tools", "examples", "docs", ".ci")
    found = {p.as_posix() for folder in folders for p in (ROOT / folder).rglob("*.*")}
    return {f"/{f}" for f in found} | {f"/{p.name}" for p in ROOT.iterdir()}


@cache
def ends() -> set[str]:
    """Every path of `files` as it may be shortened from the left."""
    return {"/".join(parts[k:]) for f in files() for parts in [f.split("/")] for k in range(len(parts))}


def is_module_path(name: str) -> bool:
    """True if a dotted name leads to a module, or to a name in one."""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        place = ROOT.joinpath("src", *parts[:k])
        if (file := place.with_suffix(".py")).exists() or (file := place / "__init__.py").exists():
            return k == len(parts) or parts[k] in names_of(file.read_text())
    return False


def faults(text: str) -> list[str]:
    """The references of a module's prose that lead nowhere."""
    of, found = names(text), []
    local = of.used | of.defined
    for words in of.prose:
        found += [f for f in FILE.findall(words) if f not in ends() | ELSEWHERE and not f.startswith("_")]
        found += [d for d in DOTTED.findall(words) if not d.startswith(PREFIXES) and not is_module_path(d)]
        found += [s for s in SEEN.findall(words) if s not in local | stems() | at_top()]
        for name in NAMED.findall(words):
            last = name.rpartition(".")[2]
            if len(last) > 2 and not name.startswith("onnxgrad") and last not in local | everywhere():
                found.append(name)
    return found


@pytest.mark.parametrize(
    "line",
    ["see `no_such_thing`", "in no/such/file.py", "`NoSuchClass` does it", "onnxgrad.no.such", "onnxgrad.ir.no_such"],
)
def test_a_reference_to_nothing_is_found(line):
    assert len(faults(f'"""{line}"""')) in (1, 2)  # an unknown name behind "see" is two faults


def test_references_of_the_source_lead_somewhere():
    found = {str(path.relative_to(ROOT)): there for path in MODULES if (there := faults(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples"])
def test_files_that_benchmarks_and_examples_name_exist(folder):
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        if path != Path(__file__):
            named = {f for words in names(path.read_text()).prose for f in FILE.findall(words)}
            if missing := named - ends() - ELSEWHERE:
                found[str(path.relative_to(ROOT))] = missing
    assert found == {}
