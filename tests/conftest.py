"""Options of the test suite, what it needs of the process that it runs in, and an account of what it skips."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start inherits the default, too

SKIPPED = "onnxgrad/skipped"  # in pytest's cache: the tests, or whole files, that the last run skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="all node tests of the onnx package, in every form")
    parser.addoption("--only-skipped", action="store_true", help="only what the run before this one skipped")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--only-skipped"):
        return
    before = set(config.cache.get(SKIPPED, []))
    chosen = [i for i in items if i.nodeid in before or i.nodeid.partition("::")[0] in before]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(chosen)])
    items[:] = chosen


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    """Count the skips by what was missing, and note them for ``--only-skipped``."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skips, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")
    if hasattr(config, "cache") and not config.getoption("collectonly"):
        config.cache.set(SKIPPED, sorted({report.nodeid for report in skipped}))


@pytest.fixture(params=["stack", "scan"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms that many directions take: a stack, and a Scan."""
    if request.param == "scan":
        monkeypatch.setattr("onnxgrad.batching.directions.MOST_ELEMENTS", -1)
    return request.param
