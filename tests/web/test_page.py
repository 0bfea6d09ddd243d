"""The page of examples/web in a headless Chromium: drawn on with the mouse, trained, and its model downloaded."""

from __future__ import annotations

import importlib.util
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import load_adapter
from onnxgrad.demo import digits
from tests.web import browser
from tests.web.browser import Page

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "web"
#: How a hand draws each digit: strokes through points, the y axis downwards.
STROKES: dict[int, list[list[tuple[float, float]]]] = {
    0: [[(0.5, 0.1), (0.25, 0.25), (0.2, 0.5), (0.5, 0.9), (0.75, 0.75), (0.8, 0.5), (0.75, 0.2), (0.5, 0.1)]],
    1: [[(0.35, 0.25), (0.5, 0.1), (0.5, 0.9)]],
    2: [[(0.25, 0.3), (0.35, 0.13), (0.6, 0.1), (0.75, 0.28), (0.6, 0.55), (0.25, 0.9), (0.8, 0.88)]],
    3: [[(0.25, 0.15), (0.6, 0.1), (0.7, 0.28), (0.45, 0.47), (0.73, 0.62), (0.65, 0.85), (0.25, 0.88)]],
    4: [[(0.55, 0.1), (0.2, 0.6), (0.8, 0.6)], [(0.6, 0.35), (0.6, 0.92)]],
    5: [[(0.72, 0.12), (0.32, 0.12), (0.28, 0.45), (0.6, 0.45), (0.75, 0.65), (0.6, 0.88), (0.25, 0.85)]],
    6: [[(0.65, 0.1), (0.35, 0.35), (0.25, 0.7), (0.45, 0.9), (0.7, 0.78), (0.65, 0.55), (0.3, 0.62)]],
    7: [[(0.22, 0.15), (0.78, 0.13), (0.5, 0.5), (0.38, 0.9)]],
    8: [[(0.7, 0.2), (0.5, 0.1), (0.3, 0.25), (0.65, 0.6), (0.6, 0.9), (0.3, 0.75), (0.6, 0.4), (0.7, 0.2)]],
    9: [[(0.7, 0.25), (0.5, 0.1), (0.3, 0.25), (0.4, 0.45), (0.68, 0.38), (0.7, 0.25), (0.66, 0.6), (0.58, 0.9)]],
}  # fmt: skip


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("sklearn", reason="no scikit-learn")
    return example("build")


@pytest.fixture(scope="module")
def site(build, modules, tmp_path_factory) -> Path:
    """The page, as build.py writes it."""
    out = tmp_path_factory.mktemp("site")
    build.build(out, modules / "node_modules" / "onnxruntime-web")
    return out


@pytest.fixture(scope="module")
def served(site, build) -> Iterator[Callable[[type], str]]:
    """Serves the page by a handler; its address."""
    servers: list[ThreadingHTTPServer] = []

    def serve(handler: type) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=site))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def page() -> Iterator[Page]:
    found = browser.find()
    if found is None:
        pytest.skip(f"no Chromium; {browser.VARIABLE} names one")
    with browser.page(found) as made:
        made.size(1320, 900)
        yield made


def ready(page: Page, address: str) -> None:
    page.open(address)
    page.wait("/ready|failed/.test(document.body?.dataset.state)", within=120)
    assert page.run("document.querySelector('#problem').innerText") == ""


def text(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector('{selector}').innerText")


def drawn(page: Page, digit: int, rng: np.random.Generator) -> None:
    """Draw a digit with the mouse as one hand would this time: turned, slanted, stretched, shaky."""
    turn, slant = rng.uniform(-0.12, 0.12, 2)
    across, down = rng.uniform(0.6, 0.8, 2)
    c, s = math.cos(turn), math.sin(turn)
    change = np.array([[c, -s], [s, c]]) @ np.array([[across, slant], [0, down]])
    left, top, side = page.run(
        "(() => { scrollTo(0, 0); const { x, y, width } = document.querySelector('#paper').getBoundingClientRect();"
        " return [x, y, width]; })()"
    )
    for stroke in STROKES[digit]:
        points = (np.array(stroke) - 0.5 + rng.normal(0, 0.012, (len(stroke), 2))) @ change.T + 0.5
        between = [points[0], *(p for a, b in itertools.pairwise(points) for p in ((a + b) / 2, b))]
        for k, (x, y) in enumerate(between):
            page.mouse("moved" if k else "pressed", left + x * side, top + y * side)
        page.mouse("released", left + x * side, top + y * side)


def labelled(page: Page, digit: int) -> str:
    """Say what is on the paper; what the page had guessed."""
    kept = page.run("document.querySelectorAll('#drawings button').length")
    page.wait("document.querySelector('#guess').innerText != '?'")
    guess = text(page, "#guess")
    page.click(f"#labels button:nth-child({digit + 1})")
    page.wait(f"document.querySelectorAll('#drawings button').length == {kept + 1}")
    page.wait("document.querySelector('#guess').innerText == '?'")
    return guess


def trained(page: Page, button: str) -> float:
    """The share of the held-out digits that are right after training."""
    page.click(button)
    page.wait("document.body.dataset.state == 'training'")
    page.wait("document.body.dataset.state == 'ready'", within=300)
    return float(text(page, "#held-out").rstrip(" %")) / 100


def downloaded(page: Page, folder: Path) -> Path:
    page.downloads(folder)
    page.click("#download")
    end, path = time.monotonic() + 60, folder / "trained.onnx"
    while not path.exists():
        assert time.monotonic() < end, page.said
        time.sleep(0.05)
    return path


def test_from_chance_to_right_by_a_handful_of_strokes(page, served, build, tmp_path):
    ready(page, served(build.Handler))
    assert "Runs on the processor, with" in text(page, "#runs")
    rng = np.random.default_rng(0)
    guesses = []
    for digit in [*range(10)] * 3:
        drawn(page, digit, rng)
        guesses.append(labelled(page, digit) == str(digit))
    assert sum(guesses) < 10, "nobody taught it"
    assert text(page, "#fresh") == f"{sum(guesses)} of 30"
    others = trained(page, "#train-own")
    assert "320 steps on 30 drawings" in text(page, "#news")
    assert others > 0.3, "what it learned of one hand is of use for others"
    guesses = []
    for digit in [*range(10)] * 2:
        drawn(page, digit, rng)
        guesses.append(labelled(page, digit) == str(digit))
    assert text(page, "#fresh") == f"{sum(guesses)} of 20"
    assert sum(guesses) > 18, "new drawings, more than 90 %"
    drawn(page, 3, rng)
    page.wait("document.querySelector('#guess').innerText == '3'")
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    onnx.checker.check_model(onnx.load(downloaded(page, tmp_path)), full_check=True)
    page.click("#drawings button")  # one less
    page.wait("document.querySelectorAll('#drawings button').length == 49")
    page.click("#reset")
    page.wait("document.querySelector('#news').innerText == 'It knows nothing again.'")
    page.wait("parseFloat(document.querySelector('#held-out').innerText) < 30")
    assert not [line for line in page.said if "uncaught" in line or "rror" in line], page.said


def test_the_model_that_is_downloaded_is_right_as_often(page, served, build, tmp_path):
    """And a server without the headers for threads is told of, once; nothing asks any other server for anything."""
    address = served(SimpleHTTPRequestHandler)
    ready(page, address)
    assert float(text(page, "#held-out").rstrip(" %")) < 30, "chance"
    said = "Runs on the processor, with 1 thread. This page was served without the headers COOP and COEP"
    assert text(page, "#runs").startswith(said)
    right = trained(page, "#train-packaged")
    assert right > 0.9
    session = onnxruntime.InferenceSession(downloaded(page, tmp_path), providers=["CPUExecutionProvider"])
    test = digits()[1]
    scores = session.run(None, {"images": test["images"]})[0]
    assert (scores.argmax(1) == test["labels"]).mean() == pytest.approx(right, abs=0.006), "two may be very close"
    assert all(url.startswith((address, "data:", f"blob:{address}")) for url in page.asked), page.asked
    assert not [line for line in page.said if "uncaught" in line or "rror" in line], page.said


def test_a_page_that_cannot_start_says_why(page, site, build, served, tmp_path):
    """Here: the contract of another version. One message, and nothing to press."""
    contract = (site / "device" / "contract.json").read_text()

    class Other(build.Handler):
        def do_GET(self) -> None:
            if not self.path.endswith("contract.json"):
                super().do_GET()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(contract.replace('"version": 1', '"version": 2').encode())

    page.open(served(Other))
    page.wait("document.body?.dataset.state == 'failed'")
    problem = text(page, "#problem").splitlines()
    assert problem[0] == "contract.json has version 2; this host reads version 1"
    assert len(problem) == 2
    assert page.run("[...document.querySelectorAll('button')].every((b) => b.disabled || b.id == 'clear' || b.hidden)")


@pytest.mark.complete
def test_adapters_are_switched_in_the_page(served, build, page, site):
    build.build_adapters(site)
    page.open(f"{served(build.Handler)}adapters.html")
    page.wait("/ready|failed/.test(document.body?.dataset.state)", within=120)
    assert text(page, "#problem") == ""
    assert sum(address.endswith("model.onnx") for address in page.asked) == 1
    rows = page.run("[...document.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))")
    shares = {kind: [float(cell.rstrip(" %")) / 100 for cell in cells] for kind, *cells in rows}
    _, test = digits()
    images = {
        "as they are": test["images"],
        "negative": 1 - test["images"],
        "upside-down": np.ascontiguousarray(test["images"][..., ::-1, ::-1]),
    }
    places = {name: site / "adapters" / name for name in ("negative", "upside-down")}
    base = onnx.load(places["negative"] / "model.onnx")
    merged = [base, *(load_adapter(base, place, merge=True) for place in places.values())]
    for at, model in enumerate(merged):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for kind, array in images.items():
            right = session.run(None, {"images": array})[0].argmax(1) == test["labels"]
            assert shares[kind][at] == pytest.approx(right.mean(), abs=2 / len(right)), (kind, at)
    assert shares["as they are"][0] > 0.9
    for at, name in enumerate(places, 1):
        assert shares[name][at] > 0.8 > 0.6 > shares[name][0], name
