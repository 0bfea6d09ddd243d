"""Convolutions up the ladder."""

from onnxgrad.testing import Case
from tests.rules.ladder import ladder
from tests.rules.windowed import Conv, ConvTranspose

BATCH = {0: (0,)}
ROOM = {0: (0, 2, 3, 4)}


def case(op, x, w, b=None, *, symbolic=True, note="", order=1, runtime=True, **attrs):
    inputs = [x, w] if b is None else [x, w, b]
    evaluators = (Conv, ConvTranspose)
    return Case(op, inputs, attrs, symbolic=symbolic, note=note, order=order, runtime=runtime, evaluators=evaluators)


CASES = [
    # one axis
    case("Conv", (2, 2, 5), (3, 2, 3), (3,), order=2),
    case("Conv", (2, 2, 6), (2, 2, 2), strides=[2], dilations=[2], pads=[1, 0], symbolic=ROOM, order=2),
    case("Conv", (2, 4, 5), (4, 2, 3), group=2, pads=[1, 2], symbolic=ROOM, note="groups"),
    case("Conv", (2, 2, 6), (4, 1, 3), group=2, pads=[2, 0], strides=[2], symbolic=BATCH, note="depthwise"),
    case("Conv", (2, 2, 5), (2, 2, 2), auto_pad="SAME_UPPER", strides=[2], symbolic=ROOM, note="same upper"),
    case("Conv", (2, 2, 5), (2, 2, 1), auto_pad="SAME_LOWER", strides=[3], symbolic=ROOM, note="same, stride > kernel"),
    # two axes
    case("Conv", (2, 2, 4, 3), (2, 2, 3, 2), (2,), pads=[1, 0, 1, 1], symbolic=BATCH, order=2),
    case("Conv", (1, 2, 4, 4), (3, 2, 2, 2), symbolic=ROOM, note="symbolic space"),
    case("Conv", (2, 1, 4, 3), (2, 1, 2, 2), note="all symbolic"),
    case("Conv", (2, 2, 4, 3), (2, 1, 2, 2), group=2, strides=[2, 1], note="all symbolic, groups"),
    case("Conv", (2, 2, 4, 3), (2, 1, 2, 2), group=2, kernel_shape=[2, 2], note="all symbolic but the kernel"),
    case("Conv", (1, 2, 5, 6), (2, 2, 3, 2), strides=[2, 3], pads=[0, 1, 1, 0], symbolic=BATCH, note="unreached rows"),
    case(
        "Conv", (1, 2, 5, 6), (2, 2, 3, 2), strides=[2, 3], pads=[0, 1, 1, 0], symbolic=ROOM, note="unreached, symbolic"
    ),
    case(
        "Conv",
        (1, 2, 7, 6),
        (1, 2, 2, 2),
        strides=[3, 2],
        dilations=[2, 3],
        pads=[1, 1, 2, 1],
        symbolic=ROOM,
        note="dilated",
    ),
    case("Conv", (2, 4, 9), (6, 2, 3), strides=[2], dilations=[2], pads=[2, 1], group=2, note="dilated groups"),
    case("Conv", (2, 2, 12), (3, 2, 2), strides=[5], dilations=[2], symbolic=BATCH, note="dilated, rest"),
    case("Conv", (1, 2, 7, 6), (1, 2, 2, 2), dilations=[2, 3], pads=[3, 4, 0, 3], symbolic=BATCH, note="wide padding"),
    case("Conv", (2, 4, 5, 6), (4, 2, 3, 2), dilations=[1, 2], group=2, symbolic=BATCH, note="dilated, 2", order=2),
    case("Conv", (1, 2, 8, 6), (2, 2, 2, 2), dilations=[3, 2], strides=[1, 3], symbolic=BATCH, note="dilated, rest 2"),
    case("Conv", (2, 3, 5, 4), (2, 3, 3, 2), pads=[1, 0, 2, 1], symbolic=BATCH, note="narrowing", order=2),
    case("Conv", (2, 6, 7), (2, 3, 2), group=2, dilations=[2], pads=[0, 2], symbolic=BATCH, note="narrowing groups"),
    case("Conv", (2, 2, 3, 3), (3, 2, 1, 1), (3,), symbolic=ROOM, note="pointwise", order=2),
    case("Conv", (2, 2, 4, 3), (3, 2, 1, 1), strides=[2, 2], symbolic=ROOM, note="pointwise strided"),
    case("Conv", (2, 2, 3, 3), (3, 2, 1, 1), pads=[1, 0, 0, 2], symbolic=ROOM, note="pointwise padded"),
    case("Conv", (2, 4, 3, 3), (4, 2, 1, 1), group=2, symbolic=ROOM, note="pointwise groups"),
    case("Conv", (2, 4, 4, 3), (4, 2, 2, 2), group=2, pads=[1, 1, 0, 1], symbolic=BATCH, note="groups", order=2),
    case(
        "Conv",
        (1, 4, 4, 3),
        (2, 2, 3, 2),
        group=2,
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        symbolic=ROOM,
        note="groups strided",
    ),
    case("Conv", (2, 2, 4, 5), (2, 1, 3, 2), group=2, pads=[1, 0, 1, 1], symbolic=BATCH, note="depthwise", order=2),
    case(
        "Conv",
        (1, 2, 6, 5),
        (2, 1, 2, 3),
        group=2,
        strides=[2, 2],
        dilations=[3, 1],
        pads=[1, 2, 0, 1],
        symbolic=BATCH,
        note="depthwise dilated",
    ),
    case("Conv", (1, 2, 4, 5), (4, 1, 3, 2), group=2, pads=[1, 0, 1, 1], symbolic=ROOM, note="depthwise times two"),
    case("Conv", (1, 2, 5, 4), (2, 2, 3, 2), auto_pad="SAME_UPPER", symbolic=ROOM, note="same upper"),
    case(
        "Conv",
        (1, 2, 5, 4),
        (2, 2, 3, 2),
        auto_pad="SAME_LOWER",
        strides=[2, 3],
        symbolic=ROOM,
        note="same lower strided",
        order=2,
    ),
    case("Conv", (1, 2, 5, 4), (2, 2, 2, 2), auto_pad="SAME_LOWER", strides=[2, 1], note="same, all symbolic"),
    # ONNX Runtime refuses dilations beside automatic padding; the specification does not
    case(
        "Conv",
        (1, 2, 5, 4),
        (2, 2, 2, 2),
        auto_pad="SAME_LOWER",
        strides=[2, 1],
        dilations=[1, 2],
        note="same dilated",
        runtime=False,
    ),
    case("Conv", (1, 2, 5, 4), (2, 2, 2, 2), auto_pad="VALID", strides=[2, 1], symbolic=ROOM, note="valid"),
    # three axes
    case("Conv", (1, 2, 3, 3, 2), (2, 2, 2, 2, 2), pads=[0, 1, 1, 1, 0, 0], symbolic=ROOM),
    case("Conv", (1, 2, 4, 3, 3), (2, 1, 2, 2, 2), strides=[2, 1, 2], group=2, symbolic=BATCH, note="depthwise"),
    # transposed
    case("ConvTranspose", (2, 2, 3), (2, 3, 2), (3,), order=2),
    case("ConvTranspose", (2, 2, 3), (2, 2, 3), strides=[2], pads=[1, 0], output_padding=[1], symbolic=ROOM, order=2),
    case("ConvTranspose", (1, 2, 3, 2), (2, 2, 3, 2), strides=[2, 1], pads=[1, 0, 0, 1], symbolic=BATCH, order=2),
    case(
        "ConvTranspose",
        (1, 2, 3, 2),
        (2, 2, 3, 2),
        strides=[2, 2],
        output_padding=[1, 1],
        symbolic=ROOM,
        note="beyond the end",
    ),
    case("ConvTranspose", (1, 2, 3, 2), (2, 1, 3, 2), (2,), group=2, strides=[2, 1], symbolic=BATCH, note="depthwise"),
    case(
        "ConvTranspose",
        (1, 4, 3, 2),
        (4, 2, 2, 2),
        group=2,
        dilations=[2, 1],
        pads=[1, 0, 1, 0],
        symbolic=ROOM,
        note="groups",
    ),
    case("ConvTranspose", (1, 4, 3, 2), (4, 1, 2, 2), group=2, strides=[2, 1], note="groups, all symbolic"),
    case(
        "ConvTranspose",
        (1, 2, 3, 2),
        (2, 2, 3, 2),
        strides=[2, 2],
        auto_pad="SAME_UPPER",
        symbolic=ROOM,
        note="same upper",
    ),
    case(
        "ConvTranspose",
        (1, 2, 3, 2),
        (2, 2, 3, 2),
        strides=[2, 2],
        auto_pad="SAME_LOWER",
        note="same lower, all symbolic",
    ),
    case(
        "ConvTranspose",
        (1, 2, 3, 2),
        (2, 2, 3, 2),
        strides=[2, 2],
        output_shape=[6, 3],
        symbolic=ROOM,
        note="output shape",
    ),
    case(
        "ConvTranspose",
        (1, 2, 3, 2),
        (2, 2, 3, 2),
        strides=[2, 2],
        output_shape=[8, 5],
        symbolic=ROOM,
        note="larger output shape",
    ),
    case("ConvTranspose", (1, 2, 3, 2), (2, 2, 3, 2), strides=[2, 2], auto_pad="VALID", symbolic=BATCH, note="valid"),
    case("ConvTranspose", (1, 2, 3, 3), (2, 3, 1, 1), symbolic=ROOM, note="pointwise"),
    case("ConvTranspose", (1, 2, 3, 2, 2), (2, 2, 2, 1, 2), strides=[2, 1, 2], pads=[0, 0, 1, 1, 0, 0], symbolic=ROOM),
    # ONNX Runtime wants output_padding below the stride; the specification, below the stride or the dilation
    case(
        "ConvTranspose",
        (1, 2, 3),
        (2, 2, 2),
        dilations=[3],
        output_padding=[2],
        symbolic=ROOM,
        note="far beyond the end",
        runtime=False,
    ),
]
test_rule = ladder("conv", CASES)
