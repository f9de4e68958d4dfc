"""Methods of the clients from the functions that build requests: one signature serves both clients.

class Collections(Resource):
    retrieve = sends(get_collection)     # client.collections.retrieve("handbook") -> Collection
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from memkv.errors import MemKVError
from memkv.sdk.call import Call, Listing
from memkv.sdk.conversation import Conversation
from memkv.sdk.pages import AsyncItems, Items
from memkv.sdk.plans import Plan
from memkv.sdk.streaming import AnswerStream, AsyncAnswerStream, AsyncEventSource, EventSource
from memkv.wire import QueryRequest, QueryResponse

P = ParamSpec("P")
T = TypeVar("T")


class Sender(Protocol):
    """How the blocking client reaches a memory."""

    def send(self, call: Call[T]) -> T: ...
    def open_stream(self, call: Call[Any]) -> EventSource: ...
    def close(self) -> None: ...


class AsyncSender(Protocol):
    """How the asynchronous client does."""

    async def send(self, call: Call[T]) -> T: ...
    async def open_stream(self, call: Call[Any]) -> AsyncEventSource: ...
    async def close(self) -> None: ...


class Resource:
    """A noun of the blocking client."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender


class AsyncResource:
    """A noun of the asynchronous client."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender


class _Bound(Generic[P, T]):
    def __init__(self, build: Callable[P, T]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    def bind(self, run: Callable[[T], Any]) -> Any:
        """`build` followed by `run`, with the signature and the docstring of `build`."""

        @functools.wraps(self.build)
        def method(*arguments: P.args, **keywords: P.kwargs) -> Any:
            return run(self.build(*arguments, **keywords))

        return method


class sends(_Bound[P, Call[T]], Generic[P, T]):  # noqa: N801  used like a decorator
    def __get__(self, resource: Resource, owner: type[Resource]) -> Callable[P, T]:
        bound: Callable[P, T] = self.bind(resource._sender.send)
        return bound


class follows(_Bound[P, Plan[T]], Generic[P, T]):  # noqa: N801
    def __get__(self, resource: Resource, owner: type[Resource]) -> Callable[P, T]:
        bound: Callable[P, T] = self.bind(functools.partial(follow, resource._sender))
        return bound


class lists(_Bound[P, Listing[T]], Generic[P, T]):  # noqa: N801
    def __get__(self, resource: Resource, owner: type[Resource]) -> Callable[P, Items[T]]:
        sender = resource._sender
        bound: Callable[P, Items[T]] = self.bind(lambda listing: Items.read(listing, sender.send))
        return bound


class streams(_Bound[P, Call[Any]], Generic[P]):  # noqa: N801
    def __get__(self, resource: Resource, owner: type[Resource]) -> Callable[P, AnswerStream]:
        sender = resource._sender
        bound: Callable[P, AnswerStream] = self.bind(
            lambda call: AnswerStream(lambda: sender.open_stream(call))
        )
        return bound


class converses(_Bound[P, QueryRequest], Generic[P]):  # noqa: N801
    def __get__(self, resource: Resource, owner: type[Resource]) -> Callable[P, Conversation[QueryResponse]]:
        run = functools.partial(follow, resource._sender)
        bound: Callable[P, Conversation[QueryResponse]] = self.bind(lambda wanted: Conversation(wanted, run))
        return bound


class async_sends(_Bound[P, Call[T]], Generic[P, T]):  # noqa: N801
    def __get__(self, resource: AsyncResource, owner: type[AsyncResource]) -> Callable[P, Awaitable[T]]:
        bound: Callable[P, Awaitable[T]] = self.bind(resource._sender.send)
        return bound


class async_follows(_Bound[P, Plan[T]], Generic[P, T]):  # noqa: N801
    def __get__(self, resource: AsyncResource, owner: type[AsyncResource]) -> Callable[P, Awaitable[T]]:
        bound: Callable[P, Awaitable[T]] = self.bind(functools.partial(async_follow, resource._sender))
        return bound


class async_lists(_Bound[P, Listing[T]], Generic[P, T]):  # noqa: N801
    def __get__(self, resource: AsyncResource, owner: type[AsyncResource]) -> Callable[P, AsyncItems[T]]:
        sender = resource._sender
        bound: Callable[P, AsyncItems[T]] = self.bind(lambda listing: AsyncItems(listing, sender.send))
        return bound


class async_streams(_Bound[P, Call[Any]], Generic[P]):  # noqa: N801
    def __get__(self, resource: AsyncResource, owner: type[AsyncResource]) -> Callable[P, AsyncAnswerStream]:
        sender = resource._sender
        bound: Callable[P, AsyncAnswerStream] = self.bind(
            lambda call: AsyncAnswerStream(lambda: sender.open_stream(call))
        )
        return bound


class async_converses(_Bound[P, QueryRequest], Generic[P]):  # noqa: N801
    def __get__(
        self, resource: AsyncResource, owner: type[AsyncResource]
    ) -> Callable[P, Conversation[Awaitable[QueryResponse]]]:
        run = functools.partial(async_follow, resource._sender)
        bound: Callable[P, Conversation[Awaitable[QueryResponse]]] = self.bind(
            lambda wanted: Conversation(wanted, run)
        )
        return bound


def follow(sender: Sender, plan: Plan[T]) -> T:
    """Sends what the plan asks for until it has its result."""
    try:
        call = next(plan)
        while True:
            try:
                reply = sender.send(call)
            except MemKVError as error:
                call = plan.throw(error)
            else:
                call = plan.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


async def async_follow(sender: AsyncSender, plan: Plan[T]) -> T:
    try:
        call = next(plan)
        while True:
            try:
                reply = await sender.send(call)
            except MemKVError as error:
                call = plan.throw(error)
            else:
                call = plan.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result
