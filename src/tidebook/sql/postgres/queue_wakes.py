"""Wake-ups on PostgreSQL: a table of who sleeps until when, and one connection that listens."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence

import psycopg

from tidebook.core.errors import TidebookError
from tidebook.sql.port.queue import Wake
from tidebook.sql.postgres.connect import connect_options, plain_url
from tidebook.sql.postgres.failures import from_psycopg
from tidebook.sql.postgres.queue_calls import Calls
from tidebook.sql.queries.queue.arguments import booleans, numbers

#: A sleeper that was not heard of for this long is taken for dead.
SLEEPER_MS_MAX = 120_000

_PAYLOAD = re.compile(r"([0-9]{1,10})(?: ([0-9]{1,18}))?")


def parse_wake(payload: str) -> Wake | None:
    """What a put said; None for what it cannot have said: any user of the database may notify on any channel."""
    found = _PAYLOAD.fullmatch(payload)
    if found is None:
        return None
    queue, at = found.groups()
    return Wake(int(queue), None if at is None else int(at))


class Wakes:
    """One listening connection a process, opened with the first who listens."""

    def __init__(self, url: str, calls: Calls, schema: str, now: str) -> None:
        self._url = plain_url(url)
        self._calls = calls
        self._schema = schema
        self._now = now
        self._sleepers: set[bytes] = set()

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Say until when it sleeps. Not logged, and so not waited for."""
        self._sleepers.add(sleeper)
        queues = sorted(until)
        await self._calls.rows(
            f"""INSERT INTO {self._schema}.wake (queue, sleeper, until, beat_at, held)
            SELECT g.queue, %s, g.until, {self._now}, g.held
            FROM unnest(%s::text::integer[], %s::text::bigint[], %s::text::boolean[]) AS g (queue, until, held)
            ON CONFLICT (queue, sleeper) DO UPDATE
                SET until = excluded.until, beat_at = excluded.beat_at, held = excluded.held
            RETURNING queue""",
            (
                sleeper.hex(),
                numbers(queues),
                numbers(until[queue][0] for queue in queues),
                booleans(until[queue][1] for queue in queues),
            ),
        )

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Take back what it said."""
        await self._calls.rows(
            f"DELETE FROM {self._schema}.wake WHERE sleeper = %s AND queue = ANY (%s::text::integer[]) RETURNING queue",
            (sleeper.hex(), numbers(queues)),
        )

    async def still_asleep(self, sleeper: bytes) -> None:
        """Refresh what it said, and forget sleepers that are dead."""
        await self._calls.rows(
            f"""WITH gone AS (DELETE FROM {self._schema}.wake WHERE beat_at < {self._now} - {SLEEPER_MS_MAX})
            UPDATE {self._schema}.wake SET beat_at = {self._now} WHERE sleeper = %s RETURNING queue""",
            (sleeper.hex(),),
        )

    async def listen(self) -> AsyncIterator[Wake]:
        """Notifications as they come, until the connection is lost."""
        try:
            connection = await psycopg.AsyncConnection.connect(self._url, **connect_options("tidebook queue listener"))
        except psycopg.Error as error:
            raise from_psycopg(error, writes=False) from error
        try:
            await connection.execute(f'LISTEN "{self._schema}"')
            yield Wake(0, None)  # it listens from here on: what was put before must be looked for
            async for notification in connection.notifies():
                wake = parse_wake(notification.payload)
                if wake is not None:
                    yield wake
        except psycopg.Error as error:
            raise from_psycopg(error, writes=False) from error
        finally:
            await connection.close()

    async def close(self) -> None:
        """Sleep no more."""
        for sleeper in self._sleepers:
            try:
                await self._calls.rows(
                    f"DELETE FROM {self._schema}.wake WHERE sleeper = %s RETURNING queue", (sleeper.hex(),)
                )
            except TidebookError:  # it is forgotten by itself after a while
                pass
        self._sleepers.clear()
