"""A headless Chromium, driven through its debugging pipe: the DevTools protocol, and no driver to install."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: The path of a browser, where it is not on PATH under one of its names.
VARIABLE = "ONNXGRAD_BROWSER"
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # as root, in a container
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--mute-audio",
    "--enable-unsafe-webgpu",  # WebGPU on the processor, where the build has it
    "--use-webgpu-adapter=swiftshader",
    "--remote-debugging-pipe",
]


def find() -> str | None:
    """The path of a browser, or None."""
    return os.environ.get(VARIABLE) or next((p for p in map(shutil.which, NAMES) if p), None)


class Page:
    """One page of a browser.

    Attributes:
        said: what the page wrote to its console, and errors that nothing caught.
        asked: the addresses that it asked the network for.
    """

    def __init__(self, writer: int, reader: int, stderr: Path) -> None:
        self._writer, self._reader, self._stderr = writer, reader, stderr
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.said: list[str] = []
        self.asked: list[str] = []

    def attach(self) -> None:
        """Make the page, and listen to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, *, within: float = 60, **params: Any) -> dict[str, Any]:
        """The browser's answer to a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + within
        while True:
            answer = self._next(end, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._reader, selectors.EVENT_READ)
                if not waiting.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"the browser does not answer {method}; the page said: {self.said[-5:]}")
            found = os.read(self._reader, 1 << 20)
            if not found:
                raise RuntimeError(f"the browser ended: {self._stderr.read_text(errors='replace')[-2000:]}")
            self._rest += found
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, method: str | None, params: Any) -> None:
        if method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append("uncaught: " + (details.get("exception", {}).get("description") or details["text"]))
        elif method == "Log.entryAdded":
            self.said.append(f"{params['entry']['level']}: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, address: str) -> None:
        """Go to a page."""
        found = self.call("Page.navigate", url=address)
        if "errorText" in found:
            raise RuntimeError(f"{address}: {found['errorText']}")

    def run(self, script: str, *, within: float = 60) -> Any:
        """The value of an expression in the page; of a promise, what it gives."""
        how = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", within=within, **how)
        if details := found.get("exceptionDetails"):
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait(self, condition: str, *, within: float = 60) -> Any:
        """The value of an expression, as soon as it is true."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):  # the page may be going elsewhere
                if found := self.run(condition, within=max(1.0, end - time.monotonic())):
                    return found
            time.sleep(0.05)
        raise TimeoutError(f"{condition} does not come true within {within} s; the page said: {self.said[-5:]}")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """`kind`: pressed, moved or released, of the left button, in CSS pixels of the window."""
        down = {"button": "left", "buttons": int(kind != "released"), "clickCount": int(kind != "moved")}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind.capitalize()}", x=x, y=y, **down)

    def click(self, selector: str) -> None:
        """Press and let go in the middle of the first element that matches."""
        x, y = self.run(
            f"""(() => {{
                const found = document.querySelector({json.dumps(selector)});
                found.scrollIntoView({{ block: "center", behavior: "instant" }});
                const {{ x, y, width, height }} = found.getBoundingClientRect();
                return [x + width / 2, y + height / 2];
            }})()"""
        )
        for kind in ("moved", "pressed", "released"):
            self.mouse(kind, x, y)

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Of the window, in CSS pixels."""
        how = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **how)

    def downloads(self, folder: Path) -> None:
        """The folder of files that the page offers."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))


@contextlib.contextmanager
def page(browser: str, *flags: str) -> Iterator[Page]:
    """A page of a new browser, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        stderr = Path(profile, "stderr")
        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        shell = f'exec 3<&{their_in} 4>&{their_out}; exec "$@"'
        command = [browser, *FLAGS, *flags, f"--user-data-dir={profile}/profile", "about:blank"]
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                ["bash", "-c", shell, "browser", *command],
                pass_fds=(their_in, their_out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        os.close(their_in)
        os.close(their_out)
        try:
            made = Page(our_out, our_in, stderr)
            made.attach()
            yield made
            with contextlib.suppress(Exception):
                made._session = None
                made.call("Browser.close", within=10)
        finally:
            os.close(our_out)
            os.close(our_in)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
