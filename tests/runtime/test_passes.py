"""Passes that fail: they are left out with one warning, and results are those without them."""

import dataclasses
import gc
import warnings
import weakref

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.errors import PassWarning
from onnxgrad.ir.composites import Part, named_parts
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.graph import detach
from onnxgrad.ir.invariants import fault_of, interface_of
from onnxgrad.ir.passes import LEFT_OUT, NO_SITE
from onnxgrad.runtime import Options, Session, StepRunner, passes
from onnxgrad.runtime import session as sessions
from onnxgrad.runtime.kernels import substitute
from onnxgrad.runtime.passes import NAMES, OPTIMIZATION, STEP_NAMES
from onnxgrad.runtime.session import passes_of
from onnxgrad.training import compile_step
from tests.runtime.kernels.test_steps import batches, same_state
from tests.runtime.kernels.twins import needs_kernels
from tests.training.models import trainable

NATIVE = Options(threads=1, target="native")


def raises(model):
    raise KeyError("a defect")


def reads_what_is_gone(model):
    node = next(n for n in model.graph if n.inputs and n.inputs[0] is not None and n.inputs[0].producer())
    node.replace_input_with(0, ir.Value(name="gone", type=node.inputs[0].type, shape=node.inputs[0].shape))


def changes_a_type(model):
    node = next(n for n in model.graph if n.outputs[0].dtype == ir.DataType.FLOAT)
    node.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


def changes_an_output(model):
    model.graph.outputs[0].shape = ir.Shape([None] * 7)


def breaks_the_order(model):
    node = next(n for n in model.graph if n.inputs and n.inputs[0] is not None and n.inputs[0].producer())
    model.graph.remove(node)
    model.graph.insert_before(next(iter(model.graph)), node)


def repeats_a_name(model):
    first, second, *_ = [n for n in model.graph if n.outputs[0].name]
    second.outputs[0].name = first.outputs[0].name


def leaves_a_reader(model):
    value = next(v for v in model.graph.inputs)
    model.graph.meta["kept"] = ir.Node("", "Identity", [value], num_outputs=1)


def drops_an_output(model):
    model.graph.outputs.pop()


def writes_an_unknown_operator(model):
    """The graph is well-formed, and ONNX Runtime refuses it."""
    node = next(n for n in model.graph if n.domain == "" and n.op_type in ("MatMul", "Gemm", "Mul"))
    node.op_type = "NoSuchOperator"


DEFECTS = [
    raises, reads_what_is_gone, changes_a_type, changes_an_output, breaks_the_order, repeats_a_name, leaves_a_reader,
    drops_an_output, writes_an_unknown_operator,
]  # fmt: skip


@pytest.fixture
def with_defect(monkeypatch):
    """Has a pass do its work, and then something wrong."""

    def patch(name, defect):
        def apply(model, setting, pass_):
            places = pass_.apply(model, setting)
            defect(model)
            return places

        changed = [
            dataclasses.replace(p, apply=lambda m, s, p=p: apply(m, s, p)) if p.name == name else p
            for p in OPTIMIZATION
        ]
        monkeypatch.setattr(sessions, "OPTIMIZATION", changed)

    return patch


@pytest.fixture(scope="module")
def step():
    return compile_step(trainable("adamw", 0.05, weight_decay=0.01))


def state_after(step, options):
    machine = StepRunner(step, options=options)
    for batch in batches(3):
        machine.step(batch)
    return machine.state()


CASES = [(name, defect) for name in ("kernels", "elementwise", "in_place") for defect in DEFECTS]


@pytest.mark.sweep(5)
@needs_kernels
@pytest.mark.parametrize(
    ("name", "defect"),
    [c for c in CASES if c[0] == "in_place" or c[1] is not breaks_the_order],  # later passes put nodes in order
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_pass_that_fails_is_left_out(name, defect, step, with_defect):
    want = state_after(step, dataclasses.replace(NATIVE, without=(name,)))
    before = ir.to_proto(step.model).SerializeToString()
    with_defect(name, defect)
    with pytest.warns(PassWarning, match=f"(?s)the optimization '{name}' failed .* report") as told:
        found = state_after(step, NATIVE)
    assert [w.message.name for w in told if isinstance(w.message, PassWarning)] == [name]
    same_state(found, want)
    assert ir.to_proto(step.model).SerializeToString() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_state(state_after(step, dataclasses.replace(NATIVE, without=(name,))), want)


def test_a_rewrite_that_fails_is_left_out(with_defect, step, monkeypatch):
    """Under standard operators as well; a second one that fails is named, too."""
    portable = Options(threads=1, target="portable")
    applied = next(p for p in OPTIMIZATION if p.phase == "rewrites")
    changed = [
        dataclasses.replace(p, applies=lambda *_: True, apply=lambda m, s: raises(m)) if p is applied else p
        for p in OPTIMIZATION
    ]
    changed[-1] = dataclasses.replace(changed[-1], apply=lambda m, s: raises(m))
    want = state_after(step, portable)
    monkeypatch.setattr(sessions, "OPTIMIZATION", changed)
    with pytest.warns(PassWarning) as told:
        found = state_after(step, portable)
    assert [w.message.name for w in told] == [applied.name, "same_memory"]
    same_state(found, want)


@needs_kernels
def test_a_recogniser_that_fails_leaves_its_pass_out(step, monkeypatch):
    """Also where it only says if a model wants kernels at all."""
    want = state_after(step, dataclasses.replace(NATIVE, without=("kernels",)))
    monkeypatch.setattr(substitute, "named_parts", raises)
    with pytest.warns(PassWarning) as told:
        found = state_after(step, NATIVE)
    assert [w.message.name for w in told] == ["kernels", "attention"]
    same_state(found, want)


def test_a_setting_that_fails_leaves_the_pass_out(step, monkeypatch):
    portable = Options(threads=1, target="portable")
    want = state_after(step, portable)
    changed = [dataclasses.replace(p, unless=raises) if p.name == "unexpanded" else p for p in OPTIMIZATION]
    monkeypatch.setattr(sessions, "OPTIMIZATION", changed)
    with pytest.warns(PassWarning, match="'unexpanded' failed"):
        found = state_after(step, portable)
    same_state(found, want)


def test_a_pass_that_only_looks_leaves_no_names(step, monkeypatch):
    """It fails on the caller's graph, where no other pass has made a copy."""
    names = [n.name or "" for n in step.model.graph]
    assert not all(names)
    monkeypatch.setattr(passes, "same_memory", lambda graph, *_: raises(graph))
    with pytest.warns(PassWarning, match="'same_memory' failed"):
        state_after(step, Options(threads=1, target="portable", layout="plain"))
    assert [n.name or "" for n in step.model.graph] == names


def test_a_model_that_the_runtime_refuses_is_refused(step, with_defect):
    """No pass is blamed for it, and none is named."""
    model = step.model.clone()
    next(n for n in model.graph if n.op_type == "MatMul").op_type = "NoSuchOperator"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(sessions.BadInput, match="NoSuchOperator"):
            Session(model, Options(target="portable"))


def test_reasons(step):
    reports = {r.name: r for r in passes_of(step.model, Options(target="portable", without=("unexpanded",))).reports}
    assert (*STEP_NAMES, *reports) == NAMES
    assert reports["unexpanded"].reason == LEFT_OUT
    assert reports["known_branches"].reason == NO_SITE
    assert reports["elementwise"].reason == "target is 'portable'"
    assert reports["same_memory"].reason == "the session holds no state"
    plain = passes_of(step.model, Options(target="portable", layout="plain"))
    assert {r.reason for r in plain.reports if r.phase == "rewrites"} == {"layout is 'plain'"}
    elsewhere = passes_of(step.model, Options(target="portable", providers=("CUDAExecutionProvider",)))
    assert {r.reason for r in elsewhere.reports if r.phase != "preparation"} == {
        "the CPU provider is not the first one"
    }
    assert elsewhere.model is step.model


@needs_kernels
def test_places_and_nodes(step):
    passed = passes_of(step.model, NATIVE, counted=True)
    reports = {r.name: r for r in passed.reports}
    assert reports["kernels"].places >= 3
    assert not reports["kernels"].reason
    before, after = reports["kernels"].nodes
    assert before > after
    assert reports["in_place"].reason == "the session holds no state"
    assert "kernels" in passed.applied
    assert fault_of(passed.model.graph, interface_of(step.model.graph)) == ""


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_a_switch(name):
    assert Options(without=(name,)).native()


def test_a_copy_keeps_no_original(step):
    """Notes of named parts have values: those of the copy have no producers."""
    original = copy_model(step.model)
    copy, forgotten = copy_model(original), weakref.ref(original.graph)
    parts = [p.name for p in named_parts(original.graph)]
    assert parts == [p.name for p in named_parts(copy.graph)] != []
    del original
    gc.collect()
    assert forgotten() is None


def test_a_removed_body_reads_nothing():
    """A node that is removed takes the readers in its bodies along."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    inner = ir.Node("", "Neg", [x], num_outputs=1)
    branch = ir.Graph([], list(inner.outputs), nodes=[inner], name="branch")
    choice = ir.Node("", "If", [None], [ir.AttrGraph("then_branch", branch)], num_outputs=1)
    assert len(x.uses()) == 1
    detach([choice])
    assert not x.uses()


@pytest.mark.parametrize("target", ["portable", pytest.param("native", marks=needs_kernels)])
def test_old_models_run_as_they_are(target):
    """Operands of newer opsets were attributes: no pass looks at such a model, and none warns."""
    text = """<ir_version: 4, opset_import: ["": 9]> g (float[3, 4] x) => (float[3, 2] y) {
        a = Slice <starts = [0], ends = [4], axes = [1]> (x)
        b = Pad <pads = [0, 0, 0, 2]> (a)
        c = Mul (b, b)
        d = Tanh (c)
        e = Mul (d, c)
        y = Slice <starts = [1], ends = [3], axes = [1]> (e) }"""
    model = onnx.parser.parse_model(text)
    x = np.float32(np.arange(12).reshape(3, 4) / 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (y,) = Session(ir.from_proto(model), Options(threads=1, target=target)).run({"x": x}).values()
    np.testing.assert_allclose(y, (np.tanh(x**2) * x**2)[:, 1:3], rtol=1e-5)
    reports = passes_of(ir.from_proto(model), Options(target=target)).reports
    assert all("opset 9" in r.reason for r in reports if r.phase != "preparation")


@pytest.mark.parametrize("target", ["portable", "native"])
def test_nodes_out_of_order_are_left_to_the_runtime(target):
    """ONNX Runtime sorts them; no pass is to blame: PassWarning is an error here."""
    text = "g (float[2,3] x, float[3,3] w) => (float[2,3] y) { h = MatMul(x, w) a = Tanh(h) b = Mul(a, h) y = Exp(b) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    feeds = {"x": np.ones((2, 3), np.float32), "w": np.full((3, 3), 0.1, np.float32)}
    expected = Session(proto).run(feeds)["y"]
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    found = Session(ir.from_proto(proto), Options(target=target)).run(feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_batch_norm_over_a_batch_is_written_out_elsewhere():
    """Providers other than the CPU's refuse it; the numbers are those of the CPU's own operator."""
    rng = np.random.default_rng(0)
    feeds = {
        "x": (3 + 2 * rng.standard_normal((4, 3, 5, 2))).astype(np.float32),
        **{n: rng.uniform(0.5, 2, 3).astype(np.float32) for n in ("s", "b", "m", "v")},
    }
    node = onnx.helper.make_node(
        "BatchNormalization", [*feeds], ["y", "mean", "var"], training_mode=1, momentum=0.8, epsilon=1e-3
    )
    ends = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None if n in "xy" else [3])
        for n in (*feeds, "y", "mean", "var")
    ]
    ends[0] = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, "H", "W"])
    graph = onnx.helper.make_graph([node], "g", ends[:5], ends[5:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    elsewhere = passes_of(ir.from_proto(proto), Options(target="portable", providers=("CUDAExecutionProvider",)))
    assert not any(n.op_type == "BatchNormalization" for n in elsewhere.model.graph)
    written = onnxruntime.InferenceSession(ir.to_proto(elsewhere.model).SerializeToString()).run(None, feeds)
    for found, wanted in zip(written, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_a_part_holds_only_if_each_expression_is_known_and_the_same():
    """The expression of y is not known: it reads z, which is no input of the part."""
    head = '<ir_version: 10, opset_import: ["": 21]>'
    text = f"{head} g (float[2] x, float[2] z) => (float[2] y) {{ a = Neg (x) y = Mul (a, z) }}"
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    x, (a, y) = graph.inputs[0], [node.outputs[0] for node in graph]
    part = Part.of("P", [x], [a, None], {})
    assert part.holds([x], [a, None])
    assert not part.holds([x], [a, y])
    assert not part.holds([x], [y, None])
    assert not Part.of("P", [x], [y], {}).holds([x], [y])
    assert not Part.without_digests("P", [x], [a], {}).holds([x], [a])
