"""Entries in any order that the host likes: steps compiled one by one, on one state, against the reference runner."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.runtime import Session, StepRunner, share
from onnxgrad.training import (
    ReferenceTraining,
    Trainer,
    compile_entries,
    compile_step,
    initialize,
    lower_gradients,
    validate,
)
from tests.training.nets import run, train
from tests.training.spec.test_entries import BATCHES
from tests.training.spec.test_validation_state import shared_state
from tests.training.step.test_entries import two_entries

RNG = np.random.default_rng(0)


def gan() -> onnx.ModelProto:
    """The inference graph generates; the weights of the discriminator are state of the first entry's algorithm.

    Entry 0 trains the discriminator, entry 1 the generator through it; a count is kept by the first and
    read by the second, whose momentum starts over at every even count.
    """
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        generator (float[N, 2] z) => (float[N, 3] fake)
        <float[2, 3] wg = {0.5, -0.2, 0.1, 0.3, 0.4, -0.6}, float[3] bg = {0, 0.1, 0}> {
            zw = MatMul (z, wg)
            fake = Add (zw, bg)
        }""")
    critic = """
            {p}h0 = MatMul ({data}, wd)
            {p}h1 = Add ({p}h0, bd)
            {p}h2 = Tanh ({p}h1)
            {p}d = MatMul ({p}h2, vd)"""
    grads, updates = [], []
    for name in ("wd", "bd", "vd"):
        updates.append(
            f"{name}_new, m{name}_new = ai.onnx.preview.training.Momentum"
            '<alpha = 0.9, beta = 1.0, norm_coefficient = 0.01, mode = "nesterov">'
            f"(rate_d, count, {name}, g{name}, m{name})"
        )
        grads.append(f"g{name}")
    discriminate = f"""discriminate (float[N, 3] x) => (float loss_d, float[3, 4] wd_new, float[4] bd_new,
            float[4, 1] vd_new, float[3, 4] mwd_new, float[4] mbd_new, float[4, 1] mvd_new, int64 count_new)
        <float rate_d = {{0.1}}, int64 count = {{0}}, int64 one = {{1}},
         float[3, 4] wd = {{0.1, -0.4, 0.3, 0.8, 0.5, 0.1, -0.9, 0.2, 0.4, 0.7, -0.2, 0.1}},
         float[4] bd = {{0.1, 0, -0.1, 0.2}}, float[4, 1] vd = {{0.3, -0.5, 0.2, 0.6}},
         float[3, 4] mwd = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}, float[4] mbd = {{0, 0, 0, 0}},
         float[4, 1] mvd = {{0, 0, 0, 0}}> {{
            {critic.format(p="r_", data="x")}
            {critic.format(p="f_", data="fake")}
            minus = Neg (r_d)
            lr = Softplus (minus)
            lf = Softplus (f_d)
            both = Add (lr, lf)
            loss_d = ReduceMean <keepdims = 0> (both)
            {", ".join(grads)} = ai.onnx.preview.training.Gradient
                <xs = ["wd", "bd", "vd"], zs = ["x", "fake"], y = "loss_d"> (wd, bd, vd, x, fake)
            {chr(10).join(updates)}
            count_new = Add (count, one)
        }}"""
    generate = f"""generate ()
        => (float loss_g, float[2, 3] wg_new, float[3] bg_new, float[2, 3] mwg_new, float[3] mbg_new)
        <float rate_g = {{0.2}}, int64 two = {{2}},
         float[2, 3] mwg = {{0, 0, 0, 0, 0, 0}}, float[3] mbg = {{0, 0, 0}}> {{
            {critic.format(p="g_", data="fake")}
            minus_g = Neg (g_d)
            lg = Softplus (minus_g)
            loss_g = ReduceMean <keepdims = 0> (lg)
            gwg, gbg = ai.onnx.preview.training.Gradient <xs = ["wg", "bg"], zs = ["z"], y = "loss_g"> (wg, bg, z)
            phase = Mod (count, two)
            wg_new, bg_new, mwg_new, mbg_new = ai.onnx.preview.training.Momentum
                <alpha = 0.5, beta = 0.5, norm_coefficient = 0.0, mode = "standard">
                (rate_g, phase, wg, bg, gwg, gbg, mwg, mbg)
        }}"""
    for text, keys in (
        (discriminate, ("wd", "bd", "vd", "mwd", "mbd", "mvd", "count")),
        (generate, ("wg", "bg", "mwg", "mbg")),
    ):
        info = model.training_info.add()
        info.algorithm.CopyFrom(parser.parse_graph(text))
        for key in keys:
            info.update_binding.add(key=key, value=f"{key}_new")
    return model


def batch(i: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(i)
    rows = 3 + i % 2
    return {n: rng.standard_normal((rows, k)).astype(np.float32) for n, k in (("z", 2), ("x", 3))}


def taking_turns(model: onnx.ModelProto) -> dict[int, StepRunner]:
    runners = {i: StepRunner(step) for i, step in compile_entries(model).items()}
    share(*runners.values())
    return runners


def state_of(runners: dict[int, StepRunner]) -> dict[str, np.ndarray]:
    return {n: a for runner in runners.values() for n, a in runner.state().items()}


@pytest.mark.parametrize("lowered", [False, True])
def test_any_order_of_entries(lowered):
    """Each step reads what the other has left, in whichever of its buffers that is."""
    model = gan()
    assert validate(model) == []
    oracle = ReferenceTraining(model, runs=Session)
    runners = taking_turns(lower_gradients(model) if lowered else model)
    for i, entry in enumerate([0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1]):
        (want,) = oracle.step(batch(i), entry=entry)
        found = runners[entry].step(batch(i))
        loss = ("loss_d", "loss_g")[entry]
        np.testing.assert_allclose(found[loss], want[loss], rtol=1e-5, err_msg=f"step {i}")
        state = state_of(runners)
        assert set(state) == set(oracle.state)
        for name, value in state.items():
            np.testing.assert_allclose(value, oracle.state[name], rtol=1e-4, atol=1e-6, err_msg=f"{name}, step {i}")
    assert state["count"] == 7


def test_all_entries_are_the_same_as_one_after_the_other():
    model = gan()
    both, runners = StepRunner(compile_step(model)), taking_turns(model)
    for i in range(5):
        both.step(batch(i))
        for runner in runners.values():
            runner.step(batch(i))
    state = state_of(runners)
    for name, value in both.state().items():
        np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_what_a_step_reads_and_does_not_update():
    steps = compile_entries(gan())
    assert {i: sorted(step.reads) for i, step in steps.items()} == {0: ["bg", "wg"], 1: ["bd", "count", "vd", "wd"]}
    assert {i: sorted(step.batch) for i, step in steps.items()} == {0: ["x", "z"], 1: ["z"]}
    assert compile_step(gan()).reads == {}
    for step in steps.values():
        onnx.checker.check_model(ir.to_proto(step.model), full_check=True)


def test_state_that_is_not_shared_stays():
    """A step alone reads what its model says, or what is written into `reads`."""
    steps = compile_entries(gan())
    alone, fed, turns = StepRunner(steps[1]), StepRunner(steps[1]), taking_turns(gan())
    losses = [runner.step(batch(0))["loss_g"].copy() for runner in (alone, fed, turns[1])]
    assert losses[0] == losses[1] == losses[2]
    turns[0].step(batch(1))
    for name, array in turns[0].state().items():
        if name in fed.reads:
            fed.reads[name][...] = array
    losses = [runner.step(batch(0))["loss_g"].copy() for runner in (alone, fed, turns[1])]
    assert losses[1] == losses[2] != losses[0]


def test_loading_state_is_seen_by_the_other():
    runners = taking_turns(gan())
    start = {i: runner.state() for i, runner in runners.items()}
    before = [runners[i].step(batch(0))[loss].copy() for i, loss in enumerate(("loss_d", "loss_g"))]
    runners[0].step(batch(1))
    for i, runner in runners.items():
        runner.load_state(start[i])
    assert before == [runners[i].step(batch(0))[loss] for i, loss in enumerate(("loss_d", "loss_g"))]


def test_inference_model_takes_the_state_of_all_entries():
    model = gan()
    steps, runners = compile_entries(model), taking_turns(model)
    oracle = ReferenceTraining(model, runs=Session)
    for entry in (0, 1, 0, 1):
        runners[entry].step(batch(2))
        oracle.step(batch(2), entry=entry)
    for step in steps.values():
        found = run(step.inference_model(state_of(runners)), {"z": batch(2)["z"]})["fake"]
        np.testing.assert_allclose(found, oracle.infer({"z": batch(2)["z"]})["fake"], rtol=1e-5)
    with pytest.raises(UnknownName, match="no state tensor named 'zw'"):
        steps[0].inference_model({"zw": np.zeros(1)})


def test_a_count_that_another_entry_keeps():
    model, oracle = shared_state(), ReferenceTraining(shared_state())
    runners = taking_turns(model)
    for entry, given in zip([1, 0, 1, 1, 0], BATCHES * 2):
        oracle.step(given, entry=entry)
        runners[entry].step(given)
    for name, value in state_of(runners).items():
        np.testing.assert_allclose(value, oracle.state[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_who_shares_what():
    steps = compile_entries(gan())
    with pytest.raises(BadInput, match="two of the machines update the state 'wd'"):
        share(StepRunner(steps[0]), StepRunner(steps[0]))
    double = StepRunner(steps[0])
    double.reads["wg"] = double.reads["wg"].astype(np.float64)
    with pytest.raises(BadInput, match="state 'wg' is float32"):
        share(double, StepRunner(steps[1]))


def test_entries_that_update_nothing_have_no_step():
    model = two_entries(("p_", "q_"))
    model.training_info.add().initialization.CopyFrom(
        helper.make_graph(
            [helper.make_node("Constant", [], ["start"], value_floats=[1.0, 2.0, 3.0])],
            "initialization",
            [],
            [helper.make_tensor_value_info("start", 1, [3])],
        )
    )
    model.training_info[2].initialization_binding.add(key="b2", value="start")
    steps = compile_entries(model, outputs=["q_g", "y"])
    assert list(steps) == [0, 1]
    assert [step.results for step in steps.values()] == [["p_loss", "y"], ["q_loss", "q_g", "y"]]
    for step in [*steps.values(), compile_step(model, entry=0), compile_step(model)]:  # it initializes for all
        np.testing.assert_array_equal(step.inference_model({}).graph.initializers["b2"].const_value.numpy(), [1, 2, 3])
    with pytest.raises(UnknownName, match="'r_g'"):
        compile_entries(model, outputs=["r_g"])


def test_one_initialization_for_all():
    """The draws are shared by the steps; an entry compiled alone has the same."""
    model = initialize(two_entries(("p_", "q_")), {"w1": "he_normal", "b1": "normal"}, entry=0)
    first, second = compile_entries(model).values()
    for name in ("w1", "b1"):
        one, two = (s.source.model.graph.initializers[name].const_value.numpy() for s in (first, second))
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(second.state["w1"].initial.numpy(), first.reads["w1"].numpy())
    original = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    alone = compile_step(model, entry=1).state["w1"].initial.numpy()
    assert (alone != original["w1"]).all()


def test_trainer_of_one_entry():
    """The state of other entries keeps its value."""
    model = two_entries(("p_", "q_"))
    trainer = Trainer(model, entry=1)
    data = {n: np.concatenate([b[n] for b in BATCHES]) for n in ("x", "labels")}
    history = trainer.fit(data, epochs=3, batch_size=5, schedule=lambda progress: 1.0, validation=data)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    assert set(trainer.state()) == {"w1"}
    step = compile_step(model, entry=1)
    assert list(step.reads) == ["w2"]
    train(step, BATCHES)
