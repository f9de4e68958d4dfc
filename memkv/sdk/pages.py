"""Lists that read one page after another as they are iterated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from memkv.sdk.call import Call, Listing
from memkv.wire import Page

T = TypeVar("T")


class Items(Generic[T]):
    """One page, and through iteration everything from it on.

    Attributes:
        page: `data`, `has_more`, `first_id`, `last_id` of this page.
    """

    def __init__(self, listing: Listing[T], page: Page[T], send: Callable[[Call[Any]], Any]) -> None:
        self._listing = listing
        self._send = send
        self.page = page

    @classmethod
    def read(cls, listing: Listing[T], send: Callable[[Call[Any]], Any]) -> Items[T]:
        return cls(listing, send(listing.call), send)

    @property
    def data(self) -> list[T]:
        return self.page.data

    @property
    def has_more(self) -> bool:
        return self.page.has_more

    def next_page(self) -> Items[T] | None:
        """None after the last one."""
        if not self.page.has_more:
            return None
        return Items.read(self._listing.after(self.page), self._send)

    def __iter__(self) -> Iterator[T]:
        items: Items[T] | None = self
        while items is not None:
            yield from items.page.data
            items = items.next_page()


class AsyncItems(Generic[T]):
    """The same: `await` it for the first page, or `async for` over everything."""

    def __init__(
        self, listing: Listing[T], send: Callable[[Call[Any]], Awaitable[Any]], page: Page[T] | None = None
    ) -> None:
        self._listing = listing
        self._send = send
        self._page = page

    def __await__(self) -> Generator[Any, None, AsyncItems[T]]:
        return self._read().__await__()

    @property
    def page(self) -> Page[T]:
        assert self._page is not None, "await the list before looking at its page"
        return self._page

    @property
    def data(self) -> list[T]:
        return self.page.data

    @property
    def has_more(self) -> bool:
        return self.page.has_more

    async def next_page(self) -> AsyncItems[T] | None:
        """None after the last one."""
        if not (await self._read()).page.has_more:
            return None
        return await AsyncItems(self._listing.after(self.page), self._send)

    async def __aiter__(self) -> AsyncIterator[T]:
        items: AsyncItems[T] | None = await self._read()
        while items is not None:
            for item in items.page.data:
                yield item
            items = await items.next_page()

    async def _read(self) -> AsyncItems[T]:
        if self._page is None:
            self._page = await self._send(self._listing.call)
        return self
