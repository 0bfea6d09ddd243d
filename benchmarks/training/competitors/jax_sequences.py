"""Models of sequences, tables and graphs in JAX: functions (net, inputs of the PyTorch one) → logits, classes last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.training.competitors.jax_layers import Net

relu, sigmoid = jax.nn.relu, jax.nn.sigmoid


def mlp(net: Net, x: Any) -> Any:
    for name in ("0", "2"):
        x = relu(net.linear(name, x))
    return net.linear("4", x)


def transformer(net: Net, ids: Any) -> Any:
    x = net["tokens.weight"][ids] + net["places"]
    for k in range(2):
        x = net.block(f"blocks.{k}", x, heads=4)
    return net.linear("head", net.layer_norm("norm", x))


def lstm(net: Net, x: Any) -> Any:
    y = x.swapaxes(0, 1)
    for layer in ("l0", "l1"):
        w, r = net[f"lstm.weight_ih_{layer}"], net[f"lstm.weight_hh_{layer}"]
        gates = y @ w.T + net[f"lstm.bias_ih_{layer}"] + net[f"lstm.bias_hh_{layer}"]

        def cell(state: Any, g: Any, r: Any = r) -> Any:
            h, c = state
            i, f, z, o = jnp.split(g + h @ r.T, 4, -1)
            c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(z)
            h = sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((y.shape[1], r.shape[1]), y.dtype)
        y = lax.scan(cell, (zero, zero), gates)[1]
    return net.linear("head", y[-1])


def gru(net: Net, direction: str, x: Any) -> Any:
    """The hidden states of one direction of nn.GRU along the first axis of x (T, N, C)."""
    r, b = net[f"gru.weight_hh_{direction}"], net[f"gru.bias_hh_{direction}"]
    gates = x @ net[f"gru.weight_ih_{direction}"].T + net[f"gru.bias_ih_{direction}"]

    def cell(h: Any, gate: Any) -> Any:
        (xr, xz, xn), (hr, hz, hn) = jnp.split(gate, 3, -1), jnp.split(h @ r.T + b, 3, -1)
        z = sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + sigmoid(xr + hr) * hn) + z * h
        return h, h

    zero = jnp.zeros((x.shape[1], r.shape[1]), x.dtype)
    return lax.scan(cell, zero, gates, reverse=direction.endswith("reverse"))[1]


def conv_gru(net: Net, x: Any) -> Any:
    x = x.swapaxes(1, 2)
    for k in (0, 3):
        x = relu(net.batch_norm(f"convs.{k + 1}", net.conv(f"convs.{k}", x, stride=2)))
    x = x.swapaxes(0, 1)
    y = jnp.concatenate([gru(net, d, x) for d in ("l0", "l0_reverse")], -1)
    return net.linear("head", y.mean(0))


def dlrm(net: Net, ids: Any, dense: Any) -> Any:
    x = relu(net.linear("bottom.2", relu(net.linear("bottom.0", dense))))
    rows = jnp.stack([x, *(net[f"tables.{k}.weight"][ids[:, k]] for k in range(ids.shape[1]))], 1)
    products = (rows @ rows.swapaxes(1, 2)).reshape(len(x), -1)[:, net["pairs"]]
    return net.linear("top.2", relu(net.linear("top.0", jnp.concatenate([x, products], 1))))


def wavenet(net: Net, ids: Any) -> Any:
    x, total = net["embed.weight"][ids], 0.0
    for k in range(8):
        past = jnp.pad(x, ((0, 0), (2**k, 0), (0, 0)))
        a, b = jnp.split(net.conv(f"dilated.{k}", past, dilation=2**k), 2, -1)
        remainder, skip = jnp.split(net.conv(f"mix.{k}", jnp.tanh(a) * sigmoid(b)), 2, -1)
        x, total = x + remainder, total + skip
    return net.conv("head", relu(total))


def graph_net(net: Net, x: Any) -> Any:
    source, target = net["ends"]
    h = relu(net.linear("embed", x)).swapaxes(0, 1)  # (node, batch, width)
    for k in range(3):
        sent = relu(net.linear(f"message.{k}", jnp.concatenate([h[source], h[target]], -1)))
        received = jnp.zeros_like(h).at[target].add(sent)
        h = h + relu(net.linear(f"update.{k}", jnp.concatenate([h, received], -1)))
    return net.linear("head", h.mean(0))


def mamba(net: Net, ids: Any) -> Any:
    x = net["embed.weight"][ids]
    u, gate = jnp.split(net.linear("project", net.layer_norm("norm", x)), 2, -1)
    dt, b, c = jax.nn.softplus(net.linear("steps", u)), net.linear("inwards", u), net.linear("outwards", u)
    keep = jnp.exp(dt[..., None] * -jnp.exp(net["decay"]))
    add = (dt * u)[..., None] * b[:, :, None]

    def step(h: Any, now: Any) -> Any:
        keep, add, c = now
        h = keep * h + add
        return h, (h * c[:, None]).sum(-1)

    along_time = [t.swapaxes(0, 1) for t in (keep, add, c)]
    y = lax.scan(step, jnp.zeros_like(add[:, 0]), along_time)[1].swapaxes(0, 1)
    return net.linear("head", x + net.linear("out", y * jax.nn.silu(gate)))


MODELS = {f.__name__: f for f in (mlp, transformer, lstm, conv_gru, dlrm, wavenet, graph_net, mamba)}
MODELS["bert"] = transformer
