"""The text of an answer as it grows, and where a stop text ends it."""

from __future__ import annotations

from collections.abc import Sequence

from memkv.engine.request import TextDecoder


class AnswerText:
    """Decodes tokens and holds back what may still turn out to be a stop text.

        decoded   The answer is 42.\\nQue            stops: "\\nQuestion:"
        released  The answer is 42.
        held                       \\nQue            a head of the stop text: no consumer sees it yet

    What `push` and `finish` return, put together, is the answer: no part of a stop text and nothing behind.
    """

    def __init__(self, decoder: TextDecoder | None, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False  # a stop text was found

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        return "" if self._decoder is None else self._add(self._decoder.push(token_id), last=False)

    def finish(self) -> str:
        """The rest, when no token follows."""
        return "" if self._decoder is None else self._add(self._decoder.finish(), last=True)

    def _add(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper head of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
