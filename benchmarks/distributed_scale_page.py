"""The page on many machines: what was measured on one, what the cost model makes of it, and the figures of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.network_cost import Exchange, Network, Work, predict

MACHINES = (8, 64, 512, 1024, 4096)
JITTER = 0.03
#: Latencies are assumptions; bandwidths are those on the label.
NETWORKS = {
    "1 Gbit/s, TCP": Network(100e-6, 8e-9),
    "10 Gbit/s, TCP": Network(50e-6, 0.8e-9),
    "25 Gbit/s, RDMA": Network(10e-6, 0.32e-9),
    "100 Gbit/s, RDMA": Network(5e-6, 0.08e-9),
}
PLANS = {
    "ring": Exchange(),
    "halving": Exchange("halving"),
    "halving, 8 buckets": Exchange("halving", buckets=8),
    "ring, 8 buckets": Exchange(buckets=8),
    "16 bits": Exchange("halving", compression=2),
    "sharded optimizer": Exchange(shard_optimizer=True),
    "every 100 steps": Exchange("halving", sync_every=100),
}


def gpu(images: float, parameters: float) -> Work:
    """64 images a step on one GPU; two thirds of the time go to the backward pass."""
    seconds = 64 / images
    return Work(seconds / 3, 2 * seconds / 3, 0.0, 4 * parameters, 4 * parameters, JITTER)


#: Images per second of one P100 and numbers of weights.
RESNET50, RESNET101, VGG16 = gpu(219, 25.6e6), gpu(1656.82 / 16, 44.5e6), gpu(154, 138.4e6)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def size(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"


def work_of(step: dict[str, float], threads: int) -> Work:
    """The work of a rank whose step takes this CPU time on its `threads`; two thirds are in the backward pass."""
    seconds = step["cpu"] / threads
    return Work(seconds / 3, 2 * seconds / 3, 0.0, step["gradient"], jitter=JITTER)


def efficiencies(work: Work, network: Network, plans: Iterable[str]) -> str:
    rows = [[n, *(f"{predict(n, work, network, PLANS[p]).efficiency:.0%}" for p in plans)] for n in MACHINES]
    return table(["machines", *plans], rows)


def page(found: dict[str, Any]) -> str:
    about, cores = found["about"], found["about"]["cores"]
    here = Network.fitted(found["all_reduce"], lanes=cores)
    errors = sorted(abs(here.all_reduce(n, b) / s - 1) for n, b, s in found["all_reduce"])
    reduced = table(
        ["ranks", "buffer", "measured", "model", "model / measured"],
        [
            [n, size(b), time(s), time(here.all_reduce(n, b)), f"{here.all_reduce(n, b) / s:.2f}"]
            for n, b, s in found["all_reduce"]
        ],
    )
    sent = table(
        ["ranks", "counted", "2(N − 1)/N · B", "ratio"],
        [[n, f"{c:,.0f}", f"{(e := 2 * (n - 1) / n * b):,.0f}", f"{c / e:.4f}"] for n, b, c in found["sent"]],
    )
    steps = []
    for name, cases in found["steps"].items():
        seconds = {case: one["seconds"] for case, one in cases.items()}
        cpu = {case: one["cpu"] for case, one in cases.items()}
        guess = predict(2, work_of(cases["half"], 1), Network(here.latency, here.seconds_per_byte, cores)).seconds
        steps.append([
            name, size(cases["1 × 1"]["gradient"]), time(seconds["1 × 2"]), time(seconds["2 × 1"]), time(guess),
            f"{seconds['1 × 2'] / seconds['2 × 1']:.2f}", time(cpu["1 × 2"]), time(cpu["2 × 1"]),
            time(cpu["1 × 1"]), time(cpu["torchrun"]),
        ])  # fmt: skip
    stepped = table(
        ["model", "gradients", "1 × 2", "2 × 1", "2 × 1, model", "throughput of 2 × 1", "CPU 1 × 2", "CPU 2 × 1",
         "CPU 1 × 1", "CPU of one rank under torchrun"], steps,
    )  # fmt: skip
    own = []
    for name, cases in found["steps"].items():
        work = work_of(cases["1 × 2"], 2)
        for label in ("1 Gbit/s, TCP", "10 Gbit/s, TCP"):
            network = NETWORKS[label]
            cells = [f"{predict(n, work, network, PLANS['halving']).efficiency:.0%}" for n in MACHINES]
            own.append([name, label, *cells, f"{predict(512, work, network, PLANS['every 100 steps']).efficiency:.0%}"])
    small = table(["model", "network", *map(str, MACHINES), "512, every 100 steps"], own)
    rdma, tcp = NETWORKS["25 Gbit/s, RDMA"], NETWORKS["10 Gbit/s, TCP"]
    buckets = PLANS["ring, 8 buckets"]
    plans = ("ring", "halving", "ring, 8 buckets", "halving, 8 buckets", "16 bits", "sharded optimizer",
             "every 100 steps")  # fmt: skip
    literature = table(
        ["source", "what", "measured there", "model"],
        [
            ["[Horovod](https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst)",
             "ResNet-101, 128 machines of 4 P100, 25 Gbit/s RoCE", "90 %",
             f"{predict(512, RESNET101, rdma, buckets).efficiency:.0%}"],
            ["the same", "VGG-16", "68 %", f"{predict(512, VGG16, rdma, buckets).efficiency:.0%}"],
            ["Goyal et al. 2017, [arXiv 1706.02677](https://arxiv.org/abs/1706.02677)",
             "ResNet-50, from 8 to 256 P100", "about 90 %", f"{predict(256, RESNET50, rdma, buckets).efficiency:.0%}"],
            ["Li et al. 2020, [arXiv 2006.15704](https://arxiv.org/abs/2006.15704)",
             "PyTorch's DistributedDataParallel, up to 256 GPUs", "“near-linear”", "–"],
            ["Douillard et al. 2023, [arXiv 2311.08105](https://arxiv.org/abs/2311.08105)",
             "DiLoCo, 8 workers, 500 inner steps", "communicates 500 times less",
             f"{_sent_less(500):.0f} times less"],
        ],
    )  # fmt: skip
    return f"""# Many machines, measured on one and predicted

Written by `python -m benchmarks.distributed_scale`. The first part was measured, on one machine whose {cores} cores
others used at the same time: of many rounds the fastest counts. The second part was **not measured**: it is what a
model on paper says (`benchmarks.network_cost`).

## Measured on one machine

PyTorch {about["torch"]}, gloo over the loopback interface, ONNX Runtime {about["onnxruntime"]}. Ranks have one thread,
which does not spin.

### All-reduce

The model is that of Thakur, Rabenseifner and Gropp (2005): a message of n bytes takes α + nβ seconds, and a ring of N
ranks sends 2(N − 1) of them one after the other. Fitted to the table: α = {here.latency * 1e6:.0f} µs and
β = {here.seconds_per_byte * 1e9:.2f} ns per byte. {cores} ranks send at a time, as the machine has {cores} cores. The
error is {errors[len(errors) // 2]:.0%} in the median, and {errors[-1]:.0%} at most.

{reduced}

Bytes that each rank sent, as the counter of the interface has them (with the headers of TCP), for a buffer of
{size(found["sent"][0][1])}:

{sent}

### Steps

The CNN and the transformer of [the benchmark](benchmarks.md), the same global batch in all cases: processes × threads.
While others use the machine, times say little, and CPU time (of all ranks together) says more. The model knows the CPU
time of a process of one thread with half of the batch, and the network above: it says what two ranks would take if
the machine were idle otherwise.

{stepped}

## Predicted for 8 to 4,096 machines

**These are predictions.** Assumptions: the networks of the tables, without congestion; backward passes of two thirds of
the time of a step; ranks whose steps vary by {JITTER:.0%} (standard deviation), of which all wait for the slowest.
Efficiency is the throughput over that of as many machines that need not wait for each other. The batch of each machine
is the same however many there are. In buckets, gradients are sent while the backward pass goes on.

### The models above, on machines such as this one

A step takes half of the CPU time of the process of two threads. By recursive halving, in one bucket:

{small}

### ResNet-50 on GPUs, 10 Gbit/s TCP

64 images on each GPU at 219 images per second (one P100, from
[TensorFlow's benchmarks](https://github.com/tensorflow/docs/blob/master/site/en/r1/guide/performance/benchmarks.md)),
25.6 million weights of float32. α = {tcp.latency * 1e6:.0f} µs.

{efficiencies(RESNET50, tcp, plans)}

### The same, 25 Gbit/s RDMA

α = {rdma.latency * 1e6:.0f} µs.

{efficiencies(RESNET50, rdma, plans)}

A ring sends 2(N − 1) messages one after the other: on a thousand machines their latency is all that counts, and more
buckets make it worse. Recursive halving sends 2 log₂ N.

## Figures of others

Beside them, what the model says of as many GPUs at 25 Gbit/s, with a ring (which leaves each machine once) and 8
buckets. The speed of one P100 is 154 images per second for VGG-16 (138.4 million weights), 219 for ResNet-50, both
from TensorFlow's benchmarks, and 103.6 for ResNet-101 (44.5 million), from Horovod's page. The model knows nothing of
congestion, nor of the overhead of protocols; that it comes close does not mean that it is right for the same reasons.

{literature}
"""


def _sent_less(every: int) -> float:
    plain, seldom = (predict(8, RESNET50, NETWORKS["10 Gbit/s, TCP"], Exchange(sync_every=h)) for h in (1, every))
    return plain.sent / seldom.sent
