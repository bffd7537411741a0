"""Start and end offsets of partitions, from their leaders.

One request is in flight, and the next one collects the calls that arrive meanwhile: a call may share only a request
that was not yet sent when the call began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from tidebook.core.errors import NotFound, TidebookError
from tidebook.kafka.client import new_consumer
from tidebook.kafka.errors import TRANSIENT, failed, kafka_error
from tidebook.kafka.settings import KafkaSettings

Which = Literal["start", "end"]
#: A topic, a partition, and which of its two offsets.
OffsetRequest = tuple[str, int, Which]

_RETRY_S = 0.02


class Offsets:
    """Fetches offsets with one client in its own thread, many at a time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.request_timeout_ms / 1000
        self._thread = ThreadPoolExecutor(1, "tidebook-kafka-offsets")
        self._client: Consumer | None = None
        self._pending: dict[OffsetRequest, asyncio.Future[int]] = {}
        self._fetching: asyncio.Task[None] | None = None

    async def fetch(self, topic: str, partition: int, which: Which) -> int:
        """Return the current offset: the leader is asked after this call has begun."""
        request = (topic, partition, which)
        future = self._pending.get(request)
        if future is None:
            future = self._pending[request] = asyncio.get_running_loop().create_future()
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch_pending())
        return await asyncio.shield(future)

    async def _fetch_pending(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            requested, self._pending = self._pending, {}
            found: Mapping[OffsetRequest, int | BaseException]
            try:
                found = await loop.run_in_executor(self._thread, self._fetch, list(requested))
            except BaseException as error:  # every caller must get the error
                found = dict.fromkeys(requested, error)
            for request, future in requested.items():
                _resolve(future, found[request])
        self._fetching = None

    async def close(self) -> None:
        """Close the client."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    # ---- in the client's thread

    def _fetch(self, requests: list[OffsetRequest]) -> dict[OffsetRequest, int | TidebookError]:
        """Fetch the starts in one request and the ends in another; retry those whose leader is being elected."""
        results: dict[OffsetRequest, int | TidebookError] = {}
        deadline = time.monotonic() + self._timeout_s
        while requests:
            retry = []
            for which in ("start", "end"):
                requests_of_kind = [request for request in requests if request[2] == which]
                retry += self._fetch_kind(requests_of_kind, results, deadline) if requests_of_kind else []
            requests = retry
            if requests:
                time.sleep(_RETRY_S)
        if any(isinstance(result, NotFound) for result in results.values()):
            self._close()  # a client may keep this answer long after the topic was created again
        return results

    def _fetch_kind(
        self, requests: list[OffsetRequest], results: dict[OffsetRequest, int | TidebookError], deadline: float
    ) -> list[OffsetRequest]:
        offset = OFFSET_BEGINNING if requests[0][2] == "start" else OFFSET_END
        by_partition = {(topic, partition): (topic, partition, which) for topic, partition, which in requests}
        retry = []
        try:
            found = self._connected().offsets_for_times(
                [TopicPartition(topic, partition, offset) for topic, partition in by_partition],
                timeout=max(0.1, deadline - time.monotonic()),
            )
        except KafkaException as error:
            if kafka_error(error).code() in TRANSIENT and time.monotonic() < deadline:
                return requests
            results.update({q: failed(error, f"asking for the {q[2]} of {q[0]}/{q[1]}") for q in requests})
            return []
        for each in found:
            request = by_partition[each.topic, each.partition]
            if each.error is None:
                results[request] = each.offset
            elif each.error.code() in TRANSIENT and time.monotonic() < deadline:
                retry.append(request)
            else:
                results[request] = failed(each.error, f"asking for the {request[2]} of {each.topic}/{each.partition}")
        return retry

    def _connected(self) -> Consumer:
        if self._client is None:
            self._client = new_consumer(self._settings, fetch_wait_ms=5)
        return self._client

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _resolve(future: asyncio.Future[int], result: int | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
        future.exception()  # the caller may have been cancelled
    else:
        future.set_result(result)
