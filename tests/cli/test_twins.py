"""Every flag of ``onnxgrad train`` has an argument of the same name and meaning in Python, or a reason for none."""

import inspect
import tomllib

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.cli.app import command
from onnxgrad.keywords import keywords_of
from onnxgrad.training import LoRA, Trainer, VeRA, train
from onnxgrad.training.build.attach import known_arguments
from onnxgrad.training.data import Images
from tests.cli.said import ran
from tests.training.models import blobs, classifier

#: Flags whose argument has another name, and why; ``Class.field`` is an argument of the value that the argument takes.
ELSEWHERE = {
    "input": ("inputs", "a flag is given once for each"),
    "group": ("groups", "a flag is given once for each"),
    "dim": ("dims", "a flag is given once for each"),
    "train": ("trainable", "`train` is the function; --trainable is a name of the flag, too"),
    "lora": ("adapter", "LoRA.rank"),
    "dora": ("adapter", "LoRA.dora"),
    "rslora": ("adapter", "LoRA.rslora"),
    "vera": ("adapter", "VeRA.rank"),
    "lora_alpha": ("adapter", "LoRA.alpha"),
    "lora_targets": ("adapter", "LoRA.targets"),
    "lora_dropout": ("adapter", "LoRA.dropout"),
    "threads": ("options", "Options.threads"),
    "target": ("options", "Options.target"),
    "provider": ("options", "Options.providers"),
    "image_mean": ("images", "Images.mean"),
    "image_std": ("images", "Images.std"),
    "quiet": ("progress", "what is off by default has a flag to put it on, and the other way round"),
}
#: Flags without an argument: what Python has in their place.
INSTEAD = {
    "head": "with_head(model, …), which gives a model",
    "find_lr": "Trainer.find_rate",
    "save_training": "Trainer.save_training_model",
    "save_adapter": "Trainer.save_adapter",
    "force": "a program that writes over a file means it",
    "restart": "without resume=True a run begins anew",
    "config": "a program is its own record",
}
#: Arguments of `fit` and `Trainer` without a flag.
PYTHON_ONLY = {
    "callbacks": "Python functions",
    "shuffle": "rows of files are shuffled",
    "progress": "--quiet",
    "entry": "of a model with several training entries",
    "evaluation": "a Python object",
    "distributed": "launchers of processes say it",
}
#: Defaults that differ.
DEFAULTS = {
    "epochs": "a command trains, a call takes a step at a time",
    "schedule": "the name of what None stands for",
}
VALUES = {"LoRA": LoRA, "VeRA": VeRA, "Options": onnxgrad.Options, "Images": Images}


def flags():
    parameters = command("train").params
    return {p.opts[0].lstrip("-").replace("-", "_"): p for p in parameters if p.opts[0].startswith("-")} | {
        next(o for o in p.opts if o.startswith("--")).lstrip("-").replace("-", "_"): p
        for p in parameters
        if any(o.startswith("--") for o in p.opts)
    }


def named():
    return {name: p for name, p in flags().items() if len(name) > 1 and name not in ("help",)}


def arguments():
    return {*keywords_of(train), *keywords_of(Trainer.fit), *keywords_of(Trainer.__init__), *known_arguments()}


def test_every_flag_has_an_argument():
    known = arguments()
    missing = [n for n in named() if n not in known and n not in ELSEWHERE and n not in INSTEAD]
    assert len(named()) > 60
    assert not missing, "give them an argument of Trainer, fit or attach, or a reason here"
    for name, (argument, where) in ELSEWHERE.items():
        assert name in named()
        assert argument in known
        owner, dot, field = where.partition(".")
        if dot and owner in VALUES:
            assert field in inspect.signature(VALUES[owner]).parameters
    assert INSTEAD.keys() <= named().keys()


def test_every_argument_has_a_flag():
    taken = {argument for argument, _ in ELSEWHERE.values()}
    own = {*keywords_of(Trainer.fit), *keywords_of(Trainer.__init__)} - {"model"}
    missing = own - named().keys() - taken - PYTHON_ONLY.keys()
    assert not missing, "give them a flag, or a reason here"
    assert PYTHON_ONLY.keys() <= own, "reasons for what there is"


def test_defaults_are_the_same():
    defaults = {}
    for function in (Trainer.__init__, Trainer.fit):
        defaults |= {n: p.default for n, p in inspect.signature(function).parameters.items()}
    differing = {
        name: (flag.default, defaults[name])
        for name, flag in named().items()
        if defaults.get(name, inspect.Parameter.empty) is not inspect.Parameter.empty
        and flag.default != defaults[name]
        and not (flag.default in (None, ()) and defaults[name] in (None, ()))
    }
    assert differing.keys() == DEFAULTS.keys(), differing


SETTINGS = {
    "loss": "cross_entropy:label_smoothing=0.1",
    "optimizer": "adamw",
    "lr": 0.02,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "ema": 0.5,
    "freeze": ["b1"],
    "prediction": "y",
    "epochs": 4,
    "batch_size": 20,
    "seed": 3,
    "validation_split": 0.25,
    "sample": "balanced",
    "schedule": "cosine:warmup=2",
    "metrics": "auc,log_loss",
    "monitor": "validation_log_loss",
    "keep_best": True,
    "evaluate_every": 3,
}


def test_they_mean_the_same(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    line = "train PLACE/m.onnx --data PLACE/d.npz -o PLACE/out.onnx --quiet"
    for name, value in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        line += "".join(f" {flag}" if v is True else f" {flag} {v}" for v in values)
    ran(tmp_path, line)
    onnxgrad.train(tmp_path / "m.onnx", tmp_path / "d.npz", output=tmp_path / "twin.onnx", **SETTINGS)
    found, twin = (onnx.load(tmp_path / f"{n}.onnx").graph.initializer for n in ("out", "twin"))
    assert [t.SerializeToString() for t in found] == [t.SerializeToString() for t in twin]
    written = tomllib.loads((tmp_path / "out.checkpoint" / "run.toml").read_text())
    assert {k.replace("-", "_") for k in written} >= SETTINGS.keys()


def test_a_name_that_both_have_is_refused_by_both(tmp_path):
    with pytest.raises(onnxgrad.BadInput, match="did you mean 'evaluate_every'"):
        onnxgrad.train(classifier(), blobs(), loss="mse", evaluate_evry=3)
    onnx.save(classifier(), tmp_path / "m.onnx")
    assert (
        "--evaluate-every" in ran(tmp_path, "train PLACE/m.onnx --data PLACE/d --evaluate-evry 3 -o PLACE/o", 2).output
    )
