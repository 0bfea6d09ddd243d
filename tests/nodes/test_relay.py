"""docs/relay.md is what comes out when each row is differentiated and run."""

from __future__ import annotations

import pytest

from tests.nodes import relay

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("row", relay.ROWS, ids=[r.relay for r in relay.ROWS])
def test_row(row: relay.Row) -> None:
    line = relay.line(row)
    assert relay.RED not in line, relay.examined(row)
    assert line in relay.PAGE.read_text().splitlines(), "run `python -m tests.nodes.relay`"


def test_the_page_has_no_other_row() -> None:
    lines = [line for line in relay.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == len(relay.ROWS) + 1
    assert len({(r.level, r.relay) for r in relay.ROWS}) == len(relay.ROWS)
