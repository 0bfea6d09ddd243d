"""Nine further models of the benchmark as PyTorch modules: kinds that users bring, none of which was tuned for."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.training.models import Block, Bottleneck


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class LlamaBlock(nn.Module):
    """Attention with rotated queries and keys, fewer heads for keys, and a gated layer."""

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        y = self.norm1(x)
        q = self.rotate(self.q(y).reshape(n, t, self.heads, self.size).transpose(1, 2))
        k = self.rotate(self.k(y).reshape(n, t, self.groups, self.size).transpose(1, 2))
        v = self.v(y).reshape(n, t, self.groups, self.size).transpose(1, 2)
        k, v = (
            z[:, :, None].expand(n, self.groups, self.heads // self.groups, t, self.size).reshape(q.shape)
            for z in (k, v)
        )
        a = torch.softmax(q @ k.transpose(-1, -2) * self.size**-0.5 + self.mask, -1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(n, t, c))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, groups: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, groups, length) for _ in range(layers)))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids)))).transpose(1, 2)


class PointNet(nn.Module):
    """The same layers for each point of a cloud, and the maximum over all points."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        sizes = (3, width, width, 2 * width, 8 * width)
        layers = [(nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU()) for i, o in pairwise(sizes)]
        self.points = nn.Sequential(*(layer for group in layers for layer in group))
        self.head = nn.Sequential(nn.Linear(8 * width, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.points(x).amax(2))


class Mixer(nn.Module):
    """A layer across patches, a layer across channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, side: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Mixer((side // patch) ** 2, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, a depthwise convolution along time, half a feed-forward layer."""

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.feed1, self.feed2 = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.attend = Block(width, heads)
        self.norm = nn.LayerNorm(width)
        self.inwards = nn.Conv1d(width, 2 * width, 1)
        self.mix = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.normal, self.outwards = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.last = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x + 0.5 * self.feed1(x))
        y = functional.glu(self.inwards(self.norm(x).transpose(1, 2)), 1)
        y = self.outwards(functional.silu(self.normal(self.mix(y)))).transpose(1, 2)
        x = x + y
        return self.last(x + 0.5 * self.feed2(x))


class Conformer(nn.Module):
    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(features, width, 3, 2, 1)
        self.blocks = nn.Sequential(*(ConformerBlock(width, 4, 15) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(functional.relu(self.stem(x)).transpose(1, 2)).mean(1))


class Experts(nn.Module):
    """A transformer whose feed-forward layers are several experts, of which each token takes the weighted best two."""

    def __init__(self, vocab: int, width: int, experts: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.attend = Block(width, 4)
        self.norm, self.route = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)
        self.head, self.experts = nn.Linear(width, vocab), experts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.attend(self.tokens(ids) + self.places)
        y = self.norm(x)
        best, which = torch.softmax(self.route(y), -1).topk(2, -1)
        taken = functional.one_hot(which, self.experts).to(y.dtype)
        shares = (taken * (best / best.sum(-1, keepdim=True))[..., None]).sum(2)
        flat = y.reshape(1, -1, y.shape[-1])
        made = functional.gelu(flat @ self.w1) @ self.w2
        y = (made * shares.reshape(-1, self.experts).transpose(0, 1)[..., None]).sum(0).reshape(x.shape)
        return self.head(x + y).transpose(1, 2)


class GraphAttention(nn.Module):
    """Two layers of attention along the edges of one graph: a softmax over the edges that end at a node."""

    def __init__(self, nodes: int, edges: int, features: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
        own = torch.arange(nodes).repeat(2, 1)
        self.register_buffer("ends", torch.cat([ends, own], 1), persistent=False)
        self.heads, self.nodes = heads, nodes
        self.layers = nn.ModuleList([nn.Linear(features, width), nn.Linear(width, width)])
        self.source = nn.Parameter(torch.randn(2, heads, width // heads) * 0.1)
        self.target = nn.Parameter(torch.randn(2, heads, width // heads) * 0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin, end = self.ends[0], self.ends[1]
        for k, layer in enumerate(self.layers):
            h = layer(x).reshape(self.nodes, self.heads, -1)
            one, other = (h * self.source[k]).sum(-1), (h * self.target[k]).sum(-1)
            scores = torch.exp(functional.leaky_relu(one[begin] + other[end], 0.2))
            totals = torch.zeros_like(one).scatter_add(0, end[:, None].expand_as(scores), scores)
            weights = (scores / totals[end])[..., None]
            sent = weights * h[begin]
            h = torch.zeros_like(h).scatter_add(0, end[:, None, None].expand_as(sent), sent)
            x = functional.elu(h.reshape(self.nodes, -1))
        return self.head(x)


class GlobalFilter(nn.Module):
    """Pictures filtered by products of their spectra with weights, and layers of each place."""

    def __init__(self, side: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.side, self.patches = side, nn.Conv2d(3, width, 4, 4)
        spectrum = (side, side // 2 + 1, width)
        self.real, self.imaginary = (
            nn.ParameterList(nn.Parameter(torch.randn(spectrum) * 0.1) for _ in range(layers)) for _ in range(2)
        )
        self.mix = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).permute(0, 2, 3, 1)
        for a, b, mix in zip(self.real, self.imaginary, self.mix):
            z = torch.view_as_real(torch.fft.rfft2(y, dim=(1, 2), norm="ortho"))
            re, im = z[..., 0], z[..., 1]
            filtered = torch.view_as_complex(torch.stack([re * a - im * b, re * b + im * a], -1))
            y = y + mix(torch.fft.irfft2(filtered, s=(self.side, self.side), dim=(1, 2), norm="ortho"))
        return self.head(y.mean((1, 2)))


class TrafficGraph(nn.Module):
    """Gated convolutions over time around Chebyshev polynomials of a graph: a sum over three operands."""

    def __init__(self, nodes: int, channels: int, width: int, degree: int, classes: int) -> None:
        super().__init__()
        edges = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(1)) < 0.1
        adjacent = (edges | edges.T).float()
        scale = adjacent.sum(1).clamp(min=1) ** -0.5
        laplacian = -(scale[:, None] * adjacent * scale)
        powers = [torch.eye(nodes), laplacian]
        while len(powers) < degree:
            powers.append(2 * laplacian @ powers[-1] - powers[-2])
        self.register_buffer("powers", torch.stack(powers), persistent=False)
        self.before, self.after = nn.Conv2d(channels, 2 * width, (3, 1)), nn.Conv2d(width, 2 * width, (3, 1))
        self.theta = nn.Parameter(torch.randn(degree, width, width) * 0.1)
        self.norm, self.head = nn.LayerNorm([nodes, width]), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.glu(self.before(x), 1)
        y = functional.relu(torch.einsum("kvu,bctu,kcd->bdtv", self.powers, y, self.theta))
        y = self.norm(functional.glu(self.after(y), 1).permute(0, 2, 3, 1))
        return self.head(y.mean(1)).transpose(1, 2)


class AxialAttention(nn.Module):
    """Attention along the rows of pictures, then along their columns."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.heads, self.patches = heads, nn.Conv2d(3, width, 3, 3)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.BatchNorm2d(width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)])
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x)
        for i, (norm, qkv, out) in enumerate(self.layers):
            order = (0, 2, 3, 1) if i % 2 else (0, 3, 2, 1)
            z = qkv(norm(y)).permute(order)
            parts = z.reshape(*z.shape[:3], 3, self.heads, -1).permute(3, 0, 1, 4, 2, 5)
            mixed = functional.scaled_dot_product_attention(*parts.unbind(0)).transpose(2, 3).flatten(3)
            y = y + functional.relu(out(mixed.permute(*(order.index(a) for a in range(4)))))
        return self.head(y.mean((2, 3)))


def llama() -> nn.Module:
    return Llama(vocab=1024, width=192, heads=6, groups=2, layers=4, length=128)


def resnet26() -> nn.Module:
    stages: list[nn.Module] = []
    for level, i in enumerate((32, 128, 256, 512)):
        width = 32 << level
        stages += [Bottleneck(i, width, 2 if level else 1), Bottleneck(4 * width, width, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def pointnet() -> nn.Module:
    return PointNet(width=64, classes=10)


def cnn3d() -> nn.Module:
    def part(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv3d(i, o, 3, 1, 1), nn.BatchNorm3d(o), nn.ReLU(), nn.MaxPool3d(2)]

    return nn.Sequential(
        *part(1, 16), *part(16, 32), *part(32, 64), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def mixer() -> nn.Module:
    return MLPMixer(side=64, patch=8, width=192, layers=4, classes=10)


def conformer() -> nn.Module:
    return Conformer(features=40, width=128, layers=2, classes=20)


def experts() -> nn.Module:
    return Experts(vocab=512, width=128, experts=4, length=64)


def generator() -> nn.Module:
    """From 16 × 16 numbers to pictures, by transposed convolutions; the classes are levels of brightness."""

    def up(i: int, o: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]

    return nn.Sequential(*up(64, 64), *up(64, 32), nn.ConvTranspose2d(32, 8, 4, 2, 1))


def graph_attention() -> nn.Module:
    return GraphAttention(nodes=1000, edges=8000, features=64, width=64, heads=4, classes=7)


def global_filter() -> nn.Module:
    return GlobalFilter(side=16, width=64, layers=3, classes=10)


def traffic_graph() -> nn.Module:
    return TrafficGraph(nodes=60, channels=3, width=32, degree=3, classes=4)


def axial_attention() -> nn.Module:
    return AxialAttention(width=64, heads=4, layers=4, classes=10)
