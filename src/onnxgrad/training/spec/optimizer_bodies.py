"""The optimizers as function bodies of standard operators, word for word the pseudo code of the specification.

A model that carries them runs its Adam, Adagrad and Momentum on any runtime that knows functions, with the nodes
as they are. A function has a fixed number of tensors, so there is one per operator and number of tensors; its
`overload` is that number, and the nodes say which they mean. Attributes stay attributes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx
from onnx import parser

from onnxgrad.errors import BadInput
from onnxgrad.ir.names import described
from onnxgrad.training.spec.training_info import model_proto
from onnxgrad.transforms.gradient_node import DOMAIN

#: The lowest opsets in which the bodies mean what they say. Momentum compares strings (its mode).
LOWEST = {"Adagrad": 15, "Adam": 15, "Momentum": 19}

_SHARED = {
    "Adagrad": """
        counted = Mul (t, decay)
        grown = Add (one, counted)
        r = Div (rate, grown)""",
    "Adam": """
        beta_t = Pow (beta, t)
        left_beta = Sub (one, beta_t)
        root = Sqrt (left_beta)
        alpha_t = Pow (alpha, t)
        left_alpha = Sub (one, alpha_t)
        scaled = Mul (rate, root)
        corrected = Div (scaled, left_alpha)
        later = Greater (t, zero)
        r = Where (later, corrected, rate)
        new_alpha = Sub (one, alpha)
        new_beta = Sub (one, beta)
        kept = Sub (one, norm_coefficient_post)""",
    "Momentum": """
        later = Greater (t, zero)
        beta_adjusted = Where (later, beta, one)
        chosen = Constant <value_string: string = @mode> ()
        nesterov_mode = Constant <value_string = "nesterov"> ()
        nesterov = Equal (chosen, nesterov_mode)
        r = Identity (rate)""",
}

_EACH = {
    "Adagrad": """
        n_# = Mul (norm_@, X_#)
        g_# = Add (n_#, G_#)
        gg_# = Mul (g_#, g_#)
        H_new_# = Add (H_#, gg_#)
        s_# = Sqrt (H_new_#)
        a_# = Add (s_#, epsilon_@)
        rg_# = Mul (r_@, g_#)
        d_# = Div (rg_#, a_#)
        X_new_# = Sub (X_#, d_#)""",
    "Adam": """
        n_# = Mul (norm_@, X_#)
        g_# = Add (n_#, G_#)
        va_# = Mul (alpha_@, V_#)
        vb_# = Mul (new_alpha_@, g_#)
        V_new_# = Add (va_#, vb_#)
        ha_# = Mul (beta_@, H_#)
        gg_# = Mul (g_#, g_#)
        hb_# = Mul (new_beta_@, gg_#)
        H_new_# = Add (ha_#, hb_#)
        s_# = Sqrt (H_new_#)
        a_# = Add (s_#, epsilon_@)
        rv_# = Mul (r_@, V_new_#)
        d_# = Div (rv_#, a_#)
        x_# = Sub (X_#, d_#)
        X_new_# = Mul (kept_@, x_#)""",
    "Momentum": """
        n_# = Mul (norm_@, X_#)
        g_# = Add (n_#, G_#)
        va_# = Mul (alpha_@, V_#)
        vb_# = Mul (beta_adjusted_@, g_#)
        V_new_# = Add (va_#, vb_#)
        av_# = Mul (alpha_@, V_new_#)
        look_# = Add (g_#, av_#)
        u_# = Where (nesterov, look_#, V_new_#)
        d_# = Mul (r_@, u_#)
        X_new_# = Sub (X_#, d_#)""",
}

#: Per operator: its states, and its float attributes with their defaults (None: required).
_STATES = {"Adagrad": ("H",), "Adam": ("V", "H"), "Momentum": ("V",)}
_ATTRIBUTES: dict[str, dict[str, float | None]] = {
    "Adagrad": {"decay_factor": 0.0, "epsilon": 1e-6, "norm_coefficient": 0.0},
    "Adam": {
        "alpha": 0.9,
        "beta": 0.999,
        "epsilon": 1e-6,
        "norm_coefficient": 0.0,
        "norm_coefficient_post": 0.0,
    },
    "Momentum": {"alpha": None, "beta": None, "norm_coefficient": None},
}


def optimizer_function(op_type: str, count: int = 1, opset: int = 21) -> onnx.FunctionProto:
    """The operator `op_type` of the training domain on `count` tensors, as a function of standard operators.

    Scalars are computed in double precision; `R`, `T` and the tensors may be float or double, as the operator's own.

    Raises:
        BadInput: there is no such optimizer, or `opset` is too old for its body.
    """
    if op_type not in _EACH:
        raise BadInput(f"there is no optimizer {op_type!r} in {DOMAIN}; there are: {', '.join(_EACH)}")
    if opset < LOWEST[op_type]:
        hint = "hint: convert the model, or write the operator out with lower_gradients"
        raise BadInput(f"the body of {op_type} needs opset {LOWEST[op_type]}; the model has {opset}\n  {hint}")
    numbers = range(1, count + 1)
    kinds = ["X", "G", *_STATES[op_type]]
    inputs = ["R", "T", *(f"{kind}_{i}" for kind in kinds for i in numbers)]
    outputs = [f"{kind}_new_{i}" for kind in ("X", *_STATES[op_type]) for i in numbers]
    lines = [_scalars(op_type), *(_each(op_type, i) for i in numbers)]
    head = f'<opset_import: ["": {opset}], domain: "{DOMAIN}", overload: "{count}">'
    listed = ", ".join(_declared(op_type))
    text = f"{head} {op_type} <{listed}> ({', '.join(inputs)}) => ({', '.join(outputs)}) {{{''.join(lines)}\n}}"
    function = parser.parse_function(text)
    function.doc_string = f"{op_type} of {DOMAIN}, version 1, on {count} tensor{'s' * (count > 1)}"
    return function


def _declared(op_type: str) -> list[str]:
    given = _ATTRIBUTES[op_type]
    listed = [name if default is None else f"{name}: float = {default}" for name, default in given.items()]
    return [*listed, "mode"] if op_type == "Momentum" else listed


def _scalars(op_type: str) -> str:
    """What all tensors share, as doubles: the attributes under their names, t, one, zero, and r."""
    lines = []
    for name in _ATTRIBUTES[op_type]:
        inner = {"decay_factor": "decay"}.get(name, name)
        lines.append(f"{inner}_f = Constant <value_float: float = @{name}> ()")
        lines.append(f"{inner} = Cast <to = 11> ({inner}_f)")
    lines += [
        "one = Constant <value = double {1}> ()",
        "zero = Constant <value = double {0}> ()",
        "scalar = Constant <value = int64[0] {}> ()",
        "R_flat = Reshape (R, scalar)",
        "rate = Cast <to = 11> (R_flat)",
        "T_flat = Reshape (T, scalar)",
        "t = Cast <to = 11> (T_flat)",
    ]
    return "\n        ".join(["", *lines]) + _SHARED[op_type]


def _each(op_type: str, i: int) -> str:
    """The formulas for tensor `i`, with every scalar in its type."""
    text = _EACH[op_type].replace("_#", f"_{i}")
    used = [name for name in _USED[op_type] if f"{name}_@" in text]
    casts = [f"{name}_at_{i} = CastLike ({_SOURCE.get(name, name)}, X_{i})" for name in used]
    for name in sorted(used, key=len, reverse=True):
        text = text.replace(f"{name}_@", f"{name}_at_{i}")
    return "\n        ".join(["", *casts]) + text


_SOURCE = {"norm": "norm_coefficient"}
_USED = {
    "Adagrad": ("norm", "epsilon", "r"),
    "Adam": ("norm", "alpha", "new_alpha", "beta", "new_beta", "epsilon", "r", "kept"),
    "Momentum": ("norm", "alpha", "beta_adjusted", "r"),
}


def with_optimizer_functions(model: str | os.PathLike | onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` that brings the bodies of all optimizers that its graph and its algorithms use.

    The nodes stay; each gets the `overload` that says how many tensors it has. Needs IR version 10 (raised to it).
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model_proto(model))
    wanted: dict[tuple[str, int], None] = {}
    for nodes in [copy.graph.node, *(f.node for f in copy.functions), *(i.algorithm.node for i in copy.training_info)]:
        _name_overloads(nodes, wanted)
    opset = next((o.version for o in copy.opset_import if o.domain in ("", "ai.onnx")), 0)
    if wanted and not opset:  # a model of nothing but an optimizer
        opset = 21
        copy.opset_import.append(onnx.helper.make_opsetid("", opset))
    have = {(f.domain, f.name, f.overload) for f in copy.functions}
    for op_type, count in wanted:
        if (DOMAIN, op_type, str(count)) not in have:
            copy.functions.append(optimizer_function(op_type, count, opset))
    if wanted:
        copy.ir_version = max(copy.ir_version, 10)
    return copy


def _name_overloads(nodes: Sequence[onnx.NodeProto], wanted: dict[tuple[str, int], None]) -> None:
    for node in nodes:
        for a in node.attribute:
            for graph in (a.g, *a.graphs):
                _name_overloads(graph.node, wanted)
        if node.domain == DOMAIN and node.op_type in _EACH:
            kinds = 2 + len(_STATES[node.op_type])
            count, rest = divmod(len(node.input) - 2, kinds)
            if rest or count < 1:
                raise BadInput(f"{described(node)} has {len(node.input)} inputs; it takes R, T and {kinds} per tensor")
            node.overload = str(count)
            wanted[node.op_type, count] = None
