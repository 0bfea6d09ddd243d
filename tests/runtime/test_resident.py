"""The machine with resident state is exactly the one that feeds everything, and faster."""

import dataclasses
import errno
import itertools
import subprocess
import sys
import textwrap
import time
import weakref

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.ir.constants import known_value
from onnxgrad.model_io.aside import KeptTensor
from onnxgrad.runtime import Options, ReferenceSession, Resident, Session, Slot
from onnxgrad.runtime import session as sessions
from tests.runtime.fed import Fed

# One step of momentum on a net of two layers, with the updates placed as early as the data allow, so that
# a machine which wrote a parameter over itself would let later nodes read the new value.
STEP = """
<ir_version: 10, opset_import: ["": 21]>
step (float[N,IN] x, float[N,OUT] t, float[IN,H] w1, float[H,OUT] w2, float[IN,H] v1, float[H,OUT] v2,
      int64 k)
  => (float[IN,H] w1n, float[H,OUT] w2n, float[IN,H] v1n, float[H,OUT] v2n, int64 kn, float loss,
      float[N,OUT] y)
{
  lr = Constant <value = float {0.05}> ()
  mu = Constant <value = float {0.9}> ()
  one = Constant <value = int64 {1}> ()
  h = MatMul (x, w1)  a = Tanh (h)  y = MatMul (a, w2)
  d = Sub (y, t)  dd = Mul (d, d)  loss = ReduceMean <keepdims = 0> (dd)
  at = Transpose (a)  g2 = MatMul (at, d)
  mv2 = Mul (mu, v2)  v2n = Add (mv2, g2)  s2 = Mul (lr, v2n)  w2n = Sub (w2, s2)
  w2t = Transpose (w2)  da = MatMul (d, w2t)
  aa = Mul (a, a)  daa = Mul (da, aa)  dh = Sub (da, daa)
  xt = Transpose (x)  g1 = MatMul (xt, dh)
  mv1 = Mul (mu, v1)  v1n = Add (mv1, g1)  s1 = Mul (lr, v1n)  w1n = Sub (w1, s1)
  kn = Add (k, one)
}
"""


def model(text: str, **sizes: int) -> ir.Model:
    for name, size in sizes.items():
        text = text.replace(f",{name}]", f",{size}]").replace(f"[{name},", f"[{size},")
    proto = onnx.parser.parse_model(text)
    onnx.checker.check_model(proto, full_check=True)
    return ir.from_proto(proto)


def bits(arrays):
    return {name: (a.shape, a.dtype, a.tobytes()) for name, a in arrays.items()}


def slots(rng, n_in, h, out):
    def normal(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    return {
        "w1": Slot("w1", "w1n", normal(n_in, h)),
        "w2": Slot("w2", "w2n", normal(h, out)),
        "v1": Slot("v1", "v1n", np.zeros((n_in, h), np.float32)),
        "v2": Slot("v2", "v2n", np.zeros((h, out), np.float32)),
        "k": Slot("k", "kn", np.array(0, np.int64)),
    }


def batches(rng, n, n_in, out, sizes=(32,)):
    return [
        {
            "x": rng.standard_normal((sizes[i % len(sizes)], n_in)).astype(np.float32),
            "t": rng.standard_normal((sizes[i % len(sizes)], out)).astype(np.float32) * 0.1,
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [(32,), (32, 32, 5, 1)], ids=["full", "partial"])
def test_ping_pong_equals_feeding_everything_bit_for_bit(threads, sizes):
    rng = np.random.default_rng(0)
    step, state = model(STEP, IN=64, H=256, OUT=128), slots(rng, 64, 256, 128)
    options = Options(threads=threads)
    fast = Resident(step, state, ["loss", "y"], options)
    slow = Fed(Session(step, options), step, state, ["loss", "y"])
    for batch in batches(rng, 9, 64, 128, sizes):
        a, b = fast.step(batch), slow.step(batch)
        assert bits(a) == bits(b)
        assert bits(fast.state()) == bits(slow.state())
    assert fast.state()["k"] == 9


def test_it_learns_as_the_reference_evaluator_does():
    rng = np.random.default_rng(1)
    step, state = model(STEP, IN=4, H=8, OUT=3), slots(rng, 4, 8, 3)
    fast, slow = Resident(step, state, ["loss"]), Fed(ReferenceSession(step), step, state, ["loss"])
    (batch,) = batches(rng, 1, 4, 3)
    losses = []
    for _ in range(20):
        losses.append(float(fast.step(batch)["loss"]))
        assert losses[-1] == pytest.approx(float(slow.step(batch)["loss"]), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


def test_a_late_reader_of_a_parameter_sees_the_value_before_the_step():
    # Trap: with the output bound onto the memory of its own input, `seen` would be the sum of w + 1.
    text = """<ir_version: 10, opset_import: ["": 21]>
    step (float[8] w) => (float[8] wn, float seen) {
      one = Constant <value = float {1}> () wn = Add (w, one)
      z = ReduceSum <keepdims = 0> (wn) nought = Constant <value = float {0}> () zz = Mul (z, nought)
      late = Add (w, zz) seen = ReduceSum <keepdims = 0> (late) }"""
    machine = Resident(model(text), {"w": Slot("w", "wn", np.zeros(8, np.float32))}, ["seen"])
    assert [float(machine.step({})["seen"]) for _ in range(4)] == [0, 8, 16, 24]
    assert machine.state()["w"].tolist() == [4] * 8


def test_no_binding_reads_and_writes_the_same_memory():
    machine = Resident(model(STEP, IN=4, H=8, OUT=3), slots(np.random.default_rng(0), 4, 8, 3))
    for read in range(2):
        reads = {id(a) for a in machine._buffers[read].values()}
        writes = {id(a) for a in machine._buffers[1 - read].values()}
        assert not reads & writes
    starts = sorted((a.ctypes.data, a.nbytes) for buffers in machine._buffers for a in buffers.values())
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(starts))
    assert all(start % 64 == 0 for start, _ in starts)


def test_running_statistics_of_the_caller_stay_as_they_are():
    # Trap: BatchNormalization in training mode writes into its running-statistics inputs.
    text = """<ir_version: 10, opset_import: ["": 21]>
    step (float[N,3,4] x, float[3] mean, float[3] var) => (float[3] mean_n, float[3] var_n, float[N,3,4] y) {
      one = Constant <value_floats = [1.0, 1.0, 1.0]> ()
      y, mean_n, var_n = BatchNormalization <training_mode = 1> (x, one, one, mean, var) }"""
    mean, var = np.full(3, 5, np.float32), np.full(3, 2, np.float32)
    state = {"mean": Slot("mean", "mean_n", mean), "var": Slot("var", "var_n", var)}
    step = model(text)
    fast, slow = Resident(step, state, ["y"]), Fed(ReferenceSession(step), step, state, ["y"])
    rng = np.random.default_rng(0)
    for _ in range(6):
        batch = {"x": rng.standard_normal((7, 3, 4)).astype(np.float32)}
        fast.step(batch), slow.step(batch)
    assert mean.tolist() == [5] * 3
    assert var.tolist() == [2] * 3
    for name, value in slow.state().items():
        np.testing.assert_allclose(fast.state()[name], value, rtol=1e-5)


def test_state_goes_out_and_comes_back():
    rng = np.random.default_rng(0)
    step, state = model(STEP, IN=4, H=8, OUT=3), slots(rng, 4, 8, 3)
    one, two = Resident(step, state, ["loss"]), Resident(step, state, ["loss"])
    stream = batches(rng, 7, 4, 3)
    for batch in stream[:3]:
        one.step(batch)
    kept = one.state()
    two.load_state(kept)
    for batch in stream[3:]:
        assert one.step(batch)["loss"].tobytes() == two.step(batch)["loss"].tobytes()
    assert kept["k"] == 3, "a copy"
    before = two.state()
    for wrong, words in [
        ({k: v for k, v in kept.items() if k != "w1"}, "'w1' is missing"),
        ({**kept, "u": kept["w1"]}, "'u' is unknown"),
        ({**kept, "w2": kept["w2"].astype(np.float64)}, "'w2' is float64"),
        ({**kept, "w2": kept["w2"][:1]}, "'w2' is"),
    ]:
        with pytest.raises(BadInput, match=words):
            two.load_state(wrong)
    assert all(before[k].tobytes() == v.tobytes() for k, v in two.state().items())


def test_refilled_arrays_are_read_again_and_strided_ones_are_not_remembered():
    rng = np.random.default_rng(0)
    step, state = model(STEP, IN=4, H=8, OUT=3), slots(rng, 4, 8, 3)
    fast, slow = Resident(step, state, ["loss"]), Fed(Session(step), step, state, ["loss"])
    wide = np.empty((16, 8), np.float32)
    buffers = {"x": np.empty((16, 4), np.float32), "t": wide[:, ::2][:, :3]}
    for _ in range(5):
        buffers["x"][:] = rng.standard_normal((16, 4))
        wide[:] = rng.standard_normal((16, 8))
        assert fast.step(buffers)["loss"].tobytes() == slow.step(buffers)["loss"].tobytes()


def test_a_result_may_be_state_as_well():
    rng = np.random.default_rng(0)
    step, state = model(STEP, IN=4, H=8, OUT=3), slots(rng, 4, 8, 3)
    fast = Resident(step, state, ["y", "w1n", "loss"])
    slow = Fed(Session(step), step, state, ["y", "w1n", "loss"])
    for batch in batches(rng, 4, 4, 3):
        assert bits(fast.step(batch)) == bits(slow.step(batch))
        assert bits(fast.state()) == bits(slow.state())


def test_bfloat16_state():
    text = """<ir_version: 10, opset_import: ["": 21]>
    step (bfloat16[3] w, bool b) => (bfloat16[3] wn, bool bn) {
      f = Cast <to = 1> (w) g = Add (f, f) wn = Cast <to = 16> (g) bn = Not (b) }"""
    state = {"w": Slot("w", "wn", np.ones(3, ml_dtypes.bfloat16)), "b": Slot("b", "bn", np.array(False))}
    machine = Resident(model(text), state, ["wn"])
    machine.step({})
    assert machine.step({})["wn"].tolist() == machine.state()["w"].tolist() == [4, 4, 4]
    assert machine.state()["w"].dtype == ml_dtypes.bfloat16
    assert not machine.state()["b"]


def test_first_values_are_read_one_after_the_other():
    alive, most = 0, 0

    class Read(ir.TensorProtoTensor):
        def numpy(self):
            nonlocal alive, most
            array = super().numpy().copy()
            alive, most = alive + 1, max(most, alive + 1)
            weakref.finalize(array, gone)
            return array

    def gone():
        nonlocal alive
        alive -= 1

    rng = np.random.default_rng(0)
    given = slots(rng, 4, 8, 3)
    held = {n: dataclasses.replace(s, initial=Read(numpy_helper.from_array(s.first))) for n, s in given.items()}
    machine = Resident(model(STEP, IN=4, H=8, OUT=3), held, ["loss", "y"])
    assert most <= 2  # the one before, until the name stands for the next
    assert alive == 0
    assert bits(machine.state()) == bits({n: s.first for n, s in given.items()})


def test_a_failed_step_leaves_the_state(capfd):
    rng = np.random.default_rng(0)
    machine = Resident(model(STEP, IN=4, H=8, OUT=3), slots(rng, 4, 8, 3), ["loss", "y"])
    (good,) = batches(rng, 1, 4, 3)
    machine.step(good)
    before = machine.state()
    with pytest.raises(BadInput, match=r"ONNX Runtime failed: .*tensor\(double\)"):
        machine.step({**good, "x": good["x"].astype(np.float64)})
    with pytest.raises(BadInput, match="ONNX Runtime failed: "):
        machine.step({**good, "x": good["x"][:3]})
    assert all(before[k].tobytes() == v.tobytes() for k, v in machine.state().items())
    machine.step(good)
    assert capfd.readouterr() == ("", ""), "the runtime prints nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w1": Slot("w", "w1n", np.zeros((4, 8), np.float32))}, "'w', which is no input"),
        ({"w1": Slot("w1", "nope", np.zeros((4, 8), np.float32))}, "'nope', which is no output"),
        ({"w1": Slot("w1", "w1n", np.zeros((4, 7), np.float32))}, r"float32\[4, 7\]"),
        ({"w1": Slot("w1", "w1n", np.zeros((4, 8), np.float64))}, r"float64\[4, 8\]"),
        ({"u": Slot("w1", "w1n", np.zeros((4, 8), np.float32))}, "two tensors of state .* input 'w1'"),
        ({"w1": Slot("w1", "v2n", np.zeros((4, 8), np.float32))}, "two tensors of state .* output 'v2n'"),
    ],
)
def test_slots_that_do_not_fit_are_refused(change, words):
    state = slots(np.random.default_rng(0), 4, 8, 3) | change
    with pytest.raises(BadInput, match=words):
        Resident(model(STEP, IN=4, H=8, OUT=3), state)


def test_options_and_models_that_cannot_be():
    step, state = model(STEP, IN=4, H=8, OUT=3), slots(np.random.default_rng(0), 4, 8, 3)
    with pytest.raises(BadInput, match="result 'accuracy'"):
        Resident(step, state, ["accuracy"])
    with pytest.raises(BadInput, match="threads"):
        Resident(step, state, options=Options(threads=0))
    with pytest.raises(BadInput, match="level"):
        Resident(step, state, options=Options(level="most"))
    with pytest.raises(BadInput, match="cannot load"):
        Session(b"not a model")
    for level in ("none", "basic", "extended"):
        Resident(step, state, options=Options(level=level, spinning=False, arena=False)).step(
            batches(np.random.default_rng(0), 1, 4, 3)[0]
        )


def test_a_step_costs_little_beside_the_session():
    """At 100 parameters, what Python adds to the session's own run is small (about 3 µs when idle)."""
    n = 100
    names = [f"w{i}" for i in range(n)]
    inputs = ", ".join(f"float[4] {w}" for w in names)
    outputs = ", ".join(f"float[4] {w}n" for w in names)
    nodes = " ".join(f"{w}n = Add ({w}, {w})" for w in names)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    step (float[N,4] x, {inputs}) => ({outputs}, float loss) {{
      {nodes} loss = ReduceSum <keepdims = 0> (x) }}"""
    state = {w: Slot(w, w + "n", np.zeros(4, np.float32)) for w in names}
    machine = Resident(model(text), state, ["loss"], Options(threads=1))
    native, bindings = machine.session._sess, [b._iobinding for b in machine._bindings]
    batch = {"x": np.ones((8, 4), np.float32)}
    for _ in range(20):
        machine.step(batch)
    whole, alone = [], []
    for i in range(300):  # interleaved, and the least of each: a busy machine disturbs both alike
        start = time.perf_counter()
        machine.step(batch)
        middle = time.perf_counter()
        native.run_with_iobinding(bindings[i % 2], None)
        end = time.perf_counter()
        whole.append(middle - start)
        alone.append(end - middle)
    assert min(whole) - min(alone) < 30e-6


def test_initial_values_are_read_once_and_larger_constants_than_are_computed_with_never():
    def tensor(array):
        return KeptTensor(lambda: read.append(1) or ir.tensor(array), ir.DataType.FLOAT, ir.Shape(array.shape))

    read: list[int] = []
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2] s) => (float[2] t) { t = Neg (s) }"""
    machine = Resident(model(text), {"s": Slot("s", "t", tensor(np.ones(2, np.float32)))})
    assert len(read) == 1
    machine.step({})
    assert machine.state()["s"].tolist() == [-1, -1]

    large = ir.Value(name="w", const_value=tensor(np.ones(1000, np.float32)))
    node = ir.node("Neg", [large])
    assert known_value(node.outputs[0], 21) is None
    assert len(read) == 1
    assert known_value(large, 21).sum() == 1000


@pytest.mark.parametrize(
    ("filters", "large", "level"),
    [("ww", 0, "all"), ("uu", 0, "extended"), ("wu", 0, "all"), ("wu", 1, "extended"), ("ww", 1, "all")],
)
def test_the_level_of_optimization_depends_on_the_filters(monkeypatch, filters, large, level):
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 1, 2, 2] x, float[1, 1, 1, 1] v) => (float[1, 1, 2, 2] y) <float[1, 1, 1, 1] w = {{2}}>
        {{ u = Mul (v, v) a = Conv (x, {filters[0]}) b = Conv (a, {filters[1]}) y = Relu (b) }}"""
    seen = []
    native = Options.native
    monkeypatch.setattr(Options, "native", lambda self: seen.append(self.level) or native(self))
    monkeypatch.setattr(sessions, "_LARGE", 1 if large else 1 << 25)
    Session(ir.from_proto(onnx.parser.parse_model(text)))
    Session(ir.from_proto(onnx.parser.parse_model(text)), Options(level="basic"))
    assert set(seen) == {level, "basic"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_constants_are_not_held_several_times():
    """Measured in a process of its own: a session adds what its constants take, and as much again packed."""
    script = """
        import numpy as np, onnx_ir as ir
        from onnxgrad.runtime import Options, Session
        from onnxgrad.training.loop.peak_probe import resident
        def model(n):
            x, y = (ir.Value(name=k, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, n])) for k in "xy")
            made = ir.tensor(np.ones((n, n), np.float32), name="w")
            w = ir.Value(name="w", const_value=made, type=ir.TensorType(made.dtype), shape=ir.Shape([n, n]))
            node = ir.Node("", "MatMul", [x, w], outputs=[y])
            graph = ir.Graph([x], [y], nodes=[node], initializers=[w], opset_imports={"": 20}, name="g")
            return ir.Model(graph, ir_version=10)
        Session(model(64), Options(threads=1)).run({"x": np.ones((1, 64), np.float32)})
        large = model(4096)
        before = resident("VmHWM")
        session = Session(large, Options(threads=1))
        added = resident("VmHWM") - before
        assert (session.run({"x": np.ones((1, 4096), np.float32)})["y"] == 4096).all()
        print(added / (64 * 1024**2))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.5


def test_constants_go_as_a_message_where_there_is_no_room_for_a_file(monkeypatch):
    made = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x) => (float[2] y) <float[2] w = {2, 3}> { y = Mul (x, w) }""")
    )

    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onnxgrad.runtime.session._LARGE", 1)
    x = np.float32([1, 1])
    assert Session(made).run({"x": x})["y"].tolist() == [2, 3]
    monkeypatch.setattr("onnxgrad.runtime.session.serialize_apart", full)
    assert Session(made).run({"x": x})["y"].tolist() == [2, 3]
    monkeypatch.setattr("onnxgrad.runtime.session._MESSAGE_LIMIT", 1)
    with pytest.raises(BadInput, match="No space left"):
        Session(made)
