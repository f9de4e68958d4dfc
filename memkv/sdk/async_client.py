"""The asynchronous client of a server: the blocking one's methods, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from memkv.sdk import key_requests, plans, questions, requests, store_plans, store_requests
from memkv.sdk.binding import (
    AsyncResource,
    async_converses,
    async_follows,
    async_lists,
    async_sends,
    async_streams,
)
from memkv.sdk.call import Call
from memkv.sdk.http import Endpoint, failure, request_arguments
from memkv.sdk.replies import Attempts, decode_event, decode_reply, error_of
from memkv.wire import QueryEvent

T = TypeVar("T")


class AsyncCollections(AsyncResource):
    """`client.collections`"""

    create = async_sends(requests.create_collection)
    get_or_create = async_sends(requests.get_or_create_collection)
    list = async_lists(requests.list_collections)
    retrieve = async_sends(requests.get_collection)
    update = async_sends(requests.update_collection)
    delete = async_sends(requests.delete_collection)


class AsyncDocuments(AsyncResource):
    """`client.documents`"""

    create = async_follows(plans.create_document)
    upsert = async_follows(plans.upsert_document)
    upload = async_sends(requests.upload_documents)
    estimate = async_sends(requests.estimate_documents)
    list = async_lists(requests.list_documents)
    retrieve = async_sends(requests.get_document)
    delete = async_sends(requests.delete_document)


class AsyncJobs(AsyncResource):
    """`client.jobs`"""

    list = async_lists(requests.list_jobs)
    retrieve = async_sends(requests.get_job)
    wait = async_follows(plans.wait_for_job)
    cancel = async_sends(requests.cancel_job)
    retry = async_sends(requests.retry_job)


class AsyncStore(AsyncResource):
    """`client.store`"""

    stats = async_sends(store_requests.store_stats)
    files = async_lists(store_requests.list_files)
    file = async_sends(store_requests.get_file)
    quarantine = async_sends(store_requests.quarantine)
    purge_quarantine = async_follows(store_plans.purge_quarantine)
    gc = async_follows(store_plans.collect_garbage)
    evict = async_follows(store_plans.evict)
    compact = async_follows(store_plans.compact)
    create_snapshot = async_follows(store_plans.create_snapshot)
    snapshots = async_sends(store_requests.list_snapshots)
    delete_snapshot = async_sends(store_requests.delete_snapshot)
    verify = async_follows(store_plans.verify_store)
    warm = async_follows(store_plans.warm_store)
    reprefill = async_follows(store_plans.reprefill_store)
    export = async_follows(store_plans.export_store)
    import_ = async_follows(store_plans.import_store)
    archives = async_sends(store_requests.list_archives)
    delete_archive = async_sends(store_requests.delete_archive)
    check_snapshot = async_sends(store_requests.check_snapshot)
    restore_snapshot = async_follows(store_plans.restore_snapshot)


class AsyncKeys(AsyncResource):
    """`client.keys`"""

    create = async_sends(key_requests.create_key)
    list = async_lists(key_requests.list_keys)
    retrieve = async_sends(key_requests.get_key)
    update = async_sends(key_requests.update_key)
    delete = async_sends(key_requests.delete_key)
    rotate = async_sends(key_requests.rotate_key)


class AsyncMemKV(AsyncResource):
    """A client of a memkv server; arguments and errors as of `MemKV`, with an `httpx2.AsyncClient`."""

    info = async_sends(requests.info)
    ready = async_sends(requests.ready)
    search = async_sends(questions.search)
    query = async_sends(questions.query)
    query_stream = async_streams(questions.query)
    conversation = async_converses(questions.conversation)

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int = 2,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        endpoint = Endpoint.of(base_url, api_key, timeout, max_retries)
        sender = _AsyncHTTPSender(endpoint, http_client)
        super().__init__(sender)
        self.collections = AsyncCollections(sender)
        self.documents = AsyncDocuments(sender)
        self.jobs = AsyncJobs(sender)
        self.store = AsyncStore(sender)
        self.keys = AsyncKeys(sender)

    async def close(self) -> None:
        """Closes the connections."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _AsyncHTTPSender:
    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient | None) -> None:
        self._endpoint = endpoint
        self._owned = client is None
        self._client = client or httpx2.AsyncClient(**endpoint.client_arguments())

    async def send(self, call: Call[T]) -> T:
        response = await self._exchange(call, stream=False)
        return decode_reply(call, response.status_code, response.headers, response.content)

    async def open_stream(self, call: Call[Any]) -> _AsyncHTTPEvents:
        response = await self._exchange(call, stream=True)
        if response.status_code != 200:
            try:
                content = await response.aread()
            finally:
                await response.aclose()
            raise error_of(response.status_code, response.headers, content)
        return _AsyncHTTPEvents(response, self._endpoint)

    async def close(self) -> None:
        if self._owned:
            await self._client.aclose()

    async def _exchange(self, call: Call[Any], *, stream: bool) -> httpx2.Response:
        """The answer of the first attempt that stands."""
        arguments = request_arguments(call, stream=stream)
        attempts = Attempts(call, self._endpoint.max_retries)
        while True:
            try:
                response = await self._client.send(self._client.build_request(**arguments), stream=stream)
            except httpx2.HTTPError as error:
                delay = attempts.after_failure()
                if delay is None:
                    raise failure(error, self._endpoint) from error
            else:
                delay = attempts.after_answer(response.status_code, response.headers)
                if delay is None:
                    return response
                await response.aclose()
            await asyncio.sleep(delay)


class _AsyncHTTPEvents:
    """The events of one open response."""

    def __init__(self, response: httpx2.Response, endpoint: Endpoint) -> None:
        self._response = response
        self._endpoint = endpoint

    async def __aiter__(self) -> AsyncIterator[QueryEvent]:
        try:
            async for sent in httpx2.EventSource(self._response, max_event_size=None):
                event = decode_event(sent.event, sent.data)
                if event is not None:
                    yield event
        except httpx2.HTTPError as error:
            raise failure(error, self._endpoint) from error
        except httpx2.StreamError:  # closed while it was read: the end
            return

    async def aclose(self) -> None:
        await self._response.aclose()
