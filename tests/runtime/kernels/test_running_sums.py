"""Sums over the steps of a Scan that lie in one buffer: the same bits, and only where nothing else is read."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import passed, with_running_sums

SIZE = 256
#: A step, of a state `s` and rows `a`, `b` [n, 256], to the next state; what the Scan gives is `total`.
STEP = "t = Transpose (a)\nm = MatMul (t, b)\nn = Add (s, m)"
#: The step, what is made of the total, where the sum starts, and how many sums are found.
CASES = {
    "a product": (STEP, "y = Identity (total)", "zeros", 1),
    "added from the left": (STEP.replace("s, m", "m, s"), "y = Exp (total)", "zeros", 1),
    "read twice": (STEP, "e = Exp (total)\ny = Add (e, total)", "zeros", 1),
    "from something": (STEP, "y = Identity (total)", "ones", 0),
    "the state is read": (
        STEP + "\nq = ReduceSum <keepdims = 0> (s)\nk = Add (k0, q)",
        "y = Add (total, q)",
        "zeros",
        0,
    ),
    "a row": (STEP.replace("MatMul (t, b)", "ReduceSum (b, axis)"), "y = Identity (total)", "zeros", 0),
    "doubled": (STEP.replace("s, m", "s, s"), "y = Identity (total)", "zeros", 0),
    "subtracted": (STEP.replace("Add", "Sub"), "y = Identity (total)", "zeros", 0),
}


def model(step, after, start, size=SIZE, kind="float"):
    counted = "k = Add (k0, q)" in step
    step = step if counted else f"{step}\nk = Identity (k0)"
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({kind}[steps, n, {size}] x, {kind}[steps, n, {size}] z)
        => ({kind}[{size}, {size}] y, {kind} q) {{
        start = Expand ({"nil" if start == "zeros" else "one"}, sizes)
        total, q = Scan <num_scan_inputs = 2, body = rows ({kind}[{size}, {size}] s, {kind} k0, {kind}[n, {size}] a,
            {kind}[n, {size}] b) => ({kind}[{size}, {size}] n, {kind} k) {{ {step} }}> (start, nil, x, z)
        {after} }}"""
    found = onnx.parser.parse_model(text)
    dtype = np.float32 if kind == "float" else np.float64
    arrays = {"nil": dtype(0), "one": dtype(1), "sizes": np.array([size, size]), "axis": np.array([0])}
    found.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items() if n in text)
    return found


def calls(proto):
    changed = with_running_sums(onnx_shapes(proto))
    return sum(n.op_type == "RunningSum" for graph in changed.graphs() for n in graph if n.domain == DOMAIN)


def onnx_shapes(proto):
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def feeds(steps, size=SIZE, dtype=np.float32, rows=3):
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal((steps, rows, size)).astype(dtype) for n in "xz"}


def twins(proto, threads=1):
    options = [Options(threads=threads, target="native", without=without) for without in ((), ("running_sums",))]
    return [Session(onnx_shapes(proto), o) for o in options]


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_with_a_state(case, threads):
    *text, count = CASES[case]
    proto = model(*text)
    assert calls(proto) == count
    one, four = twins(proto, threads)
    for steps in (5, 1, 2, 5):  # each run starts from zeros
        for name, array in four.run(feeds(steps)).items():
            np.testing.assert_array_equal(one.run(feeds(steps))[name], array, err_msg=name)


@needs_kernels
def test_products_of_many_rows_are_added_where_the_sum_is():
    """The product of a step has no matrix of its own; its rows are divided, and their sums added to the buffer."""
    given = feeds(3, rows=3000)
    expected = np.einsum("tri,trj->ij", *(given[n].astype(float) for n in "xz"))
    proto = model(*CASES["a product"][:3])
    changed = passed(("running_sums", "products"), onnx_shapes(proto))
    assert "RunningSumProduct" in {n.op_type for graph in changed.graphs() for n in graph}
    for threads in (1, 2):
        one, other = twins(proto, threads)
        found = one.run(given)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-3)
        np.testing.assert_allclose(found, other.run(given)["y"], rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(("size", "kind"), [(SIZE, "double"), (255, "float")])
def test_of_another_type_or_small_it_stays(size, kind):
    assert not calls(model(*CASES["a product"][:3], size=size, kind=kind))


@needs_kernels
def test_a_sum_in_the_steps_of_another_scan():
    """Each step of the outer one has a buffer that starts from zeros; sums of sums are one in each of both."""
    inner = model(*CASES["a product"][:3]).graph
    inner.name, inner.output[1].name = "inner", "unread"
    scan = next(n for n in inner.node if n.op_type == "Scan")
    scan.output[1] = "unread"
    inner.node.append(helper.make_node("Add", ["sum", "y"], ["next"]))
    square = helper.make_tensor_type_proto(1, [SIZE, SIZE])
    state, end = helper.make_value_info("sum", square), helper.make_value_info("next", square)
    ends = [inner.input[0], inner.input[1]]
    del inner.input[:], inner.output[:]
    inner.input.extend([state, *ends])
    inner.output.append(end)
    outer = [helper.make_node("Expand", ["nil_", "sizes_"], ["begin"]),
             helper.make_node("Scan", ["begin", "xs", "zs"], ["all"], num_scan_inputs=2, body=inner)]  # fmt: skip
    inputs = [helper.make_tensor_value_info(n, 1, ["many", "steps", "n", SIZE]) for n in ("xs", "zs")]
    held = [numpy_helper.from_array(np.float32(0), "nil_"), numpy_helper.from_array(np.array([SIZE, SIZE]), "sizes_")]
    graph = helper.make_graph(outer, "outer", inputs, [helper.make_value_info("all", square)], held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert calls(proto) == 2
    given = {f"{n}s": np.stack([a, -2 * a, a]) for n, a in feeds(4).items()}
    expected = np.einsum("otri,otrj->ij", given["xs"], given["zs"])
    one, four = (s.run(given)["all"] for s in twins(proto))
    np.testing.assert_array_equal(one, four)
    np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-3)
