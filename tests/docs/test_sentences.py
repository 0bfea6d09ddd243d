"""Sentences of pages begin with a noun or a verb, and name the actor (questions and headings apart)."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
START = r"(?:^(?:[-*|>] |\d+\. )?|[.:;!|] )(?:\*\*)?"
WORDS = r"(?:What|Whose|Whoever|Whatever|Who|Whether|Nobody|Somebody|Anybody|That which)\b"
BEGINS = re.compile(rf"{START}({WORDS}[^.!?\n]*[.!?]?)", flags=re.M)
NO_ACTOR = re.compile(r"\b(?:nobody|somebody|anybody|whoever)\b", flags=re.I)


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
