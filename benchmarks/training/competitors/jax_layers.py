"""Layers in JAX, with PyTorch's formulas and on its weights.

Images are (N, H, W, C) and sequences (N, T, C), which XLA convolves a little faster on a CPU than what PyTorch has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = dict[str, Any]


class Net:
    """The weights and buffers of a PyTorch module by their names there; a layer is a method, called by its prefix.

    Attributes:
        buffers: as they are after the layers that were called: the statistics of batch normalization move.
    """

    def __init__(self, weights: Tree, buffers: Tree, training: bool) -> None:
        self.weights, self.buffers, self.training = weights, dict(buffers), training

    def __getitem__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else self.buffers[name]

    def affine(self, name: str, x: Any) -> Any:
        return x * self[f"{name}.weight"] + self[f"{name}.bias"]

    def linear(self, name: str, x: Any) -> Any:
        return x @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def conv(self, name: str, x: Any, stride: int = 1, dilation: int = 1) -> Any:
        """A convolution along the inner axes; windows of odd size are padded by half of it, others not at all."""
        w = self[f"{name}.weight"]
        size, axes = w.shape[-1], "HW"[: w.ndim - 2]
        pad = size // 2 if size % 2 else 0
        every = [1] * len(axes)
        y = lax.conv_general_dilated(
            x, w, [stride * k for k in every], [(pad, pad)] * len(axes), rhs_dilation=[dilation * k for k in every],
            dimension_numbers=(f"N{axes}C", f"OI{axes}", f"N{axes}C"), feature_group_count=x.shape[-1] // w.shape[1],
        )  # fmt: skip
        return y + self[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def depthwise(self, name: str, x: Any, stride: int = 1) -> Any:
        """A convolution of each channel by itself, as the sum of shifted images.

        XLA takes 1.6 to 10 times as long for `conv` of 3 × 3 windows and its gradients on a CPU, for 7 × 7 as long.
        """
        w = self[f"{name}.weight"]
        (_, _, size, _), (_, height, width, _) = w.shape, x.shape
        x = jnp.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
        at = [(i, j) for i in range(size) for j in range(size)]
        return sum(x[:, i : i + height : stride, j : j + width : stride] * w[:, 0, i, j] for i, j in at)

    def doubled(self, name: str, x: Any) -> Any:
        """The transposed convolution of windows of 2 × 2 that do not overlap."""
        n, height, width, _ = x.shape
        y = jnp.einsum("nhwi,ioab->nhawbo", x, self[f"{name}.weight"])
        return y.reshape(n, 2 * height, 2 * width, -1) + self[f"{name}.bias"]

    def batch_norm(self, name: str, x: Any) -> Any:
        mean, var = self[f"{name}.running_mean"], self[f"{name}.running_var"]
        if self.training:
            axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
            old_mean, old_var = mean, var
            mean, var = x.mean(axes), x.var(axes)
            self.buffers[f"{name}.running_mean"] = 0.9 * old_mean + 0.1 * mean
            self.buffers[f"{name}.running_var"] = 0.9 * old_var + 0.1 * var * count / (count - 1)
        return self.affine(name, (x - mean) * lax.rsqrt(var + 1e-5))

    def layer_norm(self, name: str, x: Any) -> Any:
        return self.affine(name, standardized(x, -1))

    def group_norm(self, name: str, x: Any, groups: int = 8) -> Any:
        grouped = x.reshape(*x.shape[:-1], groups, -1)
        return self.affine(name, standardized(grouped, (1, 2, 4)).reshape(x.shape))

    def attention(self, name: str, x: Any, heads: int, bias: Any = 0.0) -> Any:
        """Attention of many heads over x (N, T, C); `bias` is added to the scores (N, heads, T, T)."""
        n, length, width = x.shape
        q, k, v = (t.reshape(n, length, heads, -1) for t in jnp.split(self.linear(f"{name}.qkv", x), 3, -1))
        scores = jnp.einsum("nqhc,nkhc->nhqk", q, k) * (width // heads) ** -0.5 + bias
        y = jnp.einsum("nhqk,nkhc->nqhc", jax.nn.softmax(scores, -1), v)
        return self.linear(f"{name}.out", y.reshape(n, length, width))

    def gelu_mlp(self, name: str, x: Any) -> Any:
        return self.linear(f"{name}.2", jax.nn.gelu(self.linear(f"{name}.0", x), approximate=False))

    def block(self, name: str, x: Any, heads: int) -> Any:
        """A block of a transformer: attention and two linear layers, each on what is normalized before."""
        x = x + self.attention(name, self.layer_norm(f"{name}.norm1", x), heads)
        return x + self.gelu_mlp(f"{name}.mlp", self.layer_norm(f"{name}.norm2", x))


def standardized(x: Any, axes: int | tuple[int, ...]) -> Any:
    """x with mean 0 and variance 1 along `axes`."""
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)
