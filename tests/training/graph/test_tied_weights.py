"""An embedding and an output layer that were one tensor: tied by default, whatever the exporter made of them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad.training import LoRA, Trainer, attach
from onnxgrad.training.spec.training_info import training_notes

HEADS = {
    "transposed": ("y = MatMul (g, head)", lambda e: np.ascontiguousarray(e.T)),
    "transposed by a node": ("t = Transpose <perm = [1, 0]> (head)  y = MatMul (g, t)", lambda e: e.copy()),
    "a Gemm": ("y = Gemm <transB = 1> (g, head)", lambda e: e.copy()),
}


def language_model(head="transposed", change=None, size=(11, 6)):
    """Scores of the next of 11 tokens, of the last one."""
    text, made = HEADS[head]
    proto = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        lm (int64[N] ids) => (float[N, {size[0]}] y) {{
          e = Gather (table, ids)  h = MatMul (e, w)  g = Tanh (h)  {text}
        }}""")
    rng = np.random.default_rng(0)
    table = rng.standard_normal(size).astype(np.float32)
    w = rng.standard_normal((size[1], size[1])).astype(np.float32)
    output = made(table)
    if change is not None:
        change(output)
    held = {"table": table, "w": w, "head": output}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in held.items())
    return proto, held


def batches(count=12):
    rng = np.random.default_rng(1)
    return [{"ids": rng.integers(0, 11, 8), "labels": rng.integers(0, 11, 8)} for _ in range(count)]


def parameters(trainer):
    return {n for n, t in trainer.step.state.items() if t.kind == "parameter"}


def losses(trainer):
    return [float(trainer.machine.step(batch)["loss"]) for batch in batches()]


def of_torch():
    torch = pytest.importorskip("torch")
    _, held = language_model()
    table, w = (torch.nn.Parameter(torch.tensor(held[n])) for n in ("table", "w"))
    optimizer = torch.optim.AdamW([table, w], lr=0.01)
    found = []
    for batch in batches():
        y = torch.tanh(table[torch.tensor(batch["ids"])] @ w) @ table.T
        loss = torch.nn.functional.cross_entropy(y, torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, {"table": table.detach().numpy(), "w": w.detach().numpy()}


SETTINGS = {"loss": "cross_entropy", "optimizer": "adamw", "learning_rate": 0.01}


@pytest.mark.torch
@pytest.mark.parametrize("head", HEADS)
def test_they_train_as_the_one_tensor_of_torch(head, tmp_path):
    trainer = Trainer(language_model(head)[0], **SETTINGS)
    assert parameters(trainer) == {"table", "w"}
    expected, weights = of_torch()
    np.testing.assert_allclose(losses(trainer), expected, rtol=1e-4)
    np.testing.assert_allclose(trainer.state()["table"], weights["table"], rtol=1e-3, atol=1e-5)
    trainer.save(tmp_path / "m.onnx")
    saved = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(saved, full_check=True)
    again = Trainer(saved, **SETTINGS)
    assert parameters(again) == {"table", "w"}, "and a saved model stays tied"


def test_the_header_says_so_and_untie_keeps_them_apart():
    proto, _ = language_model()
    (line,) = training_notes(attach(proto, **SETTINGS))
    assert "'head' is tied to 'table', its equal (--untie keeps them apart)" in line
    apart = attach(proto, untie=True, **SETTINGS)
    assert "tied" not in training_notes(apart)[0]
    assert parameters(Trainer(apart)) == {"table", "w", "head"}


def test_what_differs_in_one_number_or_is_equal_by_chance_is_not_tied():
    def change(head):
        head[3, 2] += 1e-6

    assert "head" in parameters(Trainer(language_model(change=change)[0], **SETTINGS))
    fresh, _ = language_model()
    for tensor in fresh.graph.initializer:
        if tensor.name in ("table", "head"):
            zeros = np.ones_like(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    assert "head" in parameters(Trainer(fresh, **SETTINGS))


@pytest.mark.parametrize(
    ("how", "trained"),
    [
        ({"trainable": ["head"]}, {"head"}),
        ({"freeze": ["table"]}, {"head", "w"}),
        ({"freeze": ["head"]}, {"table", "w"}),
        ({"groups": ["head:rate=0.1"]}, {"table", "w", "head"}),
        ({"trainable": ["last:1"]}, {"head"}),
        ({"trainable": ["all"]}, {"table", "w"}),
        ({"freeze": ["w"]}, {"table"}),
    ],
)
def test_who_chooses_one_of_the_two_has_them_apart(how, trained):
    assert parameters(Trainer(language_model()[0], **SETTINGS, **how)) == trained


def test_adapters_freeze_both():
    trainer = Trainer(language_model()[0], loss="cross_entropy", adapter=LoRA(2, targets=["w"]))
    assert not {"table", "head"} & parameters(trainer)
    assert np.isfinite(losses(trainer)).all()


def test_a_checkpoint_goes_on(tmp_path):
    data = {"ids": np.arange(40) % 11, "labels": np.arange(1, 41) % 11}
    model = language_model()[0]
    whole = Trainer(model, **SETTINGS)
    whole.fit(data, epochs=2, batch_size=8)
    Trainer(model, **SETTINGS).fit(data, epochs=1, batch_size=8, checkpoint=tmp_path)
    rest = Trainer(model, **SETTINGS)
    rest.fit(data, epochs=2, batch_size=8, checkpoint=tmp_path, resume=True)
    for name, array in whole.state().items():
        np.testing.assert_array_equal(rest.state()[name], array)
    apart = Trainer(model, untie=True, **SETTINGS)
    before = apart.evaluate(data)["loss"]
    np.testing.assert_allclose(Trainer(model, **SETTINGS).evaluate(data)["loss"], before, rtol=1e-6)
