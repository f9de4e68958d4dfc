"""The blocking client: of a server over HTTP, or of a memory in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from memkv.config import Config
from memkv.sdk import key_requests, plans, questions, requests, store_plans, store_requests
from memkv.sdk.binding import Resource, Sender, converses, follows, lists, sends, streams
from memkv.sdk.call import Call
from memkv.sdk.http import Endpoint, failure, request_arguments
from memkv.sdk.local import LocalSender
from memkv.sdk.replies import Attempts, decode_event, decode_reply, error_of
from memkv.wire import QueryEvent

T = TypeVar("T")


class Collections(Resource):
    """`client.collections`"""

    create = sends(requests.create_collection)
    get_or_create = sends(requests.get_or_create_collection)
    list = lists(requests.list_collections)
    retrieve = sends(requests.get_collection)
    update = sends(requests.update_collection)
    delete = sends(requests.delete_collection)


class Documents(Resource):
    """`client.documents`"""

    create = follows(plans.create_document)
    upsert = follows(plans.upsert_document)
    upload = sends(requests.upload_documents)
    estimate = sends(requests.estimate_documents)
    list = lists(requests.list_documents)
    retrieve = sends(requests.get_document)
    delete = sends(requests.delete_document)


class Jobs(Resource):
    """`client.jobs`"""

    list = lists(requests.list_jobs)
    retrieve = sends(requests.get_job)
    wait = follows(plans.wait_for_job)
    cancel = sends(requests.cancel_job)
    retry = sends(requests.retry_job)


class Store(Resource):
    """`client.store`"""

    stats = sends(store_requests.store_stats)
    files = lists(store_requests.list_files)
    file = sends(store_requests.get_file)
    quarantine = sends(store_requests.quarantine)
    purge_quarantine = follows(store_plans.purge_quarantine)
    gc = follows(store_plans.collect_garbage)
    evict = follows(store_plans.evict)
    compact = follows(store_plans.compact)
    create_snapshot = follows(store_plans.create_snapshot)
    snapshots = sends(store_requests.list_snapshots)
    delete_snapshot = sends(store_requests.delete_snapshot)
    verify = follows(store_plans.verify_store)
    warm = follows(store_plans.warm_store)
    reprefill = follows(store_plans.reprefill_store)
    export = follows(store_plans.export_store)
    import_ = follows(store_plans.import_store)
    archives = sends(store_requests.list_archives)
    delete_archive = sends(store_requests.delete_archive)
    check_snapshot = sends(store_requests.check_snapshot)
    restore_snapshot = follows(store_plans.restore_snapshot)


class Keys(Resource):
    """`client.keys`"""

    create = sends(key_requests.create_key)
    list = lists(key_requests.list_keys)
    retrieve = sends(key_requests.get_key)
    update = sends(key_requests.update_key)
    delete = sends(key_requests.delete_key)
    rotate = sends(key_requests.rotate_key)


class MemKV(Resource):
    """A client of a memkv server; `MemKV.local` needs none.

    Args:
        base_url: of the server; `MEMKV_URL`, then http://127.0.0.1:8000, by default.
        api_key: the secret of an access key; `MEMKV_API_KEY` by default.
        timeout: seconds without any answer; `MEMKV_TIMEOUT`, then 600, by default.
        max_retries: of requests that may be sent twice.
        http_client: one of your own, for proxies, certificates or tests; you close it.

    Raises:
        ConfigError: the address or the timeout is none.
    """

    info = sends(requests.info)
    ready = sends(requests.ready)
    search = sends(questions.search)
    query = sends(questions.query)
    query_stream = streams(questions.query)
    conversation = converses(questions.conversation)

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int = 2,
        http_client: httpx2.Client | None = None,
    ) -> None:
        endpoint = Endpoint.of(base_url, api_key, timeout, max_retries)
        self._use(_HTTPSender(endpoint, http_client))

    @classmethod
    def local(
        cls,
        path: str | Path = "./memkv-data",
        model: str | None = None,
        *,
        embedder: str | None = None,
        config: Config | None = None,
        on_progress: Callable[[str], None] | None = None,
        models: bool = True,
    ) -> Self:
        """The same client on a memory in this process: no server, no network.

        Args:
            path: the data directory; made if need be. One process at a time holds it.
            model: a directory, an installed name or a hub name; by default the configuration's.
            embedder: likewise.
            config: instead of the environment and the configuration file; its data directory is used.
            on_progress: called with a line of text while models are loaded.
            models: False loads none. What works then is what needs none: lists, deletions, the store.

        Raises:
            StoreLocked, ModelNotFound, UnsupportedModel, DatabaseUnavailable: see `Memory.open`.
        """
        client = cls.__new__(cls)
        client._use(LocalSender.open(path, model, embedder, config, on_progress, models))
        return client

    def close(self) -> None:
        """Closes the connections, or the memory of a local client."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _use(self, sender: Sender) -> None:
        super().__init__(sender)
        self.collections = Collections(sender)
        self.documents = Documents(sender)
        self.jobs = Jobs(sender)
        self.store = Store(sender)
        self.keys = Keys(sender)


class _HTTPSender:
    def __init__(self, endpoint: Endpoint, client: httpx2.Client | None) -> None:
        self._endpoint = endpoint
        self._owned = client is None
        self._client = client or httpx2.Client(**endpoint.client_arguments())

    def send(self, call: Call[T]) -> T:
        response = self._exchange(call, stream=False)
        return decode_reply(call, response.status_code, response.headers, response.content)

    def open_stream(self, call: Call[Any]) -> _HTTPEvents:
        response = self._exchange(call, stream=True)
        if response.status_code != 200:
            with contextlib.closing(response):
                raise error_of(response.status_code, response.headers, response.read())
        return _HTTPEvents(response, self._endpoint)

    def close(self) -> None:
        if self._owned:
            self._client.close()

    def _exchange(self, call: Call[Any], *, stream: bool) -> httpx2.Response:
        """The answer of the first attempt that stands."""
        arguments = request_arguments(call, stream=stream)
        attempts = Attempts(call, self._endpoint.max_retries)
        while True:
            try:
                response = self._client.send(self._client.build_request(**arguments), stream=stream)
            except httpx2.HTTPError as error:
                delay = attempts.after_failure()
                if delay is None:
                    raise failure(error, self._endpoint) from error
            else:
                delay = attempts.after_answer(response.status_code, response.headers)
                if delay is None:
                    return response
                response.close()
            time.sleep(delay)


class _HTTPEvents:
    """The events of one open response."""

    def __init__(self, response: httpx2.Response, endpoint: Endpoint) -> None:
        self._response = response
        self._endpoint = endpoint

    def __iter__(self) -> Iterator[QueryEvent]:
        try:
            for sent in httpx2.EventSource(self._response, max_event_size=None):
                event = decode_event(sent.event, sent.data)
                if event is not None:
                    yield event
        except httpx2.HTTPError as error:
            raise failure(error, self._endpoint) from error
        except httpx2.StreamError:  # closed while it was read: the end
            return

    def close(self) -> None:
        self._response.close()
