"""Text to token ids and back, where only templates may speak the model's control tokens.

A document that contains `<|im_end|>` contains ten characters, not the end of a turn. Two Rust tokenizers are
derived from the model's own, each frozen after that (the shared one would carry state between threads):

    plain      every added token that shows is ordinary text, nothing is added, nothing put in front
    inner      control tokens are recognised, nothing is added, nothing put in front

"Nothing put in front": sentencepiece-like tokenizers begin each text with a blank, which is right for the
start of a prompt and wrong for pieces that stand in the middle of one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

Messages = Sequence[dict[str, str]]


class ModelTokenizer(Protocol):
    """What is used of a transformers fast tokenizer."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> Any: ...

    def get_chat_template(self) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class TokenizerState(msgspec.Struct, frozen=True):
    """What a `PlainTokenizer` is made of, so that another process can make the same.

    Attributes:
        spec: a Rust tokenizer in its JSON form.
        control: ids of the control tokens.
    """

    spec: str
    control: frozenset[int]


class PlainTokenizer:
    """Reads texts, and knows no template. Safe to use from several threads."""

    def __init__(self, state: TokenizerState) -> None:
        self.state = state
        self._plain = Tokenizer.from_str(state.spec)
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: nothing in it is a control token, and no token is added."""
        return [token_id for encoding in self._encodings(text) for token_id in encoding[0].ids]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode` and, for each, the span of `text` (in code points) that it came from.

        Tokens that share one character, as the bytes of an emoji, have spans that overlap.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for encoding, start in self._encodings(text):
            ids.extend(encoding.ids)
            spans.extend((start + first, start + last) for first, last in encoding.offsets)
        return ids, spans

    def count_all(self, texts: Iterable[str]) -> list[int]:
        """How many tokens `encode` gives for each text; quick for very many short ones."""
        counts: list[int] = []
        for batch in _batches(texts):
            encoded = self._plain.encode_batch_fast(batch, add_special_tokens=False)
            counts.extend(len(encoding.ids) for encoding in encoded)
        return counts

    def _encodings(self, text: str) -> Iterable[tuple[Encoding, int]]:
        """Encodings of consecutive slices of `text` and where each begins."""
        starts = _slice_starts(text)
        slices = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        at = 0
        for batch in _batches(slices):
            for encoding, piece in zip(
                self._plain.encode_batch(batch, add_special_tokens=False), batch, strict=True
            ):
                yield from self._without_control(encoding, piece, at)
                at += len(piece)

    def _without_control(self, encoding: Encoding, text: str, at: int) -> Iterable[tuple[Encoding, int]]:
        """Takes apart what the vocabulary itself merged into a control token (a whole word may be one)."""
        waiting = [(encoding, text, at)]
        while waiting:
            encoding, text, at = waiting.pop()
            cuts = self._control_cuts(encoding)
            if not cuts:
                yield encoding, at
                continue
            edges = [0, *cuts, len(text)]
            for start, end in reversed(list(itertools.pairwise(edges))):
                piece = text[start:end]
                waiting.append((self._plain.encode(piece, add_special_tokens=False), piece, at + start))

    def _control_cuts(self, encoding: Encoding) -> list[int]:
        """Where to cut the text so that none of its control tokens can form."""
        if self.state.control.isdisjoint(encoding.ids):
            return []
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [
            start + 1
            for token_id, (start, end) in spans
            if token_id in self.state.control and end - start > 1
        ]


class TextTokenizer(PlainTokenizer):
    """The text side of a model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._chat = tokenizer
        backend = tokenizer.backend_tokenizer
        spec = json.loads(backend.to_str())
        self._inner = Tokenizer.from_str(_derived(spec))
        for token in spec["added_tokens"]:
            token["special"] = bool(token["content"].strip()) or token["special"]
        unknown = spec["model"].get("unk_token")
        control = frozenset(
            token["id"] for token in spec["added_tokens"] if token["special"] and token["content"] != unknown
        )
        super().__init__(TokenizerState(_derived(spec), control))
        self._start_ids = _start_ids(backend)
        self._byte_ids = frozenset(
            token_id for token, token_id in backend.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)
        )

    @property
    def start_ids(self) -> list[int]:
        """What the model's tokenizer puts in front of a text that no template wraps (BOS, or nothing)."""
        return list(self._start_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.chat_template)

    def encode_template(self, text: str) -> list[int]:
        """Token ids of a piece of a rendered template, where control tokens are what they say."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Messages) -> str | None:
        """The chat template over `messages` up to the answer's beginning; None where it refuses them.

        The rendering depends on nothing but its arguments: templates that print the date get a fixed one,
        or every prefix would be stale the next day. Models that may think first are told not to.
        """
        try:
            rendered = self._chat.apply_chat_template(
                list(messages),
                chat_template=_FIXED_CLOCK + self._chat.get_chat_template(),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string=_FIXED_DATE,
            )
        except (TemplateError, ValueError, TypeError):  # what templates raise, and what raises without one
            return None
        return str(rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, without control tokens; NUL, which no text may hold, becomes U+FFFD."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True).replace("\0", _REPLACEMENT)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a lone byte of a byte-fallback vocabulary."""
        return token_id in self._byte_ids


class StreamDecoder:
    """Token ids to text as they come, never half a character.

    What `push` and `finish` return, joined, is `TextTokenizer.decode` of all ids. Text is held back while it
    may still change: after bytes that do not yet make a character.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # [context: already told][pending: not yet told]
        self._told = 0  # number of context ids
        self._context = ""  # text of the context ids

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often empty."""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._context):
            return ""
        return self._tell(text)

    def finish(self) -> str:
        """What is left when no more tokens come; incomplete bytes become U+FFFD."""
        return self._tell(self._tokenizer.decode(self._ids))

    def _tell(self, text: str) -> str:
        new = text[len(self._context) :]
        self._ids = self._ids[self._told :]  # what was pending is the context of what follows
        self._told = len(self._ids)
        self._context = self._tokenizer.decode(self._ids)
        return new


_REPLACEMENT = "\ufffd"
_FIXED_DATE = "01 Jan 2025"
# Hides the function of the same name that transformers gives to templates.
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}" + _FIXED_DATE + "{%- endmacro -%}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SLICE = 8_192  # characters; above that encoding costs more than linear time and memory
_BATCH = 2_048
_SEARCH = 512


def _derived(spec: dict[str, Any]) -> str:
    """The JSON form of a tokenizer that begins texts with nothing of its own."""
    return json.dumps(_without_prefix(spec) | {"post_processor": None, "truncation": None, "padding": None})


def _without_prefix(spec: Any) -> Any:
    """Removes whatever puts a blank in front of a text: normaliser, pre-tokenizer."""
    if isinstance(spec, list):
        return [_without_prefix(part) for part in spec if _kind(part) != "Prepend"]
    if not isinstance(spec, dict):
        return spec
    if _kind(spec.get("normalizer")) == "Prepend":
        spec = spec | {"normalizer": None}
    if _kind(spec) == "Metaspace":
        return spec | {"prepend_scheme": "never"}
    if _kind(spec) == "ByteLevel":
        return spec | {"add_prefix_space": False}
    nested = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    return {key: _without_prefix(value) if key in nested else value for key, value in spec.items()}


def _kind(part: Any) -> str:
    return str(part.get("type", "")) if isinstance(part, dict) else ""


def _start_ids(backend: Tokenizer) -> list[int]:
    """The ids that the tokenizer adds before a text, by comparing with and without."""
    with_added = backend.encode("a", add_special_tokens=True).ids
    bare = backend.encode("a", add_special_tokens=False).ids
    for start in range(len(with_added) - len(bare) + 1):
        if with_added[start : start + len(bare)] == bare:
            return list(with_added[:start])
    return []


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == _BATCH or size > _BATCH * 256:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _slice_starts(text: str) -> list[int]:
    """Where to cut a long text for encoding: before a blank between two words, where tokens end anyway."""
    starts = [0]
    while len(text) - starts[-1] > _SLICE:
        end = starts[-1] + _SLICE
        blank = _WORD_GAP.search(text, end - _SEARCH, end)
        starts.append(blank.start() + 1 if blank else end)
    return starts


_WORD_GAP = re.compile(r"[^\s] (?=[^\s])")
