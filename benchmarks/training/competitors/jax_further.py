"""The further models in JAX: functions (net, the input of the PyTorch model) → logits, classes last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.training.competitors.jax_images import channels_last
from benchmarks.training.competitors.jax_layers import Net

relu, silu = jax.nn.relu, jax.nn.silu


def rms_norm(net: Net, name: str, x: Any) -> Any:
    return net[f"{name}.weight"] * (x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5))


def llama(net: Net, ids: Any) -> Any:
    x, heads, groups = net["tokens.weight"][ids], 6, 2
    for name in (f"blocks.{k}" for k in range(4)):
        (n, t, c), y = x.shape, rms_norm(net, f"{name}.norm1", x)
        cos, sin, mask = (net[f"{name}.{what}"] for what in ("cos", "sin", "mask"))

        def head(what: str, count: int, y: Any = y, name: str = name, split: Any = (n, t)) -> Any:
            return (y @ net[f"{name}.{what}.weight"].T).reshape(*split, count, -1).swapaxes(1, 2)

        def rotate(z: Any, cos: Any = cos, sin: Any = sin) -> Any:
            a, b = jnp.split(z, 2, -1)
            return z * cos + jnp.concatenate([-b, a], -1) * sin

        q, k = rotate(head("q", heads)), rotate(head("k", groups))
        k, v = (jnp.repeat(z, heads // groups, 1) for z in (k, head("v", groups)))
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) * (c // heads) ** -0.5 + mask, -1)
        x = x + (a @ v).swapaxes(1, 2).reshape(n, t, c) @ net[f"{name}.out.weight"].T
        y = rms_norm(net, f"{name}.norm2", x)
        inner = silu(y @ net[f"{name}.gate.weight"].T) * (y @ net[f"{name}.up.weight"].T)
        x = x + inner @ net[f"{name}.down.weight"].T
    return rms_norm(net, "norm", x) @ net["head.weight"].T


def resnet26(net: Net, x: Any) -> Any:
    x = relu(net.batch_norm("1", net.conv("0", channels_last(x))))
    for k in range(3, 11):
        name, stride = f"{k}.body", 2 if k in (5, 7, 9) else 1
        y = relu(net.batch_norm(f"{name}.1", net.conv(f"{name}.0", x)))
        y = relu(net.batch_norm(f"{name}.4", net.conv(f"{name}.3", y, stride)))
        y = net.batch_norm(f"{name}.7", net.conv(f"{name}.6", y))
        skip = x if k % 2 == 0 else net.batch_norm(f"{k}.skip.1", net.conv(f"{k}.skip.0", x, stride))
        x = relu(y + skip)
    return net.linear("13", x.mean((1, 2)))


def pointnet(net: Net, x: Any) -> Any:
    x = x.swapaxes(1, 2)
    for k in (0, 3, 6, 9):
        x = relu(net.batch_norm(f"points.{k + 1}", net.conv(f"points.{k}", x)))
    return net.linear("head.2", relu(net.linear("head.0", x.max(1))))


def cnn3d(net: Net, x: Any) -> Any:
    x = x.transpose(0, 2, 3, 4, 1)
    for k in (0, 4, 8):
        w = net[f"{k}.weight"]
        x = lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "OIDHW", "NDHWC"))
        x = relu(net.batch_norm(f"{k + 1}", x + net[f"{k}.bias"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "VALID")
    return net.linear("14", x.mean((1, 2, 3)))


def mixer(net: Net, x: Any) -> Any:
    x = net.conv("patches", channels_last(x), stride=8)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    for name in (f"blocks.{k}" for k in range(4)):
        y = net.gelu_mlp(f"{name}.across", net.layer_norm(f"{name}.norm1", x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + y
        x = x + net.gelu_mlp(f"{name}.mlp", net.layer_norm(f"{name}.norm2", x))
    return net.linear("head", net.layer_norm("norm", x).mean(1))


def conformer(net: Net, x: Any) -> Any:
    x = relu(net.conv("stem", x.swapaxes(1, 2), stride=2))
    for name in (f"blocks.{k}" for k in range(2)):

        def feed(which: str, x: Any, name: str = name) -> Any:
            y = silu(net.linear(f"{name}.{which}.1", net.layer_norm(f"{name}.{which}.0", x)))
            return 0.5 * net.linear(f"{name}.{which}.3", y)

        x = net.block(f"{name}.attend", x + feed("feed1", x), heads=4)
        a, b = jnp.split(net.conv(f"{name}.inwards", net.layer_norm(f"{name}.norm", x)), 2, -1)
        y = silu(net.batch_norm(f"{name}.normal", net.conv(f"{name}.mix", a * jax.nn.sigmoid(b))))
        x = x + net.conv(f"{name}.outwards", y)
        x = net.layer_norm(f"{name}.last", x + feed("feed2", x))
    return net.linear("head", x.mean(1))


def experts(net: Net, ids: Any) -> Any:
    x = net.block("attend", net["tokens.weight"][ids] + net["places"], heads=4)
    y = net.layer_norm("norm", x)
    best, which = lax.top_k(jax.nn.softmax(y @ net["route.weight"].T, -1), 2)
    shares = (jax.nn.one_hot(which, 4) * (best / best.sum(-1, keepdims=True))[..., None]).sum(2)
    inner = jax.nn.gelu(jnp.einsum("ntc,eci->enti", y, net["w1"]), approximate=False)
    made = jnp.einsum("enti,eic->entc", inner, net["w2"])
    return net.linear("head", x + jnp.einsum("entc,nte->ntc", made, shares))


def generator(net: Net, x: Any) -> Any:
    x = channels_last(x)
    for k in (0, 3, 6):
        w = net[f"{k}.weight"]  # (in, out, 4, 4): the flipped windows of a convolution of the spread picture
        flipped = jnp.flip(w, (2, 3)).swapaxes(0, 1)
        names = ("NHWC", "OIHW", "NHWC")
        x = lax.conv_general_dilated(x, flipped, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2), dimension_numbers=names)
        x = relu(net.batch_norm(f"{k + 1}", x)) if k < 6 else x + net["6.bias"]
    return x


def graph_attention(net: Net, x: Any) -> Any:
    begin, end = net["ends"]
    for k in range(2):
        h = net.linear(f"layers.{k}", x).reshape(x.shape[0], 4, -1)
        one, other = (h * net["source"][k]).sum(-1), (h * net["target"][k]).sum(-1)
        scores = jnp.exp(jax.nn.leaky_relu(one[begin] + other[end], 0.2))
        totals = jnp.zeros_like(one).at[end].add(scores)
        weights = (scores / totals[end])[..., None]
        h = jnp.zeros_like(h).at[end].add(weights * h[begin])
        x = jax.nn.elu(h.reshape(x.shape[0], -1))
    return net.linear("head", x)


MODELS = {
    f.__name__: f for f in (llama, resnet26, pointnet, cnn3d, mixer, conformer, experts, generator, graph_attention)
}
