"""Optimizers by formula, groups, clipping, averages and schedules: against PyTorch and against papers."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import Group, Loss, Optimizer, attach, compile_step
from onnxgrad.training.spec.validation import validate
from tests.training.nets import mlp, train

STEPS = 60


@functools.cache
def batches(steps=STEPS):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(steps):
        x = rng.standard_normal((16, 4)).astype(np.float32)
        found.append({"x": x, "labels": np.sin(x[:, :3] * 2).astype(np.float32)})
    return found


def weights():
    return {t.name: numpy_helper.to_array(t).astype(np.float64) for t in mlp().graph.initializer}


def trained(optimizer, steps=STEPS, **options):
    model = attach(mlp(), loss="mse", optimizer=optimizer, **options)
    assert not validate(model)
    step = compile_step(model)
    state, history = train(step, batches(steps), threads=2)
    return state, [h["loss"] for h in history]


def gradients(w, batch):
    """The gradient of the loss in float64, by the formulas of the network."""
    x, t = np.float64(batch["x"]), np.float64(batch["labels"])
    h = np.tanh(x @ w["w1"] + w["b1"])
    d = 2 * (h @ w["w2"] + w["b2"] - t) / t.size
    dh = d @ w["w2"].T * (1 - h * h)
    return {"w1": x.T @ dh, "b1": dh.sum(0), "w2": h.T @ d, "b2": d.sum(0)}


def by_hand(update, steps=STEPS):
    """Weights after training with ``update(x, g, state, t) -> x``, a formula in numpy, state a dict per tensor."""
    w, states = weights(), {n: {} for n in weights()}
    for t, batch in enumerate(batches(steps), start=1):
        g = gradients(w, batch)
        w = {n: update(w[n], g[n], states[n], t) for n in w}
    return w


def of_torch(make, names=None, steps=STEPS, every=None):
    """Weights after training with an optimizer of PyTorch, in float64; `every` is called before each step."""
    torch = pytest.importorskip("torch")
    p = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in weights().items()}
    optimizer = make(torch.optim, p)
    for t, batch in enumerate(batches(steps)):
        y = torch.tanh(torch.tensor(batch["x"]).double() @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(y, torch.tensor(batch["labels"]).double()).backward()
        if every:
            every(torch, p, optimizer, t)
        optimizer.step()
    return {n: v.detach().numpy() for n, v in p.items()}


def close(state, wanted, rtol=2e-4, atol=2e-5):
    for n, w in wanted.items():
        np.testing.assert_allclose(state[n], w, rtol=rtol, atol=atol, err_msg=n)


TORCH = {
    "sgd": ({"learning_rate": 0.1}, lambda o, p: o.SGD(p.values(), lr=0.1)),
    "rmsprop": ({"learning_rate": 0.01}, lambda o, p: o.RMSprop(p.values(), lr=0.01)),
    "rmsprop:alpha=0.9,momentum=0.5,centered=true,eps=0.01": (
        {"learning_rate": 0.01, "weight_decay": 0.1},
        lambda o, p: o.RMSprop(p.values(), 0.01, 0.9, eps=0.01, weight_decay=0.1, momentum=0.5, centered=True),
    ),
    "nadam": ({"weight_decay": 0.1}, lambda o, p: o.NAdam(p.values(), weight_decay=0.1)),
    "nadam:momentum_decay=0.1": ({}, lambda o, p: o.NAdam(p.values(), momentum_decay=0.1)),
    "adafactor": (
        {"weight_decay": 0.1},
        lambda o, p: o.Adafactor(p.values(), weight_decay=0.1, eps=(np.finfo(np.float32).eps, 1e-3)),
    ),
    "adafactor:clip=1.5,beta2_decay=-0.5": (
        {"learning_rate": 0.05},
        lambda o, p: o.Adafactor(p.values(), lr=0.05, d=1.5, beta2_decay=-0.5, eps=(np.finfo(np.float32).eps, 1e-3)),
    ),
    "adam": ({"learning_rate": 0.01, "eps": 0.01}, lambda o, p: o.Adam(p.values(), lr=0.01, eps=0.01)),
    "adam:betas=0.5,0.9": (
        {"learning_rate": 0.01, "weight_decay": 0.1, "eps": 1e-3},
        lambda o, p: o.Adam(p.values(), 0.01, (0.5, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": ({"learning_rate": 0.01, "eps": 0.01}, lambda o, p: o.AdamW(p.values(), lr=0.01, eps=0.01)),
    "adagrad": ({"eps": 0.01}, lambda o, p: o.Adagrad(p.values(), eps=0.01)),
    "momentum": ({}, lambda o, p: o.SGD(p.values(), lr=0.01, momentum=0.9)),
    "nesterov": ({"weight_decay": 0.1}, lambda o, p: o.SGD(p.values(), 0.01, 0.9, weight_decay=0.1, nesterov=True)),
}


@pytest.mark.torch
@pytest.mark.parametrize("spelled", TORCH)
def test_optimizers_are_those_of_torch(spelled):
    settings, make = TORCH[spelled]
    from onnxgrad.training.option_strings import spelled as read

    name, options = read(spelled)
    state, losses = trained(name, **options, **settings)
    assert losses[-1] < losses[0]
    close(state, of_torch(make))


def lion(x, g, s, t, rate=0.01, decay=0.1, b1=0.9, b2=0.99):
    m = s.get("m", 0)
    s["m"] = b2 * m + (1 - b2) * g
    return x - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * x)


def lamb(x, g, s, t, rate=0.01, decay=0.1, b1=0.9, b2=0.999, eps=1e-6):
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    r = s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * x
    return x - rate * np.linalg.norm(x) / np.linalg.norm(r) * r


def muon(x, g, s, t, rate=0.02, decay=0.1, mu=0.95, b1=0.9, b2=0.95, eps=1e-8):
    """Jordan et al.: orthogonalized momentum for matrices, AdamW for vectors; scaled by √max(1, rows/columns)."""
    if x.ndim < 2:
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        return x * (1 - rate * decay) - rate * s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps)
    s["m"] = mu * s.get("m", 0) + (1 - mu) * g
    u = (1 - mu) * g + mu * s["m"]
    u = u / np.linalg.norm(u)
    for _ in range(5):  # as an odd polynomial of the singular values
        left, sigma, right = np.linalg.svd(u, full_matrices=False)
        u = left * (3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5) @ right
    return x * (1 - rate * decay) - rate * np.sqrt(max(1, x.shape[0] / x.shape[1])) * u


PAPERS = {"lion": lion, "lamb": lamb, "muon": muon}


@pytest.mark.parametrize("name", PAPERS)
def test_optimizers_are_those_of_their_papers(name):
    """Against formulas in float64. The signs of lion and the norms of muon magnify rounding: fewer steps of these."""
    steps = {"lion": 20, "lamb": 60, "muon": 20}[name]
    rate = {"muon": 0.02}.get(name, 0.01)
    state, losses = trained(name, steps, learning_rate=rate, weight_decay=0.1)
    assert losses[-1] < losses[0]
    close(state, by_hand(PAPERS[name], steps), rtol=2e-3, atol=2e-4)


@pytest.mark.torch
def test_muon_is_that_of_torch_up_to_its_half_precision():
    """PyTorch orthogonalizes in bfloat16, whose rounding is 4e-3 of each step."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    rate = 0.02
    for adjust in ("original", "match_rms_adamw"):
        state, _ = trained("muon", 20, learning_rate=rate, weight_decay=0.1, trainable=["w1", "w2"],
                           adjust=adjust)  # fmt: skip

        def make(o, p, a=adjust):
            return o.Muon([p["w1"], p["w2"]], lr=rate, weight_decay=0.1, adjust_lr_fn=a)

        wanted = of_torch(make, steps=20)
        for name in ("w1", "w2"):
            moved = np.abs(wanted[name] - weights()[name]).mean()
            assert np.abs(state[name] - wanted[name]).mean() < 0.02 * moved


def test_kernels_are_matrices_to_muon():
    """A kernel [8, 4, 3, 3] moves as the matrix [8, 36]: one step of both."""
    from onnx import helper

    from tests.training.nets import model_of

    rng = np.random.default_rng(0)
    k = rng.standard_normal((8, 4, 3, 3)).astype(np.float32)
    x = rng.standard_normal((2, 4, 3, 3)).astype(np.float32)
    labels = rng.standard_normal((2, 8)).astype(np.float32)
    flat = [helper.make_node("Flatten", ["c"], ["y"])]
    conv = model_of(
        [helper.make_node("Conv", ["x", "k"], ["c"]), *flat], {"k": k}, {"x": ["N", 4, 3, 3]}, {"y": ["N", 8]}
    )
    nodes = [helper.make_node("Transpose", ["k"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    dense = model_of(nodes, {"k": k.reshape(8, 36)}, {"x": ["N", 36]}, {"y": ["N", 8]})
    found = []
    for model, shape in ((conv, (2, 4, 3, 3)), (dense, (2, 36))):
        step = compile_step(attach(model, loss="mse", optimizer="muon", learning_rate=0.1))
        state, _ = train(step, [{"x": x.reshape(shape), "labels": labels}])
        found.append(state["k"].reshape(8, 36))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "nadam", "lion", "lamb", "adafactor", "muon"])
def test_half_precision_has_its_state_in_float(name):
    model = attach(mlp(dtype=np.float16), loss="mse", optimizer=name, learning_rate=0.01)
    step = compile_step(model)
    kinds = {str(t.initial.dtype) for t in step.state.values() if t.kind == "optimizer"}
    assert kinds <= {"FLOAT", "DOUBLE"}
    halves = [{n: a.astype(np.float16) for n, a in batches(1)[0].items()}] * 20
    state, history = train(step, halves)
    assert history[-1]["loss"] < history[0]["loss"]
    assert state["w1"].dtype == np.float16


@pytest.mark.parametrize("name", ["adamw", "adamw:convention=onnx"])
def test_the_decay_of_doubles_is_double(name):
    """Beside 1, a float32 loses Rλ = 1e-8. Inputs of zero give w1 no gradient."""
    model = mlp(dtype=np.float64)
    first = numpy_helper.to_array(model.graph.initializer[0])
    step = compile_step(attach(model, loss="mse", optimizer=name, learning_rate=1e-6, weight_decay=0.01))
    state, _ = train(step, [{"x": np.zeros((2, 4)), "labels": np.zeros((2, 3))}])
    np.testing.assert_allclose((first - state["w1"]) / first, 1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("sgd", 2), ("rmsprop", 9), ("adam", 12), ("lion", 9), ("nadam", 15), ("adafactor", 28), ("lamb", 25)],
)
def test_nodes_per_tensor(name, nodes):
    """Shared values of tensors are computed once: the most nodes for one more vector (besides its gradient)."""
    counts = []
    for names in (["b1"], ["b1", "b2"]):
        model = attach(mlp(), loss="mse", optimizer=name, trainable=names)
        model = compile_step(model).model
        counts.append(len([n for n in model.graph if n.op_type != "Identity"]))
        assert not [n for n in model.graph if n.op_type == "Identity"]
    other = [len(compile_step(attach(mlp(), loss="mse", optimizer="sgd", trainable=t)).model.graph) for t in
             (["b1"], ["b1", "b2"])]  # fmt: skip
    gradient = other[1] - other[0] - 2
    assert counts[1] - counts[0] - gradient <= nodes


# --- groups ------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_groups_are_those_of_torch():
    """Biases without decay, one layer slower, one not at all; schedule and clipping apply to all."""

    def make(o, p):
        slow, rest = {"params": [p["w1"]], "lr": 0.001}, {"params": [p["w2"]]}
        return o.AdamW([slow, {"params": [p["b2"]], "weight_decay": 0.0}, rest], lr=0.01, weight_decay=0.1, eps=1e-4)

    groups = ["w1:rate=0.001", Group("b1", frozen=True), "b*:decay=0"]
    state, _ = trained("adamw", learning_rate=0.01, weight_decay=0.1, eps=1e-4, groups=groups)
    assert "b1" not in state
    close(state, {n: w for n, w in of_torch(make).items() if n != "b1"})


def test_a_group_has_a_rate_of_its_own():
    step = compile_step(attach(mlp(), loss="mse", optimizer="adam", groups=["b*:rate=0.5"], learning_rate=0.25))
    assert {n: float(t.numpy()) for n, t in step.rates.items()} == {"learning_rate": 0.25, "learning_rate_1": 0.5}


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (["q*:rate=1"], UnknownName, r"no weight named 'q\*'"),
        (["b*"], BadInput, "is not written as pattern:rate=0.001"),
        (["b*:speed=1"], BadInput, "the optimizer 'sgd' has no setting 'speed'"),
        (["b*:rate=-1"], BadInput, "learning_rate must be a number ≥ 0"),
        (["b*:frozen=3"], BadInput, "frozen must be true or false"),
        (["*:frozen=true"], BadInput, "every weight is frozen"),
    ],
)
def test_bad_groups(groups, error, message):
    with pytest.raises(error, match=message):
        attach(mlp(), loss="mse", optimizer="sgd", groups=groups)


# --- configurations ----------------------------------------------------------------------------------


def test_a_configuration_says_what_keywords_and_strings_say():
    settings = {
        "schedule": "cosine:total=40",
        "groups": ["b*:decay=0"],
        "clip_norm": 1.0,
        "clip_value": 0.5,
        "ema": 0.9,
    }
    made = Optimizer("adamw", learning_rate=0.1, betas=(0.8, 0.95), **settings)
    parsed = Optimizer("adamw:rate=0.1,betas=0.8,0.95", **{**settings, "groups": [Group("b*", weight_decay=0)]})
    assert made == parsed
    loss = Loss("huber", factor=0.5, labels="t", delta=2)
    assert loss == Loss.of("0.5*huber:labels=t,delta=2")
    want = attach(mlp(), loss=loss, optimizer=made)
    for found in (
        attach(mlp(), loss="0.5*huber:delta=2", labels="t", optimizer=parsed),
        attach(mlp(), loss=[loss], optimizer="adamw:rate=0.1", betas=(0.8, 0.95), **settings),
    ):
        assert found.SerializeToString(deterministic=True) == want.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer("adamm"), "there is no optimizer 'adamm'"),
        (lambda: Optimizer("sgd", betas=(0.9, 0.9)), "the optimizer 'sgd' has no setting 'betas'"),
        (lambda: Optimizer("sgd", groups=["b*:betas=1"]), "the optimizer 'sgd' has no setting 'betas'"),
        (lambda: Group.of("b*:pattern=3") and Optimizer("sgd", groups=["b*:pattern=3"]), "has no setting 'pattern'"),
        (lambda: Loss.of("mse:factor=2"), r"write the factor in front, as in 0.5\*mse"),
        (lambda: attach(mlp(), optimiser="sgd"), "attach has no argument 'optimiser'; did you mean 'optimizer'"),
        (lambda: attach(mlp(), name="sgd"), "attach has no argument 'name'"),
        (lambda: attach(mlp(), optimizer=Optimizer("sgd"), ema=0.9), r"write Optimizer\('sgd', …, ema=…\)"),
    ],
)
def test_bad_configurations(make, message):
    with pytest.raises(BadInput, match=message):
        make()


# --- clipping ----------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"clip_norm": 0.1}, lambda torch, p: torch.nn.utils.clip_grad_norm_(p.values(), 0.1)),
        ({"clip_value": 0.02}, lambda torch, p: torch.nn.utils.clip_grad_value_(p.values(), 0.02)),
    ],
)
def test_clipping_is_that_of_torch(options, clip):
    state, _ = trained("sgd", learning_rate=0.3, **options)
    clipped = of_torch(lambda o, p: o.SGD(p.values(), lr=0.3), every=lambda torch, p, o, t: clip(torch, p))
    plain = of_torch(lambda o, p: o.SGD(p.values(), lr=0.3))
    close(state, clipped)
    assert max(np.abs(plain[n] - clipped[n]).max() for n in plain) > 0.01, "it must have clipped"


@pytest.mark.parametrize("options", [{"clip_norm": 0.0}, {"clip_value": -1.0}, {"ema": 1.0}, {"clip_norm": np.nan}])
def test_bad_bounds(options):
    with pytest.raises(BadInput, match=next(iter(options))):
        attach(mlp(), loss="mse", **options)


# --- averages ----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_averages_are_those_of_torch():
    torch = pytest.importorskip("torch")
    average, decay = {}, 0.9
    rule = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)

    def after(torch, p, optimizer, t):
        if t:  # what the last step has left
            now = [v.detach().clone() for v in p.values()]
            if not average:
                average.update(zip(p, now))
            else:
                rule(list(average.values()), now, torch.tensor(t - 1))

    of_torch(lambda o, p: o.SGD(p.values(), lr=0.1), steps=31, every=after)
    state, _ = trained("sgd", steps=30, learning_rate=0.1, ema=decay)
    close({n: state[f"{n}_average"] for n in average}, {n: v.numpy() for n, v in average.items()})
    assert np.abs(state["w1"] - state["w1_average"]).max() > 1e-3


@pytest.mark.torch
@pytest.mark.parametrize("every", [1, 4])
def test_plain_averages_are_those_of_torch(every):
    pytest.importorskip("torch")
    start, average = 9, []

    def after(torch, p, optimizer, t):  # what step t has left, the first is step 1
        now = torch.nn.ParameterDict({n: v.detach().clone() for n, v in p.items()})
        if t == start:
            average.append(torch.optim.swa_utils.AveragedModel(now))
        if t >= start and (t - start) % every == 0:
            average[0].update_parameters(now)

    of_torch(lambda o, p: o.SGD(p.values(), lr=0.1), steps=31, every=after)
    state, _ = trained("sgd", steps=30, learning_rate=0.1, swa=start, swa_every=every)
    found = {n: v.detach().numpy() for n, v in average[0].module.items()}
    close({n: state[f"{n}_average"] for n in found}, found)
    assert np.abs(state["w1"] - state["w1_average"]).max() > 1e-3


def test_before_the_first_weight_counts_the_average_is_a_copy():
    state, _ = trained("sgd", steps=5, learning_rate=0.1, swa=6)
    np.testing.assert_array_equal(state["w1"], state["w1_average"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swa": 0}, "swa must be at least 1"),
        ({"swa": 3, "ema": 0.9}, "ema and swa exclude each other"),
        ({"optimizer": "adamm"}, "there is no optimizer 'adamm'; there are: sgd, momentum"),
        ({"optimizer": "muon", "adjust": "big"}, "adjust must be 'original' or"),
        ({"optimizer": "lion", "betas": (0.9,)}, "betas must be two numbers"),
        ({"optimizer": "rmsprop", "centered": 1}, "centered must be true or false"),
        ({"optimizer": "adafactor", "clip": 0}, "clip must be positive"),
        ({"optimizer": "nadam", "momentum_decay": "x"}, "momentum_decay must be a number"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(BadInput, match=message):
        attach(mlp(), loss="mse", **options)


def test_a_whole_plan_is_one_valid_model():
    """Everything at once: it passes the checker, and trains."""
    options = {"groups": ["b*:decay=0"], "schedule": "one_cycle:total=40", "clip_norm": 1.0, "ema": 0.99}
    model = attach(mlp(), loss="mse", optimizer="nadam", learning_rate=0.02, metrics=["gradient_norm"], **options)
    onnx.checker.check_model(model, full_check=True)
    assert not validate(model)
    state, history = train(compile_step(model, outputs=["gradient_norm"]), batches(40), threads=2)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert state["steps"] == 40
