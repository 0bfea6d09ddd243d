"""Products in 16 bits and a scaled loss: the graph, run on the CPU provider, which casts float16 where it must."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import Options, Trainer
from onnxgrad.errors import BadInput
from onnxgrad.runtime import StepRunner
from onnxgrad.runtime.kernels_of_provider import has_kernel
from onnxgrad.training.build.attach import attach
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.step.compile import compile_step
from tests.training.models import classifier
from tests.training.nets import mlp

HALF = Precision(ir.DataType.FLOAT16, lambda node: True, 2.0**16, 3)


def data(rows=16):
    x = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    return {"x": x, "labels": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def machine(precision=HALF, optimizer="adam", **options):
    training = attach(mlp(), loss="cross_entropy", optimizer=optimizer, learning_rate=0.05, **options)
    step = compile_step(training, precision=precision)
    return step, StepRunner(step, options=Options(threads=1, target="portable"))


def test_products_take_16_bits_and_weights_float32():
    step, _ = machine()
    products = [n for n in step.model.graph if n.op_type in ("MatMul", "Gemm")]
    forward = [n for n in products if n.outputs[0].name and n.inputs[0].dtype == ir.DataType.FLOAT16]
    assert len(forward) >= 5  # two forward, two for weights, one for the hidden layer
    for name in ("w1", "b1", "w2", "b2"):
        assert step.state[name].initial.dtype == ir.DataType.FLOAT
    assert all(n.inputs[0].dtype == ir.DataType.FLOAT for n in step.model.graph if n.op_type == "LogSoftmax")


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lion"])
def test_it_learns_as_in_float32(optimizer):
    curves = []
    for precision in (None, HALF):
        _, runner = machine(precision, optimizer)
        curves.append([float(runner.step(data())["loss"]) for _ in range(20)])
    assert curves[1][-1] < 0.8 * curves[1][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02)


def test_a_gradient_that_is_not_finite_skips_exactly_one_step():
    _, runner = machine(clip_norm=1.0, ema=0.9)
    _, twin = machine(clip_norm=1.0, ema=0.9)
    batch, bad = data(), data()
    bad["x"][3, 2] = np.inf
    for _ in range(2):
        runner.step(batch)
        twin.step(batch)
    before = runner.state()
    runner.step(bad)
    after = runner.state()
    assert after["loss_scale"] == before["loss_scale"] / 2
    assert after["good_steps"] == 0
    assert len(before) > 10
    for name in before.keys() - {"loss_scale", "good_steps"}:
        assert before[name].tobytes() == after[name].tobytes(), name
    runner.load_state({**after, "loss_scale": before["loss_scale"], "good_steps": before["good_steps"]})
    runner.step(batch)  # goes on as if nothing had been
    twin.step(batch)
    expected = twin.state()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in runner.state().items())


def test_the_scale_falls_until_gradients_fit_and_grows_after_good_steps():
    precision = Precision(ir.DataType.FLOAT16, lambda node: True, 2.0**125, 3)
    training = attach(mlp(), loss="1000*cross_entropy", optimizer="sgd", learning_rate=1e-6)
    runner = StepRunner(compile_step(training, precision=precision), options=Options(threads=1, target="portable"))
    scales = [float(runner.state()["loss_scale"])]
    for _ in range(24):
        runner.step(data())
        scales.append(float(runner.state()["loss_scale"]))
    falls = next(i for i in range(24) if scales[i + 1] == scales[i])  # until here, every step was skipped
    assert falls > 2
    assert scales[: falls + 1] == [2.0 ** (125 - i) for i in range(falls + 1)]
    assert scales[falls + 3] == 2 * scales[falls]


def test_the_range_of_bfloat16_needs_no_scale():
    precision = Precision.named("bf16", lambda node: True)
    step, _ = machine(Precision(ir.DataType.FLOAT16, precision.runs, precision.scale, precision.growth))
    runner = StepRunner(step, options=Options(threads=1, target="portable"))
    for k in range(4):
        runner.step(data() if k != 2 else {**data(), "x": np.full((16, 4), np.nan, np.float32)})
    assert runner.state()["loss_scale"] == 1
    assert runner.state()["good_steps"] == 1
    assert all(np.isfinite(a).all() for a in runner.state().values())


def test_nodes_that_the_provider_cannot_run_stay_in_float32():
    step, _ = machine(Precision(ir.DataType.FLOAT16, lambda node: node.op_type != "MatMul", 2.0**16, 3))
    assert not any(v.dtype == ir.DataType.FLOAT16 for n in step.model.graph for v in n.outputs)


def test_kernels_are_those_that_the_runtime_runs():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 2]))
    for op_type, there in (("Gemm", (False, True)), ("Transpose", (True, True)), ("NoSuchOperator", (False, False))):
        node = ir.Node("", op_type, [x, x] if op_type == "Gemm" else [x], num_outputs=1)
        node.outputs[0].type = x.type
        kinds = (ir.DataType.BFLOAT16, ir.DataType.FLOAT)
        assert tuple(has_kernel("CPUExecutionProvider", node, 21, k) for k in kinds) == there


def test_the_inference_model_is_the_same_as_without():
    step, runner = machine()
    runner.step(data())
    model = step.inference_model(runner.state())
    assert {v.dtype for v in model.graph.initializers.values()} == {ir.DataType.FLOAT}
    found = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": data()["x"]})
    assert np.isfinite(found[0]).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "bf16"}, "not for the CPU provider .* no products in 16 bits"),
        ({"precision": "fp8"}, "precision is fp32, fp16 or bf16, not 'fp8'"),
    ],
)
def test_precisions_that_cannot_be_had_are_refused(options, said):
    with pytest.raises(BadInput, match=said):
        Trainer(mlp(), loss="cross_entropy", **options)


def test_a_value_of_the_name_of_its_state_is_refused():
    model = mlp()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "loss_scale"
    with pytest.raises(BadInput, match="keeps a state 'loss_scale'"):
        compile_step(attach(model, loss="cross_entropy"), precision=HALF)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_step_is_compiled_by_the_name_of_a_precision(name):
    model = attach(classifier(), loss="cross_entropy", optimizer="sgd")
    like = compile_step(model, precision=Precision.named(name, lambda node: True))
    found = compile_step(model, precision=name)
    assert [n.op_type for n in found.model.graph] == [n.op_type for n in like.model.graph]
    plain = compile_step(model, precision="fp32")
    assert [n.op_type for n in plain.model.graph] == [n.op_type for n in compile_step(model).model.graph]
    for wrong in ("fp8", 16):
        with pytest.raises(BadInput, match="precision is"):
            compile_step(model, precision=wrong)
