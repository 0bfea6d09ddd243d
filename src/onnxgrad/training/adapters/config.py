"""Configuration of adapters: `LoRA` (also as DoRA), `VeRA`, `LoHa`, `LoKr` and `IA3`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.keywords import checked_fields
from onnxgrad.training.adapters.forms import CHANNELS, DORA, IA_3, LOHA, LOKR, LORA, VERA

ATTENTION = "attention"
#: Initial factors that are made of the weight.
INITIAL = (PISSA, OLORA) = ("pissa", "olora")


class _Asked:
    """The settings that all adapters share."""

    rank: int = 1
    targets: str | Sequence[str] = ATTENTION
    dropout: float = 0.0
    train_also: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise BadInput(f"the rank of an adapter is a whole number from 1 on, not {self.rank!r}")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"the dropout of an adapter must be in [0, 1), not {self.dropout}")
        if not self.patterns:
            raise BadInput("`targets` is empty: there is nothing to adapt")
        if isinstance(self.train_also, str):
            object.__setattr__(self, "train_also", (self.train_also,))

    @property
    def form(self) -> str:
        """The name of the form."""
        raise NotImplementedError

    @property
    def patterns(self) -> list[str]:
        """The `targets`, one by one."""
        return [self.targets] if isinstance(self.targets, str) else list(self.targets)

    @property
    def strength(self) -> float:
        """The `alpha`, given or not."""
        return 1.0

    @property
    def scale(self) -> float:
        """The factor s of the change of a weight."""
        return 1.0

    @property
    def options(self) -> dict[str, int]:
        """Settings of PEFT that the shapes of tensors depend on."""
        return {}


class _Scaled(_Asked):
    """Adapters with a scale of alpha/rank."""

    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise BadInput(f"the alpha of an adapter must be positive, not {self.alpha}")

    @property
    def strength(self) -> float:
        """The `alpha`, given or not."""
        return float(self.rank if self.alpha is None else self.alpha)

    @property
    def scale(self) -> float:
        """The factor s of the change of a weight."""
        return self.strength / self.rank


@checked_fields
@dataclass(frozen=True)
class LoRA(_Scaled):
    """Low-rank adaptation (Hu et al. 2021): W + s·A·B with trained A and B, and constant W.

    Each node that reads W is extended to y + s·(x·A)·B, at little cost. B starts with zeros (for embeddings: A), so
    that the adapted model equals the original. The other factor is drawn as by PEFT: uniformly within ±1/√fan_in,
    normally for embeddings.

    With `dora` (Liu et al. 2024), W + s·A·B is a direction, and each output has a trained length m: m/‖W + s·A·B‖ · (W
    + s·A·B). It starts as ‖W‖. As in PEFT and section 4.3 of the paper, the norm is a constant in gradients. An output
    whose weights are all zero has no direction, and stays zero.

    Args:
        rank: columns of A and rows of B. Beside a convolution with groups: for each group.
        alpha: s is alpha/rank; default: twice the rank.
        targets: which weights, one pattern or several: ``attention`` (the projections around products of activations),
            a name of a weight or of the module that it belongs to, the end of such a name (``q_proj``), a glob,
            ``type:MatMul,Gemm,Conv,Gather``, ``all``; what begins with ``!`` is left out, with ``!small`` all
            weights of a lower rank. ``c_attn[q,v]`` and ``c_attn[0:768]`` are some of the outputs of a weight, each
            with factors of its own.
        dropout: the share of x that is dropped before A, in training.
        rslora: s is alpha/√rank (Kalajdzievski 2023).
        dora: lengths of their own for directions.
        init: the first factors. None: random, as above. ``pissa`` (Meng et al. 2024): those of the largest singular
            values of W. ``olora`` (Büyükakyüz 2024): the first of its QR decomposition. Their product is subtracted
            again, so that the model starts unchanged. Matrices of floats only.
        train_also: weights that train as a whole beside the adapters, as `attach` takes them: ``*.bias``, ``head.*``.
        seed: decides the first factors.

    Raises:
        BadInput: a number out of its range.
    """

    rank: int = 8
    alpha: float | None = None
    targets: str | Sequence[str] = ATTENTION
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    train_also: Sequence[str] = ()
    seed: int = 0
    init: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None and self.init not in INITIAL:
            raise UnknownName(str(self.init), INITIAL, "initial form of adapters")

    @property
    def form(self) -> str:
        """``lora`` or ``dora``."""
        return DORA if self.dora else LORA

    @property
    def strength(self) -> float:
        """The `alpha`, given or not."""
        return 2.0 * self.rank if self.alpha is None else float(self.alpha)

    @property
    def scale(self) -> float:
        """The factor s of A·B."""
        return self.strength / (math.sqrt(self.rank) if self.rslora else self.rank)


@checked_fields
@dataclass(frozen=True)
class VeRA(_Asked):
    """Vector-based random adaptation (Kopiczko et al. 2023): W + (A·diag(d))·(B·diag(b)) with trained d and b.

    A and B are random and constant, and all adapted weights share them: each uses as many rows of A and columns of B as
    it has inputs and outputs. They equal those that PEFT draws from the same seed. The vector b starts with zeros, so
    that the adapted model equals the original.

    Args:
        rank: the length of d. It may be larger than that of a weight, since few numbers train.
        targets: as of `LoRA`, of matrices that are multiplied from the left (Linear layers).
        dropout: the share of x that is dropped before A, in training.
        d_initial: what d begins with.
        train_also: weights that train as a whole beside the adapters.
        seed: decides A and B (PEFT's ``projection_prng_key``).

    Raises:
        BadInput: a number out of its range.
    """

    form: ClassVar[str] = VERA
    rank: int = 256
    targets: str | Sequence[str] = ATTENTION
    dropout: float = 0.0
    d_initial: float = 0.1
    train_also: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.d_initial) or self.d_initial == 0:
            raise BadInput(f"d_initial must be a number other than 0, by which b would never move: {self.d_initial}")
        if not 0 <= self.seed < 1 << 32:
            raise BadInput(f"the seed of VeRA is a whole number of 32 bits, not {self.seed}")


@dataclass(frozen=True)
class _Factors(_Scaled):
    """Adapters of products of factors, with the settings that they share."""

    rank: int = 8
    alpha: float | None = None
    targets: str | Sequence[str] = ATTENTION
    train_also: Sequence[str] = ()
    seed: int = 0


@checked_fields
@dataclass(frozen=True)
class LoHa(_Factors):
    """Low-rank Hadamard products (Hyeon-Woo et al. 2022): W + s·(W₁ₐ·W₁ᵦ)∘(W₂ₐ·W₂ᵦ) with four trained factors.

    The change has a rank of up to rank². It is computed as a whole matrix, in each step. W₂ᵦ starts with zeros.

    Args:
        rank: of each of the two products.
        alpha: s is alpha/rank; default: 1.
        targets: as of `LoRA`, of linear layers and convolutions.
        train_also: weights that train as a whole beside the adapters.
        seed: decides the first factors.

    Raises:
        BadInput: a number out of its range.
    """

    form: ClassVar[str] = LOHA


@checked_fields
@dataclass(frozen=True)
class LoKr(_Factors):
    """Kronecker products (Yeh et al. 2024): W + s·W₁⊗W₂ with trained W₁ and W₂.

    W₂ is a product of two factors where these are smaller. W₁ starts with zeros.

    Args:
        rank: of W₂, or of its factors.
        alpha: s is alpha/rank; default: 1.
        targets: as of `LoRA`, of linear layers and convolutions.
        decompose_both: W₁ is a product as well, where that is smaller.
        decompose_factor: rows and columns of W₁, if they divide those of W; -1: near their square roots.
        train_also: weights that train as a whole beside the adapters.
        seed: decides the first values.

    Raises:
        BadInput: a number out of its range.
    """

    form: ClassVar[str] = LOKR
    decompose_both: bool = False
    decompose_factor: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decompose_factor != -1 and self.decompose_factor < 1:
            raise BadInput(f"decompose_factor must be -1 or a number from 1 on, not {self.decompose_factor}")

    @property
    def options(self) -> dict[str, int]:
        """Settings of PEFT that the shapes of tensors depend on."""
        return {"decompose_both": int(self.decompose_both), "decompose_factor": self.decompose_factor}


@checked_fields
@dataclass(frozen=True)
class IA3(_Asked):
    """(IA)³ (Liu et al. 2022): each output of a layer, or each input, is multiplied by a trained number, first 1.

    Args:
        targets: weights whose outputs are scaled, after the bias: keys and values in the paper. As of `LoRA`, of linear
            layers and convolutions.
        feedforward: weights whose inputs are scaled: the second one of feedforward blocks in the paper.
        train_also: weights that train as a whole beside the adapters.

    Raises:
        BadInput: no targets.
    """

    form: ClassVar[str] = IA_3
    targets: str | Sequence[str] = ATTENTION
    feedforward: str | Sequence[str] = ()
    train_also: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.feedforward, str):
            object.__setattr__(self, "feedforward", (self.feedforward,))

    @property
    def patterns(self) -> list[str]:
        """The `targets` and `feedforward`, one by one."""
        return [*super().patterns, *self.feedforward]


@checked_fields
@dataclass(frozen=True)
class ChosenOutputs(_Asked):
    """Some outputs of weights, which train as they are; the others are constant.

    Each node that reads W is extended to y + (x·A)·B: A, first zeros, is the change of the chosen outputs, and B puts
    it in their places. So the gradient of W is computed for these outputs alone.

    Args:
        outputs: the numbers of the outputs that train, by the names of the weights: of linear layers, and of
            convolutions without groups.
        train_also: weights that train as a whole.
    """

    form: ClassVar[str] = CHANNELS
    outputs: Mapping[str, Sequence[int]]
    train_also: Sequence[str] = ()

    @property
    def patterns(self) -> list[str]:
        """The names of the weights."""
        return list(self.outputs)


#: The adapters that there are.
Adapter = LoRA | VeRA | LoHa | LoKr | IA3 | ChosenOutputs
