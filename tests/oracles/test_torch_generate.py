"""Greedy completions against ``generate`` of transformers: decoders with and without a cache, T5 and Whisper."""

import sys

import numpy as np
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


SPEECH = [np.random.default_rng(i).standard_normal((8, 40)).astype(np.float32) for i in range(3)]


def t5(transformers):
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=3.0,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def whisper(transformers):
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        max_target_positions=40, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, bos_token_id=3, init_std=0.3,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


def export_parts(module, folder, newer):
    """Write ``whole.onnx``, and the encoder and the decoder of it as two files."""
    import torch

    reads = module.main_input_name
    is_text = reads == "input_ids"
    source = torch.randint(2, 97, (2, 6)) if is_text else torch.randn(2, 8, 40)
    ids, states = torch.randint(2, 97, (2, 5)), torch.randn(2, 6 if is_text else 20, 32)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, source, ids):
            return self.module(**{reads: source}, decoder_input_ids=ids, use_cache=False).logits

    class Encoder(Whole):
        def forward(self, source):
            return self.module.get_encoder()(source).last_hidden_state

    class Decoder(Whole):
        def forward(self, ids, states):
            return self.module(decoder_input_ids=ids, encoder_outputs=(states,), use_cache=False).logits

    parts = {
        "whole": (Whole, {reads: source, "decoder_input_ids": ids}, "logits"),
        "encoder": (Encoder, {reads: source}, "last_hidden_state"),
        "decoder": (Decoder, {"input_ids": ids, "encoder_hidden_states": states}, "logits"),
    }
    for name, (kind, given, output) in parts.items():
        axes = {n: {0: "N", 1: "S"} if is_text or "features" not in n else {0: "N"} for n in (*given, output)}
        if not is_text and name == "decoder":
            axes["encoder_hidden_states"] = {0: "N"}
        settings = {"dynamic_axes": axes}
        if newer:
            free = {n: dict.fromkeys(axes[n], torch.export.Dim.DYNAMIC) for n in given}
            settings = {"dynamic_shapes": tuple(free.values())}
        torch.onnx.export(
            kind().eval(), tuple(given.values()), str(folder / f"{name}.onnx"), dynamo=newer, opset_version=18,
            input_names=list(given), output_names=[output], **settings,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "sources", "newer"), [(t5, PROMPTS, False), (whisper, SPEECH, True)])
def test_an_encoder_and_a_decoder(transformers, tmp_path, build, sources, newer):
    """The whole file and, with its weights transplanted, both parts complete sources as transformers does."""
    import torch

    torch.manual_seed(0)
    module = build(transformers)
    before, after, out = (tmp_path / name for name in ("before", "after", "out"))
    for folder in (before, after, out):
        folder.mkdir()
    export_parts(module, before, newer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    export_parts(module, after, newer)
    wanted = []
    for source in sources:
        row = torch.tensor(np.array([source]))
        given = {"attention_mask": torch.ones_like(row)} if row.ndim == 2 else {}
        wanted.append(module.generate(row, max_new_tokens=8, do_sample=False, **given)[0].tolist())
        wanted[-1] = wanted[-1][wanted[-1][0] == 0 :]  # without the token that begins
    onnxgrad.transplant(
        after / "whole.onnx", before / "decoder.onnx", encoder=before / "encoder.onnx", base=before / "whole.onnx",
        output=out,
    )  # fmt: skip
    settings = {"decoder_start": [0], "max_new_tokens": 8, "end_token": 1}
    for model, encoder in ((after / "whole.onnx", None), (out / "decoder.onnx", out / "encoder.onnx")):
        found = onnxgrad.generate(model, sources, encoder=encoder, **settings)
        assert [c.tokens for c in found] == wanted
