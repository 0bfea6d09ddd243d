"""Write the files that follow from the recipes: types of keywords for editors, and the reference page of settings.

``python -m tools.settings`` writes them; ``tests/cli/test_twins.py`` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxgrad.settings import RecipeField, settings_of
from onnxgrad.training.build.recipe import ALGORITHM
from onnxgrad.training.data.recipe import LabelledRowsRecipe, PreparationRecipe
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.loop.recipe import FIT, TRAINER, DataRecipe
from onnxgrad.training.optim.optimizers import setting_names
from onnxgrad.training.quantization.place import Scheme

ROOT = Path(__file__).parent.parent
TRAINING = ROOT / "src" / "onnxgrad" / "training"
_FIRST = '''"""Types of keywords, for editors; written from the recipes by ``python -m tools.settings``."""

from __future__ import annotations

'''
_BUILD = """from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from onnxgrad.training.adapters.config import Adapter
from onnxgrad.training.optim.config import Group, Optimizer
"""
_DATA = """from collections.abc import Mapping
from typing import Any, TypedDict

from onnxgrad.training.data import Images
"""
_LANGUAGE = """from collections.abc import Sequence
from typing import TypedDict
"""
_LOOP = """from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.distributed import Collective
from onnxgrad.runtime import Options
from onnxgrad.training.build.keywords import AlgorithmKeywords
from onnxgrad.training.data import Augment
from onnxgrad.training.data.keywords import PreparationKeywords
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.loop_recipe import File
from onnxgrad.training.optim.schedules import RateSchedule
from onnxgrad.training.parallel.ranks import Ranks
"""
RUN = (*FIT, Scheme, GenerationRecipe)
_STEP_PAGE = """# Settings of a model and its step

Every setting has one name: `learning_rate` is `onnxgrad.train(…, learning_rate=1e-3)` in Python, `--learning-rate
1e-3` for `onnxgrad train`, and `learning_rate = 1e-3` in the file of `--config`. `attach`, `Trainer`, `quantize` and
`export-step` have some of them. Settings of single optimizers, such as `betas`, are arguments in Python, and follow the
name of the optimizer in the command: `--optimizer adamw:betas=0.9,0.95`. Data, epochs, checkpoints and records have
[settings of their own](settings-run.md).

This page is made of the recipes in the code by `python -m tools.settings`.
"""
_RUN_PAGE = """# Settings of data and of a run

Every setting has one name: `batch_size` is `onnxgrad.train(…, batch_size=32)` in Python, `--batch-size 32` for
`onnxgrad train`, and `batch_size = 32` in the file of `--config`. `Trainer.fit` has most of them. `quantize` and
`generate` have the last two tables. The model, the loss, the optimizer and the step have
[settings of their own](settings.md).

This page is made of the recipes in the code by `python -m tools.settings`.
"""


def _typed(name: str, base: str, types: Mapping[str, str], of: str) -> str:
    """The text of a TypedDict."""
    body = "\n".join(f"    {key}: {kind}" for key, kind in types.items())
    return f'\n\nclass {name}({base}, total=False):\n    """Keywords of {of}."""\n' + (f"\n{body}\n" if body else "")


def _types(*recipes: type) -> dict[str, str]:
    return {s.name: s.annotation for s in settings_of(*recipes).values()}


def files() -> dict[Path, str]:
    """The text of each file that follows from the recipes."""
    algorithm = _types(*ALGORITHM)
    single = dict.fromkeys((n for n in setting_names() if n not in algorithm and n != "history"), "Any")
    own = {"output": "str | None", "history": "Any"}
    build = _FIRST + _BUILD + _typed("AlgorithmKeywords", "TypedDict", algorithm | single, "all that `attach` reads")
    build += _typed("AttachKeywords", "AlgorithmKeywords", own, "`attach`")
    step = _types(*(r for r in TRAINER if r not in ALGORITHM))
    loop = _FIRST + _LOOP + _typed("StepKeywords", "AlgorithmKeywords", step, "a step")
    own |= {"metrics": "Sequence[str]", "schedule": "Any"}
    loop += _typed("TrainerKeywords", "StepKeywords", own, "`Trainer`")
    preparation = _types(PreparationRecipe)
    data = _FIRST + _DATA + _typed("PreparationKeywords", "TypedDict", preparation, "the preparation of data")
    data += _typed("MeasuringKeywords", "PreparationKeywords", _types(TaskRecipe), "`predict`")
    data += _typed("EvaluationKeywords", "MeasuringKeywords", _types(LabelledRowsRecipe), "`evaluate`")
    language = _FIRST + _LANGUAGE + _typed("GenerationKeywords", "TypedDict", _types(GenerationRecipe), "`generate`")
    rows = {name: kind for name, kind in _types(DataRecipe).items() if name not in preparation}
    run = {name: kind for name, kind in _types(*FIT).items() if name not in {**preparation, **rows}}
    loop += _typed("DataKeywords", "PreparationKeywords", rows, "the data that a model is trained on")
    loop += _typed("FitKeywords", "DataKeywords", run, "`Trainer.fit`")
    loop += _typed("TrainKeywords", "StepKeywords, FitKeywords", {}, "`train`")
    return {
        TRAINING / "build" / "keywords.py": build,
        TRAINING / "data" / "keywords.py": data,
        TRAINING / "language" / "keywords.py": language,
        TRAINING / "loop" / "keywords.py": loop,
        ROOT / "docs" / "settings.md": _STEP_PAGE + _index(TRAINER) + _tables(TRAINER),
        ROOT / "docs" / "settings-run.md": _RUN_PAGE + _index(RUN) + _tables(RUN),
    }


def _title(recipe: type) -> str:
    return (recipe.__doc__ or "").strip().splitlines()[0].removesuffix(".")


def _index(recipes: Sequence[type]) -> str:
    """A line for each recipe: a link to its table, and the names in it."""
    lines = []
    for recipe in recipes:
        anchor = re.sub(r"[^a-z0-9 -]", "", _title(recipe).lower()).replace(" ", "-")
        lines.append(f"- [{_title(recipe)}](#{anchor}): {', '.join(f'`{name}`' for name in settings_of(recipe))}\n")
    return "\n" + "".join(lines)


def _tables(recipes: Sequence[type]) -> str:
    text = ""
    for recipe in recipes:
        text += f"\n## {_title(recipe)}\n\n| setting | flags | default | meaning |\n|---|---|---|---|\n"
        for s in settings_of(recipe).values():
            text += f"| `{s.name}` | {_flags(s)} | {_default(s)} | {_cell(s)} |\n"
    return text


def _flags(s: RecipeField) -> str:
    if s.instead:
        return "Python"
    return ", ".join(f"`{f}`" for f in (f"--{s.name.replace('_', '-')}", *([s.off] if s.off else []), *s.short))


def _default(s: RecipeField) -> str:
    own = "" if s.default in (None, ()) else f"`{s.default}`"
    command = "" if s.command in (s.default, None) else f"command: `{s.command}`"
    return ", ".join(filter(None, (own, command)))


def _cell(s: RecipeField) -> str:
    """The meaning of a setting, as a cell of a table in Markdown."""
    text = s.help + (f" In Python: {s.python[0].lower()}{s.python[1:]}" if s.python else "")
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_") if "`" not in text else text


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))
