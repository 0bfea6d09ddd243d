"""Einsums, and sums of broadcast products, by products of matrices: the numbers of numpy's, in odd sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import vjp
from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized

#: Letters and their sizes; those that are large are open in the model.
SIZES = {"N": 3, "M": 2, "a": 7, "b": 2, "c": 5, "d": 19, "e": 3, "f": 1}
#: Equations that are written as products.
PRODUCTS = """
    ab,bc->ac ab,cb->ca Nab,bc->Nac eab,cb Nab,Nac->bc Nba,Nca->Nbc NaMd,NbMd->NMab NMab,NbMd->NaMd NMab,NaMd->NbMd
    Nacd,bacd->Nbcd Nbcd,Nacd->abcd Nbcd,bacd->Nacd Na,Nb->Nab a,b->ba Na,Na->N Nacd,Nacd->cdN Ncad,Nacd->N ab,ab->
    N...a,ab->N...b Na,abc->cNb Na,Na->aN NMa,MaN->NM Nf,Nfa->Na N,->N NMab,cab->MNc NMab,cMNe->ecab
    eab,Ncda,ecb->Nbd Na,bac,Nc->Nb Nb,Na,Nc->bac NM,Ma,ab,bc->cN eab,Nbda,ebc->Ncd"""
#: Equations that stay, with sizes of the model where they are others.
LEFT = {
    "diagonal": ("aa,ab->ab", {}),
    "sum over one operand": ("ab,bc->b", {}),
    "one operand": ("Nab->baN", {}),
    "sizes that may differ": ("?a,?b->?ab", {}),
    "an axis of size 1": ("ab,bc->ac", {0: "7,1"}),
}


def _model(equation, ranks, declared=()):
    """Einsum of absolute values, so that no operand is a constant or an input of the graph."""
    terms, _ = einsum_labels(equation.replace("?", "N"), ranks)
    letters = [[c if c.isupper() else str(SIZES[c]) for c in t] for t in terms]
    dims = [dict(declared).get(i) or ",".join(t) for i, t in enumerate(letters)]
    if "?" in equation:
        dims = [d.replace("N", f"N{i}") for i, d in enumerate(dims)]
    inputs = ", ".join(f"float[{d}] x{i}" if d else f"float x{i}" for i, d in enumerate(dims))
    first = " ".join(f"y{i} = Abs (x{i})" for i in range(len(dims)))
    operands = ", ".join(f"y{i}" for i in range(len(dims)))
    text = f"""<ir_version: 10, opset_import: ["": 20]> g ({inputs}) => (float[] z) {{
        {first} e = Einsum <equation = "{equation.replace("?", "N")}"> ({operands}) z = Neg (e) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))), terms


def _numbers(terms, sizes=SIZES):
    rng = np.random.default_rng(0)
    return {f"x{i}": rng.standard_normal([sizes[c] for c in t]).astype(np.float32) for i, t in enumerate(terms)}


def _ranks(equation):
    return [len(t.replace("...", "c")) for t in equation.partition("->")[0].split(",")]


@pytest.mark.parametrize("equation", PRODUCTS.split())
def test_numbers_of_numpy(equation):
    model, terms = _model(equation, _ranks(equation))
    assert "Einsum" not in [n.op_type for n in optimized(model).graph]
    x = _numbers(terms)
    expected = np.einsum(equation, *(abs(v).astype(np.float64) for v in x.values()))
    for without in ((), ("einsum_products",)):
        got = -Session(model, Options(threads=1, without=without)).run(x)["z"]
        np.testing.assert_allclose(got, expected, rtol=2e-6, strict=False)
        assert got.shape == expected.shape


@pytest.mark.parametrize("equation", ["Na,Nb->ab", "Nac,Nbc->cab", "Na,Na->a", "Na,Nb,c->abc"])
def test_sums_over_nothing_are_zero(equation):
    model, terms = _model(equation, _ranks(equation))
    x = _numbers(terms, {**SIZES, "N": 0})
    got = Session(model, Options(threads=1)).run(x)["z"]
    assert got.size
    assert not got.any()


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_what_stays(case):
    equation, declared = case
    model, _ = _model(equation, _ranks(equation), declared)
    assert "Einsum" in [n.op_type for n in optimized(model).graph]


def test_gradients_share_transposes_and_products():
    """Of Nacd,bacd->Nbcd and the gradients of both operands, each operand is transposed once."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[N,7,5,19] x, float[2,7,5,19] w, float[N,2,5,19] g)
        => (float[] y, float[] dx, float[] dw) { a = Abs (x) b = Abs (w) c = Abs (g)
        y = Einsum <equation = "Nacd,bacd->Nbcd"> (a, b) dx = Einsum <equation = "Nbcd,bacd->Nacd"> (c, b)
        dw = Einsum <equation = "Nbcd,Nacd->bacd"> (c, a) }"""
    graph = optimized(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))).graph
    absolute = [n.outputs[0] for n in graph if n.op_type == "Abs"]
    assert [len(v.uses()) for v in absolute] == [1, 1, 1]


def test_no_transpose_of_the_runtime_moves_single_numbers(tmp_path):
    """Weights lie in one order for both products; ONNX Runtime would turn both exchanges into one that is slow."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[N,7,5,19] x, float[7,2,5,19] w, float[N,2,5,19] g)
        => (float[] y, float[] dx) { a = Abs (x) c = Abs (g)
        y = Einsum <equation = "Nacd,abcd->Nbcd"> (a, w) dx = Einsum <equation = "Nbcd,abcd->Nacd"> (c, w) }"""
    model = optimized(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "run.onnx").graph.node
    orders = [list(n.attribute[0].ints) for n in nodes if n.op_type == "Transpose"]
    assert [3, 2, 1, 0] not in orders
    assert [2, 3, 1, 0] not in orders
    assert orders


#: Shapes of operands, axes and the attribute keepdims of sums of products that are products of matrices.
BROADCAST = {
    "grid": ("float", "784,3,1", "N,1,3,2", "-2", 0),
    "its cotangent": ("float", "N,784,1,2", "784,3,1", "1", 1),
    "two axes": ("float", "N,1,57,2", "N,35,1,2", "3,0", 0),
    "two axes, kept": ("double", "1,N,1,57,2", "N,35,1,2", "-1,1", 1),
    "an open axis": ("float", "N,57,1", "N,1,35", "0", 1),
    "a batch": ("double", "N,120,19,1", "N,1,19,70", "2", 1),
    "an axis of 1 as well": ("float", "1,M,1,57,5", "1,35,1,5", "-1,0", 0),
}
#: Those that stay.
NOT_BROADCAST = {
    "few numbers for a call each": ("float", "N,3,4,1", "N,1,4,2", "2", 0),
    "an axis of one operand": ("float", "N,784,3,1", "1,3,64", "1", 0),
    "sizes that may differ": ("float", "N,784,3,1", "M,1,3,64", "2", 0),
    "an operand with all axes": ("float", "N,784,3", "784,3", "2", 0),
    "halves": ("float16", "784,3,1", "N,1,3,64", "2", 0),
    "a product that is read": ("float", "784,3,1", "N,1,3,64", "2", 0),
}


def _broadcast(case, is_read=False):
    """A sum of the product of absolute values, which are results as well if `is_read`."""
    kind, x, y, axes, keepdims = case
    text = f"""<ir_version: 10, opset_import: ["": 20]> g ({kind}[{x}] x, {kind}[{y}] y) => ({kind}[] s{
        f", {kind}[] m" if is_read else ""
    }) <int64[{axes.count(",") + 1}] axes = {{{axes}}}> {{
        a = Abs (x) b = Abs (y) m = Mul (a, b) s = ReduceSum <keepdims = {keepdims}> (m, axes) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("size", [3, 1, 0])
@pytest.mark.parametrize("case", BROADCAST.values(), ids=BROADCAST)
def test_sums_of_broadcast_products(case, size):
    kind, *shapes, axes, keepdims = case
    model = _broadcast(case)
    assert "ReduceSum" not in [n.op_type for n in optimized(model).graph]
    rng, dtype = np.random.default_rng(0), np.float32 if kind == "float" else np.float64
    x, y = (rng.standard_normal([int(d) if d.isdigit() else size for d in s.split(",")]).astype(dtype) for s in shapes)
    product = abs(x).astype(np.float64) * abs(y)
    expected = product.sum(tuple(map(int, axes.split(","))), keepdims=bool(keepdims))
    got = Session(model, Options(threads=1)).run({"x": x, "y": y})["s"]
    np.testing.assert_allclose(got, expected, rtol=2e-6 if kind == "float" else 1e-14)
    assert got.shape == expected.shape
    assert got.dtype == dtype


@pytest.mark.parametrize("name", NOT_BROADCAST)
def test_broadcast_products_that_stay(name):
    graph = optimized(_broadcast(NOT_BROADCAST[name], is_read="read" in name)).graph
    assert [n.op_type for n in graph] == ["Abs", "Abs", "Mul", "ReduceSum"]


def test_both_cotangents_of_a_broadcast_product():
    """The cotangent of the sum is expanded, by the shape of the product that is summed."""
    model = vjp(_broadcast(("float", "784,3,1", "N,1,3,2", "2", 0)), wrt=["x", "y"])
    assert not {"Expand", "ReduceSum"} & {n.op_type for n in optimized(model).graph}
    rng = np.random.default_rng(0)
    x, y, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((784, 3, 1), (5, 1, 3, 2), (5, 784, 2)))
    found = Session(model, Options(threads=1)).run({"x": x, "y": y, "s_cotangent": g})
    dx = np.einsum("npj,nkj->pk", g, abs(y[:, 0])) * np.sign(x[:, :, 0])
    dy = np.einsum("npj,pk->nkj", g, abs(x[:, :, 0])) * np.sign(y[:, 0])
    np.testing.assert_allclose(found["x_grad"], dx[:, :, None], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["y_grad"], dy[:, None], rtol=1e-5, atol=1e-4)
