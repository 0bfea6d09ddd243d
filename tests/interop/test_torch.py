"""An .onnx model as a torch.nn.Module: gradients to any order, training through it, compiled around it."""

import copy
import io
import pickle

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput

torch = pytest.importorskip("torch")

from onnxgrad.interop.torch import Module  # noqa: E402


def model(body, inputs="double[N, 3] x", outputs="double[N, 2] y", weights=None):
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    for name, array in (weights or {}).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


RNG = np.random.default_rng(0)
WEIGHTS = {"layer.w": RNG.standard_normal((3, 2)), "b": RNG.standard_normal(2)}
LAYER = 'h = MatMul(x, "layer.w")\n s = Add(h, b)\n y = Tanh(s)'.replace('"', "")
BODY = LAYER.replace("layer.w", "w")


def layer():
    return model(BODY, weights={"w": WEIGHTS["layer.w"], "b": WEIGHTS["b"]})


def test_gradients_of_first_and_second_order():
    module = Module(layer())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def called(x, *parameters):
        return torch.func.functional_call(module, dict(zip(("w", "b"), parameters)), (x,))

    assert torch.autograd.gradcheck(called, (x, *parameters))
    assert torch.autograd.gradgradcheck(called, (x, *parameters))
    np.testing.assert_allclose(
        module(x).detach(), np.tanh(x.detach().numpy() @ WEIGHTS["layer.w"] + WEIGHTS["b"]), rtol=1e-12
    )


def test_the_same_gradients_as_a_layer_of_torch():
    module, linear = Module(layer()), torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(WEIGHTS["layer.w"].T))
        linear.bias.copy_(torch.from_numpy(WEIGHTS["b"]))
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    (module(x) ** 2).sum().backward()
    (torch.tanh(linear(z)) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(module.get_parameter("w").grad, linear.weight.grad.T)
    torch.testing.assert_close(module.get_parameter("b").grad, linear.bias.grad)


def test_a_torch_layer_in_front_of_a_frozen_model_trains():
    torch.manual_seed(0)
    module = Module(layer(), trainable=False)
    assert not list(module.parameters())
    front = torch.nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.Adam(front.parameters(), lr=0.05)
    x, wanted = torch.randn(32, 3, dtype=torch.float64), torch.full((32, 2), 0.25, dtype=torch.float64)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = ((module(front(x)) - wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_the_model_trains_behind_a_torch_loss_and_is_saved(tmp_path):
    module = Module(layer(), trainable=["b"])
    assert [n for n, _ in module.named_parameters()] == ["b"]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = torch.randn(16, 3, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    module.save(str(tmp_path / "m.onnx"))
    torch.testing.assert_close(Module(tmp_path / "m.onnx")(x), module(x))
    saved = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    np.testing.assert_array_equal(saved["w"], WEIGHTS["layer.w"])
    np.testing.assert_array_equal(saved["b"], module.get_parameter("b").detach().numpy())


def test_several_outputs_and_integers():
    body = "y = Mul(x, x)\n z = Gather(x, i)\n k = Shape(x)"
    both = Module(model(body, "double[N] x, int64[M] i", "double[N] y, double[M] z, int64[1] k"))
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y, z, k = both(x, torch.tensor([2, 2]))
    assert k.tolist() == [3]
    (y.sum() + z.sum()).backward()
    assert x.grad.tolist() == [2, 4, 8]
    (only,) = torch.autograd.grad(both(x, torch.tensor([0]))[1].sum(), x)  # y has no cotangent
    assert only.tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype, tmp_path):
    kind = str(dtype).removeprefix("torch.")
    proto = model("y = MatMul(x, w)", f"{kind}[N, 3] x", f"{kind}[N, 2] y")
    weight = onnx.helper.make_tensor("w", getattr(onnx.TensorProto, kind.upper()), [3, 2], [0.5, 1, -1, 2, 4, 0.25])
    proto.graph.initializer.append(weight)
    module, x = Module(proto), torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype, requires_grad=True)
    y = module(x)
    y.sum().backward()
    wanted = torch.tensor([[0.5, 1], [-1, 2], [4, 0.25]], dtype=dtype)
    assert torch.equal(y, x @ wanted)
    assert torch.equal(x.grad, wanted.sum(1).expand(2, 3))
    assert torch.equal(module.w.grad, x.detach().sum(0)[:, None].expand(3, 2))
    module.save(tmp_path / "saved.onnx")
    assert torch.equal(Module(tmp_path / "saved.onnx")(x), y)


def test_under_compile_it_is_one_opaque_operator():
    module = Module(layer())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x):
        return module(x * 2).square().sum()

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    loss(x).backward()
    module(z * 2).square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_what_does_not_fit_is_refused():
    module = Module(layer())
    with pytest.raises(BadInput, match="takes 1 arguments"):
        module(torch.zeros(1, 3), torch.zeros(1))
    with pytest.raises(BadInput, match="'x' is float32; the model takes float64"):
        module(torch.zeros(1, 3))
    with pytest.raises(BadInput, match="no initializer named 'ww'"):
        Module(layer(), trainable=["ww"])


def test_integers_alone_need_no_gradient():
    module = Module(model("y = Multinomial<sample_size=2>(x)", "float[N, 3] x", "int32[N, 2] y"))
    assert module(torch.ones(2, 3)).shape == (2, 2)


NORM = """c = Conv(x, k)\n y = BatchNormalization(c, scale, shift, mean, var)"""


def normalized():
    rng = np.random.default_rng(2)
    held = {"k": rng.standard_normal((2, 3, 1, 1)), "scale": np.ones(2), "shift": np.zeros(2),
            "mean": rng.standard_normal(2), "var": np.full(2, 2.0)}  # fmt: skip
    held = {name: array.astype(np.float32) for name, array in held.items()}
    return model(NORM, "float[N, 3, 4, 4] x", "float[N, 2, 4, 4] y", held)


def test_running_statistics_that_the_exporter_made_of_weights_are_buffers():
    """Equal tensors are stored once: those of a fresh normalization are its bias and its scale."""
    weights = {"scale": np.ones(3), "bias": np.zeros(3)}
    body = "mean = Identity(bias)  var = Identity(scale)  y = BatchNormalization(x, scale, bias, mean, var)"
    module = Module(model(body, outputs="double[N, 3] y", weights=weights))
    assert {n for n, _ in module.named_parameters()} == {"scale", "bias"}
    assert {n for n, _ in module.named_buffers()} == {"mean", "var"}
    x = torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        module.scale.mul_(4.0)
        module.bias.add_(1.0)
    torch.testing.assert_close(module(x), 4 * x / (1 + 1e-5) ** 0.5 + 1)


def test_running_statistics_are_buffers():
    module = Module(normalized())
    assert {n for n, _ in module.named_parameters()} == {"k", "scale", "shift"}
    assert {n for n, _ in module.named_buffers()} == {"mean", "var"}
    x = torch.randn(2, 3, 4, 4)
    module(x).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    with torch.no_grad():
        before = module(x)
        module.get_buffer("mean").add_(1.0)
        assert not torch.allclose(module(x), before)


def test_only_what_trains_by_default_is_a_parameter():
    mask = np.triu(np.full((3, 3), -1e9), 1)
    module = Module(model("h = MatMul(x, w)\n y = Add(h, mask)", "double[3, 3] x", "double[3, 3] y",
                          {"w": np.eye(3) / 3, "mask": mask}))  # fmt: skip
    assert [n for n, _ in module.named_parameters()] == ["w"]
    assert not list(module.named_buffers())


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_compute_and_train_by_themselves(copied):
    module, x = Module(normalized()), torch.randn(2, 3, 4, 4)
    module(x).sum().backward()
    module.zero_grad()
    other = copied(module)
    torch.testing.assert_close(other(x), module(x))
    other(x).square().sum().backward()
    module(x).square().sum().backward()
    for (name, one), (_, two) in zip(module.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(two.grad, one.grad, msg=name)
        assert two is not one
    with torch.no_grad():
        other.get_parameter("shift").add_(1.0)
    assert not torch.allclose(other(x), module(x))


def test_transforms_of_torch_func():
    module, linear = Module(layer()), torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(WEIGHTS["layer.w"].T))
        linear.bias.copy_(torch.from_numpy(WEIGHTS["b"]))

    def same(x):
        return torch.tanh(linear(x))

    def row(f):
        return lambda x: f(x[None])[0]

    x, v = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    f = torch.func
    close = torch.testing.assert_close
    close(f.grad(lambda x: module(x).square().sum())(x), f.grad(lambda x: same(x).square().sum())(x))
    close(f.vmap(row(module))(x), f.vmap(row(same))(x))
    close(f.vmap(row(module), in_dims=1)(x.T), f.vmap(row(same), in_dims=1)(x.T))
    close(f.jacrev(row(module))(x[0]), f.jacrev(row(same))(x[0]))
    close(f.vmap(f.grad(lambda x: row(module)(x).sum()))(x), f.vmap(f.grad(lambda x: row(same)(x).sum()))(x))
    close(f.hessian(lambda x: row(module)(x).sum())(x[0]), f.hessian(lambda x: row(same)(x).sum())(x[0]))
    for one, two in zip(f.jvp(module, (x,), (v,)), f.jvp(same, (x,), (v,)), strict=True):
        close(one, two)


def test_forward_mode_of_autograd():
    module = Module(layer(), trainable=False)
    x, v = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        _, tangent = torch.autograd.forward_ad.unpack_dual(module(torch.autograd.forward_ad.make_dual(x, v)))
    y = np.tanh(x.numpy() @ WEIGHTS["layer.w"] + WEIGHTS["b"])
    np.testing.assert_allclose(tangent, (1 - y * y) * (v.numpy() @ WEIGHTS["layer.w"]), rtol=1e-12)
