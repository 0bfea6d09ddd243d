"""The code of every page, run as a user runs it: in an environment that holds only what the page says to install.

::

    python -m tests.docs.pages             # the pages of `onnxgrad[train]`, in one environment
    python -m tests.docs.pages --complete  # all pages, an environment for each set of packages
    python -m tests.docs.pages eager.md    # these pages

What a page says to install are the ``pip install`` lines of its blocks of ``sh``; a page without any needs
`onnxgrad[train]`. Blocks of ``python`` run in order as one program, in an empty folder. Then the ``onnxgrad`` commands
of blocks of ``sh`` run, if the files that they read are there: those that the program wrote, and `supposed` ones.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx

from tests.training.models import blobs, classifier

ROOT = Path(__file__).parents[2]
DEFAULT = ("onnxgrad[train]",)
#: Flags of ``onnxgrad`` whose value is a file or folder that the command writes.
WRITTEN = ("-o", "--output", "--report", "--plot", "--save-adapter", "--save-training", "--checkpoint")
FILE = re.compile(r"[\w./-]+\.(onnx|npz|npy|csv|jsonl|json|txt|png|parquet|tar)")
SECONDS = 300


def pages() -> list[Path]:
    """The README and all pages that hold a program or a command."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [p for p in found if program(p) or commands(p)]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def program(page: Path) -> str:
    """The blocks of Python, in order."""
    return "\n\n".join(blocks(page, "python"))


def lines(page: Path) -> list[list[str]]:
    """The commands of the blocks of ``sh``, without comments."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def commands(page: Path) -> list[list[str]]:
    """The commands of a page that are ours."""
    return [words for words in lines(page) if words[0] == "onnxgrad"]


def installs(page: Path) -> tuple[str, ...]:
    """The requirements that a page says to install."""
    asked = [w for words in lines(page) if words[:2] == ["pip", "install"] for w in words[2:] if not w.startswith("-")]
    return tuple(sorted({re.sub(r"^\.", "onnxgrad", w) for w in asked})) or DEFAULT


def ran(*command: object, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A finished process that sees nothing of this environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "ONNXGRAD_TARGET")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env.get('PATH', '')}"
    words = [*map(str, command)]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


def environment(folder: Path, wheel: Path, asked: tuple[str, ...]) -> Path:
    """The folder of programs of a new environment that holds what is `asked` for, at pinned versions."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    named = [f"{w} @ {wheel.as_uri()}" if w.startswith("onnxgrad") else w for w in asked]
    pip = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = ran(*pip, "-c", ROOT / "constraints.txt", *named, cwd=folder)
    if done.returncode:
        raise SystemExit(f"cannot install {', '.join(asked)}:\n{done.stderr}")
    return programs


def suppose(folder: Path) -> None:
    """Write the files that commands suppose: a classifier, and data that fit it."""
    onnx.save(classifier(), folder / "model.onnx")
    np.savez(folder / "train.npz", **blobs())
    np.savez(folder / "test.npz", **blobs(seed=1))


def missing(words: list[str], folder: Path) -> list[str]:
    """The files that a command reads and that `folder` lacks."""
    read = [w for before, w in pairwise(words) if before not in WRITTEN and FILE.fullmatch(w)]
    return [w for w in read if not (folder / w).exists()]


def check(page: Path, programs: Path, place: Path) -> list[str]:
    """Run a page in a folder of its own below `place`. Returns what failed, in words."""
    folder = place / f"page-{page.stem}"
    folder.mkdir()
    failed = []
    if program(page):
        (folder / "page.py").write_text(program(page), encoding="utf-8")
        done = ran(programs / "python", "page.py", cwd=folder, path=programs)
        if done.returncode:
            failed.append(f"{page.name}: its Python\n{done.stderr[-3000:]}")
        (folder / "page.py").unlink()
    if commands(page) and not (folder / "model.onnx").exists():
        suppose(folder)
    for words in commands(page):
        if lacking := missing(words, folder):
            print(f"  {page.name}: left out, for want of {', '.join(lacking)}: {shlex.join(words)}")
            continue
        done = ran(programs / words[0], *words[1:], cwd=folder, path=programs)
        if done.returncode:
            failed.append(f"{page.name}: {shlex.join(words)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return failed


def main() -> int:
    """Run the pages that are asked for; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages; default: those of onnxgrad[train]")
    parser.add_argument("--complete", action="store_true", help="all pages")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="pages that run at once")
    asked = parser.parse_args()
    chosen = [p for p in pages() if not asked.pages or p.name in asked.pages]
    if unknown := {*asked.pages} - {p.name for p in chosen}:
        parser.error(f"no page with code is called {', '.join(sorted(unknown))}")
    if not (asked.complete or asked.pages):
        chosen = [p for p in chosen if installs(p) == DEFAULT]
    failed = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        done = ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
        if done.returncode:
            raise SystemExit(done.stderr)
        (wheel,) = folder.glob("*.whl")
        for k, packages in enumerate(sorted({installs(p) for p in chosen})):
            begin = time.monotonic()
            programs = environment(folder / f"env{k}", wheel, packages)
            group = [p for p in chosen if installs(p) == packages]
            print(f"{', '.join(packages)}: {time.monotonic() - begin:.0f} s to install; {len(group)} pages", flush=True)
            with ThreadPoolExecutor(asked.jobs) as pool:
                found = pool.map(partial(check, programs=programs, place=folder), group)
                failed += [text for texts in found for text in texts]
            print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    for text in failed:
        print(f"\nFAILED {text}")
    print(f"{len(chosen)} pages, {len(failed)} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
