"""``python -m benchmarks.language --page PAGE``: decoders from text to a file that generates, beside PyTorch.

Each decoder (random weights, of transformers) is exported by one of PyTorch's exporters for training, and with a KV
cache in the layout of Optimum. Both programs train on the same rows with the same optimizer, each in a process of its
own, on one thread, whose processor time is compared: other programs on the machine change it little. PyTorch trains a
second time from weights that are one rounding apart: how far that moves its losses is what rounding explains. The
trained file is transplanted into the export with a cache, and both complete the same prompts. The text is
Python's own documentation (``pydoc_data``). Needs PyTorch, transformers and peft (``tests/oracle-packages.txt``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import resident
from benchmarks.training.__main__ import processor

VOCABULARY, LENGTH, ROWS, RATE = 4096, 128, 8, 1e-4
LORA_STEPS = 30
#: The class of transformers, what its configuration says, and whether PyTorch's newer exporter writes the file.
DECODERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "GPT-2": ("GPT2", {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 512, "resid_pdrop": 0.0,
                       "embd_pdrop": 0.0, "attn_pdrop": 0.0}, False),
    "Llama": ("Llama", {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
                        "num_attention_heads": 8, "num_key_value_heads": 4}, True),
    "Qwen2": ("Qwen2", {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
                        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}, False),
}  # fmt: skip


def corpus() -> str:
    """A text of half a million letters."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def tokenizer_of(text: str, path: Path) -> Any:
    """A tokenizer trained on the text, saved at `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"]))
    made.save(str(path))
    return made


def network(name: str) -> Any:
    """The decoder, the same for each call."""
    import torch

    sys.modules["torchvision._meta_registrations"] = types.ModuleType("none")  # torchvision may be of another build
    import transformers

    kind, how, _ = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, attn_implementation="eager", **how
    )
    return getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config).eval()


def export(name: str, place: Path) -> None:
    """Write ``plain.onnx``, which reads whole rows, and ``cached.onnx``, which reads the keys of earlier tokens."""
    import torch

    net = network(name)
    from transformers import DynamicCache

    layers = net.config.num_hidden_layers
    heads = getattr(net.config, "num_key_value_heads", None) or net.config.num_attention_heads
    size = net.config.hidden_size // net.config.num_attention_heads

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    class Cached(Plain):
        def forward(self, input_ids: Any, attention_mask: Any, *past: Any) -> Any:
            cache = DynamicCache()
            for i in range(layers):
                cache.update(past[2 * i], past[2 * i + 1], i)
            found = self.net(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            kept = found.past_key_values
            return found.logits, *(x for i in range(layers) for x in (kept.layers[i].keys, kept.layers[i].values))

    ids = torch.randint(0, VOCABULARY, (2, 5))
    dynamic = {"input_ids": {0: "N", 1: "T"}, "attention_mask": {0: "N", 1: "S"}}
    newer = DECODERS[name][2]
    if newer:
        rows, steps = torch.export.Dim("N", min=1, max=64), torch.export.Dim("T", min=2, max=512)
        shapes = {"input_ids": {0: rows, 1: steps}, "attention_mask": {0: rows, 1: steps}}
        program = torch.onnx.export(
            Plain(), (ids, torch.ones_like(ids)), input_names=["input_ids", "attention_mask"],
            output_names=["logits"], dynamic_shapes=shapes, dynamo=True, verbose=False,
        )  # fmt: skip
        program.save(str(place / "plain.onnx"))
    else:
        torch.onnx.export(
            Plain(), (ids, torch.ones_like(ids)), str(place / "plain.onnx"), dynamo=False,
            input_names=["input_ids", "attention_mask"], output_names=["logits"],
            dynamic_axes={**dynamic, "attention_mask": {0: "N", 1: "T"}},
        )  # fmt: skip
    names = [f"{i}.{part}" for i in range(layers) for part in ("key", "value")]
    past = [torch.randn(2, heads, 3, size) for _ in names]
    for n in names:
        dynamic |= {f"past_key_values.{n}": {0: "N", 2: "P"}, f"present.{n}": {0: "N", 2: "S"}}
    torch.onnx.export(
        Cached(), (ids, torch.ones(2, 8, dtype=torch.int64), *past), str(place / "cached.onnx"), dynamo=False,
        input_names=["input_ids", "attention_mask", *(f"past_key_values.{n}" for n in names)],
        output_names=["logits", *(f"present.{n}" for n in names)], dynamic_axes=dynamic,
    )  # fmt: skip


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resident() / 1e6


def report(losses: list[float], marks: list[float], before: float) -> None:
    """Print what a process measured of itself; `marks` are its processor time after each step."""
    step = float(np.median(np.diff(marks)[3:]))
    print("RESULT " + json.dumps({"losses": losses, "step": step, "memory": peak() - before}))


def ours(place: Path, lora: bool) -> None:
    """Train ``plain.onnx`` on the rows of ``rows.npy``."""
    import onnxgrad
    from onnxgrad.runtime import Options
    from onnxgrad.training import Callback

    before = peak()
    rows = [{"input_ids": r.tolist()} for r in np.load(place / "rows.npy")]
    losses: list[float] = []
    marks: list[float] = []

    class Watch(Callback):
        def step(self, run: Any, loss: float) -> None:
            losses.append(float(loss))
            marks.append(time.process_time())

    trainer = onnxgrad.train(
        place / "plain.onnx", rows, task="causal_lm", tokenizer=str(place / "tokenizer.json"), optimizer="adamw",
        learning_rate=RATE, weight_decay=0.01, batch_size=ROWS, epochs=1, shuffle=False, progress=False,
        callbacks=[Watch()], options=Options(threads=1), **({"lora": 8} if lora else {}),
    )  # fmt: skip
    report(losses, marks, before)
    if not lora:
        trainer.save(place / "trained.onnx")


def theirs(name: str, place: Path, lora: bool, moved: bool = False) -> None:
    """Train the network in PyTorch; with `lora`, by PEFT; if `moved`, from weights that are one rounding apart."""
    import torch

    torch.set_num_threads(1)
    before = peak()
    net = network(name)
    if moved:
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(1 + torch.finfo(torch.float32).eps * (2 * torch.rand_like(weight) - 1))
    if lora:
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(r=8, lora_alpha=8, target_modules="all-linear"))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
    net.train()
    rows = torch.from_numpy(np.load(place / "rows.npy"))
    losses, marks = [], []
    for i in range(0, len(rows), ROWS):
        ids = rows[i : i + ROWS]
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        marks.append(time.process_time())
    report(losses, marks, before)


def process(*words: str) -> dict[str, Any]:
    """The result of a process of this module."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.language", *words], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(lines[-1].removeprefix("RESULT "))


def proven(name: str, steps: int) -> str:
    """A row of the table."""
    import onnxgrad

    with tempfile.TemporaryDirectory() as folder:
        place, text = Path(folder), corpus()
        tokenizer = tokenizer_of(text, place / "tokenizer.json")
        export(name, place)
        ids = np.array(tokenizer.encode(text).ids[: steps * ROWS * LENGTH], np.int64)
        found = {}
        for lora, count in (("", steps), ("lora", min(steps, LORA_STEPS))):
            np.save(place / "rows.npy", ids[: count * ROWS * LENGTH].reshape(-1, LENGTH))
            for who in ("theirs", "ours", *(() if lora else ("moved",))):
                found[f"{who}{lora}"] = process("--run", who, name, str(place), lora)
        a, b, c = found["ours"], found["theirs"], found["moved"]
        apart = [max(abs(x - y) for x, y in zip(o["losses"], b["losses"], strict=True)) for o in (a, c)]
        onnxgrad.transplant(
            place / "trained.onnx", place / "cached.onnx", base=place / "plain.onnx", output=place / "generating.onnx"
        )
        prompts, how = ["The statement", "A class is", "If an exception"], {"max_new_tokens": 16}
        completions = []
        for file in ("trained.onnx", "generating.onnx"):
            made = onnxgrad.generate(place / file, prompts, tokenizer=str(place / "tokenizer.json"), **how)
            completions.append([c.text for c in made])
        count = sum(p.numel() for p in network(name).parameters())
    ratios = [found[f"ours{k}"][what] / found[f"theirs{k}"][what] for k in ("", "lora") for what in ("step", "memory")]
    same = "yes" if completions[0] == completions[1] else "no"
    learned = f"{a['losses'][0]:.2f} → {np.mean(a['losses'][-5:]):.2f}"
    exporter = "newer" if DECODERS[name][2] else "TorchScript"
    numbers = [f"{d:.0e}" for d in apart] + [f"{r:.2f}" for r in ratios]
    cells = [name, f"{count / 1e6:.0f}", exporter, learned, *numbers, same]
    return f"| {' | '.join(cells)} |"


HEAD = f"""# Benchmark: language models

Written by `python -m benchmarks.language --page docs/internals/language-models.md`. Decoders with random weights learn
the text of Python's own documentation (`pydoc_data`), {ROWS} rows of {LENGTH} tokens a step, with AdamW at {RATE:g}.
PyTorch trains the same network on the same rows; each program has a process of its own, on one thread. *Apart* is the
largest difference of the losses of a step; *rounding*: how far PyTorch's losses move if each weight is multiplied by
1 ± 1.2e-7 before training. Ratios are onnxgrad ÷ PyTorch: processor time of a step, and memory beyond the imports;
for LoRA of rank 8 on all linear layers, PEFT. *Same text*: the trained file, and the export with a KV cache that the
weights were transplanted into, complete three prompts alike.

| decoder | million weights | exporter | loss | apart | rounding | time | memory | LoRA: time | memory | same text |
|---|---|---|---|---|---|---|---|---|---|---|
"""

NOTES = """
The rate decides how far rounding moves losses. With 3e-4 from the first step (no warm-up), Llama is unstable: after 100
steps onnxgrad is 7e-3 from PyTorch, and PyTorch 1e-2 from itself if its weights are multiplied by 1 ± 1.2e-7. After one
step and after 20, each tensor of onnxgrad is about as near to a run in float64 as that of PyTorch in float32.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="decoders from text to a file that generates")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", choices=DECODERS, action="append")
    parser.add_argument("--run", nargs=4, metavar=("WHO", "DECODER", "PLACE", "LORA"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        who, name, place, lora = asked.run
        if who == "ours":
            ours(Path(place), bool(lora))
        else:
            theirs(name, Path(place), bool(lora), who == "moved")
        return
    rows = []
    for name in asked.only or DECODERS:
        rows.append(proven(name, asked.steps))
        print(rows[-1], flush=True)
    if asked.page:
        closing = f"\n{asked.steps} steps ({LORA_STEPS} of LoRA), {processor()}.\n"
        asked.page.write_text(HEAD + "\n".join(rows) + "\n" + closing + NOTES)


if __name__ == "__main__":
    main()
