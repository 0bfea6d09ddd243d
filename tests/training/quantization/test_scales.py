"""Learned scales and straight-through gradients: closed forms in float64, central differences, PyTorch."""

import numpy as np
import pytest

from onnxgrad.training import Trainer, compile_step
from onnxgrad.training.build.attach import attach
from tests.training.quantization.models import pair, scores

RNG = np.random.default_rng(5)
X = (RNG.standard_normal((7, 3)) * 8).astype(np.float32)  # some of it beyond ±12.8
T = RNG.standard_normal((7, 2)).astype(np.float32)


def stepped(model, rate=1.0, optimizer="sgd", **data):
    """The changes of one step, by name, and the state before."""
    trainer = Trainer(model, loss="mse", optimizer=optimizer, learning_rate=rate)
    before = trainer.state()
    trainer.machine.step({"x": X, "labels": T} | data)
    return before, trainer.state()


def gradients(model):
    """The change of a step per learning rate; steps of scales are small enough not to reach their bounds."""
    found = {}
    for rate, names in ((1.0, ["w"]), (1e-5, ["x_scale", "w_scale"])):
        before, after = stepped(model, rate)
        found |= {n: (before[n].astype(np.float64) - after[n]) / rate for n in names}
    return before, found


def fake(x, s, z, low, high):
    """x rounded, in float64: the value, its slope for x and its slope for s (Esser et al. 2020, equation 3)."""
    v = x / s
    q = np.rint(v) + z
    inside = (q >= low) & (q <= high)
    y = (np.clip(q, low, high) - z) * s
    return y, inside.astype(float), np.where(inside, np.rint(v) - v, np.clip(q, low, high) - z)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_one_step_is_the_closed_form(kind):
    model = pair(kind)
    before, found = gradients(model)
    low, high = {"int8": (-128, 127), "int4": (-8, 7)}[kind]
    w, s, sw = (before[n].astype(np.float64) for n in ("w", "x_scale", "w_scale"))
    xd, _, slope = fake(X.astype(np.float64), s, 128, 0, 255)
    wd, inside, w_slope = fake(w, sw, 0, low, high)
    g = 2 * (xd @ wd - T) / T.size
    dx, dw = g @ wd.T, xd.T @ g
    wanted = {
        "w": dw * inside,
        "x_scale": (dx * slope).sum() / np.sqrt(3 * 127),  # 3 numbers in a row; 127 above the zero point
        "w_scale": (dw * w_slope).sum(0) / np.sqrt(3 * high),  # 3 numbers share each scale
    }
    assert (w_slope != 0).all()
    assert (np.abs(X) > 12.8).any(), "some saturate"
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, err_msg=name)


def test_differences_away_from_steps():
    """Between steps, dL/ds is that of q·s with q held; the estimator adds what flows through x/s by the chain rule."""
    model = pair()
    before, found = gradients(model)

    def loss(scale):
        held = pair(scale=scale)
        return float(((scores(held, {"x": X}, False).astype(np.float64) - T) ** 2).mean())

    near = 0.1 * (1 + 1e-5), 0.1 * (1 - 1e-5)
    difference = (loss(near[0]) - loss(near[1])) / (near[0] - near[1])
    xd, inside, _ = fake(X.astype(np.float64), 0.1, 128, 0, 255)
    wd, _, _ = fake(before["w"].astype(np.float64), before["w_scale"].astype(np.float64), 0, -128, 127)
    dx = (2 * (xd @ wd - T) / T.size) @ wd.T
    through = (dx * inside * X / 0.1).sum()
    learned = found["x_scale"] * np.sqrt(3 * 127)
    np.testing.assert_allclose(learned, difference - through, rtol=2e-2)


@pytest.mark.torch
def test_against_torch():
    torch = pytest.importorskip("torch")
    before, found = gradients(pair())
    x, t = torch.tensor(X), torch.tensor(T)
    w, s, sw = (torch.tensor(before[n], requires_grad=True) for n in ("w", "x_scale", "w_scale"))
    # of a batch of 7 rows: the factor that PyTorch takes is that of what it is given
    xd = torch._fake_quantize_learnable_per_tensor_affine(
        x, s.reshape(1), torch.tensor([128.0]), 0, 255, float(1 / np.sqrt(3 * 127))
    )
    wd = torch._fake_quantize_learnable_per_channel_affine(
        w, sw, torch.zeros(2), 1, -128, 127, float(1 / np.sqrt(3 * 127))
    )
    torch.nn.functional.mse_loss(xd @ wd, t).backward()
    for name, tensor in (("w", w), ("x_scale", s), ("w_scale", sw)):
        np.testing.assert_allclose(found[name], tensor.grad.numpy(), rtol=1e-3, err_msg=name)


def test_symbolic_sizes_are_counted_as_they_run():
    known, open_ = pair(), pair()
    for value in (open_.graph.input[0], known.graph.input[0]):
        value.type.tensor_type.shape.dim[1].ClearField("dim_value")
    open_.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "K"
    known.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    for name, array in stepped(known)[1].items():
        np.testing.assert_allclose(stepped(open_)[1][name], array, rtol=1e-6)


def test_adam_takes_scales_in_units_of_their_first_value():
    before, after = stepped(pair(), rate=0.01, optimizer="adam")
    for name in ("x_scale", "w_scale"):
        np.testing.assert_allclose(np.abs(after[name] / before[name] - 1), 0.01, rtol=1e-3)


def test_scales_keep_their_sign():
    model = pair(weight_scale=(-0.05, 0.02))
    before, after = stepped(model, rate=1e4)
    assert (np.sign(before["w_scale"]) == [-1, 1]).all()
    assert (np.sign(after["w_scale"]) == [-1, 1]).all()
    assert (np.abs(after["w_scale"]) >= 0.99e-3 * np.abs(before["w_scale"])).all()
    assert after["x_scale"] > 0


def test_what_is_trained_and_what_is_not():
    asked = {
        (): {"w", "w_scale", "x_scale"},
        ("w",): {"w"},
        ("*_scale",): {"w_scale", "x_scale"},
        ("type:MatMul",): {"w"},
        ("all",): {"w", "w_scale", "x_scale"},
    }
    for patterns, wanted in asked.items():
        step = compile_step(attach(pair(), loss="mse", trainable=list(patterns) or None))
        assert {n for n, t in step.state.items() if t.kind == "parameter"} == wanted
    frozen = compile_step(attach(pair(), loss="mse", freeze=["*_scale"]))
    assert {n for n, t in frozen.state.items() if t.kind == "parameter"} == {"w"}
    told = attach(pair(), loss="mse").training_info[0].algorithm.metadata_props
    assert any("among them x_scale, w_scale" in p.value for p in told), told


def test_a_training_model_goes_on_with_the_same_bits():
    model = pair()
    trainer = Trainer(model, loss="mse", optimizer="adam", learning_rate=0.05)
    batch = {"x": X, "labels": T}
    trainer.machine.step(batch)
    saved = trainer.training_model()
    other = Trainer(saved)
    for machine in (trainer.machine, other.machine):
        machine.step(batch)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, other.state()[name], err_msg=name)


def test_parts_of_a_batch_add_up():
    whole, parts = (Trainer(pair(), loss="mse", optimizer="sgd", learning_rate=1e-5, accumulate=n) for n in (1, 7))
    for trainer in (whole, parts):
        trainer.machine.step({"x": X, "labels": T})
    for name, array in whole.state().items():
        np.testing.assert_allclose(parts.state()[name], array, rtol=1e-6, err_msg=name)
