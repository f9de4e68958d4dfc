"""Clients: `MemKV` and `AsyncMemKV` of a server, `MemKV.local` of a memory in this process."""

from memkv.sdk.async_client import AsyncMemKV
from memkv.sdk.client import MemKV
from memkv.sdk.conversation import Conversation
from memkv.sdk.pages import AsyncItems, Items
from memkv.sdk.streaming import AnswerStream, AsyncAnswerStream

__all__ = [
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncItems",
    "AsyncMemKV",
    "Conversation",
    "Items",
    "MemKV",
]
