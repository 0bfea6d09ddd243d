"""``python -m tests.nodes [NAME …]``: all node tests (whose name contains a NAME) in every form; prints what is wrong.

Without a NAME, writes ``proven.txt``: the node tests whose derivatives were compared in some form and wrong in none.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.nodes.cases import forms, node_tests
from tests.nodes.checking import Outcome, examine

PROVEN = Path(__file__).parent / "proven.txt"


def main(names: list[str]) -> None:
    """Run them all; say what is wrong, then how the rest came out."""
    chosen = [t for t in node_tests() if not names or any(n in t.name for n in names)]
    proven, counts = [], Counter[str]()
    for test in chosen:
        found = {form: examine(test, form) for form in forms(test)}
        for form, outcome in found.items():
            counts[_verdict(outcome)] += 1
            for what in outcome.wrong:
                print(f"{test.name}, {form}: {what}", flush=True)
        if any(o.proven for o in found.values()) and not any(o.wrong for o in found.values()):
            proven.append(test.name)
    if not names:
        PROVEN.write_text("\n".join(sorted(proven)) + "\n")
    print(f"{len(chosen)} node tests, {len(proven)} proven; models by outcome: {dict(counts.most_common())}")


def _verdict(outcome: Outcome) -> str:
    if outcome.wrong:
        return "wrong"
    if outcome.refused:
        return f"refused ({outcome.refused.split(':')[0]})"
    return "proven" if outcome.proven else "without an oracle" if not outcome.oracle else "nothing to compare"


if __name__ == "__main__":
    main(sys.argv[1:])
