"""Operators whose derivative is zero, and operators without a derivative, with the reasons.

The two are different statements. A zero is the derivative, wherever there is one: a path through such an
operator contributes nothing. A refusal means that asking makes no sense, and raises.
"""

from __future__ import annotations

from onnxgrad.ir.operators import Kind
from onnxgrad.rules.registry import undefined, zero

ML = "ai.onnx.ml"

PATTERN = "only the shape or the pattern of its input is read"

zero("Shape", "Size", reason=PATTERN, total=True)
zero("ConstantOfShape", "EyeLike", "NonZero", "RandomNormalLike", "RandomUniformLike", reason=PATTERN)
zero("Ceil", "Floor", "Round", "Sign", kind=Kind.ELEMENTWISE, total=True)
zero("Hardmax", kind=Kind.ALONG_AXIS, interval=(0, 1))
zero("MelWeightMatrix")
zero(
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "IsInf",
    "IsNaN",
    "And",
    "Or",
    "Xor",
    "Not",
    reason="the output is a truth value",
    kind=Kind.ELEMENTWISE,
    total=True,
)
INDICES = "the output is a set of indices, which is piecewise constant"

zero("ArgMax", "ArgMin", reason=INDICES, kind=Kind.ALONG_AXIS, total=True)
zero("NonMaxSuppression", reason=INDICES)
zero(
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    reason="it works on integers",
    kind=Kind.ELEMENTWISE,
)
zero("Constant", reason="it has no float input", total=True)
zero(
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    "ImageDecoder",
    "RandomNormal",
    "RandomUniform",
    "SequenceEmpty",
    reason="it has no float input",
)
zero(
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    reason="it reads strings or integers",
)
zero(
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
    reason="the output is an integer, piecewise constant in every input",
)
zero(
    "QuantizeLinear",
    reason="it rounds, so its output is piecewise constant; `straight_through` takes it for what it rounds",
    kind=Kind.ALONG_AXIS,
)
zero("Binarizer", "TreeEnsemble", "TreeEnsembleRegressor", "TreeEnsembleClassifier", domain=ML)
zero("CategoryMapper", "LabelEncoder", "OneHotEncoder", domain=ML, reason="it looks a key up in a table")

zero("CastMap", domain=ML, reason="it reads a map, which is no tensor")

undefined(
    "Bernoulli",
    "Multinomial",
    reason="its result is a random sample, which does not depend smoothly on the input",
)
undefined("BitCast", reason="it reinterprets the bits of a number")
