"""Recipes of an algorithm: loss, optimizer, trainable weights, and adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind
from onnxgrad.settings import setting
from onnxgrad.training.adapters.config import ATTENTION, IA3, Adapter, ChosenOutputs, LoHa, LoKr, LoRA, VeRA
from onnxgrad.training.loss.losses import LOSSES
from onnxgrad.training.optim.config import Group, Optimizer
from onnxgrad.training.optim.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, SECOND_ORDER, setting_names
from onnxgrad.training.optim.schedules import SCHEDULES


@dataclass(frozen=True)
class LossRecipe:
    """The scalar that training minimizes."""

    panel: ClassVar[str] = "Loss"

    loss: Any = setting(
        None,
        f"{', '.join(LOSSES)}, LOSS.onnx, or a formula: 'mean((scores - y)**2)'. Options: 'huber:delta=0.5'. Several "
        "losses are added: 'mse' and '0.1*l1'.",
        python="Also a Loss(…), an ONNX model, or a function of arrays or of PyTorch's tensors.",
        many=True,
    )
    prediction: str | None = setting(None, "The output that meets the labels. Default: the only float output.")
    labels: str | None = setting(None, "The array (or model input) that holds the labels. Default: 'labels'.")
    pairs: str | Sequence[str] | None = setting(
        None,
        "Train an encoder on several columns of each row, which it reads in turn: anchor,positive,negative. For the "
        "losses multiple_negatives, triplet_margin, cosine_similarity and cosent.",
        kind=str,
    )


@dataclass(frozen=True)
class OptimizerRecipe:
    """The rule that turns gradients into the next weights."""

    panel: ClassVar[str] = "Optimizer"

    optimizer: Optimizer | str | None = setting(
        None,
        f"{', '.join([*SECOND_ORDER, *OPTIMIZERS])}. Settings: 'adamw:betas=0.9,0.95,eps=1e-6'. "
        f"Default: {DEFAULT_OPTIMIZER}.",
        python="Also an Optimizer(…).",
    )
    learning_rate: float | None = setting(None, "Learning rate. Default: that of the optimizer.", short=("--lr",))
    weight_decay: float | None = setting(None, "Weight decay. Default: that of the optimizer.")
    momentum: float | None = setting(None, "Momentum. Default: that of the optimizer.")
    convention: str | None = setting(
        None, "Where adam and adamw add ε: torch (as PyTorch and optax; default) or onnx (the operator Adam of ONNX)."
    )
    groups: Sequence[Group | str] | None = setting(
        None,
        "Weights with settings of their own: '*.bias:decay=0', 'type:Conv:rate=1e-4'; the first that matches counts.",
        short=("--group",),
        many=True,
    )
    clip_norm: float | None = setting(None, "The largest norm of all gradients together.")
    clip_value: float | None = setting(None, "The largest element of a gradient, which is clipped first.")
    ema: float | None = setting(None, "Save running averages of the weights, of which a step keeps this share: 0.999.")
    swa: int | None = setting(
        None, "Save the plain average of the weights after this step and later ones (SWA): 500. Instead of `ema`."
    )
    swa_every: int = setting(1, "Steps between weights that `swa` averages: those of an epoch, for instance.", least=1)


@dataclass(frozen=True)
class WeightsRecipe:
    """The weights that train, and the behaviour of layers in training."""

    panel: ClassVar[str] = "Model"

    trainable: Sequence[str] | None = setting(
        None,
        "Only these weights: a name, 'head.*', type:Conv, last:2, all (also constants). Default: every float "
        "initializer that the loss depends on and that is used as a weight.",
        short=("--train",),
        many=True,
    )
    freeze: Sequence[str] = setting((), "Not these weights; as `trainable`.", many=True)
    untie: bool = setting(False, "Train an embedding and an output layer apart that are stored as two equal tensors.")
    freeze_bn: bool | Sequence[str] = setting(
        False, "Keep BatchNormalization in inference mode.", kind=bool, python="Also globs over names of nodes."
    )
    train_mode: bool = setting(True, "Run BatchNormalization and Dropout as in training.", off="--no-train-mode")
    dropout: Mapping[str, float] | None = setting(
        None, "Drop a share behind nodes of a type or name: Relu=0.1.", many=True, python="As {'Relu': 0.1}."
    )

    update: str | None = setting(
        None,
        "Train only weights whose gradient is worth what they cost: auto:bytes=2MB (of a step's results and state) or "
        "auto:milliseconds=5; the backward pass ends at the first of them. With channels=4, quarters of the outputs of "
        "a weight are chosen.",
    )
    integers: str = setting(
        "floats",
        "Weights stored as integers train as floats that are rounded where they are read (floats), or stay integers "
        "times their scales, rounded by chance after every step (stochastic).",
        metavar="KIND",
    )
    prune: Sequence[str] = setting(
        (),
        "Prune while training: channels=0.5, heads=0.25, weights=0.8 or weights=2:4; "
        "'channels=0.5:schedule=linear,score=movement,begin=0.1,end=0.6,times=20'.",
        many=True,
    )

    def __post_init__(self) -> None:
        check_kind("dropout", self.dropout, Mapping, "a dict, as in {'Relu': 0.1}")
        check_kind("untie", self.untie, bool, "true or false")
        if self.integers not in ("floats", "stochastic"):
            raise BadInput(f"integers is floats or stochastic, not {self.integers!r}")


#: Settings that ask for adapters, and the settings that say more about these.
_SETTINGS = {
    "lora": ("lora_alpha", "lora_init", "dora", "rslora", "lora_targets", "lora_dropout"),
    "vera": ("lora_targets", "lora_dropout"),
    "loha": ("lora_alpha", "lora_targets"),
    "lokr": ("lora_alpha", "lora_targets"),
    "ia3": ("lora_targets", "ia3_feedforward"),
}


def _asking(name: str) -> str:
    """The setting that asks for the adapters of which `name` says more."""
    return "ia3=True (--ia3)" if name == "ia3_feedforward" else "lora=RANK (--lora RANK)"


@dataclass(frozen=True)
class AdapterRecipe:
    """The settings of adapters: small trained factors with frozen weights."""

    panel: ClassVar[str] = "Model"

    adapter: Adapter | None = setting(
        None,
        "LoRA(…), VeRA(…), LoHa(…), LoKr(…) or IA3(…): train adapters beside frozen weights.",
        instead="adapters are --lora, --vera, --loha or --lokr RANK, or --ia3",
    )
    lora: int | None = setting(
        None,
        "Train adapters of this rank (LoRA) beside frozen weights, merged into them at the end; `trainable` then names "
        "weights that train as a whole, too.",
        metavar="RANK",
    )
    dora: bool = setting(False, "Adapters of `lora` also train the length of each output (DoRA).")
    rslora: bool = setting(False, "Adapters of `lora` count alpha/√rank times.")
    lora_init: str | None = setting(
        None, "First factors of `lora`: pissa (largest singular values of a weight) or olora (its QR decomposition)."
    )
    vera: int | None = setting(
        None, "Train two vectors per weight between random matrices that all share (VeRA).", metavar="RANK"
    )
    loha: int | None = setting(
        None, "Train an elementwise product of two matrices of this rank beside each weight (LoHa).", metavar="RANK"
    )
    lokr: int | None = setting(None, "Train a Kronecker product beside each weight (LoKr).", metavar="RANK")
    ia3: bool = setting(False, "Train one factor for each output of the layers of `lora_targets` ((IA)³).")
    ia3_feedforward: Sequence[str] = setting(
        (), "With `ia3`: weights of which each input has a factor instead.", metavar="PATTERN", many=True
    )
    lora_alpha: float | None = setting(
        None, "Adapters count alpha/rank times. Default: twice the rank; of `loha` and `lokr`, the rank."
    )
    lora_targets: str | Sequence[str] | None = setting(
        None,
        "Weights to adapt: attention (default), q_proj, 'c_attn[q,v]' (a part), '*.mlp.*', type:MatMul,Gemm,Conv, all; "
        "'!head*': not these.",
        metavar="PATTERN",
        many=True,
    )
    lora_dropout: float | None = setting(None, "Share of the input that adapters drop, in training.")

    def build_adapter(self) -> Adapter | None:
        """The adapter of these settings; None for none.

        Raises:
            BadInput: a setting without the adapter that it belongs to, or two adapters.
        """
        check_kind(
            "adapter",
            self.adapter,
            (LoRA, VeRA, LoHa, LoKr, IA3, ChosenOutputs),
            "a LoRA(…), VeRA(…), LoHa(…), LoKr(…) or IA3(…)",
        )
        kinds = [
            name for name in ("adapter", *_SETTINGS) if getattr(self, name) is not None and (name != "ia3" or self.ia3)
        ]
        if len(kinds) > 1:
            raise BadInput(f"{' and '.join(kinds)} are two kinds of adapters; give one of them")
        kind = kinds[0] if kinds else ""
        for name in sorted({n for names in _SETTINGS.values() for n in names} - set(_SETTINGS.get(kind, ()))):
            if getattr(self, name) not in (None, False, ()):
                raise BadInput(f"{name} says more about adapters, which {_asking(name)} asks for")
        targets, dropout, alpha = self.lora_targets or ATTENTION, self.lora_dropout or 0.0, self.lora_alpha
        if self.lora is not None:
            return LoRA(self.lora, alpha, targets, dropout, self.rslora, self.dora, init=self.lora_init)
        if self.vera is not None:
            return VeRA(self.vera, targets, dropout)
        if self.loha is not None:
            return LoHa(self.loha, alpha, targets)
        if self.lokr is not None:
            return LoKr(self.lokr, alpha, targets)
        if self.ia3:
            return IA3(targets, self.ia3_feedforward)
        return self.adapter


#: Recipes of `attach`.
ALGORITHM = (LossRecipe, OptimizerRecipe, WeightsRecipe, AdapterRecipe)


#: Options of losses and schedules that several have, with a name to show them behind; and names of other libraries.
_SHARED = {"row_weights": "mse", "teacher": "kl", "reduction": "mse", "warmup": "linear", "total": "linear"}
_ELSEWHERE = {
    **dict.fromkeys(("sample_weight", "sample_weights"), "row_weights"),
    **dict.fromkeys(("class_weight", "class_weights"), "weight"),
    **dict.fromkeys(("smoothing", "label_smooth"), "label_smoothing"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "warmup"),
}


def option_spelling(name: str, known: Collection[str], command: bool = False) -> str:
    """The spelling of an option of a loss or a schedule that was given as a setting `name`; empty for other names.

    Args:
        name: no setting.
        known: settings that there are.
        command: spell it as a flag.

    >>> option_spelling("row_weights", ["loss", "weight_decay"])
    "it is an option of the loss: loss='mse:row_weights=…'"
    """
    option = _ELSEWHERE.get(name, name)
    tables: dict[str, Mapping[str, Any]] = {"loss": LOSSES, "schedule": SCHEDULES}
    for place, table in tables.items():
        owner = next((n for n in [_SHARED.get(option, ""), *table] if n in table and _has(table[n], n, option)), None)
        if owner is not None and place in known:
            text = f"{owner}:{option}=…"
            spelled = f"--{place} {text}" if command else f"{place}={text!r}"
            also = [n for n in known if name in n.split("_")]
            return f"it is an option of the {place}: {spelled}" + (f"; or do you mean {also[0]!r}?" if also else "")
    return ""


def _has(function: Any, name: str, option: str) -> bool:
    """True if a loss or a schedule called `name` takes the `option`."""
    return option in function.options or _SHARED.get(option) == name


def further_settings() -> list[str]:
    """Keywords of `attach` that are no fields of a recipe: of the algorithm alone, and of single optimizers."""
    return ["output", "metrics", "schedule", *setting_names()]
