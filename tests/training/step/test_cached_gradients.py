"""Cached gradients: parts of a batch whose loss is a function of all of its rows give the step of the whole batch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad.eager.numpy as xp
from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.runtime import Options, StepRunner, measured_peak
from onnxgrad.training import Trainer, compile_step, split_step
from onnxgrad.training.build.attach import attached
from onnxgrad.training.graph.dropout_masks import COUNT
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.step.cached_gradients import CachedGradients, cut_at_predictions
from tests.distributed.simulated import World

ONE = Options(threads=1)


def deep(width: int = 6, layers: int = 2, dropout: bool = False, bias: bool = False) -> onnx.ModelProto:
    """An encoder of several layers, with Dropout between them."""
    mask = "Dropout (a{k}, half)" if dropout else "Identity (a{k})"
    lines = "".join(
        f"m{k} = MatMul (d{k - 1}, w{k})\na{k} = Tanh (m{k})\nd{k} = {mask.format(k=k)}\n" for k in range(1, layers + 1)
    )
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        encoder (float[N, 4] x) => (float[N, {width}] y) {{
            m0 = MatMul (x, w0)
            d0 = {"Add (m0, b)" if bias else "Identity (m0)"}
            {lines}
            y = MatMul (d{layers}, v)
        }}""")
    rng = np.random.default_rng(0)
    arrays = {f"w{k}": (4 if not k else width, width) for k in range(layers + 1)}
    arrays["v"] = (width, width)
    held = {n: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for n, s in arrays.items()}
    if bias:
        held["b"] = np.zeros(width, np.float32)
    if dropout:
        held["half"] = np.array(0.5, np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    return model


def rows_of(names, rows=12, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((rows, 4)).astype(np.float32) for n in names}


GROUPS = {"labels": np.random.default_rng(1).integers(0, 4, 12)}
SCORES = {"labels": np.random.default_rng(1).random(12).astype(np.float32)}
NUMBERS = {"labels": np.random.default_rng(2).standard_normal((12, 6)).astype(np.float32)}
CASES = {
    "in-batch negatives": ({"loss": "multiple_negatives", "pairs": "a,p"}, rows_of("ap")),
    "hard negatives": ({"loss": "multiple_negatives:temperature=0.2,symmetric=true", "pairs": "a,p,n"}, rows_of("apn")),
    "sum": ({"loss": "multiple_negatives:reduction=sum", "pairs": "a,p"}, rows_of("ap")),
    "scored pairs": ({"loss": "cosent:scale=5", "pairs": "a,p"}, {**rows_of("ap"), **SCORES}),
    "groups": ({"loss": "info_nce"}, {**rows_of("x"), **GROUPS}),
    "triplets": ({"loss": "triplet", "clip_norm": 0.05}, {**rows_of("x"), **GROUPS}),
    "two terms": ({"loss": ["info_nce", "0.3*triplet"]}, {**rows_of("x"), **GROUPS}),
    "regions": ({"loss": "lovasz"}, {**rows_of("x"), **GROUPS}),
    "a formula that is no mean": ({"loss": "sqrt(mean((y - labels)**2)) + 0.1*std(y)"}, {**rows_of("x"), **NUMBERS}),
    "a formula of a layer": ({"loss": ["mse", "0.1*mean(abs(a1))"]}, {**rows_of("x"), **NUMBERS}),
    "a function": ({"loss": lambda y, labels: xp.mean((y - labels) ** 2)}, {**rows_of("x"), **NUMBERS}),
    "means over other counts": ({"loss": ["cross_entropy:ignore_index=0", "0.1*mse:labels=t"]},
                                {**rows_of("x"), **GROUPS, "t": NUMBERS["labels"]}),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_gradient_of_the_batch(case):
    """SGD of step size 1 moves the weights by the gradient; five parts do not divide 12 rows evenly."""
    settings, batch = CASES[case]
    found = []
    for accumulate in (1, 2, 5):
        model = deep(bias=case == "two terms")  # whose gradient is a sum over rows
        trainer = Trainer(model, **settings, optimizer="sgd", learning_rate=1.0, accumulate=accumulate, options=ONE)
        history = trainer.fit(batch, epochs=2, batch_size=12, shuffle=False)
        assert isinstance(trainer.machine, CachedGradients) == (accumulate > 1)
        found.append(([e["loss"] for e in history.epochs], trainer.state()))
    whole, *cached = found
    for losses, state in cached:
        np.testing.assert_allclose(losses, whole[0], rtol=1e-5)
        for name, array in whole[1].items():
            np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def cut_of(model, parts, **settings):
    source = attached(model, accumulate=True, cached=True, optimizer="sgd", **settings)
    return CachedGradients(cut_at_predictions(split_step(source)), parts, options=ONE)


def test_both_runs_of_a_part_draw_the_same_masks():
    """SGD moves weights by the derivative of the loss with the masks of that step, by finite differences."""
    batch = rows_of("ap")
    cut = cut_of(deep(dropout=True), 3, loss="multiple_negatives:temperature=1", pairs="a,p", learning_rate=1.0)
    start = cut.state()
    first = float(cut.step(batch)["loss"])
    moved = cut.state()
    gradients = {name: start[name] - moved[name] for name in ("w0", "w1", "w2", "v")}
    rng = np.random.default_rng(3)
    direction = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in gradients.items()}
    losses = []
    for size in (1e-3, -1e-3):
        cut.load_state({n: a + np.float32(size) * direction[n] if n in direction else a for n, a in start.items()})
        losses.append(float(cut.step(batch)["loss"]))
    slope = sum(float(np.sum(gradients[n] * direction[n])) for n in gradients)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=1e-2)
    cut.load_state({**start, COUNT: moved[COUNT]})
    assert float(cut.step(batch)["loss"]) != first  # the next step draws other masks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_in_16_bits(precision):
    """Embeddings and seeds leave the 16 bits in float32, and the loss is scaled as that of the whole batch."""
    settings, batch = CASES["hard negatives"]
    source = attached(deep(), **settings, optimizer="sgd", learning_rate=0.1, accumulate=True, cached=True)
    split = cut_at_predictions(split_step(source, precision=Precision.named(precision, lambda node: True)))
    assert any(
        v.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for n in split.predict.model.graph for v in n.outputs
    )
    whole, cut = StepRunner(compile_step(source, precision=precision)), CachedGradients(split, 4)
    for _ in range(2):
        np.testing.assert_allclose(cut.step(batch)["loss"], whole.step(batch)["loss"], rtol=1e-2)


def test_a_part_at_a_time_needs_less_memory():
    """The graphs of a part, one of 16, against the whole step; that of the loss keeps scores of all pairs of rows."""
    source = attached(deep(width=64, layers=12), loss="multiple_negatives", pairs="a,p", accumulate=True, cached=True)
    split, batch = cut_at_predictions(split_step(source)), rows_of("ap", 512)
    for step in (split.predict, split.loss, split.gradient):
        onnx.checker.check_model(ir.to_proto(step.model), full_check=True)
    part = {n: a[:32] for n, a in batch.items()}
    embeddings = np.random.default_rng(0).standard_normal((512, 2, 64)).astype(np.float32)
    (gathered,), (seed,) = split.gathered.values(), split.seeds.values()
    given = [part, {**batch, gathered: embeddings}, {**part, seed: embeddings[:32]}]
    steps = [split.predict, split.loss, split.gradient]
    predict, loss, gradient = (measured_peak(step, feeds, ONE) for step, feeds in zip(steps, given))
    whole = measured_peak(compile_step(source), batch, ONE)
    assert max(predict, gradient) < whole / 8
    assert loss < whole / 2


def test_the_state_of_an_optimizer_follows_and_resumes(tmp_path):
    settings, batch = CASES["groups"]
    how = {"epochs": 3, "batch_size": 6, "progress": False}
    whole, parts = (
        Trainer(deep(), **settings, optimizer="adamw", clip_norm=0.5, accumulate=n, options=ONE) for n in (1, 3)
    )
    found = [[e["loss"] for e in t.fit(batch, **how).epochs] for t in (whole, parts)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    again = Trainer(deep(), **settings, optimizer="adamw", clip_norm=0.5, accumulate=3, options=ONE)
    again.fit(batch, checkpoint=tmp_path / "run", **{**how, "epochs": 2})
    resumed = Trainer(deep(), **settings, optimizer="adamw", clip_norm=0.5, accumulate=3, options=ONE)
    resumed.fit(batch, checkpoint=tmp_path / "run", resume=True, **how)
    for name, array in parts.state().items():
        np.testing.assert_array_equal(resumed.state()[name], array)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("case", "size", "settings"),
    [
        *((case, 2, {}) for case in CASES),
        ("hard negatives", 2, {"accumulate": 2}),
        ("hard negatives", 3, {}),  # of the last batch, two rows, one rank has none
        ("groups", 3, {"shard_optimizer": True}),
    ],
)
def test_ranks_take_the_step_of_one_process(case, size, settings):
    """A rank has a part of the rows, and compares them with those of all."""
    how, batch = CASES[case]
    how = {**how, "optimizer": "momentum", "learning_rate": 0.002, "options": ONE}
    alone = Trainer(deep(), **how)
    alone.fit(batch, epochs=2, batch_size=5, seed=1)

    def work(collective):
        trainer = Trainer(deep(), **how, **settings, distributed=collective)
        trainer.fit(batch, epochs=2, batch_size=5, seed=1)
        state = dict(trainer.strategy.whole_state())
        return [e["loss"] for e in trainer.history.epochs], state

    for losses, state in World(size).run(work):
        np.testing.assert_allclose(losses, [e["loss"] for e in alone.history.epochs], rtol=1e-5)
        for name, array in alone.state().items():
            np.testing.assert_allclose(state[name], array, rtol=1e-4, atol=2e-5, err_msg=name)


def test_ranks_that_exchange_seldom_cannot_compare_rows():
    def work(collective, **exchange):
        Trainer(deep(), loss="info_nce", distributed=collective, options=ONE, **exchange)

    for name, exchange in {"sync_every": {"sync_every": 2}, "compress": {"compress": "fp16"}}.items():
        with pytest.raises(BadInput, match=f"{name} does not go with a loss of all rows"):
            World(2).run(lambda collective, given=exchange: work(collective, **given))


def test_rows_that_cannot_be_joined_are_refused():
    model = deep()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 12
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 12
    with pytest.raises(BadInput, match="no open number of rows on its first axis"):
        Trainer(model, loss="info_nce", accumulate=2)


def test_values_with_several_rows_for_each_row_are_cut_where_parts_are():
    """A value [6·N] of a loss: each part gets the seeds of its own numbers; over ranks it is refused."""
    model = deep()
    model.graph.node.append(onnx.helper.make_node("Reshape", ["y", "all"], ["flat"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "all"))
    found = []
    for accumulate in (1, 5):
        settings = {"loss": "mean((flat - mean(labels))**4)", "optimizer": "sgd", "accumulate": accumulate}
        trainer = Trainer(model, **settings, options=ONE)
        trainer.fit({**rows_of("x"), **SCORES}, batch_size=12)
        found.append(trainer.state())
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(OnnxGradError, match="one row for each row of the data"):
        World(2).run(lambda c: Trainer(model, **settings, distributed=c, options=ONE).fit({**rows_of("x"), **SCORES}))
