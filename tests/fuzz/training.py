"""``python -m tests.fuzz.training [--count 100] [--seed 0] [--only 17]``: random networks, trained for five steps.

A network of random layers (see `layers`) is trained with random settings and otherwise with the defaults of `Trainer`,
so with kernels in C where there is a compiler. Its losses and weights are held to ``target="portable"`` and to the
reference evaluator in float32 and, on the same model, in float64. An error may be some times as large as the worst that
another float32 run makes of the same tensor (`MARGIN`): a network that amplifies rounding does so in all of them. Where
rounding the data makes as large a change, the network is not smooth, and where an optimizer divides a gradient that is
rounding by its size, that step is not judged. If the optimizer is plain, the gradient is held to central differences.

Fifty networks at a time run in a process of their own. Of one that fails, the seed is printed, and the model of the
fewest of its layers that fail is left, with its data and settings.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxgrad.errors import PassWarning
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach, compile_step
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.step.step import Step
from tests.fuzz.iterations import Loop, Scan
from tests.fuzz.layers import grown, headed
from tests.fuzz.networks import STEPS, widened
from tests.fuzz.random_graphs import CORRECTED, Unfit
from tests.rules.test_norm import LRN

LOSSES = ["cross_entropy", "cross_entropy", "mse", "mse", "l1", "huber", "bce_with_logits"]
OPTIMIZERS = [
    *(
        "sgd",
        "sgd",
        "momentum",
        "nesterov",
        "adam",
        "adamw",
        "rmsprop",
        "adagrad",
        "nadam",
        "lamb",
        "adafactor",
        "muon",
    ),
]
#: An error may be so many times that of the other float32 runs.
MARGIN = 10.0
#: Where float32 loses more than this share of a tensor, nothing can be said of the network.
WORST = 2e-3
EPS = float(np.finfo(np.float32).eps)

Arrays = dict[str, np.ndarray]


@dataclass
class Case:
    """A model, its data, and how it is trained."""

    model: onnx.ModelProto
    data: Arrays
    rows: int
    settings: dict[str, Any]
    accumulate: int = 1
    threads: int = 1
    layers: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the model, and beside it the data and the settings."""
        onnx.save(self.model, path)
        np.savez(path.with_suffix(".npz"), **self.data)
        path.with_suffix(".json").write_text(
            json.dumps({"rows": self.rows, "settings": self.settings, "accumulate": self.accumulate})
        )


class Failed(AssertionError):
    """Two ways to train a network do not agree."""


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def step(self, run: Any, loss: float) -> None:
        self.found.append(float(loss))


def case(seed: int, most: int = 6) -> Case:
    """The case of this number, of its first `most` layers. Raises Unfit if no network comes of it."""
    rng = np.random.default_rng(seed)
    net, x = grown(rng, most)
    loss = str(rng.choice(LOSSES))
    if not net.weights:
        raise Unfit("nothing to train")
    model, labels = headed(net, x, loss)
    settings: dict[str, Any] = {"loss": loss, "optimizer": str(rng.choice(OPTIMIZERS))}
    settings["learning_rate"] = float(rng.choice([0.003, 0.01, 0.03]))
    if rng.random() < 0.2:
        settings["clip_norm"] = 0.5
    if rng.random() < 0.2:
        settings["weight_decay"] = 0.01
    normal = {n.op_type for n in net.nodes} & {"BatchNormalization", "If"}
    splits = [k for k in (2, 3) if net.rows >= k] if net.is_dynamic and not normal else []
    accumulate = int(rng.choice(splits)) if splits and rng.random() < 0.2 else 1
    return Case(
        model, {**net.data, "labels": labels}, net.rows, settings, accumulate, int(rng.choice([1, 2])), net.layers
    )


def trained(case: Case, target: str) -> Arrays:
    """The losses and the weights after five steps of a Trainer."""
    options = Options(threads=case.threads, target=target)
    trainer = Trainer(case.model, options=options, accumulate=case.accumulate, **case.settings)
    losses = _Losses()
    data = {n: case.data[n] for n in (v.name for v in case.model.graph.input)} | {"labels": case.data["labels"]}
    trainer.fit(data, batch_size=case.rows, shuffle=False, progress=False, callbacks=[losses])
    return {"losses": np.array(losses.found)} | _of_the_model(trainer.state(), case.model)


def stepped(step: Step, data: Arrays, rows: int, state: Arrays | None = None, count: int = STEPS) -> Arrays:
    """The losses and the state after `count` steps of the reference evaluator."""
    evaluator = ReferenceEvaluator(ir.to_proto(step.model), new_ops=[*CORRECTED, LRN, Loop, Scan])
    kinds = {v.name: v.dtype.numpy() for v in step.model.graph.inputs if v.dtype is not None}
    state = {n: t.initial.numpy() for n, t in step.state.items()} if state is None else state
    fed = {n: t.numpy() for n, t in (*step.rates.items(), *step.reads.items())}
    losses = []
    for at in range(count):
        batch = {n: data[n][at * rows : (at + 1) * rows] for n in step.batch}
        feeds = batch | {t.input: state[n] for n, t in step.state.items()} | fed
        feeds = {n: np.array(a, kinds[n]) for n, a in feeds.items()}
        found = dict(zip(evaluator.output_names, evaluator.run(None, feeds)))
        state = {n: np.asarray(found[t.output]) for n, t in step.state.items()}
        losses.append(float(found[step.loss]))
    return {"losses": np.array(losses)} | state


def judge(case: Case) -> float:
    """Hold the ways to train to each other; the largest error as a share of what is allowed.

    Raises:
        Unfit: float32 says nothing about the network.
        Failed: an error is too large.
    """
    step = compile_step(attach(widened(case.model), **case.settings))
    with np.errstate(all="ignore"):
        exact = stepped(step, case.data, case.rows)
        reference = stepped(compile_step(attach(case.model, **case.settings)), case.data, case.rows)
    exact, reference = _of_the_model(exact, case.model), _of_the_model(reference, case.model)
    if not all(np.isfinite(a).all() for run in (exact, reference) for a in run.values() if a.dtype.kind == "f"):
        raise Unfit("not finite")
    if case.settings["optimizer"] == "sgd" and not {"clip_norm", "weight_decay"} & case.settings.keys():
        _hold_to_differences(step, case)
    runs = {target: trained(case, target) for target in ("auto", "portable")}
    largest = 0.0
    bounds = slack = None
    for name in ("portable", "auto"):
        others = [reference] if name == "portable" else [reference, runs["portable"]]
        errors, allowed = _errors(runs[name], exact), _allowed(others, exact)
        shares = {n: errors[n] / allowed[n] for n in errors}
        if max(shares.values()) > 1:
            bounds = bounds or _changes_by_rounding(step, case, exact)
            slack = slack or _slack(case)
            errors = _errors(runs[name], exact, slack)
            shares = {n: errors[n] / max(allowed[n], MARGIN * bounds[n]) for n in errors}
        worst = max(shares, key=lambda n: shares[n] if shares[n] == shares[n] else np.inf)
        if not shares[worst] <= 1:
            share = errors[worst] / _scale(exact[worst])
            raise Failed(f"{name}: {worst} is off by {share:.2g}, {shares[worst]:.2g} times what is allowed")
        largest = max(largest, shares[worst])
    return largest


def _of_the_model(found: Arrays, model: onnx.ModelProto) -> Arrays:
    """Without the state of the optimizer, of which some is the square of rounding."""
    return {n: found[n] for n in ("losses", *(t.name for t in model.graph.initializer)) if n in found}


def _scale(array: np.ndarray) -> float:
    return float(np.abs(np.asarray(array, np.float64)).max(initial=0)) or 1.0


def _errors(found: Arrays, exact: Arrays, slack: Arrays | None = None) -> dict[str, float]:
    if missing := exact.keys() ^ found.keys():
        raise Failed(f"the weights differ in {', '.join(sorted(missing))}")
    errors = {}
    for name, array in found.items():
        if array.shape != exact[name].shape:
            raise Failed(f"{name} has the shape {array.shape}, not {exact[name].shape}")
        off = np.abs(np.asarray(array, np.float64) - exact[name]) - (slack or {}).get(name, 0.0)
        errors[name] = np.inf if np.isnan(off).any() else max(0.0, float(off.max(initial=0)))
    return errors


def _allowed(others: list[Arrays], exact: Arrays) -> dict[str, float]:
    """The allowed difference of each tensor from float64: a multiple of the other differences, which are rounding."""
    errors = [_errors(o, exact) for o in others]
    shares = [max(e[n] for e in errors) / _scale(exact[n]) for n in exact]
    usual = max(float(np.median(shares)), EPS)
    if not usual < WORST:
        raise Unfit("float32 says nothing of it")
    return {n: MARGIN * max(*(e[n] for e in errors), usual * _scale(exact[n])) for n in exact}


def _changes_by_rounding(step: Step, case: Case, exact: Arrays) -> dict[str, float]:
    """The largest change of each tensor where the data and the weights are rounded otherwise.

    Raises Unfit for a network that is not smooth: some such changes are far larger than others.
    """
    draws, share = 10, 8 * EPS  # as what five steps add up to
    found: dict[str, list[float]] = {n: [] for n in exact}
    for seed in range(draws):
        rng = np.random.default_rng(seed)

        def shaken(a: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
            return a * (1 + share * rng.uniform(-1, 1, a.shape)) if a.dtype.kind == "f" else a

        state = {n: shaken(t.initial.numpy()) for n, t in step.state.items()}
        with np.errstate(all="ignore"):
            run = stepped(step, {n: shaken(a) for n, a in case.data.items()}, case.rows, state)
        for name, error in _errors({n: run[n] for n in exact}, exact).items():
            found[name].append(error)
    if any(max(errors) > 30 * np.median(errors) + share * _scale(exact[n]) for n, errors in found.items()):
        raise Unfit("not smooth")
    return {n: max(errors) / 8 for n, errors in found.items()}


def _slack(case: Case) -> dict[str, Any]:
    """The allowed difference of each number whose gradient is partly rounding.

    That part points anywhere, and an optimizer that divides gradients by their size makes it a whole step.
    """
    settings = {"loss": case.settings["loss"], "optimizer": "sgd", "learning_rate": 1.0}
    step = compile_step(attach(widened(case.model), **settings))
    state = {n: t.initial.numpy() for n, t in step.state.items()}
    with np.errstate(all="ignore"):
        after = stepped(step, case.data, case.rows, state, 1)
        moves = {n: state[n] - after[n] for n, t in step.state.items() if t.kind == "parameter"}
        gradients = {n: np.abs(move) for n, move in moves.items()}
        rounding = 64 * EPS * max(float(g.max(initial=0)) for g in gradients.values())
        shares = {n: np.nan_to_num(np.minimum(1, rounding / g), nan=1) for n, g in gradients.items()}
    if case.settings["optimizer"] in ("sgd", "momentum", "nesterov"):
        return {n: np.where(share == 1, np.inf, 0.0) for n, share in shares.items()}
    if case.settings["optimizer"] == "muon":  # it divides the gradients of a matrix by its singular values
        least = {n: np.linalg.svd(g.reshape(len(g), -1), compute_uv=False)[-1] for n, g in moves.items() if g.ndim > 1}
        shares |= {n: np.full(moves[n].shape, min(1, rounding / max(s, rounding))) for n, s in least.items()}
    return {n: 2 * STEPS * case.settings["learning_rate"] * share for n, share in shares.items()}


def _hold_to_differences(step: Step, case: Case) -> None:
    """The gradient of the first step, against central differences of the loss along a random direction."""
    state = {n: t.initial.numpy() for n, t in step.state.items()}
    trained = [n for n, t in step.state.items() if t.kind == "parameter"]
    rng, h = np.random.default_rng(5), 1e-5
    way = {n: rng.standard_normal(state[n].shape) for n in trained}

    def loss(t: float) -> float:
        moved = state | {n: state[n] + t * way[n] for n in trained}
        return float(stepped(step, case.data, case.rows, moved, 1)["losses"][0])

    with np.errstate(all="ignore"):
        after = stepped(step, case.data, case.rows, state, 1)
        up, mid, down = loss(h), loss(0), loss(-h)
    rate = float(next(iter(step.rates.values())).numpy())
    gradients = {n: (state[n] - after[n]) / rate for n in trained}
    got, want = sum(float((gradients[n] * way[n]).sum()) for n in trained), (up - down) / (2 * h)
    size = 1 + abs(mid) + max(float(np.abs(g).max(initial=0)) for g in gradients.values())
    if abs(up - 2 * mid + down) / h > 1e-4 * size:
        return  # a kink is near
    if not abs(got - want) < 1e-4 * size:
        raise Failed(f"the gradient along a direction is {got}, by differences {want}")


@dataclass
class Outcome:
    """The result of a seed: "judged", "dropped" or "failed", with the number of layers and a message."""

    kind: str
    about: str
    layers: int = 6


def outcome(seed: int, most: int = 6) -> Outcome:
    """The result of the case of `seed`, with its first `most` layers."""
    try:
        made = case(seed, most)
    except Unfit as e:
        return Outcome("dropped", str(e))
    about = f"{' → '.join(made.layers)}; {made.settings}, accumulate={made.accumulate}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", PassWarning)
            return Outcome("judged", f"{judge(made):.3f} of what is allowed: {about}")
    except Unfit as e:
        return Outcome("dropped", str(e))
    except Exception as e:
        return Outcome("failed", f"{type(e).__name__}: {' '.join(str(e).split())[:400]} ({about})", most)


def smallest(seed: int) -> Outcome:
    """The result of the case of `seed`; if it failed, of its smallest failing number of layers."""
    whole = outcome(seed)
    parts = (outcome(seed, most) for most in range(1, 6) if whole.kind == "failed")
    return next((part for part in parts if part.kind == "failed"), whole)


def _work(seed: int, last: int, end: float) -> None:
    """The child: a line of JSON before each case, and one after it."""
    for number in range(seed, min(seed + 50, last)):
        if time.time() > end:
            return
        print(json.dumps({"seed": number}), flush=True)
        print(json.dumps(asdict(smallest(number))), flush=True)


def main() -> int:
    """Judge networks until the time is over; whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--count", type=int, default=1_000_000_000, help="the most cases")
    parser.add_argument("--seed", type=int, help="of the first case; default: by the day")
    parser.add_argument("--only", type=int, help="the case of this seed alone")
    parser.add_argument("--keep", type=Path, help="where models that fail are left")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        made = case(args.only)
        print(onnx.printer.to_text(made.model)[:6000], made.layers, made.settings, made.rows, made.accumulate)
        print(judge(made))
        return 0
    seed = 1000 * datetime.date.today().toordinal() if args.seed is None else args.seed
    if args.child is not None:
        _work(seed, args.count, args.child)
        return 0
    keep = args.keep or Path(tempfile.mkdtemp(prefix="onnxgrad-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    begin, last, counts = time.time(), seed + args.count, Counter[str]()
    print(f"seed {seed}, target {Options().resolve_target().target}", flush=True)
    while seed < last and time.time() < begin + args.seconds:
        command = [sys.executable, "-m", "tests.fuzz.training", "--child", str(begin + args.seconds)]
        command += ["--seed", str(seed), "--count", str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                event = json.loads(line)
                if "seed" in event:
                    seed = event["seed"]
                    continue
                found = Outcome(**event)
                counts[found.kind] += 1
                if found.kind == "failed":
                    case(seed, found.layers).save(keep / f"{seed}.onnx")
                    print(f"{seed}: {found.about}; kept in {keep / f'{seed}.onnx'}", flush=True)
        if child.returncode:
            counts["ended"] += 1
            print(f"{seed}: the process ended with {child.returncode}", flush=True)
        seed += 1
    print(f"{dict(counts)} in {time.time() - begin:.0f} s; next seed {seed}")
    return int(bool(counts["failed"] + counts["ended"]))


if __name__ == "__main__":
    sys.exit(main())
