"""Keep a pole upright on a cart with CasADi: its solver runs the .onnx dynamics, and their derivatives as files.

    pip install onnxgrad casadi matplotlib
    python examples/mpc_casadi.py [picture.png]

`family` writes the model of examples/mpc.py with the derivatives that CasADi looks for. At every tick CasADi states the
whole plan as one nonlinear program (multiple shooting: the states of the plan are unknowns, the model links them), and
IPOPT solves it with exact Jacobians and an exact Hessian of the Lagrangian.
"""

import os
import sys
import tempfile
from pathlib import Path

import casadi as ca
import numpy as np
import onnxruntime
from mpc import EFFORT, LIMIT, STEP, WEIGHTS

from onnxgrad.interop.casadi import family

# CasADi loads ONNX Runtime itself; the library lies in the wheel
for library in Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"):
    os.environ.setdefault("CASADI_ONNXRUNTIME_LIB", str(library))


class Controller:
    """The nonlinear program of a plan over `horizon` ticks, solved from the last plan at every tick."""

    def __init__(self, horizon: int) -> None:
        self.folder = tempfile.TemporaryDirectory()  # CasADi opens a derivative when it first needs it
        step = ca.GraphBuilder(str(family(STEP.model, self.folder.name, "cart", {"N": 1})[0])).create("cart")
        self.opti = opti = ca.Opti()
        self.state, self.force = opti.variable(4, horizon + 1), opti.variable(1, horizon)
        self.start = opti.parameter(4)
        opti.subject_to(self.state[:, 0] == self.start)
        for t in range(horizon):
            opti.subject_to(step(self.state[:, t].T, self.force[:, t]) == self.state[:, t + 1].T)
        opti.subject_to(opti.bounded(-LIMIT, ca.vec(self.force), LIMIT))
        opti.minimize(ca.sumsqr(ca.diag(WEIGHTS) @ self.state) + EFFORT**2 * ca.sumsqr(self.force))
        opti.solver("ipopt", {"print_time": False}, {"print_level": 0, "sb": "yes", "max_iter": 200})

    def __call__(self, state: np.ndarray) -> float:
        """The first force of the best plan from `state`."""
        self.opti.set_value(self.start, state)
        found = self.opti.solve()
        self.opti.set_initial(self.state, found.value(self.state))
        self.opti.set_initial(self.force, found.value(self.force))
        return float(np.ravel(found.value(self.force))[0])


def main(picture: str | None = "mpc_casadi.png", ticks: int = 100, horizon: int = 30) -> np.ndarray:
    """The states over time, from a pole that leans by 35 degrees."""
    control = Controller(horizon)
    states, forces = [np.array([0.0, 0.0, np.radians(35), 0.0])], []
    for _ in range(ticks):
        forces.append(control(states[-1]))
        states.append(STEP(states[-1][None], [[forces[-1]]])[0])
    found = np.array(states)
    print(f"after {ticks * 0.04:.1f} s: {np.degrees(found[-1, 2]):.2f}° from upright, {found[-1, 0]:.2f} m away")
    print(f"farthest way {np.abs(found[:, 0]).max():.2f} m, strongest force {np.abs(forces).max():.1f} N")
    if picture:
        import matplotlib.pyplot as plt

        time = 0.04 * np.arange(ticks + 1)
        figure, axis = plt.subplots(figsize=(7, 3))
        axis.plot(time, np.degrees(found[:, 2]), label="angle (degrees)")
        axis.plot(time, 10 * found[:, 0], label="cart (0.1 m)")
        axis.step(time[:-1], forces, where="post", label="force (N)")
        axis.set(xlabel="seconds")
        axis.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
