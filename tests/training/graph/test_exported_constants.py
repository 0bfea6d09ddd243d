"""Default trainable weights: chosen by their use, without constants that exporters store as initializers."""

from __future__ import annotations

import io
import math
from itertools import product

import numpy as np
import onnx
import pytest

from onnxgrad.training import attach, compile_step
from onnxgrad.training.spec.training_info import training_notes
from tests.training.graph.test_trainable import parameters

ANGLES = np.outer(np.arange(16), 10000 ** (-np.arange(4) / 4))
GRID = np.stack(np.meshgrid(np.arange(6.0), np.arange(5.0)), -1)
rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape)


def drawn(shape):
    """A table of positions in two axes, as vision transformers have it: sines and cosines, of rows, then of columns."""
    parts = [f(np.outer(GRID[..., i].ravel(), [1, 0.1])) for i in (0, 1) for f in (np.sin, np.cos)]
    return np.concatenate(parts, -1).reshape(shape)


#: What is computed from h [N, 16, 8], itself a product of x with a weight; one tensor t, and whether it trains.
CASES = {
    "cosines": ("z = Mul (h, t)", np.cos(np.concatenate([ANGLES, ANGLES], -1)), False),
    "sines behind the axis of heads": ("z = Mul (h, t)", np.sin(np.concatenate([ANGLES] * 2, -1))[None], False),
    "gathered": ("i = Constant <value = int64[1] {3}> ()  c = Gather (t, i)  z = Mul (h, c)",
                 np.cos(np.concatenate([ANGLES] * 2, -1)), False),
    "positions of a sinusoid": ("z = Add (h, t)", np.stack([np.sin(ANGLES), np.cos(ANGLES)], -1).reshape(16, 8), False),
    "positions that were learned": ("z = Add (h, t)", 0.02 * random(16, 8), True),
    "positions in two axes": ("s = Slice (t, zero, sixteen)  z = Add (h, s)", drawn((30, 8)), False),
    "a line": ("z = Add (h, t)", np.repeat(np.arange(16.0)[:, None] / 16, 8, 1), False),
    "strides": ("z = Mul (h, t)", np.repeat([8.0, 16, 32, 64], 4)[:, None], False),
    "causal mask": ("z = Add (h, t)", np.triu(np.full((16, 8), -1e4), 1), False),
    "mask of infinities": ("z = Add (h, t)", np.triu(np.full((16, 8), -np.inf), 1), False),
    "ones and zeros": ("z = Mul (h, t)", np.tril(np.ones((16, 8))), False),
    "scale of a norm": ("z = Mul (h, t)", np.ones(8), True),
    "bias of whole numbers": ("z = Add (h, t)", np.arange(8.0) - 4, True),
    "matrix of whole numbers": ("z = MatMul (h, t)", np.array([[1.0, 0], [0, 1]] * 4), True),
    "layer scale": ("u = Tanh (h)  z = Mul (u, t)", random(8), True),
    "exponents": ("u = Abs (h)  z = Pow (u, t)", random(8), False),
    "bound": ("z = Max (h, t)", random(8), False),
    "scale through Exp": ("u = Exp (t)  z = Mul (h, u)", np.array(2.65), True),
    "scale through Clip and Exp": ("u = Exp (t)  v = Min (u, hundred)  z = Mul (h, v)", np.array(2.65), True),
    "half": ("z = Mul (h, t)", np.array(0.5), False),
    "half of rank one": ("u = Tanh (h)  z = Mul (u, t)", np.array([0.5]), False),
    "a first state": ("n = Constant <value = int64[3] {1, 16, 8}> ()  s = Expand (t, n)  u = Unsqueeze (w, zero)"
                      "  q, z = RNN <hidden_size = 8> (h, u, u, , , s)", np.array(0.0), False),
    "slope": ("z = PRelu (h, t)", np.array([0.25]), True),
    "table of words": ("v = Gather (t, ids)  z = Add (h, v)", random(20, 8), True),
    "mean of the input": ("y = Sub (x, t)  z = MatMul (y, w)", random(8), False),
    "deviation of the input": ("y = Div (x, t)  z = MatMul (y, w)", 0.2 + random(1, 1, 8) ** 2, False),
    "vectors of numbers": ("u = Unsqueeze (x, zero)  v = Mul (u, t)  y = ReduceSum <keepdims = 0> (v, zero)"
                           "  z = MatMul (y, w)", random(4, 1, 16, 8), True),
    "frequencies": ("p = MatMul (h1, t)  a = Cos (p)  b = Sin (p)  u = Add (a, b)  z = Mul (h, u)",
                    ANGLES[1:2, :1].repeat(8, 1) * (1 + random(1, 8) ** 2), False),
}  # fmt: skip


def model(text, **held):
    """t is what is asked about; w and w0 are matrices."""
    net = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[N, 16, 8] x, int64[N, 16] ids) => (float z)
        <int64[1] zero = {{0}}, int64[1] sixteen = {{16}}, float hundred = {{100}}> {{
            h = MatMul (x, w0)  h1 = Constant <value = float[16, 1] {{{", ".join(map(str, range(16)))}}}> ()
            {text}
        }}""")
    del net.graph.output[0].type.tensor_type.shape.dim[:]
    net.graph.output[0].type.tensor_type.ClearField("shape")
    for name, array in {"w": random(8, 8), "w0": random(8, 8), **held}.items():
        net.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    return net


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_is_what_it_is_used_as(case):
    text, array, trains = CASES[case]
    net = model(text, t=array)
    attached = attach(net, loss="l1")
    assert ("t" in parameters(attached)) == trains
    (line,) = training_notes(attached)
    if not trains:
        assert "left out as constants: " in line
        assert line.endswith("--trainable all trains these, too")
    finite = np.isfinite(array).all()
    both = parameters(attach(net, loss="l1", trainable=["all"]))
    assert ("t" in both) == finite
    assert "t" in parameters(attach(net, loss="l1", trainable=["t"])) or not finite


@pytest.mark.parametrize(("name", "trains"), [("auto.cast.4", False), ("blocks.0.scale", True)])
def test_a_factor_is_a_parameter_by_the_name_of_a_module(name, trains):
    """Paddle's exporter calls the factor of attention ``auto.cast.4``."""
    net = model("z = Mul (h, t)", t=np.array(0.5))
    net.graph.initializer[-1].name = net.graph.node[-1].input[1] = name
    assert (name in parameters(attach(net, loss="l1"))) == trains


def test_where_nothing_else_could_train_it_is_meant():
    """y = x·a + b alone: what else would one train?"""
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[N, 2] x) => (float[N, 2] y) <float[2] a = {1, 2}, float[1] b = {0.5}> {
            u = Mul (x, a)  y = Add (u, b)
        }""")
    assert set(parameters(attach(net, loss="mse"))) == {"a", "b"}


def test_statistics_by_their_names_do_not_train():
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[N, 3, 5, 5] x) => (float[N, 2, 5, 5] y)
            <float[1, 2, 1, 1] weight = {1, 2}, float[1, 2, 1, 1] bias = {0, 1},
             float[1, 2, 1, 1] running_mean = {3, 1}, float[1, 2, 1, 1] running_var = {2, 1}, float eps = {0.00001}> {
            h = Conv (x, kernel)  a = Add (running_var, eps)  r = Sqrt (a)  s = Div (weight, r)
            m = Mul (running_mean, s)  t = Sub (bias, m)  p = Mul (h, s)  y = Add (p, t)
        }""")
    net.graph.initializer.append(onnx.numpy_helper.from_array(random(2, 3, 1, 1).astype(np.float32), "kernel"))
    assert set(parameters(attach(net, loss="mse"))) == {"kernel"}
    assert set(parameters(attach(net, loss="mse", trainable=["bias"]))) == {"bias"}


# --- what PyTorch exports ------------------------------------------------------------------------


def exported(module, operands, dynamo):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    file = io.BytesIO()
    if dynamo:
        pytest.importorskip("onnxscript", reason="needs onnxscript")
        return torch.onnx.export(module.eval(), operands, dynamo=True, verbose=False).model_proto
    torch.onnx.export(module.eval(), operands, file, dynamo=False, opset_version=17)
    return onnx.load_from_string(file.getvalue())


def network(kind):
    """A module, its operands, and how many of its numbers shall train."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    nn = torch.nn

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1))
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1))
            self.conv, self.last, self.gamma = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Parameter(torch.rand(4))

        def forward(self, x):
            return self.last(self.conv((x - self.mean) / self.std).relu().mean((2, 3))) * self.gamma + 0.5

    class Rotary(nn.Module):
        def __init__(self, steps=16, size=8):
            super().__init__()
            angles = torch.tensor(np.concatenate([ANGLES, ANGLES], -1), dtype=torch.float32)
            self.register_buffer("c", angles.cos()[None])
            self.register_buffer("s", angles.sin()[None])
            self.register_buffer("m", torch.triu(torch.full((steps, steps), -1e4), 1))
            self.table = nn.Embedding(11, size)
            self.places = nn.Parameter(torch.randn(1, steps, size) * 0.02)
            self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
            self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 5)

        def turned(self, x):
            a, b = x.chunk(2, -1)
            return x * self.c + torch.cat([-b, a], -1) * self.s

        def forward(self, ids):
            h = self.table(ids) + self.places
            q, k = self.turned(self.q(h)), self.turned(self.k(h))
            p = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8) + self.m, -1)
            return self.head(self.norm(h + p @ self.v(h))).mean(1)

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.image = nn.Linear(6, 4), nn.Linear(5, 4)
            self.logit_scale = nn.Parameter(torch.tensor(2.6592))
            self.logit_bias = nn.Parameter(torch.tensor(-1.0))
            self.gamma = nn.Parameter(1e-6 * torch.ones(4))

        def forward(self, words, pixels):
            a, b = self.text(words), self.image(pixels) * self.gamma.reshape(1, -1)
            a, b = (v / v.norm(dim=-1, keepdim=True) for v in (a, b))
            return self.logit_scale.exp() * (b @ a.t()) + self.logit_bias

    class Splines(nn.Module):
        """A basis as a buffer, a slice of one, and an exponent that is learned."""

        def __init__(self):
            super().__init__()
            self.register_buffer("basis", torch.rand(7, 6))
            self.register_buffer("knots", torch.rand(8))
            self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(6), nn.Linear(6, 4)
            self.power = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            h = (self.first(x)[..., None] - self.knots[:-1]).relu() @ self.basis
            return self.last(self.norm(h.mean(1).abs() ** self.power))

    class Gated(nn.Module):
        """A parameter that is one number, of the outermost module."""

        def __init__(self):
            super().__init__()
            self.first, self.beta = nn.Linear(5, 8), nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return (self.first(x) * self.beta).softmax(1)

    class Alone(nn.Module):
        """Parameters of one number, beside none whose name is a path; the newer exporter folds such ones and zeros."""

        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(5, 8, bias=False), nn.Parameter(torch.tensor(1.0))
            self.bias = nn.Parameter(torch.tensor(0.0))

        def forward(self, x):
            return self.first(x) * self.scale + self.bias

    torch.manual_seed(0)

    class Frozen(nn.Module):
        """torchvision's FrozenBatchNorm2d, as detectors have it."""

        def __init__(self, count):
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, 0.5 + torch.rand(count))

        def forward(self, x):
            w, b, m, v = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var))
            scale = w * (v + 1e-5).rsqrt()
            return x * scale + (b - m * scale)

    ids, pixels = torch.randint(0, 11, (2, 16)), torch.randn(2, 3, 8, 8)
    module, operands = {
        "normalized": lambda: (Normalized(), (pixels,)),
        "frozen": lambda: (
            nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), Frozen(8), nn.ReLU(), nn.Conv2d(8, 4, 3), Frozen(4)),
            (pixels,),
        ),
        "groups": lambda: (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4)),
            (pixels,),
        ),
        "spectral": lambda: (nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)), nn.ReLU()), (torch.randn(3, 5),)),
        "rotary": lambda: (Rotary(), (ids,)),
        "pairs": lambda: (Pairs(), (torch.randn(3, 6), torch.randn(3, 5))),
        "gated": lambda: (Gated(), (torch.randn(3, 5),)),
        "alone": lambda: (Alone(), (torch.randn(3, 5),)),
        "splines": lambda: (Splines(), (torch.randn(3, 5),)),
    }[kind]()
    return module, operands, sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "dynamo"),
    [
        *product(["normalized", "frozen", "groups", "rotary", "pairs", "gated"], [False, True]),
        ("splines", True),
        ("spectral", False),
        ("alone", False),
    ],
)
def test_what_pytorch_exports_trains_its_parameters(kind, dynamo):
    """The trained numbers are as many as the module's parameters, under any names; buffers stay."""
    module, operands, count = network(kind)
    attached = attach(exported(module, operands, dynamo), loss="mse")
    step = compile_step(attached)
    assert sum(t.initial.size for t in step.state.values() if t.kind == "parameter") == count
