"""Options of the test suite, what it needs of the process that it runs in, and an account of what it skips."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from onnxgrad.runtime import Options
from onnxgrad.runtime.options import TARGET
from tests.npm import modules, node  # noqa: F401  (fixtures)

# A shell that starts the tests in the background ignores these; what tests start inherits the default, too.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Each worker of pytest-xdist has its share of the cores: the threads of every session wait by spinning, and would take
# the cores from the other workers. ONNX Runtime reads this variable where a session does not say how many it wants.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if _workers:
    os.environ.setdefault("ORT_INTRA_OP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

SKIPPED = "onnxgrad/skipped"  # in pytest's cache: the tests, or whole files, that the last run skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="whole sweeps, where a part of them runs by default")
    parser.addoption("--left-out", action="store_true", help="only what a run without --complete leaves out")
    parser.addoption("--only-skipped", action="store_true", help="only what the run before this one skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.left_out or os.environ.get("ONNXGRAD_GOLDEN"):  # golden files hold every case
        config.option.complete = True


def pytest_report_header() -> str:
    """The target of every session that names none."""
    target = Options().resolve_target().target
    said = os.environ.get(TARGET)
    why = f"{TARGET} is set" if said else "the default" if target == "native" else "there are no kernels to load"
    return f"onnxgrad: target {target} ({why})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Run a test that is marked ``target("portable")`` with this target, its fixtures as well."""
    marker, before = item.get_closest_marker("target"), os.environ.get(TARGET)
    if marker is not None:
        os.environ[TARGET] = marker.args[0]
    try:
        return (yield)
    finally:
        if marker is not None and before is None:
            del os.environ[TARGET]
        elif marker is not None and before is not None:
            os.environ[TARGET] = before


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The items that run only with ``--complete``: marked ones, and all but each n-th case of a ``sweep(n)``."""
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


def skipped_before(config: pytest.Config) -> set[str]:
    """What the run before this one skipped: tests, or whole files."""
    return set(config.cache.get(SKIPPED, []))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--only-skipped``, import no file of which nothing was skipped."""
    if not config.getoption("--only-skipped") or collection_path.suffix != ".py":
        return None
    files = {name.partition("::")[0] for name in skipped_before(config)}
    return collection_path.relative_to(config.rootpath).as_posix() not in files or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, named = items, any("::" in a for a in config.args)
    if config.getoption("--left-out"):
        only = left_out(items)
        chosen = [i for i in items if i in only]
    elif not config.getoption("--complete") and not named:  # what is asked for by its name runs
        apart = left_out(items)
        chosen = [i for i in items if i not in apart]
    if config.getoption("--only-skipped"):
        before = skipped_before(config)
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
    gc.set_threshold(20_000, 20, 20)  # there is a search after each test
    set_aside()


_files = 0  # that are done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After each test, so that a session pays for the objects of its own test; fixtures of a module are freed later."""
    global _files
    yield
    if nextitem is None:
        return
    if nextitem.path != item.path:
        _files += 1
        if _files % 32 == 0:
            gc.unfreeze()
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
