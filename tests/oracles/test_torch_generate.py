"""Greedy completions against ``generate`` of transformers, for exports with and without a cache."""

import sys

import pytest

import onnxgrad

pytestmark = pytest.mark.torch
PROMPTS = [[1, 2, 3], [5, 6, 7], [9, 8, 7, 6, 5], [4]]
LAYERS, HEADS, SIZE = 2, 4, 8


@pytest.fixture(scope="module")
def transformers():
    sys.modules.setdefault("torchvision", None)  # that of another build of torch stops the import
    return pytest.importorskip("transformers")


def network(transformers, kind):
    import torch

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=HEADS, initializer_range=0.3,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval(), HEADS
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), 2


def export(module, heads, past, path):
    """Write `module`, as Optimum does, with inputs ``past_key_values.*`` and outputs ``present.*`` if `past`."""
    import torch
    from transformers.cache_utils import DynamicCache

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, input_ids, attention_mask, position_ids, *past):
            cache = DynamicCache()
            for i in range(0, len(past), 2):
                cache.update(past[i], past[i + 1], i // 2)
            own = {"attention_mask": attention_mask, "position_ids": position_ids}
            found = self.module(
                input_ids=input_ids, past_key_values=cache if past else None, use_cache=bool(past), **own
            )
            layers = found.past_key_values.layers if past else ()
            return (found.logits, *(t for layer in layers for t in (layer.keys, layer.values)))

    before = 3 if past else 0
    mask = torch.ones(2, before + 5, dtype=torch.long)
    places = torch.arange(before, before + 5)[None].repeat(2, 1)
    given = [torch.randn(2, heads, before, SIZE) for _ in range(2 * LAYERS)] if past else []
    names = [f"{i}.{part}" for i in range(LAYERS) for part in ("key", "value")] if past else []
    inputs = ["input_ids", "attention_mask", "position_ids"]
    axes = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "position_ids", "logits")}
    axes |= {"attention_mask": {0: "batch", 1: "total"}}
    axes |= {f"past_key_values.{n}": {0: "batch", 2: "past"} for n in names}
    torch.onnx.export(
        Wrapped().eval(), (torch.randint(0, 97, (2, 5)), mask, places, *given), path, dynamo=False, opset_version=18,
        input_names=[*inputs, *(f"past_key_values.{n}" for n in names)],
        output_names=["logits", *(f"present.{n}" for n in names)],
        dynamic_axes=axes | {f"present.{n}": {0: "batch", 2: "total"} for n in names},
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_completions_are_those_of_transformers(transformers, tmp_path, kind, past):
    import torch

    module, heads = network(transformers, kind)
    path = str(tmp_path / "model.onnx")
    export(module, heads, past, path)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = []
    for prompt in PROMPTS:
        row = torch.tensor([prompt])
        wanted.append(module.generate(row, attention_mask=torch.ones_like(row), **settings)[0, len(prompt) :].tolist())
    for cache in (True, False):
        found = onnxgrad.generate(path, PROMPTS, max_new_tokens=16, cache=cache)
        assert [c.tokens for c in found] == wanted
