"""Variants of pictures: what each is by definition, drawn by seed, epoch and row alone, and only while training."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer, attach
from onnxgrad.training.data import Augment, Data, Field
from onnxgrad.training.data.augment import uniform
from onnxgrad.training.loop.callbacks import Callback
from tests.training.loop.test_callbacks import At, bits, interrupt

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 3, 8, 6)).astype(np.float32)
ROWS = np.arange(40)


def varied(how, x=X, draw=(0, 0)):
    return Augment.of(how)(x, ROWS[: len(x)], draw)


def test_draws_are_those_of_splitmix64():
    first = 0xE220A8397B1DCDAF  # of the published generator, from the seed 0
    state = np.zeros((), np.uint64)
    from onnxgrad.training.data.augment import _mix_bits

    with np.errstate(over="ignore"):
        assert int(_mix_bits(state)) == first
    u = uniform([1, 2], np.arange(5000), 4)
    assert 0 <= u.min() < 0.001 < 0.999 < u.max() < 1
    np.testing.assert_allclose(u.mean(0), 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(u.T), np.eye(4), atol=0.05)
    for other in ([1, 3], [2, 2], [2, 1]):
        assert not np.array_equal(uniform(other, np.arange(9), 1), u[:9, :1])


def test_mirrored():
    np.testing.assert_array_equal(varied("flip=1"), X[..., ::-1])
    np.testing.assert_array_equal(varied("vflip=1"), X[:, :, ::-1])
    np.testing.assert_array_equal(varied("flip=0,vflip=0"), X)
    half = varied("flip")
    mirrored = [np.array_equal(a, b[..., ::-1]) for a, b in zip(half, X)]
    assert all(m or np.array_equal(a, b) for m, a, b in zip(mirrored, half, X))
    assert 8 < sum(mirrored) < 32
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(varied("flip=1,crop=2,jitter,erase", last).transpose(0, 3, 1, 2),
                                  varied("flip=1,crop=2,jitter,erase"))  # fmt: skip


def test_moved():
    around = np.pad(X, ((0, 0), (0, 0), (1, 1), (1, 1)))
    seen = set()
    for before, after in zip(around, varied("crop=1")):
        (place,) = [
            (y, x) for y in range(3) for x in range(3) if np.array_equal(before[:, y : y + 8, x : x + 6], after)
        ]
        seen.add(place)
    assert len(seen) == 9, "all places occur"


def test_of_other_contrast_and_brightness():
    found = varied("jitter=0.3").astype(np.float64)
    wide = X.astype(np.float64)
    mean, deviation = wide.mean((2, 3)), wide.std((2, 3))
    contrast = found.std((2, 3)) / deviation
    brightness = (found.mean((2, 3)) - mean) / deviation
    for number, middle in ((contrast, 1), (brightness, 0)):
        np.testing.assert_allclose(number, number[:, :1].repeat(3, 1), atol=1e-5)
        assert 0.2 < np.abs(number - middle).max() <= 0.3 + 1e-6
    np.testing.assert_allclose((found - found.mean((2, 3), keepdims=True)) / contrast[..., None, None],
                               wide - mean[..., None, None], atol=1e-5)  # fmt: skip
    scaled = varied("jitter=0.3", (X * 3 + 7).astype(np.float32))
    np.testing.assert_allclose(scaled, found * 3 + 7, rtol=1e-4, atol=1e-4)
    bytes_ = varied("jitter=0.9", RNG.integers(0, 256, X.shape).astype(np.uint8))
    assert (bytes_.min(), bytes_.max()) == (0, 255), "integers stay in their range"


def test_with_a_hole():
    for before, after in zip(X, varied("erase=1")):
        hole = (before != after).any(0)
        rows, columns = np.flatnonzero(hole.any(1)), np.flatnonzero(hole.any(0))
        box = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        np.testing.assert_allclose(box, np.broadcast_to(before.mean((1, 2), keepdims=True), box.shape), atol=1e-6)
        assert 0 < box[0].size <= 0.5 * hole.size


def test_a_variant_follows_from_seed_epoch_and_row_alone():
    how = Augment.of("flip,crop=2,jitter,erase")
    whole = how(X, ROWS, (3, 1))
    order = RNG.permutation(40)
    parts = [how(X[rows], rows, (3, 1)) for rows in np.split(order, [1, 6, 20])]
    np.testing.assert_array_equal(np.concatenate(parts), whole[order])
    for other in ((3, 2), (4, 1)):
        assert not np.array_equal(how(X, ROWS, other), whole)


def model():
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 1, 4, 4] image) => (float[N, 2] y) { f = Flatten (image)  y = MatMul (f, w) }""")
    weight = RNG.standard_normal((16, 2)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return attach(proto, optimizer="sgd", learning_rate=0.1)


MODEL = model()
DATA = {"image": X[:, :1, :4, :4], "labels": RNG.integers(0, 2, 40)}


class Seen(Callback):
    def __init__(self):
        self.losses = []

    def step(self, run, loss):
        self.losses.append(loss)


def fit(*callbacks, augment="flip,crop=1,jitter,erase", data=DATA, **options):
    trainer = Trainer(MODEL, options=Options(threads=1))
    trainer.fit(data, epochs=3, batch_size=16, validation=DATA, callbacks=callbacks, augment=augment, **options)
    return trainer


def test_training_goes_on_with_the_same_variants(tmp_path):
    whole = fit()
    for at in (2, 4):
        with pytest.raises(Interrupted):
            fit(At(at, interrupt), checkpoint=tmp_path / str(at))
        assert bits(fit(checkpoint=tmp_path / str(at), resume=True).state()) == bits(whole.state())
    with pytest.raises(BadInput, match="was written with augmentation flip"):
        fit(checkpoint=tmp_path / "4", resume=True, augment="flip")
    rows = [{"image": x, "labels": t} for x, t in zip(DATA["image"], DATA["labels"])]  # read as they are needed
    assert bits(fit(data=rows).state()) == bits(whole.state())
    assert bits(fit(augment=Augment(0.5, 0, 1, 0.2, 0.5)).state()) == bits(whole.state())


def test_validation_data_stay_as_they_are():
    seen = Seen()
    trainer = Trainer(MODEL, options=Options(threads=1))
    trainer.fit(
        DATA, epochs=1, batch_size=40, validation=DATA, augment="jitter=0.9", callbacks=[seen], schedule=lambda _: 0.0
    )
    still = Trainer(MODEL, options=Options(threads=1)).evaluate(DATA)["loss"]
    assert trainer.history.epochs[0]["validation_loss"] == pytest.approx(still)
    assert abs(seen.losses[0] - still) > 1e-3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flp", "no augmentation named 'flp'; did you mean 'flip'"),
        ("crop=two", "crop takes a number, as in crop=4"),
        ("crop=1.5", "crop is a number of pixels, not 1.5"),
        ("flip=2", "flip lies between 0 and 1, not at 2"),
        ("flip,flip=1", "names 'flip' twice"),
    ],
)
def test_what_cannot_be_is_refused(how, words):
    with pytest.raises(BadInput, match=words):
        Augment.of(how)


def test_what_are_no_pictures_is_refused():
    flat = Data({"x": np.zeros((4, 9), np.float32)}, [Field("x", np.dtype(np.float32), (9,))])
    with pytest.raises(BadInput, match=r"augmentation is of pictures.*feeds 'x' \(float32\[N, 9\]\)"):
        flat.augmented(Augment(flip=1))
    fields = [Field("x", np.dtype(np.float32), (1, 4, 4)), Field("t", np.dtype(np.int64), (5, 4), label=True)]
    masks = Data({"x": np.zeros((4, 1, 4, 4), np.float32), "t": np.zeros((4, 5, 4), int)}, fields)
    with pytest.raises(BadInput, match="would have to move with the pictures"):
        masks.augmented(Augment(flip=1))
    assert masks.augmented(Augment(jitter=0.1)).pictures == ["x"]
