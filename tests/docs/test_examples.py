"""The examples, with small settings: each must show what it claims, and draw its picture."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launching import mpiexec
from tests.npm import MAY_INSTALL

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example as it runs: with its own folder first on the path."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == EXAMPLES:
            del sys.modules[name]


@pytest.fixture
def picture(tmp_path):
    """A file for a picture, which must be drawn."""
    path = tmp_path / "picture.png"
    yield str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not importlib.util.find_spec("rapidocr_onnxruntime"), reason="no rapidocr_onnxruntime")
def test_saliency(example, picture):
    m = example("saliency")
    net = m.Function(m.classifier(), outputs=m.SCORES)
    for angle, (scores, saliency, cam) in m.main(picture).items():
        label, image = int(angle == 180), m.written(m.WORDS, angle)
        assert scores.argmax() == label
        lost = [scores[label] - net(m.covered(image, cam, highest))[0, label] for highest in (True, False)]
        assert lost[0] > 1 + 2 * lost[1]
        at = np.unravel_index(saliency.argmax(), saliency.shape)  # the pixel that matters most, by differences
        ends = np.stack([image[0], image[0]])
        ends[:, :, *at] += np.array([0.01, -0.01])[:, None]
        slopes = net.vjp(wrt="x")(image, np.eye(2)[[label]])[0, :, *at]
        up, down = net(ends)[:, label]
        assert up - down == pytest.approx(0.02 * slopes.sum(), rel=0.1)


@pytest.mark.complete
def test_adversarial(example, picture):
    found = example("adversarial").main(picture, epochs=2)
    noise, fgsm, pgd = (np.array(found[k]) for k in ("random noise", "FGSM", "PGD"))
    assert noise[0] == fgsm[0] == pgd[0] > 0.9
    assert noise[3] > 0.85
    assert (pgd[2:] < fgsm[2:]).all()
    assert (fgsm[2:] < noise[2:] - 0.2).all()
    assert pgd[3] < 0.3


def test_attacks_stay_within_their_size(example):
    m = example("adversarial")
    net, x, labels = m.classifier(1)
    x, labels = x[:20], labels[:20]
    for attacked in (m.fgsm(net, x, labels, 0.1), m.pgd(net, x, labels, 0.1)):
        assert np.abs(attacked - x).max() <= 0.1 + 1e-6
        assert attacked.min() >= 0
        assert attacked.max() <= 1


def test_input_optimization(example, picture):
    sure = example("input_optimization").main(picture, epochs=2, steps=100)
    assert sure.mean() > 0.8
    assert (sure > 0.1).all()


def test_forces(example, picture):
    m = example("forces")
    x, waves, modes = m.main(picture)
    assert np.abs(waves[:6]).max() < 1
    np.testing.assert_allclose(waves[6:], [1648.5, 3832.2, 3942.5], atol=2)
    np.testing.assert_allclose(modes.T @ modes, np.eye(9), atol=1e-10)
    energy = m.Function(m.ENERGY)
    np.testing.assert_allclose(energy.grad(wrt="x")(x), 0, atol=1e-6)
    bent = x + np.random.default_rng(0).normal(0, 0.1, x.shape)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-6
        slope = (energy(bent + step) - energy(bent - step)) / 2e-6
        assert energy.grad(wrt="x")(bent)[at] == pytest.approx(float(slope), abs=1e-7)
    assert np.abs(energy.grad(wrt="x")(bent).sum(0)).max() < 1e-12  # no force on the whole


def test_trust_region(example, picture):
    m = example("trust_region")
    found, before, after = m.main(picture, runs=512)
    assert before > 0.8
    assert after < 0.4
    assert ((found >= m.LOW) & (found <= m.HIGH)).all()


def test_mpc(example, picture):
    m = example("mpc")
    controlled, alone = m.main(picture)
    assert np.abs(np.degrees(controlled[-10:, 2])).max() < 3
    assert np.abs(np.degrees(alone[:, 2])).max() > 90
    state, force = np.array([[0.1, 0.2, 0.3, -0.4]]), np.array([[2.0]])
    slopes = m.SLOPES(state, force)
    for name, k in (("state", 4), ("force", 1)):
        for i in range(k):
            step = {"state": np.zeros((1, 4)), "force": np.zeros((1, 1))}
            step[name][0, i] = 1e-6
            up, down = (m.STEP(state + s * step["state"], force + s * step["force"])[0] for s in (1, -1))
            np.testing.assert_allclose(slopes[name][0, :, i], (up - down) / 2e-6, atol=1e-8)


@pytest.mark.skipif(not importlib.util.find_spec("casadi"), reason="casadi is not installed")
def test_mpc_casadi(example, picture):
    """IPOPT on the files for CasADi finds the plan that linearised steps converge to."""
    m = example("mpc_casadi")
    found = m.main(picture, ticks=3, horizon=12)
    assert found.shape == (4, 4)
    start, plan = np.array([0.1, -0.2, 0.1, 0.0]), np.zeros(12)
    for _ in range(30):
        plan = example("mpc").improve(start, plan)
    assert m.Controller(12)(start) == pytest.approx(plan[0], rel=1e-5)


@pytest.mark.skipif(os.environ.get(MAY_INSTALL) != "1", reason=f"no recording; {MAY_INSTALL}=1 lets tests fetch 10 MB")
def test_voice(example, picture):
    found = example("voice").main(picture, rounds=2, mixes=8)
    before, after = (np.array(found[k]) for k in ("before", "after"))
    assert before[0] > 0.97
    assert after[0] > before[0] - 0.02
    assert (after[3:] > before[3:] + 0.1).all()


def test_sensitivity(example, picture):
    from scipy.stats import spearmanr

    sensitivity, importance = example("sensitivity").main(picture)
    assert spearmanr(sensitivity, importance).statistic > 0.85
    assert importance[np.argmax(sensitivity)] > 1.5 * np.median(importance)


def test_distributed(example):
    """One process learns, and so do ranks of which each has its part of a batch."""
    m = example("distributed")
    trainer, found = m.main(epochs=2)
    assert trainer.ranks is None
    assert found["accuracy"] > 0.9
    done = mpiexec(2, str(EXAMPLES / "distributed.py"))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"2 rank\(s\): loss 0\.\d+, accuracy 9\d\.\d% on unseen digits\n", done.stdout)


def test_search_optuna(example):
    optuna = pytest.importorskip("optuna", reason="no optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = example("search_optuna").main(trials=12)
    states = [t.state.name for t in study.trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert study.best_value < 0.35


@pytest.mark.complete
def test_search_ray(tmp_path):
    pytest.importorskip("ray.tune", reason="no ray")
    quiet = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **quiet, "HOME": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    command = [sys.executable, str(EXAMPLES / "search_ray.py"), "3"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"best loss (\S+) with", done.stdout)[1]) < 1.0


def test_logistic(example):
    parameters, apart = example("logistic").main()
    assert set(parameters) == {"weights", "bias"}
    assert apart < 1e-4


def test_neural_net(example, picture):
    m = example("neural_net")
    _, losses, right = m.main(picture, steps=150)
    assert losses[-1] < 0.1 * losses[0]
    assert right > 0.95


@pytest.mark.complete
def test_ode_fit(example, picture):
    m = example("ode_fit")
    found, before, after = m.main(picture)
    assert after < 0.25 < before
    from scipy.integrate import odeint  # the solver must solve

    births, deaths, kills, gains, *start = np.exp(found)
    exact = odeint(lambda z, _: [(births - kills * z[1]) * z[0], (gains * z[0] - deaths) * z[1]], start, np.arange(21))
    np.testing.assert_allclose(np.asarray(m.solution(found)), np.log(exact), atol=1e-3)


def test_every_example_is_tested_and_shown():
    """Modules that are no examples themselves hold what several share."""
    scripts = {p.stem for p in EXAMPLES.glob("*.py") if "__main__" in p.read_text()}
    here = Path(__file__).read_text()
    gallery = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for name in scripts:
        assert f"def test_{name}(" in here
        assert f"examples/{name}.py" in gallery
        draws = "picture" in (EXAMPLES / f"{name}.py").read_text()
        assert (EXAMPLES.parent / "docs" / "images" / f"{name}.png").exists() == draws


def test_draw_graph(example, picture):
    assert example("draw_graph").main(picture) == (2, 7)


def test_sparse_newton(example):
    pytest.importorskip("scipy")
    u, sizes = example("sparse_newton").main(12)
    assert len(sizes) <= 6  # it converges quadratically
    assert sizes[-1] < 1e-13
    assert (u > 0).all()
    np.testing.assert_allclose(u, u.T, atol=1e-12)


def test_pinn(example):
    assert example("pinn").main(300) < 0.2  # u itself is 1 in the middle


def test_influence(example):
    pytest.importorskip("scipy")
    predicted, real = example("influence").main(3)
    np.testing.assert_allclose(predicted, real, rtol=0.2)


@pytest.mark.complete
def test_quantize(example):
    for name, (floats, calibrated, rounded, trained) in example("quantize").main().items():
        assert floats > 0.94, name
        assert floats - calibrated > 0.01, name
        assert rounded > calibrated, name
        assert trained - calibrated > 0.5 * (floats - calibrated), name


def test_federated(example, monkeypatch):
    pytest.importorskip("flwr", reason="no flwr, which wants older versions of what is pinned here")
    pytest.importorskip("ray", reason="no ray, which flwr[simulation] brings")
    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "0")
    together, alone = example("federated").main(rounds=8)
    assert len(together) == 8
    assert together[-1] > 0.6
    assert alone < 0.3  # it knows three digits of ten
