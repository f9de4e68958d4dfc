"""Questions that follow each other: the client keeps what was said, the server nothing but KV to reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from memkv.sdk import questions
from memkv.sdk.plans import Plan
from memkv.wire import Message, QueryRequest, QueryResponse

R = TypeVar("R")


class Conversation(Generic[R]):
    """One conversation; not for several threads or tasks at the same time.

        conversation = client.conversation("handbook")
        conversation.ask("Who is the principal keeper?")
        conversation.ask("When did she come?")

    Attributes:
        messages: what was said, as `query` takes it; a question that failed is not among them.
    """

    def __init__(self, wanted: QueryRequest, follow: Callable[[Plan[QueryResponse]], R]) -> None:
        self.messages: list[Message] = []
        self._wanted = wanted
        self._follow = follow

    def ask(self, question: str) -> R:
        """The answer, to be awaited where the client is asynchronous. Raises what `query` raises."""
        return self._follow(self._turn(question))

    def _turn(self, question: str) -> Plan[QueryResponse]:
        asked = Message(role="user", content=question)
        wanted = msgspec.structs.replace(self._wanted, messages=[*self.messages, asked])
        response: QueryResponse = yield questions.answer(wanted)
        chunk_ids = [chunk.chunk_id for chunk in response.chunks]
        answer = Message(role="assistant", content=response.answer)
        self.messages += [msgspec.structs.replace(asked, chunk_ids=chunk_ids), answer]
        return response
