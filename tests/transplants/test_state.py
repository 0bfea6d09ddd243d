"""`transplant` to safetensors: trained weights under the names of modules of a framework."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import onnxgrad
from onnxgrad.errors import BadInput
from tests.commands import command
from tests.transplants.nets import LAYERS, VOCABULARY, WIDTH, decoder, trained, weights


def _state(parameters, *, fused=False, prefix="decoder."):
    """The parameters as a framework has them: with its own names and, if asked for, fused queries, keys and values."""
    found = dict(parameters)
    for i in range(LAYERS) if fused else ():
        for end in ("weight", "bias"):
            parts = [found.pop(f"layers.{i}.{n}.{end}") for n in "qkv"]
            found[f"layers.{i}.in_proj_{end}"] = np.concatenate(parts)
    return {f"{prefix}{n}": a for n, a in found.items()} | {f"{prefix}steps": np.arange(3)}


@pytest.mark.parametrize("kind", [{}, {"named": False}, {"fused": True, "named": False}, {"tied": False}])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_like(tmp_path, kind, fused, dtype):
    """Names, shapes and types are those of the example; integers stay."""
    before = weights()
    after = trained(before)
    example = {n: a.astype(dtype if a.dtype.kind == "f" else a.dtype) for n, a in _state(before, fused=fused).items()}
    save_file(example, tmp_path / "before.safetensors", {"format": "pt"})
    onnxgrad.transplant(
        decoder(after, **kind),
        tmp_path / "before.safetensors",
        base=decoder(before, **kind),
        output=tmp_path / "after.safetensors",
    )
    got = load_file(tmp_path / "after.safetensors")
    want = _state(after, fused=fused)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array.astype(example[name].dtype), err_msg=name)


def test_names_of_the_export(tmp_path):
    """Without an example, a name is that of the initializer or of the module of the node that reads it."""
    after = trained(weights())
    model = decoder(after)
    for node in model.graph.node:  # as PyTorch's exporter names nodes
        held = [n for n in node.input if n.startswith("onnx::MatMul_")]
        if held:
            node.name = "/" + held[0].removeprefix("onnx::MatMul_").replace(".q", "/q") + "/MatMul"
            node.name = "/layers." + held[0].removeprefix("onnx::MatMul_layers.").replace(".", "/") + "/MatMul"
    onnxgrad.transplant(model, None, output=tmp_path / "state.safetensors")
    got = load_file(tmp_path / "state.safetensors")
    assert got.keys() == after.keys()
    for name, array in after.items():
        np.testing.assert_array_equal(got[name], array)


def test_bad_input(tmp_path):
    """Weights without a place are named, and nothing is written."""
    before = weights()
    state = {n: a for n, a in _state(before).items() if "layers.1.down" not in n}
    save_file(state, tmp_path / "less.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "less.safetensors").read_bytes()[:-9])
    for like, words in (
        ("less.safetensors", r"2 weights of the source have no place in the target: .*layers\.1\.down"),
        ("cut.safetensors", "is no safetensors file, or a damaged one"),
        ("none.safetensors", "there is no file .*none"),
    ):
        with pytest.raises(BadInput, match=words):
            onnxgrad.transplant(
                decoder(trained(before)), tmp_path / like, base=decoder(before), output=tmp_path / "out.safetensors"
            )
    with pytest.raises(BadInput, match="no names of modules for onnx::Held_101"):
        onnxgrad.transplant(decoder(before, named=False), None, output=tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.torch
def test_loaded_by_torch(tmp_path):
    """A module of PyTorch with the file computes what the trained model computes."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_state
    from safetensors.torch import save_file as save_state

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = torch.nn.Linear(WIDTH, 3 * WIDTH)
            self.o = torch.nn.Linear(WIDTH, WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
            self.norm = torch.nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            h = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * self.norm
            q, k, v = self.in_proj(h).chunk(3, -1)
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = (q @ k.transpose(1, 2) * WIDTH**-0.5).masked_fill(~seen, -1e4)
            x = x + self.o(torch.softmax(scores, -1) @ v)
            return x + self.down(torch.tanh(self.up(x)))

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = torch.nn.ModuleList(Attention() for _ in range(LAYERS))

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return x @ self.embed.weight.T

    before = weights()
    net = Decoder()
    state = {}
    for name, array in _state(before, fused=True, prefix="").items():
        name = name.replace("layers.", "blocks.").replace("in_proj_", "in_proj.").replace("norm.weight", "norm")
        if name != "steps":
            state[name] = torch.tensor(array)
    net.load_state_dict(state)
    save_state(net.state_dict(), tmp_path / "before.safetensors")
    import onnx
    import onnxruntime

    onnx.save(decoder(trained(before)), tmp_path / "trained.onnx")
    onnx.save(decoder(before), tmp_path / "base.onnx")
    done = command(
        *("transplant", tmp_path / "trained.onnx", "--base", tmp_path / "base.onnx"),
        *("--to", tmp_path / "after.safetensors", "--like", tmp_path / "before.safetensors"),
    )
    assert done.returncode == 0, done.stderr
    net.load_state_dict(load_state(tmp_path / "after.safetensors"))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))
    (want,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(["logits"], {"input_ids": ids})
    np.testing.assert_allclose(net(torch.tensor(ids)).detach().numpy(), want, rtol=1e-3, atol=1e-4)
