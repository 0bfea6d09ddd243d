"""Models of images in JAX: functions (net, images (N, C, H, W) of the PyTorch model) → logits, their classes last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.training.competitors.jax_layers import Net

relu, silu = jax.nn.relu, jax.nn.silu


def channels_last(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


def cnn(net: Net, x: Any) -> Any:
    x = channels_last(x)
    for name in ("0", "3", "6"):
        x = relu(net.conv(name, x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return net.linear("10", x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1))


def residual(net: Net, x: Any) -> Any:
    x = relu(net.batch_norm("1", net.conv("0", channels_last(x))))
    for name, stride in (("3", 1), ("4", 2), ("5", 2)):
        y = relu(net.batch_norm(f"{name}.body.1", net.conv(f"{name}.body.0", x, stride)))
        y = net.batch_norm(f"{name}.body.4", net.conv(f"{name}.body.3", y))
        skip = x if stride == 1 else net.batch_norm(f"{name}.skip.1", net.conv(f"{name}.skip.0", x, stride))
        x = relu(y + skip)
    return net.linear("8", x.mean((1, 2)))


def depthwise(net: Net, x: Any) -> Any:
    x = relu(net.batch_norm("1", net.conv("0", channels_last(x))))
    for name, stride in ((3, 1), (9, 2), (15, 1)):
        x = relu(net.batch_norm(f"{name + 1}", net.depthwise(f"{name}", x, stride)))
        x = relu(net.batch_norm(f"{name + 4}", net.conv(f"{name + 3}", x)))
    return net.linear("23", x.mean((1, 2)))


def vit(net: Net, x: Any) -> Any:
    x = net.conv("patches", channels_last(x), stride=8)
    x = x.reshape(x.shape[0], -1, x.shape[-1]) + net["places"]
    for k in range(4):
        x = net.block(f"blocks.{k}", x, heads=6)
    return net.linear("head", net.layer_norm("norm", x).mean(1))


def norm_act_conv(net: Net, name: str, x: Any, context: Any = None) -> Any:
    y = net.conv(f"{name}.conv1", silu(net.group_norm(f"{name}.norm1", x)))
    if context is not None:
        y = y + net.linear(f"{name}.shift", silu(context))[:, None, None]
    y = net.conv(f"{name}.conv2", silu(net.group_norm(f"{name}.norm2", y)))
    return y + (net.conv(f"{name}.skip", x) if f"{name}.skip.weight" in net.weights else x)


def unet(net: Net, x: Any) -> Any:
    x, kept = net.conv("stem", channels_last(x)), []
    for k in range(2):
        x = norm_act_conv(net, f"down.{k}.0", x)
        kept.append(x)
        x = net.conv(f"down.{k}.1", x, stride=2)
    x = norm_act_conv(net, "middle", x)
    for k in range(2):
        x = norm_act_conv(net, f"join.{k}", jnp.concatenate([net.doubled(f"up.{k}", x), kept.pop()], -1))
    return net.conv("head", x)


def convnext(net: Net, x: Any) -> Any:
    x = channels_last(x)
    for k, size in ((0, 4), (2, 2), (4, 2)):
        x = net.conv(f"stages.{k}", x, stride=size)
        block = f"stages.{k + 1}"
        y = net.layer_norm(f"{block}.norm", net.conv(f"{block}.mix", x))
        x = x + net[f"{block}.scale"] * net.gelu_mlp(f"{block}.mlp", y)
    return net.linear("head", x.mean((1, 2)))


def efficientnet(net: Net, x: Any) -> Any:
    x = silu(net.batch_norm("1", net.conv("0", channels_last(x), stride=2)))
    for k, stride in ((3, 1), (4, 1), (5, 2), (6, 1), (7, 2)):
        body = f"{k}.body"
        y = silu(net.batch_norm(f"{body}.1", net.conv(f"{body}.0", x)))
        y = silu(net.batch_norm(f"{body}.4", net.depthwise(f"{body}.3", y, stride)))
        squeezed = silu(net.conv(f"{body}.6.reduce", y.mean((1, 2), keepdims=True)))
        y = y * jax.nn.sigmoid(net.conv(f"{body}.6.expand", squeezed))
        y = net.batch_norm(f"{body}.8", net.conv(f"{body}.7", y))
        x = x + y if x.shape == y.shape else y
    return net.linear("10", x.mean((1, 2)))


def diffusion(net: Net, x: Any, when: Any) -> Any:
    waves = when[:, None] * jnp.exp(-0.5 * jnp.arange(16.0))
    waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], 1)
    context = net.linear("time.2", silu(net.linear("time.0", waves)))
    kept = norm_act_conv(net, "first", net.conv("stem", channels_last(x)), context)
    y = norm_act_conv(net, "middle", net.conv("down", kept, stride=2), context)
    y = net.block("attend", y.reshape(y.shape[0], -1, y.shape[-1]), heads=4).reshape(y.shape)
    y = y.repeat(2, 1).repeat(2, 2)
    return net.conv("head", norm_act_conv(net, "last", jnp.concatenate([y, kept], -1), context))


def swin(net: Net, x: Any) -> Any:
    x = net.conv("patches", channels_last(x), stride=4)
    n, side, _, c = x.shape
    w, k = 4, side // 4  # windows of w × w, k × k of them
    for b, shift in (("blocks.0", 0), ("blocks.1", 2)):
        y = jnp.roll(net.layer_norm(f"{b}.norm1", x), (-shift, -shift), (1, 2))
        y = y.reshape(n, k, w, k, w, c).swapaxes(2, 3).reshape(n * k * k, w * w, c)
        y = net.attention(b, y, 4, net[f"{b}.bias"])
        y = y.reshape(n, k, k, w, w, c).swapaxes(2, 3).reshape(n, side, side, c)
        x = x + jnp.roll(y, (shift, shift), (1, 2))
        x = x + net.gelu_mlp(f"{b}.mlp", net.layer_norm(f"{b}.norm2", x))
    return net.linear("head", x.mean((1, 2)))


MODELS = {f.__name__: f for f in (cnn, residual, depthwise, vit, unet, convnext, efficientnet, diffusion, swin)}
