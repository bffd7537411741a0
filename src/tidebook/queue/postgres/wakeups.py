"""Wake-ups on PostgreSQL: a table of sleeping processes, and one connection that listens for notifications."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

import psycopg

from tidebook.core.errors import TidebookError
from tidebook.postgres.connect import connect_options, plain_url
from tidebook.postgres.errors import from_psycopg
from tidebook.queue.port import WakeRequest
from tidebook.queue.postgres.statement_runner import StatementRunner
from tidebook.queue.postgres.statements import number_array

#: A sleeper that is silent for this long is considered dead.
SLEEPER_MS_MAX = 120_000

_PAYLOAD = re.compile(r"([0-9]{1,10})(?: ([0-9]{1,18}))?")


def parse_wake(payload: str) -> WakeRequest | None:
    """Return the request in a notification; None for one that no put sends: any user of the database may notify."""
    found = _PAYLOAD.fullmatch(payload)
    if found is None:
        return None
    queue, at = found.groups()
    return WakeRequest(int(queue), None if at is None else int(at))


class PostgresWakeups:
    """The part of the store that publishes the sleep of this process and receives the notifications of puts."""

    _url: str
    _runner: StatementRunner
    _schema: str
    _now: str
    _sleepers: set[bytes]

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        self._sleepers.add(sleeper)
        queues = sorted(until)
        await self._runner.rows(
            f"""INSERT INTO {self._schema}.wake (queue, sleeper, until, beat_at, held)
            SELECT g.queue, %s, g.until, {self._now}, g.held
            FROM unnest(%s::text::integer[], %s::text::bigint[], %s::text::boolean[]) AS g (queue, until, held)
            ON CONFLICT (queue, sleeper) DO UPDATE
                SET until = excluded.until, beat_at = excluded.beat_at, held = excluded.held
            RETURNING queue""",
            (
                sleeper.hex(),
                number_array(queues),
                number_array(until[queue][0] for queue in queues),
                number_array(until[queue][1] for queue in queues),
            ),
        )

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        await self._runner.rows(
            f"DELETE FROM {self._schema}.wake WHERE sleeper = %s AND queue = ANY (%s::text::integer[]) RETURNING queue",
            (sleeper.hex(), number_array(queues)),
        )

    async def still_asleep(self, sleeper: bytes) -> None:
        await self._runner.rows(
            f"""WITH gone AS (DELETE FROM {self._schema}.wake WHERE beat_at < {self._now} - {SLEEPER_MS_MAX})
            UPDATE {self._schema}.wake SET beat_at = {self._now} WHERE sleeper = %s RETURNING queue""",
            (sleeper.hex(),),
        )

    async def wakes(self) -> AsyncIterator[WakeRequest]:
        """Yield notifications until the connection is lost. The connection is opened on first use."""
        try:
            options = connect_options(self._url, "tidebook queue listener")
            connection = await psycopg.AsyncConnection.connect(plain_url(self._url), **options)
        except psycopg.Error as error:
            raise from_psycopg(error, writes=False) from error
        try:
            await connection.execute(f'LISTEN "{self._schema}"')
            yield WakeRequest(0, None)  # listening begins here: earlier puts must be polled for
            async for notification in connection.notifies():
                wake = parse_wake(notification.payload)
                if wake is not None:
                    yield wake
        except psycopg.Error as error:
            raise from_psycopg(error, writes=False) from error
        finally:
            await connection.close()

    async def _withdraw_sleep(self) -> None:
        for sleeper in self._sleepers:
            with suppress(TidebookError):  # the published sleep expires anyway
                sql = f"DELETE FROM {self._schema}.wake WHERE sleeper = %s RETURNING queue"
                await self._runner.rows(sql, (sleeper.hex(),))
        self._sleepers.clear()
