"""The page of results and its plots, from the JSON files that the benchmark keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

INTRODUCTION = """\
# Benchmark: one training step

This page compares the time and memory of one training step of onnxgrad with PyTorch, JAX and others.
`python -m benchmarks.training --page` writes it and explains how it measures; the numbers are stored in
`benchmarks/results`. PyTorch exports the models. Every competitor starts from the same weights and sees the same
batches, and the losses of its first steps are compared: a fast wrong step does not count. Competitors take turns in
one run, each in its own process and, where needed, in its own environment. Ratios are to `torch`, with the quartiles
over the turns.

| competitor | what it is |
|---|---|
| torch | PyTorch eager with its defaults |
| torch best | fused optimizer, channels_last |
| torch best, MKL AVX-512 | the same, with MKL forced to use the AVX-512 kernels reserved for Intel's processors |
| torch.compile | the same as torch best, with the model compiled by inductor |
| jax | the whole step under one jit, with its state donated |
| ort-training | onnxruntime-training 1.19.2, the last release of ONNX Runtime's own training |
| onnx-ad | its reverse graph, with an optimizer that the benchmark writes |
| onnxsim | its training loop |
| onnxgrad | this project with its defaults: the step graph on stock ONNX Runtime |
| onnxgrad, portable | the same without ONNX Runtime's own layouts for convolutions |
| onnxgrad, native | the defaults, with [kernels in C](native.md) where available (`target="native"`) |
"""

TITLES = {
    "mlp": "mlp: three linear layers, Adam",
    "cnn": "cnn: three convolutions with pooling, momentum",
    "residual": "residual: three residual blocks with batch normalization, momentum",
    "transformer": "transformer: two blocks, AdamW",
    "lstm": "lstm: two layers of 128 over 50 steps, Adam",
    "depthwise": "depthwise: three separable blocks with batch normalization, momentum",
    "resnet50": "resnet50: forward and backward alone, one image of 64×64, batch normalization in inference mode",
}


def write(results: Path, page: Path) -> None:
    """Write `page` and its plots beside it."""
    found = {p.stem: json.loads(p.read_text()) for p in sorted(results.glob("*.json"))}
    scale = found.pop("scale", None)
    order = [w for w in ("mlp", "cnn", "residual", "transformer", "lstm", "depthwise", "resnet50") if w in found]
    pictures = page.parent / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    lines = [INTRODUCTION]
    if order:
        _plot({w: found[w]["peers"] for w in order}, pictures / "benchmark-step.svg", "step_s", "step time")
        _plot({w: found[w]["peers"] for w in order}, pictures / "benchmark-memory.svg", "peak_mb", "peak memory")
        lines += ["![step times](images/benchmark-step.svg)\n", "![peak memory](images/benchmark-memory.svg)\n"]
    for workload in order:
        lines += _section(workload, found[workload])
    if scale:
        lines += _scale(scale)
    page.write_text("\n".join(lines).rstrip() + "\n")


def _section(workload: str, found: dict[str, Any]) -> list[str]:
    setting, peers = found["setting"], found["peers"]
    versions = ", ".join(f"{k} {v.partition('==')[2] or v}" for k, v in setting["versions"].items())
    lines = [
        f"## {TITLES[workload]}\n",
        f"{setting['threads']} threads on {setting['processor']}, {setting['rounds']} rounds, {setting['date']}; "
        f"{versions}.\n",
        "| | ms per step | ratio | quartiles | ms forward | peak MB | ratio | start-up, s | losses differ by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = peers.get("torch", {})
    notes = []
    for name, r in peers.items():
        if "unable" in r:
            lines.append(f"| {name} | – | | | | | | | {r['unable'].replace('|', '¦')} |")
            continue
        ratio = quartiles = memory = difference = "–"
        if "step_s" in base:
            ratio = f"{np.median(r['step_s']) / np.median(base['step_s']):.2f}"
            count = min(len(r["step_s"]), len(base["step_s"]))
            spread = np.array(r["step_s"][:count]) / np.array(base["step_s"][:count])
            quartiles = "–".join(f"{q:.2f}" for q in np.quantile(spread, [0.25, 0.75]))
            memory = f"{r['peak_mb'] / base['peak_mb']:.2f}"
            difference = f"{np.max(np.abs(np.array(r['losses']) - np.array(base['losses']))):.1e}"
        forward = f"{1e3 * np.median(r['forward_s']):.2f}" if r["forward_s"] else "–"
        lines.append(
            f"| {name} | {1e3 * np.median(r['step_s']):.2f} | {ratio} | {quartiles} | {forward} | "
            f"{r['peak_mb']:.0f} | {memory} | {r['start_up_s']:.1f} | {difference} |"
        )
        if r["notes"]:
            notes.append(f"{name}: {'; '.join(r['notes'])}.")
    ours = peers.get("onnxgrad", {})
    if "parts_s" in ours:
        parts = ", ".join(f"{k} {v:.2f}" for k, v in ours["parts_s"].items())
        notes.append(f"Start-up of onnxgrad, in seconds: {parts}.")
    return [*lines, "", *(["- " + n for n in notes]), ""]


def _scale(scale: dict[str, Any]) -> list[str]:
    lines = ["## Size and compilation\n", "| | |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in scale.items()]
    return [*lines, ""]


def _plot(found: dict[str, Any], file: Path, key: str, what: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "onnxgrad"
    from matplotlib import pyplot

    names = [n for n in next(iter(found.values())) if n != "torch"]
    names = [n for n in names if any("step_s" in peers.get(n, {}) for peers in found.values())]
    figure, axes = pyplot.subplots(figsize=(11, 4))
    width = 0.85 / max(len(names), 1)
    for k, name in enumerate(names):
        heights = []
        for peers in found.values():
            r, base = peers.get(name, {}), peers.get("torch", {})
            heights.append(np.median(r[key]) / np.median(base[key]) if key in r and key in base else np.nan)
        at = np.arange(len(found)) + (k - (len(names) - 1) / 2) * width
        drawn = axes.bar(at, np.minimum(heights, 3), width, label=name)
        for x, h in zip(at, heights):
            if h > 3:
                axes.text(x, 3.02, f"{h:.1f}", ha="center", fontsize=7, rotation=90)
        if name == "onnxgrad":
            for bar in drawn:
                bar.set_edgecolor("black")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylim(0, 3.4)
    axes.set_ylabel(f"{what}, PyTorch eager = 1")
    axes.legend(ncols=3, fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
