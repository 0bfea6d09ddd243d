"""Operators whose derivative is zero, those that have none, and why.

The two are different statements. A zero is the derivative, wherever there is one: a path through such an
operator contributes nothing. A refusal means that asking makes no sense, and raises.
"""

from __future__ import annotations

from onnxgrad.rules.registry import undefined, zero

ML = "ai.onnx.ml"

zero(
    "Shape",
    "Size",
    "ConstantOfShape",
    "EyeLike",
    "NonZero",
    "RandomNormalLike",
    "RandomUniformLike",
    reason="only the shape or the pattern of its input is read",
)
zero("Ceil", "Floor", "Round", "Sign", "Hardmax", "MelWeightMatrix")
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
)
zero(
    "ArgMax",
    "ArgMin",
    "NonMaxSuppression",
    reason="the output is a set of indices, which is piecewise constant",
)
zero("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", reason="it works on integers")
zero(
    "Constant",
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
