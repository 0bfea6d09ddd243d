"""Steps for browsers: what they may hold, that they take the steps of those for any runtime, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.training import attach, export_step, web_report
from onnxgrad.training.export.for_web import for_web
from onnxgrad.training.export.host import Host
from onnxgrad.training.export.web_report import NOWHERE, PROCESSOR, WASM, has_kernel
from tests.training.loop.test_trainer import NORMED
from tests.training.models import blobs, classifier


@pytest.mark.parametrize(
    ("op", "version", "has"),
    [
        ("Add", 14, True),
        ("Add", 13, True),
        ("Add", 7, True),
        ("Add", 6, False),
        ("Cast", 21, True),
        ("Cast", 25, False),  # an open-ended kernel matches the very version that it begins with
        ("ScatterElements", 18, True),  # measured, not published
        ("ScatterElements", 16, False),
        ("CumSum", 14, True),
        ("LogSoftmax", 13, False),
        ("com.microsoft.FastGelu", 1, True),
    ],
)
def test_versions_of_kernels(op, version, has):
    assert has_kernel(op, version) is has


LOOP = """<ir_version: 8, opset_import: ["": 18]> g (float[3] x, int64 n) => (float[3] y) <bool more = {1}> {
    y = Loop (n, more, x) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) {
        d = Identity (c)
        t = Tanh (s)
    }>
}"""


def one(opset, body, inputs="float[N, 3] x"):
    return f'<ir_version: 8, opset_import: ["": {opset}, "far": 1]> g ({inputs}) => (y) {{ {body} }}'


@pytest.mark.parametrize(
    ("text", "op", "where", "why", "remedy"),
    [
        (one(18, "y = LogSoftmax (x)"), "LogSoftmax", PROCESSOR, "no kernel", "target web writes it out"),
        (one(18, "y = Round (x)"), "Round", PROCESSOR, "no kernel", "use an operator that has one"),
        (one(25, "y = Cast <to = 10> (x)"), "Cast", PROCESSOR, "this is 25", "opset 18"),
        (one(18, "y = Add (x, x)", "int64[3] x"), "Add", PROCESSOR, "int64 is not", "none needed"),
        (one(18, "y = Add (x, x)", "double[3] x"), "Add", WASM, "float64", "float32"),
        (one(18, "y = Cast <to = 11> (x)"), "Cast", WASM, "float64", "float32"),
        (
            one(
                18,
                f"{', '.join(f'y{k}' for k in range(7))}, y = Split <num_outputs = 8, axis = 1> (x)",
                "float[N, 9] x",
            ),
            "Split",
            WASM,
            "more than 7 parts",
            "target web writes Slices",
        ),
        (one(18, "y = far.Away (x)"), "far.Away", NOWHERE, "no such operator", "local function"),
        (LOOP, "Loop", PROCESSOR, "", "write the steps out"),
        (LOOP, "Tanh", PROCESSOR, "inside a Loop", "write the steps out"),
    ],
)
def test_what_does_not_run_on_webgpu(text, op, where, why, remedy):
    report = web_report(onnx.parser.parse_model(text))
    row = next(row for row in report.rows if row.op_type == op)
    assert (row.where, row.count) == (where, 1)
    assert why in row.why
    assert remedy in row.remedy
    assert report.on_webgpu == (where == PROCESSOR)
    assert report.on_wasm == (where != NOWHERE)


def test_what_runs_on_webgpu():
    text = one(18, "a = MatMul (x, x) \n b = Shape (a) \n c = If (k) <then_branch = t () => (u) { u = Tanh (a) }, "
               "else_branch = e () => (v) { v = Exp (a) }> \n y = Reshape (c, b)", "float[3, 3] x, bool k")  # fmt: skip
    report = web_report(onnx.parser.parse_model(text))
    assert (report.total, report.rows, report.on_webgpu, report.on_wasm) == (6, [], True, True)


OPTIMIZERS = [
    *("sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw", "nadam", "lion", "lamb", "adafactor", "muon"),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_of_any_runtime(tmp_path, optimizer):
    schedule = "cosine:total=20,warmup=2"
    rate = 0.1 if optimizer == "adafactor" else 0.01
    source = attach(classifier(), optimizer=optimizer, learning_rate=rate, schedule=schedule, clip_norm=1.0, ema=0.9)
    hosts = []
    for target in ("any", "web"):
        contract = export_step(source, tmp_path / target, target=target)
        hosts.append(Host(tmp_path / target, 1))
    for about in contract["models"].values():
        model = onnx.load(tmp_path / "web" / about["file"])
        onnx.checker.check_model(model, full_check=True)
        assert model.opset_import[0].version == 18
        report = web_report(model)
        assert report.on_webgpu
        assert report.off_webgpu == about["off_webgpu"]
        assert {r.op_type for r in report.rows if not r.why.startswith("int64")} == set()
    for low in range(0, 90, 9):
        batch = {n: a[low : low + 9] for n, a in blobs().items()}
        first, second = (float(host.step(batch)["loss"]) for host in hosts)
        assert second == pytest.approx(first, rel=2e-5)
    assert "float64" not in {about["dtype"] for about in contract["state"].values()}
    assert {a.dtype for a in hosts[1].state.values()} <= {np.dtype("float32"), np.dtype("int64")}
    for name, array in hosts[0].state.items():
        np.testing.assert_allclose(hosts[1].state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_normalization_in_training_mode_is_written_out(tmp_path):
    source = attach(onnx.parser.parse_model(NORMED), loss="cross_entropy", optimizer="sgd", learning_rate=0.1)
    for target in ("any", "web"):
        export_step(source, tmp_path / target, target=target)
    first, second = (Host(tmp_path / target, 1) for target in ("any", "web"))
    for model, held in (("any", True), ("web", False)):
        report = web_report(tmp_path / model / "train.onnx")
        assert ("BatchNormalization" in {r.op_type for r in report.rows}) is held
        assert report.on_webgpu is not held
    for _ in range(5):
        assert float(second.step(blobs())["loss"]) == pytest.approx(float(first.step(blobs())["loss"]), rel=1e-5)
    for name, array in first.state.items():  # running statistics, too
        np.testing.assert_allclose(second.state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("base", [0.5, 0.9, 0.999, 0.99999])
def test_one_minus_a_power_does_not_cancel(base):
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    g (int64 t) => (float y) <double one = {{1}}, double c = {{{base}}}> {{
        wide = Cast <to = 11> (t)
        p = Pow (c, wide)
        d = Sub (one, p)
        y = Cast <to = 1> (d)
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_model(model)
    for_web(model)
    proto = ir.to_proto(model)
    assert web_report(proto).on_webgpu
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for steps in (0, 1, 2, 3, 10, 100, 498, 502, 693, 10_000, 1_000_000):
        found = session.run(None, {"t": np.array(steps)})[0]
        assert found == pytest.approx(-np.expm1(steps * np.log(base)), rel=6e-7)


@pytest.mark.parametrize("how", ["x, sizes", "x", "x, fed"])
def test_a_split_into_many_parts(how):
    """Slices, where the sizes are known; refused where they are not."""
    attributes = "axis = -1" if "," in how else "axis = -1, num_outputs = 8"
    parts = ", ".join(f"p{k}" for k in range(8))
    model = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
    g (float[N, 15] x, int64[8] fed) => (float[N, m] y) <int64[8] sizes = {{1, 2, 3, 2, 1, 2, 3, 1}}> {{
        {parts} = Split <{attributes}> ({how})
        y = Concat <axis = 1> (p7, p1, p6, p0, p5, p4, p3, p2)
    }}""")
    )
    sizes = np.array([1, 2, 3, 2, 1, 2, 3, 1])
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 15), np.float32), "fed": sizes}

    def y():
        proto = ir.to_proto(model).SerializeToString()
        return onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(["y"], feeds)[0]

    expected = y()
    infer_model(model)
    if how == "x, fed":
        with pytest.raises(BadInput, match="Split: more than 7 parts"):
            for_web(model)
        return
    for_web(model)
    assert "Split" not in {node.op_type for node in model.graph}
    np.testing.assert_array_equal(y(), expected)


WIDE = """<ir_version: 8, opset_import: ["": 18]>
    g (double[N, 2] x) => (double[N, 2] y) <double[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }"""


@pytest.mark.parametrize(
    ("model", "target", "says"),
    [
        (WIDE, "web", "is float64, of which onnxruntime-web/webgpu has no kernel"),
        (None, "wasm", "target must be one of 'any', 'web', not 'wasm'"),
    ],
)
def test_refusals_write_nothing(tmp_path, model, target, says):
    source = classifier() if model is None else attach(onnx.parser.parse_model(model), loss="mse")
    source = attach(source) if model is None else source
    with pytest.raises(BadInput, match=says):
        export_step(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out" / "contract.json").exists()
    assert not list((tmp_path / "out").glob("*.onnx"))


def test_the_target_is_of_no_consequence_elsewhere(tmp_path):
    contract = export_step(attach(classifier()), tmp_path)
    assert json.loads((tmp_path / "contract.json").read_text()) == contract
    assert all("off_webgpu" not in about for about in contract["models"].values())


def test_a_model_that_reads_what_nothing_computes():
    proto = onnx.parser.parse_model(one(18, "y = Add (x, x)"))
    proto.graph.node[0].input[1] = "nothing"
    for model in (proto, ir.from_proto(proto)):
        with pytest.raises(BadInput, match=r"nothing|the model is not valid"):
            web_report(model)
