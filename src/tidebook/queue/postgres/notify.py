"""Wake-ups on PostgreSQL: a table of sleeping processes, and one connection that listens for notifications."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence

import psycopg

from tidebook.core.errors import TidebookError
from tidebook.postgres.connect import connect_options, plain_url
from tidebook.postgres.errors import from_psycopg
from tidebook.queue.port import WakeRequest
from tidebook.queue.postgres.arguments import boolean_array, number_array
from tidebook.queue.postgres.statement_runner import StatementRunner

#: A sleeper that is silent for this long is considered dead.
SLEEPER_MS_MAX = 120_000

_PAYLOAD = re.compile(r"([0-9]{1,10})(?: ([0-9]{1,18}))?")


def parse_wake(payload: str) -> WakeRequest | None:
    """Return the request in a notification; None if no put can have sent it, since any user may notify."""
    found = _PAYLOAD.fullmatch(payload)
    if found is None:
        return None
    queue, at = found.groups()
    return WakeRequest(int(queue), None if at is None else int(at))


class QueueNotify:
    """Publishes the sleep of this process, and receives the notifications of puts."""

    def __init__(self, url: str, runner: StatementRunner, schema: str, now: str) -> None:
        self._url = plain_url(url)
        self._runner = runner
        self._schema = schema
        self._now = now
        self._sleepers: set[bytes] = set()

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Publish until when this process sleeps. The table is unlogged, so no commit waits for a flush."""
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
                boolean_array(until[queue][1] for queue in queues),
            ),
        )

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Withdraw the published sleep."""
        await self._runner.rows(
            f"DELETE FROM {self._schema}.wake WHERE sleeper = %s AND queue = ANY (%s::text::integer[]) RETURNING queue",
            (sleeper.hex(), number_array(queues)),
        )

    async def still_asleep(self, sleeper: bytes) -> None:
        """Refresh the published sleep, and delete that of dead processes."""
        await self._runner.rows(
            f"""WITH gone AS (DELETE FROM {self._schema}.wake WHERE beat_at < {self._now} - {SLEEPER_MS_MAX})
            UPDATE {self._schema}.wake SET beat_at = {self._now} WHERE sleeper = %s RETURNING queue""",
            (sleeper.hex(),),
        )

    async def listen(self) -> AsyncIterator[WakeRequest]:
        """Yield notifications until the connection is lost. The connection is opened on first use."""
        try:
            connection = await psycopg.AsyncConnection.connect(self._url, **connect_options("tidebook queue listener"))
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

    async def close(self) -> None:
        """Withdraw all published sleep."""
        for sleeper in self._sleepers:
            try:
                await self._runner.rows(
                    f"DELETE FROM {self._schema}.wake WHERE sleeper = %s RETURNING queue", (sleeper.hex(),)
                )
            except TidebookError:  # the published sleep expires by itself
                pass
        self._sleepers.clear()
