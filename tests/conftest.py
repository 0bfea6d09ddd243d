"""Options of the test suite, what it needs of the process that it runs in, and an account of what it skips."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Sequence

import onnxruntime
import pytest

from tests.npm import modules, node  # noqa: F401  (fixtures)

# A shell that starts the tests in the background ignores these; what tests start inherits the default, too.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Threads of ONNX Runtime that wait by spinning take the cores from the other workers, a fifth of the suite's time.
_create = onnxruntime.InferenceSession.__init__


def _create_without_spinning(self, source, sess_options=None, *args, **named) -> None:
    sess_options = sess_options or onnxruntime.SessionOptions()
    try:
        sess_options.get_session_config_entry("session.intra_op.allow_spinning")
    except RuntimeError:  # it is not set yet; set twice, it would be warned of
        sess_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    _create(self, source, sess_options, *args, **named)


onnxruntime.InferenceSession.__init__ = _create_without_spinning

# Numbers must not depend on whether kernels in C were built by now: tests say which target they are about.
os.environ["ONNXGRAD_TARGET"] = "portable"

SKIPPED = "onnxgrad/skipped"  # in pytest's cache: the tests, or whole files, that the last run skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="whole sweeps, where a part of them runs by default")
    parser.addoption("--left-out", action="store_true", help="only what a run without --complete leaves out")
    parser.addoption("--only-skipped", action="store_true", help="only what the run before this one skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.left_out or os.environ.get("ONNXGRAD_GOLDEN"):  # golden files hold every case
        config.option.complete = True


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """What runs with ``--complete`` only: what is marked so, and of a ``sweep(n)`` all but each n-th case."""
    found, seen = set(), Counter[str]()
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None:
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")
            test = item.nodeid.partition("[")[0], getattr(case, "op", None)  # of each operator, where there are several
            if seen[test] % sweep.args[0]:
                found.add(item)
            seen[test] += 1
        if item.get_closest_marker("complete") is not None:
            found.add(item)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, named = items, any("::" in a for a in config.args)
    if config.getoption("--left-out"):
        only = left_out(items)
        chosen = [i for i in items if i in only]
    elif not config.getoption("--complete") and not named:  # what is asked for by its name runs
        apart = left_out(items)
        chosen = [i for i in items if i not in apart]
    if config.getoption("--only-skipped"):
        before = set(config.cache.get(SKIPPED, []))
        chosen = [i for i in chosen if i.nodeid in before or i.nodeid.partition("::")[0] in before]
    if chosen is items:
        return
    kept = set(chosen)
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = chosen


def set_aside() -> None:
    """Have the collector pass over what is alive: each session collects, and ten thousand tests are a large heap."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        set_aside()


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
