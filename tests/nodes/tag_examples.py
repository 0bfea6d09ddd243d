"""The smallest models that show a tag of differentiability to be wrong, with what differences and the rule give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxgrad import vjp
from onnxgrad.model_io import signature
from tests.nodes.checking import EVALUATORS, on_runtime, reference

#: Operands that must lie in some range.
VALUES = {"A": [2.0, -3.2, 4.5], "roi": [0.1, 0.8], "B": [0.7, -0.9, 1.1]}


@dataclass(frozen=True)
class Example:
    """A graph of one node; `wrt` is the operand, or leads to the output, whose tag is wrong."""

    wrt: str
    operands: str
    body: str
    constants: str = ""
    outputs: str = "y"
    opset: int = 22

    @property
    def text(self) -> str:
        """In the syntax of the parser of the onnx package."""
        outs = ", ".join(f"double {o}" for o in self.outputs.split())
        head = f'<ir_version: 10, opset_import: ["": {self.opset}]>'
        held = f"\n  <{self.constants}>" if self.constants else ""
        return f"{head}\nexample ({self.operands}) => ({outs}){held} {{\n  {self.body}\n}}"

    def model(self) -> onnx.ModelProto:
        """The model, whose outputs have the ranks that come out."""
        model = parser.parse_model(self.text)
        found = ReferenceEvaluator(model, new_ops=list(EVALUATORS)).run(None, self.feeds())
        for value, array in zip(model.graph.output, found):
            value.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
            for size in np.shape(array):
                value.type.tensor_type.shape.dim.add().dim_value = size
        return model

    def feeds(self) -> dict[str, np.ndarray]:
        """Operands, small so that a grid stays inside its image."""
        rng = np.random.default_rng(0)
        shapes = {
            i.name: [d.dim_value for d in i.type.tensor_type.shape.dim]
            for i in parser.parse_model(self.text).graph.input
        }
        return {n: np.array(VALUES.get(n, rng.standard_normal(s) * 0.3)).reshape(s) for n, s in shapes.items()}

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of Σ uᵢ·yᵢ, u = 1, 2, …, over all outputs: by differences of the primal, and by rule."""
        model, feeds = self.model(), self.feeds()
        session = ReferenceEvaluator(model, new_ops=list(EVALUATORS))
        u = [np.arange(1.0, 1 + np.size(y)).reshape(np.shape(y)) for y in session.run(None, feeds)]

        def loss(x: np.ndarray) -> float:
            return sum(float(np.vdot(a, y)) for a, y in zip(u, session.run(None, feeds | {self.wrt: x})))

        x = feeds[self.wrt]
        by_differences = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            step = np.zeros(x.shape)
            step[at] = 1e-4
            by_differences[at] = (loss(x + step) - loss(x - step)) / 2e-4
        back = vjp(model, wrt=[self.wrt], of=self.outputs.split())
        sig = signature(back)
        given = feeds | {sig.cotangents[o]: a for o, a in zip(self.outputs.split(), u)}
        try:
            found = reference(back)(given)
        except RuntimeError:  # it knows no Scan whose results come in reverse order
            found = on_runtime(back)(given)
        return by_differences, found[sig.gradients[self.wrt]]


RECURRENT = "double[2,1,2] X, double[1,{n},2] W, double[1,{n},2] R, double[1,1,2] initial_h"
EXAMPLES = {
    ("AffineGrid", "theta"): Example(
        "theta", "double[1,2,3] theta", "y = AffineGrid (theta, size)", "int64[4] size = {1, 1, 2, 2}"
    ),
    ("CausalConvWithState", "past_state"): Example(
        "past_state",
        "double[1,1,3] input, double[1,1,2] weight, double[1,1,1] past_state",
        "y, present_state = CausalConvWithState (input, weight, , past_state)",
        outputs="y present_state",
        opset=27,
    ),
    ("DFT", "input"): Example("input", "double[1,4,1] input", "y = DFT (input)"),
    ("GRU", "initial_h"): Example(
        "initial_h", RECURRENT.format(n=6), "y, h = GRU <hidden_size = 2> (X, W, R, , , initial_h)", outputs="y h"
    ),
    ("GridSample", "grid"): Example(
        "grid", "double[1,1,3,3] X, double[1,1,2,2] grid", 'y = GridSample <mode = "linear"> (X, grid)'
    ),
    ("Hardmax", "input"): Example("input", "double[3] input", "y = Hardmax (input)"),
    ("LSTM", "initial_h"): Example(
        "initial_h", RECURRENT.format(n=8), "y, h = LSTM <hidden_size = 2> (X, W, R, , , initial_h)", outputs="y h"
    ),
    ("LSTM", "initial_c"): Example(
        "initial_c",
        RECURRENT.format(n=8) + ", double[1,1,2] initial_c",
        "y, h = LSTM <hidden_size = 2> (X, W, R, , , initial_h, initial_c)",
        outputs="y h",
    ),
    ("LinearAttention", "past_state"): Example(
        "past_state",
        "double[1,2,2] query, double[1,2,2] key, double[1,2,2] value, double[1,1,2,2] past_state",
        'y, present_state = LinearAttention <q_num_heads = 1, kv_num_heads = 1, update_rule = "linear">'
        "\n    (query, key, value, past_state)",
        outputs="y present_state",
        opset=27,
    ),
    ("Mod", "B"): Example("B", "double[3] A, double[3] B", "y = Mod <fmod = 1> (A, B)"),
    ("OneHot", "values"): Example(
        "values", "double[2] values", "y = OneHot (i, depth, values)", "int64[2] i = {2, 0}, int64 depth = {3}"
    ),
    ("RNN", "initial_h"): Example(
        "initial_h", RECURRENT.format(n=2), "y, h = RNN <hidden_size = 2> (X, W, R, , , initial_h)", outputs="y h"
    ),
    ("Resize", "roi"): Example(
        "roi",
        "double[4] X, double[2] roi",
        'y = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize">\n    (X, roi, , sizes)',
        "int64[1] sizes = {3}",
    ),
    ("STFT", "signal"): Example(
        "signal", "double[1,6,1] signal", "y = STFT <onesided = 1> (signal, step, , length)",
        "int64 step = {2}, int64 length = {4}",
    ),
    ("STFT", "window"): Example(
        "window", "double[1,6,1] signal, double[4] window", "y = STFT <onesided = 1> (signal, step, window)",
        "int64 step = {2}",
    ),
    ("Unique", "X"): Example("X", "double[4] X", "y = Unique <sorted = 1> (X)"),
}  # fmt: skip
