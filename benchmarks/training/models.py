"""The models of the benchmark as PyTorch modules."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class Skip(nn.Module):
    """relu(body(x) + skip(x)), the skip a projection where the shape changes."""

    def __init__(self, body: nn.Module, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.skip = (
            nn.Identity()
            if (i, stride) == (o, 1)
            else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Residual(Skip):
    def __init__(self, i: int, o: int, stride: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
            nn.BatchNorm2d(o),
        )
        super().__init__(body, i, o, stride)


class Transformer(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)  # (N, classes, length), as cross entropy wants it


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        split = (n, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        a = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, dim=-1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Bottleneck(Skip):
    def __init__(self, i: int, width: int, stride: int) -> None:
        o = 4 * width
        body = nn.Sequential(
            nn.Conv2d(i, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, o, 1, bias=False), nn.BatchNorm2d(o),
        )  # fmt: skip
        super().__init__(body, i, o, stride)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    i = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(count):
            layers.append(Bottleneck(i, width, stride if k == 0 else 1))
            i = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1), Residual(64, 64, 1), Residual(64, 64, 1)]
    for width in (64, 128, 256):
        layers += [Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Pooled(nn.Module):
    """A PoolFormer block: means of neighbours in place of attention, and two layers at each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.mlp = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.pool(y) - y
        return x + self.mlp(self.between(x))


def pool_mixer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 4, 3), Pooled(64), nn.Conv2d(64, 128, 3, 2, 1), Pooled(128),
        nn.Conv2d(128, 320, 3, 2, 1), Pooled(320), Pooled(320),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(320, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 16, 10),
    )  # fmt: skip


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def depthwise() -> nn.Module:
    def block(i: int, o: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False), nn.BatchNorm2d(i), nn.ReLU(),
            nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(),
        ]  # fmt: skip

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        *block(32, 64, 1), *block(64, 128, 2), *block(128, 128, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    return Transformer(vocab=512, width=128, heads=4, layers=2, length=64)


def lstm() -> nn.Module:
    return Recurrent(width=64, hidden=128, layers=2, classes=10)


class ViT(nn.Module):
    def __init__(self, side: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn((side // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class NormActConv(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, and what goes round them: the block of diffusion models."""

    def __init__(self, i: int, o: int, context: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, i), nn.Conv2d(i, o, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(8, o), nn.Conv2d(o, o, 3, 1, 1)
        self.skip = nn.Identity() if i == o else nn.Conv2d(i, o, 1)
        self.shift = nn.Linear(context, o) if context else None

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        if self.shift is not None and context is not None:
            y = y + self.shift(functional.silu(context))[:, :, None, None]
        return self.conv2(functional.silu(self.norm2(y))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(NormActConv(i, i), nn.Conv2d(i, o, 3, 2, 1)) for i, o in pairs)
        self.middle = NormActConv(widths[-1], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(pairs))
        self.join = nn.ModuleList(NormActConv(2 * i, i) for i, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        for block, smaller in self.down:
            x = block(x)
            kept.append(x)
            x = smaller(x)
        x = self.middle(x)
        for larger, join in zip(self.up, self.join):
            x = join(torch.cat([larger(x), kept.pop()], 1))
        return self.head(x)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(self.mix(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ConvNeXtBlock(widths[0])]
        for i, o in pairwise(widths):
            stages += [nn.Conv2d(i, o, 2, 2), ConvNeXtBlock(o)]
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class ConvGRU(nn.Module):
    def __init__(self, channels: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(channels, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
        )  # fmt: skip
        self.gru, self.head = (
            nn.GRU(width, hidden, batch_first=True, bidirectional=True),
            nn.Linear(2 * hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.convs(x).transpose(1, 2))[0].mean(1))


class DLRM(nn.Module):
    """Click prediction: tables, two towers of linear layers, and the products of all pairs between them."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1], persistent=False)
        self.top = nn.Sequential(nn.Linear(pairs.shape[1] + width, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([x, products], 1))


class Squeeze(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.expand(functional.silu(self.reduce(x.mean((2, 3), keepdim=True)))))


class MBConv(nn.Module):
    def __init__(self, i: int, o: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        m = i * expand
        self.same = (i, stride) == (o, 1)
        self.body = nn.Sequential(
            nn.Conv2d(i, m, 1, bias=False), nn.BatchNorm2d(m), nn.SiLU(),
            nn.Conv2d(m, m, 3, stride, 1, groups=m, bias=False), nn.BatchNorm2d(m), nn.SiLU(),
            Squeeze(m, i // 2), nn.Conv2d(m, o, 1, bias=False), nn.BatchNorm2d(o),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.same else self.body(x)


class WaveNet(nn.Module):
    def __init__(self, levels: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.dilated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**k) for k in range(layers))
        self.mix = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Conv1d(width, levels, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for k, (dilated, mix) in enumerate(zip(self.dilated, self.mix)):
            a, b = dilated(functional.pad(x, (2**k, 0))).chunk(2, 1)
            residual, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.head(functional.relu(total))


class GraphNet(nn.Module):
    """Messages along the edges of one graph, added up at its nodes."""

    def __init__(self, nodes: int, edges: int, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
        self.register_buffer("ends", ends, persistent=False)
        self.embed = nn.Linear(features, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.embed(x)).transpose(0, 1)  # (node, batch, width)
        for message, update in zip(self.message, self.update):
            sent = functional.relu(message(torch.cat([h[self.ends[0]], h[self.ends[1]]], -1)))
            received = torch.zeros_like(h).scatter_add(0, self.ends[1][:, None, None].expand_as(sent), sent)
            h = h + functional.relu(update(torch.cat([h, received], -1)))
        return self.head(h.mean(0))


class Mamba(nn.Module):
    """A state-space layer whose step sizes and projections depend on the input, run as an unrolled scan."""

    def __init__(self, vocab: int, width: int, state: int, length: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.project, self.steps = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.inwards, self.outwards = nn.Linear(width, state), nn.Linear(width, state)
        self.decay = nn.Parameter(torch.log(torch.arange(1, state + 1.0)).repeat(width, 1))
        self.out, self.head, self.length = nn.Linear(width, width), nn.Linear(width, vocab), length

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        u, gate = self.project(self.norm(x)).chunk(2, -1)
        dt, b, c = functional.softplus(self.steps(u)), self.inwards(u), self.outwards(u)
        keep = torch.exp(dt[..., None] * -torch.exp(self.decay))
        add = (dt * u)[..., None] * b[:, :, None]
        h, ys = torch.zeros_like(add[:, 0]), []
        for t in range(self.length):
            h = keep[:, t] * h + add[:, t]
            ys.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(ys, 1) * functional.silu(gate)
        return self.head(x + self.out(y)).transpose(1, 2)


class SwinBlock(nn.Module):
    def __init__(self, side: int, window: int, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.heads, self.shift = side, window, heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, _, c = x.shape
        w, k = self.window, self.side // self.window
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.reshape(n, k, w, k, w, c).transpose(2, 3).reshape(n * k * k, w * w, c)
        split = (n * k * k, w * w, self.heads, c // self.heads)
        q, key, v = (t.reshape(split).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        a = torch.softmax(q @ key.transpose(-1, -2) * (c // self.heads) ** -0.5 + self.bias, -1)
        y = self.out((a @ v).transpose(1, 2).reshape(n * k * k, w * w, c))
        y = y.reshape(n, k, k, w, w, c).transpose(2, 3).reshape(n, self.side, self.side, c)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, side: int, width: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(SwinBlock(side // 4, 4, width, 4, shift) for shift in (0, 2)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))


class Diffusion(nn.Module):
    """Two levels of a denoising U-Net, with attention in the middle; it tells the level of noise of each pixel."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.stem, self.down = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.first = NormActConv(width, width, 2 * width)
        self.middle = NormActConv(2 * width, 2 * width, 2 * width)
        self.attend = Block(2 * width, 4)
        self.last = NormActConv(3 * width, width, 2 * width)
        self.head = nn.Conv2d(width, classes, 3, 1, 1)

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        waves = when[:, None] * torch.exp(-0.5 * torch.arange(16.0))
        context = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        kept = self.first(self.stem(x), context)
        y = self.middle(self.down(kept), context)
        n, c, h, w = y.shape
        y = self.attend(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(n, c, h, w)
        y = functional.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.head(self.last(torch.cat([y, kept], 1), context))


def vit() -> nn.Module:
    return ViT(side=64, patch=8, width=192, heads=6, layers=4, classes=10)


def unet() -> nn.Module:
    return UNet((32, 64, 128), classes=4)


def convnext() -> nn.Module:
    return ConvNeXt((48, 96, 192), classes=10)


def conv_gru() -> nn.Module:
    return ConvGRU(channels=16, width=64, hidden=64, classes=10)


def dlrm() -> nn.Module:
    return DLRM(tables=20, rows=2000, width=32, dense=13)


def bert() -> nn.Module:
    return Transformer(vocab=8000, width=128, heads=4, layers=2, length=128)


def efficientnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(),
        MBConv(16, 24, 1), MBConv(24, 24, 1), MBConv(24, 40, 2), MBConv(40, 40, 1), MBConv(40, 80, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10),
    )  # fmt: skip


def diffusion() -> nn.Module:
    return Diffusion(width=32, classes=4)


def wavenet() -> nn.Module:
    return WaveNet(levels=256, width=32, layers=8)


def graph_net() -> nn.Module:
    return GraphNet(nodes=200, edges=800, features=16, width=32, layers=3, classes=10)


def mamba() -> nn.Module:
    return Mamba(vocab=256, width=64, state=8, length=64)


def swin() -> nn.Module:
    return Swin(side=64, width=96, classes=10)
