"""`onnxgrad.transplant`: trained weights in other exports of the same network."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

import onnxgrad
from onnxgrad.errors import BadInput
from tests.transplants.nets import LAYERS, VOCABULARY, WIDTH, decoder, trained, weights

IDS = np.random.default_rng(5).integers(0, VOCABULARY, (2, 6))


def _logits(model):
    session = onnxruntime.InferenceSession(model if isinstance(model, str) else model.SerializeToString())
    feeds = {"input_ids": IDS}
    for value in session.get_inputs()[1:]:
        dtype = np.float16 if "16" in value.type else np.float32
        feeds[value.name] = np.zeros((2, 0, WIDTH), dtype)
    return session.run(["logits"], feeds)[0]


EXPORTS = {
    "same": {},
    "made-up names": {"named": False},
    "transposed": {"gemm": True},
    "fused": {"fused": True},
    "fused, made-up names": {"fused": True, "named": False},
    "fused and transposed": {"fused": True, "gemm": True, "named": False},
    "with a cache": {"cache": True, "named": False, "fused": True},
    "untied": {"tied": False, "gemm": True},
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("source", ["same", "fused", "transposed"])
@pytest.mark.parametrize("target", EXPORTS)
def test_exports(tmp_path, source, target, fresh):
    """The result is the export of the trained weights, also if equal biases and norms begin alike."""
    before = weights(fresh=fresh)
    after = trained(before)
    done = onnxgrad.transplant(
        decoder(after, **EXPORTS[source]),
        decoder(before, **EXPORTS[target]),
        base=decoder(before, **EXPORTS[source]),
        output=tmp_path / "out.onnx",
    )
    want = decoder(after, **EXPORTS[target])
    np.testing.assert_allclose(_logits(str(tmp_path / "out.onnx")), _logits(want), rtol=1e-4, atol=1e-5)
    got = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    for tensor in want.graph.initializer:
        np.testing.assert_allclose(got[tensor.name], numpy_helper.to_array(tensor), rtol=1e-6, err_msg=tensor.name)
    assert done.difference < 1e-5 < 0.1 < done.before
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


@pytest.mark.parametrize("only", ["layers.1.norm", "layers.0.q", "layers.1.k.bias", "embed"])
@pytest.mark.parametrize("target", ["fused, made-up names", "untied"])
def test_some_weights(tmp_path, only, target):
    """The weights that training left alone keep their bytes."""
    before = weights()
    into = decoder(before, **EXPORTS[target])
    done = onnxgrad.transplant(decoder(trained(before, only)), into, base=decoder(before), output=tmp_path / "out.onnx")
    want = {t.name: t for t in decoder(trained(before, only), **EXPORTS[target]).graph.initializer}
    for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(want[tensor.name]))
    assert 1 <= len(done.changed) <= 2


def _dynamic(model, path, **settings):
    quantization.quantize_dynamic(model, path, **settings)
    return onnx.load(path)


def _blocks(model, **settings):
    made = MatMulNBitsQuantizer(model, algo_config=DefaultWeightOnlyQuantConfig(**settings))
    made.process()
    return made.model.model


QUANTIZERS = {
    "int8": lambda m, p: _dynamic(m, p, weight_type=quantization.QuantType.QInt8),
    "uint8": lambda m, p: _dynamic(m, p, weight_type=quantization.QuantType.QUInt8),
    "int8 by channel": lambda m, p: _dynamic(
        m, p, weight_type=quantization.QuantType.QInt8, per_channel=True, reduce_range=True
    ),
    "int4 in blocks": lambda m, p: _blocks(m, block_size=16, is_symmetric=True),
    "uint4 in blocks": lambda m, p: _blocks(m, block_size=16, is_symmetric=False),
    "int8 in blocks": lambda m, p: _blocks(m, block_size=32, is_symmetric=True, bits=8),
    "int4 with DequantizeLinear": lambda m, p: _blocks(
        m, block_size=16, is_symmetric=True, quant_format=quantization.QuantFormat.QDQ
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scheme", QUANTIZERS)
@pytest.mark.parametrize("fused", [False, True])
def test_quantized(tmp_path, scheme, fused):
    """The integers are those that the same quantizer makes of the trained weights."""
    before = weights()
    after = trained(before)
    kind = {"fused": fused, "named": False, "cache": True}
    quantizer = QUANTIZERS[scheme]
    done = onnxgrad.transplant(
        decoder(after),
        quantizer(decoder(before, **kind), tmp_path / "before.onnx"),
        base=decoder(before),
        output=tmp_path / "out.onnx",
    )
    want = {
        t.name: numpy_helper.to_array(t) for t in quantizer(decoder(after, **kind), tmp_path / "w").graph.initializer
    }
    got = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    assert want.keys() == got.keys()
    for name, array in want.items():
        assert got[name].shape == array.shape
        apart = np.abs(got[name].astype(np.float64) - array.astype(np.float64))
        if array.dtype.kind == "f":
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-7)
        else:  # a number at the middle between two may be rounded either way
            assert np.mean(apart > 0) < 0.01
    assert done.scheme > 1e-3
    assert done.difference < 2 * done.scheme + 0.05


@pytest.mark.parametrize("dtype", [np.float16])
def test_cast(tmp_path, dtype):
    """Weights in 16 bits are those of the trained model, rounded."""
    before = weights()
    after = trained(before)
    into = decoder(before, dtype=dtype, named=False, fused=True)
    onnxgrad.transplant(decoder(after), into, base=decoder(before), output=tmp_path / "out.onnx")
    want = {t.name: t for t in decoder(after, dtype=dtype, named=False, fused=True).graph.initializer}
    for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(want[tensor.name]))


def test_one_token_at_a_time(tmp_path):
    """A decoder that takes one token is compared token by token, with its own cache."""
    before = weights()
    after = trained(before)
    into = decoder(before, cache=True, step=True, named=False)
    done = onnxgrad.transplant(decoder(after), into, base=decoder(before), output=tmp_path / "out.onnx")
    assert done.difference < 1e-5 < 0.1 < done.before
    want = {t.name: t for t in decoder(after, cache=True, step=True, named=False).graph.initializer}
    for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(want[tensor.name]))


def _merged(parameters):
    """Both exports in the branches of an If, as Optimum merges them."""
    graphs = []
    for kind, prefix in (({"cache": True}, "with_"), ({}, "without_")):
        model = onnx.compose.add_prefix(decoder(parameters, named=False, **kind), prefix, rename_inputs=False)
        del model.graph.output[1:], model.graph.input[:]
        graphs.append(model.graph)
    inputs = [*decoder(parameters, cache=True).graph.input]
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    node = helper.make_node("If", [flag.name], ["logits"], then_branch=graphs[0], else_branch=graphs[1])
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])
    graph = helper.make_graph([node], "merged", [*inputs, flag], [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_merged(tmp_path):
    """The weights in both branches of a decoder with and without a cache are replaced."""
    before = weights()
    after = trained(before)
    onnxgrad.transplant(decoder(after), _merged(before), base=decoder(before), output=tmp_path / "out.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    past = {v.name: np.zeros((2, 0, WIDTH), np.float32) for v in session.get_inputs() if "past" in v.name}
    for flag in (False, True):
        feeds = {"input_ids": IDS, "use_cache_branch": np.array([flag]), **past}
        (logits,) = session.run(None, feeds)
        np.testing.assert_allclose(logits, _logits(decoder(after)), rtol=1e-4, atol=1e-5)


def test_without_base(tmp_path):
    """Similar weights are taken for the same where the file before training is not at hand."""
    before = weights()
    after = trained(before, size=0.03)
    into = decoder(before, named=False, gemm=True)
    onnxgrad.transplant(decoder(after), into, output=tmp_path / "out.onnx")
    np.testing.assert_allclose(_logits(str(tmp_path / "out.onnx")), _logits(decoder(after)), rtol=1e-4, atol=1e-5)


def test_equal_weights_stored_once(tmp_path):
    """An exporter that stores equal norms once: each reader gets its own trained weight."""
    before = weights(fresh=True)
    after = trained(before, "norm")
    into = decoder(before, named=False)
    first, *others = [t.name for t in into.graph.initializer if np.all(numpy_helper.to_array(t) == 1)]
    assert len(others) == LAYERS - 1
    for node in into.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = first if name in others else name
    kept = [t for t in into.graph.initializer if t.name not in others]
    del into.graph.initializer[:]
    into.graph.initializer.extend(kept)
    onnxgrad.transplant(decoder(after), into, base=decoder(before), output=tmp_path / "out.onnx")
    np.testing.assert_allclose(_logits(str(tmp_path / "out.onnx")), _logits(decoder(after)), rtol=1e-4, atol=1e-5)


def test_untied_by_training(tmp_path):
    """An output layer that was equal to the embedding and is not any more, in a file that stores it once."""
    before = weights()
    after = {**trained(before), "head.weight": trained(before, seed=2)["embed.weight"]}
    source, base = decoder(after, tied=False), decoder(before, tied=False)
    onnxgrad.transplant(source, decoder(before, named=False), base=base, output=tmp_path / "out.onnx")
    np.testing.assert_allclose(_logits(str(tmp_path / "out.onnx")), _logits(source), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other checkpoint", "does not compute what the base computes"),
        ("fewer weights", "have no place in the target: .*layers.1.up"),
        ("nothing trained", "training has changed no weight"),
    ],
)
def test_refused(tmp_path, case, words):
    """A target that does not fit is refused by name, and nothing is written."""
    before = weights()
    after = trained(before)
    source, base, into = decoder(after), decoder(before), decoder(before, named=False)
    if case == "other checkpoint":
        into = decoder(weights(seed=3))
    elif case == "fewer weights":
        node = [n for n in into.graph.node if n.op_type == "Tanh"][-1]
        add = next(n for n in into.graph.node if node.input[0] in n.output)
        product = next(n for n in into.graph.node if add.input[0] in n.output)
        held = next(t for t in into.graph.initializer if t.name == product.input[1])
        held.CopyFrom(numpy_helper.from_array(np.zeros((WIDTH, 2 * WIDTH), np.float32), held.name))
    else:
        source = base
    with pytest.raises(BadInput, match=words):
        onnxgrad.transplant(source, into, base=base, output=tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())
