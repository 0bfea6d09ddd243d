"""``onnxgrad …``, or a script, in a process that costs no start: forked from one that has imported onnxgrad.

It has its own folder, environment, streams, signals and exit code; only what Python reads when it starts
(``PYTHON*`` in `env`) needs a start, and gets one. A start takes longer than most of what the command is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 120

#: Forks for each line that it reads, says the number of the process and then how that ended.
_SERVER = """
import gc, importlib, json, os, runpy, sys, traceback, warnings
import onnxgrad.cli.app, onnxgrad.errors, safetensors.numpy
warnings.simplefilter("error", onnxgrad.errors.PassWarning)  # as in the tests themselves
for name in onnxgrad.cli.app.COMMANDS:
    onnxgrad.cli.app.command(name)
for name in ("onnx.reference.ops._op_list", "pydantic.type_adapter", "typer._adapters", "numpy.random",
             "scipy.optimize", "scipy.special", "matplotlib.pyplot", "PIL.Image"):  # of many commands and pages
    try:
        importlib.import_module(name)
    except ImportError:
        pass
gc.collect()
gc.freeze()  # a fork shares what is not collected, and has less to look through
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
job = json.loads(line)
for number, name, how in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
    file = os.open(name, how)
    os.dup2(file, number)
    os.close(file)
if job["cwd"]:
    os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["env"])
sys.argv = job["args"]
code = 1
try:
    if sys.argv[0] == "onnxgrad":
        onnxgrad.cli.main()
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    code = 0
except SystemExit as end:
    code = end.code or 0
except BaseException:
    traceback.print_exc()
sys.stdout.flush(), sys.stderr.flush()
os._exit(code)  # a thread that ONNX Runtime waits for at an ordinary end was not forked
"""


class _Server:
    """One process of the kind, which lives as long as this one."""

    running: _Server | None = None

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, **job: object) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        child = int(self.process.stdout.readline())
        late = threading.Timer(_SECONDS, os.kill, (child, signal.SIGKILL))
        late.start()
        try:
            return int(self.process.stdout.readline())
        finally:
            late.cancel()


def command(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``onnxgrad ARGS`` in the folder `cwd` (this one), in the environment `env` (this one's)."""
    return _forked(["-m", "onnxgrad"], ["onnxgrad", *map(str, args)], cwd, env)


def script(path: Path, *args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python PATH ARGS`` in the folder `cwd` (this one)."""
    return _forked([str(path)], [str(path), *map(str, args)], cwd, None)


def _forked(
    start: list[str], line: list[str], cwd: Path | None, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    """`line` as the arguments of a forked process; `start` and the rest of them, where one has to be started."""
    wanted = dict(os.environ if env is None else env)
    ours = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    if not sys.platform.startswith("linux") or ours != {k: v for k, v in wanted.items() if k.startswith("PYTHON")}:
        full = [sys.executable, *start, *line[1:]]
        return subprocess.run(full, capture_output=True, text=True, cwd=cwd, env=wanted, timeout=_SECONDS)
    if _Server.running is None:
        _Server.running = _Server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        out.touch(), err.touch()
        here = str(cwd or os.getcwd())
        code = _Server.running.run(args=line, cwd=here, env=wanted, out=str(out), err=str(err))
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())
