"""Cross-entropy of scores that are computed by blocks of rows, against the same with all scores at once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad import Trainer
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner, measured_peak
from onnxgrad.training import Loss
from onnxgrad.training.build.attach import attach
from onnxgrad.training.loss.score_blocks import MANY
from onnxgrad.training.step.compile import compile_step
from tests.runtime.kernels.twins import needs_kernels

WORDS, WIDTH = 23, 4
node = helper.make_node
RNG = np.random.default_rng(0)
OF_CLASSES = list(RNG.random(WORDS))

#: What makes the scores of h, [.., WIDTH], and of further weights.
HEADS = {
    "plain": [node("MatMul", ["h", "W"], ["y"])],
    "tied": [node("Transpose", ["E"], ["Et"], perm=[1, 0]), node("MatMul", ["h", "Et"], ["y"])],
    "bias": [node("MatMul", ["h", "W"], ["z"]), node("Add", ["c", "z"], ["y"])],
    "gemm": [node("Gemm", ["h", "E", "c"], ["y"], transB=1, alpha=0.5)],
    "capped": [
        node("MatMul", ["h", "W"], ["z"]), node("Add", ["z", "c"], ["biased"]), node("Div", ["biased", "cap"], ["a"]),
        node("Tanh", ["a"], ["b"]), node("Mul", ["cap", "b"], ["y"]),
    ],
    "turned": [node("MatMul", ["h", "W"], ["z"]), node("Transpose", ["z"], ["y"], perm=[0, 2, 1])],
}  # fmt: skip


def language_model(head="plain", words=WORDS, width=WIDTH, rank=2, dtype=np.float64):
    """ids [rows, (time)] → scores y."""
    rng = np.random.default_rng(1)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    dims = ["rows", "time"][:rank]
    weights = {"E": (words, width), "W": (width, words), "c": (words,), "U": (width, width)}
    arrays = {n: rng.standard_normal(s).astype(dtype) for n, s in weights.items()} | {"cap": np.array(0.7, dtype)}
    nodes = [node("Gather", ["E", "ids"], ["e"]), node("MatMul", ["e", "U"], ["u"]), node("Tanh", ["u"], ["h"])]
    nodes += HEADS[head]
    used = {i for n in nodes for i in n.input}
    classes = [*dims, words] if head != "turned" else [dims[0], words, dims[1]]
    graph = helper.make_graph(
        nodes, "words", [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, dims)],
        [helper.make_tensor_value_info("y", kind, classes)],
        [numpy_helper.from_array(a, n) for n, a in arrays.items() if n in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def scans(step):
    return [n for n in step.model.graph if n.op_type == "Scan"]


def stepped(model, block_rows, feeds, target="portable", **options):
    """The step, what one step gives, and by how much it moves each weight."""
    loss = Loss("cross_entropy", **{"axis": -1, **options}, block_rows=block_rows)
    metrics = (
        ["accuracy", "top5"] if model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value > 5 else ["accuracy"]
    )
    step = compile_step(attach(model, loss=loss, optimizer="sgd", learning_rate=1.0, metrics=metrics), outputs=metrics)
    runner = StepRunner(step, options=Options(threads=1, target=target))
    before = runner.state()
    results = {n: np.array(a) for n, a in runner.step(feeds).items()}
    return step, results | {n: before[n] - a for n, a in runner.state().items()}


def data(rank=2, rows=5, ignored=None):
    rng = np.random.default_rng(2)
    shape = (rows, 4)[:rank]
    feeds = {n: rng.integers(0, WORDS, shape) for n in ("ids", "labels")}
    if ignored is not None:
        feeds["labels"].flat[:2] = ignored
    return feeds


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({}, 1),
        ({}, 3),
        ({}, 100),
        ({"reduction": "sum"}, 3),
        ({"ignore_index": -100}, 3),
        ({"weight": OF_CLASSES, "ignore_index": 3}, 3),
        ({"label_smoothing": 0.1, "reduction": "sum"}, 3),
        ({"label_smoothing": 0.1, "weight": OF_CLASSES, "ignore_index": -100}, 3),
    ],
    ids=lambda o: str(o) if isinstance(o, int) else "-".join(o) or "mean",
)
def test_the_loss_and_its_gradient_are_those_of_all_scores_at_once(options, block):
    feeds = data(ignored=options.get("ignore_index"))
    model = language_model("bias")
    whole, expected = stepped(model, 0, feeds, **options)
    step, found = stepped(model, block, feeds, **options)
    assert not scans(whole)
    assert len(scans(step)) == 1  # the way back gives the loss as well
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-14, err_msg=name)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("head", [h for h in HEADS if h != "turned"])
def test_scores_are_found_in_many_forms(head, rank):
    model, feeds = language_model(head, rank=rank), data(rank)
    if head == "gemm" and rank == 2:  # has no rows of this rank
        return
    _, expected = stepped(model, 0, feeds)
    step, found = stepped(model, 2, feeds)
    assert scans(step)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-14, err_msg=name)


def test_classes_that_a_transpose_made_second():
    model, feeds = language_model("turned"), data()
    _, expected = stepped(model, 0, feeds, axis=1)
    step, found = stepped(model, 3, feeds, axis=1)
    assert scans(step)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-14, err_msg=name)


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"ignore_index": -100}], ids=["mean", "ignored"])
def test_kernels_take_the_place_of_the_loss_of_a_block(options):
    model, feeds = language_model("bias", dtype=np.float32), data(ignored=options.get("ignore_index"))
    _, expected = stepped(model, 0, feeds, **options)
    _, found = stepped(model, 3, feeds, target="native", **options)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_optimizer_that_takes_the_loss_as_a_function():
    model, feeds = language_model(rank=1), data(rank=1, rows=7)
    states = []
    for block in (0, 3):
        loss = Loss("cross_entropy", block_rows=block)
        runner = StepRunner(compile_step(attach(model, loss=loss, optimizer="lbfgs")), options=Options(threads=1))
        for _ in range(2):
            runner.step(feeds)
        states.append(runner.state())
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-6, atol=1e-9, err_msg=name)


def test_parts_of_a_batch_add_up():
    model, feeds = language_model(), data(rows=6, ignored=-100)
    losses = []
    for block, parts in ((0, 1), (2, 3)):
        loss = Loss("cross_entropy", axis=-1, ignore_index=-100, block_rows=block)
        trainer = Trainer(model, loss=loss, optimizer="sgd", learning_rate=1.0, accumulate=parts)
        losses.append(trainer.machine.step(feeds)[trainer.step.loss])
        losses.append(trainer.state()["W"])
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-12)
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-11)


def test_many_classes_are_taken_by_blocks_and_few_are_not():
    few, many = (
        compile_step(attach(language_model(words=n, width=2), loss="cross_entropy:axis=-1")) for n in (MANY - 1, MANY)
    )
    assert not scans(few)
    assert len(scans(many)) == 1
    assert not any(v.name == "y" for n in many.model.graph for v in n.outputs)  # nobody has asked for all scores


def test_scores_that_are_asked_for_are_still_to_be_had():
    model, feeds = language_model(), data()
    loss = Loss("cross_entropy", axis=-1, block_rows=3)
    step = compile_step(attach(model, loss=loss), outputs=["y"])
    assert StepRunner(step).step(feeds)["y"].shape == (5, 4, WORDS)


def test_what_a_step_takes_at_its_fullest_is_that_of_a_block():
    words, rows = 4000, 256
    model = language_model(words=words, width=2, rank=1, dtype=np.float32)
    feeds = {n: np.random.default_rng(0).integers(0, words, rows) for n in ("ids", "labels")}
    peaks = []
    for block in (0, 8):
        loss = Loss("cross_entropy", block_rows=block)
        peaks.append(measured_peak(compile_step(attach(model, loss=loss, optimizer="sgd")), feeds))
    assert peaks[1] * 8 < peaks[0]
    assert peaks[0] > rows * words * 4


@pytest.mark.parametrize("weight", [None, [1, 2, 5]])
def test_an_evaluation_of_nothing_but_scores(weight):
    """Where blocks of the loss compute the only layer, nothing of the inference graph runs."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {0,1,2,3,4,5}>'
    )
    model, rows = onnx.parser.parse_model(text + "{ y = MatMul (x, w) }"), np.arange(9)
    feeds = {"x": np.stack([rows, -rows], 1).astype(np.float32) / 9, "labels": rows % 3}
    scores = feeds["x"].astype(float) @ np.arange(6).reshape(2, 3)
    each = np.log(np.exp(scores).sum(1)) - scores[rows, rows % 3]
    trainer = Trainer(model, loss=Loss("cross_entropy", block_rows=4, weight=weight))
    wanted = np.average(each, weights=None if weight is None else np.array(weight)[rows % 3])
    assert np.isclose(trainer.evaluate(feeds, batch_size=4)["loss"], wanted, rtol=1e-6)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("head", "rank"), [("plain", 1), ("tied", 2)])
@pytest.mark.parametrize("options", [{}, {"ignore_index": -100}], ids=["all", "ignored"])
def test_an_evaluation_gives_the_same_loss_and_scores(options, head, rank, tmp_path):
    model, feeds = language_model(head, rank=rank), data(rank, rows=9, ignored=options.get("ignore_index"))
    found = []
    for block in (0, 4):
        loss = Loss("cross_entropy", axis=-1, block_rows=block, **options)
        trainer = Trainer(model, loss=loss, optimizer="sgd", learning_rate=1.0)
        first = trainer.evaluate(feeds, batch_size=4)
        for _ in range(3):
            trainer.machine.step(feeds)
        trainer.save(tmp_path / "m.onnx")
        of_file = trainer.evaluation.file(tmp_path / "m.onnx", trainer.data(feeds), 4)
        found.append([first, trainer.evaluate(feeds, batch_size=4), of_file])
    assert found[1][0].keys() == {"loss", "accuracy", "top5"} | ({"perplexity"} if rank == 2 else set())
    assert found[0][0]["loss"] != pytest.approx(found[0][1]["loss"], rel=1e-3)
    for expected, values in zip(*found):
        for name, value in values.items():
            assert expected[name] == pytest.approx(value, rel=1e-9), name


def test_an_optimizer_that_needs_all_predictions_has_no_blocks():
    many = attach(language_model(words=MANY, width=2, rank=1), loss="cross_entropy", optimizer="lm")
    assert not any(n.op_type == "Scan" for n in many.training_info[0].algorithm.node)
    with pytest.raises(BadInput, match="as a whole"):
        attach(language_model(rank=1), loss="cross_entropy:block_rows=2", optimizer="lm")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("cross_entropy:axis=-1,block_rows=-1", "a number of rows"),
        ("cross_entropy:axis=-1,block_rows=1.5", "a number of rows"),
        ("cross_entropy:axis=1,block_rows=8", "not known to be a product"),
    ],
)
def test_blocks_that_cannot_be_had_are_refused(loss, said):
    with pytest.raises(BadInput, match=said):
        attach(language_model(), loss=loss)


@pytest.mark.parametrize("options", [{}, {"ignore_index": -100}], ids=["mean", "ignored"])
def test_sums_of_float16_are_taken_in_float32(options):
    """More labels than float16 has numbers: 0 of the loss was left."""
    feeds = {n: np.random.default_rng(0).integers(0, 3, 70_000) for n in ("ids", "labels")}
    step, found = stepped(language_model(words=3, width=2, rank=1, dtype=np.float16), 8192, feeds, **options)
    _, expected = stepped(language_model(words=3, width=2, rank=1, dtype=np.float32), 8192, feeds, **options)
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.01)
    np.testing.assert_allclose(found["W_master"], expected["W"], rtol=0.05, atol=1e-3)
    sums = [n for n in step.model.graph if n.op_type == "ReduceSum" and n.outputs[0].dtype is not None]
    assert all(n.outputs[0].dtype != ir.DataType.FLOAT16 for n in sums if n.outputs[0].shape == ())
