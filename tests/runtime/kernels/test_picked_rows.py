"""Updates of tables of which rows were picked: no gradient of the size of the table, and the bits of the operators."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.test_forged import array, called, refused
from tests.runtime.kernels.test_optimizer_kernels import PLAIN, compiled, train
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels

pytestmark = needs_kernels


def tables(rows, width, picks=("x",), tied=False, kind=np.int64):
    """y = Σ sin(table[x]·v): one lookup for each of `picks`."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((rows, width)).astype(np.float32), "table"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
    ]
    v = numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), "numbers")
    nodes = [helper.make_node("Constant", [], ["v"], value=v)]
    for k, index in enumerate(picks):
        nodes += [
            helper.make_node("Gather", ["table", index], [f"e{k}"]),
            helper.make_node("Mul", [f"e{k}", "v"], [f"m{k}"]),
            helper.make_node("Sin", [f"m{k}"], [f"s{k}"]),
            helper.make_node("ReduceSum", [f"s{k}", "axis"], [f"r{k}"]),
        ]
    if tied:
        nodes[1:1] = [helper.make_node("MatMul", ["table", "v"], ["t"]), helper.make_node("ReduceSum", ["t"], ["u"])]
        nodes.append(helper.make_node("Sum", ["u", *(f"r{k}" for k in range(len(picks)))], ["y"]))
    else:
        nodes.append(helper.make_node("Sum", [f"r{k}" for k in range(len(picks))], ["y"]))
    inputs = [
        helper.make_tensor_value_info(i, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), ["N"])
        for i in dict.fromkeys(picks)
    ]
    ends = [helper.make_tensor_value_info("y", 1, ["N", 1])]
    graph = helper.make_graph(nodes, "tables", inputs, ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def feeds(rows, counts, kind=np.int64, names=("x",)):
    rng = np.random.default_rng(3)
    batches = []
    for count in counts:
        picked = {name: rng.integers(-rows, rows, count).astype(kind) for name in names}
        batches.append(picked | {"labels": rng.standard_normal((count, 1)).astype(np.float32)})
    return batches


SIZES = [(1, 1, [1, 3]), (5, 3, [4, 7]), (7, 64, [3, 20]), (300, 20, [50, 1]), (2100, 33, [700, 5]), (40, 700, [9])]


def same(step, batches, kernels, threads=(1, 2)):
    """Like `same` of optimizers; elementwise operators, which have bits of their own, stay."""
    found = [n.op_type for n in with_kernels(step.model).graph if n.domain == DOMAIN]
    assert sorted(found) == sorted(kernels)
    losses, state = train(step, batches, Options(threads=1, target="portable"))
    for count in threads:
        native = train(step, batches, Options(threads=count, target="native", without=("elementwise",)))
        np.testing.assert_array_equal(native[0], losses)
        for name, expected in state.items():
            np.testing.assert_array_equal(native[1][name], expected, err_msg=name)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "momentum"])
def test_the_same_bits(optimizer, sizes):
    rows, width, counts = sizes
    arguments = {"momentum": 0.9} if optimizer == "momentum" else {}
    step = compiled(tables(rows, width), optimizer, arguments)
    kernel = {"sgd": "Sgd", "adagrad": "Adagrad", "adam": "Adam", "momentum": "Momentum"}[optimizer]
    same(step, feeds(rows, counts), [kernel], threads=(1, 2, 3))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kernel", PLAIN)
def test_all_optimizers(kernel):
    step = compiled(tables(60, 90), *PLAIN[kernel])
    same(step, feeds(60, [9, 30, 2]), [kernel])


@pytest.mark.parametrize(
    "arguments", [{"weight_decay": 0.1}, {"clip_value": 0.01}, {"groups": ["table:rate=0.1,decay=0.01"]}]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_decay_moves_all_rows(optimizer, arguments):
    step = compiled(tables(60, 90), optimizer, arguments)
    found = [n.op_type for n in with_kernels(step.model).graph if n.domain == DOMAIN]
    same(step, feeds(60, [9, 30, 2]), found)


OTHERS = {  # the lookups that are gathered, and the tensors that train: also the vector, where a product reads it
    "the norm of all gradients": (tables(60, 9), {"clip_norm": 0.01}, 1, 1),
    "two lookups": (tables(60, 9, ("x", "x")), {}, 2, 1),
    "a product as well": (tables(60, 9, tied=True), {}, 1, 2),
    "an index of 32 bits": (tables(60, 9, kind=np.int32), {}, 0, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_where_the_gradient_is_needed_as_a_whole(name):
    model, arguments, gradients, trained = OTHERS[name]
    step = compiled(model, "adam", arguments)
    found = [n.op_type for n in with_kernels(step.model).graph if n.domain == DOMAIN]
    assert found.count("Adam") == trained
    assert found.count("GatherGrad") == gradients
    same(step, feeds(60, [9, 30], np.int32 if "32" in name else np.int64), found)


def test_rows_that_were_not_picked_are_not_read():
    """NaN in one of them stays, and moves nothing else; with momentum all rows move."""
    step = compiled(tables(5000, 64), "sgd", {})
    runner = StepRunner(step, options=Options(threads=2, target="native"))
    state = {k: v.copy() for k, v in runner.state().items()}
    before = {k: v.copy() for k, v in state.items()}
    runner.step({"x": np.array([3, 4999, 3]), "labels": np.ones((3, 1), np.float32)})
    after = runner.state()
    moved = np.flatnonzero((after["table"] != before["table"]).any(1))
    assert moved.tolist() == [3, 4999]


@pytest.mark.parametrize("rate", [np.inf, np.nan])
def test_a_rate_that_is_no_number_spoils_all_rows(rate):
    step = compiled(tables(3000, 8), "sgd", {})
    runners = [StepRunner(step, options=Options(threads=1, target=t)) for t in ("portable", "native")]
    for runner in runners:
        runner.held["learning_rate"][...] = rate
        runner.step({"x": np.array([3, 5]), "labels": np.ones((2, 1), np.float32)})
    want, found = (r.state()["table"] for r in runners)
    np.testing.assert_array_equal(found, want)
    assert np.isnan(found[[0, 1, 2, 4, 6, 2999]]).all()


def test_a_row_out_of_range():
    adam = [array(6, 2), array(3, 2), array(6, 2), array(6, 2), array(), None, None, None, array(7)]
    called("Adam", [*adam, array(3, kind="l")], {})
    for index in (array(3, kind="l", fill=6), array(3, kind="l", fill=-7), array(3, kind="l", fill=-(1 << 63))):
        refused("Adam", [*adam, index], match="out of range")
    refused("Adam", [*adam, array(4, kind="l")], match="size")
    refused("Adam", [*adam, array(0, kind="l")], match="size")
    empty = [*adam[:1], array(0, 2), *adam[2:], array(0, kind="l")]
    assert called("Adam", empty, {})[0].shape == (6, 2)
