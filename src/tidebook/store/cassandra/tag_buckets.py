"""Map times to tag buckets: writers use the fixed part of the history of sizes, readers also the stored buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol

from tidebook.core.buckets import BUCKETS_SETTING, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS, CassandraSession

#: How often a reader of times that are not fixed yet reads the history again; until then it queries the tag's buckets.
READ_EVERY_S: Final = 15.0
#: The result of `bucket_start` before the first bucket.
NONE_BEFORE: Final = -1


class BucketSettings(Protocol):
    """The part of a store that the history needs."""

    def setting(self, name: str) -> Awaitable[str | None]: ...

    def set_setting(self, name: str, value: str, *, expected: str | None) -> Awaitable[bool]: ...


class TagBuckets:
    """The history of bucket sizes, as far as this process knows it.

    Before `fixed_ms` the history never changes, so a cached copy is valid however old it is. No row is written at or
    after `fixed_ms`: a writer with such a row first moves it forward, by the compare-and-set that changes the size.
    """

    def __init__(self, session: CassandraSession, settings: BucketSettings) -> None:
        self._session = session
        self._settings = settings
        self._known = Buckets()
        self._read_s: float | None = None
        self._fixing = asyncio.Lock()

    async def fixed_at(self, time_ms: int) -> Buckets:
        """Return the history for rows up to and including `time_ms`, fixing it first if necessary."""
        if time_ms >= self._known.fixed_ms:
            async with self._fixing:  # concurrent callers in this process find it done
                if time_ms >= self._known.fixed_ms:
                    self._known = await self._fix(time_ms)
        return self._known

    async def _fix(self, time_ms: int) -> Buckets:
        for _ in range(SERIAL_ATTEMPTS):
            text, found = await self._read()
            if time_ms < found.fixed_ms:
                return found
            after = found.fixed(time_ms)
            try:
                if await self._settings.set_setting(BUCKETS_SETTING, encode_buckets(after), expected=text):
                    return after
            except OutcomeUnknown:
                pass  # the next attempt reads the current value
        raise Unavailable("the history of bucket sizes could not be fixed while others changed it: try again")

    async def _read(self) -> tuple[str | None, Buckets]:
        text = await self._settings.setting(BUCKETS_SETTING)
        return text, Buckets() if text is None else decode_buckets(text)

    async def bucket_start(self, tag: str, time_ms: int) -> int:
        """Return the bucket with a tag's rows of a time, from the tag's own buckets where the history is not fixed."""
        now_s = asyncio.get_running_loop().time()
        if time_ms >= self._known.fixed_ms and (self._read_s is None or now_s - self._read_s > READ_EVERY_S):
            self._read_s = now_s
            _, self._known = await self._read()
        if time_ms < self._known.fixed_ms:
            return self._known.start(time_ms)
        found = [row.as_tuple()[0] for row in await self._session.read(cql.TAG_BUCKET_AT, [tag, time_ms])]
        return found[0] if found else NONE_BEFORE
