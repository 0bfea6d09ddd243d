"""Flags, keywords and pages are made of the recipes, and mean the same."""

import ast
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from tools.settings import files

import onnxgrad
from onnxgrad.cli.app import command
from onnxgrad.keywords import keywords_of
from onnxgrad.settings import settings_of
from onnxgrad.training import LoRA, Trainer, evaluate, predict, train
from onnxgrad.training.data import Images
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from tests.cli.said import ran
from tests.training.models import blobs, classifier

#: Flags that are no settings of a run: what Python has in their place.
INSTEAD = {
    "model": "the first argument",
    "data": "the second argument",
    "output": "an argument of `train` alone",
    "head": "with_head(model, …), which gives a model",
    "find_lr": "Trainer.find_rate",
    "save_training": "Trainer.save_training_model",
    "save_adapter": "Trainer.save_adapter",
    "switchable": "Trainer.save_adapter",
    "also": "onnxgrad.quantize",
    "force": "a program that writes over a file means it",
    "restart": "without resume=True a run begins anew",
    "config": "a program is its own record",
    "quiet": "progress=False",
}
#: Defaults that differ.
DEFAULTS = {"epochs", "target"}


def test_every_setting_is_a_flag_and_a_keyword():
    settings = settings_of(*TRAINER, *FIT)
    flags = {p.name: p for p in command("train").params if p.name != "help"}
    assert flags.keys() - INSTEAD.keys() == {n for n, s in settings.items() if not s.instead}
    assert settings.keys() | {"recipe", "output"} == {*keywords_of(train)} - {"model", "data", "y"}
    assert len(settings) > 70
    for name, about in settings.items():
        assert about.help.endswith((".", "…")), name
        assert about.instead or about.default == flags[name].default or name in DEFAULTS or about.many
        assert about.instead or f"--{name.replace('_', '-')}" in flags[name].opts


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_the_files_that_follow_from_the_recipes_are_up_to_date(path):
    assert path.read_text(encoding="utf-8") == files()[path], "run python -m tools.settings"


def test_no_function_has_many_parameters():
    for path in Path(onnxgrad.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                assert count <= 12, f"{node.name} in {path.name} has {count} parameters"


@pytest.mark.parametrize("function", [evaluate, predict, Trainer.evaluate, Trainer.predict, Trainer.find_rate])
def test_data_are_prepared_by_the_same_settings_everywhere(function):
    assert settings_of(PreparationRecipe).keys() <= {*keywords_of(function)}
    of_model = function in (evaluate, predict)
    first = (classifier(),) if of_model else (Trainer(classifier(), loss="cross_entropy"),)
    with pytest.raises(onnxgrad.BadInput, match="exclude each other"):
        function(*first, blobs(), images=Images(), image_mean=0.5)
    with pytest.raises(onnxgrad.BadInput, match="did you mean 'tokenizer'"):
        function(*first, blobs(), tokeniser="t.json")


def test_settings_of_several_values_are_keywords_too(tmp_path):
    lora = train(classifier(), blobs(), loss="cross_entropy", lora=2, lora_targets="all", lora_dropout=0.0, threads=1)
    twin = LoRA(2, targets="all")
    same = train(classifier(), blobs(), loss="cross_entropy", adapter=twin, options=onnxgrad.Options(threads=1))
    for name, array in lora.state().items():
        np.testing.assert_array_equal(array, same.state()[name])
    for settings, words in (
        ({"lora": 2, "vera": 2}, "give one of them"),
        ({"adapter": twin, "lora_alpha": 2.0}, "lora_alpha says more about adapters"),
        ({"options": onnxgrad.Options(), "threads": 2}, "write Options"),
        ({"images": Images(), "image_mean": 0.5}, "exclude each other"),
        ({"image_std": 0}, "image_std is a number"),
        ({"recipe": Recipe()}, "recipe has all settings"),
    ):
        with pytest.raises(onnxgrad.BadInput, match=words):
            train(classifier(), blobs(), loss="cross_entropy", **settings)


def test_a_recipe_is_all_keywords_as_one_value():
    asked = {"loss": "cross_entropy", "optimizer": "adamw", "betas": (0.8, 0.9), "epochs": 2, "seed": 3}
    recipe = Recipe.of("train", asked, (*TRAINER, *FIT))
    found, twin = train(classifier(), blobs(), recipe=recipe), train(classifier(), blobs(), **asked)
    for name, array in found.state().items():
        np.testing.assert_array_equal(array, twin.state()[name])


SETTINGS = {
    "loss": "cross_entropy:label_smoothing=0.1",
    "optimizer": "adamw",
    "learning_rate": 0.02,
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
