"""QLoRA: adapters beside matrices of 4 bits, whose matrices are unpacked in the backward pass alone."""

import numpy as np
import onnx
import pytest

from onnxgrad import LoRA, Trainer

K, N, SIZE = 32, 64, 16


def model(rng, form, opset=21, points=None):
    """Three products in a row, in 4 bits (`form` "packed") or with the same matrices as floats."""
    nodes = ["h0 = Tanh (x)"]
    sizes, held = [(K, N), (N, K), (K, N)], {}
    for i, (rows, columns) in enumerate(sizes):
        blocks = rows // SIZE
        fours = rng.integers(0, 256, (columns, blocks, SIZE // 2)).astype(np.uint8)
        scales = (0.02 + 0.02 * rng.random((columns, blocks))).astype(np.float32)
        zeros = rng.integers(0, 256, (columns, blocks // 2)).astype(np.uint8)
        shift = np.full((columns, blocks), 8) if points is None else unpacked(zeros)
        numbers = unpacked(fours).reshape(columns, blocks, SIZE) - shift[..., None]
        if form == "packed":
            extra = "" if points is None else f", z{i}"
            held |= {f"w{i}": fours, f"s{i}": scales} | ({} if points is None else {f"z{i}": zeros})
            nodes.append(
                f"p{i} = com.microsoft.MatMulNBits <K = {rows}, N = {columns}, bits = 4, block_size = {SIZE}> "
                f"(h{i}, w{i}, s{i}{extra})"
            )
        else:
            held[f"w{i}"] = (numbers * scales[..., None]).astype(np.float32).reshape(columns, rows).T
            nodes.append(f"p{i} = MatMul (h{i}, w{i})")
        nodes.append(f"h{i + 1} = Tanh (p{i})")
    text = f"""<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>
        packed (float[B, T, {K}] x) => (float[B, T, {N}] h3) {{ {" ".join(nodes)} }}"""
    found = onnx.parser.parse_model(text)
    found.graph.initializer.extend(onnx.numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in held.items())
    return found


def unpacked(array):
    return np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1).astype(np.int64)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("points", "opset"), [(None, 21), (True, 21), (None, 20), (True, 23)])
def test_adapters_train_as_beside_the_same_floats(points, opset):
    runs, data = {}, np.random.default_rng(1)
    rows = {n: data.standard_normal((24, 3, d)).astype(np.float32) for n, d in (("x", K), ("labels", N))}
    for form in ("packed", "floats"):
        asked = LoRA(rank=2, targets=["w0", "w1", "w2"], seed=4)
        run = Trainer(model(np.random.default_rng(0), form, opset, points), loss="mse", optimizer="sgd",
                      learning_rate=2.0, adapter=asked)  # fmt: skip
        run.fit(rows, epochs=3, batch_size=8, shuffle=False)
        runs[form] = run
    packed, floats = runs["packed"], runs["floats"]
    ops = [n.op_type for n in packed.step.model.graph]
    if opset >= 21:
        assert ops.count("MatMulNBits") == 3, "the products stay"
        assert ops.count("DequantizeLinear") == 2, "the first one has no cotangent to give"
        assert not {"BitShift", "BitwiseAnd"} & set(ops)
    np.testing.assert_allclose(
        [e["loss"] for e in packed.history.epochs], [e["loss"] for e in floats.history.epochs], rtol=1e-6
    )
    assert packed.history.epochs[-1]["loss"] < 0.999 * packed.history.epochs[0]["loss"]
    for name, array in floats.state().items():
        np.testing.assert_allclose(packed.state()[name], array, rtol=0, atol=1e-6, err_msg=name)


def test_scales_that_train_have_their_gradient():
    source = model(np.random.default_rng(0), "packed")
    asked = LoRA(rank=2, targets=["w1"], train_also=["s2"])
    run = Trainer(source, loss="mse", learning_rate=0.01, optimizer="sgd", adapter=asked)
    data = np.random.default_rng(1)
    rows = {n: data.standard_normal((8, 3, d)).astype(np.float32) for n, d in (("x", K), ("labels", N))}
    before = run.state()["s2"].copy()
    run.fit(rows, epochs=1, batch_size=8)
    assert (run.state()["s2"] != before).mean() > 0.9
