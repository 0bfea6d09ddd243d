"""Labels have the numbers of the model's own class names, however few of the classes the data have."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model
from onnxgrad.training import Trainer, evaluate
from onnxgrad.training.data import open_data
from onnxgrad.training.graph.class_labels import class_labels, class_names
from onnxgrad.training.loop.train import balance_loss
from tests.training.loop.test_trainer import ONE

#: Not in the order of the alphabet, which data alone would number them in.
NAMES = ("pear", "apple", "fig")
TEXTS = ", ".join(f'"{n}"' for n in NAMES)
ML = '"ai.onnx.ml": 3'

#: How converters write the names of classes behind the scores `y`.
ENDINGS = {
    "extractor": ("k = ArgMax <axis = 1, keepdims = 0> (y)  l = ai.onnx.ml.ArrayFeatureExtractor (names, k)"
                  "label = Reshape (l, all)", "string[3] names = {%s}, int64[1] all = {-1}"),
    "gather": ("k = ArgMax <axis = 1, keepdims = 0> (y)  label = Gather (names, k)", "string[3] names = {%s}"),
    "encoder": ("k = ArgMax <axis = 1, keepdims = 0> (y)  label = ai.onnx.ml.LabelEncoder "
                "<keys_int64s = [2, 0, 1], values_strings = [LAST, FIRST, SECOND]> (k)", ""),
}  # fmt: skip


def model(ending="gather", labels=NAMES, kind="string"):
    """Scores that are three times the three features, and a label in the caller's words."""
    nodes, tensors = ENDINGS[ending]
    texts = ", ".join(f'"{n}"' if kind == "string" else str(n) for n in labels)
    nodes = nodes.replace("LAST", f'"{labels[2]}"').replace("FIRST", f'"{labels[0]}"')
    nodes = nodes.replace("SECOND", f'"{labels[1]}"')
    tensors = (tensors % texts).replace("string", kind) if "%s" in tensors else tensors
    held = ", ".join(filter(None, [tensors, "float[3, 3] w = {3, 0, 0, 0, 3, 0, 0, 0, 3}"]))
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, {ML}]> fruit (float[N, 3] x) => ({kind}[N] label, float[N, 3] y) '
        f"<{held}> {{ y = MatMul (x, w)  {nodes} }}"
    )


def rows(of=(0, 1, 2), names=NAMES, count=12):
    kinds = np.resize(of, count)
    return {"x": np.eye(3, dtype=np.float32)[kinds], "labels": np.array(names)[kinds]}


def classifier(**attributes):
    node = onnx.helper.make_node(
        "LinearClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml",
        coefficients=np.eye(3).ravel() * 3.0, intercepts=[0.0] * 3, multi_class=1, **attributes,
    )  # fmt: skip
    kind = onnx.TensorProto.STRING if "classlabels_strings" in attributes else onnx.TensorProto.INT64
    graph = onnx.helper.make_graph(
        [node], "linear", [onnx.helper.make_tensor_value_info("x", 1, ["N", 3])],
        [onnx.helper.make_tensor_value_info("label", kind, ["N"]),
         onnx.helper.make_tensor_value_info("y", 1, ["N", 3])],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def named(proto):
    proto.metadata_props.add(key="onnxgrad.classes", value=json.dumps(NAMES))
    return proto


def without_names():
    proto = model()
    del proto.graph.node[1:]
    del proto.graph.output[0]
    del proto.graph.initializer[0]
    return proto


MODELS = {
    **{ending: model(ending) for ending in ENDINGS},
    "classifier": classifier(classlabels_strings=NAMES),
    "metadata": named(without_names()),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("proto", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("of", [(0, 1, 2), (0, 2), (1,)])
def test_data_that_lack_a_class_are_measured_by_the_models_names(proto, of):
    found = evaluate(proto, rows(of))
    assert found.metrics["accuracy"] == 1
    assert set(found.classes) == {NAMES[k] for k in of}
    trainer = Trainer(proto, loss="cross_entropy", learning_rate=0.1, options=ONE)
    assert trainer.evaluate(rows(of))["accuracy"] == 1


@pytest.mark.parametrize("ending", [*ENDINGS, "classifier"])
def test_a_trained_model_keeps_its_own_labels_right(ending, tmp_path):
    trainer = Trainer(MODELS[ending], loss="cross_entropy", learning_rate=0.1, options=ONE)
    trainer.fit(rows((0, 2)), epochs=20)
    trainer.save(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    found = session.run(["label"], {"x": rows()["x"]})[0]
    assert found.tolist() == rows()["labels"].tolist()
    said = session.get_modelmeta().custom_metadata_map["onnxgrad.classes"]
    assert tuple(json.loads(said)) == NAMES


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("proto", [model(labels=(7, 3, 5), kind="int64"), classifier(classlabels_ints=[7, 3, 5])])
def test_whole_numbers_of_the_model_are_class_names_too(proto, lazily):
    data = rows(names=(7, 3, 5))
    if lazily:
        data = [{name: array[i] for name, array in data.items()} for i in range(12)]
    assert evaluate(proto, data).metrics["accuracy"] == 1
    trainer = Trainer(proto, loss="cross_entropy", learning_rate=0.1, options=ONE)
    assert trainer.evaluate(data)["accuracy"] == 1
    trainer.fit(data, epochs=2)
    other = rows(names=(7, 3, 4))
    for refused in (lambda: trainer.fit(other), lambda: evaluate(proto, other)):
        with pytest.raises(BadInput, match=r"has the label 4 in row 2, which is none of .* '7', '3', '5'"):
            refused()


@pytest.mark.parametrize("of", [(0, 1, 2), (0, 2)])
def test_rows_that_are_read_one_by_one(of):
    data = rows(of)
    listed = [{name: array[i] for name, array in data.items()} for i in range(12)]
    assert evaluate(model(), listed).metrics["accuracy"] == 1
    trainer = Trainer(model(), loss="cross_entropy", learning_rate=0.1, options=ONE)
    trainer.fit(listed, epochs=2)
    assert trainer.evaluate(listed)["accuracy"] == 1
    listed[7]["labels"] = "kiwi"
    with pytest.raises(BadInput, match="has the class 'kiwi' in row 7, which is none of"):
        trainer.evaluate(listed)


def test_explain_takes_names_of_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=rows()["x"])
    for proto, name, number in ((model(), "fig", 2), (model(labels=(7, 3, 5), kind="int64"), "3", 1)):
        onnx.save(proto, "m.onnx")
        args = ["explain", "m.onnx", "d.npz", "-o", "e.npz", "--class"]
        found = CliRunner().invoke(build(), [*args, name])
        assert found.exit_code == 0, found.output
        assert f"of y[:, {number}] class {name})" in found.output
        found = CliRunner().invoke(build(), [*args, "kiwi"])
        assert found.exit_code == 2
        assert "--class kiwi is none of the classes of the model: " in found.output


def test_unknown_names_are_refused():
    with pytest.raises(BadInput, match=r"has the class 'kiwi' in row 2, which is none of .* 'pear', 'apple', 'fig'"):
        evaluate(model(), rows(names=("pear", "apple", "kiwi")))
    with pytest.raises(BadInput, match="has the class 'kiwi'"):
        Trainer(model(), loss="cross_entropy", options=ONE).fit(rows(names=("pear", "apple", "kiwi")))


@pytest.mark.parametrize("of", [(0, 2), (0, 1, 2, 3)])
def test_a_number_of_classes_that_does_not_fit_is_refused(of):
    data = {**rows(np.array(of) % 3), "labels": np.array([*NAMES, "kiwi"])[np.resize(of, 12)]}
    words = rf"has {len(of)} classes: .*'pear'.*; the model has 3 scores for each row\n  hint: --head {len(of)}"
    with pytest.raises(BadInput, match=words):
        evaluate(without_names(), data)
    with pytest.raises(BadInput, match=words):
        Trainer(without_names(), loss="cross_entropy", options=ONE).fit(data)
    wrong = without_names()
    wrong.metadata_props.add(key="onnxgrad.classes", value='["a", "b"]')
    with pytest.raises(BadInput, match="the model names 2 classes: 'a', 'b'; but it has 3 scores"):
        evaluate(wrong, {**rows(), "labels": np.array(["a", "b"] * 6)})


def test_weights_of_classes_are_those_of_the_models_names():
    data = {**rows(), "labels": np.array(["fig"] * 6 + ["pear"] * 3 + ["apple"] * 3)}
    (term,) = balance_loss("cross_entropy:weight=balanced", ir.from_proto(model()), open_data(data))
    assert term.options["weight"] == [pytest.approx(12 / 9, abs=1e-5)] * 2 + [pytest.approx(12 / 18, abs=1e-5)]


def test_the_labels_of_several_classifiers_belong_to_their_scores():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> two (float[N, 2] x) => (string[N] a, string[N] b, float[N, 2] y, '
        "float[N, 2] z) <string[2] first = {\"no\", \"yes\"}, string[2] second = {\"up\", \"down\"}> "
        "{ y = Neg (x)  k = ArgMax <axis = 1, keepdims = 0> (y)  a = Gather (first, k)"
        "  z = Exp (x)  p = Softmax (z)  j = ArgMax <axis = 1, keepdims = 0> (p)  b = Gather (second, j) }"
    )  # fmt: skip
    graph = ir.from_proto(proto).graph
    assert class_labels(graph, ["y"]) == ("no", "yes")
    assert class_labels(graph, ["z"]) == ("up", "down")
    assert class_labels(graph) is None


def test_the_labels_that_a_model_shows_count_not_those_of_its_parts():
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, {ML}]> voting (float[N, 3] x) => (string[N] label, float[N, 3] y) '
        "<string[3] names = {%s}, int64[1] first = {0}, int64[1] second = {1}> {"
        % TEXTS
        + " ".join(
            f'l{k}, p{k} = ai.onnx.ml.LinearClassifier <classlabels_ints = [0, 1], post_transform = "LOGISTIC", '
            f"coefficients = [{', '.join(str(-3.0 * (i == k)) for i in range(3))}, "
            f"{', '.join(str(3.0 * (i == k)) for i in range(3))}], intercepts = [0.0, 0.0]> (x)"
            f"  of{k} = Slice (p{k}, second, two, second)"
            for k in range(3)
        )
        + " y = Concat <axis = 1> (of0, of1, of2)  k = ArgMax <axis = 1, keepdims = 0> (y)  label = Gather (names, k) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "two"))
    assert class_names(ir.from_proto(proto)) == NAMES
    assert evaluate(proto, rows((0, 2))).metrics["accuracy"] == 1


def test_a_table_behind_the_label_of_a_classifier():
    proto = classifier(classlabels_ints=[0, 1, 2])
    proto.graph.node[0].output[0] = "number"
    proto.graph.node.append(onnx.helper.make_node(
        "LabelEncoder", ["number"], ["label"], domain="ai.onnx.ml", keys_int64s=[0, 1, 2], values_strings=NAMES
    ))  # fmt: skip
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.STRING
    assert class_names(ir.from_proto(proto)) == NAMES
    assert evaluate(proto, rows((0, 2))).metrics["accuracy"] == 1


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("02", "10", "01"), [2, 1]),  # a table reads 02 as 2
        (("1", "2", "unknown"), [1, 2]),
        (("2.0", "0.0", "1.0"), [2.0, 1.0]),
        (("True", "False", "maybe"), [True, False]),
        (("747", "a320", "gull"), [747, 2]),  # 2 is no name, and no name is 2
    ],
)
def test_numbers_that_are_names_written_otherwise(names, labels, lazily):
    places = [names.index("gull" if v == 2 and "gull" in names else next(n for n in names if _reads(n, v)))
              for v in labels]  # fmt: skip
    data = {"x": np.eye(3, dtype=np.float32)[np.resize(places, 12)], "labels": np.resize(labels, 12)}
    if lazily:
        data = [{name: array[i] for name, array in data.items()} for i in range(12)]
    assert evaluate(model(labels=names), data).metrics["accuracy"] == 1
    trainer = Trainer(model(labels=names), loss="cross_entropy", learning_rate=0.1, options=ONE)
    assert trainer.evaluate(data)["accuracy"] == 1


def _reads(name, value):
    """True if `value` is what a table makes of the text `name`."""
    if isinstance(value, bool):
        return name == str(value)
    return name.replace(".", "").isdecimal() and float(name) == value


def test_a_number_that_is_no_name_is_refused_where_numbers_are_names():
    data = {"x": np.eye(3, dtype=np.float32), "labels": np.array([1, 2, 0])}
    with pytest.raises(BadInput, match="has the label 0 in row 2, which is none of those of the model: '1', '2', 'un"):
        evaluate(model(labels=("1", "2", "unknown")), data)


def test_scores_that_say_the_opposite_of_the_models_labels():
    proto = classifier(classlabels_strings=NAMES)
    proto.graph.node[0].output[1] = "turned"
    proto.graph.node.append(onnx.helper.make_node("Neg", ["turned"], ["y"]))
    with pytest.warns(UserWarning, match="own labels 'label' are not those of the largest scores 'y' in 12 of 12 rows"):
        evaluate(proto, rows())


def test_the_keys_of_a_map_name_the_classes(tmp_path):
    proto = without_names()
    proto.graph.node.append(
        onnx.helper.make_node("ZipMap", ["y"], ["m"], domain="ai.onnx.ml", classlabels_strings=NAMES)
    )
    kind = onnx.helper.make_sequence_type_proto(
        onnx.helper.make_map_type_proto(onnx.TensorProto.STRING, onnx.helper.make_tensor_type_proto(1, None))
    )
    proto.graph.output[0].CopyFrom(onnx.helper.make_value_info("m", kind))
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="the ZipMap that made"):
        opened = load_model(tmp_path / "m.onnx")
    assert class_names(opened) == NAMES
    assert evaluate(opened, rows((0, 2))).metrics["accuracy"] == 1


@pytest.mark.parametrize("kinds", [("no", "yes"), ("yes",)])
def test_one_score_for_two_names(kinds):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> two (float[N, 1] x) => (float[N, 1] y) <float[1, 1] w = {3}> '
        "{ y = MatMul (x, w) }"
    )
    proto.metadata_props.add(key="onnxgrad.classes", value='["no", "yes"]')
    labels = np.resize(kinds, 8)
    data = {"x": np.where(labels == "yes", 1, -1).astype(np.float32)[:, None], "labels": labels}
    trainer = Trainer(proto, loss="bce_with_logits", learning_rate=0.1, options=ONE)
    assert trainer.evaluate(data)["accuracy"] == 1
    assert evaluate(proto, data, metrics="accuracy").metrics["accuracy"] == 1


def test_the_command(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    onnx.save(model("encoder"), "m.onnx")
    for name, kinds in (("some", (0, 2)), ("bad", (0, 1, 2))):
        data = rows(kinds, names=NAMES if name == "some" else ("pear", "apple", "kiwi"))
        lines = [",".join([*map(str, x), kind]) for x, kind in zip(data["x"], data["labels"])]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,c,labels", *lines]) + "\n")
    args = ["--input", "x=a..c"]
    found = CliRunner().invoke(build(), ["evaluate", "m.onnx", "--data", "some.csv", *args, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["metrics"]["accuracy"] == 1
    for command in (["evaluate"], ["train", "-o", "out.onnx", "--loss", "cross_entropy", "--optimizer", "adam"]):
        found = CliRunner().invoke(build(), [command[0], "m.onnx", "--data", "bad.csv", *args, *command[1:]])
        assert found.exit_code == 2
        assert "has the class 'kiwi' in row 2, which is none of" in " ".join(found.output.split())
