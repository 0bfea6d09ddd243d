"""Tables of measurements in pages of the documentation, between two markers."""

from __future__ import annotations

from pathlib import Path


def write_table(page: Path, name: str, table: str) -> None:
    """Put `table` between ``<!-- name -->`` and the next ``<!-- end …`` of `page`."""
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("\n<!-- end")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table {name!r}")
    page.write_text(before + begin + table + end + after)
