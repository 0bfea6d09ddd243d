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

    from benchmarks.training.competitors.jax_models import MODELS

    parts = {"import": time.perf_counter() - begin}
    if workload.name not in MODELS:
        raise Unable("the benchmark has not written it in JAX")
    model = MODELS[workload.name]
    weights = {k: jnp.asarray(v) for k, v in workload.weights().items()}
    params = {k: weights[k] for k in workload.parameters}
    stats = {k: v for k, v in weights.items() if k.endswith(("running_mean", "running_var"))}
    lr, rule = workload.learning_rate, workload.optimizer
    zeros = {k: np.zeros_like(v) for k, v in params.items()}
    slots: Any = [zeros] if rule == "momentum" else [zeros, zeros]
    slots = jax.tree.map(jnp.array, slots)

    def loss_of(params: Any, stats: Any, x: Any, y: Any) -> Any:
        logits, new = model(params, stats, x, True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, 1), y[:, None], 1)
        return -chosen.mean(), {**stats, **new}

    def adam(t: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
        if rule == "adamw":
            p = p * (1 - lr * 0.01)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - lr / (1 - 0.9**t) * m / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v

    def update(state: Any, x: Any, y: Any) -> Any:
        params, stats, slots, t = state
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, x, y)
        t = t + 1
        if rule == "momentum":
            slots = [{k: 0.9 * slots[0][k] + g for k, g in grads.items()}]
            params = {k: p - lr * slots[0][k] for k, p in params.items()}
        else:
            new = {k: adam(t, p, grads[k], slots[0][k], slots[1][k]) for k, p in params.items()}
            params = {k: n[0] for k, n in new.items()}
            slots = [{k: n[i] for k, n in new.items()} for i in (1, 2)]
        return (params, stats, slots, t), loss

    xs, ys = [jnp.asarray(x) for x in workload.x], [jnp.asarray(y) for y in workload.y]
    state = (params, stats, slots, jnp.zeros((), jnp.float32))
    begin = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=0).lower(state, xs[0], ys[0]).compile()
    parts["compile"] = time.perf_counter() - begin
    infer = jax.jit(lambda p, s, x: model(p, s, x, False)[0])
    held = [state]

    def step(i: int) -> float:
        held[0], loss = compiled(held[0], xs[i % len(xs)], ys[i % len(ys)])
        jax.block_until_ready(held[0])
        return float(loss)

    def forward() -> None:
        infer(held[0][0], held[0][1], xs[0]).block_until_ready()

    return Prepared(step, forward, parts)
