"""Schedules of the learning rate are PyTorch's, and are scalars in the graph."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import attach, compile_step
from onnxgrad.training.optim.schedules import Schedule
from tests.training.nets import mlp
from tests.training.optim.test_update import close, of_torch, trained

# --- schedules ---------------------------------------------------------------------------------------

SCHEDULES = {
    "constant": lambda s, o: s.LambdaLR(o, lambda t: 1.0),
    "constant:warmup=5": lambda s, o: s.LambdaLR(o, lambda t: min(1, (t + 1) / 5)),
    "step:size=7,gamma=0.5": lambda s, o: s.StepLR(o, 7, 0.5),
    "exponential:gamma=0.9": lambda s, o: s.ExponentialLR(o, 0.9),
    "linear:total=20,start=0.3,end=0.9": lambda s, o: s.LinearLR(o, 0.3, 0.9, 20),
    "polynomial:total=20,power=2": lambda s, o: s.PolynomialLR(o, 20, 2),
    "cosine:total=30": lambda s, o: s.CosineAnnealingLR(o, 30),
    "cosine:total=25,end=0.1,warmup=5": lambda s, o: s.LambdaLR(
        o, lambda t: (t + 1) / 5 if t < 5 else 0.1 + 0.45 * (1 + np.cos(np.pi * min((t - 5) / 25, 1)))
    ),
    "one_cycle:total=30": lambda s, o: s.OneCycleLR(o, 0.1, 30, cycle_momentum=False),
    "inverse_sqrt:scale=4": lambda s, o: s.LambdaLR(o, lambda t: 1 / np.sqrt(1 + t / 4)),
}


@pytest.mark.torch
@pytest.mark.parametrize("text", SCHEDULES)
def test_schedules_are_those_of_torch(text):
    """The factor that Python computes, and the training that the step graph does by itself."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = SCHEDULES[text](torch.optim.lr_scheduler, optimizer)
    factors = []
    for _ in range(30):
        factors.append(optimizer.param_groups[0]["lr"] / 0.1)
        optimizer.step()
        schedule.step()
    ours = Schedule.of(text)
    np.testing.assert_allclose([ours(t) for t in range(30)], factors, rtol=1e-6, atol=1e-9)
    if text not in ("one_cycle:total=30", "cosine:total=25,end=0.1,warmup=5", "step:size=7,gamma=0.5"):
        return  # the same formula; three of them in a graph

    def scaled(torch, p, o, t):
        o.param_groups[0]["lr"] = 0.1 * factors[t]

    state, _ = trained("sgd", 30, learning_rate=0.1, schedule=text)
    close(state, of_torch(lambda o, p: o.SGD(p.values(), lr=0.1), steps=30, every=scaled))


def test_a_schedule_is_scalars_only():
    """However many tensors: one chain of double scalars."""
    plain, scheduled = (
        compile_step(attach(mlp(), loss="mse", optimizer="adam", schedule=s)).model.graph
        for s in (None, "cosine:total=9")
    )
    assert len(scheduled) - len(plain) <= 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps:size=3", "there is no schedule 'steps'; there are: constant, step"),
        ("step", "the schedule 'step' needs size\n  hint: write step:size=100"),
        ("step:size=0", "size must be positive, not 0"),
        ("cosine:total=ten", "total must be a number ≥ 0, not 'ten'"),
        ("cosine:total=10,begin=1", "has no option 'begin'; it has: total, end, warmup"),
        ("linear:total=10,warmup=0.5", "warmup must be a number of steps, not 0.5"),
        ("one_cycle:total=3", "leaves no steps to rise or to fall"),
        ("cosine:total", "is not written as name:key=value"),
    ],
)
def test_bad_schedules(text, message):
    with pytest.raises(BadInput, match=message):
        attach(mlp(), loss="mse", schedule=text)
