"""The pages of operators are what the registry says."""

from __future__ import annotations

import re

import onnx

from tests.nodes import tags
from tests.nodes.table import FACTS, RED, pages, rows


def test_the_page_is_what_the_registry_says() -> None:
    tables = [[line for line in p.read_text().splitlines() if line.startswith("| ")][1:] for p in pages()]
    lines = [line for table in tables for line in table]
    written = [tuple(part.strip() for part in re.split(r"(?<!\\)\|", line)[1 : len(FACTS) + 1]) for line in lines]
    wanted = [tuple(part.strip() for part in r.facts) for r in rows(evidence=False)]
    stale = [w for w in wanted if w not in written] + [w for w in written if w not in wanted]
    assert not stale, f"run `python -m tests.nodes.table`: {stale[:5]}"


def test_the_evidence_is_what_the_tests_gave() -> None:
    assert {path: path.read_text() for path in pages()} == pages(), "run `python -m tests.nodes.table`"


def test_nothing_failed_and_what_nothing_proves_is_known() -> None:
    assert not [r.facts[0] for r in rows() if RED in r.line]
    assert not [r.line for r in rows() if "failed" in r.line]


def test_every_standard_operator_has_a_row() -> None:
    names = {r.facts[0] for r in rows(evidence=False)}
    assert {s.name for s in onnx.defs.get_all_schemas() if not s.domain and not s.deprecated} <= names


def test_the_page_of_tags_is_what_the_schemas_say() -> None:
    assert tags.PAGE.read_text() == tags.page(), "run `python -m tests.nodes.tags`"
    assert tags.REPORT_PAGE.read_text() == tags.report(), "run `python -m tests.nodes.tags`"


def test_what_is_policy_has_a_row() -> None:
    known = {(op, name) for op, name, _, _ in tags.compared()}
    assert set(tags.POLICY) <= known
