"""Random programs of loops, branches and sequences: as many directions at once as one by one."""

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from onnxgrad import jacobian, jvp, vjp
from tests.control_flow.test_random_programs import model, programs
from tests.models import assert_no_traps, normal
from tests.transforms.numbers import session


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(programs(), st.sampled_from(["x", "w"]), st.sampled_from([3, "K"]))
def test_directions_of_a_random_program(text, wrt, count):
    source = model(text)
    feeds = {"x": 0.5 * normal(2), "w": 0.5 * normal(2), "n": np.array(2)}
    seeds = normal(3, 2)
    for derive, seed, result in ((vjp, "y_cotangent", f"{wrt}_grad"), (jvp, f"{wrt}_tangent", "y_tangent")):
        one, derived = session(derive(source, wrt=wrt)), derive(source, wrt=wrt, directions=count)
        assert_no_traps(derived, source)
        want = np.stack([one(feeds | {seed: s})[result] for s in seeds])
        np.testing.assert_allclose(session(derived)(feeds | {seed: seeds})[result], want, rtol=1e-4, atol=1e-5)
    rows, columns = (
        session(jacobian(source, wrt=wrt, mode=m))(feeds)[f"y_{wrt}_jacobian"] for m in ("reverse", "forward")
    )
    np.testing.assert_allclose(rows, columns, rtol=1e-4, atol=1e-5)
