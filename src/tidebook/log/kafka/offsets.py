"""Start and end offsets of partitions, from their leaders.

While a request is in flight, later calls wait and share the next one: a call may only use a request that is sent after
the call began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from tidebook.core.errors import NotFound, TidebookError, Unavailable
from tidebook.kafka.client import new_consumer
from tidebook.kafka.errors import TRANSIENT, failed, kafka_error
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.topics import closed_error
from tidebook.runtime.micro_batcher import MicroBatcher

Which = Literal["start", "end"]
#: A topic, a partition, and which of its two offsets.
OffsetRequest = tuple[str, int, Which]

_OFFSETS: Mapping[Which, int] = {"start": OFFSET_BEGINNING, "end": OFFSET_END}
_RETRY_S = 0.02
_REQUESTS_MAX = 10_000


class Offsets:
    """Fetches offsets with one client in its own thread, many at a time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.request_timeout_ms / 1000
        self._thread = ThreadPoolExecutor(1, "tidebook-kafka-offsets")
        self._client: Consumer | None = None
        self._closed = False
        #: Returns an offset that the leader has reported after the call began.
        self.fetch = MicroBatcher[OffsetRequest, int](self._fetch_in_thread, group_max=_REQUESTS_MAX)

    async def _fetch_in_thread(self, requests: Sequence[OffsetRequest]) -> list[int | BaseException]:
        if self._closed:
            raise closed_error()
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._fetch, set(requests))
        return [found[request] for request in requests]

    async def reconnect(self) -> None:
        """Discard the client, which may keep asking a broker that no longer leads a partition."""
        if not self._closed:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)

    async def close(self) -> None:
        """Close the client."""
        self._closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        await asyncio.shield(closing)  # if the caller is cancelled, the thread still closes it

    # ---- in the client's thread

    def _fetch(self, unknown: set[OffsetRequest]) -> dict[OffsetRequest, int | TidebookError]:
        """Fetch the starts in one request and the ends in another; retry those whose leader is being elected."""
        results: dict[OffsetRequest, int | TidebookError] = {}
        deadline = time.monotonic() + self._timeout_s
        while unknown:
            for which, offset in _OFFSETS.items():
                requests = [TopicPartition(*each[:2], offset) for each in unknown if each[2] == which]
                for found, error in self._request(requests, deadline) if requests else ():
                    if error is None:
                        results[found.topic, found.partition, which] = found.offset
                    elif error.code() not in TRANSIENT or time.monotonic() >= deadline:
                        where = f"{found.topic}/{found.partition}"
                        results[found.topic, found.partition, which] = failed(
                            error, f"fetching the {which} offset of {where}"
                        )
            unknown -= results.keys()
            if unknown:
                time.sleep(_RETRY_S)
        if any(isinstance(result, NotFound | Unavailable) for result in results.values()):
            # Discard the client: it may cache that the topic does not exist, or request a leader that is down until its
            # metadata expires, minutes after another broker was elected.
            self._close()
        return results

    def _request(
        self, requests: list[TopicPartition], deadline: float
    ) -> list[tuple[TopicPartition, KafkaError | None]]:
        """Return each partition with its offset or with an error."""
        if self._client is None:
            self._client = new_consumer(self._settings, fetch_wait_ms=5)
        try:
            answers = self._client.offsets_for_times(requests, timeout=max(0.1, deadline - time.monotonic()))
            return [(answer, answer.error) for answer in answers]
        except KafkaException as error:
            return [(request, kafka_error(error)) for request in requests]

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
