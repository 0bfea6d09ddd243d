"""Training entries lowered in their place, and GraphCall of ONNX 1.7 rewritten."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.training import ReferenceTraining, attach, compile_step, lower_gradients, validate
from onnxgrad.training.metadata import FED
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import initial, mlp, run, train
from tests.training.step.test_entries import entry

RNG = np.random.default_rng(3)
BATCHES = [
    {"x": RNG.standard_normal((5, 4)).astype(np.float32), "labels": RNG.standard_normal((5, 3)).astype(np.float32)}
    for _ in range(4)
]


def operators(graph: onnx.GraphProto) -> set[tuple[str, str]]:
    found = {(n.domain, n.op_type) for n in graph.node}
    return found.union(*(operators(a.g) for n in graph.node for a in n.attribute if a.HasField("g")))


def same_training(one: onnx.ModelProto, other: onnx.ModelProto, batches=BATCHES) -> None:
    """The steps that both compile to do the same."""
    a, b = compile_step(one), compile_step(other)
    assert list(a.state) == list(b.state)
    assert a.batch == b.batch
    assert list(a.rates) == list(b.rates)
    (state, history), (state_b, history_b) = train(a, batches), train(b, batches)
    for name in state:
        np.testing.assert_allclose(state[name], state_b[name], rtol=1e-6, atol=1e-7)
    for h, k in zip(history, history_b):
        np.testing.assert_allclose(h[a.loss], k[b.loss], rtol=1e-6)


def norm_net() -> onnx.ModelProto:
    """Convolution, BatchNormalization, Dropout, and LayerNormalization, whose derivative asks for more outputs."""
    rng = np.random.default_rng(0)
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 2, 4, 4] x) => (float[N, 3] y) {
            c = Conv <kernel_shape = [3, 3]> (x, k)
            n = BatchNormalization (c, s, b, m, v)
            r = Relu (n)
            f = Flatten (r)
            d = Dropout (f, ratio)
            l = LayerNormalization (d, ls)
            y = MatMul (l, w)
        }""")
    weights = {
        "k": rng.standard_normal((3, 2, 3, 3)),
        "s": np.ones(3),
        "b": np.zeros(3),
        "m": np.zeros(3),
        "v": np.ones(3),
        "ratio": np.array(0.0),
        "ls": np.ones(12),
        "w": rng.standard_normal((12, 3)),
    }
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items())
    return model


@pytest.mark.sweep(2)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad"])
def test_what_attach_writes(optimizer):
    model = attach(mlp(), loss="mse", optimizer=optimizer, weight_decay=0.01)
    lowered = lower_gradients(model)
    info, before = lowered.training_info[0], model.training_info[0]
    assert operators(before.algorithm) & {(DOMAIN, "Gradient")}
    assert {domain for domain, _ in operators(info.algorithm)} == {""}
    assert info.update_binding == before.update_binding
    assert info.algorithm.output == before.algorithm.output
    assert info.algorithm.input == before.algorithm.input
    assert [n.output for n in lowered.graph.node] == [n.output for n in model.graph.node]
    assert {t.name for t in lowered.graph.initializer} == {t.name for t in model.graph.initializer}
    onnx.checker.check_model(lowered, full_check=True)
    same_training(model, lowered)


def test_where_the_derivative_asks_more_of_the_network():
    model = attach(norm_net(), loss="mse", optimizer="adam")
    batch = {"x": RNG.standard_normal((5, 2, 4, 4)).astype(np.float32), "labels": BATCHES[0]["labels"]}
    lowered = lower_gradients(model)
    onnx.checker.check_model(lowered, full_check=True)
    assert {domain for domain, _ in operators(lowered.training_info[0].algorithm)} == {""}
    np.testing.assert_allclose(
        run(lowered, {"x": batch["x"]})["y"], run(model, {"x": batch["x"]})["y"], rtol=1e-5, atol=1e-6
    )
    same_training(model, lowered, [batch] * 3)


def test_several_entries():
    model = mlp()
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.training_info.append(entry((8, 3), "w2", 0.1, prefix="p_"))
    model.training_info.append(entry((4, 8), "w1", 0.2, prefix="q_"))
    lowered = lower_gradients(model)
    assert len(lowered.training_info) == 2
    assert {d for i in lowered.training_info for d, _ in operators(i.algorithm)} == {""}
    same_training(model, lowered)
    same_training(model, lower_gradients(lowered))


def test_local_function_in_an_algorithm():
    """The algorithm calls a function of the model that holds a Gradient."""
    model = mlp()
    model.opset_import.extend([helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("local", 1)])
    function = parser.parse_function("""<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        shrink (w) => (g) {
            s = Mul (w, w)
            g = ai.onnx.preview.training.Gradient <xs = ["w"], y = "s"> (w)
        }""")
    model.functions.append(function)
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [
                helper.make_node("shrink", ["w2"], ["two_w"], domain="local"),
                helper.make_node("Mul", ["two_w", "quarter"], ["half_w"]),
                helper.make_node("ReduceSum", ["half_w"], ["total"], keepdims=0),
            ],
            "algorithm",
            [],
            [helper.make_tensor_value_info(n, 1, None) for n in ("half_w", "total")],
            [numpy_helper.from_array(np.array(0.25, np.float32), "quarter")],
        )
    )
    info.update_binding.add(key="w2", value="half_w")
    info.initialization.CopyFrom(
        parser.parse_graph("""initialization () => (float[8, 3] start) {
            c = Constant <value_float = 1.5> ()
            size = Constant <value = int64[2] {8, 3}> ()
            one = Expand (c, size)
            start = local.shrink (one)
        }""")
    )
    info.initialization_binding.add(key="w2", value="start")
    np.testing.assert_array_equal(initial(compile_step(model))["w2"], np.full((8, 3), 3))
    w = initial(compile_step(model))["w2"]
    state, _ = train(compile_step(model), [{}] * 2)
    np.testing.assert_allclose(state["w2"], w / 4, rtol=1e-6)
    lowered = lower_gradients(model)
    assert {d for d, _ in operators(lowered.training_info[0].algorithm)} == {""}
    assert not lowered.functions
    state, _ = train(compile_step(lowered), [{}] * 2)
    np.testing.assert_allclose(state["w2"], w / 4, rtol=1e-6)


def test_data_of_an_algorithm_outside_the_file(tmp_path):
    """onnx.load leaves the initializers of an algorithm in their file: they are read all the same."""
    model = attach(mlp(), loss="mse", optimizer="adam")
    for tensor in model.training_info[0].algorithm.initializer:
        if tensor.name == "w2_mean":
            tensor.CopyFrom(numpy_helper.from_array(np.full((8, 3), 0.25, np.float32), "w2_mean"))
            (tmp_path / "state.bin").write_bytes(b"\0" * 16 + tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "state.bin"), ("offset", "16"), ("length", "96")):
                tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    step = compile_step(tmp_path / "m.onnx")
    np.testing.assert_array_equal(step.state["w2_mean"].initial.numpy(), np.full((8, 3), 0.25))
    assert {d for d, _ in operators(lower_gradients(tmp_path / "m.onnx").training_info[0].algorithm)} == {""}
    (tmp_path / "state.bin").write_bytes(b"\0" * 20)
    with pytest.raises(BadInput, match="'w2_mean'"):
        compile_step(tmp_path / "m.onnx")


def test_gradient_that_is_a_value_of_the_inference_graph():
    """y = h·w: dy/dw is h itself. The inference graph keeps its h, also as an output."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net (float[2] x) => (float[2] y, float[2] h)
        <float[2] w = {2, 3}> {
            h = Exp (x)
            y = Mul (h, w)
        }""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        parser.parse_graph("""algorithm () => (float[2] d, float[2] w_new) {
            d = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x)
            w_new = Identity (d)
        }""")
    )
    info.update_binding.add(key="w", value="d")
    lowered = lower_gradients(model)
    assert lowered.graph == lower_gradients(lowered).graph
    assert [list(n.output) for n in lowered.graph.node] == [["h"], ["y"]]
    x = np.float32([0.5, 1])
    for proto in (model, lowered):
        state, _ = train(compile_step(proto), [{"x": x}])
        np.testing.assert_allclose(state["w"], np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(run(lowered, {"x": x})["h"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize("opset", [9, 12, 18])
def test_opset_of_the_time(opset):
    """Graph, algorithm and initialization are raised together; before 11, Clip had its bounds as attributes."""
    model = parser.parse_model(f"""<ir_version: 7, opset_import: ["": {opset}, "ai.onnx.preview.training": 1]>
        net (float[N, 2] x) => (float[N, 3] y)
        <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ y = MatMul (x, w) }}""")
    clip = "Clip <min = -1.0, max = 1.0> (g)" if opset < 11 else "Clip (g, low, high)"
    total = "ReduceSum <axes = [0, 1], keepdims = 0> (q)" if opset < 13 else "ReduceSum <keepdims = 0> (q)"
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        parser.parse_graph(f"""algorithm (float[N, 3] t) => (float loss, float[2, 3] w_new, float[2, 3] v_new)
            <float R = {{0.1}}, int64 T = {{0}}, float[2, 3] v = {{0, 0, 0, 0, 0, 0}},
             float low = {{-1}}, float high = {{1}}> {{
                d = Sub (y, t)
                q = Mul (d, d)
                loss = {total}
                g = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "t"], y = "loss"> (w, x, t)
                c = {clip}
                w_new, v_new = ai.onnx.preview.training.Momentum
                    <alpha = 0.9, beta = 1.0, norm_coefficient = 0.0, mode = "standard"> (R, T, w, c, v)
            }}""")
    )
    start = "Clip <min = 0.5, max = 2.0> (u)" if opset < 11 else "Clip (u, low, high)"
    info.initialization.CopyFrom(
        parser.parse_graph(f"""initialization () => (float[2, 3] s) <float low = {{0.5}}, float high = {{2}}> {{
            u = RandomUniform <shape = [2, 3], low = 3.0, high = 4.0> ()
            s = {start}
        }}""")
    )
    for name in ("w", "v"):
        info.update_binding.add(key=name, value=f"{name}_new")
    info.initialization_binding.add(key="w", value="s")
    x, t = np.float32([[1, 2], [3, 4]]), np.float32([[1, 2, 3], [4, 5, 6]])
    w, v = np.full((2, 3), 2.0), np.zeros((2, 3))
    for _ in range(3):
        v = 0.9 * v + np.clip(x.T @ (2 * (x @ w - t)), -1, 1)
        w = w - 0.1 * v
    lowered = lower_gradients(model)
    assert lowered.opset_import[0].version == 18
    for proto in (model, lowered):
        state, _ = train(compile_step(proto), [{"x": x, "t": t}] * 3)
        np.testing.assert_allclose(state["w"], w, rtol=1e-5)


# --- what algorithms have from the inference graph -----------------------------------------------------


def small(net: str, algorithm: str, **bound: str) -> onnx.ModelProto:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>' + net)
    graph = parser.parse_graph(algorithm.replace("Gradient", f"{DOMAIN}.Gradient"))
    model.training_info.append(helper.make_training_info(graph, list(bound.items()), None, None))
    return model


NET = (
    "net (float x) => (float s) <float a = {1.0}, float k = {4.0}> { h = Mul (a, k) \n e = Exp (h) \n s = Add (a, x) }"
)


@pytest.mark.parametrize(
    ("algorithm", "after"),
    [
        ("e () => (float n) { n = Add (h, s) }", 4 + 3),
        ("e () => (float n) { n = Add (a, k) }", 1 + 4),
        ("e () => (float n) { g = Gradient <xs = [\"a\"], y = \"h\"> (a) \n n = Sub (g, x) }", 4 - 2),
        ("e () => (float n) { g = Gradient <xs = [\"h\"], y = \"e\"> (h) \n n = Add (g, x) }", np.exp(4) + 2),
        ("""e () => (float n) {
            c = Greater (x, a)
            n = If (c) <then_branch = t () => (float t1) { t1 = Mul (k, h) },
                        else_branch = f () => (float t2) { t2 = Neg (e) }>
        }""", 16),
    ],
    ids=["node", "initializer", "y", "cut", "branch"],
)  # fmt: skip
def test_what_only_an_algorithm_reads(algorithm, after):
    """Values and weights of the inference graph that none of its outputs needs."""
    model, batch = small(NET, algorithm, a="n"), {"x": np.array(2, np.float32)}
    for proto in (model, lower_gradients(model)):
        state, _ = train(compile_step(proto), [batch])
        runner = ReferenceTraining(proto)
        runner.step(batch)
        np.testing.assert_allclose([state["a"], runner.state["a"]], after, rtol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "bound", "after"),
    [
        ("e () => (float k, float a) { }", {"a": "k", "k": "a"}, {"a": 4, "k": 1}),
        ("e () => (float x) { }", {"a": "x"}, {"a": 2}),
        ("e (float l) => (float l) { }", {"a": "l", "k": "l"}, {"a": 7, "k": 7}),
        ("e () => (float q) <float q = {9.0}> { }", {"a": "q"}, {"a": 9}),
        ("e () => () { }", {"a": "s"}, {"a": 3}),
    ],
    ids=["exchanged", "input of inference", "input", "initializer", "output of inference"],
)
def test_what_no_node_of_an_algorithm_computes(algorithm, bound, after):
    """Outputs may be inputs, initializers, and state: it changes at once."""
    model = small(NET, algorithm, **bound)
    batch = {"x": np.array(2, np.float32), "l": np.array(7, np.float32)}
    assert validate(model) == []
    for proto in (model, lower_gradients(model)):
        state, _ = train(compile_step(proto), [batch])
        runner = ReferenceTraining(proto)
        runner.step(batch)
        for found in (state, runner.state):
            assert {name: float(found[name]) for name in after} == after


def test_the_loss_is_the_target_of_the_gradient_that_trains():
    """Not that of one in the inference graph, such as a force; nor does an initialized rate become a constant."""
    net = f"""net (float x) => (float f) <float a = {{3.0}}> {{
        p = Mul (x, a)
        e = Mul (p, x)
        f = {DOMAIN}.Gradient <xs = ["x"], y = "e"> (x)
    }}"""
    algorithm = """e (float t) => (float l, float n) <float r = {0.5}> {
        d = Sub (f, t)
        l = Mul (d, d)
        g = Gradient <xs = ["a"], zs = ["x", "t"], y = "l"> (a, x, t)
        s = Mul (r, g)
        n = Sub (a, s)
    }"""
    model = small(net, algorithm, a="n")
    info = model.training_info[0]
    info.algorithm.initializer[0].metadata_props.add(key=FED, value="rate")
    info.initialization.CopyFrom(parser.parse_graph("i () => (float r0) <float r0 = {0.25}> { }"))
    info.initialization_binding.add(key="r", value="r0")
    step = compile_step(model)
    assert step.loss == "l"
    assert {n: float(r.numpy()) for n, r in step.rates.items()} == {"r": 0.25}
    state, (first,) = train(step, [{"x": np.array(2, np.float32), "t": np.array(10, np.float32)}])
    assert (state["a"], first["l"]) == (3 - 0.25 * 2 * (12 - 10) * 4, 4)


def test_outputs_that_are_inputs_stay_so():
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18, "{DOMAIN}": 1]>
        net (float[2] a) => (float[2] a, float[2] d, float[2] y) {{
            y = Mul (a, a)
            d = {DOMAIN}.Gradient <xs = ["a"], y = "y"> (a)
        }}""")
    lowered = lower_gradients(model)
    assert [o.name for o in lowered.graph.output] == ["a", "d", "y"]
    onnx.checker.check_model(lowered, full_check=True)
