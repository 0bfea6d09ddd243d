"""RNN, GRU, LSTM: the fused kernels are the oracle of values, central differences of derivatives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxgrad
from onnxgrad.runtime import Session
from tests.control_flow.compare import close, differences, model, normal, run

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
T, N, H = 3, 2, 2


def layer(
    op, *, directions=1, operands="XWRB", lens=False, states=True, dtype=TensorProto.FLOAT, sizes=(T, N, H),
    any_batch=False, **attrs,
):  # fmt: skip
    """A model of one node, its feeds, and the names of its float operands."""
    g = GATES[op]
    t, n, h = sizes
    first = attrs.get("layout", 0)
    shapes = {
        "X": (n, t, h) if first else (t, n, h),
        "W": (directions, g * h, h),
        "R": (directions, g * h, h),
        "B": (directions, 2 * g * h),
        "sequence_lens": (n,),
        "h0": (n, directions, h) if first else (directions, n, h),
        "c0": (n, directions, h) if first else (directions, n, h),
        "P": (directions, 3 * h),
    }
    order = ["X", "W", "R", "B", "sequence_lens", "h0", *(["c0", "P"] if op == "LSTM" else [])]
    used = [*operands]
    used += ["sequence_lens"] * lens + (["h0"] + ["c0"] * (op == "LSTM")) * states
    feeds = {k: 0.7 * normal(*shapes[k]) for k in order if k in used and k != "sequence_lens"}
    wrt = list(feeds)
    if lens:
        feeds["sequence_lens"] = np.arange(t, t - 2 * n, -2, np.int32).clip(1)
    symbols = {"X": ["N", "T", h] if first else ["T", "N", h]}
    if any_batch:
        state = ["N", directions, h] if first else [directions, "N", h]
        symbols |= {"sequence_lens": ["N"], "h0": state, "c0": state}
    inputs = [
        helper.make_tensor_value_info(
            k, TensorProto.INT32 if k == "sequence_lens" else dtype, symbols.get(k, feeds[k].shape)
        )
        for k in feeds
    ]
    outs = ["Y", "Y_h", *(["Y_c"] if op == "LSTM" else [])]
    way = ["forward", "bidirectional"][directions - 1]
    node = helper.make_node(
        op, [k if k in feeds else "" for k in order], outs, hidden_size=h, **{"direction": way, **attrs}
    )
    graph = helper.make_graph(
        [node],
        op,
        inputs,
        [helper.make_tensor_value_info(o, dtype, list("abcd"[: 3 + (o == "Y")])) for o in outs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), feeds, wrt


CASES = {
    "RNN": ("RNN", {}),
    "RNN, both directions, Relu": (
        "RNN",
        {
            "directions": 2,
            "activations": ["Relu", "Affine"],
            "activation_alpha": [0.8],
            "activation_beta": [0.1],
        },
    ),
    "RNN, reverse, lengths, no bias": ("RNN", {"direction": "reverse", "lens": True, "operands": "XWR"}),
    "GRU": ("GRU", {}),
    "GRU, linear before reset": ("GRU", {"linear_before_reset": 1}),
    "GRU, linear before reset, no bias": ("GRU", {"linear_before_reset": 1, "operands": "XWR"}),
    "GRU, both directions, lengths": ("GRU", {"directions": 2, "lens": True}),
    "GRU, clipped, no states": ("GRU", {"clip": 0.4, "states": False}),
    "LSTM": ("LSTM", {}),
    "LSTM, no bias, no states": ("LSTM", {"operands": "XWR", "states": False}),
    "LSTM, both directions, lengths": ("LSTM", {"directions": 2, "lens": True}),
    "LSTM, reverse, lengths": ("LSTM", {"direction": "reverse", "lens": True}),
    "LSTM, peepholes": ("LSTM", {"operands": "XWRBP"}),
    "LSTM, coupled gates": ("LSTM", {"input_forget": 1}),
    "LSTM, other activations, clipped": (
        "LSTM",
        {
            "activations": ["HardSigmoid", "Softsign", "ScaledTanh"],
            "clip": 0.9,
            "activation_alpha": [0.3, 1.2],
            "activation_beta": [0.4, 0.7],
        },
    ),
    "GRU, activations in lower case": (
        "GRU",
        {"activations": ["hardsigmoid", "elu"], "activation_alpha": [0.3, 1.2], "activation_beta": [0.4]},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_equations_give_what_the_kernel_gives(case):
    op, options = case
    model, feeds, wrt = layer(op, **options)
    primal = run(model, feeds)
    derived = onnxgrad.jvp(model, wrt=wrt)
    assert op not in {n.op_type for n in derived.graph.node}
    got = run(derived, feeds | {f"{n}_tangent": feeds[n] for n in wrt})
    for name, want in primal.items():
        close(got[name], want, 1e-5, name)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_central_differences(case):
    op, options = case
    model, feeds, wrt = layer(op, dtype=TensorProto.DOUBLE, **options)
    differences(written_out(model, wrt), feeds, wrt)


def written_out(model, wrt):
    """The model with its equations, in float64, for which there is no fused kernel."""
    derived = onnxgrad.jvp(model, wrt=wrt)
    plain = onnx.ModelProto()
    plain.CopyFrom(derived)
    keep = [o for o in plain.graph.output if not o.name.endswith("_tangent")]
    del plain.graph.output[:]
    plain.graph.output.extend(keep)
    needed, nodes = {o.name for o in keep}, []
    for node in reversed(plain.graph.node):
        if needed & set(node.output):
            nodes.insert(0, node)
            needed |= set(node.input) | {i for a in node.attribute for n in a.g.node for i in n.input}
    del plain.graph.node[:]
    plain.graph.node.extend(nodes)
    inputs = [i for i in plain.graph.input if not i.name.endswith("_tangent")]
    del plain.graph.input[:]
    plain.graph.input.extend(inputs)
    del plain.metadata_props[:]
    return plain


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("lengths", [[T, 0], [0, 1], [0, 0]])
def test_empty_sequences(op, lengths):
    model, feeds, wrt = layer(op, directions=2, lens=True)
    feeds["sequence_lens"] = np.array(lengths, np.int32)
    primal = run(model, feeds)
    got = run(onnxgrad.jvp(model, wrt=wrt), feeds | {f"{n}_tangent": feeds[n] for n in wrt})
    for name, want in primal.items():
        close(got[name], want, 1e-5, name)
    model, _, _ = layer(op, directions=2, lens=True, dtype=TensorProto.DOUBLE)
    differences(written_out(model, wrt), feeds, wrt)


@pytest.mark.parametrize("op", GATES)
def test_second_order_both_ways(op):
    model, feeds, _ = layer(op, lens=True)
    gradient = onnxgrad.grad(model, wrt=["X", "R"], of="Y")
    reverse = onnxgrad.grad(gradient, wrt=["X", "R"])
    forward = onnxgrad.jvp(gradient, wrt=["X", "R"])
    tangents = {f"{n}_tangent": np.asarray(normal(*feeds[n].shape)) for n in ("X", "R")}
    hessian = run(reverse, feeds)  # H·1
    moved = run(forward, feeds | tangents)  # H·t
    left = sum(np.vdot(h, t) for h, t in zip(hessian.values(), tangents.values()))
    right = sum(v.sum() for k, v in moved.items() if "tangent" in k)
    np.testing.assert_allclose(left, right, rtol=2e-3, atol=1e-4)


def test_batch_first_equals_time_first():
    first, feeds, wrt = layer("LSTM", directions=2, layout=1)
    other = layer("LSTM", directions=2)[0]
    turned = {k: v.transpose(1, 0, 2).copy() if k in ("X", "h0", "c0") else v for k, v in feeds.items()}
    seeds = {"Y": normal(N, T, 2, H), "Y_h": normal(N, 2, H), "Y_c": normal(N, 2, H)}
    got = run(onnxgrad.vjp(first, wrt=wrt), feeds | {f"{k}_cotangent": v for k, v in seeds.items()})
    seeds = {k: (v.transpose(1, 2, 0, 3) if v.ndim == 4 else v.transpose(1, 0, 2)).copy() for k, v in seeds.items()}
    want = run(onnxgrad.vjp(other, wrt=wrt), turned | {f"{k}_cotangent": v for k, v in seeds.items()})
    for n in wrt:
        w = want[f"{n}_grad"]
        close(got[f"{n}_grad"], w.transpose(1, 0, 2) if n in ("X", "h0", "c0") else w, 1e-5, n)


def test_the_fused_kernel_stays_where_nothing_is_differentiated():
    model, _, _ = layer("LSTM")
    model.graph.node.append(helper.make_node("Mul", ["Y_h", "k"], ["z"]))
    model.graph.input.append(helper.make_tensor_value_info("k", TensorProto.FLOAT, [1, N, H]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, N, H]))
    derived = onnxgrad.grad(model, wrt="k")
    assert [n.op_type for n in derived.graph.node].count("LSTM") == 1
    assert "Scan" not in {n.op_type for n in derived.graph.node}


def test_activations_for_one_of_two_directions_are_refused():
    model, _, wrt = layer("LSTM", directions=2, activations=["Sigmoid", "Tanh", "Relu"])
    with pytest.raises(onnxgrad.NotDifferentiable, match="LSTM node 'Y': it gives 3 activations where it needs 6"):
        onnxgrad.grad(model, wrt=wrt)


def test_an_unknown_activation_is_refused():
    model, _, wrt = layer("RNN", activations=["Strange"])
    with pytest.raises(onnxgrad.NotDifferentiable, match="RNN node 'Y': its activation 'Strange'"):
        onnxgrad.grad(model, wrt=wrt)


@pytest.mark.parametrize(
    ("op", "options"), [("GRU", {"linear_before_reset": 1}), ("LSTM", {"operands": "XWRBP"})], ids=["GRU", "peepholes"]
)
def test_the_weights_products_and_sums_are_made_once_for_all_steps(op, options):
    """For any batch: no value of the size of a weight is carried from step to step."""
    model, feeds, wrt = layer(op, any_batch=True, **options)
    derived = onnxgrad.grad(model, wrt=wrt, of="Y")
    back = [n for n in derived.graph.node if n.op_type == "Scan"][-1]
    body = next(a.g for a in back.attribute if a.name == "body")
    states = len(body.input) - next(a.i for a in back.attribute if a.name == "num_scan_inputs")
    assert states == (2 if op == "LSTM" else 1)  # cotangents of h, and of c
    assert not [n for n in body.node if n.op_type in ("Expand", "ReduceSum")]
    assert not [a for n in body.node for a in n.attribute if a.name == "transA" and a.i]
    known, _, _ = layer(op, **options)
    found, want = run(derived, feeds), run(onnxgrad.grad(known, wrt=wrt, of="Y"), feeds)
    for name, value in want.items():
        close(found[name], value, 1e-5, name)


@pytest.mark.target("portable")
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("transform", [onnxgrad.grad, onnxgrad.jvp])
def test_the_message_over_no_steps_names_the_layer(op, transform):
    gates = GATES[op]
    text = f"""agraph (F[T,2,3] x, F[1,{4 * gates},3] w, F[1,{4 * gates},4] r) => (F[T,1,2,4] y, F[1,2,4] h) {{
        y, h = {op}<hidden_size=4>(x, w, r) }}"""
    feeds = {"x": np.zeros((0, 2, 3), np.float32)}
    feeds |= {"w": np.ones((1, 4 * gates, 3), np.float32), "r": np.ones((1, 4 * gates, 4), np.float32)}
    derived = transform(model(text), wrt="w", of="h")
    feeds |= {"w_tangent": feeds["w"]} if transform is onnxgrad.jvp else {}
    with pytest.raises(Exception, match="recurrent_layer_of_at_least_one_step"):
        run(derived, feeds)
    words = f"ONNX Runtime failed: {op} node 'y': the sequences have no steps.*sequence_lens"
    with pytest.raises(onnxgrad.BadInput, match=words) as raised:
        Session(derived).run(feeds)
    assert "\n" not in str(raised.value)


@pytest.mark.target("native")
@pytest.mark.parametrize("op", GATES)
def test_kernels_differentiate_no_steps(op):
    gates = GATES[op]
    text = f"""agraph (F[T,2,3] x, F[1,{4 * gates},3] w, F[1,{4 * gates},4] r, F[1,2,4] h0) => (F[1,2,4] h) {{
        y, h = {op}<hidden_size=4>(x, w, r, , , h0) }}"""
    feeds = {"x": np.zeros((0, 2, 3), np.float32), "h0": np.ones((1, 2, 4), np.float32)}
    feeds |= {"w": np.ones((1, 4 * gates, 3), np.float32), "r": np.ones((1, 4 * gates, 4), np.float32)}
    found = Session(onnxgrad.grad(model(text), wrt=["x", "w", "r", "h0"], of="h")).run(feeds)
    assert found["x_grad"].shape == (0, 2, 3)
    assert not found["w_grad"].any()
    assert not found["r_grad"].any()
    np.testing.assert_array_equal(found["h0_grad"], np.ones((1, 2, 4)))  # passed through
