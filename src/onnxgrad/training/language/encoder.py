"""The encoder of a model that generates: it reads the source, and the decoder reads its states.

It is a file of its own, as Optimum writes it (``encoder_model.onnx`` beside ``decoder_model_merged.onnx``), or the
decoder's file has both parts, and inputs of each (``input_ids``, ``decoder_input_ids``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import holds_floats
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.columns import Column, Dense
from onnxgrad.training.data.fields import Field, is_float
from onnxgrad.training.data.text import Tokens
from onnxgrad.training.graph.decoder_inputs import DecoderInputs
from onnxgrad.training.language.inputs import inputs_beside, tokens_of
from onnxgrad.training.language.rows import number_tokens


class Encoder:
    """The inputs of a decoder that follow from a source: tokens of a text, or features of speech.

    Args:
        decoder: its inputs.
        model: the file of the encoder; None: the decoder's file has it.
        options: of the runtime.

    Raises:
        BadInput: an input of the encoder does not follow from a source, or the decoder reads something else.
    """

    def __init__(self, decoder: DecoderInputs, model: ir.Model | None, options: Options | None) -> None:
        values = decoder.others if model is None else required_inputs(model.graph)
        self.fields = [Field.of(v) for v in values]
        self.tokens = tokens_of(self.fields)
        features = [f for f in self.fields if is_float(f.dtype)]
        self.features = features[0] if self.tokens is None and len(features) == 1 else None
        if self.tokens is None and self.features is None:
            held = ", ".join(f"{f.name!r} ({f.wanted})" for f in self.fields)
            raise BadInput(f"no input of the encoder takes tokens or features; it takes {held or 'nothing'}")
        known = self._columns([np.zeros(1, np.int64)]).keys()
        self._check("the encoder reads", [f.name for f in self.fields if f.name not in known])
        self.session = None if model is None else Session(model, options)
        self.wanted = decoder.others
        if model is not None:
            states = [v for v in model.graph.outputs if holds_floats(v)]
            own = {v.name for v in model.graph.outputs}
            self.state = next((v.name or "" for v in states if v.shape is None or len(v.shape) == 3), "")
            if not self.state:
                raise BadInput("the encoder has no output of states, floats [N, S, width]")
            others = [v for v in self.wanted if v.name not in own]
            unknown = [v.name or "" for v in others if not holds_floats(v) and not _is_mask(v)]
            self._check("the decoder reads", unknown)

    @classmethod
    def of(cls, decoder: DecoderInputs, model: ir.Model | None, options: Options | None) -> Encoder | None:
        """The encoder of the model; None for a language model without one.

        Raises:
            BadInput: see the class; or there is no file of the encoder, or one that the model does not read.
        """
        names = [v.name or "" for v in decoder.others]
        crossed = [p.input for p in decoder.pasts if p.is_cross]
        if crossed and not decoder.branch:
            raise BadInput(
                f"the model reads {crossed[0]!r}, keys of the encoder's states that no step of it computes\n"
                "  hint: take decoder_model_merged.onnx, or decoder_model.onnx, of the same export"
            )
        if model is None and any("encoder" in name.lower() for name in names):
            raise BadInput(
                f"the model reads {', '.join(map(repr, names))}, the states of an encoder\n"
                "  hint: --encoder encoder_model.onnx (in Python encoder=)"
            )
        if model is not None and not names:
            raise BadInput("an encoder is given, and the model reads no states of one")
        if model is None and not decoder.has_encoder:
            cls._check("the model reads", names)
            return None
        return cls(decoder, model, options)

    @staticmethod
    def _check(what: str, names: Sequence[str]) -> None:
        if names:
            raise BadInput(f"{what} {', '.join(map(repr, names))}, which do not follow from tokens")

    def states(self, sources: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Feeds of the decoder for `sources` of one length: tokens [S], or features."""
        columns = self._columns(sources)
        rows = np.arange(len(sources))
        feeds = {f.name: np.asarray(columns[f.name].take(rows, f)).astype(f.dtype) for f in self.fields}
        if self.session is None:
            return feeds
        found = self.session.run(feeds)
        made = {}
        for value in self.wanted:
            name = value.name or ""
            state = found[name if name in found else self.state]
            is_mask = name not in found and not holds_floats(value)
            assert value.dtype is not None  # of a role
            made[name] = np.ones(state.shape[:2], value.dtype.numpy()) if is_mask else state
        return made

    def _columns(self, sources: Sequence[np.ndarray]) -> dict[str, Column]:
        """Columns for the inputs of the encoder."""
        own = self.tokens or self.features
        assert own is not None  # or it is refused
        first: Column = Dense(np.stack(sources)) if self.tokens is None else Tokens(list(sources), 0)
        return {own.name: first, **inputs_beside(self.fields, *number_tokens(sources), False)}


def _is_mask(value: ir.Value) -> bool:
    return "mask" in (value.name or "").lower() and value.shape is not None and len(value.shape) == 2
