"""Time one training step of the same exported models in this project and its peers, interleaved in one run.

``python -m benchmarks.training [--workload NAME …] [--peer NAME …] [--rounds 15] [--threads 2] [--page] [--check]``
``python -m benchmarks.training --kinds FILE [--workload NAME …]``
``python -m benchmarks.training --further --minutes 12 --page``

Each competitor is a process of its own, in an environment of its own where it needs one (made on demand); they
take turns (A B C A B C …), so that a slow minute of the machine hits all, after a pause in which the threads
of the one before stop spinning. Results are kept as JSON, a folder for each kind of processor and in it one file per
workload. `--minutes` divides a time among the workloads: each takes as many turns as fit, but four at least.
`--further` measures the kinds that came later. `--page` writes the page and its plots from what is kept, also without
measuring anything (`--rounds 0`).
`--check` measures, keeps nothing, and exits with 1 where a ratio to PyTorch is worse than the one that was kept.
`--kinds` measures models of your own, and keeps nothing unless `--results` names a folder: a Python file with
`WORKLOADS`, a sequence of `benchmarks.training.workloads.Workload`. The page's other kinds may be examples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.training.environments import PINS, Missing, environment
from benchmarks.training.report import FURTHER, ratio, write

RESULTS = Path(__file__).parent.parent / "results"
WORKLOADS = (
    "mlp", "cnn", "residual", "transformer", "lstm", "depthwise",
    "vit", "unet", "convnext", "conv_gru", "dlrm", "bert", "efficientnet",
    "diffusion", "wavenet", "graph_net", "mamba", "swin",
    "llama", "resnet26", "pointnet", "cnn3d", "mixer", "conformer", "experts", "generator", "graph_attention",
    "resnet50",
)  # fmt: skip
#: who takes part where a model is only differentiated
DIFFERENTIATE = (
    "torch", "torch best", "torch best, MKL AVX-512", "torch.compile", "onnxgrad", "onnxgrad, portable",
)  # fmt: skip
#: A ratio to PyTorch counts as worse from this factor on: a quiet machine repeats one within a tenth.
WORSE = 1.15
FEWEST = 4  #: turns, however long they take
FIRST = 8  #: steps whose losses are compared; they are the warm-up as well


@dataclass(frozen=True)
class Peer:
    """A competitor: a module of `competitors` and its variant, in an environment."""

    module: str
    variant: str
    environment: str


PEERS = {
    "torch": Peer("pytorch", "eager", "own"),
    "torch best": Peer("pytorch", "best", "own"),
    "torch best, MKL AVX-512": Peer("pytorch", "best", "own-avx512"),
    "torch.compile": Peer("pytorch", "compiled", "own-compiler"),
    "jax": Peer("jax_jit", "", "jax"),
    "ort-training": Peer("ort_training", "", "ort-training"),
    "onnx-ad": Peer("graphs", "onnx-ad", "onnx-ad"),
    "onnxsim": Peer("graphs", "onnxsim", "onnxsim"),
    "onnxgrad": Peer("ours", "", "own"),
    "onnxgrad, portable": Peer("ours", "portable", "own"),
}


class Worker:
    """A competitor's process. Raises Missing, with the reason, where it cannot run the workload."""

    def __init__(self, peer: Peer, workload: str, folder: Path, threads: int) -> None:
        there = environment(peer.environment)
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)} | there.variables
        args = [peer.module, peer.variant, workload, str(folder), str(threads)]
        self.process = subprocess.Popen(
            [there.python, "-W", "ignore", "-m", "benchmarks.training.worker", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables,
        )  # fmt: skip

    def ask(self, what: str, count: int, limit: float = 120.0) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{what} {count}\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has said why before it died
        if not select.select([self.process.stdout], [], [], limit)[0]:
            self.process.kill()
            raise Missing(f"no answer within {limit:.0f} s")
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"unable": f"the process died ({self.process.wait()})"}
        if "unable" in answer:
            raise Missing(answer["unable"])
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()


def measure(
    workload: str, names: list[str], rounds: int, steps: int, threads: int, seconds: float = math.inf
) -> dict[str, Any]:
    """Interleaved times of one workload: for each peer its numbers, or why it has none.

    No turn begins after so many `seconds`, once there are `FEWEST`; first steps take a third of them, or 45, at most.
    """
    results: dict[str, Any] = {}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.training.workloads", workload, scratch],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        workers: dict[str, Worker] = {}
        first: dict[str, dict[str, Any]] = {}
        times: dict[str, dict[str, list[float]]] = {}
        for name in names:
            try:
                worker = Worker(PEERS[name], workload, folder, threads)
                try:
                    first[name] = worker.ask("step", FIRST, min(120.0, max(45.0, seconds / 3)))
                except Missing:
                    worker.close()
                    raise
                workers[name] = worker
                times[name] = {"step": [], "forward": []}
            except Missing as why:
                results[name] = {"unable": str(why)}
        peak = {n: a["peak_mb"] for n, a in first.items()}
        for what in ("step", "forward"):
            for turn in range(-1 if what == "forward" else 0, rounds if what == "step" else -(-rounds // 3)):
                if turn >= (FEWEST if what == "step" else 1) and time.monotonic() > end:
                    break
                for name, worker in list(workers.items()):
                    time.sleep(0.03)
                    try:
                        answer = worker.ask(what, steps)
                    except Missing as why:
                        results[name] = {"unable": str(why)}
                        del workers[name]
                        continue
                    if answer["times"] and turn >= 0:
                        times[name][what].append(median(answer["times"]))
                    if what == "step":
                        peak[name] = answer["peak_mb"]
        for worker in workers.values():
            worker.close()
    for name in workers:
        begun = first[name]
        results[name] = {
            "step_s": times[name]["step"],
            "forward_s": times[name]["forward"],
            "peak_mb": peak[name],
            "start_up_s": begun["start_up"] + begun["times"][0],
            "parts_s": {**begun["parts"], "first step": begun["times"][0]},
            "losses": begun["losses"],
            "notes": begun["notes"],
        }
    return {name: results[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only these")
    parser.add_argument("--kinds", type=Path, help="a Python file whose WORKLOADS are measured instead")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only these, and torch")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each competitor; 0 measures nothing")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    parser.add_argument("--further", action="store_true", help="only the kinds that came later")
    parser.add_argument("--minutes", type=float, default=math.inf, help="about how long all of it takes at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the folders of JSON files")
    parser.add_argument("--check", action="store_true", help="compare with what is kept, and keep nothing")
    parser.add_argument("--no-scale", action="store_true", help="leave out sizes, compile times and large models")
    parser.add_argument("--page", nargs="?", type=Path, const=Path("docs/benchmarks.md"), help="write the page")
    args = parser.parse_args()
    known = WORKLOADS
    if args.kinds:
        os.environ["ONNXGRAD_BENCHMARK_KINDS"] = str(args.kinds.absolute())
        from benchmarks.training.workloads import more

        known = tuple(w.name for w in more())
    if unknown := set(args.workload or ()) - set(known):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    keeps = not args.check and (not args.kinds or args.results != RESULTS)
    kept = args.results / re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
    if keeps:
        kept.mkdir(parents=True, exist_ok=True)
    worse = []
    names = [n for n in PEERS if args.peer is None or n in args.peer or n == "torch"]
    asked = args.workload or (FURTHER if args.further else known)
    end = time.monotonic() + 60 * args.minutes
    for place, workload in enumerate(asked):
        if not args.rounds:
            continue
        file = kept / f"{workload}.json"
        taking_part = [n for n in names if workload != "resnet50" or n in DIFFERENTIATE]
        seconds = max(end - time.monotonic(), 0.0) / (len(asked) - place)
        found = measure(workload, taking_part, args.rounds, args.steps, args.threads, seconds)
        setting = {
            "threads": args.threads,
            "rounds": args.rounds,
            "processor": processor(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {p: version(p) for p in ("torch", "onnxruntime", "numpy")} | {k: v[0] for k, v in PINS.items()},
        }
        show(workload, found)
        if args.check:
            worse += regressions(workload, json.loads(file.read_text())["peers"] if file.exists() else {}, found)
        if not keeps:
            continue
        file.write_text(json.dumps({"setting": setting, "peers": found}, indent=1) + "\n")
    if args.rounds and not args.no_scale and keeps and not args.kinds and args.workload is None and not args.further:
        subprocess.run([sys.executable, "-m", "benchmarks.training.scale", str(kept / "scale.json")], check=True)
    if args.page:
        write(args.results, args.page)
    if worse:
        print("\n".join(worse))
        sys.exit(1)


def regressions(workload: str, kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The measurements that are slower or larger than stored ones, as ratios to PyTorch; a line for each."""
    lines = []
    for name, key in ((n, k) for n in found if n.startswith("onnxgrad") for k in ("step_s", "peak_mb")):
        if any(key not in peers.get(n, {}) for peers in (kept, found) for n in (name, "torch")):
            continue
        before, now = (ratio(peers, name, key) for peers in (kept, found))
        if now > WORSE * before:
            lines.append(f"{workload}: {key} of {name} is {now:.2f} × PyTorch, it was {before:.2f}")
    return lines


def show(workload: str, found: dict[str, Any]) -> None:
    """One line per competitor, for whoever waits."""
    for name, r in found.items():
        if "unable" in r:
            print(f"{workload:12} {name:26} – {r['unable'][:120]}", flush=True)
            continue
        over = ratio(found, name, "step_s")
        line = f"{1e3 * np.median(r['step_s']):9.2f} ms  × {over:.2f}  {r['peak_mb']:6.0f} MB  {r['start_up_s']:5.1f} s"
        print(f"{workload:12} {name:26} {line}", flush=True)


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(": ")[2] if names else "a processor that does not tell its name"
    return re.sub(r"\(R\)|\(TM\)| Processor$", "", name)


if __name__ == "__main__":
    main()
