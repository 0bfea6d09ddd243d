"""Nodes of a file that call kernels as nobody here would: an error or numbers, at once, and no memory of others.

``python -m tests.runtime.kernels.sanitized`` sees the accesses; by themselves these tests see crashes and hangs.
"""

import functools
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels.libraries import SOURCES
from onnxgrad.runtime.kernels.programs import CODES, KINDS
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

TYPES = {"f": TensorProto.FLOAT, "d": TensorProto.DOUBLE, "i": TensorProto.INT32, "l": TensorProto.INT64,
         "u": TensorProto.UINT32, "b": TensorProto.BOOL}  # fmt: skip
_ENTRY = re.compile(r'\{(?:\.name = )?"(\w+)", (?:\.inputs = )?"(\w+)\*?", (?:\.outputs = )?"(\w+)"')
#: Every kernel of the library: the letters of its operands and of its results.
KERNELS = {
    name: (inputs, outputs)
    for file in sorted(SOURCES.glob("*.c"))
    for name, inputs, outputs in _ENTRY.findall(file.read_text())
}
ATTRIBUTES = {
    "ConvWeightGrad": ("group", "kernel", "strides", "dilations", "pads"),
    "Conv3x3": ("group", "kernel", "strides", "dilations", "pads", "size", "turned"),
    "Depthwise": ("group", "kernel", "strides", "dilations", "pads", "size", "turned"),
    "MaxPoolGrad": ("kernel", "strides", "dilations", "pads", "relu"),
    "Product": ("left", "right", "relu"),
    "BatchNorm": ("epsilon",),
    "BatchNormGrad": ("epsilon",),
    "Elementwise": ("values", "steps"),
    "ElementwiseDouble": ("values", "steps"),
    "Recurrence": ("values", "steps"),
    "LayerNormGrad": ("axis",),
    "GroupNorm": ("groups", "epsilon"),
    "GroupNormGrad": ("groups", "epsilon"),
    "SoftmaxCrossEntropy": ("ignores", "ignored", "reduction"),
    "Attention": ("divides", "guarded", "order"),
    "AttentionGrad": ("divides", "guarded", "order"),
}
#: Attributes of one integer.
SCALARS = {"turned", "divides", "group", "relu", "groups", "axis", "guarded", "ignores", "ignored", "reduction"}


def called(name, arrays, attributes, outputs=None):
    """The results of a node that calls a kernel with these operands (None for a missing one)."""
    kinds, results = KERNELS[name]
    if kinds.endswith("LFF") and len(arrays) >= len(kinds) - 3:  # picked rows and factors may be left out
        arrays = [*arrays, *[None] * (len(kinds) - len(arrays))]
    names = ["" if a is None else f"i{k}" for k, a in enumerate(arrays)]
    count = len(results) if outputs is None else outputs
    node = helper.make_node(name, names, [f"o{k}" for k in range(count)], domain=DOMAIN, **attributes)
    ends = [
        helper.make_tensor_value_info(n, TYPES[kind.lower()], [None] * a.ndim)
        for n, a, kind in zip(names, arrays, kinds)
        if a is not None
    ]
    given = [helper.make_tensor_value_info(f"o{k}", TYPES[results[k].lower()], None) for k in range(count)]
    graph = helper.make_graph([node], "forged", ends, given)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return loaded(model.SerializeToString()).run(None, {n: a for n, a in zip(names, arrays) if a is not None})


@functools.lru_cache(maxsize=8)
def loaded(model: bytes) -> onnxruntime.InferenceSession:
    """Forged operands of the same ranks meet one session, which goes on after it has refused some."""
    options = Options(threads=2, arena=False, spinning=False, target="native").native()
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def refused(name, arrays, attributes=(), outputs=None, match=None):
    with pytest.raises(Exception, match=match) as error:
        called(name, arrays, dict(attributes), outputs)
    assert type(error.value).__module__.startswith("onnxruntime")


def array(*shape, kind="f", fill=1):
    return np.full(shape, fill, helper.tensor_dtype_to_np_dtype(TYPES[kind.lower()]))


def test_every_kernel_is_known():
    assert len(KERNELS) == 32
    assert set(ATTRIBUTES) < set(KERNELS)


OPTIMIZERS = [name for name in KERNELS if name not in ATTRIBUTES and not re.search("Grad|RunningSum|After", name)]
CONSTANTS = {"Sgd": 1, "Momentum": 3, "Adam": 7, "NAdam": 6, "Adagrad": 2, "Lion": 5}


def operands(name, size=100):
    """Sound operands of an optimizer."""
    letters = KERNELS[name][0].removesuffix("LFF")
    tensors = len(letters) - 1 - sum(c.isupper() for c in letters)
    scalars = len(letters) - 1 - tensors
    kind = letters[0]
    length = CONSTANTS.get(name, 5)
    return [array(size, kind=kind)] * tensors + [array(kind=kind)] * scalars + [array(length, kind=kind)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """Each operand too short, too long and empty; results that nobody reads."""
    sound = operands(name)
    assert all(np.isfinite(o).all() for o in called(name, sound, {}))
    kind, last = KERNELS[name][0][0], len(sound) - 1
    for at, operand in enumerate(sound):
        for shape in {(1,), (0,), (3,), (99,), (101,), (2, 50, 2)} - {operand.shape, (1,) if not operand.ndim else ()}:
            if at == last and shape[0] == sound[last].size:
                continue
            refused(name, [*sound[:at], array(*shape, kind=kind), *sound[at + 1 :]], match="size|scalar|constants")
    refused(name, [*sound[:last], array(1, kind=kind)] if name[:3] != "Sgd" else sound[:last])
    refused(name, sound[:-1])
    if len(KERNELS[name][1]) > 1:
        refused(name, sound, outputs=1)


def test_length_of_the_constants_of_adam():
    """Read beyond their end once."""
    refused("Adam", [array(100)] * 4 + [array()] + [None] * 3 + [array(1)], match="constants")
    refused("Lion", [array(100)] * 3 + [array()] + [None] * 2 + [array(1)], match="constants")


def test_factors_of_a_gradient():
    adam = [array(6, 2), array(0), array(6, 2), array(6, 2), array(), None, None, None, array(7), None]
    for k in (0, 1, 5):
        assert called("Adam", [*adam, array(k, 6), array(k, 2)], {})[0].shape == (6, 2)
    for a, b in (((5, 6), (4, 2)), ((5, 7), (5, 2)), ((5, 6), (5, 3)), ((5,), (5, 2)), ((5, 6), None), (None, (5, 2))):
        factors = [None if shape is None else array(*shape) for shape in (a, b)]
        refused("Adam", [*adam, *factors], match="factors of a gradient")
    refused("Adam", [*adam[:1], array(5), *adam[2:], array(5, 6), array(5, 2)], match="a gradient has not the size")
    refused("Adam", adam, match="a gradient has not the size")
    picked = [*adam[:-1], array(3, kind="l", fill=2), array(5, 6), array(5, 2)]
    refused("Adam", [picked[0], array(3, 2), *picked[2:]], match="factors of a gradient")
    vector = [array(6) if a is not None and a.shape == (6, 2) else a for a in adam]
    refused("Adam", [*vector, array(5, 6), array(5, 1)], match="factors of a gradient")


def test_running_sums():
    """Nothing is written to but what `RunningSum` has made, whose place nobody knows beforehand."""
    total, place = called("RunningSum", [np.array([3, 5])], {})
    assert total.shape == (3, 5)
    assert not total.any()
    assert place.any()
    for at in (*(array(1, kind="l", fill=f) for f in (0, 1, -8)), array(0, kind="l"), array(2, kind="l")):
        refused("RunningSumAdd", [array(3, 5), at, array(3, 5)], match="none, or another")
        refused("RunningSumEnd", [array(3, 5), at], match="none, or another")
        how = {"left": 1, "right": 0, "relu": 0}
        refused("RunningSumProduct", [array(7, 3), array(7, 5), None, array(3, 5), at], how, match="none, or another")
        refused("RunningSumProduct", [array(7, 3), array(7, 4), None, array(3, 5), at], how, match="something else")
    assert called("RunningSum", [np.array([0, 3])], {})[0].shape == (0, 3)
    for sizes in ([-1], [1 << 39], [1 << 32, 1 << 32], [1] * 65, 7, [[2, 3]]):
        refused("RunningSum", [np.array(sizes, np.int64)], match="no sizes|more numbers")
    text = """<ir_version: 10, opset_import: ["": 18, "onnxgrad.native": 1]> g (float[n, 5] x) => (float[n, 5] y) {
        sizes = Constant <value_ints = [3, 5]> ()
        sum, place = onnxgrad.native.RunningSum (sizes)
        next = onnxgrad.native.RunningSumAdd (sum, place, x)
        y = onnxgrad.native.RunningSumEnd (sum, next) }"""
    session = loaded(onnx.parser.parse_model(text).SerializeToString())
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, {"x": array(3, 5)})[0], 1.0)
    with pytest.raises(Exception, match="another shape"):
        session.run(None, {"x": array(2, 5)})


def test_products():
    how = {"left": 1, "right": 0, "relu": 0}
    assert called("Product", [array(500, 7), array(500, 40), None], how)[0].max() == 500
    both = called("Product", [array(500, 7), array(41, 500), array(41)], {"left": 1, "right": 9, "relu": 9})[0]
    assert (both == 501).all()
    for x, g in (((5, 7), (4, 7)), ((5,), (5, 7)), ((5, 7), (5,)), ((5, 7), (5, 7, 1)), ((), ())):
        refused("Product", [array(*x), array(*g), None], how, match="belong together|no matrices")
    huge = np.zeros((0, 1 << 20), np.float32)
    refused("Product", [huge, huge, None], how, match="more numbers")
    assert not called("Product", [array(0, 7), array(0, 40), None], how)[0].any()


def test_sizes_of_layers():
    how = {"left": 0, "right": 0, "relu": 0}
    assert called("Product", [array(500, 7), array(7, 40), None], how)[0].max() == 7
    assert called("Product", [array(5, 3, 7), array(40, 7), array(40)], how | {"right": 9, "relu": 9})[0].shape == (
        5,
        3,
        40,
    )
    wrong = [((8, 40), None), ((40, 7), None), ((7,), None), ((2, 7, 40), None), ((7, 40), (39,)), ((7, 40), (1, 40))]
    for x, w, bias in (*(((500, 7), *others) for others in wrong), ((7,), (7, 40), None), ((500, 0), (0, 40), None)):
        refused(
            "Product",
            [array(*x), array(*w), None if bias is None else array(*bias)],
            how,
            match="belong together|no matrices",
        )
    assert not called("Product", [array(0, 7), array(7, 40), None], how)[0].size
    assert not called("Product", [array(7, 7), array(7, 0), None], how)[0].size


EMPTY = np.zeros((0, 1 << 30, 1 << 30), np.float32)
ONES = {"kernel": [1, 1], "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0]}
WEIGHTS = {"group": 1, **{name: [*numbers, numbers[0]] for name, numbers in ONES.items()}}
POOL = {"relu": 0, **ONES}
FAR = (1 << 24) - 1
ORDERED = {"divides": 0, "guarded": 0, "order": [0, 1, 2, 3] * 4}
NINE = {**WEIGHTS, "kernel": [1, 3, 3], "size": [1, 1, 1], "turned": 0}
LOSS = {"ignores": 0, "ignored": 0, "reduction": 2}


def image(*shape):
    return array(*(shape or (1, 1, 1, 1)))


def grouped(groups):
    return {"groups": groups, "epsilon": 0.0}


def value(kind, place=0, width=1, flag=0):
    """Four numbers of a program."""
    return [KINDS.index(kind) if isinstance(kind, str) else kind, width, place, flag]


def step(code, *at, width=1, first=(0, 0, 0, 0)):
    """Ten numbers of a program."""
    code = CODES.index(code) if isinstance(code, str) else code
    return [code, width, *at, *[-1] * (4 - len(at)), *first]


X, Y, OUT, SECOND = value("FIXED", 0), value("FIXED", 1), value("RESULT", 0), value("RESULT", 1)
R, ONE, BOOL = value("REGISTER"), value("CONSTANT", 0x3F800000), value("RESULT", 14)


def program(values, *steps):
    return {"values": [n for v in values for n in v], "steps": [n for each in steps for n in each]}


SUM = program([X, Y, OUT], step("ADD", 2, 0, 1))

#: Kernel, operands, attributes: refused.
REFUSED = {
    "a kernel of 2^24": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, 1 << 24, 1]}),
    "a kernel of nearly 2^24": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, 1, FAR]}),
    "a kernel of 2^48": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, FAR, FAR]}),
    "two numbers for three": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "pads": [0, 0]}),
    "four numbers for three": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "pads": [0, 0, 0, 0]}),
    "no groups": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "group": 0}),
    "groups below zero": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "group": -1}),
    "more groups than channels": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "group": 1 << 62}),
    "no stride": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "strides": [1, 0, 1]}),
    "a dilation below zero": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "dilations": [1, 1, -1]}),
    "padding of 2^63": ("ConvWeightGrad", [image(), image()], {**WEIGHTS, "pads": [0, -(1 << 63), (1 << 63) - 1]}),
    "taps that reach far": (
        "ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, 1 << 20, 1], "dilations": [1, FAR, 1]},
    ),
    "no attributes": ("ConvWeightGrad", [image(), image()], {}),
    "a rank of three": ("ConvWeightGrad", [image(1, 1, 1), image()], WEIGHTS),
    "a rank of three for the other": ("ConvWeightGrad", [image(), image(1, 1, 1)], WEIGHTS),
    "two rows of one": ("ConvWeightGrad", [image(1, 1, 1)] * 2, {**WEIGHTS, "kernel": [1, 2, 1]}),
    "padding around one row": ("ConvWeightGrad", [image(1, 1, 1)] * 2, {**WEIGHTS, "pads": [0, 1, 0]}),
    "a rank of two": ("ConvWeightGrad", [image(1, 1)] * 2, WEIGHTS),
    "other images": ("ConvWeightGrad", [image(2, 1, 1, 1), image()], WEIGHTS),
    "an empty tensor of 2^60": ("ConvWeightGrad", [EMPTY[None], image(0, 1, 1, 1)], WEIGHTS),
    "a depth of pictures": ("ConvWeightGrad", [image()] * 2, {**WEIGHTS, "kernel": [2, 1, 1]}),
    "taps that multiply": ("ConvWeightGrad", [image(1, 1, 1, 1, 1)] * 2, {**WEIGHTS, "kernel": [1 << 9] * 3}),
    "3×3: a kernel of 2×3": ("Conv3x3", [image(), image(1, 1, 2, 3)], NINE),
    "3×3: taps of 2×3": ("Conv3x3", [image(1, 1, 2, 3), image(1, 1, 2, 3)], {**NINE, "kernel": [1, 2, 3]}),
    "3×3: other channels": ("Conv3x3", [image(1, 2, 3, 3), image(1, 1, 3, 3)], NINE),
    "3×3: other channels, turned": (
        "Conv3x3", [image(1, 2, 3, 3), image(1, 2, 3, 3)], {**NINE, "size": [1, 5, 5], "turned": 1},
    ),
    "3×3: no channels": ("Conv3x3", [image(1, 0, 3, 3), image(1, 0, 3, 3)], NINE),
    "3×3: more than padding gives": ("Conv3x3", [image(1, 1, 2, 9), image(1, 1, 3, 3)], {**NINE, "size": [1, 3, 7]}),
    "3×3: rows of nothing": (
        "Conv3x3", [image(1, 1, 1 << 37, 0), image(1, 1, 3, 3)], {**NINE, "pads": [0, 2, 2], "size": [1, 1, 2]},
    ),
    "3×3: a size below zero": ("Conv3x3", [image(1, 1, 3, 3), image(1, 1, 3, 3)], {**NINE, "size": [1, -1, 1]}),
    "3×3: padding below zero": (
        "Conv3x3", [image(1, 1, 9, 9), image(1, 1, 3, 3)], {**NINE, "pads": [0, -1, 0], "size": [1, 6, 7]},
    ),
    "3×3: padding of 2^62": ("Conv3x3", [image(1, 1, 9, 9), image(1, 1, 3, 3)], {**NINE, "pads": [0, 0, 1 << 62]}),
    "3×3: a stride": (
        "Conv3x3", [image(1, 1, 5, 5), image(1, 1, 3, 3)], {**NINE, "strides": [1, 2, 1], "size": [1, 2, 3]},
    ),
    "3×3: groups": ("Conv3x3", [image(1, 2, 3, 3), image(2, 1, 3, 3)], {**NINE, "group": 2}),
    "3×3: a bias too long": ("Conv3x3", [image(1, 1, 3, 3), image(1, 1, 3, 3), array(2)], NINE),
    "3×3: a rank of three": ("Conv3x3", [image(1, 3, 3), image(1, 1, 3, 3)], NINE),
    "3×3: two paddings": ("Conv3x3", [image(1, 1, 9, 9), image(1, 1, 3, 3)], {**NINE, "pads": [0] * 2}),
    "3×3: depth that is not there": (
        "Conv3x3", [image(1, 1, 9, 9), image(1, 1, 3, 3)], {**NINE, "kernel": [3] * 3, "size": [1, 7, 7]},
    ),
    "3×3: eight taps in depth": (
        "Conv3x3", [image(1, 1, 9, 9, 9), image(1, 1, 8, 3, 3)], {**NINE, "kernel": [8, 3, 3], "size": [2, 7, 7]},
    ),
    "3×3: no tap in depth": (
        "Conv3x3", [image(1, 1, 9, 9, 9), image(1, 1, 0, 3, 3)], {**NINE, "kernel": [0, 3, 3], "size": [10, 7, 7]},
    ),
    "3×3: more pictures than padding gives": (
        "Conv3x3", [image(1, 1, 2, 9, 9), image(1, 1, 3, 3, 3)], {**NINE, "kernel": [3] * 3, "size": [4, 7, 7]},
    ),
    "3×3: more padding than taps in depth": (
        "Conv3x3", [image(1, 1, 9, 9, 9), image(1, 1, 3, 3, 3)],
        {**NINE, "kernel": [3] * 3, "pads": [3, 0, 0], "size": [10, 7, 7]},
    ),
    "3×3: no pictures in depth": (
        "Conv3x3", [image(1, 1, 0, 9, 9), image(1, 1, 3, 3, 3)],
        {**NINE, "kernel": [3] * 3, "pads": [2] * 3, "size": [2, 11, 11]},
    ),
    "depthwise: groups of two": ("Depthwise", [image(1, 4, 3, 3), image(4, 2, 3, 3)], {**NINE, "group": 2}),
    "depthwise: two of each": ("Depthwise", [image(1, 2, 3, 3), image(4, 1, 3, 3)], {**NINE, "group": 2}),
    "depthwise: no groups": ("Depthwise", [image(1, 2, 3, 3), image(2, 1, 3, 3)], {**NINE, "group": 0}),
    "depthwise: groups of 2^62": (
        "Depthwise", [image(1, 2, 3, 3), image(2, 4, 3, 3)], {**NINE, "group": 1 << 62, "turned": 1},
    ),
    "depthwise: in depth": ("Depthwise", [image(1, 2, 2, 3, 3), image(2, 1, 1, 3, 3)], {**NINE, "group": 2}),
    "depthwise: far taps": (
        "Depthwise", [image(1, 2, 3, 3), image(2, 1, 3, 3)], {**NINE, "group": 2, "dilations": [1, 1 << 20, 1 << 20]},
    ),
    "depthwise: a size below zero": (
        "Depthwise", [image(1, 2, 3, 3), image(2, 1, 3, 3)], {**NINE, "group": 2, "size": [1, 1, -1]},
    ),
    "depthwise: a bias too short": (
        "Depthwise", [image(1, 2, 3, 3), image(2, 1, 3, 3), array(1)], {**NINE, "group": 2},
    ),
    "pool: no window": ("MaxPoolGrad", [image(), image()], {**POOL, "kernel": [0, 1]}),
    "pool: other channels": ("MaxPoolGrad", [image(1, 2, 1, 1), image()], POOL),
    "pool: a rank of five": ("MaxPoolGrad", [image(1, 1, 1, 1, 1), image()], POOL),
    "pool: far": ("MaxPoolGrad", [image(), image()], {**POOL, "strides": [1 << 40, 1]}),
    "rows: more than there are": ("GatherGrad", [array(5, 2), array(3, 2), None, array(4, kind="l")], {}),
    "rows: an index beyond": ("GatherGrad", [array(5, 2), array(1, 2), None, array(1, kind="l", fill=5)], {}),
    "rows: an index far below": (
        "GatherGrad", [array(5, 2), array(1, 2), None, array(1, kind="l", fill=-(1 << 63))], {},
    ),
    "rows: a source beyond": (
        "GatherGrad", [array(5, 2), array(2, 2), None, array(3, kind="l"), array(3, kind="l", fill=2)], {},
    ),
    "rows: two indices": (
        "GatherGrad", [array(5, 2), array(2, 2), None, array(3, kind="l"), array(2, kind="l")], {},
    ),
    "rows: of a scalar": ("GatherGrad", [array(), array(1), None, array(1, kind="l")], {}),
    "rows: 2^68 numbers": (
        "GatherGrad", [np.zeros((0, 1 << 29, 1 << 29), np.float32), array(16), None, array(1 << 10, kind="l")], {},
    ),
    "norm: a scale too short": ("BatchNorm", [array(2, 3, 4), array(2), array(2)], {"epsilon": 0.0}),
    "norm: another bias": ("BatchNorm", [array(2, 3, 4), array(3), array(2)], {"epsilon": 0.0}),
    "norm: a vector": ("BatchNorm", [array(3), array(3), array(3)], {"epsilon": 0.0}),
    "norm: a mean too short": (
        "BatchNormGrad", [array(2, 3, 4), array(2, 3, 4), array(2), array(3), array(3)], {"epsilon": 0.0},
    ),
    "norm: a mask of another shape": (
        "BatchNormGrad", [array(2, 3, 4), array(2, 3, 4), None, None, array(3), array(2, 4, 3)], {"epsilon": 0.0},
    ),
    "norm: another cotangent": (
        "BatchNormGrad", [array(2, 3, 5), array(2, 3, 4), None, None, array(3)], {"epsilon": 0.0},
    ),
    "layer: an axis beyond": ("LayerNormGrad", [array(2, 3)] * 2 + [array(2, 1)] * 2 + [array(3)], {"axis": 2}),
    "layer: an axis below zero": ("LayerNormGrad", [array(2, 3)] * 2 + [array(2, 1)] * 2 + [array(3)], {"axis": -1}),
    "layer: a scale too short": ("LayerNormGrad", [array(2, 3)] * 2 + [array(2, 1)] * 2 + [array(2)], {"axis": 1}),
    "layer: one mean": ("LayerNormGrad", [array(2, 3)] * 2 + [array(1, 1), array(2, 1), array(3)], {"axis": 1}),
    "layer: another cotangent": (
        "LayerNormGrad", [array(3, 2), array(2, 3)] + [array(2, 1)] * 2 + [array(3)], {"axis": 1},
    ),
    "group: they leave a rest": ("GroupNorm", [array(2, 3, 4), array(3), array(3)], grouped(2)),
    "group: more than channels": ("GroupNorm", [array(2, 3, 4), array(3), array(3)], grouped(6)),
    "group: below zero": ("GroupNorm", [array(2, 3, 4), array(3), array(3)], grouped(-1)),
    "group: another bias": ("GroupNorm", [array(2, 4, 4), array(4), array(2)], grouped(2)),
    "group: another scale": ("GroupNormGrad", [array(2, 4, 4)] * 2 + [array(3)], {"groups": 2, "epsilon": 0.0}),
    "group: a vector": ("GroupNormGrad", [array(4)] * 2 + [array(4)], {"groups": 2, "epsilon": 0.0}),
    "attention: other columns": (
        "Attention", [image(1, 2, 3, 4), image(1, 2, 3, 5), image(1, 2, 3, 4)], ORDERED,
    ),
    "attention: other heads": ("Attention", [image(1, 2, 3, 4), image(1, 1, 3, 4), image(1, 2, 3, 4)], ORDERED),
    "attention: other keys": ("Attention", [image(1, 2, 3, 4), image(1, 2, 3, 4), image(1, 2, 5, 4)], ORDERED),
    "attention: an axis twice": (
        "Attention", [image(1, 2, 3, 4)] * 3, {**ORDERED, "order": [0, 1, 2, 2, *[0, 1, 2, 3] * 3]},
    ),
    "attention: an axis beyond": (
        "Attention", [image(1, 2, 3, 4)] * 3, {**ORDERED, "order": [*[0, 1, 2, 3] * 3, 0, 1, 2, 4]},
    ),
    "attention: too few axes": ("Attention", [image(1, 2, 3, 4)] * 3, {**ORDERED, "order": [0, 1, 2, 3] * 3}),
    "attention: heads of rank three": ("Attention", [image(2, 3, 4)] * 3, {**ORDERED, "order": [1, 0, 2, 3] * 4}),
    "attention: matrices": ("Attention", [image(3, 4)] * 3, ORDERED),
    "attention: two scales": ("Attention", [*[image(1, 2, 3, 4)] * 3, array(2)], ORDERED),
    "attention: another mask": ("Attention", [*[image(1, 2, 3, 4)] * 3, None, array(2, 3)], ORDERED),
    "attention: a mask of rank five": ("Attention", [*[image(1, 2, 3, 4)] * 3, None, array(1, 1, 1, 1, 1)], ORDERED),
    "attention: another cotangent": (
        "AttentionGrad", [image(1, 2, 4, 4), *[image(1, 2, 3, 4)] * 3], {**ORDERED, "order": [0, 1, 2, 3] * 7},
    ),
    "attention: a cotangent with the heads elsewhere": (
        "AttentionGrad", [image(1, 2, 3, 4)] * 4,
        {**ORDERED, "order": [*[0, 1, 2, 3] * 3, 0, 2, 1, 3, *[0, 1, 2, 3] * 3]},
    ),
    "attention: 2^39 numbers": (
        "Attention",
        [np.zeros((1, 1, 1 << 37, 0), np.float32), np.zeros((1, 1, 1, 0), np.float32), image(1, 1, 1, 4)], ORDERED,
    ),
    "loss: other rows": ("SoftmaxCrossEntropy", [array(2, 3), array(3, kind="l"), None, array()], LOSS),
    "loss: labels of a matrix": ("SoftmaxCrossEntropy", [array(2, 3), array(2, 1, kind="l"), None, array()], LOSS),
    "loss: a vector of scores": ("SoftmaxCrossEntropy", [array(2), array(kind="l"), None, array()], LOSS),
    "loss: weights too short": ("SoftmaxCrossEntropy", [array(2, 3), array(2, kind="l"), array(2), array()], LOSS),
    "loss: shares of a mean": ("SoftmaxCrossEntropy", [array(2, 3), array(2, kind="l"), None, array(2)], LOSS),
    "loss: another reduction": (
        "SoftmaxCrossEntropy", [array(2, 3), array(2, kind="l"), None, array()], {**LOSS, "reduction": 3},
    ),
    "loss: a label beyond": ("SoftmaxCrossEntropy", [array(2, 3), array(2, kind="l", fill=3), None, array()], LOSS),
    "loss: a label below zero": (
        "SoftmaxCrossEntropy", [array(2, 3), array(2, kind="l", fill=-1), None, array()], {**LOSS, "ignored": -1},
    ),
    "loss: of no classes": ("SoftmaxCrossEntropy", [array(2, 0), array(2, kind="l"), None, array()], LOSS),
    **{f"program: {what}": ("Elementwise", [array(5), array(5)], given) for what, given in {
        "cut off": {**SUM, "steps": SUM["steps"][:9]}, "values that are cut off": {**SUM, "values": SUM["values"][:-1]},
        "too long": program([X, R], *[step("NEG", 1, 0)] * 2049),
        "too many values": program([X, OUT] + [X] * 511, step("NEG", 1, 0)),
        "stores nothing": program([X, R], step("NEG", 1, 0)), "is empty": {"values": X, "steps": step("NEG", 0, 0)},
        "an unknown operation": program([X, OUT], step(len(CODES), 1, 0)),
        "an operation below zero": program([X, OUT], step(-1, 1, 0)),
        "an operation beyond 2^32": program([X, OUT], step(1 << 32, 1, 0)),
        "an unknown kind": program([X, OUT, value(len(KINDS))], step("NEG", 1, 0)),
        "a kind below zero": program([X, OUT, value(-1)], step("NEG", 1, 0)),
        "a kind beyond 2^32": program([X, OUT, value(1 << 32)], step("NEG", 1, 0)),
        "an empty register": program([X, OUT, R], step("ADD", 1, 0, 2)),
        "a register beyond": program([X, OUT, value("REGISTER", 1 << 16)], step("NEG", 2, 0), step("NEG", 1, 2)),
        "a register below zero": program([X, OUT, value("REGISTER", -1)], step("NEG", 2, 0), step("NEG", 1, 2)),
        "a source beyond": program([X, OUT], step("NEG", 1, 2)),
        "a source far beyond": program([X, OUT], step("NEG", 1, 1 << 40)),
        "a source below zero": program([X, OUT], step("NEG", 1, -1)),
        "a target beyond": program([X, OUT], step("NEG", 2, 0)),
        "a target below zero": program([X, OUT], step("NEG", -1, 0)),
        "an operand beyond": program([value("FIXED", 28), OUT], step("NEG", 1, 0)),
        "an operand below zero": program([value("FIXED", -1), OUT], step("NEG", 1, 0)),
        "an operand that is left out": program([value("FIXED", 2), OUT], step("NEG", 1, 0)),
        "a bool that is left out": program([value("FIXED", 24), OUT], step("NEG", 1, 0)),
        "a result beyond": program([X, value("RESULT", 16)], step("NEG", 1, 0)),
        "a result twice": program([X, OUT, OUT], step("NEG", 1, 0), step("NEG", 2, 0)),
        "a result that is written twice": program([X, OUT], step("NEG", 1, 0), step("NEG", 1, 0)),
        "a result that is not written": program([X, OUT, SECOND], step("NEG", 1, 0)),
        "an operand that is written": program([X, Y, OUT], step("NEG", 1, 0), step("NEG", 2, 1)),
        "a constant that is written": program([X, ONE, OUT], step("NEG", 1, 0), step("NEG", 2, 1)),
        "rows of two numbers": program([value("FIXED", 0, 2), value("RESULT", 0, 2)], step("NEG", 1, 0, width=2)),
        "rows of none": program([value("FIXED", 0, 0), OUT], step("NEG", 1, 0)),
        "the second column of one": program([X, OUT], step("NEG", 1, 0, first=(0, 1, 0, 0))),
        "a step of no columns": program([X, OUT], step("NEG", 1, 0, width=0)),
        "a state": program([X, value("STATE")], step("NEG", 1, 0)),
        "slices": program([value("SCANNED"), OUT], step("NEG", 1, 0)),
        "a product": program([X, value("MATRIX", 1), OUT], step("PRODUCT", 2, 0, -1, 1, first=(0, 0, 0, 1))),
        "a sum over unknown axes": program([X, OUT], step("SUM", 1, 0, 256, 0)),
        "a sum over axes below none": program([X, OUT], step("SUM", 1, 0, -1, 0)),
        "a sum over more axes than there are": program([X, OUT], step("SUM", 1, 0, 2, 0)),
        "a sum of which nothing known becomes": program([X, OUT], step("SUM", 1, 0, 1, 3)),
        "a sum of bools": program([X, BOOL], step("SUM", 1, 0, 1, 0)),
        "a sum in a register": program([X, R, OUT], step("SUM", 1, 0, 1, 0), step("NEG", 2, 1)),
        "a sum that is read": program([X, OUT, SECOND], step("SUM", 1, 0, 1, 0), step("NEG", 2, 1)),
        "a sum of nothing": program([R, OUT], step("SUM", 1, 0, 1, 0)),
        "a constant of 64 bits": program([value("CONSTANT", 1 << 40), OUT], step("COPY", 1, 0)),
        "numbers of 2^63": {**SUM, "steps": [(1 << 63) - 1] * 10},
        "values of -2^63": {**SUM, "values": [-(1 << 63)] * 12},
    }.items()},
    **{f"rows: {what}": ("Recurrence", [array(3, 1), array(5, 3, 1)], given) for what, given in {
        "an operation on constants": program([value("STATE"), value("SCANNED", 1), ONE], step("NEG", 0, 2)),
        "a sum": program([value("STATE"), value("SCANNED", 1), OUT], step("COPY", 0, 1), step("SUM", 2, 1, 0, 0)),
        "a state that is a result": program([value("STATE"), value("SCANNED", 1), OUT], step("COPY", 0, 1)),
        "a state that is not renewed": program([value("STATE"), value("SCANNED", 1), R], step("COPY", 2, 1)),
    }.items()},
    "program: shapes that do not broadcast": ("Elementwise", [array(5), array(4)], SUM),
    "program: nine axes": ("Elementwise", [array(*[1] * 9), array(5)], SUM),
    "program: a result of 2^60": (
        "Elementwise", [np.ones((1 << 20, 1, 1), np.float32), np.ones((1, 1 << 20, 1), np.float32),
                        np.ones(1 << 20, np.float32)],
        program([X, Y, value("FIXED", 2), R, OUT], step("ADD", 3, 0, 1), step("ADD", 4, 3, 2)),
    ),
    "program: none": ("Elementwise", [array(5)], {}),
    "program: text": ("Elementwise", [array(5)], {"values": "text", "steps": "text"}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together(case):
    refused(*REFUSED[case])


#: The same: odd, and sound. Each took minutes or memory without end before sizes were looked at.
ODD = {
    "taps that meet nothing": (
        "ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, 1 << 10, 1 << 10]},
        [((1, 1, 1 << 10, 1 << 10), 1)],
    ),
    "a long stride": (
        "ConvWeightGrad", [image(), image(1, 1, 1, 2)],
        {**WEIGHTS, "kernel": [1, 1 << 19, 1], "strides": [1, 1 << 23, 1]},
        [((1, 1, 1 << 19, 1), 1)],
    ),
    "taps far away": (
        "ConvWeightGrad", [image(), image()], {**WEIGHTS, "kernel": [1, 2, 2], "dilations": [1, 1 << 23, 1 << 23]},
        [((1, 1, 2, 2), 1)],
    ),
    "padding far away": (
        "ConvWeightGrad", [image(), image(1, 1, 3, 3)], {**WEIGHTS, "pads": [0, FAR, -FAR]}, [((1, 1, 1, 1), 0)],
    ),
    "depthwise: pictures of nothing": (
        "Depthwise", [image(1, 2, 1 << 37, 0), image(2, 1, 3, 3), array(2)], {**NINE, "group": 2, "size": [1, 3, 5]},
        [((1, 2, 3, 5), 30)],
    ),
    "depthwise: a long stride, turned": (
        "Depthwise", [image(1, 2, 2, 2), image(2, 1, 1, 1)],
        {**NINE, "group": 2, "kernel": [1] * 3, "strides": [1, FAR, FAR], "size": [1, 9, 9], "turned": 1},
        [((1, 2, 9, 9), 2)],
    ),
    "depthwise: padding far away": (
        "Depthwise", [image(1, 2, 3, 3), image(2, 1, 3, 3)],
        {**NINE, "group": 2, "pads": [0, FAR, -FAR], "size": [1, 3, 3]},
        [((1, 2, 3, 3), 0)],
    ),
    "pool: windows of nothing": (
        "MaxPoolGrad", [np.zeros((1, 1, 1 << 37, 0), np.float32), image()], POOL, [((1, 1, 1, 1), 0)],
    ),
    "pool: far windows": (
        "MaxPoolGrad", [image(), image(1, 1, 3, 3)],
        {**POOL, "kernel": [FAR] * 2, "dilations": [FAR] * 2, "pads": [FAR] * 2}, [((1, 1, 3, 3), 1)],
    ),
    "norm: images of nothing": (
        "BatchNormGrad", [np.zeros((1 << 37, 1, 0), np.float32)] * 2 + [None, None, array(1)], {"epsilon": 0.0},
        [((1 << 37, 1, 0), 0), ((1,), None), ((1,), 0)],
    ),
    "layer: rows of nothing": (
        "LayerNormGrad", [np.zeros((1 << 37, 0), np.float32)] * 2 + [array(1), array(1), array(0)], {"axis": 0},
        [((1 << 37, 0), 0), ((0,), 0), ((0,), 0)],
    ),
    "group: images of nothing": (
        "GroupNormGrad", [np.zeros((1 << 37, 2, 0), np.float32)] * 2 + [array(2)], {"groups": 1, "epsilon": 0.0},
        [((1 << 37, 2, 0), 0), ((2,), 0), ((2,), 0)],
    ),
    "attention: of no columns": (
        "Attention", [image(1, 2, 3, 0), image(1, 2, 5, 0), image(1, 2, 5, 4)], ORDERED, [((1, 2, 3, 4), 24)],
    ),
    "attention: of no keys": (
        "Attention", [image(1, 2, 3, 4), image(1, 2, 0, 4), image(1, 2, 0, 4)], ORDERED, [((1, 2, 3, 4), 0)],
    ),
    "attention: many heads of nothing": (
        "AttentionGrad", [np.zeros((1 << 18, 1 << 18, 1, 0), np.float32)] * 4, {**ORDERED, "order": [0, 1, 2, 3] * 7},
        [((1 << 18, 1 << 18, 1, 0), 0)] * 3,
    ),
    "loss: of no classes, ignored": (
        "SoftmaxCrossEntropy", [array(2, 0), array(2, kind="l"), None, array()],
        {"ignores": 1, "ignored": 1, "reduction": 0}, [((2,), 0), ((2, 0), 0)],
    ),
    "program: a sum, and results that nothing stores": (
        "Elementwise", [array(2, 3), array(3)], SUM, [((2, 3), 12), *[((0,), 0)] * 15],
    ),
    "program: a constant alone": ("Elementwise", [array(5)], program([ONE, value("RESULT", 7)], step("COPY", 1, 0)), [
        *[((0,), 0)] * 7, ((), 1), *[((0,), 0)] * 8]),
    "program: a mean of one number": ("Elementwise", [array(5), array(1)], program(
        [X, value("CONSTANT", 0x40000000), OUT, SECOND, value("RESULT", 2)], step("SUM", 2, 0, 1, 0),
        step("MEAN", 3, 1, 0, 2), step("SUM", 4, 1, 0, 1)), [((), 5), ((1,), 2), ((), 2), *[((0,), 0)] * 13]),
    "program: one register for all": ("Elementwise", [array(3, 1), array(4000)], program(
        [X, Y, OUT, SECOND, R, value("CONSTANT", 0)], step("NEG", 4, 0), step("COPY", 2, 4), step("COPY", 4, 5),
        step("COPY", 4, 1), step("COPY", 3, 4)), [((3, 1), -3), ((4000,), 4000), *[((0,), 0)] * 14]),
    "program: a result that is read, of another shape": ("Elementwise", [array(3, 1), array(4000)], program(
        [X, Y, OUT, SECOND], step("NEG", 2, 0), step("SUB", 3, 1, 2)),
        [((3, 1), -3), ((3, 4000), 24000), *[((0,), 0)] * 14]),
    "program: nothing in one axis": ("Elementwise", [EMPTY[:, :1, :1], array(3)], SUM, [
        ((0, 1, 3), 0), *[((0,), 0)] * 15]),
    "program: a constant of 64 bits, and tiles of one vector": (
        "ElementwiseDouble", [array(70, 1, kind="d"), array(3, kind="d")], program(
            [X, Y, OUT, SECOND, value("CONSTANT", 1 << 20, 1, 0x3FF00000), *(value("REGISTER", k) for k in range(490))],
            *(step("ADD", 5 + k, 0, 1) for k in range(490)), step("ADD", 2, 494, 4), step("SUM", 3, 494, 3, 0)),
        [((70, 3), 630 + 210 / (1 << 32)), ((), 420), *[((0,), 0)] * 14]),
    "program: bits as a bool and an integer": (
        "Elementwise", [array(5)], program([X, BOOL, value("RESULT", 8)], step("COPY", 1, 0), step("COPY", 2, 0)),
        [*[((0,), 0)] * 8, ((5,), 5 * 0x3F800000), *[((0,), 0)] * 5, ((5,), 0), ((0,), 0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_but_sound(case):
    name, arrays, attributes, expected = ODD[case]
    found = called(name, arrays, attributes)
    assert [o.shape for o in found] == [shape for shape, _ in expected]
    for array, (_, total) in zip(found, expected):
        assert total is None or array.sum() == total


def _random_program(rng, name):
    """Values, and any steps on those that are written already; seldom a number that is wrong."""
    own = [*(value("FIXED", int(rng.choice([0, 1, 16, 24], p=[0.5, 0.4, 0.05, 0.05]))) for _ in range(3)), ONE]
    codes, given = CODES.index("COPY") + 1, 4
    if name == "Recurrence":
        width = int(rng.integers(1, 5))
        own = [
            value("STATE", 0, width),
            value("SCANNED", 1, width, int(rng.integers(2))),
            value("FIXED", 2, width),
            ONE,
        ]
        own += [value("MATRIX", 3, width)]
    registers = [len(own) + k for k in range(3)]
    own += [value("REGISTER", k) for k in range(3)]
    results = [value("RESULT", int(k)) for k in rng.choice(16, 3, replace=False)]
    steps = step("COPY", registers[0], 0)
    readable = [*range(given), registers[0]]
    for _ in range(int(rng.integers(0, 50))):
        at = int(rng.choice(registers))
        steps += step(int(rng.integers(codes)), at, *map(int, rng.choice(readable, 3)))
        readable.append(at)
    for k in range(len(results)):
        steps += step("COPY", len(own) + k, int(rng.choice(readable)))
    if name == "Recurrence":
        steps += step("COPY", 0, 1, width=own[0][1])
    numbers = {"values": [n for v in (*own, *results) for n in v], "steps": steps}
    if rng.random() < 0.3:
        some = numbers[str(rng.choice(["values", "steps"]))]
        some[int(rng.integers(len(some)))] = int(rng.choice([-1, 4, 5, 40, 63, 64, 1 << 20, 1 << 33, -(1 << 63)]))
    return numbers


def _random(rng, name):
    """Operands and attributes that nobody would give, often of sizes that almost fit."""
    letters, results = KERNELS[name]
    sizes = [int(d) for d in rng.choice([0, 1, 1, 2, 3, 5, 8, 17], 5)]
    rank = 4 if name in ATTRIBUTES and rng.random() < 0.9 else int(rng.integers(0, 6))
    whole = sizes[:rank]
    arrays = []
    for letter in letters:
        shape = whole if rng.random() < 0.8 else sizes[: rng.integers(0, 6)]
        if letter.lower() == "l" or (letter.isupper() and rng.random() < 0.5) or rng.random() < 0.1:
            shape = sizes[: rng.integers(0, 2)]
        if name not in ATTRIBUTES and letter in "fd" and len(arrays) == len(letters) - 1 and rng.random() < 0.6:
            shape = [int(rng.integers(0, 9))]
        if shape and rng.random() < 0.1:
            shape = [*shape[:-1], int(rng.integers(0, 9))]
        made = rng.integers(-3, 9, shape) if letter.lower() in "ilu" else rng.standard_normal(shape)
        missing = letter.isupper() and rng.random() < 0.5
        arrays.append(None if missing else np.asarray(made).astype(array(kind=letter).dtype))
    far = [0, 1, -1, 2, 3, 7, 1 << 12, 1 << 20, FAR, 1 << 24, 1 << 31, (1 << 63) - 1, -(1 << 63)]

    def number():
        return int(rng.integers(1, 4)) if rng.random() < 0.9 else int(far[rng.integers(len(far))])

    attributes = {}
    for key in ATTRIBUTES.get(name, ()):
        if key in ("values", "steps"):
            attributes = attributes or _random_program(rng, name)
        elif key == "epsilon":
            attributes[key] = float(rng.choice([0.0, 1e-5, np.nan, np.inf, -1.0]))
        elif key == "order":
            orders = [rng.permutation(4) if rng.random() < 0.5 else range(4) for _ in range(7 if "Grad" in name else 4)]
            attributes[key] = [int(i) for order in orders for i in order]
        elif key in SCALARS:
            attributes[key] = number() if rng.random() < 0.3 else 1
        else:
            count = 3 if "turned" in ATTRIBUTES[name] else 2
            attributes[key] = [number() for _ in range(count if rng.random() < 0.97 else rng.integers(1, 4))]
    return arrays, attributes, len(results) if rng.random() < 0.9 else int(rng.integers(1, len(results) + 1))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", KERNELS)
def test_at_random(name):
    """An error of ONNX Runtime's, or numbers."""
    outcomes = set()
    for seed in range(120 if name in ATTRIBUTES else 30):
        arrays, attributes, count = _random(np.random.default_rng(seed), name)
        try:
            called(name, arrays, attributes, count)
            outcomes.add("numbers")
        except Exception as error:
            outcomes.add(type(error).__module__.partition(".")[0])
    assert {"numbers" if name == "After" else "onnxruntime"} <= outcomes <= {"onnxruntime", "numbers"}


def test_operands_that_are_no_tensors_or_of_another_type():
    """ONNX Runtime sees to that by the types that the kernels declare."""
    text = """<ir_version: 10, opset_import: ["": 18, "onnxgrad.native": 1]>
        g (float[2] x) => (float[2] y) {{ {0} y = onnxgrad.native.Product <left = 0, right = 0, relu = 0> ({1}) }}"""
    for emitted, given in (
        ("", "x"), ("", 'x, ""'), ("s = SequenceConstruct (x)", "x, s"), ("b = Cast <to = 11> (x)", "x, b"),
        ("b = Cast <to = 11> (x)", "b, b"), ("", "x, x, x"), ("o = Optional (x)", "x, o"),
    ):  # fmt: skip
        model = onnx.parser.parse_model(text.format(emitted, given))
        with pytest.raises(Exception) as error:
            onnxruntime.InferenceSession(
                model.SerializeToString(), Options(target="native").native(), ["CPUExecutionProvider"]
            ).run(None, {"x": np.ones(2, np.float32)})
        assert type(error.value).__module__.startswith("onnxruntime")
