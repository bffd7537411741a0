"""Which bucket a time belongs to: for writers by a history that is fixed, for readers by what is there too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol

from tidebook.core.buckets import BUCKETS_SETTING, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.session import SERIAL_ATTEMPTS, Session

#: How often a reader beyond what is fixed looks whether more is: until then it asks for a tag's buckets.
LOOK_EVERY_S: Final = 15.0
#: Before all buckets.
NONE_BEFORE: Final = -1


class Settings(Protocol):
    """As much of a store as the history needs."""

    def setting(self, name: str) -> Awaitable[str | None]: ...

    def set_setting(self, name: str, value: str, *, expected: str | None) -> Awaitable[bool]: ...


class TagBuckets:
    """The history of bucket sizes, as far as this process knows it.

    Below `fixed_ms` it never changes, so what is known of that holds however long ago it was read. No row is written
    at or past it: who has one fixes more first, in the same compare-and-set that a change of the size goes through.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._known = Buckets()
        self._looked_s: float | None = None
        self._fixing = asyncio.Lock()

    async def fixed_at(self, time_ms: int) -> Buckets:
        """The history for rows up to and with a time of the log, which nobody changes any more."""
        if time_ms >= self._known.fixed_ms:
            async with self._fixing:  # the others of this process find it done
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
                pass  # what holds now is asked for again
        raise Unavailable("the history of bucket sizes could not be fixed, for others change it too: try again")

    async def _read(self) -> tuple[str | None, Buckets]:
        text = await self._settings.setting(BUCKETS_SETTING)
        return text, Buckets() if text is None else decode_buckets(text)

    async def begin(self, tag: str, time_ms: int) -> int:
        """The bucket that has a tag's rows of a time. Past what is fixed the tag's own buckets tell it."""
        now_s = asyncio.get_running_loop().time()
        if time_ms >= self._known.fixed_ms and (self._looked_s is None or now_s - self._looked_s > LOOK_EVERY_S):
            self._looked_s = now_s
            _, self._known = await self._read()
        if time_ms < self._known.fixed_ms:
            return self._known.start(time_ms)
        found = [row.as_tuple()[0] for row in await self._session.read(cql.TAG_BUCKET_AT, [tag, time_ms])]
        return found[0] if found else NONE_BEFORE
