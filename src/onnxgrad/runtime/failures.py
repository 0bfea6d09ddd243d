"""Messages of ONNX Runtime for users: without paths of its sources, and in plain words if known."""

from __future__ import annotations

import re

from onnxgrad.ir.stops import explain_stop

_PREAMBLE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
#: A source location and a checked condition in its messages.
_PLACE = re.compile(r"^(?:\S*\.(?:h|cc|cpp):\d+ )+(?:.*? was false\. |\w+Impl |Compute |.*?\] )?")
_SIZES = re.compile(r"index: (\d+) Got: (-?\d+) Expected: (-?\d+)")
#: The names of nodes that had none begin so (see `same_memory.name_nodes`).
UNNAMED = "onnxgrad.unnamed."
_BRACES = re.compile(r"\{([-\d, ]*)\}")

_WORDS = (
    (r"indices element out of data bounds, idx=(-?\d+) must be within the inclusive range \[-\d+,(-?\d+)\]",
     r"the index \1 is outside of the table that it looks up, whose rows are 0 to \2"),
    (r"Attempting to broadcast an axis by a dimension other than 1\. (\d+) by (\d+)",
     r"the sizes \1 and \2 fit neither each other nor 1"),
    (r"Unexpected input data type\. Actual: \((.*?)\) ?, expected: \((.*?)\)",
     r"an input is a \1, and the model takes a \2"),
    (r"Invalid rank for input: (\S+) Got: (\d+) Expected: (\d+).*",
     r"the input '\1' has \2 axes, and the model takes \3"),
    (r"GEMM: Dimension mismatch, W: (\{[\d,]*\}) K: (\d+) N:\s?(\d+)",
     r"rows of \2 numbers meet a matrix \1"),
    (r"Invalid dim0_offset of 0\. Dimension 0 is 0", r"it has no steps, and ONNX Runtime runs a Scan of at least one"),
    (r"right operand cannot broadcast on dim 0",
     r"the batches of its operands do not fit, and ONNX Runtime multiplies none that is empty"),
    (r"The input tensor cannot be reshaped to the requested shape\. Input shape:(\{.*?\}), requested shape:(\{.*?\})",
     r"an array \1 does not fill the shape \2; an export may have fixed a size that the inputs leave open"),
    (r"MatMul dimension mismatch", r"the rows are of another size than the matrix has rows"),
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """The message of an error of ONNX Runtime on one line, in plain words if it is known."""
    text = _PREAMBLE.sub("", " ".join(str(error).split()))
    node = _NODE.search(text)
    where = ""
    if node is not None:
        if (sentence := explain_stop(node[2])) is not None:
            return sentence
        name = node[2].removesuffix("_nchwc")
        where = f"{node[1]} node {name!r}: " if name and not name.startswith(UNNAMED) else f"{node[1]}: "
        text = _PLACE.sub("", text[node.end() :])
    sizes = _SIZES.findall(text)
    if text.startswith("Got invalid dimensions for input: ") and sizes:
        name = text.removeprefix("Got invalid dimensions for input: ").partition(" for the")[0]
        listed = " and ".join(f"size {got} along axis {axis}" for axis, got, _ in sizes)
        return f"the input {name!r} has {listed}, and the model takes {' and '.join(want for *_, want in sizes)}"
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return where + _BRACES.sub(lambda found: f"[{', '.join(p.strip() for p in found[1].split(','))}]", text)
