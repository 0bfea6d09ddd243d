"""The pages of results and their plots, from the JSON files that the benchmark keeps for each kind of processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

INTRODUCTION = """\
# Benchmark: one training step

This page compares the time and memory of one training step of onnxgrad with PyTorch, JAX and others.
`python -m benchmarks.training --page` writes it and explains how it measures; the numbers are stored in
`benchmarks/results`, in a folder for each kind of processor. PyTorch exports the models. Every competitor starts from
the same weights and sees the same batches, and the losses of its first steps are compared: a fast wrong step does not
count. Competitors take turns in one run, each in its own process and, where needed, in its own environment. Ratios are
to `torch` in the same turn: their median and quartiles over the turns. `python -m benchmarks.training --check` measures
again and fails where a ratio has become worse than the one on this page. The tables of each model, of
[usual](benchmarks-models.md), [other](benchmarks-other-models.md) and [further kinds](benchmarks-further-models.md),
have milliseconds, megabytes, start-up times and differences of losses.

| competitor | what it is |
|---|---|
| torch | PyTorch eager with its defaults |
| torch best | fused optimizer, channels_last |
| torch best, MKL AVX-512 | the same, with MKL forced to use the AVX-512 kernels reserved for Intel's processors |
| torch.compile | the same as torch best, with the model compiled by inductor |
| jax | the whole step under one jit, with its state donated and images channels last |
| ort-training | onnxruntime-training 1.19.2, the last release of ONNX Runtime's own training |
| onnx-ad | its reverse graph, with an optimizer that the benchmark writes |
| onnxsim | its training loop |
| onnxgrad | this project with its defaults: the step graph on stock ONNX Runtime, with [kernels in C](native.md) |
| onnxgrad, portable | the same with standard operators alone (`target="portable"`) |
"""

MODELS = """\
# Benchmark: each model of {kinds}

This page has the measurements of each model behind [the benchmark](benchmarks.md), which explains the competitors.
`ratio` is to `torch` in the same turn. `losses differ by` is the largest difference from the losses of `torch` over the
first steps.
"""

TITLES = {
    "mlp": "mlp: three linear layers, Adam",
    "cnn": "cnn: three convolutions with pooling, momentum",
    "residual": "residual: three residual blocks with batch normalization, momentum",
    "transformer": "transformer: two blocks, 64 tokens, AdamW",
    "lstm": "lstm: two layers of 128 over 50 steps, Adam",
    "depthwise": "depthwise: three separable blocks with batch normalization, momentum",
    "vit": "vit: four blocks over 64 patches, AdamW",
    "unet": "unet: three levels of 96×96 with GroupNorm and SiLU, Adam",
    "convnext": "convnext: three stages of 7×7 depthwise convolutions and LayerNorm, AdamW",
    "conv_gru": "conv_gru: two one-dimensional convolutions and a bidirectional GRU, Adam",
    "dlrm": "dlrm: click prediction with 20 embedding tables, batches of 512, Adam",
    "bert": "bert: two blocks, 128 tokens, 8,000 words, AdamW",
    "efficientnet": "efficientnet: five inverted bottlenecks with SiLU and squeeze-and-excite, momentum",
    "diffusion": "diffusion: two levels of a denoising U-Net with attention, Adam",
    "wavenet": "wavenet: eight dilated gated convolutions, Adam",
    "graph_net": "graph_net: three rounds of messages along 800 edges, Adam",
    "mamba": "mamba: a state-space layer as an unrolled scan of 64 steps, AdamW",
    "swin": "swin: two blocks of attention in shifted windows, AdamW",
    "llama": "llama: four blocks with rotary positions, grouped queries and SwiGLU, 128 tokens, AdamW",
    "resnet26": "resnet26: six bottlenecks with batch normalization, momentum",
    "pointnet": "pointnet: four layers for each of 512 points, and their maximum, Adam",
    "cnn3d": "cnn3d: three 3-D convolutions with batch normalization and pooling, Adam",
    "mixer": "mixer: four blocks of layers across patches and channels, AdamW",
    "conformer": "conformer: two blocks of attention and depthwise convolution along 100 steps, AdamW",
    "experts": "experts: attention and a mixture of four experts, two for each token, AdamW",
    "generator": "generator: three transposed convolutions to pictures of 64×64, Adam",
    "graph_attention": "graph_attention: two layers of attention along 9,000 edges, Adam",
    "resnet50": "resnet50: forward and backward alone, one image of 64×64, batch normalization in inference mode",
}
#: What the tables on top have.
SUMMARY = ("torch best", "torch best, MKL AVX-512", "torch.compile", "jax", "onnxgrad", "onnxgrad, portable")
#: Models of which no part was looked at while onnxgrad was tuned.
UNSEEN = ("diffusion", "wavenet", "graph_net", "mamba", "swin")
#: Kinds that came later.
FURTHER = (
    *("llama", "resnet26", "pointnet", "cnn3d", "mixer"),
    *("conformer", "experts", "generator", "graph_attention", "resnet50"),
)
#: The pages with a table for each model, by its kind.
PAGES = {"usual kinds": "models", "other kinds": "other-models", "further kinds": "further-models"}


def write(results: Path, page: Path) -> None:
    """Write the summary `page`, pages with a table per model, and the plots: a section per folder of `results`."""
    pictures = page.parent / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    lines, models = [INTRODUCTION], {kinds: [MODELS.format(kinds=kinds)] for kinds in PAGES}
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        found = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
        scale, fractions = found.pop("scale", None), found.pop("fractions", None)
        found = {w: found[w] for w in TITLES if w in found}
        if not found:
            continue
        trained = {w: r["peers"] for w, r in found.items() if w != "resnet50"}
        heading = f"## {next(iter(found.values()))['setting']['processor']}\n"
        lines.append(heading)
        lines += _summary(trained, "step_s", "Step time")
        lines += _summary(trained, "peak_mb", "Peak memory of the process")
        for key, stem, what in (("step_s", "step", "step time"), ("peak_mb", "memory", "peak memory")):
            picture = f"benchmark-{stem}-{folder.name}.svg"
            _plot({w: r["peers"] for w, r in found.items()}, pictures / picture, key, what)
            lines.append(f"![{what}](images/{picture})\n")
        if fractions:
            lines += _fractions(fractions)
        for kinds, page_lines in models.items():
            page_lines.append(heading)
            for workload, measured in found.items():
                if kinds == kinds_of(workload):
                    page_lines += _section(workload, measured)
        if scale:
            lines += _scale(scale)
    page.write_text("\n".join(lines).rstrip() + "\n")
    for kinds, page_lines in models.items():
        page.with_name(f"{page.stem}-{PAGES[kinds]}.md").write_text("\n".join(page_lines).rstrip() + "\n")


def kinds_of(workload: str) -> str:
    """The kinds of models that `workload` is among."""
    return "other kinds" if workload in UNSEEN else "further kinds" if workload in FURTHER else "usual kinds"


def turns(peers: dict[str, Any], name: str, key: str) -> Any:
    """A competitor over PyTorch, turn by turn: what slows the machine down for a while meets both."""
    found, base = np.atleast_1d(peers[name][key]), np.atleast_1d(peers["torch"][key])
    count = min(len(found), len(base))
    return found[:count] / base[:count]


def ratio(peers: dict[str, Any], name: str, key: str) -> float:
    """The median over the turns of a competitor over PyTorch; NaN if one of them has none."""
    if key not in peers.get(name, {}) or key not in peers.get("torch", {}):
        return float("nan")
    return float(np.median(turns(peers, name, key)))


def _summary(found: dict[str, dict[str, Any]], key: str, what: str) -> list[str]:
    """Ratios to PyTorch eager, a row for each model; their geometric mean and the worst of them on top."""
    names = [n for n in SUMMARY if any(key in peers.get(n, {}) for peers in found.values())]
    table = {w: [ratio(peers, n, key) for n in names] for w, peers in found.items()}

    def row(title: str, numbers: Any) -> str:
        return f"| {title} | " + " | ".join("–" if np.isnan(x) else f"{x:.2f}" for x in numbers) + " |"

    def over(select: list[str], what: Any) -> list[float]:
        columns = np.array([table[w] for w in select]).T
        return [float(what(c[~np.isnan(c)])) if (~np.isnan(c)).any() else float("nan") for c in columns]

    def mean(x: Any) -> float:
        return float(np.exp(np.log(x).mean()))

    lines = [f"{what} ÷ PyTorch eager:\n", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kinds in PAGES:
        if select := [w for w in table if kinds_of(w) == kinds]:
            lines += [row(f"**geometric mean, {kinds}**", over(select, mean)), row("**worst**", over(select, np.max))]
            lines += [row(w, table[w]) for w in select]
    return [*lines, ""]


def _fractions(fractions: dict[str, dict[str, float]]) -> list[str]:
    """The time of a step by kinds of operators, and the least that products and memory take."""
    kinds = [k for k in dict.fromkeys(k for f in fractions.values() for k in f) if k != "roofline"]
    kinds = [k for k in kinds if any(f.get(k, 0.0) >= 0.005 for f in fractions.values())] + ["roofline"]
    lines = [
        "Share of the kernel time of a step on one thread by kinds of operators. The last column is roofline time ÷ "
        "measured time: the sum over its nodes of what products take at the best rate of ONNX Runtime's here, "
        "elementwise steps as instructions of vectors, or the bytes at the bandwidth of a copy of as many, whichever "
        "is the most. Convolutions count the multiplications of their definition; that of 3 × 3 windows makes fewer "
        "(Winograd), so that a step may be above its roofline. "
        "`python -m benchmarks.training.fractions` measures it:\n",
        f"| | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    lines += [f"| {w} | " + " | ".join(f"{f.get(k, 0.0):.0%}" for k in kinds) + " |" for w, f in fractions.items()]
    return [*lines, ""]


def _section(workload: str, found: dict[str, Any]) -> list[str]:
    setting, peers = found["setting"], found["peers"]
    versions = ", ".join(f"{k} {v.partition('==')[2] or v}" for k, v in setting["versions"].items())
    lines = [
        f"### {TITLES[workload]}\n",
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
        step = quartiles = memory = difference = "–"
        if "step_s" in base:
            step = f"{ratio(peers, name, 'step_s'):.2f}"
            quartiles = "–".join(f"{q:.2f}" for q in np.quantile(turns(peers, name, "step_s"), [0.25, 0.75]))
            memory = f"{ratio(peers, name, 'peak_mb'):.2f}"
            difference = f"{np.max(np.abs(np.array(r['losses']) - np.array(base['losses']))):.1e}"
        forward = f"{1e3 * np.median(r['forward_s']):.2f}" if r["forward_s"] else "–"
        lines.append(
            f"| {name} | {1e3 * np.median(r['step_s']):.2f} | {step} | {quartiles} | {forward} | "
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
    lines = ["### Size and compilation\n", "| | |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in scale.items()]
    return [*lines, ""]


def _plot(found: dict[str, Any], file: Path, key: str, what: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "onnxgrad"
    from matplotlib import pyplot

    names = [n for n in SUMMARY if any(key in peers.get(n, {}) for peers in found.values())]
    figure, axes = pyplot.subplots(figsize=(12, 4))
    width = 0.85 / max(len(names), 1)
    for k, name in enumerate(names):
        heights = [ratio(peers, name, key) for peers in found.values()]
        at = np.arange(len(found)) + (k - (len(names) - 1) / 2) * width
        drawn = axes.bar(at, np.minimum(heights, 2), width, label=name)
        for x, h in zip(at, heights):
            if h > 2:
                axes.text(x, 2.02, f"{h:.1f}", ha="center", fontsize=6, rotation=90)
        if name == "onnxgrad":
            for bar in drawn:
                bar.set_edgecolor("black")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
    axes.set_ylim(0, 2.3)
    axes.set_ylabel(f"{what}, PyTorch eager = 1")
    axes.legend(ncols=5, fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
