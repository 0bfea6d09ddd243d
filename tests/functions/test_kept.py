"""Local functions that stay functions: the same numbers as inlined, in every mode and order, in smaller models."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import grad, jvp, signature, value_and_grad, vjp
from onnxgrad.door import functions
from tests.functions.programs import Random, transformer
from tests.models import assert_sound, nodes_of

WEIGHTS = ("wq0", "w21", "g1", "x")


@pytest.fixture
def all_kept(monkeypatch):
    """Every function stays one, however small."""
    monkeypatch.setattr(functions, "SMALLEST", 0)
    monkeypatch.setattr(functions, "SAVES", -(10**9))


def inlined(derive, *args, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "SAVES", 10**9)
        made = derive(*args, **kwargs)
    assert not made.functions
    return made


def run(proto: onnx.ModelProto, feeds) -> dict[str, np.ndarray]:
    """On ONNX Runtime, which must be able to."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in proto.graph.output], session.run(None, feeds)))


def agree(a: onnx.ModelProto, b: onnx.ModelProto, feeds=None, tolerance: float = 1e-6) -> None:
    """Both models are sound, and give the same."""
    feeds = dict(feeds or {})
    rng = np.random.default_rng(5)
    for i in a.graph.input:
        dims = [d.dim_value or 3 for d in i.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        feeds.setdefault(i.name, rng.standard_normal(dims).astype(dtype))
    assert_sound(a)
    got, want = run(a, feeds), run(b, feeds)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("derive", [grad, value_and_grad, vjp, jvp])
def test_a_transformer_of_one_function(derive):
    source = transformer(8)
    kept = derive(source, wrt=WEIGHTS)
    assert kept.functions
    agree(kept, inlined(derive, source, wrt=WEIGHTS), tolerance=1e-5)


def test_48_layers_are_not_48_copies():
    source = transformer(48)
    wrt = [t.name for t in source.graph.initializer]
    kept = grad(source, wrt=wrt)
    flat = inlined(grad, source, wrt=wrt)
    assert len(kept.functions) <= 4  # two of them: the first layer need not hand on
    count = sum(1 for _ in nodes_of(kept.graph)) + sum(len(f.node) for f in kept.functions)
    assert count < 400
    assert count < len(flat.graph.node) / 10
    added = [len(m.SerializeToString()) - len(source.SerializeToString()) for m in (kept, flat)]
    assert added[0] < added[1] / 3
    agree(kept, flat, {"x": np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)}, tolerance=1e-4)


@pytest.mark.parametrize("outer", [grad, jvp])
@pytest.mark.parametrize("inner", [grad, jvp])
def test_second_order(inner, outer):
    source = transformer(8, shape=(1, 2))

    def both():
        first = inner(source, wrt=["wq0", "x"])
        of = [*signature(first).gradients.values(), *signature(first).output_tangents.values()]
        return outer(first, wrt=["w21", "x"], of=of)

    kept = both()
    assert any("forward" in f.name for f in kept.functions)
    agree(kept, inlined(both), tolerance=1e-4)


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed, all_kept):
    source = Random(seed).model()
    for derive in (vjp, jvp):
        kept = derive(source, wrt=["x", "w"])
        assert kept.functions
        agree(kept, inlined(derive, source, wrt=["x", "w"]), tolerance=2e-5)
    if seed % 4 == 0:
        first = vjp(source, wrt="x")
        of = signature(first).gradients["x"]
        for derive in (vjp, jvp):
            agree(
                derive(first, wrt="x", of=of),
                inlined(derive, inlined(vjp, source, wrt="x"), wrt="x", of=of),
                tolerance=1e-4,
            )
