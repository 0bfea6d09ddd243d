"""Every command in a folder full of traps: nothing beside a user's files is executed, or configures anything."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

from onnxgrad.cli.app import COMMANDS
from tests.cli.test_commands import ENV, not_valid

MODULES = (
    *("onnx", "onnxruntime", "onnx_ir", "google", "numpy", "typer", "rich", "click", "ml_dtypes", "safetensors"),
    *("sitecustomize", "usercustomize", "matplotlib", "PIL", "pyarrow", "tokenizers", "tensorboardX", "sklearn"),
    *(
        "mlflow",
        "wandb",
        "torch",
        "mpi4py",
        "dotenv",
        "signal",
        "pathlib",
        "subprocess",
        "tempfile",
        "json",
        "readline",
    ),
)
PROGRAMS = ("latex", "dvipng", "cc", "gcc", "clang", "fc-list", "kpsewhich", "git", "node", "npm", "python", "python3")
SETTINGS = {
    "matplotlibrc": "text.usetex: True\n"
    "axes.prop_cycle: open('executed by matplotlibrc', 'w') or cycler('color', 'bgr')\n",
    "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'numpy'\nbackend-path = ['.']\n",
    "setup.cfg": "[global]\nno-index = yes\n",
    "pip.conf": "[global]\nno-index = yes\n",
    ".npmrc": "script-shell=./latex\nnode-options=--require ./node_modules/onnxruntime-node\n",
    ".env": "ONNXGRAD_TARGET=nonsense\nONNXGRAD_CACHE=/nowhere\n",
    "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenizer.py", "tokenizer.py"]}}',
    "config.json": '{"auto_map": {"AutoModel": "numpy.py"}}',
    "onnxgrad.toml": "seed = 'nonsense'\n",
    "train.toml": "seed = 'nonsense'\n",
    "conftest.py": "open('executed by conftest', 'w')",
}
#: Notes the files of a folder that a process of Python opens.
WATCH = """
import os, sys

def watch(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(args[0]))
        if path.startswith(os.environ["WATCHED"] + os.sep):
            with open(os.environ["OPENED"], "a") as file:
                print(path, file=file)

sys.addaudithook(watch)
"""
OWN = ("m.onnx", "scan.onnx", "d.npz", "d.csv")


@pytest.fixture
def folder(tmp_path_factory):
    """A model, its data, and every trap; a trap that springs writes a file."""
    tmp_path = tmp_path_factory.mktemp("place") / "traps"
    tmp_path.mkdir()
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 2] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    onnx.save(not_valid(), tmp_path / "scan.onnx")
    x, labels = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32), np.arange(8) % 2
    np.savez(tmp_path / "d.npz", x=x, labels=labels)
    rows = "\n".join(",".join(map(str, [*row, label])) for row, label in zip(x, labels))
    (tmp_path / "d.csv").write_text(f"x0,x1,x2,labels\n{rows}\n")
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"open('executed by {name}', 'w')")
    for name in ("mlflow", "wandb", "mlruns"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open('executed by the package {name}', 'w')")
        (tmp_path / name / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    for name in ("onnxruntime-node", "onnxruntime-web"):
        (tmp_path / "node_modules" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / name / "index.js").write_text(
            f"require('fs').writeFileSync('executed by {name}', '')"
        )
    for name in PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/sh\n: > 'executed by {name}'\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    for name, text in SETTINGS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def watched(folder) -> dict[str, str]:
    """The environment in which every process of Python notes what it opens in `folder`."""
    (folder.parent / "watch").mkdir()
    (folder.parent / "watch" / "sitecustomize.py").write_text(WATCH)
    own = {"WATCHED": str(folder), "OPENED": str(folder.parent / "opened"), "PYTHONPATH": str(folder.parent / "watch")}
    return ENV | own


def sprung(folder, traps) -> list[str]:
    """The files that traps have written, and the traps that were opened."""
    opened = (folder.parent / "opened").read_text().splitlines() if (folder.parent / "opened").exists() else []
    written = [str(p.relative_to(folder)) for p in folder.rglob("executed by*")]
    return sorted({*written, *(t for t in map(str, traps) if t in opened)})


def traps_of(folder):
    return [p for p in folder.rglob("*") if p.is_file() and p.name not in OWN]


TRAIN = ("train", "m.onnx", "--data", "d.npz", "--loss", "cross_entropy", "--optimizer", "sgd", "--epochs", "1")
LINES = {
    "train": (*TRAIN,
              "--plot", "p.png", "--report", "r.html", "--tensorboard", "t",
              "--validation-split", ".5", "-o", "o.onnx"),
    "train a table": ("train", "m.onnx", "--data", "d.csv", "--labels", "labels", "--loss", "cross_entropy",
                      "--optimizer", "sgd", "--input", "x=x0..x2", "--epochs", "1", "-o", "o.onnx"),
    "explain": ("explain", "m.onnx", "d.npz", "--method", "integrated_gradients", "-o", "e.png"),
    "evaluate": ("evaluate", "m.onnx", "--data", "d.npz", "--picture", "c.png"),
    "uncertain": ("uncertain", "m.onnx", "--method", "conformal", "--data", "d.npz", "-o", "u.onnx"),
    "grad": ("grad", "m.onnx", "--wrt", "w", "-o", "g.onnx"),
    "check": ("check", "scan.onnx"),
    "ops": ("ops",),
    "lower": ("lower", "m.onnx", "-o", "l.onnx"),
    "consolidate": ("consolidate", "d.npz"),
    "combine": ("combine", "d.npz", "-o", "c"),
    "quantize": ("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx"),
    "prune": ("prune", "m.onnx", "--data", "d.npz", "--weights", "0.5", "-o", "small.onnx"),
    "predict": ("predict", "m.onnx", "--data", "d.npz", "-o", "p.csv"),
    "generate": ("generate", "m.onnx", "--prompt", "a", "--tokenizer", "tokenizer.json"),
    "transplant": ("transplant", "m.onnx", "--into", "m.onnx", "-o", "t.onnx"),
    "info": ("info", "m.onnx"),
    "passes": ("passes", "m.onnx"),
    "export-step": ("export-step", "m.onnx", "--loss", "cross_entropy", "--optimizer", "sgd", "-o", "device"),
    "family": ("family", "m.onnx", "-o", "family"),
    "demo": ("demo", "nothing"),
    "completion": ("completion", "bash"),
}  # fmt: skip
#: Exit codes other than 0.
ENDS = {"check": 2, "combine": 2, "consolidate": 2, "demo": 2, "generate": 2}
OFTEN = ("train", "check")


def test_every_command_meets_the_traps():
    assert {line[0] for line in LINES.values()} == set(COMMANDS)


@pytest.mark.parametrize("line", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.complete) for n in LINES])
def test_no_trap_springs(folder, line):
    """With kernels, as users run it, and a path that a careless user has set."""
    env, traps = {k: v for k, v in watched(folder).items() if k != "ONNXGRAD_TARGET"}, traps_of(folder)
    env |= {
        "PATH": f".:{env['PATH']}:",
        "ONNXGRAD_CACHE": str(folder.parent / "cache"),
        "MPLCONFIGDIR": str(folder.parent),
    }
    start = [sys.executable, "-m", "onnxgrad", *LINES[line]]
    done = subprocess.run(start, capture_output=True, text=True, cwd=folder, env=env, timeout=120)
    assert sprung(folder, traps) == []
    assert done.returncode == ENDS.get(line, 0), done.stderr
    assert "Traceback" not in done.stderr


def test_a_figure_of_the_library(folder):
    """A program of the user elsewhere, which works in this folder."""
    script = folder.parent / "program.py"
    script.write_text(
        "from pathlib import Path\n"
        "from onnxgrad.training import Trainer\n"
        "trainer = Trainer('m.onnx', loss='cross_entropy', optimizer='sgd')\n"
        "trainer.fit('d.npz', epochs=1, plot=Path('p.png'))\n"
        "import matplotlib; assert not matplotlib.rcParams['text.usetex']\n"
    )
    env, traps = watched(folder), traps_of(folder)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sprung(folder, traps) == []
    assert (folder / "p.png").exists()
    assert os.getcwd() != str(folder)


def test_a_trap_that_springs_is_seen(folder):
    """The watch can fail: a program that imports matplotlib itself opens the file in the folder."""
    pytest.importorskip("matplotlib")
    env, traps = watched(folder), traps_of(folder)
    subprocess.run(
        [sys.executable, "-P", "-c", "import matplotlib"], capture_output=True, cwd=folder, env=env, timeout=120
    )
    assert any(t.endswith("matplotlibrc") for t in sprung(folder, traps))
