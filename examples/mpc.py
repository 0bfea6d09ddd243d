"""Keep a pole upright on a cart: model predictive control, linearised by a Jacobian at every step.

    pip install onnxgrad[scipy,train]
    python examples/mpc.py [picture.png]

At every tick the controller predicts its plan, linearises the dynamics at every state of the prediction (one Jacobian
with a batch axis gives all the A and B), and solves for the change of the plan that best brings the pole upright,
within the limits of the motor. The dynamics are an ONNX model: any learned one could take its place.
"""

import sys

import numpy as np
import onnx
from scipy.optimize import lsq_linear

from onnxgrad import Function

# Cart of 1 kg, pole of 0.1 kg and half length 0.5 m (Barto, Sutton and Anderson 1983); state: x, v, angle, spin
STEP = Function(
    onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21]>
    cart (double[N, 4] state, double[N, 1] force) => (double[N, 4] next)
    <double dt = {0.04}, double g = {9.8}, double mass = {1.1}, double pole = {0.05}, double ratio = {0.0909090909},
     double length = {0.5}, double bar = {1.3333333333}> {
        x, v, angle, spin = Split <axis = 1, num_outputs = 4> (state)
        sine = Sin (angle)
        cosine = Cos (angle)
        spin2 = Mul (spin, spin)
        swing = Mul (spin2, sine)
        pull = Mul (swing, pole)
        push = Add (force, pull)
        a0 = Div (push, mass)
        fall = Mul (g, sine)
        drag = Mul (cosine, a0)
        torque = Sub (fall, drag)
        c2 = Mul (cosine, cosine)
        c2m = Mul (ratio, c2)
        inertia0 = Sub (bar, c2m)
        inertia = Mul (length, inertia0)
        turn = Div (torque, inertia)
        back = Mul (turn, cosine)
        lag = Mul (back, pole)
        lagm = Div (lag, mass)
        a = Sub (a0, lagm)
        rates = Concat <axis = 1> (a, turn)
        speeds0 = Concat <axis = 1> (v, spin)
        gain = Mul (dt, rates)
        speeds = Add (speeds0, gain)
        places0 = Concat <axis = 1> (x, angle)
        way = Mul (dt, speeds)
        places = Add (places0, way)
        xn, an = Split <axis = 1, num_outputs = 2> (places)
        vn, sn = Split <axis = 1, num_outputs = 2> (speeds)
        next = Concat <axis = 1> (xn, vn, an, sn)
    }"""),
    threads=1,
)
SLOPES = STEP.jacobian(wrt=["state", "force"], batch=0)
WEIGHTS = np.sqrt([1.0, 0.1, 10.0, 0.1])  # what matters: the angle, and where the cart is
LIMIT, EFFORT = 10.0, 0.03  # newtons, and their price


def improve(state: np.ndarray, plan: np.ndarray) -> np.ndarray:
    """The plan of forces after one linearised step towards the best one."""
    states = [state]
    for force in plan:
        states.append(STEP(states[-1][None], [[force]])[0])
    slopes = SLOPES(np.array(states[:-1]), plan[:, None])
    moved, rows = np.zeros((4, len(plan))), []  # how the present state moves with every force of the plan
    for t, (a, b) in enumerate(zip(slopes["state"], slopes["force"])):
        moved = a @ moved
        moved[:, t] += b[:, 0]
        rows.append(WEIGHTS[:, None] * moved)
    matrix = np.vstack([*rows, EFFORT * np.eye(len(plan))])
    goal = -np.concatenate([(WEIGHTS * np.array(states[1:])).ravel(), EFFORT * plan])
    return plan + lsq_linear(matrix, goal, bounds=(-LIMIT - plan - 1e-9, LIMIT - plan + 1e-9)).x


def main(picture: str | None = "mpc.png", ticks: int = 100, horizon: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The states over time, with control and without, from a pole that leans by 35 degrees."""
    start = np.array([0.0, 0.0, np.radians(35), 0.0])
    states, left, forces, plan = [start], [start], [], np.zeros(horizon)
    for _ in range(ticks):
        plan = improve(states[-1], plan)
        forces.append(plan[0])
        states.append(STEP(states[-1][None], [[plan[0]]])[0])
        left.append(STEP(left[-1][None], [[0.0]])[0])
        plan = np.append(plan[1:], 0.0)
    controlled, alone = np.array(states), np.array(left)
    print(
        f"after {ticks * 0.04:.1f} s: {np.degrees(controlled[-1, 2]):.2f}° from upright, {controlled[-1, 0]:.2f} m away"
    )
    print(f"farthest way {np.abs(controlled[:, 0]).max():.2f} m, strongest force {np.abs(forces).max():.1f} N")
    if picture:
        import matplotlib.pyplot as plt

        time = 0.04 * np.arange(ticks + 1)
        figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4), sharex=True)
        above.plot(time, np.degrees(controlled[:, 2]), label="angle, controlled")
        above.plot(time, np.degrees(alone[:, 2]), "--", label="angle, left alone")
        above.set(ylabel="degrees", ylim=(-60, 180))
        above.legend(fontsize="small")
        below.plot(time, controlled[:, 0], label="cart (m)")
        below.step(time[:-1], np.array(forces) / 10, where="post", label="force (10 N)")
        below.set(xlabel="seconds")
        below.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return controlled, alone


if __name__ == "__main__":
    main(*sys.argv[1:])
