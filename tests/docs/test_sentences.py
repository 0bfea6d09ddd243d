"""Sentences of pages and docstrings begin with a noun or a verb, and name the actor; functions are verb and object.

Questions and headings of pages are exempt.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
START = r"(?:^(?:[-*|>] |\d+\. )?|[.:;!|] )(?:\*\*)?"
WORDS = r"(?:What|Whose|Whoever|Whatever|Who|Whether|Nobody|Somebody|Anybody|That which)\b"
BEGINS = re.compile(rf"{START}({WORDS}[^.!?\n]*[.!?]?)", flags=re.M)
NO_ACTOR = re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", flags=re.I)
MODULES = sorted((ROOT / "src").rglob("*.py"))
DOCSTRING = re.compile(
    r"(?:What|Whatever|Why|Of|Its|Nothing|Whether|Whose|Where|Which|How|Whoever|That|Those|One that|As)\b"
)
#: Participles and particles: as the name of a function, each lacks an object.
BARE = re.compile(
    r"_*(?:told|held|taken|settled|joined|widened|whole|alone|within|aside|together|giving|onward|behind|kept|given|made"
    r"|found|known|seen|shown|left|around|about|again|after|before|beyond|there|otherwise|some|each|one|nothing|through"
    r"|along|times|telling|compared|chosen|evaluated|sunk|spared|swapped|turned|moved|picked|placed|put|say|said)_*"
)


def faults(text: str) -> list[str]:
    """The sentences of a page, outside of code and headings, that begin with such a word or name no actor."""
    prose = re.sub(r"^ *(?:> )?```.*?^ *(?:> )?```|^#.*?$|`[^`\n]+`", "", text, flags=re.M | re.S)
    found = [m[1] for m in BEGINS.finditer(prose) if not m[1].endswith("?")]
    return found + [m[0] for m in NO_ACTOR.finditer(prose)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("What remains is kept.", 1),
        ("It ends. Whatever fits is kept.", 1),
        ("- Whether it fits is known.", 1),
        ("It runs if nobody reads it.", 1),
        ("# What is new\nIt runs. What now?\n```\nWhat: 1\n```\nThe page says what runs.", 0),
    ],
)
def test_such_sentences_are_found(text, count):
    assert len(faults(text)) == count


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sentences_begin_with_a_noun_or_a_verb(page):
    assert faults(page.read_text()) == []


def code_faults(text: str) -> list[str]:
    """Bad beginnings of docstrings, bare names of functions, and words that name no actor in a module."""
    tree = ast.parse(text)
    found = [m[0] for m in NO_ACTOR.finditer(text)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and BARE.fullmatch(node.name):
            found.append(f"line {node.lineno}: def {node.name}")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if DOCSTRING.match(summary):
                found.append(f"line {getattr(node, 'lineno', 1)}: {summary}")
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""What a module holds."""', 1),
        ('def size(x):\n    """How many."""', 1),
        ('class Box:\n    def _taken(self):\n        """True if it is full."""', 1),
        ("x = 1  # nobody reads it", 1),
        ('"""A box."""\ndef take(x, given):\n    """Return what `x` holds."""', 0),
    ],
)
def test_such_docstrings_and_names_are_found(text, count):
    assert len(code_faults(text)) == count


def test_docstrings_and_names_of_functions_say_what_they_are():
    faults_of = {str(p.relative_to(ROOT)): code_faults(p.read_text(encoding="utf-8")) for p in MODULES}
    assert {path: found for path, found in faults_of.items() if found} == {}
