"""Files beside a tokenizer: special tokens, the template of conversations, and limits of the model.

The template (``tokenizer_config.json`` or ``chat_template.jinja``) is a program by strangers. A child process with
limits on memory and time renders it, in the sandbox of jinja2, which lets templates reach no attribute that could
run anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxgrad.errors import BadInput, reason_of
from onnxgrad.files import read_text
from onnxgrad.training.data.tokenizer_file import run_bounded, with_prelude

#: Bytes of a file beside the tokenizer; seconds and bytes of address space to render a set of conversations.
_LARGEST, _PATIENCE, _MEMORY = 1 << 24, 60, 1 << 30
_SECONDS_PER_BYTE = 1e-5
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
#: Ends of a text, where no file names one.
_ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_RENDER = with_prelude(
    "global jinja2; import jinja2, jinja2.sandbox, jinja2.ext",
    """
import datetime, json, os.path

class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def fail(message):
    raise jinja2.TemplateError(message)

def as_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

number = 0
try:
    template, special, rows = json.loads(text)
    extensions = [Generation, jinja2.ext.loopcontrols]
    world = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    world.filters["tojson"] = as_json
    world.globals.update(raise_exception=fail, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    compiled = world.from_string(template)

    def render(messages, tools, prompt=False):
        return compiled.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **special)

    found = []
    for number, (messages, tools, first, prompt) in enumerate(rows):
        whole, spans = render(messages, tools, prompt), []
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at < first:
                continue
            before = render(messages[:at], tools, True) if at else ""
            after = render(messages[: at + 1], tools)
            begin = len(os.path.commonprefix([whole, before]))
            spans.append([begin, max(begin, len(os.path.commonprefix([whole, after])))])
        found.append([whole, spans])
    sys.stdout.write(json.dumps(found))
except BaseException as error:
    refuse(f"conversation {number}: {error}")
""",
)


@dataclass(frozen=True)
class Manners:
    """The files beside a tokenizer.

    Attributes:
        special: special tokens by their names, as ``eos_token``.
        template: of conversations; empty without one.
        positions: the most tokens of a row that the model takes; None where no file says it.
        start: the token that a decoder begins with; None where no file says it.
    """

    special: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    positions: int | None = None
    start: int | None = None

    @classmethod
    def beside(cls, tokenizer: Path) -> Manners:
        """The files in the folder of `tokenizer`. Raises BadInput for one that cannot be read."""
        folder = tokenizer.absolute().parent
        own, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
        own = {**_json(folder / "special_tokens_map.json"), **own}
        tokens = {n: t.get("content") if isinstance(t, Mapping) else t for n in _NAMES if (t := own.get(n))}
        template = own.get("chat_template")
        if isinstance(template, list):  # of several, by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
            template = named.get("default")
        template = _text(folder / "chat_template.jinja") or template
        start = {**model, **_json(folder / "generation_config.json")}.get("decoder_start_token_id")
        longest = model.get("max_position_embeddings", model.get("n_positions"))
        return cls(
            {n: t for n, t in tokens.items() if isinstance(t, str)},
            template if isinstance(template, str) else "",
            longest if isinstance(longest, int) else None,
            start if isinstance(start, int) else None,
        )

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Manners:
        """The value from the output of `to_json`."""
        special = {str(n): str(t) for n, t in stored.get("special", {}).items()}
        numbers = {n: stored.get(n) for n in ("positions", "start")}
        return cls(special, str(stored.get("template", "")), **{n: v and int(v) for n, v in numbers.items()})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {n: v for n, v in asdict(self).items() if v not in (None, "", {})}

    def token(self, tokenizer: Any, name: str, known: Sequence[str] = ()) -> int | None:
        """The number of the special token `name`, or of the first of `known` that the tokenizer has."""
        texts = [self.special[name]] if name in self.special else known
        return next((i for text in texts if (i := tokenizer.token_to_id(text)) is not None), None)

    def end(self, tokenizer: Any) -> int | None:
        """The token that ends a text."""
        return self.token(tokenizer, "eos_token", _ENDS)

    def first(self, tokenizer: Any) -> int | None:
        """The token that a decoder begins with, behind an encoder: by default that of padding, as of T5."""
        if self.start is not None or tokenizer is None:
            return self.start
        return self.token(tokenizer, "pad_token", ("<pad>", "[PAD]"))

    def render(self, documents: Sequence[Mapping[str, Any]], where: str) -> list[tuple[str, list[list[int]]]]:
        """The text of each conversation, and the characters [begin, end) of the turns that are learned.

        The text of a document with ``is_prompt`` ends where the assistant's answer begins.

        Raises:
            BadInput: there is no template, or it fails, or jinja2 is missing.
        """
        if not self.template:
            raise BadInput(
                f"{where} has conversations, and no chat template says how they are written\n"
                "  hint: put tokenizer_config.json (or chat_template.jinja) beside the tokenizer.json"
            )
        rows = [[d["messages"], d.get("tools"), d.get("learned_from", 0), d.get("is_prompt", False)] for d in documents]
        try:
            given = json.dumps([self.template, dict(self.special), rows]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{where} has messages that are no JSON: {error}") from error
        try:
            output = run_bounded(_RENDER, given, _MEMORY + 64 * len(given), _PATIENCE + _SECONDS_PER_BYTE * len(given))
        except BadInput as error:
            raise BadInput(f"the chat template fails on {where}: {error}") from error
        if output is None:
            raise BadInput("to render a chat template, install jinja2: pip install 'onnxgrad[train]'")
        return [(text, spans) for text, spans in json.loads(output)]


def _text(path: Path) -> str:
    """The text of a small file; empty if there is none."""
    return read_text(path, _LARGEST) if path.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty if there is none."""
    try:
        found = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {str(path)!r} as JSON: {reason_of(error)}") from error
    if not isinstance(found, dict):
        raise BadInput(f"cannot read {str(path)!r}: it is no object of JSON")
    return found
