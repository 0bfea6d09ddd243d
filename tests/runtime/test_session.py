"""Settings of a session that ONNX Runtime is given."""

import sys
from types import SimpleNamespace

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


@pytest.fixture
def adjusted(monkeypatch):
    """The parameters of the C library that large sessions set, in order; every model is a large one."""
    found = []
    library = SimpleNamespace(mallopt=lambda *parameter: found.append(parameter), malloc_trim=lambda _: None)
    monkeypatch.setattr(sessions.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sessions, "_LARGE", 1)
    for name in [n for n in sessions.os.environ if "MALLOC_" in n or n == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="of the C library of Linux")
def test_large_blocks_are_returned_while_a_large_session_is_created(adjusted, monkeypatch):
    def load(*args, **kwargs):
        before.extend(adjusted)
        return create(*args, **kwargs)

    before, create = [], sessions.onnxruntime.InferenceSession
    monkeypatch.setattr(sessions.onnxruntime, "InferenceSession", load)
    Session(onnx.parser.parse_model(PRODUCT), Options(target="portable"))
    assert before == [(-3, 1 << 20)]
    assert adjusted == [(-3, 1 << 20), (-3, 1 << 25), (-1, 1 << 26)]


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")]
)
def test_parameters_that_the_user_has_set_stay(name, value, adjusted, monkeypatch):
    monkeypatch.setenv(name, value)
    Session(onnx.parser.parse_model(PRODUCT), Options(target="portable"))
    assert adjusted == []


def test_a_small_session_sets_no_parameter(adjusted, monkeypatch):
    monkeypatch.setattr(sessions, "_LARGE", 1 << 20)
    Session(onnx.parser.parse_model(PRODUCT), Options(target="portable"))
    assert adjusted == []


def test_the_first_run_of_a_large_session_gives_back_what_the_caller_has_dropped(monkeypatch):
    given_back = []
    monkeypatch.setattr(sessions, "_LARGE", 1)
    model, x = ir.from_proto(onnx.parser.parse_model(PRODUCT)), np.ones((5, 3), np.float32)
    session = Session(model, Options(target="portable"))
    monkeypatch.setattr(sessions, "give_back", lambda: given_back.append(1))
    for _ in range(2):
        session.run({"x": x, "s": x[0]})
    assert given_back == [1]
