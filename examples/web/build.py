"""Write a page that trains a digit classifier in the browser: static files, for any web server.

    python examples/web/build.py OUT [--runtime FOLDER] [--serve [PORT]]

A second page, adapters.html, switches between adapters of a classifier that is trained when it is built.

The folder OUT gets the page, the step of the untrained classifier as ``onnxgrad export-step`` writes it (with its
host.mjs), scikit-learn's digits, and onnxruntime-web, which npm fetches unless ``--runtime`` names a folder of it.
``--serve`` serves OUT with the headers that threads need; without them the page trains with one thread.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from onnxgrad import LoRA, Trainer
from onnxgrad.demo import MODEL, digits
from onnxgrad.errors import BadInput
from onnxgrad.files import cache
from onnxgrad.training import attach, export_step

HERE = Path(__file__).resolve().parent
PAGE = ("index.html", "style.css", "page.mjs", "strokes.mjs", "adapters.html", "adapters-page.mjs")
VERSION = "1.30.0"
#: Of onnxruntime-web: for the processor, and for WebGPU.
RUNTIME = [
    *("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    *("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm"),
]
#: A page may have threads if it lets no other site in.
HEADERS = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


def build(out: Path, runtime: Path | None = None) -> None:
    """Write the page into `out`; `runtime`: the folder of the package onnxruntime-web, or its ``dist``.

    Raises:
        BadInput: there is no npm, or it fails; or `runtime` is something else.
    """
    found = fetched() if runtime is None else runtime
    dist = found / "dist" if (found / "dist").is_dir() else found
    if missing := [name for name in RUNTIME if not (dist / name).is_file()]:
        raise BadInput(f"{str(dist)!r} is not onnxruntime-web: it has no {missing[0]}")
    model = attach(MODEL, loss="cross_entropy", optimizer="adam", learning_rate=3e-3)
    export_step(model, out / "device", target="web")
    parts = zip(("train", "test"), digits(), strict=True)
    arrays = {f"{part}_{name}": array for part, data in parts for name, array in data.items()}
    for name, array in arrays.items():
        arrays[name] = np.round(array * 16 if name.endswith("images") else array).astype(np.uint8)
    np.savez_compressed(out / "digits.npz", **arrays)
    (out / "ort").mkdir(exist_ok=True)
    for name in RUNTIME:
        shutil.copyfile(dist / name, out / "ort" / name)
    for name in PAGE:
        shutil.copyfile(HERE / name, out / name)


def build_adapters(out: Path) -> None:
    """Write a trained classifier into `out`, and adapters of it for negatives and for digits that are upside down."""
    train, _ = digits()
    trainer = Trainer(MODEL, loss="cross_entropy", optimizer="adam", learning_rate=3e-3)
    trainer.fit(train, epochs=10, batch_size=32)
    base = trainer.inference_model()
    changed = {"negative": 1 - train["images"], "upside-down": train["images"][..., ::-1, ::-1]}
    for name, images in changed.items():
        adapter = LoRA(rank=4, targets="all")
        trainer = Trainer(base, loss="cross_entropy", optimizer="adam", learning_rate=1e-2, adapter=adapter)
        trainer.fit({**train, "images": np.ascontiguousarray(images)}, epochs=20, batch_size=32)
        trainer.save_adapter(out / "adapters" / name, switchable=True)


def fetched() -> Path:
    """The package onnxruntime-web in the user's cache, fetched by npm if it is not there."""
    place = cache() / f"onnxruntime-web-{VERSION}"
    if all((place / "dist" / name).is_file() for name in RUNTIME):
        return place
    npm = shutil.which("npm")
    if npm is None:
        raise BadInput("npm is needed to fetch onnxruntime-web\n  hint: --runtime names a folder that has it")
    print(f"fetching onnxruntime-web {VERSION} with npm (30 MB, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", f"onnxruntime-web@{VERSION}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            raise BadInput(f"npm cannot fetch onnxruntime-web {VERSION}: {done.stderr.strip()[-200:]}")
        with tarfile.open(packed[0]) as archive:
            archive.extractall(Path(folder, "all"), filter="data")
        shutil.copytree(Path(folder, "all", "package"), place, dirs_exist_ok=True)
    return place


class Handler(SimpleHTTPRequestHandler):
    """Static files, with further headers."""

    headers_added: dict[str, str] = HEADERS
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        """With `headers_added` before the end."""
        for name, value in self.headers_added.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing of each file."""


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--runtime", type=Path, metavar="FOLDER", help="onnxruntime-web, as npm installs it")
    parser.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help="serve it on this machine")
    asked = parser.parse_args()
    try:
        build(asked.out, asked.runtime)
        build_adapters(asked.out)
        print(f"{asked.out / 'index.html'}")
        if asked.serve is not None:
            handler = partial(Handler, directory=asked.out)
            with ThreadingHTTPServer(("127.0.0.1", asked.serve), handler) as server:
                print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
                server.serve_forever()
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
