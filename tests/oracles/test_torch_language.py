"""Training of decoders from text against PyTorch, exported by both of its exporters with and without a cache."""

import numpy as np
import pytest

from onnxgrad.training import Trainer
from onnxgrad.training.loop.callbacks import Callback

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

VOCABULARY, BATCH, STEPS = 120, 4, 10
SETTINGS = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01}


def gpt2():
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, attn_implementation="eager", **sizes, **dropout)
    return transformers.GPT2LMHeadModel(config), 2


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, attn_implementation="eager", **sizes, **heads)
    return transformers.LlamaForCausalLM(config), 2


class Plain(torch.nn.Module):
    """The model without a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class Cached(Plain):
    """The model with its cache as inputs and outputs."""

    def forward(self, input_ids, attention_mask, position_ids, *past):
        cache = transformers.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        out = self.model(**feeds, past_key_values=cache, use_cache=True)
        return (out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)))


def exported(model, layers, cached, dynamo, path):
    """The file of `model`."""
    config = model.config
    ids = torch.randint(0, VOCABULARY, (2, 5))
    axes = {"input_ids": {0: "N", 1: "T"}, "attention_mask": {0: "N", 1: "S" if cached else "T"}}
    values, outputs = [ids, torch.ones(2, 8 if cached else 5, dtype=torch.int64)], ["logits"]
    if cached:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = config.hidden_size // config.num_attention_heads
        axes["position_ids"] = {0: "N", 1: "T"}
        axes |= {f"past_key_values.{k}.{w}": {0: "N", 2: "P"} for k in range(layers) for w in ("key", "value")}
        values += [torch.arange(3, 8).repeat(2, 1), *(torch.randn(2, heads, 3, size) for _ in range(2 * layers))]
        outputs += [n.replace("past_key_values", "present") for n in axes if n.startswith("past")]
    own = [dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in axes.values()]
    shapes = {"dynamic_shapes": (*own[:3], tuple(own[3:])) if cached else tuple(own)}
    named = {"dynamic_axes": axes | {"logits": {0: "N", 1: "T"}}}
    torch.onnx.export(
        (Cached if cached else Plain)(model), tuple(values), path, input_names=list(axes), output_names=outputs,
        dynamo=dynamo, opset_version=18, **(shapes if dynamo else named),
    )  # fmt: skip


class Losses(Callback):
    def __init__(self):
        self.values = []

    def step(self, run, loss):
        self.values.append(loss)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_losses_are_those_of_pytorch(build, cached, dynamo, tmp_path):
    torch.manual_seed(0)
    model, layers = build()
    with torch.no_grad():
        for parameter in model.parameters():  # as of a trained model, without equal tensors
            parameter += 0.02 * torch.randn_like(parameter)
    exported(model.eval(), layers, cached, dynamo, tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCABULARY, random.integers(3, 20)).tolist() for _ in range(STEPS * BATCH)]
    rows.sort(key=len)
    model.train()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01), []
    for begin in range(0, len(rows), BATCH):
        some = rows[begin : begin + BATCH]
        longest = max(map(len, some))
        ids, mask = (
            torch.tensor([[*f(r), *[0] * (longest - len(r))] for r in some]) for f in (list, lambda r: [1] * len(r))
        )
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    found = Losses()
    trainer = Trainer(tmp_path / "m.onnx", task="causal_lm", **SETTINGS)
    trainer.fit([{"input_ids": row} for row in rows], batch_size=BATCH, shuffle=False, callbacks=[found])
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
