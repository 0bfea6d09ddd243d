"""Settings of a session that ONNX Runtime is given."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime import session as sessions

PRODUCT = """<ir_version: 10, opset_import: ["" : 21]> m (float[N,3] x, float[3] s) => (float[N,2] y, float[3] t)
    <float[3,2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) t = Neg(s) }"""


def is_packed(options, *, state):
    model = ir.from_proto(onnx.parser.parse_model(PRODUCT))
    made = sessions.create(model, options, renewed={"s": "t"} if state else None).get_session_options()
    try:
        return made.get_session_config_entry("session.disable_prepacking") != "1"
    except RuntimeError:  # the entry was not set
        return True


@pytest.mark.parametrize(("fewest", "state", "packed"), [(1, True, False), (1 << 20, True, True), (1, False, True)])
def test_only_large_steps_do_without_packed_copies_of_constants(monkeypatch, fewest, state, packed):
    monkeypatch.setattr(sessions, "_UNPACKED", fewest)
    assert is_packed(Options(), state=state) is packed
    assert is_packed(Options(packed=True), state=state)
    assert not is_packed(Options(packed=False), state=state)


def test_products_are_the_same_without_packed_copies():
    model, x = onnx.parser.parse_model(PRODUCT), np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    found = [Session(model, Options(packed=p)).run({"x": x, "s": x[0]})["y"] for p in (True, False)]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_the_former_name_of_resolve_target_warns():
    with pytest.warns(DeprecationWarning, match=r"Options\.settled is deprecated; it is called resolve_target now"):
        assert Options().settled() == Options().resolve_target()


def test_the_first_run_of_a_large_session_gives_back_what_the_caller_has_dropped(monkeypatch):
    given_back = []
    monkeypatch.setattr(sessions, "_LARGE", 1)
    model, x = ir.from_proto(onnx.parser.parse_model(PRODUCT)), np.ones((5, 3), np.float32)
    session = Session(model, Options(target="portable"))
    monkeypatch.setattr(sessions, "give_back", lambda: given_back.append(1))
    for _ in range(2):
        session.run({"x": x, "s": x[0]})
    assert given_back == [1]
