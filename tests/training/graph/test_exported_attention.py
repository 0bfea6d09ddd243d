"""Attention as transformers and both exporters of PyTorch write it: by blocks, and by the kernel."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from onnxgrad.runtime import Options, StepRunner  # noqa: E402
from onnxgrad.training import attach, compile_step  # noqa: E402
from onnxgrad.training.graph import attention_blocks  # noqa: E402
from tests.runtime.kernels.twins import needs_kernels  # noqa: E402
from tests.runtime.passes import with_kernels  # noqa: E402
from tests.zoo.architectures import stub_torchvision  # noqa: E402

TIME, WORDS, LAYERS = 48, 50, 2


class Logits(torch.nn.Module):
    """A language model as a function of two tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def exported(name, kind, how, path):
    """A decoder of two layers, of which Llama's has two heads of keys for four of queries."""
    stub_torchvision()
    import transformers as t

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_positions": TIME, "n_embd": 16, "n_layer": LAYERS, "n_head": 4}
        made = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=WORDS, attn_implementation=kind, use_cache=False, **sizes))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
        made = t.LlamaForCausalLM(t.LlamaConfig(
            vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=TIME, attn_implementation=kind,
            use_cache=False, **sizes,
        ))  # fmt: skip
    args = (torch.randint(0, WORDS, (2, TIME)), torch.ones(2, TIME, dtype=torch.long))
    options = {"dynamo": False, "opset_version": 18} if how == "legacy" else {"dynamo": True, "opset_version": int(how)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ["input_ids", "attention_mask"]
        torch.onnx.export(Logits(made.eval()), args, path, input_names=names, output_names=["logits"], **options)
    return onnx.load(path)


@needs_kernels
@pytest.mark.complete
@pytest.mark.parametrize("how", ["legacy", "18", "23"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attention_of_a_decoder_is_found(name, kind, how, tmp_path, monkeypatch):
    """Its gradients are those of all scores at once, also where padding comes first and hides all from queries.

    They are read off weights that a step moves far: of one that it moves by 1e-4, float32 shows three digits of that.
    """
    monkeypatch.setattr(attention_blocks, "KEYS", 16)
    training = attach(exported(name, kind, how, tmp_path / "m.onnx"), loss="cross_entropy", optimizer="sgd",
                      learning_rate=2.0**24)  # fmt: skip
    plain, blocks = (compile_step(training, attention_rows=rows) for rows in (0, 20))
    assert sum(n.op_type == "Scan" for n in blocks.model.graph) == 2 * LAYERS
    kernels = [n.op_type for n in with_kernels(plain.model).graph]
    assert (kernels.count("Attention"), kernels.count("AttentionGrad")) == (LAYERS, LAYERS)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, WORDS, (2, TIME)) for name in ("input_ids", "labels")}
    batch["attention_mask"] = np.ones((2, TIME), np.int64)
    batch["attention_mask"][1, :20] = 0
    moved = []
    for step, target in ((plain, "portable"), (blocks, "portable"), (plain, "native")):
        runner = StepRunner(step, options=Options(threads=1, target=target))
        before = runner.state()
        runner.step({name: batch[name] for name in step.batch})
        moved.append({n: a - before[n] for n, a in runner.state().items()})
    for name, array in moved[0].items():
        for other in moved[1:]:
            np.testing.assert_allclose(other[name], array, rtol=0, atol=2e-6 * np.abs(array).max(), err_msg=name)
