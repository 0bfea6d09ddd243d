"""The six models in JAX, on the weights of the PyTorch modules, by their names there.

A model is a function (parameters, statistics, x, training) → (logits, new statistics).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = dict[str, Any]


def linear(p: Tree, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def conv(p: Tree, name: str, x: Any, stride: int = 1, pad: int = 1, groups: int = 1) -> Any:
    y = lax.conv_general_dilated(
        x, p[f"{name}.weight"], (stride, stride), [(pad, pad)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"), feature_group_count=groups,
    )  # fmt: skip
    return y + p[f"{name}.bias"][:, None, None] if f"{name}.bias" in p else y


def batch_norm(p: Tree, s: Tree, new: Tree, name: str, x: Any, training: bool) -> Any:
    mean, var = s[f"{name}.running_mean"], s[f"{name}.running_var"]
    if training:
        count = x.size // x.shape[1]
        old_mean, old_var = mean, var
        mean = x.mean((0, 2, 3))
        var = jnp.mean(jnp.square(x - mean[:, None, None]), (0, 2, 3))
        new[f"{name}.running_mean"] = 0.9 * old_mean + 0.1 * mean
        new[f"{name}.running_var"] = 0.9 * old_var + 0.1 * var * count / (count - 1)
    scale = p[f"{name}.weight"] * lax.rsqrt(var + 1e-5)
    return (x - mean[:, None, None]) * scale[:, None, None] + p[f"{name}.bias"][:, None, None]


def layer_norm(p: Tree, name: str, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def mlp(p: Tree, s: Tree, x: Any, training: bool) -> tuple[Any, Tree]:
    for name in ("0", "2"):
        x = jax.nn.relu(linear(p, name, x))
    return linear(p, "4", x), {}


def cnn(p: Tree, s: Tree, x: Any, training: bool) -> tuple[Any, Tree]:
    for name in ("0", "3", "6"):
        x = jax.nn.relu(conv(p, name, x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return linear(p, "10", x.reshape(x.shape[0], -1)), {}


def residual(p: Tree, s: Tree, x: Any, training: bool) -> tuple[Any, Tree]:
    new: Tree = {}

    def norm(name: str, x: Any) -> Any:
        return batch_norm(p, s, new, name, x, training)

    x = jax.nn.relu(norm("1", conv(p, "0", x)))
    for name, stride in (("3", 1), ("4", 2), ("5", 2)):
        y = jax.nn.relu(norm(f"{name}.body.1", conv(p, f"{name}.body.0", x, stride)))
        y = norm(f"{name}.body.4", conv(p, f"{name}.body.3", y))
        skip = x if stride == 1 else norm(f"{name}.skip.1", conv(p, f"{name}.skip.0", x, stride, 0))
        x = jax.nn.relu(y + skip)
    return linear(p, "8", x.mean((2, 3))), new


def depthwise(p: Tree, s: Tree, x: Any, training: bool) -> tuple[Any, Tree]:
    new: Tree = {}

    def block(name: int, x: Any, **how: int) -> Any:
        y = conv(p, str(name), x, **how)
        return jax.nn.relu(batch_norm(p, s, new, str(name + 1), y, training))

    x = block(0, x)
    for name, stride in ((3, 1), (9, 2), (15, 1)):
        x = block(name, x, stride=stride, groups=x.shape[1])
        x = block(name + 3, x, pad=0)
    return linear(p, "23", x.mean((2, 3))), new


def transformer(p: Tree, s: Tree, ids: Any, training: bool) -> tuple[Any, Tree]:
    x = p["tokens.weight"][ids] + p["places"]
    n, length, width = x.shape
    heads = 4
    for b in ("blocks.0", "blocks.1"):
        qkv = linear(p, f"{b}.qkv", layer_norm(p, f"{b}.norm1", x))
        q, k, v = (t.reshape(n, length, heads, -1).swapaxes(1, 2) for t in jnp.split(qkv, 3, -1))
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) * (width // heads) ** -0.5, -1)
        x = x + linear(p, f"{b}.out", (a @ v).swapaxes(1, 2).reshape(n, length, width))
        y = jax.nn.gelu(linear(p, f"{b}.mlp.0", layer_norm(p, f"{b}.norm2", x)), approximate=False)
        x = x + linear(p, f"{b}.mlp.2", y)
    return linear(p, "head", layer_norm(p, "norm", x)).swapaxes(1, 2), {}


def lstm(p: Tree, s: Tree, x: Any, training: bool) -> tuple[Any, Tree]:
    y = x.swapaxes(0, 1)
    for layer in (0, 1):
        w, r = p[f"lstm.weight_ih_l{layer}"], p[f"lstm.weight_hh_l{layer}"]
        gates = y @ w.T + p[f"lstm.bias_ih_l{layer}"] + p[f"lstm.bias_hh_l{layer}"]

        def cell(state: Any, g: Any, r: Any = r) -> Any:
            h, c = state
            i, f, z, o = jnp.split(g + h @ r.T, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(z)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((y.shape[1], r.shape[1]), y.dtype)
        y = lax.scan(cell, (zero, zero), gates)[1]
    return linear(p, "head", y[-1]), {}


MODELS = {f.__name__: f for f in (mlp, cnn, residual, depthwise, transformer, lstm)}
