"""Models with their spread: against closed forms, PyTorch, and runs of the parts; coverage on data of scikit-learn."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sklearn.datasets import load_diabetes, load_digits

import onnxgrad
from onnxgrad import uncertainty
from onnxgrad.errors import BadInput
from onnxgrad.sklearn import perceptron
from tests.commands import command
from tests.models import assert_sound
from tests.training.models import blobs, classifier


def linear(size: int, outputs: int = 1, form: str = "Gemm", last: str = "") -> onnx.ModelProto:
    """y = x·w + b, and `last` of it."""
    y = "z" if last else "y"
    layer = f"{y} = {form} (x, w, b)" if form != "MatMul" else f"h = MatMul (x, w)\n{y} = Add (b, h)"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, {size}] x) => (float[N, {outputs}] y) {{
            {layer}
            {f"y = {last} (z)" if last else ""}
        }}""")
    draw = np.random.default_rng(3)
    for name, shape in {"w": (size, outputs), "b": (outputs,)}.items():
        array = (0.5 * draw.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def run(model, x):
    assert_sound(model)
    return onnxgrad.predict(model, {"x": x})


@pytest.fixture(scope="module")
def digits():
    """Rows to train on, to calibrate and to test, and a model that is trained."""
    x, t = load_digits(return_X_y=True)
    x, order = (x / 16).astype(np.float32), np.random.default_rng(0).permutation(len(x))
    rows = [{"x": x[part], "labels": t[part]} for part in np.split(order, [900, 1300])]
    trainer = onnxgrad.train(perceptron(64, 10), rows[0], loss="cross_entropy", epochs=20, progress=False)
    return trainer.inference_model(), *rows


# --- Laplace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["Gemm", "MatMul", "Gemm <alpha = 0.5, beta = 2.0>"])
def test_of_a_linear_regression_it_is_the_posterior_of_bayes(form):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((60, 4)).astype(np.float32)
    rows = {"x": x, "labels": (x[:, :1] + 0.3 * draw.standard_normal((60, 1))).astype(np.float32)}
    prior, noise = 2.0, 0.4
    found = run(uncertainty.laplace(linear(4, form=form), rows, prior=prior, noise=noise), x[:7])
    a, b = (0.5, 2) if "alpha" in form else (1, 1)
    phi = np.c_[a * x, b * np.ones(60)].astype(np.float64)
    covariance = np.linalg.inv(phi.T @ phi / noise**2 + prior * np.eye(5))
    wanted = np.sqrt(np.einsum("ni,ij,nj->n", phi[:7], covariance, phi[:7]) + noise**2)
    np.testing.assert_allclose(found["y_spread"][:, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(found["y"], run(linear(4, form=form), x[:7])["y"], rtol=1e-5, atol=1e-6)
    model = linear(4, 6, form, "Reshape")  # the spread has the shape of the prediction
    model.graph.node[-1].input.append("s")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 2, 3]), "s"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.shape.CopyFrom(
        onnx.helper.make_tensor_type_proto(1, ["N", 2, 3]).tensor_type.shape
    )
    labels = np.repeat(rows["labels"], 6, 1).reshape(-1, 2, 3)
    spread = run(uncertainty.laplace(model, rows | {"labels": labels}, prior=prior, noise=noise), x[:7])["y_spread"]
    np.testing.assert_allclose(spread, np.broadcast_to(wanted[:, None, None], (7, 2, 3)), rtol=1e-5)


def test_the_prior_has_the_largest_evidence():
    """log ∫ p(t | w)·N(w; 0, 1/τ) dw of Laplace, by its closed form, for priors around the chosen one."""
    draw = np.random.default_rng(1)
    x = draw.standard_normal((80, 3)).astype(np.float32)
    model = linear(3)
    rows = {"x": x, "labels": run(model, x)["y"] + 0.1 * draw.standard_normal((80, 1)).astype(np.float32)}
    w = np.concatenate([onnx.numpy_helper.to_array(t).ravel() for t in model.graph.initializer]).astype(float)
    phi = np.c_[x, np.ones(80)].astype(np.float64)
    noise = np.sqrt(np.mean((run(model, x)["y"] - rows["labels"]).astype(float) ** 2))
    grid = np.geomspace(1e-2, 1e3, 2000)
    evidence = [4 * np.log(t) - t * w @ w - np.linalg.slogdet(phi.T @ phi / noise**2 + t * np.eye(4))[1] for t in grid]
    best = grid[np.argmax(evidence)]
    ours, theirs = (run(uncertainty.laplace(model, rows, prior=p), x) for p in (None, best))
    np.testing.assert_allclose(ours["y_spread"], theirs["y_spread"], rtol=1e-3)


@pytest.mark.torch
@pytest.mark.parametrize("last", ["", "Softmax"])
def test_of_classes_it_is_that_of_pytorch(last):
    torch = pytest.importorskip("torch")
    model = linear(4, 3, last=last)
    draw = np.random.default_rng(0)
    rows = {"x": draw.standard_normal((50, 4)).astype(np.float32), "labels": draw.integers(0, 3, 50)}
    found = run(uncertainty.laplace(model, rows, prior=0.7), rows["x"][:9])
    w, c = (torch.tensor(onnx.numpy_helper.to_array(t)).double() for t in model.graph.initializer)
    x, t = torch.tensor(rows["x"]).double(), torch.tensor(rows["labels"])
    weights = torch.cat([w.T.flatten(), c])

    def logits(weights, x):
        return x @ weights[:12].reshape(3, 4).T + weights[12:]

    def loss(weights):
        return torch.nn.functional.cross_entropy(logits(weights, x), t, reduction="sum")

    # the Hessian in the weights of a linear layer is the Gauss-Newton matrix
    precision = torch.autograd.functional.hessian(loss, weights) + 0.7 * torch.eye(15, dtype=torch.double)
    slopes = torch.func.jacrev(logits)(weights, x[:9])
    variance = torch.einsum("nci,ij,ncj->nc", slopes, torch.linalg.inv(precision), slopes)
    odds = torch.softmax(logits(weights, x[:9]) / torch.sqrt(1 + torch.pi / 8 * variance), 1)
    np.testing.assert_allclose(found["y_spread"], variance.sqrt().numpy(), rtol=1e-4)
    np.testing.assert_allclose(found["y"], odds.numpy(), rtol=1e-4)


def test_kronecker_factors_of_one_output_are_exact(monkeypatch):
    draw = np.random.default_rng(0)
    rows = {"x": draw.standard_normal((50, 4)).astype(np.float32)}
    rows["labels"] = draw.standard_normal((50, 2)).astype(np.float32)
    full = run(uncertainty.laplace(linear(4, 2), rows, prior=0.5), rows["x"])
    monkeypatch.setattr("onnxgrad.uncertainty.last_layer.LARGEST", 0)
    factors = run(uncertainty.laplace(linear(4, 2), rows, prior=0.5), rows["x"])
    np.testing.assert_allclose(factors["y_spread"], full["y_spread"], rtol=1e-5)


def test_binary_scores():
    draw = np.random.default_rng(0)
    rows = {"x": draw.standard_normal((40, 2)).astype(np.float32)}
    rows["labels"] = (rows["x"][:, :1] > 0).astype(np.int64)
    model = linear(2, last="Sigmoid")
    found = run(uncertainty.laplace(model, rows, prior=1.0), rows["x"])
    p = run(model, rows["x"])["y"].astype(float)
    phi = np.c_[rows["x"], np.ones(40)].astype(float)
    covariance = np.linalg.inv((phi * (p * (1 - p))).T @ phi + np.eye(3))
    variance = np.einsum("ni,ij,nj->n", phi, covariance, phi)
    z = np.log(p / (1 - p))[:, 0] / np.sqrt(1 + np.pi / 8 * variance)
    np.testing.assert_allclose(found["y_spread"][:, 0], np.sqrt(variance), rtol=1e-4)
    np.testing.assert_allclose(found["y"][:, 0], 1 / (1 + np.exp(-z)), rtol=1e-4)


def test_far_from_the_data_a_classifier_is_less_sure(digits):
    model, train, _, test = digits
    made = uncertainty.laplace(model, train)
    far = test["x"] + np.float32(2)
    before, after = (onnxgrad.predict(m, {"x": far})["scores"] for m in (model, made))
    odds = np.exp(before - before.max(1, keepdims=True))
    assert after.max(1).mean() < (odds / odds.sum(1, keepdims=True)).max(1).mean() - 0.1
    assert onnxgrad.evaluate(made, test).metrics["accuracy"] > 0.9


def test_what_does_not_end_in_a_layer_is_refused():
    tanh = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y) { y = Tanh (x) }""")
    with pytest.raises(BadInput, match="not that of a linear layer"):
        uncertainty.laplace(tanh, {"x": np.ones((3, 2), np.float32), "labels": np.ones((3, 2), np.float32)})
    with pytest.raises(BadInput, match="prior must be positive"):
        uncertainty.laplace(classifier(), blobs(), prior=0.0)


# --- samples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_an_ensemble_is_the_mean_of_its_members(softmax):
    members = []
    for seed in range(3):
        model = classifier(softmax=softmax)
        for tensor in model.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            moved = array + np.random.default_rng(seed).standard_normal(array.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
        members.append(model)
    x = blobs()["x"]
    found = run(uncertainty.ensemble(members), x)
    each = np.stack([onnxgrad.predict(m, {"x": x})["y"] for m in members]).astype(np.float64)
    np.testing.assert_allclose(found["y"], each.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["y_spread"], each.std(0), rtol=1e-3, atol=1e-6)
    odds = run(uncertainty.ensemble(members, kind="classes"), x)["y"]
    np.testing.assert_allclose(odds.sum(1), 1, rtol=1e-5)
    with pytest.raises(BadInput, match="another architecture"):
        uncertainty.ensemble([members[0], classifier(hidden=5)])
    steeper = onnx.ModelProto()
    steeper.CopyFrom(members[1])
    next(n for n in steeper.graph.node if n.op_type == "Tanh").op_type = "Elu"
    other = onnx.ModelProto()
    other.CopyFrom(steeper)
    next(n for n in other.graph.node if n.op_type == "Elu").attribute.add(name="alpha", type=1, f=0.1)
    with pytest.raises(BadInput, match="another architecture"):
        uncertainty.ensemble([steeper, other])
    with pytest.raises(BadInput, match="the same weights"):
        uncertainty.ensemble([members[0], members[0]])


def test_masks_of_dropout_are_seeded_and_have_their_share():
    x = np.ones((4, 50), np.float32)
    model = linear(50)
    weights = {t.name: onnx.numpy_helper.to_array(t).astype(float) for t in model.graph.initializer}
    inner = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 50] x) => (float[N, 1] y) { d = Dropout (x)  y = Gemm (d, w, b) }""")
    inner.graph.initializer.extend(model.graph.initializer)
    found, again, other = (
        run(uncertainty.dropout(inner, samples=400, seed=s), x) for s in (0, 0, 1)
    )  # a share of 0.5: y = Σ 2·mask·w·x + b
    np.testing.assert_array_equal(found["y"], again["y"])
    assert (found["y"] != other["y"]).all()
    spread = np.sqrt((weights["w"] ** 2).sum())  # of Σ wᵢ·(2·mask - 1)
    np.testing.assert_allclose(found["y_spread"], np.full((4, 1), spread), rtol=0.15)
    np.testing.assert_allclose(found["y"], np.full((4, 1), weights["w"].sum() + weights["b"]), atol=4 * spread / 20)


def test_dropout_is_inserted_where_it_was_left_out(digits):
    model, *_, test = digits
    with pytest.raises(BadInput, match="depends on no Dropout"):
        uncertainty.dropout(model)
    made = uncertainty.dropout(model, samples=16, dropout={"Relu": 0.2}, kind="classes")
    found = run(made, test["x"])
    np.testing.assert_allclose(found["scores"].sum(1), 1, rtol=1e-4)
    right = found["scores"].argmax(1) == test["labels"]
    assert right.mean() > 0.9
    assert found["scores_spread"].max(1)[~right].mean() > 1.1 * found["scores_spread"].max(1)[right].mean()
    assert isinstance(uncertainty.dropout(ir.from_proto(model), samples=2, dropout={"Relu": 0.2}), ir.Model)


# --- conformal sets, temperature -----------------------------------------------------------------------


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_sets_of_digits_contain_the_label(digits, coverage):
    model, _, calibration, test = digits
    made = uncertainty.conformal(model, calibration, coverage=coverage)
    found = onnxgrad.evaluate(made, test, metrics="accuracy,coverage,set_size").metrics
    # a deviation of three standard deviations, of both data sets
    slack = 3 * np.sqrt(coverage * (1 - coverage) * (1 / len(test["x"]) + 1 / len(calibration["x"])))
    assert found["coverage"] == pytest.approx(coverage, abs=slack)
    assert 0 < found["set_size"] < 3
    odds = np.exp(onnxgrad.predict(model, {"x": calibration["x"]})["scores"].astype(float))
    own = (odds / odds.sum(1, keepdims=True))[np.arange(len(odds)), calibration["labels"]]
    inside = run(made, calibration["x"])["scores_set"][np.arange(len(odds)), calibration["labels"]]
    assert inside.sum() == np.ceil((len(own) + 1) * coverage)


def test_intervals_of_a_regression(digits):
    x, t = load_diabetes(return_X_y=True)
    x, t = x.astype(np.float32) * 20, ((t - t.mean()) / t.std()).astype(np.float32)[:, None]
    order = np.random.default_rng(1).permutation(len(x))
    train, calibration, test = ({"x": x[p], "labels": t[p]} for p in np.split(order, [180, 310]))
    trainer = onnxgrad.train(perceptron(10, 1), train, loss="mse", epochs=20, progress=False)
    plain = trainer.inference_model()
    laplace = uncertainty.laplace(plain, train)
    for model in (plain, laplace):  # with a spread, the length of an interval differs from row to row
        made = uncertainty.conformal(model, calibration)
        found = onnxgrad.evaluate(made, test)
        assert found.metrics["coverage"] == pytest.approx(0.9, abs=3 * np.sqrt(0.09 * (1 / 130 + 1 / 132)))
        ends = run(made, test["x"])
        assert (np.ptp(ends["scores_upper"] - ends["scores_lower"]) > 1e-3) == (model is laplace)
    measured = onnxgrad.evaluate(laplace, test).metrics
    assert list(measured) == ["mae", "rmse", "r2", "nll", "coverage", "width"]
    assert measured["coverage"] > 0.75
    assert set(onnxgrad.evaluate(laplace, test, metrics="nll,rmse").metrics) == {"nll", "rmse"}


@pytest.mark.parametrize("shape", ["N, T", "N, 3, T"])
def test_intervals_of_rows_without_a_fixed_size(shape):
    """Every number of a row is covered as often as it should be."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]> g (float[{shape}] x) => (float[{shape}] y) {{ y = Neg (x) }}""")
    draw = np.random.default_rng(0)
    x = draw.standard_normal((500, 4) if shape == "N, T" else (500, 3, 1)).astype(np.float32)
    noise = np.array([0.1, 1, 10, 3][: x.shape[1]]).reshape(x.shape[1:])
    labels = (-x + noise * draw.standard_normal(x.shape)).astype(np.float32)
    found = run(uncertainty.conformal(model, {"x": x, "labels": labels}), x)
    assert found["y_lower"].shape == x.shape
    assert ((found["y_lower"] <= labels) & (labels <= found["y_upper"])).mean(0).min() >= 0.9


def test_too_few_rows_for_a_coverage():
    rows = {k: v[:5] for k, v in blobs().items()}
    with pytest.raises(BadInput, match=r"a coverage of 0.9 needs 9 rows or more, not 5"):
        uncertainty.conformal(classifier(), rows)
    with pytest.raises(BadInput, match="between 0 and 1"):
        uncertainty.conformal(classifier(), rows, coverage=90)


@pytest.mark.parametrize("softmax", [False, True])
def test_a_temperature_calibrates(softmax):
    rows, draw = blobs(400), np.random.default_rng(0)
    rows["labels"] = np.where(draw.random(400) < 0.2, draw.integers(0, 3, 400), rows["labels"])
    settings = {"loss": "cross_entropy", "learning_rate": 0.03, "epochs": 5, "progress": False}
    trainer = onnxgrad.train(classifier(softmax=softmax), rows, **settings)
    model = trainer.inference_model()
    for tensor in model.graph.initializer:
        if tensor.name == "w2":
            large = 9 * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(large, "w2"))
    made = uncertainty.scaled(model, rows)
    before, after = (onnxgrad.evaluate(m, rows, metrics="log_loss,ece,accuracy,temperature") for m in (model, made))
    assert after.metrics["accuracy"] == before.metrics["accuracy"]
    assert after.metrics["log_loss"] < before.metrics["log_loss"]
    assert before.metrics["temperature"] > 1.5
    assert after.metrics["temperature"] == pytest.approx(1, abs=1e-3)


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_writes_models_of_each_method(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs(200))
    training = ["--loss", "cross_entropy", "--epochs", "1", "--samples", "2", "--redraw"]
    for method, flags, outputs in (
        ("dropout", ["--dropout", "Tanh=0.1", "--kind", "classes"], "y, y_spread"),
        ("laplace", ["--data", "d.npz"], "y, y_spread"),
        ("ensemble", ["--data", "d.npz", *training], "y, y_spread"),
        ("conformal", ["--data", "d.npz", "--coverage", "0.8"], "y, y_set"),
        ("temperature", ["--data", "d.npz"], "y"),
    ):
        done = command("uncertain", "m.onnx", "--method", method, *flags, "-o", f"{method}.onnx", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"({method}: {outputs})\n")
        assert_sound(onnx.load(tmp_path / f"{method}.onnx"))
    done = command("evaluate", "conformal.onnx", "--data", "d.npz", "--metrics", "coverage", cwd=tmp_path)
    assert float(done.stdout.split()[1]) == pytest.approx(0.8, abs=0.01)
    members = ["--member", "laplace.onnx", "-o", "e.onnx"]
    done = command("uncertain", "m.onnx", "--method", "ensemble", *members, cwd=tmp_path)
    assert (done.returncode, "another architecture" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "laplace"], "--method laplace needs --data"),
        (["--method", "ensemble", "--data", "d.npz"], "say which loss to use with --loss"),
        (["--method", "dropout"], "depends on no Dropout"),
        (["--method", "dropout", "--kind", "many", "--dropout", "Tanh=0.1"], "kind is one of classes, binary, numbers"),
    ],
)
def test_what_the_command_refuses(tmp_path, flags, message):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    done = command("uncertain", "m.onnx", *flags, "-o", "u.onnx", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "u.onnx").exists()


@pytest.mark.complete
@pytest.mark.parametrize("method", ["conformal", "dropout", "ensemble"])
def test_intervals_of_a_table_by_the_command_have_their_coverage(tmp_path, method):
    """Intervals of the prediction alone, and of one with a spread; the noise grows with a column."""
    draw, columns = np.random.default_rng(5), ["--input", "x=a,b,c", "--labels", "price"]
    a, b, c = draw.uniform(-2, 2, (3, 1500))
    price = np.sin(a) + 0.3 * b * c + 0.2 * draw.standard_normal(1500) * (1 + np.abs(a))
    for name, part in {"train": slice(500), "held": slice(500, 900), "test": slice(900, None)}.items():
        rows = np.c_[a, b, c, price][part]
        np.savetxt(tmp_path / f"{name}.csv", rows, delimiter=",", header="a,b,c,price", comments="")
    onnx.save(perceptron(3, 1), tmp_path / "m.onnx")
    lines = [
        ("train", "m.onnx", "--data", "train.csv", *columns, "--loss", "mse", "--epochs", "5", "-o", "plain.onnx"),
        ("uncertain", "plain.onnx", "--data", "held.csv", *columns, "--method", "conformal", "-o", "sets.onnx"),
    ]
    if method != "conformal":
        own = ["--data", "train.csv", *columns, "--loss", "mse", "--epochs", "3", "--redraw", "--samples", "3"]
        own = ["--dropout", "Relu=0.1", "--samples", "8"] if method == "dropout" else own
        lines.insert(1, ("uncertain", "plain.onnx", "--method", method, *own, "-o", "spread.onnx"))
        lines[2] = (lines[2][0], "spread.onnx", *lines[2][2:])
    for line in (*lines, ("evaluate", "sets.onnx", "--data", "test.csv", *columns, "--metrics", "coverage")):
        done = command(*line, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    slack = 3 * np.sqrt(0.09 * (1 / 400 + 1 / 600))  # three standard deviations, of both data sets
    assert float(done.stdout.split()[1]) == pytest.approx(0.9, abs=slack)
