"""JAX: the whole step under one jit, its state donated."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.training.competitors import Prepared, Unable, Workload


def prepare(workload: Workload, threads: int, variant: str) -> Prepared:
    """The optimizers are written out with PyTorch's formulas. XLA takes as many threads as it may use cores."""
    begin = time.perf_counter()
    import jax
    import jax.numpy as jnp

    from benchmarks.training.competitors import jax_further, jax_images, jax_sequences
    from benchmarks.training.competitors.jax_layers import Net

    parts = {"import": time.perf_counter() - begin}
    model = (jax_images.MODELS | jax_sequences.MODELS | jax_further.MODELS).get(workload.name)
    if model is None:
        raise Unable("the benchmark has not written it in JAX")
    params = {k: jnp.asarray(v) for k, v in workload.weights().items()}
    buffers = {k: params.pop(k) for k in set(params) - set(workload.parameters)}
    lr, rule = workload.learning_rate, workload.optimizer
    zeros = {k: np.zeros_like(v) for k, v in params.items()}
    slots: Any = [zeros] if rule == "momentum" else [zeros, zeros]
    slots = jax.tree.map(jnp.array, slots)

    def loss_of(params: Any, buffers: Any, x: Any, y: Any) -> Any:
        net = Net(params, buffers, training=True)
        logits = model(net, *x)
        chosen = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean(), net.buffers

    def adam(t: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
        if rule == "adamw":
            p = p * (1 - lr * 0.01)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - lr / (1 - 0.9**t) * m / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v

    def update(state: Any, x: Any, y: Any) -> Any:
        params, buffers, slots, t = state
        (loss, buffers), grads = jax.value_and_grad(loss_of, has_aux=True)(params, buffers, x, y)
        t = t + 1
        if rule == "momentum":
            slots = [{k: 0.9 * slots[0][k] + g for k, g in grads.items()}]
            params = {k: p - lr * slots[0][k] for k, p in params.items()}
        else:
            new = {k: adam(t, p, grads[k], slots[0][k], slots[1][k]) for k, p in params.items()}
            params = {k: n[0] for k, n in new.items()}
            slots = [{k: n[i] for k, n in new.items()} for i in (1, 2)]
        return (params, buffers, slots, t), loss

    xs = [[jnp.asarray(x) for x in batch.values()] for batch in workload.batches]
    ys = [jnp.asarray(y) for y in workload.y]
    state = (params, buffers, slots, jnp.zeros((), jnp.float32))
    begin = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=0).lower(state, xs[0], ys[0]).compile()
    parts["compile"] = time.perf_counter() - begin
    infer = jax.jit(lambda params, buffers, x: model(Net(params, buffers, training=False), *x))
    held = [state]

    def step(i: int) -> float:
        held[0], loss = compiled(held[0], xs[i % len(xs)], ys[i % len(ys)])
        jax.block_until_ready(held[0])
        return float(loss)

    def forward() -> None:
        infer(held[0][0], held[0][1], xs[0]).block_until_ready()

    return Prepared(step, forward, parts)
